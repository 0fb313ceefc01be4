//! Cached rows of any type as f32.

use crate::gguf::TensorType;
use crate::quant::{BlockQ8_0, blocks_of};
use crate::simd::{avx2, tile};
use std::arch::x86_64::*;

/// # Safety
/// The processor has AVX-512 F; the slices are of one length.
#[target_feature(enable = "avx512f")]
pub(in crate::simd::avx512) unsafe fn f16_to_f32(x: &[u16], out: &mut [f32]) {
    let (xs, x_rest) = x.as_chunks::<16>();
    let (outs, out_rest) = out.as_chunks_mut::<16>();
    for (x, o) in xs.iter().zip(outs) {
        // SAFETY: sixteen values each.
        unsafe {
            let v = _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_storeu_ps(o.as_mut_ptr(), v);
        }
    }
    tile::f16_to_f32(x_rest, out_rest);
}

/// # Safety
/// The processor has AVX-512 F; the slices are of one length.
#[target_feature(enable = "avx512f")]
pub(in crate::simd::avx512) unsafe fn bf16_to_f32(x: &[u16], out: &mut [f32]) {
    let (xs, x_rest) = x.as_chunks::<16>();
    let (outs, out_rest) = out.as_chunks_mut::<16>();
    for (x, o) in xs.iter().zip(outs) {
        // SAFETY: sixteen values each.
        unsafe {
            let v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_storeu_si512(o.as_mut_ptr().cast(), _mm512_slli_epi32::<16>(v));
        }
    }
    tile::bf16_to_f32(x_rest, out_rest);
}

/// # Safety
/// The processor has AVX-512 F and F16C; `out` has a place for each value of `x`.
#[target_feature(enable = "avx512f,avx2,f16c")]
pub(in crate::simd::avx512) unsafe fn dequantize(ty: TensorType, x: &[u8], out: &mut [f32]) {
    if ty != TensorType::Q8_0 {
        // SAFETY: the caller's promise.
        return unsafe { avx2::dequantize(ty, x, out) };
    }
    for (block, out) in blocks_of::<BlockQ8_0>(x).iter().zip(out.as_chunks_mut::<32>().0) {
        let d = _mm512_set1_ps(block.d.get());
        for j in [0, 16] {
            // SAFETY: sixteen bytes of the block, sixteen places of its 32.
            unsafe {
                let q = _mm_loadu_si128(block.qs.as_ptr().add(j).cast());
                let q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q));
                _mm512_storeu_ps(out.as_mut_ptr().add(j), _mm512_mul_ps(q, d));
            }
        }
    }
}
