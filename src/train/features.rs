//! A layer's samples in pairs: what its network is given and what it should say.

use std::ops::Range;

use super::samples::{LayerSamples, Samples};
use crate::policy::Shape;
use crate::policy::papers::prescope::llapor::{Linear, push_choice};

/// The input side of one layer's prediction: the earlier layer's samples.
pub struct Source<'a> {
    pub layer: &'a LayerSamples,
    pub n_embd: usize,
    pub n_experts: usize,
    pub k: usize,
    /// For the first layers: it is one of the last, and what it did for the token before.
    before: Option<&'a [bool]>,
}

impl<'a> Source<'a> {
    /// The source of MoE layer number `at`: the one `distance` MoE layers before, of which there
    /// are as many at least.
    pub fn of(shape: &Shape, samples: &'a Samples, at: usize, distance: usize) -> Source<'a> {
        let moe: Vec<usize> = shape.moe_layers().collect();
        let source = (at + moe.len() - distance) % moe.len();
        Source {
            layer: &samples.layers[source],
            n_embd: samples.n_embd,
            n_experts: shape.n_experts[moe[source]],
            k: shape.k,
            before: (at < distance).then_some(&samples.follows),
        }
    }

    /// The tokens of these rows that can be predicted, each with the row it is predicted from,
    /// which is one of these, too.
    pub fn pairs(&self, rows: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
        let start = rows.start;
        rows.filter_map(move |row| match self.before {
            None => Some((row, row)),
            Some(follows) => (row > start && follows[row]).then(|| (row - 1, row)),
        })
    }

    pub fn hidden(&self, row: usize) -> &'a [f32] {
        &self.layer.hidden[row * self.n_embd..][..self.n_embd]
    }

    pub fn chosen(&self, row: usize) -> &'a [u32] {
        &self.layer.chosen[row * self.k..][..self.k]
    }

    pub fn probs(&self, row: usize) -> &'a [f32] {
        &self.layer.probs[row * self.n_experts..][..self.n_experts]
    }
}

/// All examples of a layer.
pub struct Set {
    pub n_pca: usize,
    pub n_source: usize,
    pub n_experts: usize,
    /// x: [n, n_pca + 2 n_source], rows in turn.
    pub inputs: Vec<f32>,
    /// The experts of each example: [n, k].
    pub chosen: Vec<u32>,
    pub k: usize,
}

impl Set {
    pub fn new(
        source: &Source<'_>,
        target: &LayerSamples,
        n_experts: usize,
        compress: &Linear,
        rows: Range<usize>,
    ) -> Set {
        let (mut inputs, mut chosen, mut z) = (Vec::new(), Vec::new(), Vec::new());
        for (from, to) in source.pairs(rows) {
            compress.apply(source.hidden(from), &mut z);
            inputs.extend_from_slice(&z);
            push_choice(source.chosen(from), source.probs(from), source.n_experts, &mut inputs);
            chosen.extend_from_slice(&target.chosen[to * source.k..][..source.k]);
        }
        let (n_pca, n_source, k) = (compress.n_out(), source.n_experts, source.k);
        Set { n_pca, n_source, n_experts, inputs, chosen, k }
    }

    pub fn n_inputs(&self) -> usize {
        self.n_pca + 2 * self.n_source
    }

    pub fn len(&self) -> usize {
        self.chosen.len() / self.k
    }

    pub fn input(&self, at: usize) -> &[f32] {
        &self.inputs[at * self.n_inputs()..][..self.n_inputs()]
    }

    pub fn chosen(&self, at: usize) -> &[u32] {
        &self.chosen[at * self.k..][..self.k]
    }

    /// Examples that choose each expert.
    pub fn counts(&self) -> Vec<u32> {
        let mut counts = vec![0; self.n_experts];
        self.chosen.iter().for_each(|&expert| counts[expert as usize] += 1);
        counts
    }
}
