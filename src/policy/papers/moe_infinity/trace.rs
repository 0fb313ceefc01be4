//! State of one request: its EAMs, and their products with past ones.

use super::eam::Eam;
use super::eamc::{Match, nearest};
use super::iteration::Iteration;
use super::past::Past;
use crate::policy::Prediction;
use crate::policy::grid::Grid;

/// Prefill and decode are traced apart (4.1).
#[derive(Clone, Debug)]
pub struct Trace {
    pub prefill: Eam,
    /// Whole iterations.
    pub decode: Eam,
    pub iteration: Iteration,
    /// With the past requests' EAMs of the same phase: [capacity].
    prefill_products: Vec<f32>,
    decode_products: Vec<f32>,
    /// The experts that it will use, most urgent first.
    pub predictions: Vec<Prediction>,
    /// Whether something has happened that they do not know of.
    pub is_due: bool,
}

impl Trace {
    pub fn new(grid: &Grid, past: &Past) -> Trace {
        Trace {
            prefill: Eam::new(grid),
            decode: Eam::new(grid),
            iteration: Iteration::new(&past.decode),
            prefill_products: past.prefill.zeros(),
            decode_products: past.decode.zeros(),
            predictions: Vec::new(),
            is_due: false,
        }
    }

    /// `counts`: tokens of each expert of the row that begins at this cell. Products with past
    /// prompts are kept until the first decode step.
    pub fn add_prompt(&mut self, past: &Past, row: usize, counts: &[u32]) {
        for (cell, n_tokens) in (row..).zip(counts).filter(|(_, n_tokens)| **n_tokens > 0) {
            self.prefill.add(cell, *n_tokens);
            if self.decode.is_empty() {
                past.prefill.add_products(cell, *n_tokens, &mut self.prefill_products);
            }
        }
    }

    /// The decode step under way is over, if there is one.
    pub fn end_iteration(&mut self) {
        if self.iteration.layer().is_some() {
            self.iteration.end(&mut self.decode, &mut self.decode_products);
        }
    }

    /// The past requests that resemble this one: in the rows that the step under way has, or
    /// before its first in all steps so far, or before the first step in the prompt.
    pub fn matches(&self, past: &Past, n: usize, out: &mut Vec<Match>) {
        if self.iteration.layer().is_some() {
            self.iteration.nearest(n, out);
        } else if !self.decode.is_empty() {
            nearest(&self.decode_products, past.decode.norms(), n, out);
        } else {
            nearest(&self.prefill_products, past.prefill.norms(), n, out);
        }
    }

    /// The past request that resembles all its decode steps most.
    pub fn most_similar(&self, past: &Past) -> Option<usize> {
        let mut out = Vec::new();
        nearest(&self.decode_products, past.decode.norms(), 1, &mut out);
        out.first().map(|found| found.1)
    }

    /// The request has ended. It joins the past if it has made decode steps. Where there is no room
    /// it replaces the one whose decode EAM is most similar (4.2): the collection is recent and
    /// stays diverse. Answers the place.
    pub fn join(&self, past: &mut Past) -> Option<usize> {
        if self.decode.is_empty() {
            return None;
        }
        let at = match past.decode.is_full() {
            false => past.decode.len(),
            // If it has no expert in common with anyone then all are equally far.
            true => self.most_similar(past).unwrap_or(0),
        };
        past.put(at, &self.prefill, &self.decode);
        Some(at)
    }

    /// Its own activations, where nothing resembles them.
    pub fn own(&self) -> &Eam {
        if self.decode.is_empty() { &self.prefill } else { &self.decode }
    }

    /// One of the past requests has been replaced.
    pub fn replaced(&mut self, past: &Past, at: usize) {
        self.iteration.replaced(&past.decode, at);
        self.decode_products[at] = past.decode.product(at, &self.decode);
        self.prefill_products[at] = past.prefill.product(at, &self.prefill);
    }
}
