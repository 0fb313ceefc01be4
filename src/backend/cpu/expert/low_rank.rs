//! Adapters of experts. Gate and up get theirs row by row as granules are computed, down gets its
//! own from a pair's whole intermediate row, once the granules are summed: how an expert is cut
//! changes no bit.

use super::ExpertBuffers;
use crate::backend::cpu::acts::ActSet;
use crate::backend::cpu::low_rank::{expand, project};
use crate::backend::cpu::{Cpu, SharedOut};
use crate::backend::ops::{Adapted, AdaptedExperts, Demand, NO_PAIR};
use crate::gguf::TensorType;
use crate::simd::Kernels;
use std::ops::Range;

/// The scaled A·x of the pairs of a demand.
#[derive(Default)]
pub struct PairRanks {
    /// [pairs]: expert, and row of the batch
    pairs: Vec<(u32, u32)>,
    /// [pairs, ranks]
    gate: Vec<f32>,
    up: Vec<f32>,
}

impl PairRanks {
    /// Adds B's rows `rows` of a pair to its products of gate and up, which may be empty.
    pub fn add(
        &self,
        kernels: &Kernels,
        adapted: &AdaptedExperts<'_>,
        pair: usize,
        rows: &Range<usize>,
        [gate, up]: [&mut [f32]; 2],
    ) {
        let expert = self.pairs[pair].0 as usize;
        for (adapted, ranks, out) in
            [(&adapted.gate, &self.gate, gate), (&adapted.up, &self.up, up)]
        {
            let n = adapted.n_ranks();
            let ranks = &ranks[pair * n..][..n];
            expand(kernels, adapted, expert, ranks, rows.clone(), out);
        }
    }
}

impl Cpu {
    /// Prepares a layer's adapters, after [`ExpertBuffers::begin`]; `x` has the experts' inputs.
    pub fn begin_low_rank(
        &self,
        adapted: &AdaptedExperts<'_>,
        demand: &Demand,
        x: &ActSet,
        buffers: &mut ExpertBuffers,
    ) {
        let PairRanks { pairs, gate, up } = &mut buffers.ranks;
        pairs.clear();
        pairs.resize(demand.n_pairs(), (0, 0));
        for (slot, expert) in demand.experts.iter().enumerate() {
            pairs[demand.pairs(slot)].fill((*expert, 0));
        }
        let places = demand.places().iter().enumerate().filter(|(_, pair)| **pair != NO_PAIR);
        places.for_each(|(i, pair)| pairs[*pair as usize].1 = (i / demand.k()) as u32);
        let view = x.view(TensorType::F32);
        for (adapted, out) in [(&adapted.gate, gate), (&adapted.up, up)] {
            let n = adapted.n_ranks();
            out.clear();
            out.resize(pairs.len() * n, 0.0);
            if n > 0 {
                self.project_pairs(adapted, pairs, n, out, |pair| {
                    view.f32s(demand.inputs()[pair] as usize)
                });
            }
        }
    }

    /// Adds down's adapters to the sums of all pairs, once all granules are computed.
    pub fn end_low_rank(&self, adapted: &Adapted<'_>, buffers: &mut ExpertBuffers) {
        let (n, n_ff, n_embd) = (adapted.n_ranks(), buffers.n_ff, buffers.n_embd);
        if n == 0 {
            return;
        }
        let (pairs, inner) = (&buffers.ranks.pairs, &buffers.inner);
        let partial = SharedOut::new(&mut buffers.partial);
        let chunk = self.token_chunk(pairs.len(), n * (n_ff + n_embd));
        self.chunks(pairs.len(), chunk, &|scratch, range| {
            for pair in range {
                let (expert, row) = pairs[pair];
                let (_, ranks) = scratch.split(n);
                let (row, expert) = (row as usize, expert as usize);
                let inner = &inner[pair * n_ff..][..n_ff];
                project(self.kernels, adapted, row, expert, inner, ranks);
                // SAFETY: each pair is in one chunk.
                let sum = unsafe { partial.slice(pair * n_embd, n_embd) };
                expand(self.kernels, adapted, expert, ranks, 0..n_embd, sum);
            }
        });
    }

    fn project_pairs<'x>(
        &self,
        adapted: &Adapted<'_>,
        pairs: &[(u32, u32)],
        n: usize,
        out: &mut [f32],
        x: impl Fn(usize) -> &'x [f32] + Sync,
    ) {
        let out = SharedOut::new(out);
        self.chunks(pairs.len(), self.token_chunk(pairs.len(), n * 256), &|_, range| {
            for pair in range {
                let (expert, row) = pairs[pair];
                // SAFETY: each pair is in one chunk.
                let out = unsafe { out.slice(pair * n, n) };
                project(self.kernels, adapted, row as usize, expert as usize, x(pair), out);
            }
        });
    }
}
