//! MoE-Infinity's eviction (5.2): the experts that the requests in progress have used least, late
//! layers first.

use super::eam::Eam;
use super::requests::Requests;
use crate::policy::grid::Grid;
use crate::policy::{Event, Eviction, Expert, Routed, Shape};

/// Uses that an expert is given beforehand. Much less than one, so that it orders only those
/// without any: by layer.
const PRIOR: f64 = 1e-3;

/// Priority: `(M[i][j] + ε) · (1 − i/L)`, where M is the sum of the request-level EAMs of all
/// requests in progress, and i the expert's place among L MoE layers. M counts decode steps: a
/// prompt does not touch what decode keeps. The paper wants early layers favoured, as prefetching
/// is of less use to them, and gives no formula: we take the one by which it weighs prefetches,
/// seen from the start of an iteration.
#[derive(Clone, Debug)]
pub struct RequestEam {
    grid: Grid,
    requests: Requests<Eam>,
    /// M: [experts of the model].
    sum: Vec<u64>,
}

impl RequestEam {
    pub fn new(shape: &Shape) -> Self {
        let grid = Grid::new(shape);
        RequestEam { sum: vec![0; grid.n_cells()], requests: Requests::new(), grid }
    }

    fn end(&mut self, request: u32) {
        if let Some(eam) = self.requests.end(request) {
            self.subtract(&eam);
        }
    }

    fn subtract(&mut self, eam: &Eam) {
        let counts = self.sum.iter_mut().zip(eam.cells());
        counts.for_each(|(sum, count)| *sum -= u64::from(*count));
    }

    /// The index of the request among those in progress, which is added if its start was not seen.
    fn find(&mut self, request: u32) -> usize {
        self.requests.position(request).unwrap_or_else(|| {
            if let Some(oldest) = self.requests.begin(request, Eam::new(&self.grid)) {
                self.subtract(&oldest);
            }
            self.requests.len() - 1
        })
    }
}

impl Eviction for RequestEam {
    fn observe(&mut self, event: &Event<'_>) {
        match *event {
            Event::RequestStart { request } | Event::RequestEnd { request } => self.end(request),
            Event::Routed(Routed { request, layer, chosen, .. }) => {
                let at = self.find(request);
                for &expert in chosen {
                    let cell = self.grid.cell(Expert { layer, expert });
                    self.requests.at(at).add(cell, 1);
                    self.sum[cell] += 1;
                }
            }
            _ => {}
        }
    }

    fn priority(&self, expert: Expert) -> f64 {
        let place = self.grid.place(expert.layer) as f64 / self.grid.moe().len() as f64;
        (self.sum[self.grid.cell(expert)] as f64 + PRIOR) * (1.0 - place)
    }
}
