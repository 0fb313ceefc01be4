//! AVX-512 (F, BW, VL, DQ) with VNNI: Intel since Ice Lake (2019), AMD since Zen 4.
//! Products of nine formats; for everything else the AVX2 versions serve. All functions here need
//! the five features and are reached only through [`kernels`], which asks the processor.
//!
//! GOP/s of one thread (Xeon, family 6, model 143, two busy cores) and times the speed of AVX2 in
//! the same rounds, `cargo bench --bench kernels -- versions`, rows × columns 768 × 2048;
//! `vpdpbusd` of registers peaks at 766:
//!
//! | format | 4 tokens | | 32 tokens | |
//! |---|---|---|---|---|
//! | Q4_K | as AVX2 | 1.00 | 330 | 1.65 |
//! | Q5_K | as AVX2 | 1.00 | 293 | 1.62 |
//! | Q6_K | as AVX2 | 1.00 | 255 | 1.62 |
//! | Q8_0 | 81 | 1.52 | 252 | 2.75 |
//! | Q4_0 | 115 | 1.19 | 291 | 1.87 |
//! | MXFP4 | 117 | 1.45 | 303 | 2.54 |
//! | IQ4_XS | as AVX2 | 1.00 | 316 | 3.05 |
//! | Q2_K | as AVX2 | 1.00 | 340 | 1.94 |
//! | Q3_K | as AVX2 | 1.00 | 311 | 2.52 |
//!
//! One token takes the matrix–vector loops of AVX2.

mod eight;
mod eight_by_16;
mod eight_by_32;
mod gemm;
mod matvec;
mod narrow;
mod panel;
mod tile;
mod unpack_256;
mod unpack_32;

use super::{Kernels, Product, Scratch, avx2};
use crate::gguf::TensorType;
use crate::quant::*;
use eight::EightBlocks;
use narrow::Offset;
use panel::Sixteen;

static KERNELS: Kernels = Kernels { name: "avx512", matmul, ..avx2::TABLE };

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
            TensorType::Q8_0 => quantised::<BlockQ8_0>(product, scratch),
            TensorType::Q4_0 => narrow::<BlockQ4_0>(product, scratch),
            TensorType::MXFP4 => narrow::<BlockMXFP4>(product, scratch),
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
            1 => matvec::matmul::<B>(product),
            _ => quantised::<B>(product, scratch),
        }
    }
}

/// As `wide`, for formats of 32 values.
///
/// # Safety
/// As `matmul`.
unsafe fn narrow<B: Sixteen + Offset>(product: Product, scratch: &mut Scratch) {
    // SAFETY: the caller's promises are the same.
    unsafe {
        match product.acts.tokens() {
            1 => narrow::matmul::<B>(product),
            _ => quantised::<B>(product, scratch),
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
