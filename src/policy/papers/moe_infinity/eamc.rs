//! The EAM collection (4.2): past requests' EAMs, few enough to compare with all of them. Matches
//! go by the cosine of the flattened matrices. The matrices are kept in two orders. By expert: one
//! more token of an expert adds a contiguous column to the products with all EAMs, so that no whole
//! matrices are multiplied per token. By EAM: the matches are added up by rows.

use super::eam::Eam;
use crate::policy::grid::Grid;

#[derive(Clone, Debug)]
pub struct Eamc {
    grid: Grid,
    capacity: usize,
    len: usize,
    /// [len, experts of the model]
    matrices: Vec<u16>,
    /// `matrices` as [experts of the model, capacity].
    columns: Vec<u16>,
    /// Σ_j M[i][j]² of each row i: [layers, capacity].
    squares: Vec<f32>,
    /// Σ M[i]² of each whole matrix: [capacity].
    norms: Vec<f32>,
}

/// An EAM of the collection, and how like it is: larger is nearer.
pub type Match = (f32, usize);

impl Eamc {
    pub fn new(grid: &Grid, capacity: usize) -> Eamc {
        assert!(capacity > 0, "a collection has room");
        Eamc {
            grid: grid.clone(),
            capacity,
            len: 0,
            matrices: Vec::new(),
            columns: vec![0; grid.n_cells() * capacity],
            squares: vec![0.0; grid.n_layers() * capacity],
            norms: vec![0.0; capacity],
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_full(&self) -> bool {
        self.len == self.capacity
    }

    /// Room for one value of each EAM.
    pub fn zeros(&self) -> Vec<f32> {
        vec![0.0; self.capacity]
    }

    /// [experts of the model]
    pub fn matrix(&self, at: usize) -> &[u16] {
        &self.matrices[at * self.grid.n_cells()..][..self.grid.n_cells()]
    }

    /// Puts a matrix in the place of another, or behind the last. Counts beyond 16 bits are
    /// halved with all others until they fit, which leaves every cosine as it is but for rounding.
    pub fn put(&mut self, at: usize, eam: &Eam) {
        let max = eam.cells().iter().max().copied().unwrap_or(0);
        let shift = (u32::BITS - max.leading_zeros()).saturating_sub(u16::BITS);
        let counts: Vec<u16> = eam.cells().iter().map(|count| (count >> shift) as u16).collect();
        self.put_counts(at, &counts);
    }

    /// `counts`: [experts of the model].
    pub fn put_counts(&mut self, at: usize, counts: &[u16]) {
        let n_cells = self.grid.n_cells();
        if at == self.len {
            assert!(!self.is_full(), "the collection is full");
            self.len += 1;
            self.matrices.resize(self.len * n_cells, 0);
        }
        self.matrices[at * n_cells..][..n_cells].copy_from_slice(counts);
        for (cell, count) in counts.iter().enumerate() {
            self.columns[cell * self.capacity + at] = *count;
        }
        self.norms[at] = 0.0;
        for layer in 0..self.grid.n_layers() {
            let row = &counts[self.grid.row(layer as u32)];
            let square: u64 = row.iter().map(|count| u64::from(*count).pow(2)).sum();
            self.squares[layer * self.capacity + at] = square as f32;
            self.norms[at] += square as f32;
        }
    }

    /// `products` with all EAMs, [capacity], of a matrix to which `n_tokens` come in a cell.
    pub fn add_products(&self, cell: usize, n_tokens: u32, products: &mut [f32]) {
        let column = &self.columns[cell * self.capacity..][..self.len];
        for (product, count) in products.iter_mut().zip(column) {
            *product += f32::from(*count) * n_tokens as f32;
        }
    }

    /// The product with one EAM alone.
    pub fn product(&self, at: usize, eam: &Eam) -> f32 {
        let cells = eam.cells().iter().zip(self.matrix(at));
        cells.map(|(a, b)| u64::from(*a) * u64::from(*b)).sum::<u64>() as f32
    }

    /// Adds a row's squares to those of all EAMs: [capacity].
    pub fn add_squares(&self, layer: u32, squares: &mut [f32]) {
        let row = &self.squares[layer as usize * self.capacity..][..self.len];
        squares.iter_mut().zip(row).for_each(|(sum, square)| *sum += square);
    }

    /// A row's square of one EAM alone.
    pub fn square(&self, layer: u32, at: usize) -> f32 {
        self.squares[layer as usize * self.capacity + at]
    }

    /// |M|² of all EAMs: [capacity].
    pub fn norms(&self) -> &[f32] {
        &self.norms
    }
}

/// The `n` EAMs of the smallest cosine distance to a matrix that has these products with them,
/// nearest first, the lower place first among equals. Those that share no expert with it are
/// none. The measure is the square of the cosine times that of the matrix's length, which is the
/// same for all.
pub fn nearest(products: &[f32], squares: &[f32], n: usize, out: &mut Vec<Match>) {
    out.clear();
    for (at, (product, square)) in products.iter().zip(squares).enumerate() {
        let likeness = product * product / square;
        let is_near = out.len() < n || out.last().is_some_and(|last| likeness > last.0);
        if *product > 0.0 && is_near {
            out.truncate(n - 1);
            let place = out.partition_point(|near| near.0 >= likeness);
            out.insert(place, (likeness, at));
        }
    }
}
