//! Routing: how a router chooses, its result, and the same grouped by expert.

use serde::Deserialize;
use std::ops::Range;

/// Stands for an expert where a token has none.
pub const NO_EXPERT: u32 = u32::MAX;

/// Stands for a pair where a token has no expert.
pub const NO_PAIR: u32 = u32::MAX;

const NO_SLOT: u32 = u32::MAX;

/// The rule that turns logits into probabilities and chooses experts by them. A layer's bias, added
/// to the probabilities for the choice but not for the weights, is an operand of its own.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    pub score: Score,
    /// Logits x become cap·tanh(x / cap) first; 0 leaves them.
    pub cap: f32,
    /// Weights are divided by their sum.
    pub normalize: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// The bias is added to the logits, not to the probabilities.
    pub bias_on_logits: bool,
    /// Experts form this many groups of equal size, of which a token uses the best
    /// `n_groups_used`.
    pub n_groups: usize,
    pub n_groups_used: usize,
    /// SparseMixer: an expert takes part if (best − s) / max(|s|, best) ≤ 2·jitter.
    pub jitter: f32,
}

impl Choice {
    /// Whether weights are divided by their sum. A softmax over the chosen experts alone is the
    /// softmax over all of them, divided by the sum over the chosen ones.
    pub fn normalizes(&self) -> bool {
        self.normalize || self.score == Score::SoftmaxChosen
    }
}

/// The function from a router's logits to probabilities.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Score {
    /// Over all experts, before the top k are taken.
    Softmax,
    /// Over the top k alone, which are taken by their logits.
    SoftmaxChosen,
    /// Each logit by itself.
    Sigmoid,
    /// √ln(1 + e^x), each logit x by itself (DeepSeek-V4).
    SqrtSoftplus,
    /// SparseMixer-v2 at inference (arXiv 2409.12136, and the inference code of Phi-3.5-MoE): the
    /// weight of each expert in turn is its share in the softmax over the experts that are left
    /// and whose logit s is near the best one; see `Choice::jitter`.
    SparseMixer,
}

/// The result of one layer's router for some tokens.
#[derive(Debug, Default)]
pub struct Route {
    pub k: usize,
    pub n_experts: usize,
    /// [tokens, n_experts]
    pub probs: Vec<f32>,
    /// [tokens, k], best first; `NO_EXPERT` where the chosen expert was full
    pub chosen: Vec<u32>,
    /// [tokens, k]
    pub weights: Vec<f32>,
    pub(in crate::backend) scratch: RouteScratch,
}

/// Scratch memory of the CPU router, reused from token to token.
#[derive(Debug, Default)]
pub(in crate::backend) struct RouteScratch {
    /// [n_experts]
    pub values: Vec<f32>,
    /// [n_groups]
    pub merits: Vec<f32>,
    /// [n_groups_used]
    pub best: Vec<u32>,
    /// [n_experts]: tokens that have gone to each.
    pub taken: Vec<usize>,
}

/// A smaller sum of groups' weights counts as this: the smallest normal number of f16.
const LEAST_SUM: f32 = 6.103_515_6e-5;

impl Route {
    /// One expert of this weight for each token: a dense layer.
    pub fn dense(&mut self, n_tokens: usize, weight: f32) {
        (self.k, self.n_experts) = (1, 1);
        self.probs.clear();
        self.chosen.clear();
        self.chosen.resize(n_tokens, 0);
        self.weights.clear();
        self.weights.resize(n_tokens, weight);
    }

    /// The decisions for tokens `rows`.
    pub fn rows(&self, rows: &Range<usize>) -> RouteRows<'_> {
        let Route { k, n_experts, .. } = *self;
        let chosen = rows.start * k..rows.end * k;
        let probs = match self.probs.is_empty() {
            true => &[][..],
            false => &self.probs[rows.start * n_experts..rows.end * n_experts],
        };
        let weights = &self.weights[chosen.clone()];
        RouteRows { k, n_experts, probs, chosen: &self.chosen[chosen], weights }
    }

    /// Appends the groups of each token's first `k` experts, `size` neighbouring ones a group, and
    /// the groups' weights: the probabilities of the experts with the groups' numbers, scaled to a
    /// sum of `scale`.
    pub fn groups(
        &self,
        k: usize,
        size: usize,
        scale: f32,
        groups: &mut Vec<u32>,
        weights: &mut Vec<f32>,
    ) {
        let rows = self.probs.chunks_exact(self.n_experts).zip(self.chosen.chunks_exact(self.k));
        for (probs, chosen) in rows {
            let start = groups.len();
            groups.extend(chosen[..k].iter().map(|expert| expert / size as u32));
            let probs = groups[start..].iter().map(|group| probs[*group as usize]);
            let factor = scale / probs.clone().sum::<f32>().max(LEAST_SUM);
            weights.extend(probs.map(|prob| prob * factor));
        }
    }

    /// Leaves each expert to the first `capacity` of the tokens `rows` that have chosen it (Switch
    /// Transformers, arXiv 2101.03961, section 2.2). The others get `NO_EXPERT`.
    pub fn limit(&mut self, rows: &Range<usize>, capacity: usize) {
        let taken = &mut self.scratch.taken;
        taken.clear();
        taken.resize(self.n_experts, 0);
        for expert in &mut self.chosen[rows.start * self.k..rows.end * self.k] {
            let taken = &mut taken[*expert as usize];
            *taken += 1;
            if *taken > capacity {
                *expert = NO_EXPERT;
            }
        }
    }
}

/// The decisions for some consecutive tokens.
#[derive(Clone, Copy, Debug)]
pub struct RouteRows<'a> {
    pub k: usize,
    pub n_experts: usize,
    /// [tokens, n_experts]; empty in a dense layer
    pub probs: &'a [f32],
    /// [tokens, k], best first; `NO_EXPERT` where the chosen expert had no room
    pub chosen: &'a [u32],
    /// [tokens, k]
    pub weights: &'a [f32],
}

/// Tokens grouped by expert. A *pair* is a (token, rank); the pairs of an expert are adjacent.
#[derive(Debug, Default)]
pub struct Demand {
    /// Distinct experts, in the order in which tokens first name them; a *slot* is an index here.
    pub experts: Vec<u32>,
    /// Pairs of slot s: `starts[s]..starts[s + 1]`.
    starts: Vec<usize>,
    /// Pair → row of the experts' input: its token, or one of its own.
    inputs: Vec<u32>,
    /// Rows of input that a token has.
    n_inputs: usize,
    /// [token, rank] → pair, or `NO_PAIR`
    places: Vec<u32>,
    k: usize,
    /// Expert → slot, for grouping.
    slot_of: Vec<u32>,
}

impl Route {
    /// Multiplies the weights of chosen experts by their factors.
    pub fn scale_weights(&mut self, scales: &[f32]) {
        let chosen = self.weights.iter_mut().zip(&self.chosen);
        chosen.filter(|(_, expert)| **expert != NO_EXPERT).for_each(|(weight, expert)| {
            *weight *= scales[*expert as usize];
        });
    }
}

impl Demand {
    /// Groups `chosen` [tokens, k], ids below `n_experts` or `NO_EXPERT`.
    pub fn group(&mut self, chosen: &[u32], k: usize, n_experts: usize) {
        assert!(k > 0 && chosen.len().is_multiple_of(k));
        (self.k, self.n_inputs) = (k, 1);
        self.experts.clear();
        self.slot_of.clear();
        self.slot_of.resize(n_experts, NO_SLOT);
        self.starts.clear();
        for &e in chosen.iter().filter(|e| **e != NO_EXPERT) {
            let slot = &mut self.slot_of[e as usize];
            if *slot == NO_SLOT {
                *slot = self.experts.len() as u32;
                self.experts.push(e);
                self.starts.push(0);
            }
            self.starts[*slot as usize] += 1;
        }
        let mut start = 0;
        for s in &mut self.starts {
            start += std::mem::replace(s, start);
        }
        self.starts.push(start);
        self.inputs.resize(start, 0);
        self.places.clear();
        self.places.resize(chosen.len(), NO_PAIR);
        // `starts[s]` runs to the end of slot s's pairs and is set back afterwards.
        for (i, &e) in chosen.iter().enumerate().filter(|(_, e)| **e != NO_EXPERT) {
            let next = &mut self.starts[self.slot_of[e as usize] as usize];
            self.inputs[*next] = (i / k) as u32;
            self.places[i] = *next as u32;
            *next += 1;
        }
        let n = self.experts.len();
        self.starts.copy_within(0..n, 1);
        self.starts[0] = 0;
    }

    /// Sends every token to expert 0: a dense or a shared expert.
    pub fn everyone(&mut self, n_tokens: usize) {
        (self.k, self.n_inputs) = (1, 1);
        self.experts.clear();
        self.experts.push(0);
        self.starts.clear();
        self.starts.extend([0, n_tokens]);
        self.inputs.clear();
        self.inputs.extend(0..n_tokens as u32);
        self.places.clear();
        self.places.extend(0..n_tokens as u32);
    }

    /// The pairs of different experts below `n_experts`: each expert with the number of its pairs,
    /// and the token of each pair. Their sums have no places: each pair is a result.
    pub fn set(
        &mut self,
        experts: impl Iterator<Item = (u32, usize)>,
        tokens: &[u32],
        n_experts: usize,
    ) {
        (self.k, self.n_inputs) = (1, 1);
        self.experts.clear();
        self.starts.clear();
        self.slot_of.clear();
        self.slot_of.resize(n_experts, NO_SLOT);
        let mut start = 0;
        for (slot, (expert, n_pairs)) in experts.enumerate() {
            self.slot_of[expert as usize] = slot as u32;
            self.experts.push(expert);
            self.starts.push(start);
            start += n_pairs;
        }
        assert_eq!(start, tokens.len(), "pairs and their tokens");
        self.starts.push(start);
        self.inputs.clear();
        self.inputs.extend_from_slice(tokens);
        self.places.clear();
    }

    /// Experts per token.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The number of `experts` that the first `n` tokens choose: these come first.
    pub fn n_chosen_by(&self, n: usize) -> usize {
        let first_token = |slot: usize| self.inputs[self.starts[slot]] as usize / self.n_inputs;
        (0..self.experts.len()).take_while(|slot| first_token(*slot) < n).count()
    }

    pub fn n_pairs(&self) -> usize {
        self.inputs.len()
    }

    /// The slot of an expert of this demand.
    pub fn slot(&self, expert: u32) -> usize {
        match self.experts.as_slice() {
            [only] if *only == expert => 0,
            _ => self.slot_of[expert as usize] as usize,
        }
    }

    pub fn pairs(&self, slot: usize) -> Range<usize> {
        self.starts[slot]..self.starts[slot + 1]
    }

    /// The first pair of each slot, and the end of the last.
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// Pair → row of the experts' input: its token, unless pairs have rows of their own.
    pub fn inputs(&self) -> &[u32] {
        &self.inputs
    }

    /// Gives each pair a row of input of its own: token · k + rank.
    pub fn split_inputs(&mut self) {
        self.n_inputs = self.k;
        for (row, pair) in self.places.iter().enumerate().filter(|(_, pair)| **pair != NO_PAIR) {
            self.inputs[*pair as usize] = row as u32;
        }
    }

    /// [token, rank] → pair, or `NO_PAIR` where a token has no expert.
    pub fn places(&self) -> &[u32] {
        &self.places
    }
}

/// Cuts the pairs of items, `starts[i]..starts[i + 1]` of item i, into tiles of at most `size`: of
/// each the item, its first pair, the number of its pairs, and 0. Items that are not wanted have
/// none.
pub fn tiles(starts: &[usize], size: usize, is_wanted: impl Fn(usize) -> bool) -> Vec<u32> {
    let items = starts.windows(2).enumerate().filter(|(item, _)| is_wanted(*item));
    let firsts = |(item, ends): (usize, &[usize])| {
        let end = ends[1];
        (ends[0]..end).step_by(size).map(move |first| (item, first, size.min(end - first)))
    };
    items
        .flat_map(firsts)
        .flat_map(|(item, first, n)| [item as u32, first as u32, n as u32, 0])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_expert_takes_no_more() {
        let mut route = Route { k: 1, n_experts: 3, ..Route::default() };
        route.chosen = vec![2, 0, 2, 2, 1, 2];
        let chosen = route.chosen.clone();
        route.limit(&(0..6), 2);
        assert_eq!(route.chosen, [2, 0, 2, NO_EXPERT, 1, NO_EXPERT]);
        // Each text has a count of its own.
        route.chosen = chosen;
        [0..3, 3..6].iter().for_each(|rows| route.limit(rows, 2));
        assert_eq!(route.chosen, [2, 0, 2, 2, 1, 2]);
    }
}
