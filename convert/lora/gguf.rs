//! An adapter as a GGUF file of its own, in llama.cpp's format: a pair NAME.lora_a [rank, inputs]
//! and NAME.lora_b [outputs, rank] for a tensor NAME, of experts one behind the other. The steps
//! that order a tensor's rows order B's, those that order its columns A's.

use std::collections::BTreeMap;

use super::product::Product;
use super::{Change, ChangeKind, Changes};
use crate::convert::checkpoint::Checkpoint;
use crate::convert::json::Json;
use crate::convert::plan::Planned;
use crate::gguf::{TensorType, Writer};
use crate::{Error, Result};

/// The factors of one GGUF tensor.
struct Pair {
    name: String,
    n_inputs: usize,
    n_outputs: usize,
    n_matrices: usize,
    rank: usize,
    /// [matrices, rank, inputs]
    a: Vec<f32>,
    /// [matrices, outputs, rank], of a scale that the file's number makes theirs
    b: Vec<f32>,
}

/// A piece whose rows and columns are those of its product.
struct Placed<'a> {
    /// The piece's first row, counted through the tensor.
    first_row: u64,
    product: &'a Product,
    /// Whether the piece's rows are the product's columns.
    is_turned: bool,
    /// Matrix and line of each of the piece's rows.
    rows: Vec<(u64, u64)>,
    /// The line of each column.
    columns: Vec<u64>,
}

/// Writes the pairs of one adapter, of which this is the config. Answers their number and bytes.
pub fn write(
    writer: &mut Writer,
    checkpoint: &Checkpoint,
    config: &Json,
    planned: &[Planned],
    changes: &Changes,
    ty: TensorType,
) -> Result<(usize, u64)> {
    // A file whose number is 0 means a scale of 1.
    let alpha = config.require_number("lora_alpha")? as f32;
    let alpha = if alpha == 0.0 { 1.0 } else { alpha };
    writer.set("general.type", "adapter")?;
    writer.set("adapter.type", "lora")?;
    writer.set("adapter.lora.alpha", alpha)?;
    let changed = || planned.iter().filter(|t| !changes.of(&t.name).is_empty());
    // Declared from shapes alone; factors are in memory a tensor at a time.
    for tensor in changed() {
        let pair = Pair::of(config, tensor, changes.of(&tensor.name), None)?;
        for (name, dims) in pair.tensors() {
            writer.declare(&name, &dims, ty)?;
        }
    }
    let mut bytes = 0;
    for tensor in changed() {
        let values = Some((checkpoint, alpha));
        let pair = Pair::of(config, tensor, changes.of(&tensor.name), values)?;
        let halves = match pair.is_table() {
            false => [pair.a, pair.b],
            true => {
                let columns = transposed(&pair.a, pair.rank, pair.n_inputs);
                [pair.b, columns]
            }
        };
        for (name, values) in ["lora_a", "lora_b"].into_iter().zip(halves) {
            let mut stored = vec![0; values.len() * ty.block_bytes()];
            crate::quant::quantize(ty, &values, &mut stored);
            writer.write_tensor(&format!("{}.{name}", pair.name), &stored)?;
            bytes += stored.len() as u64;
        }
    }
    Ok((2 * changed().count(), bytes))
}

fn transposed(a: &[f32], rank: usize, n: usize) -> Vec<f32> {
    (0..n).flat_map(|i| (0..rank).map(move |k| a[k * n + i])).collect()
}

impl Pair {
    /// The pair of a tensor's changes; its values are there if a checkpoint to read them is given,
    /// with the number that the file's scale is made of.
    fn of(
        config: &Json,
        tensor: &Planned,
        changes: &[Change],
        values: Option<(&Checkpoint, f32)>,
    ) -> Result<Pair> {
        let refused = |got: &str| {
            let expected = "pairs of factors that a GGUF adapter can hold: merge the adapter";
            config.fail(&tensor.name, expected, got)
        };
        let is_stack = tensor.name.contains("_exps.");
        let (inputs, outputs, matrices) = match tensor.dims[..] {
            [n] if tensor.name.ends_with(".weight") => (n, 1, 1),
            [n, m] => (n, m, 1),
            [n, m, e] if is_stack => (n, m, e),
            _ => return Err(refused("another kind of tensor")),
        };
        let mut placed = Vec::new();
        for change in changes {
            let ChangeKind::Add(product) = &change.kind else {
                return Err(refused("a module to save, or rows of given lengths (use_dora)"));
            };
            if tensor.dims.len() == 1 && product.rows.tensor.is_none() {
                return Err(refused("a bias"));
            }
            let placed_here = Placed::of(product, change, inputs)
                .ok_or_else(|| refused("rows and columns in an order that mixes them"))?;
            placed.push(placed_here);
        }
        let slots = slots(&placed, outputs);
        let ends = placed.iter().zip(&slots).map(|(p, slot)| slot + p.product.rank);
        let rank = ends.max().unwrap_or(0);
        let [n_inputs, n_outputs, n_matrices, rank] =
            [inputs, outputs, matrices, rank].map(|n| n as usize);
        let mut pair = Pair {
            name: tensor.name.clone(),
            n_inputs,
            n_outputs,
            n_matrices,
            rank,
            a: Vec::new(),
            b: Vec::new(),
        };
        let Some((checkpoint, alpha)) = values else { return Ok(pair) };
        pair.a = vec![0.0; n_matrices * rank * n_inputs];
        pair.b = vec![0.0; n_matrices * n_outputs * rank];
        for (placed, slot) in placed.iter().zip(&slots) {
            let of_file = alpha / rank as f32;
            let factor = placed.product.scale / of_file;
            let is_one = (factor - 1.0).abs() < f32::EPSILON;
            let factor = if is_one { 1.0 } else { factor };
            pair.fill(checkpoint, placed, *slot as usize, factor)?;
        }
        Ok(pair)
    }

    fn fill(
        &mut self,
        checkpoint: &Checkpoint,
        placed: &Placed<'_>,
        slot: usize,
        factor: f32,
    ) -> Result<()> {
        let product = placed.product;
        let (of_rows, of_columns) = match placed.is_turned {
            false => (product.load_rows(checkpoint)?, product.load_columns(checkpoint)?),
            true => (product.load_columns(checkpoint)?, product.load_rows(checkpoint)?),
        };
        let (n, k) = (product.n_rows, product.n_columns);
        let (n_rows, n_columns) = if placed.is_turned { (k, n) } else { (n, k) };
        let rank = product.rank as usize;
        let mut done = None;
        for (i, (matrix, line)) in placed.rows.iter().enumerate() {
            let row = placed.first_row as usize + i;
            let e = row / self.n_outputs;
            let from = &of_rows[(matrix * n_rows + line) as usize * rank..][..rank];
            let to = &mut self.b[row * self.rank + slot..][..rank];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from * factor);
            if done == Some(e) {
                continue;
            }
            done = Some(e);
            for (j, column) in placed.columns.iter().enumerate() {
                let from = &of_columns[(matrix * n_columns + column) as usize * rank..][..rank];
                for (k, x) in from.iter().enumerate() {
                    self.a[(e * self.rank + slot + k) * self.n_inputs + j] = *x;
                }
            }
        }
        Ok(())
    }

    /// Whether it is looked up in, not multiplied with: the halves change places.
    fn is_table(&self) -> bool {
        self.name.ends_with("token_embd.weight")
    }

    fn tensors(&self) -> [(String, Vec<u64>); 2] {
        let [n, m, e, r] =
            [self.n_inputs, self.n_outputs, self.n_matrices, self.rank].map(|n| n as u64);
        let named = |part: &str| format!("{}.{part}", self.name);
        let (mut a, mut b) = (vec![n, r], vec![r, m]);
        if self.is_table() {
            (a, b) = (vec![r, m], vec![r, n]);
        }
        if e > 1 {
            a.push(e);
            b.push(e);
        }
        [(named("lora_a"), a), (named("lora_b"), b)]
    }
}

/// The first rank of each change: changes of other matrices, and those with the same inputs, have
/// the same ranks, others are behind each other.
fn slots(placed: &[Placed<'_>], outputs: u64) -> Vec<u64> {
    let mut ends: BTreeMap<u64, u64> = BTreeMap::new();
    let mut slots: Vec<u64> = Vec::new();
    for (i, p) in placed.iter().enumerate() {
        let last_row = p.first_row + p.rows.len() as u64 - 1;
        let matrices = p.first_row / outputs..=last_row / outputs;
        let shares = placed[..i].iter().zip(&slots).find(|(other, _)| {
            let name = |p: &Product| p.columns.tensor.as_ref().map(|t| t.name.clone());
            let is_same = name(other.product) == name(p.product);
            is_same && other.columns == p.columns && other.is_turned == p.is_turned
        });
        let behind = || matrices.clone().filter_map(|m| ends.get(&m).copied()).max().unwrap_or(0);
        let first = shares.map_or_else(behind, |(_, first)| *first);
        for matrix in matrices.clone() {
            let end = ends.entry(matrix).or_default();
            *end = (*end).max(first + p.product.rank);
        }
        slots.push(first);
    }
    slots
}

impl<'a> Placed<'a> {
    /// `None` where a row of the piece is not of one row or column of the product.
    fn of(product: &'a Product, change: &Change, inputs: u64) -> Option<Placed<'a>> {
        let (offset, axes) = change.piece.walk.axes();
        let (width, height) = (product.n_columns, product.n_rows);
        // The axes of a row are the innermost ones.
        let (mut within, mut n) = (axes.len(), 1);
        while n < inputs && within > 0 {
            within -= 1;
            n *= axes[within].0;
        }
        let (outer, inner) = axes.split_at(within);
        let is_column = |axis: &(u64, u64)| axis.0 == 1 || axis.1 < width;
        let is_row = |axis: &(u64, u64)| axis.0 == 1 || axis.1.is_multiple_of(width);
        let is_turned = !inner.iter().all(is_column);
        let fits = match is_turned {
            false => outer.iter().all(is_row),
            true => {
                let is_other =
                    |axis: &(u64, u64)| is_column(axis) || axis.1.is_multiple_of(width * height);
                inner.iter().all(is_row) && outer.iter().all(is_other)
            }
        };
        // No sum of steps may leave its row.
        let columns = if is_turned { outer } else { inner };
        let steps: u64 =
            columns.iter().filter(|axis| axis.1 < width).map(|(len, by)| (len - 1) * by).sum();
        if n != inputs || !fits || offset % width + steps >= width {
            return None;
        }
        let whole = width * height;
        let at = |axes: &[(u64, u64)], mut index: u64| {
            let mut at = offset;
            for (len, by) in axes.iter().rev() {
                at += index % len * by;
                index /= len;
            }
            at
        };
        let line = |at: u64, of_column: bool| {
            if of_column { at % width } else { at / width % height }
        };
        let n_rows = change.piece.len / inputs;
        let rows = (0..n_rows).map(|row| at(outer, row));
        let rows = rows.map(|at| (at / whole, line(at, is_turned))).collect();
        let columns = (0..inputs).map(|i| line(at(inner, i), !is_turned)).collect();
        let first_row = change.start / inputs;
        Some(Placed { first_row, product, is_turned, rows, columns })
    }
}

/// The complaint about what an adapter's file can not be of.
pub fn not_alone(config: &Json) -> Error {
    let expected = "an output matrix of its own beside an adapted embedding: merge the adapter";
    config.fail("tie_word_embeddings", expected, "the embedding for an output")
}
