//! The tensors of a GGUF file as a standard file has them, whatever the file's own layout, and
//! their rows by reads: memory then holds what is worked on and nothing else.

use std::os::unix::fs::FileExt;

use super::stream::TensorJob;
use crate::experts::{ExpertTensors, LayerExperts, MatrixRows};
use crate::gguf::{Gguf, Shard, TensorInfo, TensorType};
use crate::model::granules::{self, GranuleKeys};
use crate::{Error, Result};

/// A tensor to read.
pub struct Source<'a> {
    pub name: String,
    pub dims: Vec<u64>,
    pub ty: TensorType,
    shard: &'a Shard,
    /// The offset of the tensor that has the bytes.
    offset: u64,
    from: From,
}

enum From {
    /// The tensor itself.
    Whole,
    /// One matrix of each expert in a granule-major tensor.
    Granules { layer: LayerExperts, expert_stride: u64, matrix: Matrix },
}

#[derive(Clone, Copy)]
enum Matrix {
    Gate,
    Up,
    Down,
}

impl<'a> Source<'a> {
    /// All tensors, in the file's order.
    pub fn all(gguf: &'a Gguf) -> Result<Vec<Source<'a>>> {
        let keys = GranuleKeys::read(gguf)?;
        let mut all = Vec::new();
        for t in gguf.tensors() {
            match (granules::layer_of(&t.name), &keys) {
                (Some(layer), Some(keys)) => all.extend(Self::woven(gguf, keys, layer, t)?),
                _ => all.push(Self::whole(gguf, t)),
            }
        }
        Ok(all)
    }

    /// A tensor as the file has it.
    pub fn whole(gguf: &'a Gguf, t: &TensorInfo) -> Source<'a> {
        Self::new(gguf, t, (t.name.clone(), t.dims.clone(), t.ty), From::Whole)
    }

    /// Copies it.
    pub fn job(&self) -> TensorJob<'_> {
        let make = Box::new(|first, out: &mut [u8]| self.read(first, out).map(|()| 0));
        TensorJob::of_rows(&self.name, &self.dims, self.ty, make)
    }

    fn new(
        gguf: &'a Gguf,
        t: &TensorInfo,
        (name, dims, ty): (String, Vec<u64>, TensorType),
        from: From,
    ) -> Source<'a> {
        Source { name, dims, ty, shard: &gguf.shards()[t.shard], offset: t.file_offset, from }
    }

    /// Gate, up and down of a granule-major tensor.
    fn woven(
        gguf: &'a Gguf,
        keys: &GranuleKeys,
        layer: usize,
        t: &TensorInfo,
    ) -> Result<Vec<Source<'a>>> {
        let Some(typed) = keys.layer_as_written(gguf, layer)? else { return Ok(Vec::new()) };
        let experts = typed.experts;
        assert!(matches!(experts.tensors, ExpertTensors::GranuleMajor { .. }));
        let (e, f, n) =
            (typed.n_embd as u64, experts.geometry.n_ff as u64, experts.n_experts as u64);
        let dims = [vec![e, f, n], vec![e, f, n], vec![f, e, n]];
        let matrices = [Matrix::Gate, Matrix::Up, Matrix::Down];
        let described = granules::stacked_names(layer).into_iter().zip(dims).zip(typed.types);
        let all = described.zip(matrices).map(|(((name, dims), ty), matrix)| {
            let from = From::Granules { layer: experts, expert_stride: t.dims[0], matrix };
            Self::new(gguf, t, (name, dims, ty), from)
        });
        Ok(all.collect())
    }

    pub fn row_len(&self) -> usize {
        self.dims[0] as usize
    }

    pub fn row_bytes(&self) -> usize {
        // The file has been checked.
        self.ty.row_bytes(self.dims[0]).expect("whole blocks in a row") as usize
    }

    pub fn path(&self) -> &std::path::Path {
        self.shard.path()
    }

    /// Fills `out` with whole rows from row `first` on.
    pub fn read(&self, first: u64, out: &mut [u8]) -> Result<()> {
        let from = match self.from {
            From::Whole => return self.read_at(first * self.row_bytes() as u64, out),
            From::Granules { layer, expert_stride, matrix } => (layer, expert_stride, matrix),
        };
        let (layer, expert_stride, matrix) = from;
        let part = match matrix {
            Matrix::Gate => layer.gate,
            Matrix::Up => layer.up,
            Matrix::Down => layer.down,
        };
        let (mut next, mut rest) = (first, out);
        while !rest.is_empty() {
            let (expert, row) = (next / part.rows as u64, (next % part.rows as u64) as usize);
            let n = (part.rows - row).min(rest.len() / part.row_bytes);
            let (now, later) = rest.split_at_mut(n * part.row_bytes);
            let at = expert * expert_stride;
            match matrix {
                Matrix::Gate => self.read_rows(&layer, (&part, 0), at, row, now)?,
                Matrix::Up => self.read_rows(&layer, (&part, 1), at, row, now)?,
                Matrix::Down => self.read_columns(&layer, at, row, now)?,
            }
            next += n as u64;
            rest = later;
        }
        Ok(())
    }

    /// Rows of gate or up (the `which`th matrix) of the expert at `at`.
    fn read_rows(
        &self,
        layer: &LayerExperts,
        (part, which): (&MatrixRows, usize),
        at: u64,
        mut row: usize,
        mut out: &mut [u8],
    ) -> Result<()> {
        while !out.is_empty() {
            let index = row / layer.geometry.granule_rows;
            let rows = layer.geometry.rows(index);
            let n = (rows.end - row).min(out.len() / part.row_bytes);
            let (now, rest) = out.split_at_mut(n * part.row_bytes);
            let within = layer.offsets(index)[which] + (row - rows.start) * part.row_bytes;
            self.read_at(at + (index * layer.granule_stride() + within) as u64, now)?;
            row += n;
            out = rest;
        }
        Ok(())
    }

    /// Rows of down of the expert at `at`, put together from the granules' columns.
    fn read_columns(
        &self,
        layer: &LayerExperts,
        at: u64,
        row: usize,
        out: &mut [u8],
    ) -> Result<()> {
        let part = &layer.down;
        let mut strips = Vec::new();
        for index in 0..layer.geometry.n_granules() {
            let columns = part.columns(&layer.geometry.rows(index));
            let width = columns.len();
            strips.resize(out.len() / part.row_bytes * width, 0);
            let within = layer.offsets(index)[2] + row * width;
            self.read_at(at + (index * layer.granule_stride() + within) as u64, &mut strips)?;
            for (row, strip) in out.chunks_exact_mut(part.row_bytes).zip(strips.chunks_exact(width))
            {
                row[columns.clone()].copy_from_slice(strip);
            }
        }
        Ok(())
    }

    fn read_at(&self, from: u64, out: &mut [u8]) -> Result<()> {
        let read = self.shard.file().read_exact_at(out, self.offset + from);
        read.map_err(|e| Error::io(self.shard.path(), e))
    }
}
