//! The quantiser that Q2_K, Q4_K and Q5_K share: an affine grid for each sub-block, then integer
//! scales and mins for the grids, then the codes against the grids as stored. Rounding a scale and
//! a min to a few bits one by one misses the best pair: each is also tried one step up and down,
//! which takes 1.5 % off the error of Q4_K on trained weights.

use crate::quant::block::Half;
use crate::quant::search::{Affine, Ladder, affine, affine_error, nearest, weights};

pub struct Grids<const SUBS: usize> {
    pub d: Half,
    pub dmin: Half,
    pub scales: [u8; SUBS],
    pub mins: [u8; SUBS],
}

/// Grids for `SUBS` sub-blocks with scales and mins of 0 to `max_scale` and codes of 0 to `max_q`.
pub fn quantize<const SUBS: usize>(
    x: &[f32],
    importance: Option<&[f32]>,
    max_q: f32,
    max_scale: f32,
    ladder: &Ladder,
    codes: &mut [u8; 256],
) -> Grids<SUBS> {
    let len = 256 / SUBS;
    let (mut scales, mut mins, mut counts) = ([0f32; SUBS], [0f32; SUBS], [0f32; 256]);
    for (j, (x, counts)) in x.chunks_exact(len).zip(counts.chunks_exact_mut(len)).enumerate() {
        weights(x, importance.map(|v| &v[len * j..][..len]), counts);
        let grid = affine(x, counts, max_q, ladder);
        (scales[j], mins[j]) = (grid.scale, grid.min);
    }
    let (d, scale_codes) = integers(&scales, max_scale);
    let (dmin, min_codes) = integers(&mins, max_scale);
    let mut grids = Grids { d, dmin, scales: scale_codes, mins: min_codes };
    let stored =
        |scale: u8, min: u8| Affine { scale: d.get() * scale as f32, min: dmin.get() * min as f32 };
    for (j, (x, codes)) in x.chunks_exact(len).zip(codes.chunks_exact_mut(len)).enumerate() {
        let counts = &counts[len * j..][..len];
        let mut best = (f32::INFINITY, grids.scales[j], grids.mins[j]);
        for scale in neighbours(grids.scales[j], max_scale) {
            for min in neighbours(grids.mins[j], max_scale) {
                let error = affine_error(x, counts, max_q, stored(scale, min));
                if error < best.0 {
                    best = (error, scale, min);
                }
            }
        }
        (grids.scales[j], grids.mins[j]) = (best.1, best.2);
        let grid = stored(best.1, best.2);
        let inverse = crate::quant::finite_inverse(grid.scale);
        for (code, v) in codes.iter_mut().zip(x) {
            *code = nearest((v + grid.min) * inverse).clamp(0.0, max_q) as u8;
        }
    }
    grids
}

/// Non-negative values as `d·code` with codes 0 to `max`.
fn integers<const SUBS: usize>(values: &[f32; SUBS], max: f32) -> (Half, [u8; SUBS]) {
    let largest = values.iter().fold(0f32, |m, v| m.max(*v));
    let inverse = crate::quant::finite_inverse(largest / max);
    let codes = values.map(|v| nearest(v * inverse).clamp(0.0, max) as u8);
    (Half::new(largest / max), codes)
}

fn neighbours(code: u8, max: f32) -> std::ops::RangeInclusive<u8> {
    code.saturating_sub(1)..=(code + 1).min(max as u8)
}
