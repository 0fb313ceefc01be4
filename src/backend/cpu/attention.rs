//! Grouped-query attention over the KV cache, causal or not. One (token, KV head) is one unit of
//! work and is computed in one order whatever the batch: scores by the float dot product, softmax,
//! then the values added position by position.

use super::{Cpu, SERIAL_WORK, SharedOut};
use crate::simd::Kernels;
use std::ops::Range;

/// Keys or values of one layer: rows of `dim` elements at [heads, n_ctx], `stride` elements from
/// one to the next.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub data: Elements<'a>,
    pub dim: usize,
    pub stride: usize,
    pub n_ctx: usize,
}

#[derive(Clone, Copy)]
pub enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
}

/// The same, to write.
pub enum RowsMut<'a> {
    F32 { data: &'a mut [f32], dim: usize, n_ctx: usize },
    F16 { data: &'a mut [u16], dim: usize, n_ctx: usize },
}

impl Rows<'_> {
    /// The first `dim` elements of each row.
    pub fn narrow(self, dim: usize) -> Self {
        assert!(dim <= self.dim);
        Rows { dim, ..self }
    }

    fn dot(&self, k: &Kernels, x: &[f32], head: usize, position: usize) -> f32 {
        let at = (head * self.n_ctx + position) * self.stride;
        match self.data {
            Elements::F32(data) => k.dot_f32(x, &data[at..][..self.dim]),
            Elements::F16(data) => k.dot_f16(x, &data[at..][..self.dim]),
        }
    }

    fn axpy(&self, k: &Kernels, acc: &mut [f32], a: f32, head: usize, position: usize) {
        let at = (head * self.n_ctx + position) * self.stride;
        match self.data {
            Elements::F32(data) => k.axpy(acc, a, &data[at..][..self.dim]),
            Elements::F16(data) => k.axpy_f16(acc, a, &data[at..][..self.dim]),
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

/// One attention call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape<'a> {
    pub n_head: usize,
    pub n_head_kv: usize,
    /// Position of the first query; the query of token t sees positions up to first + t.
    pub first: usize,
    /// Unless each query sees as many positions as this, whatever its own.
    pub all: Option<usize>,
    /// How many of these, counted back from its own, it sees.
    pub window: Option<usize>,
    /// Factor on the scores, 1/√head_dim as a rule.
    pub scale: f32,
    /// A score a head that takes part in the softmax and has no value (attention sinks,
    /// arXiv 2309.17453, as learned by gpt-oss).
    pub sinks: Option<&'a [f32]>,
    /// Added to the scores.
    pub bias: Option<&'a DistanceBias>,
}

/// A number a head and a distance of key and query; farther away than `reach` it changes no more.
#[derive(Clone, Debug)]
pub struct DistanceBias {
    reach: usize,
    /// [n_head, 2·reach + 1], from the farthest key before the query to the farthest behind it
    values: Vec<f32>,
}

impl DistanceBias {
    /// `of(head, distance)` says the numbers; distances are key minus query, −reach to reach.
    pub fn new(n_head: usize, reach: usize, of: impl Fn(usize, isize) -> f32) -> DistanceBias {
        let distances = || -(reach as isize)..=reach as isize;
        let head = |h: usize| distances().map(|d| of(h, d)).collect::<Vec<f32>>();
        DistanceBias { reach, values: (0..n_head).flat_map(head).collect() }
    }

    fn of(&self, head: usize, key: usize, query: usize) -> f32 {
        let (first, last) = (query.saturating_sub(self.reach), query + self.reach);
        let key = key.clamp(first, last);
        self.values[head * (2 * self.reach + 1) + key + self.reach - query]
    }
}

impl Cpu {
    /// `q` [tokens, n_head, k dim] → `out` [tokens, n_head, v dim].
    pub fn attention(&self, shape: AttentionShape, q: &[f32], k: Rows, v: Rows, out: &mut [f32]) {
        let (k_dim, v_dim) = (k.dim, v.dim);
        let tokens = q.len() / (shape.n_head * k_dim);
        assert_eq!(q.len(), tokens * shape.n_head * k_dim);
        assert_eq!(out.len(), tokens * shape.n_head * v_dim);
        let group = shape.n_head / shape.n_head_kv;
        let shared = SharedOut::new(out);
        // Late tokens see more positions, so they are taken first: the last pieces are the short
        // ones and no thread is left with a long one.
        let units = tokens * shape.n_head_kv;
        let most = shape.all.unwrap_or(shape.first + tokens);
        let work = tokens * shape.n_head * most * (k_dim + v_dim);
        let chunk = if work <= SERIAL_WORK { units } else { 1 };
        self.chunks(units, chunk, &|scratch, range| {
            for unit in range {
                let unit = units - 1 - unit;
                let (t, head_kv) = (unit / shape.n_head_kv, unit % shape.n_head_kv);
                let query = shape.first + t;
                let end = shape.all.unwrap_or(query + 1);
                let seen = end.saturating_sub(shape.window.unwrap_or(end))..end;
                let first_head = t * shape.n_head + head_kv * group;
                let q = &q[first_head * k_dim..][..group * k_dim];
                // SAFETY: each unit's heads are its own.
                let out = unsafe { shared.slice(first_head * v_dim, group * v_dim) };
                let (_, scores) = scratch.split(group * (seen.len() + 1));
                let (first, scale, bias) = (head_kv * group, shape.scale, shape.bias);
                let heads = Heads { q, first, query, kv: head_kv, seen, scale, bias };
                let sinks = shape.sinks.map(|s| &s[head_kv * group..][..group]);
                unit_attention(self.kernels, heads, (k, v), sinks, scores, out);
            }
        });
    }
}

/// One token, one KV head and the query heads that share it.
struct Heads<'a> {
    q: &'a [f32],
    /// The first of the query heads.
    first: usize,
    /// The token's position.
    query: usize,
    kv: usize,
    seen: Range<usize>,
    scale: f32,
    bias: Option<&'a DistanceBias>,
}

/// `scores` has room for one more a head than there are positions: the sink's.
fn unit_attention(
    kernels: &Kernels,
    heads: Heads,
    (k, v): (Rows, Rows),
    sinks: Option<&[f32]>,
    scores: &mut [f32],
    out: &mut [f32],
) {
    let n_seen = heads.seen.len();
    for (i, position) in heads.seen.clone().enumerate() {
        for (g, q) in heads.q.chunks_exact(k.dim).enumerate() {
            let score = heads.scale * k.dot(kernels, q, heads.kv, position);
            let bias = heads.bias.map(|bias| bias.of(heads.first + g, position, heads.query));
            scores[g * (n_seen + 1) + i] = bias.map_or(score, |bias| score + bias);
        }
    }
    out.fill(0.0);
    for (g, scores) in scores.chunks_exact_mut(n_seen + 1).enumerate() {
        match sinks {
            Some(sinks) => {
                scores[n_seen] = sinks[g];
                kernels.softmax(scores);
            }
            None => kernels.softmax(&mut scores[..n_seen]),
        }
    }
    for (i, position) in heads.seen.enumerate() {
        for (g, out) in out.chunks_exact_mut(v.dim).enumerate() {
            v.axpy(kernels, out, scores[g * (n_seen + 1) + i], heads.kv, position);
        }
    }
}
