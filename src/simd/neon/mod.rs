//! NEON, which every AArch64 processor has. Two versions, by how `dot` multiplies bytes:
//!
//! - `dotprod`: with `sdot` (FEAT_DotProd): Apple M1 and later, Cortex-A76 and later (Raspberry
//!   Pi 5), Neoverse N1 and later (Graviton2).
//! - `neon`: without: Cortex-A53 and A72 (Raspberry Pi 3 and 4, Graviton1) and the like.
//!
//! All formats and all loops of [`Kernels`] are here, none falls back to the scalar version.
//! `bf16_to_f32`, `add`, `axpy`, `scale` and `blend` are plain loops that the compiler vectorises,
//! since NEON is always enabled.
//!
//! | files | what |
//! |---|---|
//! | `lanes`, `convert`, `dot` | eight f32 lanes as two vectors, f16 and bf16, products of bytes |
//! | `decode`, `decode_32`, `decode_256`, `grids` | a block format: codes, scales, mins |
//! | `matvec`, `gemm`, `nvfp4`, `parts`, `float` | products with one token and with many |
//! | `acts`, `ops`, `tile` | quantised activations, float loops, attention |
//!
//! Tested under emulation, with a processor that has `sdot` and as a Cortex-A72, which has not, to
//! the bit against the scalar version and by the same tests as AVX2:
//!
//! ```sh
//! export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
//! export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
//! cargo test --target aarch64-unknown-linux-gnu --test formats quant_
//! ```
//!
//! It has not been timed on a processor. So there are no prefetches, and the sizes of tiles and
//! chunks are those of AVX2 where the number of registers does not decide. The compiler makes 118
//! instructions of the Q4_K loop with `sdot` for a sub-block of eight rows times four tokens, of
//! which 64 are `sdot`; counted, 124 for a block of 256 times one token.

mod acts;
mod convert;
mod decode;
mod decode_256;
mod decode_32;
mod dot;
mod float;
mod gemm;
mod grids;
mod lanes;
mod matvec;
mod nvfp4;
mod ops;
mod parts;
mod tile;

use super::{Kernels, Matmul, Product, Scratch, tile as scalar_tile};
use crate::gguf::TensorType;
use crate::quant::{BlockQ1_0, BlockQ2_0};
use crate::with_int_block;
use decode::Decode;
use dot::{Dot, Sdot, Smull};

static NEON: Kernels = table("neon", matmul::<Smull>);
static DOTPROD: Kernels = table("dotprod", matmul::<Sdot>);

const fn table(name: &'static str, matmul: Matmul) -> Kernels {
    Kernels {
        name,
        matmul,
        sums_granules: |_| false,
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
        // A shift an element, which the compiler turns into vectors: NEON is always enabled.
        bf16_to_f32: scalar_tile::bf16_to_f32,
        dequantize: tile::dequantize,
        tile_dot: tile::tile_dot,
        tile_axpy: tile::tile_axpy,
        tile_softmax: tile::tile_softmax,
    }
}

/// The version without the extension.
pub(super) fn neon() -> Option<&'static Kernels> {
    // Loads of bytes as numbers assume the order of bytes that files have.
    cfg!(target_endian = "little").then_some(&NEON)
}

pub(super) fn dotprod() -> Option<&'static Kernels> {
    let found = neon().is_some() && std::arch::is_aarch64_feature_detected!("dotprod");
    found.then_some(&DOTPROD)
}

/// # Safety
/// As [`Product`] says, on a processor with what D needs.
#[target_feature(enable = "neon")]
unsafe fn matmul<D: Dot>(product: Product, scratch: &mut Scratch) {
    // SAFETY: the caller's promises are the same.
    unsafe {
        match product.mat.ty {
            TensorType::F32 => float::matmul::<float::F32>(product),
            TensorType::F16 => float::matmul::<float::F16>(product),
            TensorType::BF16 => float::matmul::<float::Bf16>(product),
            TensorType::F8_E4M3 if product.acts.tokens() >= super::parts::FEWEST_OF_FLOATS => {
                super::parts::by_bf16(product, scratch, matmul::<D>)
            }
            TensorType::F8_E4M3 => float::matmul::<float::E4m3>(product),
            TensorType::NVFP4 => nvfp4::matmul::<D>(product),
            TensorType::Q1_0 => parts::matmul::<BlockQ1_0, D>(product, scratch, matmul::<D>),
            TensorType::Q2_0 => parts::matmul::<BlockQ2_0, D>(product, scratch, matmul::<D>),
            ty => with_int_block!(ty, quantised(product, scratch, D::default())),
        }
    }
}

/// One token takes the matrix–vector loop, more the matrix–matrix one for whole panels of rows.
///
/// # Safety
/// As `matmul`.
#[target_feature(enable = "neon")]
unsafe fn quantised<B: Decode>(product: Product, scratch: &mut Scratch, way: impl Dot) {
    /// A name for the type that `impl Dot` stands for.
    #[target_feature(enable = "neon")]
    unsafe fn by<B: Decode, D: Dot>(product: Product, scratch: &mut Scratch, _way: D) {
        let panels = if product.acts.tokens() > 1 { product.rows / 8 * 8 } else { 0 };
        // SAFETY: the caller's promises, for the rows before and behind the cut.
        unsafe {
            if panels > 0 {
                gemm::matmul::<B, D>(product.rows(0, panels), scratch);
            }
            matvec::matmul::<B, D>(product.rows(panels, product.rows - panels));
        }
    }
    // SAFETY: the caller's promises.
    unsafe { by::<B, _>(product, scratch, way) }
}
