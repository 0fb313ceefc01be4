//! The linear map. A token's summary is the sum of one vector for each expert that the token has
//! chosen, in all layers; what the next token uses is a linear function of the summary.
//!
//! Both halves are learned from each token by one step of recursive least squares: the summary is
//! made to tell what the token itself has chosen (which makes it the token's principal components:
//! the projection approximation of Yang, 1995), and what the next one chooses.

use super::gain::Gain;
use super::vector::{RANK, Vector, add_scaled, difference, dot};
use crate::policy::mix;

/// The least weight of a token in the mean of all summaries.
const MEAN_WEIGHT: f32 = 1.0 / 128.0;

/// Two vectors of an expert.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// Its part of the summary of a token that chose it.
    pub own: Vector,
    /// The change of its probability for the next token, by the summary.
    pub next: Vector,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Map {
    pub(super) weights: Vec<Weights>, // [cells]
    pub(super) gain: Gain,
    /// The mean of the summaries so far, and their number.
    pub(super) mean: Vector,
    pub(super) n_tokens: u64,
}

/// A complete token, kept for the step that its successor makes possible.
#[derive(Clone, Debug)]
pub struct Lesson {
    /// The token's summary, without the mean.
    pub summary: Vector,
    pub gain: Vector,
}

/// The use of one expert by a token and by the next.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Whether the token chose it, and how often tokens do: 0 to 1.
    pub own: f32,
    pub usual: f32,
    /// `own` of the next token.
    pub next: f32,
    pub rate: f32,
}

impl Map {
    /// Knows nothing yet: summaries are sums of random signs.
    pub fn new(n_cells: usize) -> Map {
        let size = 1.0 / (n_cells.max(1) as f32).sqrt();
        let sign = |seed: u64| if mix(seed) >> 63 == 0 { size } else { -size };
        let weights = (0..n_cells * RANK).step_by(RANK).map(|first| Weights {
            own: std::array::from_fn(|i| sign((first + i) as u64)),
            next: [0.0; RANK],
        });
        Map { weights: weights.collect(), gain: Gain::new(), mean: [0.0; RANK], n_tokens: 0 }
    }

    /// The part of the summary that a choice in one layer makes; `first`: the layer's first cell.
    pub fn part(&self, first: usize, chosen: &[u32]) -> Vector {
        let mut part = [0.0; RANK];
        chosen.iter().for_each(|expert| {
            add_scaled(&mut part, 1.0, &self.weights[first + *expert as usize].own);
        });
        part
    }

    /// The summary without the mean.
    pub fn centred(&self, summary: &Vector) -> Vector {
        difference(summary, &self.mean)
    }

    /// A token is complete.
    pub fn end_token(&mut self, summary: &Vector) -> Lesson {
        self.n_tokens += 1;
        let weight = (1.0 / self.n_tokens as f32).max(MEAN_WEIGHT);
        let step = difference(summary, &self.mean);
        add_scaled(&mut self.mean, weight, &step);
        let summary = self.centred(summary);
        Lesson { gain: self.gain.learn(&summary), summary }
    }

    /// Learns from one expert.
    pub fn learn(&mut self, cell: usize, lesson: &Lesson, outcome: Outcome) {
        let Outcome { own, usual, next, rate } = outcome;
        let weights = &mut self.weights[cell];
        let error = next - rate - dot(&weights.next, &lesson.summary);
        add_scaled(&mut weights.next, error, &lesson.gain);
        let error = own - usual - dot(&weights.own, &lesson.summary);
        add_scaled(&mut weights.own, error, &lesson.gain);
    }

    /// The probability that the next token uses an expert, given a summary without the mean.
    pub fn expected(&self, cell: usize, rate: f32, summary: &Vector) -> f32 {
        let p = rate + dot(&self.weights[cell].next, summary);
        if p.is_nan() { LEAST } else { p.clamp(LEAST, 1.0 - LEAST) }
    }
}

/// The least probability, and that of the contrary.
const LEAST: f32 = 1e-3;
