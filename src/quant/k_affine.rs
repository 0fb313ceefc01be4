//! The quantiser that Q4_K and Q5_K share: an affine grid for each sub-block of 32, then 6-bit
//! scales and mins for the eight grids, then the codes against the grids as stored. Rounding a
//! scale and a min to six bits one by one misses the best pair: each is also tried one step up and
//! down, which takes 1.5 % off the error of Q4_K on trained weights.

use super::block::Half;
use super::k_scales;
use super::search::{Affine, Ladder, affine, affine_error, nearest};

pub struct Grids {
    pub d: Half,
    pub dmin: Half,
    pub packed: [u8; 12],
}

pub fn quantize(x: &[f32], max_q: f32, ladder: &Ladder, codes: &mut [u8; 256]) -> Grids {
    let (mut scales, mut mins, mut weights) = ([0f32; 8], [0f32; 8], [0f32; 256]);
    for (j, (x, weights)) in x.chunks_exact(32).zip(weights.chunks_exact_mut(32)).enumerate() {
        // Large values matter more to a dot product; the root mean square keeps small ones in.
        let rms = (x.iter().map(|v| v * v).sum::<f32>() / 32.0).sqrt();
        for (w, v) in weights.iter_mut().zip(x) {
            *w = rms + v.abs();
        }
        let grid = affine(x, weights, max_q, ladder);
        (scales[j], mins[j]) = (grid.scale, grid.min);
    }
    let (d, mut scale_codes) = six_bits(&scales);
    let (dmin, mut min_codes) = six_bits(&mins);
    let stored =
        |scale: u8, min: u8| Affine { scale: d.get() * scale as f32, min: dmin.get() * min as f32 };
    for (j, (x, codes)) in x.chunks_exact(32).zip(codes.chunks_exact_mut(32)).enumerate() {
        let weights = &weights[32 * j..][..32];
        let mut best = (f32::INFINITY, scale_codes[j], min_codes[j]);
        for scale in neighbours(scale_codes[j]) {
            for min in neighbours(min_codes[j]) {
                let error = affine_error(x, weights, max_q, stored(scale, min));
                if error < best.0 {
                    best = (error, scale, min);
                }
            }
        }
        (scale_codes[j], min_codes[j]) = (best.1, best.2);
        let grid = stored(best.1, best.2);
        let inverse = super::finite_inverse(grid.scale);
        for (code, v) in codes.iter_mut().zip(x) {
            *code = nearest((v + grid.min) * inverse).clamp(0.0, max_q) as u8;
        }
    }
    Grids { d, dmin, packed: k_scales::pack(&scale_codes, &min_codes) }
}

/// Eight non-negative values as `d·code` with codes 0 to 63.
fn six_bits(values: &[f32; 8]) -> (Half, [u8; 8]) {
    let largest = values.iter().fold(0f32, |m, v| m.max(*v));
    let d = Half::new(largest / 63.0);
    let inverse = super::finite_inverse(largest / 63.0);
    (d, values.map(|v| nearest(v * inverse).clamp(0.0, 63.0) as u8))
}

fn neighbours(code: u8) -> std::ops::RangeInclusive<u8> {
    code.saturating_sub(1)..=(code + 1).min(63)
}
