//! Shared by Q3_K and Q6_K, sixteen sub-blocks of 16 values with an integer scale each: reading
//! them, the exact dot product, and the quantiser, which finds a scale for each sub-block, then
//! integers for the sixteen scales, then the codes against the scales as stored.

use crate::quant::block::Half;
use crate::quant::search::{self, nearest};

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
        search::weights(x, importance.map(|v| &v[16 * j..][..16]), counts);
        scales[j] = search::symmetric(x, counts, levels);
    }
    // The sub-block scale of largest magnitude becomes the end of the range that has no twin.
    let d = search::extreme(&scales) / -max_scale;
    let inverse = crate::quant::finite_inverse(d);
    let d = Half::new(d);
    let mut codes = [0; 256];
    let mut scales = scales.map(|s| nearest(s * inverse).clamp(-max_scale, max_scale - 1.0));
    for (j, (x, codes)) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
        // The rounding of the scale asks for other codes, and those for another scale at times.
        let (middle, mut least) = (scales[j], f32::INFINITY);
        for scale in [middle, middle - 1.0, middle + 1.0] {
            let scale = scale.clamp(-max_scale, max_scale - 1.0);
            let grid = d.get() * scale;
            let error = search::symmetric_error(x, &counts[16 * j..][..16], levels, grid);
            if error < least {
                (scales[j], least) = (scale, error);
            }
        }
        let inverse = crate::quant::finite_inverse(d.get() * scales[j]);
        for (code, v) in codes.iter_mut().zip(x) {
            *code = nearest(v * inverse).clamp(-levels, levels - 1.0) as i8;
        }
    }
    let scales = scales.map(|s| s as i8);
    Grids { d, scales, codes }
}

/// Values `d·scale(j)·value(k)`, k = 16j + i.
pub fn dequantize(
    d: f32,
    scale: impl Fn(usize) -> i32,
    value: impl Fn(usize) -> i32,
    out: &mut [f32],
) {
    for (j, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * scale(j) as f32;
        for (i, o) in out.iter_mut().enumerate() {
            *o = scale * value(16 * j + i) as f32;
        }
    }
}

/// `Σ_j scale(j)·Σ_i value(16j + i)·a_i`
pub fn int_dot(scale: impl Fn(usize) -> i32, value: impl Fn(usize) -> i32, a: &[i8]) -> i32 {
    let sub_block = |(j, a): (usize, &[i8])| {
        let dot: i32 = (0..16).map(|i| value(16 * j + i) * a[i] as i32).sum();
        scale(j) * dot
    };
    a.chunks_exact(16).enumerate().map(sub_block).sum()
}
