//! The quantiser that Q3_K and Q6_K share: a scale for each sub-block of 16, then integers for the
//! sixteen scales, then the codes against the scales as stored.

use super::block::Half;
use super::search::{self, nearest};

pub struct Grids {
    pub d: Half,
    /// The integer scales, `−max_scale..max_scale`.
    pub scales: [i8; 16],
    /// `−levels..levels`.
    pub codes: [i8; 256],
}

pub fn quantize(x: &[f32], importance: Option<&[f32]>, levels: f32, max_scale: f32) -> Grids {
    let (mut scales, mut counts) = ([0f32; 16], [0f32; 256]);
    for (j, (x, counts)) in x.chunks_exact(16).zip(counts.chunks_exact_mut(16)).enumerate() {
        weights(x, importance.map(|v| &v[16 * j..][..16]), counts);
        scales[j] = search::symmetric(x, counts, levels);
    }
    // The sub-block scale of largest magnitude becomes the end of the range that has no twin.
    let d = search::extreme(&scales) / -max_scale;
    let inverse = super::finite_inverse(d);
    let d = Half::new(d);
    let mut codes = [0; 256];
    let scales = scales.map(|s| nearest(s * inverse).clamp(-max_scale, max_scale - 1.0) as i8);
    for (j, (x, codes)) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
        let inverse = super::finite_inverse(d.get() * scales[j] as f32);
        for (code, v) in codes.iter_mut().zip(x) {
            *code = nearest(v * inverse).clamp(-levels, levels - 1.0) as i8;
        }
    }
    Grids { d, scales, codes }
}

/// An error counts with the square of the value, in units of the largest.
fn weights(x: &[f32], importance: Option<&[f32]>, out: &mut [f32]) {
    let inverse = super::finite_inverse(super::largest_magnitude(x));
    for (w, v) in out.iter_mut().zip(x) {
        *w = (v * inverse) * (v * inverse);
    }
    search::by_importance(importance, out);
}
