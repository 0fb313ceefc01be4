//! LoRA adapters as peft saves them: merged into the tensors that a conversion writes, or written
//! as a GGUF adapter of their own.
//!
//! An adapter's product is a tensor of the checkpoint that is never stored: its name and shape find
//! the rows of the descriptor, whose steps say where in a GGUF tensor each of its elements goes. So
//! an adapter of stacked experts fits a checkpoint of single ones, and the reverse. A merged
//! tensor is read, changed and written in the chunks that an unchanged one is; memory holds the
//! factors of the tensor that is being written.

mod adapter;
mod gguf;
mod product;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use rayon::prelude::*;

use super::checkpoint::{Checkpoint, HfTensor};
use super::encoding::Encoding;
use super::names::matched;
use super::plan::{Kinds, Piece, Planned, Planner, Source};
use super::steps::Map;
use crate::gguf::{TensorType, Writer};
use crate::model::descriptor::TensorRow;
use crate::{Error, Result};

use adapter::{Adapter, Target, TargetKind, fail};
use product::{Factor, Loaded, Product};

/// How names of transformers' modules differ from those of checkpoints, which peft does not use.
const RENAMED: &[(&str, &str)] = &[
    (".mlp.", ".block_sparse_moe."),
    (".mlp.router.", ".block_sparse_moe.gate."),
    (".mlp.gate.", ".mlp.router.gate."),
    (".mlp.shared_experts.", ".mlp.shared_mlp."),
    (".mlp.shared_experts.", ".mlp.shared_expert."),
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
];

/// The architecture whose stacks are inputs by outputs without saying so to peft, which therefore
/// takes the outputs for inputs.
const UNMARKED: &str = "llama4";

/// The adapters of a conversion.
#[derive(Debug, Default)]
pub struct Adapters(Vec<Adapter>);

/// The changes that adapters make, by GGUF tensor.
#[derive(Debug, Default)]
pub struct Changes(BTreeMap<String, Vec<Change>>);

/// A change of the elements of a GGUF tensor from `start` on.
#[derive(Debug)]
pub struct Change {
    start: u64,
    /// The changing tensor's elements in the order of the GGUF tensor.
    piece: Piece,
    kind: ChangeKind,
}

#[derive(Debug)]
enum ChangeKind {
    /// The piece's own values take the place of others.
    Replace,
    Add(Box<Product>),
    /// Rows of the sum get these lengths.
    Lengths(Box<Lengths>),
}

/// The lengths of the rows of `weight` with the product added (DoRA, arXiv 2402.09353).
#[derive(Debug)]
struct Lengths {
    weight: HfTensor,
    product: Product,
    /// [rows]
    lengths: HfTensor,
}

impl Adapters {
    /// Reads folders of adapters; the files of their tensors become shards of the checkpoint.
    pub fn open(folders: &[PathBuf], checkpoint: &mut Checkpoint) -> Result<Adapters> {
        let all: Result<Vec<_>> = folders.iter().map(|f| Adapter::open(f, checkpoint)).collect();
        let all = all?;
        for adapter in all.iter().filter(|_| all.len() > 1) {
            if adapter.config.bool("use_dora")? == Some(true) {
                let expected = "false beside other adapters, whose order would matter";
                return Err(adapter.config.fail("use_dora", expected, "true"));
            }
        }
        Ok(Adapters(all))
    }

    /// Writes the one adapter there is as a file of its own. `planned` is changed as `plan` says.
    ///
    /// # Errors
    ///
    /// A change that no pair of factors is, by the name of its tensor.
    pub fn write(
        &self,
        writer: &mut Writer,
        planner: &Planner<'_>,
        mut planned: Vec<Planned>,
        ty: TensorType,
    ) -> Result<(usize, u64)> {
        let [adapter] = &self.0[..] else {
            return Err(Error::Usage("--lora-only takes one --lora".into()));
        };
        let n = planned.len();
        let changes = self.plan(planner, &mut planned)?;
        if planned.len() > n {
            return Err(gguf::not_alone(planner.config));
        }
        gguf::write(writer, planner.checkpoint, &adapter.config, &planned, &changes, ty)
    }

    /// The changes of the planned tensors. An output that is the embedding becomes a tensor of
    /// its own if one of the two changes.
    ///
    /// # Errors
    ///
    /// A tensor of an adapter that fits none of the plan.
    pub fn plan(&self, planner: &Planner<'_>, planned: &mut Vec<Planned>) -> Result<Changes> {
        let mut changes = Changes::default();
        if self.0.is_empty() {
            return Ok(changes);
        }
        // Stacks of experts as modules have them, whatever checkpoints have.
        let mut rows = planner.descriptor.tensor_rows();
        rows.retain(|row| row.transposed != Some(true));
        let kinds = planner.kinds(&rows);
        let mut merge =
            Merge { planner, rows: &rows, kinds: &kinds, planned, changes: &mut changes };
        for adapter in &self.0 {
            for tensor in &adapter.saved {
                merge.replace(tensor)?;
            }
        }
        for adapter in &self.0 {
            for target in &adapter.targets {
                merge.add(target)?;
            }
        }
        merge.separate_output(&self.0)?;
        Ok(changes)
    }
}

/// A plan on its way to being changed.
struct Merge<'a> {
    planner: &'a Planner<'a>,
    rows: &'a [TensorRow],
    kinds: &'a Kinds,
    planned: &'a mut Vec<Planned>,
    changes: &'a mut Changes,
}

impl Merge<'_> {
    fn replace(&mut self, tensor: &HfTensor) -> Result<()> {
        for (row, tensor) in self.found(tensor)? {
            let (_, piece) = self.planner.piece(&row, &tensor)?;
            let place = self.place(&row, &tensor, &piece)?;
            let others = self.changes.0.entry(place.name).or_default();
            if others.iter().any(|c| c.start == place.start) {
                let expected = "one adapter that saves the tensor";
                return Err(fail(self.planner.checkpoint, &tensor, "name", expected, "two"));
            }
            others.push(Change { start: place.start, piece, kind: ChangeKind::Replace });
        }
        Ok(())
    }

    fn add(&mut self, target: &Target) -> Result<()> {
        let weight = product_tensor(target);
        for (row, mut tensor) in self.found(&weight)? {
            let product = match target.kind {
                TargetKind::Parameter => self.stacked(target, &row, &mut tensor)?,
                _ => plain(self.planner.checkpoint, target)?,
            };
            self.add_product(&row, &tensor, product.clone())?;
            if let Some(lengths) = &target.magnitude {
                self.set_lengths(&row, &tensor, product, lengths)?;
            }
        }
        if let Some(bias) = &target.bias {
            let named = bias.named(target.name.replace(".weight", ".bias"));
            let n = bias.shape.iter().product();
            let ones = Factor { tensor: None, matrix: 0, line: 0, rank: 0 };
            let columns = Factor { tensor: Some(bias.clone()), matrix: 0, line: 1, rank: 0 };
            let scale = target.scale(rank_of(&target.a));
            for (row, tensor) in self.found(&named)? {
                let (rows, columns) = (ones.clone(), columns.clone());
                let (n_rows, rank, n_matrices) = (1, 1, 1);
                let product =
                    Product { rows, columns, n_rows, n_columns: n, rank, n_matrices, scale };
                self.add_product(&row, &tensor, product)?;
            }
        }
        Ok(())
    }

    fn add_product(&mut self, row: &TensorRow, tensor: &HfTensor, product: Product) -> Result<()> {
        let (_, mut piece) = self.planner.piece(row, tensor)?;
        // A number that is added to the sum is added once; other functions are not linear.
        piece.maps.retain(|map| !matches!(map, Map::Add(_)));
        if !piece.maps.is_empty() {
            let expected = "a tensor whose values are stored as they are";
            return Err(fail(self.planner.checkpoint, tensor, "name", expected, "another"));
        }
        let place = self.place(row, tensor, &piece)?;
        let change = Change { start: place.start, piece, kind: ChangeKind::Add(Box::new(product)) };
        self.changes.0.entry(place.name).or_default().push(change);
        Ok(())
    }

    /// Gives the rows of a changed tensor their lengths.
    fn set_lengths(
        &mut self,
        row: &TensorRow,
        tensor: &HfTensor,
        product: Product,
        lengths: &HfTensor,
    ) -> Result<()> {
        let checkpoint = self.planner.checkpoint;
        let is_it = |t: &&HfTensor| self.planner.plain_name(&t.name) == tensor.name;
        let weight = checkpoint.tensors().find(is_it).filter(|t| t.shape == tensor.shape);
        let (_, piece) = self.planner.piece(row, tensor)?;
        let Some(weight) = weight.filter(|_| piece.maps.is_empty()).cloned() else {
            let expected = "a tensor of the checkpoint, stored as it is";
            return Err(fail(checkpoint, lengths, "name", expected, "none"));
        };
        if lengths.shape.iter().product::<u64>() != product.n_rows {
            let (expected, got) = (format!("[{}]", product.n_rows), format!("{:?}", lengths.shape));
            return Err(fail(checkpoint, lengths, "shape", expected, got));
        }
        let place = self.place(row, tensor, &piece)?;
        let lengths = Box::new(Lengths { weight, product, lengths: lengths.clone() });
        let change = Change { start: place.start, piece, kind: ChangeKind::Lengths(lengths) };
        self.changes.0.entry(place.name).or_default().push(change);
        Ok(())
    }

    /// The rows that take a tensor of an adapter, each with the tensor under the name that the
    /// row has for it.
    fn found(&self, tensor: &HfTensor) -> Result<Vec<(TensorRow, HfTensor)>> {
        for name in spellings(&self.planner.plain_name(&tensor.name)) {
            let fits = |row: &&TensorRow| {
                let layer = matched(&row.hf, &name).map(|at| at.layer.unwrap_or(0));
                layer.is_some_and(|layer| self.kinds.has(layer, row))
            };
            let rows: Vec<&TensorRow> = self.rows.iter().filter(fits).collect();
            if !rows.is_empty() {
                let named = tensor.named(name);
                return Ok(rows.into_iter().map(|r| (r.clone(), named.clone())).collect());
            }
        }
        let architecture = &self.planner.descriptor.architecture;
        let expected = format!("a tensor that {architecture} has");
        Err(fail(self.planner.checkpoint, tensor, "name", expected, "one that no row takes"))
    }

    /// The place of a row's piece: which GGUF tensor, and where in it.
    fn place(&mut self, row: &TensorRow, tensor: &HfTensor, piece: &Piece) -> Result<Place> {
        let at = matched(&row.hf, &tensor.name).unwrap_or_default();
        let name = row.gguf.replace("{layer}", &at.layer.unwrap_or(0).to_string());
        if self.output_role(&name) == Some("output") {
            self.own_output()?;
        }
        let Some(planned) = self.planned.iter().find(|p| p.name == name) else {
            let expected = format!("a tensor of the checkpoint, for {name}");
            return Err(fail(self.planner.checkpoint, tensor, "name", expected, "none"));
        };
        if let Source::Values(_) = planned.source {
            let expected = "a tensor that the checkpoint stores";
            return Err(fail(self.planner.checkpoint, tensor, "name", expected, "none"));
        }
        let n: u64 = planned.dims.iter().product();
        let start = match at.expert {
            Some(expert) => expert.saturating_mul(piece.len),
            None => self.before(row, tensor)?,
        };
        if start.saturating_add(piece.len) > n {
            let expected = format!("a part of {name}, {:?}", planned.dims);
            let got = format!("{:?}", tensor.shape);
            return Err(fail(self.planner.checkpoint, tensor, "shape", expected, got));
        }
        Ok(Place { name, start })
    }

    /// Elements of the parts that lie before a row's in its GGUF tensor.
    fn before(&self, row: &TensorRow, tensor: &HfTensor) -> Result<u64> {
        let layer = matched(&row.hf, &tensor.name).and_then(|at| at.layer).unwrap_or(0);
        let (planner, mut n) = (self.planner, 0);
        let sizes = planner.sizes.of_layer(layer);
        for part in 0..row.part {
            let is_it =
                |r: &&TensorRow| r.gguf == row.gguf && r.part == part && self.kinds.has(layer, r);
            for row in self.rows.iter().filter(is_it) {
                if let Some(shape) = sizes.list(planner.config, &row.shape)? {
                    let mut like = tensor.named(row.hf.replace("{layer}", &layer.to_string()));
                    like.shape = shape;
                    n += planner.piece(row, &like)?.1.len;
                    break;
                }
            }
        }
        Ok(n)
    }

    /// `output` or `token_embd`, if a GGUF tensor is one of them.
    fn output_role(&self, name: &str) -> Option<&'static str> {
        let descriptor = self.planner.descriptor;
        let is = |role: &&str| descriptor.tensor_name(role, 0).is_some_and(|(n, _)| n == name);
        ["output", "token_embd"].into_iter().find(is)
    }

    /// Plans an output of its own where there is none: the embedding's pieces again.
    fn own_output(&mut self) -> Result<()> {
        let descriptor = self.planner.descriptor;
        let name = |role| descriptor.tensor_name(role, 0).map(|(name, _)| name);
        let (Some(output), Some(embedding)) = (name("output"), name("token_embd")) else {
            return Ok(());
        };
        if self.planned.iter().any(|p| p.name == output) {
            return Ok(());
        }
        if descriptor.parts.scale_tied_output {
            let (expected, got) = ("an output matrix of its own", "one that is the embedding");
            return Err(self.planner.config.fail("tie_word_embeddings", expected, got));
        }
        if let Some(embedding) = self.planned.iter().find(|p| p.name == embedding).cloned() {
            self.planned.push(Planned { name: output, ..embedding });
        }
        Ok(())
    }

    /// Gives the output its own matrix where the embedding that it was changes: peft adapts the
    /// two apart, as a module each.
    fn separate_output(&mut self, adapters: &[Adapter]) -> Result<()> {
        let changed: Vec<&str> =
            self.changes.0.keys().filter_map(|name| self.output_role(name)).collect();
        if changed.is_empty() {
            return Ok(());
        }
        for adapter in adapters {
            if adapter.config.bool("ensure_weight_tying")? == Some(true) {
                let expected = "false where the embedding or the output is adapted";
                return Err(adapter.config.fail("ensure_weight_tying", expected, "true"));
            }
        }
        self.own_output()
    }

    /// The product of a stack of matrices' factors. Which of the two has the rows is told by
    /// their sizes, and if these are one by the class: they differ in the order of dimensions.
    fn stacked(&self, target: &Target, row: &TensorRow, tensor: &mut HfTensor) -> Result<Product> {
        let checkpoint = self.planner.checkpoint;
        let layer = matched(&row.hf, &tensor.name).and_then(|at| at.layer).unwrap_or(0);
        let sizes = self.planner.sizes.of_layer(layer);
        let shape = sizes.list(self.planner.config, &row.shape)?.unwrap_or_default();
        let ([a_rows, a_columns], [b_rows, b_columns]) =
            (matrix(checkpoint, &target.a)?, matrix(checkpoint, &target.b)?);
        let wrong = |got: String| {
            let expected = format!("factors of {} {shape:?}", tensor.name);
            fail(checkpoint, &target.a, "shape", expected, got)
        };
        let got = || format!("{:?} and {:?}", target.a.shape, target.b.shape);
        let &[n_matrices, n_rows, n_columns] = &shape[..] else { return Err(wrong(got())) };
        let rank = a_rows / n_matrices.max(1);
        if rank == 0 || a_rows != rank * n_matrices || b_columns != a_rows {
            return Err(wrong(got()));
        }
        let (a, b) = (target.a.clone(), target.b.clone());
        // Of A, an expert's rows lie together; of B, every n_matrices-th column is one expert's.
        let of_a = Factor { tensor: Some(a), matrix: rank * a_columns, line: 1, rank: a_columns };
        let of_b = Factor { tensor: Some(b), matrix: 1, line: b_columns, rank: n_matrices };
        let swaps = row.steps.iter().any(|step| step == "swap 1 2");
        let is_unmarked = self.planner.descriptor.architecture == UNMARKED;
        let (rows, columns) = match (
            (b_rows, a_columns) == (n_rows, n_columns),
            (a_columns, b_rows) == (n_rows, n_columns),
        ) {
            (true, false) => (of_b, of_a),
            (false, true) => (of_a, of_b),
            (false, false) => return Err(wrong(got())),
            // A has the inputs, which are rows where the checkpoint has them transposed.
            (true, true) if swaps && !is_unmarked => (of_a, of_b),
            (true, true) => (of_b, of_a),
        };
        tensor.shape = shape.clone();
        let scale = target.scale(rank);
        Ok(Product { rows, columns, n_rows, n_columns, rank, n_matrices, scale })
    }
}

struct Place {
    name: String,
    start: u64,
}

/// A tensor that stands for the product: what steps and messages need of one.
fn product_tensor(target: &Target) -> HfTensor {
    let outer = |t: &HfTensor| t.shape.first().copied().unwrap_or(0);
    let inner = |t: &HfTensor| t.shape.last().copied().unwrap_or(0);
    let shape = match target.kind {
        TargetKind::Embedding => vec![inner(&target.a), outer(&target.b)],
        _ => vec![outer(&target.b), inner(&target.a)],
    };
    let mut tensor = target.a.named(&target.name);
    tensor.shape = shape;
    tensor.encoding = Some(Encoding::Float(TensorType::F32));
    tensor
}

/// The product of one matrix's factors.
fn plain(checkpoint: &Checkpoint, target: &Target) -> Result<Product> {
    let ([rank, a_columns], [b_rows, b_columns]) =
        (matrix(checkpoint, &target.a)?, matrix(checkpoint, &target.b)?);
    if rank == 0 || rank != b_columns {
        let expected = format!("{b_columns} rows, as {} has columns", target.b.name);
        return Err(fail(checkpoint, &target.a, "shape", expected, rank.to_string()));
    }
    let (a, b) = (Some(target.a.clone()), Some(target.b.clone()));
    let of_a = Factor { tensor: a, matrix: 0, line: 1, rank: a_columns };
    let of_b = Factor { tensor: b, matrix: 0, line: rank, rank: 1 };
    let scale = target.scale(rank);
    let (rows, columns, n_rows, n_columns) = match target.kind {
        TargetKind::Embedding => (of_a, of_b, a_columns, b_rows),
        _ => (of_b, of_a, b_rows, a_columns),
    };
    Ok(Product { rows, columns, n_rows, n_columns, rank, n_matrices: 1, scale })
}

fn rank_of(a: &HfTensor) -> u64 {
    a.shape.first().copied().unwrap_or(1)
}

fn matrix(checkpoint: &Checkpoint, tensor: &HfTensor) -> Result<[u64; 2]> {
    let got = || format!("{:?}", tensor.shape);
    let shape = <[u64; 2]>::try_from(&tensor.shape[..]);
    shape.map_err(|_| fail(checkpoint, tensor, "shape", "two dimensions", got()))
}

/// A name as checkpoints may have it, its own first.
fn spellings(name: &str) -> Vec<String> {
    let mut all = vec![name.to_owned()];
    for (from, to) in RENAMED {
        let more: Vec<String> =
            all.iter().filter(|n| n.contains(from)).map(|n| n.replacen(from, to, 1)).collect();
        all.extend(more);
    }
    all
}

impl Changes {
    pub fn of(&self, name: &str) -> &[Change] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }
}

/// A tensor's changes, with their factors once the first rows are made.
pub struct Applied<'a> {
    checkpoint: &'a Checkpoint,
    changes: &'a [Change],
    loaded: Mutex<Option<Arc<Vec<Ready<'a>>>>>,
}

/// A change with all that it needs in memory.
enum Ready<'a> {
    Replace,
    Add(Loaded<'a>),
    /// A factor for each row of so many columns.
    Scale(Vec<f32>, u64),
}

impl Lengths {
    /// The factors of rows that give them their lengths.
    fn factors(&self, checkpoint: &Checkpoint) -> Result<Vec<f32>> {
        let product = self.product.load(checkpoint)?;
        let n = self.product.n_columns as usize;
        let mut factors = vec![0.0; self.product.n_rows as usize];
        checkpoint.read(&self.lengths, 0, &mut factors)?;
        factors.par_iter_mut().enumerate().try_for_each(|(row, factor)| -> Result<()> {
            let (mut values, mut more) = (vec![0.0; n], vec![0.0; n]);
            checkpoint.read(&self.weight, (row * n) as u64, &mut values)?;
            product.fill((row * n) as u64, &mut more);
            let sums = values.iter().zip(&more).map(|(x, more)| f64::from(x + more).powi(2));
            *factor = (f64::from(*factor) / sums.sum::<f64>().sqrt()) as f32;
            Ok(())
        })?;
        Ok(factors)
    }
}

impl<'a> Applied<'a> {
    pub fn of(checkpoint: &'a Checkpoint, changes: &'a [Change]) -> Applied<'a> {
        Applied { checkpoint, changes, loaded: Mutex::new(None) }
    }

    /// Changes elements from `first` on.
    pub fn apply(&self, first: u64, out: &mut [f32]) -> Result<()> {
        let loaded = self.load()?;
        let end = first + out.len() as u64;
        let mut values = Vec::new();
        for (change, ready) in self.changes.iter().zip(&*loaded) {
            let from = first.max(change.start);
            let to = end.min(change.start + change.piece.len);
            if from >= to {
                continue;
            }
            let out = &mut out[(from - first) as usize..(to - first) as usize];
            let piece = &change.piece;
            match ready {
                Ready::Replace => {
                    let read = |at, out: &mut [f32]| self.checkpoint.read(&piece.tensor, at, out);
                    piece.walk.fill(from - change.start, out, read)?;
                    piece.maps.iter().for_each(|map| map.apply(out));
                }
                Ready::Add(product) => {
                    let read = |at, out: &mut [f32]| {
                        product.fill(at, out);
                        Ok::<(), Error>(())
                    };
                    values.resize(out.len(), 0.0);
                    piece.walk.fill(from - change.start, &mut values[..out.len()], read)?;
                    out.iter_mut().zip(&values).for_each(|(x, more)| *x += more);
                }
                Ready::Scale(factors, n_columns) => {
                    let read = |at: u64, out: &mut [f32]| {
                        let rows = (at..).map(|at| factors[(at / n_columns) as usize]);
                        out.iter_mut().zip(rows).for_each(|(x, factor)| *x = factor);
                        Ok::<(), Error>(())
                    };
                    values.resize(out.len(), 0.0);
                    piece.walk.fill(from - change.start, &mut values[..out.len()], read)?;
                    out.iter_mut().zip(&values).for_each(|(x, factor)| *x *= factor);
                }
            }
        }
        Ok(())
    }

    fn load(&self) -> Result<Arc<Vec<Ready<'a>>>> {
        let mut loaded = self.loaded.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(loaded) = &*loaded {
            return Ok(loaded.clone());
        }
        let load = |change: &'a Change| match &change.kind {
            ChangeKind::Replace => Ok(Ready::Replace),
            ChangeKind::Add(product) => product.load(self.checkpoint).map(Ready::Add),
            ChangeKind::Lengths(lengths) => {
                let factors = lengths.factors(self.checkpoint)?;
                Ok(Ready::Scale(factors, lengths.product.n_columns))
            }
        };
        let all: Result<Vec<_>> = self.changes.iter().map(load).collect();
        Ok(loaded.insert(Arc::new(all?)).clone())
    }
}
