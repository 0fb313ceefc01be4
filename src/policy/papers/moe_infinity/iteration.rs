//! The iteration-level EAM (4.1) and its comparison with a collection. A decode step's matrix has
//! as many ones as it has chosen experts: they are a list.

use super::eam::Eam;
use super::eamc::{Eamc, Match, nearest};

/// Rows up to the layer that the step has reached. They are compared with the same rows of past
/// EAMs: what these did in layers that are still to come neither speaks for a match nor against
/// it. The paper leaves that open; with the last row it is its cosine.
#[derive(Clone, Debug)]
pub struct Iteration {
    /// Cells of one token each.
    cells: Vec<usize>,
    /// Rows that there are.
    layers: Vec<u32>,
    /// With each past EAM, and the squares of its rows: [capacity].
    products: Vec<f32>,
    squares: Vec<f32>,
}

impl Iteration {
    pub fn new(eamc: &Eamc) -> Iteration {
        let (products, squares) = (eamc.zeros(), eamc.zeros());
        Iteration { cells: Vec::new(), layers: Vec::new(), products, squares }
    }

    /// The layer that was routed last.
    pub fn layer(&self) -> Option<u32> {
        self.layers.last().copied()
    }

    pub fn add_row(&mut self, eamc: &Eamc, layer: u32, cells: impl Iterator<Item = usize>) {
        self.layers.push(layer);
        eamc.add_squares(layer, &mut self.squares);
        for cell in cells {
            self.cells.push(cell);
            eamc.add_products(cell, 1, &mut self.products);
        }
    }

    pub fn nearest(&self, n: usize, out: &mut Vec<Match>) {
        nearest(&self.products, &self.squares, n, out);
    }

    /// One of the collection has been replaced.
    pub fn replaced(&mut self, eamc: &Eamc, at: usize) {
        let matrix = eamc.matrix(at);
        self.products[at] = self.cells.iter().map(|cell| f32::from(matrix[*cell])).sum();
        self.squares[at] = self.layers.iter().map(|layer| eamc.square(*layer, at)).sum();
    }

    /// Adds the step to its request's EAM and to that EAM's products, and clears it.
    pub fn end(&mut self, eam: &mut Eam, products: &mut [f32]) {
        self.cells.iter().for_each(|cell| eam.add(*cell, 1));
        products.iter_mut().zip(&self.products).for_each(|(sum, product)| *sum += product);
        self.cells.clear();
        self.layers.clear();
        self.products.fill(0.0);
        self.squares.fill(0.0);
    }
}
