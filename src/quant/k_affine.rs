//! The quantiser that Q4_K and Q5_K share: an affine grid for each sub-block of 32, then 6-bit
//! scales and mins for the eight grids, then the codes against the grids as stored.

use super::block::Half;
use super::k_scales;
use super::search::{Ladder, affine};

pub struct Grids {
    pub d: Half,
    pub dmin: Half,
    pub packed: [u8; 12],
}

pub fn quantize(x: &[f32], max_q: f32, ladder: &Ladder, codes: &mut [u8; 256]) -> Grids {
    let (mut scales, mut mins) = ([0f32; 8], [0f32; 8]);
    for (j, x) in x.chunks_exact(32).enumerate() {
        // Large values matter more to a dot product; the root mean square keeps small ones in.
        let rms = (x.iter().map(|v| v * v).sum::<f32>() / 32.0).sqrt();
        let mut weights = [0f32; 32];
        for (w, v) in weights.iter_mut().zip(x) {
            *w = rms + v.abs();
        }
        let grid = affine(x, &weights, max_q, ladder);
        (scales[j], mins[j]) = (grid.scale, grid.min);
    }
    let (d, scale_codes) = six_bits(&scales);
    let (dmin, min_codes) = six_bits(&mins);
    for (j, (x, codes)) in x.chunks_exact(32).zip(codes.chunks_exact_mut(32)).enumerate() {
        let scale = d.get() * scale_codes[j] as f32;
        let min = dmin.get() * min_codes[j] as f32;
        let inverse = super::finite_inverse(scale);
        for (code, v) in codes.iter_mut().zip(x) {
            *code = ((v + min) * inverse).round_ties_even().clamp(0.0, max_q) as u8;
        }
    }
    Grids { d, dmin, packed: k_scales::pack(&scale_codes, &min_codes) }
}

/// Eight non-negative values as `d·code` with codes 0 to 63.
fn six_bits(values: &[f32; 8]) -> (Half, [u8; 8]) {
    let largest = values.iter().fold(0f32, |m, v| m.max(*v));
    let d = Half::new(largest / 63.0);
    let inverse = super::finite_inverse(largest / 63.0);
    (d, values.map(|v| (v * inverse).round_ties_even().clamp(0.0, 63.0) as u8))
}
