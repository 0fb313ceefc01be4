//! The four-bit floats of MXFP4 and NVFP4: a sign, two bits of exponent, one of mantissa. They are
//! kept doubled, so that they are integers, and the scales of both formats halved.

use crate::quant::packing::nibbles;

/// Twice the sixteen values, by code.
pub const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The doubled values of bytes of codes.
pub fn values(qs: &[u8]) -> impl Iterator<Item = i8> + '_ {
    nibbles(qs).map(|q| DOUBLED[q as usize])
}

/// The code of the doubled value nearest to `v`, of two equally near the smaller.
#[inline]
pub fn nearest(v: f32) -> u8 {
    let middles = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0];
    let code = middles.into_iter().filter(|middle| v.abs() > *middle).count() as u8;
    if v < 0.0 && code > 0 { code | 8 } else { code }
}

/// The weighted squared error of `x` in units of `d`.
pub fn error(x: &[f32], weights: &[f32], d: f32) -> f32 {
    let inverse = crate::quant::finite_inverse(d);
    let each = x.iter().zip(weights).map(|(x, w)| {
        let error = d * DOUBLED[nearest(x * inverse) as usize] as f32 - x;
        w * error * error
    });
    each.sum()
}
