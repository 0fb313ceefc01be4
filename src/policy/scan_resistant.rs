//! Eviction by expected next use: Belady's rule, with probabilities in place of the future. What
//! is used once and not again passes through without displacing what is used again and again; and
//! what a predictor foresees for the layers that come is kept until they have come.
//!
//! In steps of a layer, the next use of an expert is expected in d + (1 − q) · L / p, where
//! d is how many MoE layers come before its own, of L; q the probability that it is used when its
//! layer comes, as foreseen, or else p; and p the part of its layer's tokens that use it.
//!
//! p is the mean of two exponentially decayed frequencies. The short one sees that a token's
//! experts are likely to be the next token's; alone it would be LRU by another name. The long one
//! sees who is used throughout; alone it would learn a new text too slowly. A single use moves the
//! long one by next to nothing, and what it moves the short one has gone after some tokens.

use super::grid::Grid;
use super::{Event, Eviction, Expert, Routed, Shape};

/// Half-lives of the two frequencies, tokens.
const SHORT: f64 = 4.0;
const LONG: f64 = 128.0;
/// What p is of an expert without any use: it is next used in a million tokens.
const P_MIN: f64 = 1e-6;

#[derive(Clone, Debug)]
pub struct ScanResistant {
    grid: Grid,
    k: usize,
    experts: Vec<Record>, // [experts of the model]
    /// Probabilities to be used when the layer comes next: [experts of the model].
    foreseen: Vec<f64>,
    /// Whether those of a layer are of its next coming: [layers].
    is_foreseen: Vec<bool>,
    /// Tokens that each layer has seen: [layers].
    tokens: Vec<u64>,
    /// The place among the MoE layers of the one that comes next.
    next: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// Of the layer's token `last`.
    short: f64,
    long: f64,
    last: u64,
}

/// What is left of a frequency after a pause.
fn decay(pause: u64, half_life: f64) -> f64 {
    (-(pause as f64) / half_life).exp2()
}

impl ScanResistant {
    pub fn new(shape: &Shape) -> Self {
        let grid = Grid::new(shape);
        Self {
            k: shape.k,
            experts: vec![Record::default(); grid.n_cells()],
            foreseen: vec![0.0; grid.n_cells()],
            is_foreseen: vec![false; grid.n_layers()],
            tokens: vec![0; grid.n_layers()],
            next: 0,
            grid,
        }
    }

    fn routed(&mut self, layer: u32, chosen: &[u32]) {
        let now = &mut self.tokens[layer as usize];
        *now += 1;
        for &expert in chosen {
            let record = &mut self.experts[self.grid.cell(Expert { layer, expert })];
            let pause = *now - record.last;
            // A use adds as much as makes one of every token's experts have frequency 1.
            record.short = record.short * decay(pause, SHORT) + (1.0 - decay(1, SHORT));
            record.long = record.long * decay(pause, LONG) + (1.0 - decay(1, LONG));
            record.last = *now;
        }
        self.is_foreseen[layer as usize] = false;
        self.next = (self.grid.place(layer) + 1) % self.grid.moe().len();
    }

    /// A router's probabilities add up to 1, and a token uses k experts.
    fn foresee(&mut self, layer: u32, probs: &[f32]) {
        let row = &mut self.foreseen[self.grid.row(layer)];
        if row.len() == probs.len() {
            self.is_foreseen[layer as usize] = true;
            for (q, prob) in row.iter_mut().zip(probs) {
                // Neither of the two lets NaN through.
                *q = (f64::from(*prob) * self.k as f64).max(0.0).min(1.0);
            }
        }
    }
}

impl Eviction for ScanResistant {
    fn observe(&mut self, event: &Event<'_>) {
        match *event {
            Event::Routed(Routed { layer, chosen, .. }) => self.routed(layer, chosen),
            Event::Foreseen { layer, probs } => self.foresee(layer, probs),
            _ => {}
        }
    }

    /// Steps to the expected next use, negative.
    fn priority(&self, expert: Expert) -> f64 {
        let (cell, n_layers) = (self.grid.cell(expert), self.grid.moe().len());
        let record = self.experts[cell];
        let pause = self.tokens[expert.layer as usize] - record.last;
        let p = (record.short * decay(pause, SHORT) + record.long * decay(pause, LONG)) / 2.0;
        let p = p.max(P_MIN);
        let q = if self.is_foreseen[expert.layer as usize] { self.foreseen[cell] } else { p };
        let ahead = (self.grid.place(expert.layer) + n_layers - self.next) % n_layers;
        -(ahead as f64 + (1.0 - q) * n_layers as f64 / p)
    }
}
