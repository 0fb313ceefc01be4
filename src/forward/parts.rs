//! The parts of a layer that computes many tokens. Between two parts the pass rests, so that it can
//! be cancelled and shorter passes can be computed. Parts change no bit: a query's attention
//! depends on what it sees alone, and an expert's result on its own tokens.

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::ops::{Demand, ExpertShape, Rows};
use crate::forward::Rests;
use std::ops::Range;

/// Multiplications of a part: some 10 ms of two cores, beside which the threads' meeting at its end
/// costs little.
pub const PART_WORK: usize = 1 << 31;

/// [`Cpu::attention`] with rests.
pub(super) fn attend(
    cpu: &Cpu,
    rests: &mut dyn Rests,
    shape: AttentionShape<'_>,
    q: &[f32],
    [k, v]: [Rows<'_>; 2],
    out: &mut [f32],
) -> Result<()> {
    let (q_width, out_width) = (shape.n_head * k.dim, shape.n_head * v.dim);
    let n_tokens = q.len() / q_width;
    let n_seen = shape.all.unwrap_or(shape.first + n_tokens);
    let n_seen = n_seen.min(shape.window.or(shape.chunk).unwrap_or(n_seen)).max(1);
    let n = rests.part_work() / (shape.n_head * (k.dim + v.dim) * n_seen);
    // A power of two, so that parts are whole blocks of queries.
    let n = 1 << n.max(1).ilog2();
    for start in (0..n_tokens).step_by(n) {
        rests.rest()?;
        let part = start..n_tokens.min(start + n);
        let shape = AttentionShape { first: shape.first + start, ..shape };
        let q = &q[part.start * q_width..part.end * q_width];
        cpu.attention(shape, q, k, v, &mut out[part.start * out_width..part.end * out_width]);
    }
    Ok(())
}

/// The experts of `order`, all those of a demand, that are the next part, from `start` on.
pub(super) fn experts_of_a_part(
    demand: &Demand,
    order: &[u32],
    shape: &ExpertShape,
    work: usize,
    start: usize,
) -> Range<usize> {
    let (mut n_pairs, enough) = (0, work / (3 * shape.n_ff * shape.n_embd));
    let last = order[start..].iter().position(|expert| {
        n_pairs += demand.pairs(demand.slot(*expert)).len();
        n_pairs >= enough
    });
    start..last.map_or(order.len(), |last| start + last + 1)
}
