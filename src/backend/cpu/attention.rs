//! Causal grouped-query attention over the KV cache. One (token, KV head) is one unit of work and
//! is computed in one order whatever the batch: scores by the float dot product, softmax, then the
//! values added position by position.

use super::{Cpu, SERIAL_WORK, SharedOut};
use crate::simd::Kernels;

/// Keys or values of one layer: [heads, n_ctx, dim].
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    F32 { data: &'a [f32], dim: usize, n_ctx: usize },
    F16 { data: &'a [u16], dim: usize, n_ctx: usize },
}

/// The same, to write.
pub enum RowsMut<'a> {
    F32 { data: &'a mut [f32], dim: usize, n_ctx: usize },
    F16 { data: &'a mut [u16], dim: usize, n_ctx: usize },
}

impl Rows<'_> {
    fn dim(&self) -> usize {
        match self {
            Rows::F32 { dim, .. } | Rows::F16 { dim, .. } => *dim,
        }
    }

    fn dot(&self, k: &Kernels, x: &[f32], head: usize, position: usize) -> f32 {
        match self {
            Rows::F32 { data, dim, n_ctx } => {
                k.dot_f32(x, &data[(head * n_ctx + position) * dim..][..*dim])
            }
            Rows::F16 { data, dim, n_ctx } => {
                k.dot_f16(x, &data[(head * n_ctx + position) * dim..][..*dim])
            }
        }
    }

    fn axpy(&self, k: &Kernels, acc: &mut [f32], a: f32, head: usize, position: usize) {
        match self {
            Rows::F32 { data, dim, n_ctx } => {
                k.axpy(acc, a, &data[(head * n_ctx + position) * dim..][..*dim])
            }
            Rows::F16 { data, dim, n_ctx } => {
                k.axpy_f16(acc, a, &data[(head * n_ctx + position) * dim..][..*dim])
            }
        }
    }
}

impl RowsMut<'_> {
    /// Stores `x` [tokens, heads, dim] at positions from `first` on.
    pub fn store(&mut self, k: &Kernels, x: &[f32], first: usize) {
        let (RowsMut::F32 { dim, n_ctx, .. } | RowsMut::F16 { dim, n_ctx, .. }) = self;
        let (dim, n_ctx) = (*dim, *n_ctx);
        let heads = match self {
            RowsMut::F32 { data, .. } => data.len(),
            RowsMut::F16 { data, .. } => data.len(),
        } / (n_ctx * dim);
        for (i, row) in x.chunks_exact(dim).enumerate() {
            let (position, head) = (first + i / heads, i % heads);
            assert!(position < n_ctx);
            let at = (head * n_ctx + position) * dim;
            match self {
                RowsMut::F32 { data, .. } => data[at..at + dim].copy_from_slice(row),
                RowsMut::F16 { data, .. } => k.f32_to_f16(row, &mut data[at..at + dim]),
            }
        }
    }
}

/// Shapes of one attention call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    pub n_head: usize,
    pub n_head_kv: usize,
    /// Position of the first query; the query of token t sees positions 0 ..= first + t.
    pub first: usize,
    /// Factor on the scores, 1/√head_dim as a rule.
    pub scale: f32,
}

impl Cpu {
    /// `q` [tokens, n_head, k dim] → `out` [tokens, n_head, v dim].
    pub fn attention(&self, shape: AttentionShape, q: &[f32], k: Rows, v: Rows, out: &mut [f32]) {
        let (k_dim, v_dim) = (k.dim(), v.dim());
        let tokens = q.len() / (shape.n_head * k_dim);
        assert_eq!(q.len(), tokens * shape.n_head * k_dim);
        assert_eq!(out.len(), tokens * shape.n_head * v_dim);
        let group = shape.n_head / shape.n_head_kv;
        let shared = SharedOut::new(out);
        // Late tokens see more positions, so they are taken first: the last pieces are the short
        // ones and no thread is left with a long one.
        let units = tokens * shape.n_head_kv;
        let work = tokens * shape.n_head * (shape.first + tokens) * (k_dim + v_dim);
        let chunk = if work <= SERIAL_WORK { units } else { 1 };
        self.chunks(units, chunk, &|scratch, range| {
            for unit in range {
                let unit = units - 1 - unit;
                let (t, head_kv) = (unit / shape.n_head_kv, unit % shape.n_head_kv);
                let n_seen = shape.first + t + 1;
                let first_head = t * shape.n_head + head_kv * group;
                let q = &q[first_head * k_dim..][..group * k_dim];
                // SAFETY: each unit's heads are its own.
                let out = unsafe { shared.slice(first_head * v_dim, group * v_dim) };
                let (_, scores) = scratch.split(group * n_seen);
                unit_attention(self.kernels, q, (k, v), head_kv, shape.scale, scores, out);
            }
        });
    }
}

/// One token, one KV head and the query heads that share it.
fn unit_attention(
    kernels: &Kernels,
    q: &[f32],
    (k, v): (Rows, Rows),
    head_kv: usize,
    scale: f32,
    scores: &mut [f32],
    out: &mut [f32],
) {
    let group = q.len() / k.dim();
    let n_seen = scores.len() / group;
    for position in 0..n_seen {
        for (g, q) in q.chunks_exact(k.dim()).enumerate() {
            scores[g * n_seen + position] = scale * k.dot(kernels, q, head_kv, position);
        }
    }
    out.fill(0.0);
    for scores in scores.chunks_exact_mut(n_seen) {
        kernels.softmax(scores);
    }
    for position in 0..n_seen {
        for (g, out) in out.chunks_exact_mut(v.dim()).enumerate() {
            v.axpy(kernels, out, scores[g * n_seen + position], head_kv, position);
        }
    }
}
