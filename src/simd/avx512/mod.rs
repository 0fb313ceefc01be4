//! AVX-512 (F, BW, VL, DQ) with VNNI: Intel since Ice Lake (2019), AMD since Zen 4.
//! Products of fifteen formats and of plain floats, and the loops of attention; for everything
//! else the AVX2 versions serve. All functions here need the five features and are reached only
//! through [`kernels`], which asks the processor.
//!
//! Times the speed of AVX2 in the same rounds, and GOP/s of quiet rounds (one thread, weights in
//! cache, rows × columns 768 × 2048, `cargo bench --bench kernels -- versions`). One token on an
//! EPYC of family 25, model 17; several on a Xeon of family 6, model 143, where `vpdpbusd` of
//! registers peaks at 766, and on that EPYC, where it peaks at 467:
//!
//! | format | 1 token | | 4 tokens | 32 tokens, Xeon | | EPYC | |
//! |---|---|---|---|---|---|---|---|
//! | Q4_K | 1.5 | 118 | as AVX2 | 1.8 | 330 | 1.26 | 297 |
//! | Q5_K | 1.4 | 86 | as AVX2 | 1.6 | 293 | 1.40 | 315 |
//! | Q6_K | 1.25 | 72 | as AVX2 | 1.75 | 255 | 1.35 | 254 |
//! | Q8_0 | as AVX2 | 63 | 1.5 | 2.85 | 252 | 2.6 | 312 |
//! | Q4_0 | 2.0 | 103 | 1.3 | 2.1 | 291 | 1.86 | 319 |
//! | MXFP4 | 1.9 | 88 | 1.45 | 2.3 | 303 | 2.1 | 311 |
//! | IQ4_XS | 2.0 | 101 | as AVX2 | 2.9 | 316 | 2.8 | 352 |
//! | Q2_K | 1.2 | 92 | as AVX2 | 2.1 | 340 | 1.37 | 283 |
//! | Q3_K | 1.4 | 69 | as AVX2 | 2.5 | 311 | 1.95 | 308 |
//! | Q4_1 | 2.2 | 84 | as AVX2 | | | | |
//! | Q5_0 | 1.9 | 63 | as AVX2 | | | | |
//! | Q5_1 | 1.8 | 54 | as AVX2 | | | | |
//! | IQ4_NL | 2.2 | 86 | as AVX2 | | | | |
//!
//! One token is a matter of memory: bench/PROFILE.md says how near to it the loops are.

mod attention;
mod eight;
mod eight_by_16;
mod eight_by_32;
mod float;
mod gemm;
mod matvec;
mod narrow;
mod panel;
mod ternary;
mod tile;
mod unpack_256;
mod unpack_32;

use super::{Kernels, Matmul, Product, Scratch, avx2};
use crate::gguf::TensorType;
use crate::quant::*;
use eight::EightBlocks;
use narrow::Offset;
use panel::Sixteen;

static KERNELS: Kernels = Kernels {
    name: "avx512",
    matmul,
    exp: attention::exp,
    f16_to_f32: attention::f16_to_f32,
    bf16_to_f32: attention::bf16_to_f32,
    dequantize: attention::dequantize,
    tile_dot: attention::tile_dot,
    tile_axpy: attention::tile_axpy,
    tile_softmax: attention::tile_softmax,
    ..avx2::TABLE
};

pub(super) fn kernels() -> Option<&'static Kernels> {
    let found = avx2::kernels().is_some()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni");
    found.then_some(&KERNELS)
}

/// # Safety
/// As [`Product`] says, on a processor with AVX2, FMA, F16C and the five features of this module.
unsafe fn matmul(product: Product, scratch: &mut Scratch) {
    // SAFETY: the caller's promises are the same.
    unsafe {
        match product.mat.ty {
            TensorType::Q4_K => wide::<BlockQ4K>(product, scratch),
            TensorType::Q5_K => wide::<BlockQ5K>(product, scratch),
            TensorType::Q6_K => wide::<BlockQ6K>(product, scratch),
            TensorType::Q2_K => wide::<BlockQ2K>(product, scratch),
            TensorType::Q3_K => wide::<BlockQ3K>(product, scratch),
            TensorType::IQ4_XS => wide::<BlockIQ4XS>(product, scratch),
            TensorType::TQ2_0 => wide::<BlockTQ2_0>(product, scratch),
            TensorType::TQ1_0 if product.acts.tokens() == 1 => {
                matvec::matmul::<BlockTQ1_0>(product, scratch)
            }
            TensorType::Q8_0 => quantised::<BlockQ8_0>(product, scratch),
            TensorType::Q4_0 => narrow::<BlockQ4_0>(product, scratch, quantised::<BlockQ4_0>),
            TensorType::MXFP4 => narrow::<BlockMXFP4>(product, scratch, quantised::<BlockMXFP4>),
            TensorType::Q4_1 => narrow::<BlockQ4_1>(product, scratch, quantised::<BlockQ4_1>),
            TensorType::Q5_0 => narrow::<BlockQ5_0>(product, scratch, quantised::<BlockQ5_0>),
            TensorType::Q5_1 => narrow::<BlockQ5_1>(product, scratch, quantised::<BlockQ5_1>),
            TensorType::IQ4_NL => narrow::<BlockIQ4NL>(product, scratch, quantised::<BlockIQ4NL>),
            TensorType::F32 => float::matmul::<avx2::float::F32>(product, scratch),
            TensorType::F16 => float::matmul::<avx2::float::F16>(product, scratch),
            TensorType::BF16 => float::matmul::<avx2::float::Bf16>(product, scratch),
            TensorType::F8_E4M3 if product.acts.tokens() >= super::parts::FEWEST_OF_FLOATS => {
                super::parts::by_bf16(product, scratch, matmul)
            }
            TensorType::F8_E4M3 => float::matmul::<avx2::float::E4m3>(product, scratch),
            TensorType::Q1_0 => avx2::parts::matmul::<BlockQ1_0>(product, scratch, matmul),
            TensorType::Q2_0 => avx2::parts::matmul::<BlockQ2_0>(product, scratch, matmul),
            _ => avx2::matmul(product, scratch),
        }
    }
}

/// The fewest tokens that pay for unpacking sixteen rows of a format of 256 values: with 2, 4, 6
/// and 8 tokens Q4_K ran at 0.7, 0.9, 1.0 and 1.2 times the speed of AVX2, Q6_K likewise.
const FEWEST: usize = 6;

/// One token takes the matrix–vector loop.
///
/// # Safety
/// As `matmul`.
unsafe fn wide<B: Sixteen + EightBlocks>(product: Product, scratch: &mut Scratch) {
    // SAFETY: the caller's promises are the same.
    unsafe {
        match product.acts.tokens() {
            1 => matvec::matmul::<B>(product, scratch),
            _ => quantised::<B>(product, scratch),
        }
    }
}

/// `wide` for formats of 32 values; several tokens take `many`.
///
/// # Safety
/// As `matmul`.
unsafe fn narrow<B: Offset>(product: Product, scratch: &mut Scratch, many: Matmul) {
    // SAFETY: the caller's promises are the same.
    unsafe {
        match product.acts.tokens() {
            1 => narrow::matmul::<B>(product, scratch),
            _ => many(product, scratch),
        }
    }
}

/// Whole panels of sixteen rows go through `gemm`, what is left through AVX2.
///
/// # Safety
/// As `matmul`.
unsafe fn quantised<B: Sixteen>(product: Product, scratch: &mut Scratch) {
    let fewest = if B::LEN == 32 { 2 } else { FEWEST };
    let panels = if product.acts.tokens() >= fewest { product.rows / 16 * 16 } else { 0 };
    // SAFETY: the caller's promises, for the rows before and behind the cut.
    unsafe {
        if panels > 0 {
            gemm::matmul::<B>(product.rows(0, panels), scratch);
        }
        avx2::quantised::<B>(product.rows(panels, product.rows - panels), scratch);
    }
}
