//! Which checkpoint tensors make which GGUF tensor: every one of the checkpoint's is used or known
//! to carry nothing, every one that the architecture needs is there, and all shapes are those that
//! the config implies. Nothing is read or written before the plan stands.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::Value;

use super::checkpoint::{Checkpoint, HfTensor};
use super::encoding::Encoding;
use super::hparams::{Sizes, first_count};
use super::json::Json;
use super::names::{At, matched};
use super::steps::{Map, Steps};
use super::view::Walk;
use crate::gguf::TensorType;
use crate::model::descriptor::{Descriptor, Kind, TensorRow};
use crate::{Error, Result};

/// One tensor of the output.
#[derive(Clone, Debug)]
pub struct Planned {
    pub name: String,
    /// In GGUF's order: row length first.
    pub dims: Vec<u64>,
    pub source: Source,
}

#[derive(Clone, Debug)]
pub enum Source {
    /// One behind the other.
    Pieces(Vec<Piece>),
    /// Computed values.
    Values(Vec<f32>),
}

/// Elements of one checkpoint tensor in the output's order.
#[derive(Clone, Debug)]
pub struct Piece {
    pub tensor: HfTensor,
    pub walk: Walk,
    pub len: u64,
    pub maps: Vec<Map>,
}

impl Planned {
    /// The float types that hold the values of its pieces.
    pub fn float_types(&self) -> Vec<TensorType> {
        match &self.source {
            Source::Pieces(pieces) => pieces
                .iter()
                .filter_map(|p| Some(p.tensor.encoding.as_ref()?.float_type()))
                .collect(),
            Source::Values(_) => vec![TensorType::F32],
        }
    }

    /// The checkpoint's tensor, if it is made of one.
    fn only_tensor(&self) -> Option<&HfTensor> {
        match &self.source {
            Source::Pieces(pieces) => match &pieces[..] {
                [piece] => Some(&piece.tensor),
                _ => None,
            },
            Source::Values(_) => None,
        }
    }

    /// Whether it is a table of integers.
    pub fn is_integers(&self) -> bool {
        let is_integer = |p: &Piece| matches!(p.tensor.encoding, Some(Encoding::Integer { .. }));
        matches!(&self.source, Source::Pieces(pieces) if pieces.iter().all(is_integer))
    }
}

/// The GGUF tensor that rows make, with what goes into it: by part and expert, 0 where there are
/// none.
type Group<'a> = BTreeMap<(u64, u64), (&'a TensorRow, &'a HfTensor)>;
type Groups<'a> = HashMap<String, Group<'a>>;

/// The rows of one target, each with whether a checkpoint of this config has it.
type Wanted<'a> = Vec<(&'a TensorRow, bool)>;

/// The layers of the kinds that only some layers are of: by what counts them, as an encoder's and
/// a decoder's layers are told apart, and number.
pub struct Kinds {
    n_layers: u64,
    moe: BTreeSet<(String, u64)>,
    recurrent: BTreeSet<(String, u64)>,
}

impl Kinds {
    /// Whether a layer is of the kind that a row is for.
    pub fn has(&self, layer: u64, row: &TensorRow) -> bool {
        if row.kind == Kind::Next {
            return layer >= self.n_layers;
        }
        let layer = (row.layers.clone(), layer);
        match row.kind {
            Kind::All => true,
            Kind::Moe => self.moe.contains(&layer),
            Kind::Dense => !self.moe.contains(&layer),
            Kind::Recurrent => self.recurrent.contains(&layer),
            Kind::Attention | Kind::Next => !self.recurrent.contains(&layer),
        }
    }
}

pub struct Planner<'a> {
    pub config: &'a Json,
    pub descriptor: &'a Descriptor,
    pub sizes: &'a Sizes,
    pub checkpoint: &'a Checkpoint,
    /// Layers behind the last that are kept.
    pub n_extra: u64,
}

impl Planner<'_> {
    /// All tensors in the order of the file: the embedding, what was `computed`, layer by layer,
    /// the output.
    pub fn plan(&self, computed: Vec<Planned>) -> Result<Vec<Planned>> {
        let rows = self.rows()?;
        let kinds = self.kinds(&rows);
        let mut groups = self.groups(&rows, &kinds)?;
        let wanted = self.wanted(&rows)?;
        let (layered, global): (Vec<_>, Vec<_>) =
            wanted.iter().partition(|(name, _)| name.contains("{layer}"));
        let first = |name: &str| name.starts_with("token_embd");
        let mut planned = Vec::new();
        for (name, wanted) in global.iter().filter(|(name, _)| first(name)) {
            self.take(&mut groups, name, wanted, &mut planned)?;
        }
        planned.extend(computed);
        for layer in 0..self.deepest(&rows)? {
            self.take_layer(&mut groups, &layered, (layer, &kinds), &mut planned)?;
        }
        for (name, wanted) in global.iter().filter(|(name, _)| !first(name)) {
            self.take(&mut groups, name, wanted, &mut planned)?;
        }
        Ok(planned)
    }

    /// The descriptor's rows for this checkpoint: experts that lie in one tensor are transposed in
    /// some, which a shape tells, or the version that wrote the checkpoint.
    fn rows(&self) -> Result<Vec<TensorRow>> {
        let mut rows = self.descriptor.tensor_rows();
        let mut seen = [false; 2];
        let mut some = None;
        for tensor in self.checkpoint.tensors().filter(|t| t.name.contains(".experts.")) {
            let name = self.plain_name(&tensor.name);
            let mut fits = [false; 2];
            for row in rows.iter().filter(|row| matched(&row.hf, &name).is_some()) {
                let Some(transposed) = row.transposed else { continue };
                let shape = self.sizes.list(self.config, &row.shape)?;
                fits[usize::from(transposed)] |= shape.as_ref() == Some(&tensor.shape);
                some = Some(tensor);
            }
            match fits {
                [true, false] => seen[0] = true,
                [false, true] => seen[1] = true,
                _ => {}
            }
        }
        let transposed = match (seen, some) {
            ([false, true], _) => true,
            ([false, false], Some(tensor)) if self.descriptor.convert.transposed_before > 0 => {
                let version = self.config.at_top("transformers_version").and_then(Value::as_str);
                let major = version.and_then(|v| v.split('.').next()?.parse::<u64>().ok());
                let major = major.ok_or_else(|| {
                    let expected = "a version, as the shape does not tell whether it is transposed";
                    let got = format!("{:?}, and no transformers_version", tensor.shape);
                    self.fail(tensor, "shape", expected.into(), got)
                })?;
                major < self.descriptor.convert.transposed_before
            }
            _ => false,
        };
        rows.retain(|row| row.transposed.is_none_or(|of| of == transposed));
        Ok(rows)
    }

    fn take_layer(
        &self,
        groups: &mut Groups<'_>,
        layered: &[(&String, &Wanted<'_>)],
        (layer, kinds): (u64, &Kinds),
        planned: &mut Vec<Planned>,
    ) -> Result<()> {
        for (pattern, wanted) in layered {
            let mut here = Wanted::new();
            for (row, expected) in wanted.iter() {
                if kinds.has(layer, row) && layer < self.layers(row)? {
                    here.push((row, *expected));
                }
            }
            let name = pattern.replace("{layer}", &layer.to_string());
            self.take(groups, &name, &here, planned)?;
        }
        Ok(())
    }

    /// Which layers route, and which are recurrent: those with a tensor that no others have.
    pub fn kinds(&self, rows: &[TensorRow]) -> Kinds {
        let layers_of = |kind: Kind| {
            let only = |row: &&TensorRow| {
                rows.iter().filter(|other| other.hf == row.hf).all(|other| other.kind == kind)
            };
            let only: Vec<&TensorRow> = rows.iter().filter(only).collect();
            let layer = |tensor: &HfTensor| {
                let name = self.plain_name(&tensor.name);
                only.iter()
                    .find_map(|row| Some((row.layers.clone(), matched(&row.hf, &name)?.layer?)))
            };
            self.checkpoint.tensors().filter_map(layer).collect()
        };
        let n_layers = self.sizes.n_layers;
        Kinds { n_layers, moe: layers_of(Kind::Moe), recurrent: layers_of(Kind::Recurrent) }
    }

    /// Layers behind the last that have what predicts further tokens.
    pub fn count_extra(&self) -> u64 {
        let rows = self.descriptor.tensor_rows();
        let of_next: Vec<_> = rows.iter().filter(|row| row.kind == Kind::Next).collect();
        let layer = |tensor: &HfTensor| {
            let name = self.plain_name(&tensor.name);
            of_next.iter().find_map(|row| matched(&row.hf, &name)?.layer)
        };
        let last = self.checkpoint.tensors().filter_map(layer).max();
        last.map_or(0, |last| (last + 1).saturating_sub(self.sizes.n_layers))
    }

    /// Whether the output is the embedding: the checkpoint has none of its own, or one that says
    /// the same. Of a config that says so and a checkpoint that does not, transformers takes the
    /// checkpoint's word.
    fn is_tied(&self, output: &Group<'_>, embedding: Option<&HfTensor>) -> Result<bool> {
        if !self.config.any_bool("tie_word_embeddings") && !self.descriptor.convert.tied {
            return Ok(false);
        }
        let (Some(embedding), [(_, own)]) = (embedding, &output.values().collect::<Vec<_>>()[..])
        else {
            return Ok(false);
        };
        self.checkpoint.is_same(embedding, own)
    }

    /// The layers that `{layer}` of a row counts.
    fn layers(&self, row: &TensorRow) -> Result<u64> {
        let extra = if row.layers == "layers" { self.n_extra } else { 0 };
        let n = self.sizes.get(&row.layers).map(|n| n + extra);
        n.ok_or_else(|| self.config.fail(&row.layers, "a number of layers", "nothing"))
    }

    fn deepest(&self, rows: &[TensorRow]) -> Result<u64> {
        let layered = rows.iter().filter(|row| row.gguf.contains("{layer}"));
        let counts: Result<Vec<u64>> = layered.map(|row| self.layers(row)).collect();
        Ok(counts?.into_iter().max().unwrap_or(0))
    }

    /// The sources of each target, by its name or pattern.
    fn wanted<'a>(&self, rows: &'a [TensorRow]) -> Result<BTreeMap<String, Wanted<'a>>> {
        let mut all: BTreeMap<String, Wanted<'a>> = BTreeMap::new();
        for row in rows {
            let expected = self.is_known(row)? && !row.optional;
            all.entry(row.gguf.clone()).or_default().push((row, expected));
        }
        Ok(all)
    }

    /// Whether the config has the sizes of a row.
    fn is_known(&self, row: &TensorRow) -> Result<bool> {
        let excluded = row.unless.as_ref().is_some_and(|size| self.sizes.get(size).is_some());
        Ok(!excluded && self.sizes.list(self.config, &row.shape)?.is_some())
    }

    /// The checkpoint's tensors by the GGUF tensor they go into.
    fn groups<'a>(&'a self, rows: &'a [TensorRow], kinds: &Kinds) -> Result<Groups<'a>> {
        let mut groups: Groups<'a> = HashMap::new();
        for tensor in self.checkpoint.tensors() {
            let name = self.plain_name(&tensor.name);
            if self.is_ignored(&name) || self.is_extra(rows, &name)? {
                continue;
            }
            let found = rows.iter().filter_map(|row| Some((row, matched(&row.hf, &name)?)));
            let found: Vec<(&TensorRow, At)> = found.collect();
            if found.is_empty() {
                let expected = format!("a tensor that {} has", self.descriptor.architecture);
                return Err(self.fail(tensor, "name", expected, "one that no row takes"));
            }
            let (row, at) = &found[0];
            let fault = match row.kind {
                Kind::Recurrent | Kind::Attention => "no attention beside a recurrent state",
                _ => "no dense network beside routed experts",
            };
            let (layer, fault) = (at.layer.unwrap_or(0), fault.to_owned());
            let fitting = found.into_iter().filter(|(row, _)| kinds.has(layer, row));
            let fitting: Vec<_> = fitting.collect();
            if fitting.is_empty() {
                return Err(self.fail(tensor, "name", fault, "one"));
            }
            for (row, at) in fitting {
                self.group(&mut groups, row, &at, tensor)?;
            }
        }
        Ok(groups)
    }

    fn group<'a>(
        &self,
        groups: &mut Groups<'a>,
        row: &'a TensorRow,
        at: &At,
        tensor: &'a HfTensor,
    ) -> Result<()> {
        let layer = at.layer.unwrap_or(0);
        if row.hf.contains("{layer}") && layer >= self.layers(row)? {
            let expected = format!("a tensor of layers 0 to {}", self.layers(row)? - 1);
            return Err(self.fail(tensor, "name", expected, "one beyond"));
        }
        let group = groups.entry(row.gguf.replace("{layer}", &layer.to_string())).or_default();
        if group.insert((row.part, at.expert.unwrap_or(0)), (row, tensor)).is_some() {
            let expected = format!("one tensor for {}", row.gguf);
            return Err(self.fail(tensor, "name", expected, "two"));
        }
        Ok(())
    }

    /// A checkpoint's name without the beginnings that say nothing.
    pub fn plain_name(&self, name: &str) -> String {
        // The longest first: of two that fit, it is the later one.
        let mut prefixes = self.descriptor.convert.prefixes.iter().rev();
        let found = prefixes.find_map(|(from, to)| Some((to, name.strip_prefix(from.as_str())?)));
        let name = found.map_or_else(|| name.to_owned(), |(to, rest)| format!("{to}{rest}"));
        let name = self.extra_name(&name).unwrap_or(name);
        self.renamed(&name).unwrap_or(name)
    }

    /// The older name of a tensor of a layer.
    fn renamed(&self, name: &str) -> Option<String> {
        const LAYERS: &str = "model.layers.";
        let (layer, rest) = name.strip_prefix(LAYERS)?.split_once('.')?;
        // The longest first, as above.
        let mut table = self.descriptor.convert.renamed.iter().rev();
        let (to, rest) =
            table.find_map(|(from, to)| Some((to, rest.strip_prefix(from.as_str())?)))?;
        Some(format!("{LAYERS}{layer}.{to}{rest}"))
    }

    /// The name as that of a numbered layer's tensor, if it is one of a layer behind the last.
    fn extra_name(&self, name: &str) -> Option<String> {
        let rest = name.strip_prefix(self.descriptor.convert.extra_under.as_deref()?)?;
        let numbered = rest.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
        let (number, rest) = match numbered {
            Some((number, rest)) => (number.parse::<u64>().ok()?, rest),
            None => (0, rest),
        };
        let layer = self.sizes.n_layers.checked_add(number)?;
        Some(format!("model.layers.{layer}.{rest}"))
    }

    fn is_ignored(&self, name: &str) -> bool {
        let convert = &self.descriptor.convert;
        convert.ignore.iter().any(|end| name.ends_with(end))
            || convert.ignore_under.iter().any(|start| name.starts_with(start))
    }

    /// Whether a tensor is of a layer behind the last that the model can do without.
    fn is_extra(&self, rows: &[TensorRow], name: &str) -> Result<bool> {
        let extra = first_count(self.config, &self.descriptor.convert.extra_layers)?;
        let Some((_, extra)) = extra else { return Ok(false) };
        let beyond = |row: &TensorRow| {
            let (before, _) = row.hf.split_once("{layer}")?;
            let layer: u64 = name.strip_prefix(before)?.split('.').next()?.parse().ok()?;
            let n = self.sizes.get(&row.layers)?;
            Some((n + self.n_extra..n + extra).contains(&layer))
        };
        Ok(rows.iter().any(|row| beyond(row) == Some(true)))
    }

    /// Moves a tensor from the groups to the plan. A tied `output` is left out, or the embedding
    /// again in files of an architecture that must have one.
    fn take(
        &self,
        groups: &mut Groups<'_>,
        name: &str,
        wanted: &Wanted<'_>,
        planned: &mut Vec<Planned>,
    ) -> Result<()> {
        let output = self.descriptor.tensor_name("output", 0);
        let output = output.filter(|(output, _)| output == name);
        let embedding = planned.iter().find(|t| t.name.starts_with("token_embd.weight"));
        match groups.remove(name) {
            Some(group) => {
                let embedding = embedding.and_then(Planned::only_tensor);
                if output.is_none() || !self.is_tied(&group, embedding)? {
                    planned.push(self.planned(name, &group)?);
                }
                Ok(())
            }
            None if output.is_some() && embedding.is_some() => {
                if let Some((_, false)) = output {
                    let embedding = embedding.expect("it is there");
                    planned.push(Planned { name: name.into(), ..embedding.clone() });
                }
                Ok(())
            }
            None if let Some((row, _)) = wanted.iter().find(|(row, _)| row.zeros) => {
                if let Some(mut dims) = self.sizes.list(self.config, &row.shape)? {
                    dims.reverse();
                    let values = vec![0.0; dims.iter().product::<u64>() as usize];
                    planned.push(Planned {
                        name: name.into(),
                        dims,
                        source: Source::Values(values),
                    });
                }
                Ok(())
            }
            None if wanted.iter().any(|(_, expected)| *expected) => Err(self.missing(name, wanted)),
            None => Ok(()),
        }
    }

    fn planned(&self, name: &str, group: &Group<'_>) -> Result<Planned> {
        let stacked = group.values().any(|(row, _)| row.hf.contains("{expert}"));
        if stacked {
            self.check_experts(name, group)?;
        }
        let (mut pieces, mut dims): (_, Vec<u64>) = (Vec::new(), Vec::new());
        for (row, tensor) in group.values() {
            let (shape, piece) = self.piece(row, tensor)?;
            if dims.is_empty() {
                dims = shape;
            } else if dims.len() != shape.len() || dims[1..] != shape[1..] {
                let expected = format!("rows as before it: {dims:?}");
                return Err(self.fail(tensor, "shape", expected, format!("{shape:?}")));
            } else if !stacked {
                dims[0] += shape[0];
            }
            pieces.push(piece);
        }
        if stacked {
            dims.insert(0, pieces.len() as u64);
        }
        dims.reverse();
        Ok(Planned { name: name.into(), dims, source: Source::Pieces(pieces) })
    }

    /// The piece that a row makes of its tensor, with its shape (row length last).
    pub fn piece(&self, row: &TensorRow, tensor: &HfTensor) -> Result<(Vec<u64>, Piece)> {
        let layer = matched(&row.hf, &self.plain_name(&tensor.name)).and_then(|at| at.layer);
        let sizes = self.sizes.of_layer(layer.unwrap_or(0));
        let shape = sizes.list(self.config, &row.shape)?;
        let Some(shape) = shape.filter(|_| self.is_known(row).unwrap_or(false)) else {
            let absent = self.fields(row, |size| self.sizes.get(size).is_none());
            let expected = format!("no such tensor, as {} is 0 or absent", absent.join(" or "));
            return Err(self.fail(tensor, "name", expected, "one"));
        };
        if tensor.shape != shape {
            let expected = format!("{shape:?}, by {}", self.fields(row, |_| true).join(", "));
            return Err(self.fail(tensor, "shape", expected, format!("{:?}", tensor.shape)));
        }
        let is_integer = matches!(tensor.encoding, Some(Encoding::Integer { .. }));
        match row.integers {
            true if !is_integer => return Err(self.checkpoint.bad_dtype(tensor, "I32 or I64")),
            false if is_integer => return Err(self.checkpoint.bad_type(tensor)),
            _ if tensor.encoding.is_none() => return Err(self.checkpoint.bad_type(tensor)),
            _ => {}
        }
        let mut steps = Steps::of(&shape);
        for step in &row.steps {
            steps.apply(step, &sizes, self.config)?.ok_or_else(|| {
                let expected = format!("a shape that {step:?} fits");
                self.fail(tensor, "shape", expected, format!("{:?}", steps.view.shape()))
            })?;
        }
        let walk = steps.view.walk();
        let piece = Piece { tensor: tensor.clone(), walk, len: steps.view.len(), maps: steps.maps };
        let shape = steps.view.shape();
        Ok((if shape.is_empty() { vec![1] } else { shape }, piece))
    }

    /// The config's fields that some sizes in a row's shape come from.
    fn fields(&self, row: &TensorRow, counts: impl Fn(&str) -> bool) -> Vec<String> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let names = row.shape.split(|c| !is_part(c)).filter(|name| counts(name));
        let sizes = &self.descriptor.convert.sizes;
        let found = names.filter_map(|name| sizes.get(name)).map(|texts| {
            let there = texts.iter().find(|text| self.config.at(text).is_some());
            there.cloned().unwrap_or_else(|| texts.join(" or "))
        });
        found.collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn check_experts(&self, name: &str, group: &Group<'_>) -> Result<()> {
        let counted = group.values().next().and_then(|(row, _)| self.sizes.get(&row.experts));
        let n = counted.unwrap_or(0);
        let missing = (0..n).find(|e| !group.contains_key(&(0, *e)));
        if let Some(e) = missing {
            let (expected, got) = (format!("experts 0 to {}", n - 1), format!("no expert {e}"));
            return Err(Error::format(self.checkpoint.folder(), name, expected, got));
        }
        match group.iter().find(|((_, e), _)| *e >= n) {
            Some((_, (_, tensor))) => {
                let expected = format!("one of {n} experts, as the config says");
                Err(self.fail(tensor, "name", expected, "one beyond"))
            }
            None => Ok(()),
        }
    }

    fn fail(
        &self,
        tensor: &HfTensor,
        part: &str,
        expected: String,
        got: impl Into<String>,
    ) -> Error {
        let field = format!("tensor {}: {part}", tensor.name);
        Error::format(self.checkpoint.path_of(tensor), field, expected, got)
    }

    fn missing(&self, name: &str, wanted: &Wanted<'_>) -> Error {
        let expected = wanted.iter().filter(|(_, expected)| *expected);
        let hf = expected.map(|(row, _)| {
            let layer = matched(&row.gguf, name).and_then(|at| at.layer).unwrap_or(0);
            row.hf.replace("{layer}", &layer.to_string())
        });
        let hf: Vec<String> = hf.collect();
        let expected = format!("tensor {}", hf.join(" or "));
        Error::format(self.checkpoint.folder(), name, expected, "none of that name")
    }
}
