//! Which checkpoint tensors make which GGUF tensor: every one of the checkpoint's is used or known
//! to carry nothing, every one that the architecture needs is there, and all shapes are those that
//! the config implies. Nothing is read or written before the plan stands.

use std::collections::{BTreeMap, HashMap};

use super::checkpoint::{Checkpoint, HfTensor};
use super::hparams::Sizes;
use super::json::Json;
use crate::model::descriptor::{Descriptor, TensorRow, Transform};
use crate::{Error, Result};

/// One tensor of the output.
#[derive(Debug)]
pub struct Planned {
    pub name: String,
    /// In GGUF's order: row length first.
    pub dims: Vec<u64>,
    pub source: Source,
}

#[derive(Debug)]
pub enum Source {
    /// The values of these, one after the other: one tensor, or a stack of experts.
    Tensors(Vec<HfTensor>),
    /// As `Tensors`, with rows of each head reordered from (i, i + d/2) to (2i, 2i + 1) pairs.
    RopePairs { tensor: HfTensor, head_dim: u64 },
    /// Computed values.
    Values(Vec<f32>),
}

/// The GGUF tensor that a row makes, with what goes into it.
struct Group<'a> {
    row: &'a TensorRow,
    /// By expert; one entry under 0 where there are none.
    tensors: BTreeMap<u64, &'a HfTensor>,
}

pub struct Planner<'a> {
    pub config: &'a Json,
    pub descriptor: &'a Descriptor,
    pub sizes: &'a Sizes,
    pub checkpoint: &'a Checkpoint,
}

impl Planner<'_> {
    /// All tensors in the order of the file: the embedding, layer by layer, the output.
    pub fn plan(&self, rope_factors: Option<Vec<f32>>) -> Result<Vec<Planned>> {
        let rows = self.descriptor.tensor_rows();
        let mut groups = self.groups(&rows)?;
        let mut planned = Vec::new();
        self.take(&mut groups, "token_embd", 0, &mut planned)?;
        if let Some(values) = rope_factors {
            let (name, _) = self.descriptor.tensor_name("rope_freqs", 0).ok_or_else(|| {
                let expected = format!("no frequency factors for {}", self.descriptor.architecture);
                self.config.fail("rope_type", expected, "llama3")
            })?;
            planned.push(Planned {
                name,
                dims: vec![values.len() as u64],
                source: Source::Values(values),
            });
        }
        let (layered, global): (Vec<_>, Vec<_>) =
            self.descriptor.tensors.iter().partition(|(_, pattern)| pattern.contains("{layer}"));
        for layer in 0..self.sizes.n_layers as usize {
            self.check_feed_forward(&groups, layer)?;
            for (role, _) in &layered {
                self.take(&mut groups, role, layer, &mut planned)?;
            }
        }
        for (role, _) in global.iter().filter(|(role, _)| *role != "token_embd") {
            self.take(&mut groups, role, 0, &mut planned)?;
        }
        self.check_all_taken(&groups)?;
        Ok(planned)
    }

    fn tied(&self) -> Result<bool> {
        Ok(self.config.bool("tie_word_embeddings")?.unwrap_or(false))
    }

    /// The checkpoint's tensors by the GGUF tensor they go into.
    fn groups<'a>(&'a self, rows: &'a [TensorRow]) -> Result<HashMap<String, Group<'a>>> {
        let mut groups: HashMap<String, Group<'a>> = HashMap::new();
        let ignored = &self.descriptor.convert.ignore;
        for tensor in self.checkpoint.tensors() {
            if ignored.iter().any(|end| tensor.name.ends_with(end)) {
                continue;
            }
            let found = rows.iter().find_map(|row| Some((row, matched(&row.hf, &tensor.name)?)));
            let Some((row, at)) = found else {
                let expected = format!("a tensor that {} has", self.descriptor.architecture);
                return Err(self.fail(tensor, "name", expected, "one that no row takes"));
            };
            let name = row.gguf.replace("{layer}", &at.layer.unwrap_or(0).to_string());
            let group =
                groups.entry(name).or_insert_with(|| Group { row, tensors: BTreeMap::new() });
            if group.tensors.insert(at.expert.unwrap_or(0), tensor).is_some() {
                let expected = format!("one tensor for {}", row.gguf);
                return Err(self.fail(tensor, "name", expected, "two"));
            }
        }
        Ok(groups)
    }

    /// Moves the tensor of a role from the groups to the plan. A tied `output` is left out even if
    /// the checkpoint repeats it.
    fn take(
        &self,
        groups: &mut HashMap<String, Group<'_>>,
        role: &str,
        layer: usize,
        planned: &mut Vec<Planned>,
    ) -> Result<()> {
        let Some((name, optional)) = self.descriptor.tensor_name(role, layer) else {
            return Ok(());
        };
        let Some(group) = groups.remove(&name) else {
            let needed = !optional || (role == "output" && !self.tied()?);
            return if needed { Err(self.missing(&name, layer)) } else { Ok(()) };
        };
        if role == "output" && self.tied()? {
            return Ok(());
        }
        planned.push(self.planned(role, name, group)?);
        Ok(())
    }

    fn planned(&self, role: &str, name: String, group: Group<'_>) -> Result<Planned> {
        let Some(mut dims) = self.sizes.shape(role) else {
            let tensor = group.tensors.values().next().map_or("", |t| t.name.as_str());
            return Err(self.config.fail(tensor, format!("no {role} in a checkpoint"), "one"));
        };
        let stacked = group.row.hf.contains("{expert}");
        // A stack's own dimension is not in its parts.
        let part = if stacked { dims[1..].to_vec() } else { dims.clone() };
        if stacked {
            self.check_experts(&name, &group)?;
        }
        for tensor in group.tensors.values() {
            self.check_tensor(tensor, &part, group.row.transform)?;
        }
        dims.reverse();
        let mut tensors: Vec<HfTensor> = group.tensors.into_values().cloned().collect();
        let source = match group.row.transform {
            Transform::RopePairs if tensors.len() == 1 => Source::RopePairs {
                tensor: tensors.remove(0),
                head_dim: self.head_rows(group.row, &part)?,
            },
            _ => Source::Tensors(tensors),
        };
        Ok(Planned { name, dims, source })
    }

    fn check_tensor(&self, tensor: &HfTensor, part: &[u64], transform: Transform) -> Result<()> {
        let mut shape = tensor.shape.clone();
        if transform == Transform::Squeeze {
            shape.retain(|d| *d != 1);
        }
        if shape != part {
            let (expected, got) = (format!("{part:?}"), format!("{:?}", tensor.shape));
            return Err(self.fail(tensor, "shape", expected, got));
        }
        if tensor.float_type().is_none() {
            return Err(self.checkpoint.bad_type(tensor));
        }
        Ok(())
    }

    fn check_experts(&self, name: &str, group: &Group<'_>) -> Result<()> {
        let n = self.sizes.experts;
        let missing = (0..n).find(|e| !group.tensors.contains_key(e));
        if let Some(e) = missing {
            let (expected, got) = (format!("experts 0 to {}", n - 1), format!("no expert {e}"));
            return Err(Error::format(self.checkpoint.folder(), name, expected, got));
        }
        match group.tensors.iter().find(|(e, _)| **e >= n) {
            Some((_, tensor)) => {
                let expected = format!("one of {n} experts, as the config says");
                Err(self.fail(tensor, "name", expected, "one beyond"))
            }
            None => Ok(()),
        }
    }

    /// Rows of one head: the rows divided by the heads that the config counts.
    fn head_rows(&self, row: &TensorRow, part: &[u64]) -> Result<u64> {
        let heads = match row.heads.as_deref() {
            // A config without the number of key and value heads has as many as query heads.
            Some("num_key_value_heads") => self.sizes.heads_kv,
            Some(field) => self.config.require_count(field)?,
            None => 0,
        };
        match part[0].checked_div(heads) {
            Some(rows) if rows % 2 == 0 && rows * heads == part[0] => Ok(rows),
            _ => {
                let expected = format!("a number of heads that halves {} rows each", part[0]);
                let field = row.heads.as_deref().unwrap_or("heads");
                Err(self.config.fail(field, expected, heads.to_string()))
            }
        }
    }

    /// A layer is dense or routes to experts: one set of tensors must be whole.
    fn check_feed_forward(&self, groups: &HashMap<String, Group<'_>>, layer: usize) -> Result<()> {
        let name = |role: &str| self.descriptor.tensor_name(role, layer).map(|(name, _)| name);
        let routed =
            ["ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"].map(name).to_vec();
        let shared =
            ["ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"].map(name);
        let dense = ["ffn_gate", "ffn_up", "ffn_down"].map(name).to_vec();
        let is_routed = routed.iter().flatten().any(|name| groups.contains_key(name));
        let needed = if is_routed { [routed, shared.to_vec()].concat() } else { dense };
        match needed.into_iter().flatten().find(|name| !groups.contains_key(name)) {
            Some(name) => Err(self.missing(&name, layer)),
            None => Ok(()),
        }
    }

    fn check_all_taken(&self, groups: &HashMap<String, Group<'_>>) -> Result<()> {
        let left = groups.values().filter_map(|g| g.tensors.values().next());
        match left.min_by(|a, b| a.name.cmp(&b.name)) {
            Some(tensor) => {
                let expected = format!("a tensor of layers 0 to {}", self.sizes.n_layers - 1);
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

    fn missing(&self, name: &str, layer: usize) -> Error {
        let rows = self.descriptor.tensor_rows();
        let layer = layer.to_string();
        let hf = rows.iter().find(|row| row.gguf.replace("{layer}", &layer) == name);
        let hf = hf.map_or_else(String::new, |row| row.hf.replace("{layer}", &layer));
        Error::format(self.checkpoint.folder(), name, format!("tensor {hf}"), "none of that name")
    }
}

/// Where a name fits a pattern.
#[derive(Debug, Default, PartialEq, Eq)]
struct At {
    layer: Option<u64>,
    expert: Option<u64>,
}

/// Compares part by part between dots; `{layer}` and `{expert}` stand for a number.
fn matched(pattern: &str, name: &str) -> Option<At> {
    let mut at = At::default();
    let (mut parts, mut found) = (pattern.split('.'), name.split('.'));
    loop {
        match (parts.next(), found.next()) {
            (None, None) => return Some(at),
            (Some("{layer}"), Some(n)) => at.layer = Some(number(n)?),
            (Some("{expert}"), Some(n)) => at.expert = Some(number(n)?),
            (Some(a), Some(b)) if a == b => {}
            _ => return None,
        }
    }
}

/// A number as checkpoints write it: `07` would be another tensor's name.
fn number(text: &str) -> Option<u64> {
    let n: u64 = text.parse().ok()?;
    (n.to_string() == text).then_some(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names_only() {
        let pattern = "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight";
        let at = matched(pattern, "model.layers.3.mlp.experts.12.up_proj.weight");
        assert_eq!(at, Some(At { layer: Some(3), expert: Some(12) }));
        for name in [
            "model.layers.03.mlp.experts.12.up_proj.weight",
            "model.layers.3.mlp.experts.12.up_proj",
            "model.layers.3.mlp.experts.12.up_proj.weight.x",
            "model.layers.-3.mlp.experts.12.up_proj.weight",
            "model.layers.x.mlp.experts.12.up_proj.weight",
        ] {
            assert_eq!(matched(pattern, name), None, "{name}");
        }
        assert_eq!(matched("lm_head.weight", "lm_head.weight"), Some(At::default()));
    }
}
