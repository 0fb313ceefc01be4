//! From the traces to a list: matching, aggregation and layer proximity, the three steps of 5.1
//! and Figure 7.

use super::InfinityOptions;
use super::eam::Eam;
use super::eamc::Match;
use super::past::Past;
use super::trace::Trace;
use crate::policy::grid::Grid;
use crate::policy::ranks::Ranks;
use crate::policy::{Prediction, Shape};

/// A layer's predictions, in experts that a token uses there. In Table 3 the method moves 1.3 to
/// 1.9 times what is used.
const LAYER_SHARE: usize = 2;
/// The bound for all layers together. Most predicted experts are resident; in the time of one token
/// some tens of others can be loaded.
const MAX_PREDICTIONS: usize = 256;

/// The part that events do not change.
#[derive(Clone, Debug)]
pub struct Frame {
    pub grid: Grid,
    options: InfinityOptions,
    k: usize,
    pub n_predictions: usize,
}

impl Frame {
    /// Predictions are never more than the tier holds: K of 5.1.
    pub fn new(shape: &Shape, options: InfinityOptions) -> Frame {
        assert!(options.n_matches > 0, "a prediction needs a match");
        let n_predictions = experts_held(shape).clamp(1, MAX_PREDICTIONS);
        Frame { grid: Grid::new(shape), options, k: shape.k, n_predictions }
    }

    /// 1 − (i − l)/L for the i-th and the l-th of L MoE layers, where l is the one reached, or −1
    /// before the first: then the last layer has no weight.
    fn nearness(&self, i: usize, next: usize) -> f32 {
        let ahead = (i + 1 - next) as f32;
        if self.options.layer_proximity { 1.0 - ahead / self.grid.moe().len() as f32 } else { 1.0 }
    }
}

/// Experts that the tier has room for; as many as one likes where that is not known.
fn experts_held(shape: &Shape) -> usize {
    let held = shape.n_slots.iter().enumerate().map(|(class, n_slots)| {
        let layers = shape.n_granules.iter().zip(&shape.class);
        let of_class = layers.filter(|(_, of)| **of == class).map(|(n_granules, _)| *n_granules);
        n_slots / of_class.max().unwrap_or(0).max(1)
    });
    if shape.n_slots.is_empty() { usize::MAX } else { held.sum() }
}

/// Room to work in.
#[derive(Clone, Debug, Default)]
pub struct Prefetcher {
    matches: Vec<Match>,
    /// A row of what is added up.
    row: Vec<u32>,
    of_row: Ranks,
    of_all: Ranks,
}

impl Prefetcher {
    /// Puts into the trace what its request will use. `lifetime`: all decode steps ever seen.
    pub fn update(&mut self, frame: &Frame, past: &Past, lifetime: &Eam, trace: &mut Trace) {
        let options = &frame.options;
        self.matches.clear();
        if options.request_level {
            trace.matches(past, options.n_matches, &mut self.matches);
        }
        let counts = if options.request_level { trace.own() } else { lifetime };
        let layers = frame.grid.moe();
        let next = trace.iteration.layer().map_or(0, |layer| frame.grid.place(layer) + 1);
        let end = if options.multi_layer { layers.len() } else { layers.len().min(next + 1) };
        self.of_all.clear();
        for (i, layer) in layers.iter().enumerate().take(end).skip(next) {
            let nearness = frame.nearness(i, next);
            if nearness > 0.0 {
                let row = frame.grid.row(*layer);
                self.row.clear();
                self.row.resize(row.len(), 0);
                if self.matches.is_empty() {
                    self.row.copy_from_slice(&counts.cells()[row.clone()]);
                }
                for (_, at) in &self.matches {
                    let counts = &past.decode.matrix(*at)[row.clone()];
                    self.row.iter_mut().zip(counts).for_each(|(sum, n)| *sum += u32::from(*n));
                }
                self.rank_row(frame, row.start, nearness);
            }
        }
        let best = self.of_all.best(frame.n_predictions);
        trace.predictions.clear();
        trace.predictions.extend(best.map(|(priority, cell)| Prediction {
            expert: frame.grid.expert(cell as usize),
            priority,
        }));
    }

    /// Normalised, a row adds up to 1, and a token uses k of its experts: so p is k times that.
    fn rank_row(&mut self, frame: &Frame, start: usize, nearness: f32) {
        let total: u64 = self.row.iter().map(|count| u64::from(*count)).sum();
        let p_of_one = frame.k as f32 / total.max(1) as f32;
        self.of_row.clear();
        for (cell, count) in (start as u32..).zip(&self.row) {
            if *count > 0 {
                self.of_row.push(*count as f32, cell);
            }
        }
        for (count, cell) in self.of_row.best(LAYER_SHARE * frame.k) {
            self.of_all.push((count * p_of_one).min(1.0) * nearness, cell);
        }
    }
}
