//! AVX2 with FMA and F16C: Intel since Haswell (2013), AMD since Excavator and Zen.
//! One file a kind of loop; all functions here need the three features and are reached only
//! through [`kernels`], which asks the processor. Plain floats (`float`), NVFP4 (`nvfp4`), Q1_0 and
//! Q2_0 (`parts`) and the five block formats of the table below have loops of their own (`ints`,
//! `panel`); the others state their codes and share two generic ones (`decoded`).
//!
//! One thread on a Xeon (family 6, model 143) with two busy cores, `cargo bench --bench kernels`;
//! a plain prefetching loop reads 13.9 GB/s (and 12 to 18, as others let it), `maddubs` and `add`
//! peak at 254 GOP/s (272 when
//! the products of quantised weights in cache were measured). Rows × columns 768 × 2048, the up
//! projection of an expert:
//!
//! | format | 1 token from memory, GB/s | GOP/s in cache: 1 token | 4 | 32 | 512 | of peak |
//! |---|---|---|---|---|---|---|
//! | Q4_K | 10.4 | 55 | 139 | 200 | 207 | 76 % |
//! | Q5_K | 10.6 | 44 | 105 | 181 | 196 | 72 % |
//! | Q6_K | 10.6 | 43 | 96 | 158 | 169 | 62 % |
//! | Q8_0 | 13.5 | 48 | 53 | 92 | 99 | 36 % |
//! | Q4_0 | 9.9 | 36 | 96 | 156 | 165 | 61 % |
//! | F16 | 18.2 | 25 | 55 | 59 | 52 | fma |
//! | BF16 | 18.6 | 27 | 55 | 58 | 51 | fma |
//! | F32 | 18.1 | 12 | 49 | 63 | 57 | fma |
//!
//! Two threads share 17 to 18 GB/s here, so one token is at the memory wall in every format.

mod acts;
pub(super) mod ahead;
mod decode_256;
mod decode_32;
mod decoded;
pub(super) mod eight_rows;
pub(super) mod float;
mod gemm;
mod grids;
pub(super) mod ints;
pub(super) mod long_rows;
pub(super) mod matvec;
mod nvfp4;
mod ops;
pub(super) mod panel;
pub(super) mod parts;
pub(super) mod reduce;
mod tile;
pub(super) mod token;

pub(super) use tile::dequantize;

use super::{Kernels, Product, Scratch};
use crate::gguf::TensorType;
use crate::quant::{BlockQ1_0, BlockQ2_0};
use crate::with_int_block;
use panel::Panel;
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

static KERNELS: Kernels = TABLE;

pub(super) const TABLE: Kernels = Kernels {
    name: "avx2",
    matmul,
    sums_granules: |ty| ty != TensorType::NVFP4,
    quantize_q8_0: acts::quantize_q8_0,
    quantize_q8_k: acts::quantize_q8_k,
    rms_norm: ops::rms_norm,
    swiglu: ops::swiglu,
    exp: ops::exp,
    sigmoid: ops::sigmoid,
    softmax: ops::softmax,
    add: ops::add,
    axpy: ops::axpy,
    scale: ops::scale,
    blend: ops::blend,
    dot_f32: ops::dot_f32,
    f32_to_f16: ops::f32_to_f16,
    f16_to_f32: tile::f16_to_f32,
    bf16_to_f32: tile::bf16_to_f32,
    dequantize,
    tile_dot: tile::tile_dot,
    tile_axpy: tile::tile_axpy,
    tile_softmax: tile::tile_softmax,
};

pub(super) fn kernels() -> Option<&'static Kernels> {
    let found = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    found.then_some(&KERNELS)
}

/// # Safety
/// As [`Product`] says, on a processor with AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul(product: Product, scratch: &mut Scratch) {
    // SAFETY: the caller's promises are the same.
    unsafe {
        match product.mat.ty {
            TensorType::F32 => float::matmul::<float::F32>(product),
            TensorType::F16 => float::matmul::<float::F16>(product),
            TensorType::BF16 => float::matmul::<float::Bf16>(product),
            TensorType::F8_E4M3 if product.acts.tokens() >= super::parts::FEWEST_OF_FLOATS => {
                super::parts::by_bf16(product, scratch, matmul)
            }
            TensorType::F8_E4M3 => float::matmul::<float::E4m3>(product),
            TensorType::NVFP4 => nvfp4::matmul(product),
            TensorType::Q1_0 => parts::matmul::<BlockQ1_0>(product, scratch, matmul),
            TensorType::Q2_0 => parts::matmul::<BlockQ2_0>(product, scratch, matmul),
            ty => with_int_block!(ty, quantised(product, scratch)),
        }
    }
}

/// One token takes the matrix–vector loop, more the matrix–matrix one for whole panels of rows.
///
/// # Safety
/// As `matmul`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quantised<B: Panel>(product: Product, scratch: &mut Scratch) {
    let panels = if product.acts.tokens() > 1 { product.rows / 8 * 8 } else { 0 };
    // SAFETY: the caller's promises, for the rows before and behind the cut.
    unsafe {
        if panels > 0 {
            gemm::matmul::<B>(product.rows(0, panels), scratch);
        }
        matvec::matmul::<B>(product.rows(panels, product.rows - panels));
    }
}

/// Asks for the cache lines of `n` bytes. Any address is allowed: a prefetch never faults.
#[inline]
#[target_feature(enable = "avx2")]
fn prefetch(p: *const u8, n: usize) {
    ask::<_MM_HINT_T0>(p, n);
}

/// [`prefetch`] into the second cache only.
#[inline]
#[target_feature(enable = "avx2")]
fn prefetch_to_second(p: *const u8, n: usize) {
    ask::<_MM_HINT_T1>(p, n);
}

#[inline]
#[target_feature(enable = "avx2")]
#[allow(unused_unsafe)] // the intrinsic is safe in newer compilers only
fn ask<const HINT: i32>(p: *const u8, n: usize) {
    for offset in (0..n).step_by(64) {
        // SAFETY: a hint, which reads nothing.
        unsafe { _mm_prefetch::<HINT>(p.wrapping_add(offset).cast()) };
    }
}
