//! The expert activation matrix (4.1).

use crate::policy::grid::Grid;

/// M[i][j], the tokens that chose expert j of layer i, flattened to [experts of the model]. This
/// is the request-level one, of one phase.
#[derive(Clone, Debug)]
pub struct Eam {
    cells: Vec<u32>,
    is_empty: bool,
}

impl Eam {
    pub fn new(grid: &Grid) -> Eam {
        Eam { cells: vec![0; grid.n_cells()], is_empty: true }
    }

    pub fn add(&mut self, cell: usize, n_tokens: u32) {
        self.cells[cell] = self.cells[cell].saturating_add(n_tokens);
        self.is_empty &= n_tokens == 0;
    }

    pub fn cells(&self) -> &[u32] {
        &self.cells
    }

    pub fn is_empty(&self) -> bool {
        self.is_empty
    }
}
