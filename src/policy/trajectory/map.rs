//! The linear map. A token's summary is the sum of one vector for each expert that the token has
//! chosen, in all layers. What the next token uses is a linear function of this summary and of the
//! summary that the next token's number lets expect; what the tokens after that use is one of this
//! summary and of those before it.
//!
//! All is learned from each token by steps of recursive least squares. The summary itself is made
//! to tell what its token has chosen, which makes it the token's principal components (the
//! projection approximation of Yang, 1995).

use super::gain::Gain;
use super::tokens::Tokens;
use super::vector::{Input, RANK, Vector, WIDTH, add_scaled, approach, difference, dot, joined};
use crate::policy::mix;

/// The least weight of a token in the mean of all summaries.
const MEAN_WEIGHT: f32 = 1.0 / 128.0;

/// Tokens' worth of doubt in what is learned. What tokens do over a while differs less from what
/// they usually do.
const RIDGE: f32 = 30.0;
const LATER_RIDGE: f32 = 300.0;

/// After so many tokens half of what was learned of the tokens to come counts. A text of some
/// hundred tokens, and a model of many experts, teach what is chance.
const TRUSTED: f32 = 1000.0;

/// The vectors of an expert.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// Its part of the summary of a token that chose it.
    pub own: Vector,
    /// The change of its probability for the next token: by the summary, and by the next token's
    /// expected one.
    pub next: Input,
    /// The change of its rate over the tokens to come: by the summary, and by a mean of late.
    pub later: Input,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Map {
    pub(super) weights: Vec<Weights>, // [cells]
    pub(super) own: Gain<RANK>,
    pub(super) next: Gain<WIDTH>,
    pub(super) later: Gain<WIDTH>,
    /// The mean of the summaries so far, and their number.
    pub(super) mean: Vector,
    pub(super) n_tokens: u64,
    pub(super) tokens: Tokens,
}

/// An input, kept until its outcome is known.
#[derive(Clone, Debug)]
pub struct Lesson<const N: usize> {
    pub input: [f32; N],
    pub gain: [f32; N],
}

impl<const N: usize> Lesson<N> {
    fn teach(&self, weights: &mut [f32; N], outcome: f32) {
        add_scaled(weights, outcome - dot(weights, &self.input), &self.gain);
    }
}

impl Map {
    /// Knows nothing yet: summaries are sums of random signs.
    pub fn new(n_cells: usize) -> Map {
        let size = 1.0 / (n_cells.max(1) as f32).sqrt();
        let sign = |seed: u64| if mix(seed) >> 63 == 0 { size } else { -size };
        let weights = (0..n_cells * RANK).step_by(RANK).map(|first| Weights {
            own: std::array::from_fn(|i| sign((first + i) as u64)),
            next: [0.0; WIDTH],
            later: [0.0; WIDTH],
        });
        Map {
            weights: weights.collect(),
            own: Gain::new(RIDGE),
            next: Gain::new(RIDGE),
            later: Gain::new(LATER_RIDGE),
            mean: [0.0; RANK],
            n_tokens: 0,
            tokens: Tokens::new(),
        }
    }

    /// The part of the summary that a choice in one layer makes; `first`: the layer's first cell.
    pub fn part(&self, first: usize, chosen: &[u32]) -> Vector {
        let mut part = [0.0; RANK];
        chosen.iter().for_each(|expert| {
            add_scaled(&mut part, 1.0, &self.weights[first + *expert as usize].own);
        });
        part
    }

    /// The input to expect the next token from; `token`: its number, where it is known.
    pub fn input(&self, summary: &Vector, token: Option<u32>) -> Input {
        let expected = token.map_or([0.0; RANK], |token| self.tokens.expected(token));
        joined(&self.centred(summary), &expected)
    }

    /// The summary without the mean.
    pub fn centred(&self, summary: &Vector) -> Vector {
        difference(summary, &self.mean)
    }

    /// A token begins, which this was to foretell.
    pub fn begin_token(&mut self, input: Input) -> Lesson<WIDTH> {
        Lesson { gain: self.next.learn(&input), input }
    }

    /// A token is complete.
    pub fn end_token(&mut self, summary: &Vector, token: Option<u32>) -> Lesson<RANK> {
        self.n_tokens += 1;
        let weight = (1.0 / self.n_tokens as f32).max(MEAN_WEIGHT);
        approach(&mut self.mean, weight, summary);
        let summary = difference(summary, &self.mean);
        if let Some(token) = token {
            self.tokens.learn(token, &summary);
        }
        Lesson { gain: self.own.learn(&summary), input: summary }
    }

    /// Learns whether a token has chosen an expert; `usual`: how often tokens do, 0 to 1.
    pub fn learn_own(&mut self, cell: usize, lesson: &Lesson<RANK>, own: f32, usual: f32) {
        lesson.teach(&mut self.weights[cell].own, own - usual);
    }

    /// Learns whether the next token has, of which its rate of use made it expect so much.
    pub fn learn_next(&mut self, cell: usize, lesson: &Lesson<WIDTH>, next: f32, rate: f32) {
        lesson.teach(&mut self.weights[cell].next, next - rate);
    }

    /// Learns what tokens did behind one that had this input: `change` is how much more often than
    /// expected they chose each expert, [cells].
    pub fn learn_later(&mut self, input: Input, change: impl Fn(usize) -> f32) {
        let lesson = Lesson { gain: self.later.learn(&input), input };
        for (cell, weights) in self.weights.iter_mut().enumerate() {
            lesson.teach(&mut weights.later, change(cell));
        }
    }

    /// The probability that the next token uses an expert.
    pub fn expected(&self, cell: usize, rate: f32, input: &Input) -> f32 {
        probability(rate + dot(&self.weights[cell].next, input))
    }

    /// The probability that a token of which no number is known uses an expert, by the summary
    /// before it, without the mean.
    pub fn expected_of_any(&self, cell: usize, rate: f32, summary: &Vector) -> f32 {
        let (by_summary, _) = self.weights[cell].next.split_first_chunk().expect("two vectors");
        probability(rate + dot::<RANK>(by_summary, summary))
    }

    /// How much more often than of late the tokens to come use an expert: -1 to 1.
    pub fn change_later(&self, cell: usize, input: &Input) -> f32 {
        let n = self.n_tokens as f32 / TRUSTED;
        let trust = n * n / (1.0 + n * n);
        let change = trust * dot(&self.weights[cell].later, input);
        if change.is_nan() { 0.0 } else { change.clamp(-1.0, 1.0) }
    }
}

/// The least probability, and that of the contrary.
const LEAST: f32 = 1e-3;

fn probability(p: f32) -> f32 {
    if p.is_nan() { LEAST } else { p.clamp(LEAST, 1.0 - LEAST) }
}
