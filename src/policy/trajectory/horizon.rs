//! The tokens of one text behind the very next one. Their use decides mostly which experts are
//! worth keeping: half of the experts in memory are replaced in some sixty tokens.

use std::collections::VecDeque;

use super::map::Map;
use super::vector::{Input, RANK, Vector, approach, joined};

/// Tokens that are looked ahead. Of 4 to 32, 8 served a quarter of the experts in memory best, and
/// half of them as well as any.
const AHEAD: usize = 8;

/// The half-life of the mean summary, tokens.
const HALF_LIFE: f32 = 2.0;

#[derive(Clone, Debug)]
pub struct Horizon {
    /// A decayed mean of the summaries of late.
    mean: Vector,
    /// Inputs whose outcome is not known yet, and the rates at that time: [tokens][cells].
    past: VecDeque<(Input, Vec<f32>)>,
    /// Choices of the last tokens, as cells, and how many of them chose each.
    used: VecDeque<Vec<u32>>,
    n_used: Vec<f32>, // [cells]
    /// How much more often than of late the tokens to come use each expert.
    pub changes: Vec<f32>, // [cells]
}

impl Horizon {
    pub fn new(n_cells: usize) -> Horizon {
        Horizon {
            mean: [0.0; RANK],
            past: VecDeque::new(),
            used: VecDeque::new(),
            n_used: vec![0.0; n_cells],
            changes: vec![0.0; n_cells],
        }
    }

    /// The text does not go on from its last token.
    pub fn forget(&mut self) {
        *self = Horizon::new(self.n_used.len());
    }

    /// A token is complete, with this summary without the mean of all, and has chosen these cells.
    /// `rate`: how often tokens have chosen a cell of late.
    pub fn end_token(
        &mut self,
        map: &mut Map,
        summary: &Vector,
        chosen: Vec<u32>,
        rate: impl Fn(usize) -> f32,
    ) {
        chosen.iter().for_each(|cell| self.n_used[*cell as usize] += 1.0);
        self.used.push_back(chosen);
        let mut rates = Vec::new();
        if self.past.len() == AHEAD
            && let Some((input, before)) = self.past.pop_front()
        {
            if self.used.len() > AHEAD
                && let Some(oldest) = self.used.pop_front()
            {
                oldest.iter().for_each(|cell| self.n_used[*cell as usize] -= 1.0);
            }
            map.learn_later(input, |cell| self.n_used[cell] / AHEAD as f32 - before[cell]);
            rates = before;
        }
        approach(&mut self.mean, 1.0 - (-1.0 / HALF_LIFE).exp2(), summary);
        let input = joined(summary, &self.mean);
        rates.clear();
        rates.extend((0..self.n_used.len()).map(rate));
        self.past.push_back((input, rates));
    }

    /// Updates the changes to expect behind the last token.
    pub fn expect(&mut self, map: &Map) {
        if let Some((input, _)) = self.past.back() {
            for (cell, change) in self.changes.iter_mut().enumerate() {
                *change = map.change_later(cell, input);
            }
        }
    }
}
