//! Q8_K: 256 activations as i8 with one f32 scale, and their sums by 16 and by 32 for the offsets
//! and mins of the weights. It pairs with the K-quants and is never stored in a file, so it is
//! kept as separate arrays (`simd::Activations`) and not as a struct.

pub const LEN: usize = 256;

/// Quantises one block; returns the scale. Ties round to even. ggml gives the scale the opposite
/// sign of the largest value; both signs lead to the same bits of a dot product, so here it is
/// positive. NaN, infinities and tiny values are treated as in Q8_0.
pub fn quantize_activations(
    x: &[f32],
    qs: &mut [i8],
    sums32: &mut [i16],
    sums16: &mut [i16],
) -> f32 {
    let (scale, inverse) = activation_scale(crate::quant::largest_magnitude(x));
    crate::quant::round_to_i8(x, inverse, qs);
    for (sum, part) in sums16.iter_mut().zip(qs.chunks_exact(16)) {
        *sum = part.iter().map(|q| *q as i16).sum();
    }
    for (sum, pair) in sums32.iter_mut().zip(sums16.chunks_exact(2)) {
        *sum = pair[0] + pair[1];
    }
    scale
}

/// (scale, inverse) by the largest magnitude of a block.
#[inline]
pub fn activation_scale(largest: f32) -> (f32, f32) {
    if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < crate::quant::SMALLEST_ACTIVATION {
        (0.0, 0.0)
    } else {
        let inverse = 127.0 / largest;
        (1.0 / inverse, inverse)
    }
}
