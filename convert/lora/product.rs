//! Elements of B·A, computed where they are wanted.

use super::super::checkpoint::{Checkpoint, HfTensor};
use crate::Result;

/// An addend of a tensor [matrices, rows, columns]: in each matrix, scale · R·C. R is [rows, rank]
/// and C [rank, columns], whichever of A and B they are.
#[derive(Clone, Debug)]
pub struct Product {
    pub rows: Factor,
    pub columns: Factor,
    pub n_rows: u64,
    pub n_columns: u64,
    pub rank: u64,
    pub n_matrices: u64,
    pub scale: f32,
}

/// A factor's elements by matrix, row or column, and rank, at a stride each.
#[derive(Clone, Debug)]
pub struct Factor {
    /// All ones where there is none.
    pub tensor: Option<HfTensor>,
    pub matrix: u64,
    pub line: u64,
    pub rank: u64,
}

/// A product whose factors are in memory.
#[derive(Debug)]
pub struct Loaded<'a> {
    of: &'a Product,
    /// [matrices, rows, rank]
    rows: Vec<f32>,
    /// [matrices, rank, columns]
    columns: Vec<f32>,
}

impl Factor {
    /// Elements [matrices, lines, rank].
    pub fn load(
        &self,
        checkpoint: &Checkpoint,
        [matrices, lines, rank]: [u64; 3],
    ) -> Result<Vec<f32>> {
        let n = (matrices * lines * rank) as usize;
        let Some(tensor) = &self.tensor else { return Ok(vec![1.0; n]) };
        let mut stored = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
        checkpoint.read(tensor, 0, &mut stored)?;
        let mut ordered = Vec::with_capacity(n);
        for m in 0..matrices {
            for line in 0..lines {
                let start = m * self.matrix + line * self.line;
                ordered.extend((0..rank).map(|k| stored[(start + k * self.rank) as usize]));
            }
        }
        Ok(ordered)
    }
}

impl Product {
    /// R as [matrices, rows, rank].
    pub fn load_rows(&self, checkpoint: &Checkpoint) -> Result<Vec<f32>> {
        self.rows.load(checkpoint, [self.n_matrices, self.n_rows, self.rank])
    }

    /// C, transposed, as [matrices, columns, rank].
    pub fn load_columns(&self, checkpoint: &Checkpoint) -> Result<Vec<f32>> {
        self.columns.load(checkpoint, [self.n_matrices, self.n_columns, self.rank])
    }

    pub fn load(&self, checkpoint: &Checkpoint) -> Result<Loaded<'_>> {
        let by_column = self.load_columns(checkpoint)?;
        let (rank, n) = (self.rank as usize, self.n_columns as usize);
        let mut columns = vec![0.0; by_column.len()];
        let matrices = columns.chunks_exact_mut(rank * n).zip(by_column.chunks_exact(rank * n));
        for (to, from) in matrices {
            for (j, from) in from.chunks_exact(rank).enumerate() {
                from.iter().enumerate().for_each(|(k, x)| to[k * n + j] = *x);
            }
        }
        Ok(Loaded { of: self, rows: self.load_rows(checkpoint)?, columns })
    }
}

impl Loaded<'_> {
    /// Fills `out` with elements from `first` on, counted through matrices, rows and columns.
    pub fn fill(&self, mut first: u64, mut out: &mut [f32]) {
        let (rank, n_columns) = (self.of.rank as usize, self.of.n_columns);
        while !out.is_empty() {
            let (row, column) = (first / n_columns, (first % n_columns) as usize);
            let n = out.len().min(n_columns as usize - column);
            let (now, rest) = out.split_at_mut(n);
            now.fill(0.0);
            let matrix = (row / self.of.n_rows) as usize * rank * n_columns as usize;
            let factors = &self.rows[row as usize * rank..][..rank];
            for (k, factor) in factors.iter().enumerate() {
                let line = &self.columns[matrix + k * n_columns as usize + column..][..n];
                now.iter_mut().zip(line).for_each(|(x, of)| *x += factor * of);
            }
            now.iter_mut().for_each(|x| *x *= self.of.scale);
            first += n as u64;
            out = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_those_of_the_product_wherever_they_are_cut() {
        let no = |line| Factor { tensor: None, matrix: 0, line, rank: 1 };
        let product = Product {
            rows: no(2),
            columns: no(2),
            n_rows: 2,
            n_columns: 3,
            rank: 2,
            n_matrices: 2,
            scale: 0.5,
        };
        let rows: Vec<f32> = (0..8).map(|x| x as f32).collect();
        let columns: Vec<f32> = (0..12).map(|x| (x * x) as f32).collect();
        let loaded = Loaded { of: &product, rows, columns };
        let mut whole = vec![0.0; 12];
        loaded.fill(0, &mut whole);
        // The second matrix: rows (4, 5) and (6, 7), columns of (36, 49, 64) and (81, 100, 121).
        assert_eq!(whole[6..], [274.5, 348.0, 430.5, 391.5, 497.0, 615.5]);
        for cut in 1..12 {
            let mut parts = vec![0.0; 12];
            let (a, b) = parts.split_at_mut(cut);
            loaded.fill(0, a);
            loaded.fill(cut as u64, b);
            assert_eq!(parts, whole);
        }
    }
}
