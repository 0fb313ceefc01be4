//! Matrices where they lie: in the file, or unpacked beside it.

use std::sync::Arc;

use crate::Result;
use crate::backend::ops::HeadMats;
use crate::gguf::{Gguf, TensorType};
use crate::simd::MatRef;

/// The location of a matrix's bytes.
#[derive(Clone, Debug)]
enum Source {
    /// The index of a tensor.
    File(usize),
    Own(Arc<[u8]>),
}

/// A matrix: `rows` outputs of `cols` inputs.
#[derive(Clone, Debug)]
pub struct Matrix {
    source: Source,
    /// The first of its rows in the source.
    first_row: usize,
    pub ty: TensorType,
    pub rows: usize,
    pub cols: usize,
}

impl Matrix {
    pub fn of_tensor(tensor: usize, ty: TensorType, rows: usize, cols: usize) -> Matrix {
        Matrix { source: Source::File(tensor), first_row: 0, ty, rows, cols }
    }

    /// `rows` of a tensor's rows, from `first_row` on.
    pub fn rows_of(self, first_row: usize, rows: usize) -> Matrix {
        assert!(first_row + rows <= self.rows);
        Matrix { first_row: self.first_row + first_row, rows, ..self }
    }

    /// `values` [rows, cols] in memory of its own.
    pub fn of_values(values: &[f32], cols: usize) -> Matrix {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let rows = values.len() / cols;
        Matrix { source: Source::Own(bytes.into()), first_row: 0, ty: TensorType::F32, rows, cols }
    }

    /// The tensor that it is some rows of, and the first of these.
    pub fn place(&self) -> Option<(usize, usize)> {
        match self.source {
            Source::File(tensor) => Some((tensor, self.first_row)),
            Source::Own(_) => None,
        }
    }

    /// Whether both are the same rows of one tensor.
    pub fn is(&self, other: &Matrix) -> bool {
        let is_one = match (&self.source, &other.source) {
            (Source::File(a), Source::File(b)) => a == b,
            _ => false,
        };
        is_one && (self.first_row, self.rows) == (other.first_row, other.rows)
    }

    /// Multiply-adds of a row of inputs.
    pub fn macs(&self) -> usize {
        self.rows * self.cols
    }

    /// Bytes beside the file.
    pub fn own_bytes(&self) -> usize {
        match &self.source {
            Source::File(_) => 0,
            Source::Own(bytes) => bytes.len(),
        }
    }

    /// A row of a matrix that may lie in the file alone, from which it is then read to `room`.
    pub fn read_row<'a>(
        &'a self,
        gguf: &'a Gguf,
        row: usize,
        room: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        assert!(row < self.rows);
        let n = self.cols / self.ty.block_len() * self.ty.block_bytes();
        let range = (self.first_row + row) * n..(self.first_row + row + 1) * n;
        match &self.source {
            Source::File(tensor) => gguf.read_bytes(&gguf.tensors()[*tensor], range, room),
            Source::Own(bytes) => Ok(&bytes[range]),
        }
    }

    pub fn mat<'a>(&'a self, gguf: &'a Gguf) -> MatRef<'a> {
        let data = match &self.source {
            Source::File(tensor) => gguf.bytes(&gguf.tensors()[*tensor]),
            Source::Own(bytes) => bytes,
        };
        let all = MatRef::dense(self.ty, data, self.first_row + self.rows, self.cols);
        match self.first_row {
            0 => all,
            first => all.row_range(first..first + self.rows),
        }
    }
}

/// scale · (weight · x + bias), the bias optional.
#[derive(Clone, Debug)]
pub struct Linear {
    pub weight: Matrix,
    pub bias: Option<Vec<f32>>,
    /// A finite number other than 0; 1 as a rule.
    pub scale: f32,
}

impl Linear {
    pub fn plain(weight: Matrix) -> Linear {
        Linear { weight, bias: None, scale: 1.0 }
    }

    /// scale · weight · x + bias
    pub fn scaled(weight: Matrix, bias: Option<Vec<f32>>, scale: f32) -> Linear {
        let mut bias = bias;
        if scale != 1.0 {
            bias.iter_mut().flatten().for_each(|b| *b /= scale);
        }
        Linear { weight, bias, scale }
    }
}

/// A matrix a head, all in one: head h has `rows` rows from `first + h · step` on.
#[derive(Clone, Debug)]
pub struct HeadMatrices {
    pub all: Matrix,
    pub n_heads: usize,
    pub rows: usize,
    pub first: usize,
    pub step: usize,
}

impl HeadMatrices {
    /// The heads' matrices one behind the other.
    pub fn stacked(all: Matrix, n_heads: usize) -> HeadMatrices {
        let rows = all.rows / n_heads;
        HeadMatrices { all, n_heads, rows, first: 0, step: rows }
    }

    /// Multiply-adds of a row of inputs a head.
    pub fn macs(&self) -> usize {
        self.n_heads * self.rows * self.all.cols
    }

    pub fn mats<'a>(&'a self, gguf: &'a Gguf) -> HeadMats<'a> {
        let HeadMatrices { n_heads, rows, first, step, .. } = *self;
        HeadMats { all: self.all.mat(gguf), n_heads, rows, first, step }
    }
}
