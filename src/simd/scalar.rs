//! The specification: each loop in the fewest words. Vector versions must give the same bits.
//! `f32::mul_add` is a real fma everywhere (a library call where the target has no instruction).

use super::{ActView, Kernels, Product, Scratch};
use super::{exp, tile};
use crate::gguf::TensorType;
use crate::quant::nvfp4::half_e4m3;
use crate::quant::{self, BlockNVFP4, BlockQ1_0, BlockQ2_0, IntBlock, Parts};
use crate::quant::{blocks_of, e4m3, q8_0, q8_k, tree8};
use crate::with_int_block;
use half::{bf16, f16};

pub(super) static KERNELS: Kernels = Kernels {
    name: "scalar",
    matmul,
    sums_granules: |_| false,
    quantize_q8_0,
    quantize_q8_k,
    rms_norm,
    swiglu,
    exp: |x| x.iter_mut().for_each(|x| *x = exp::exp(*x)),
    sigmoid: |x| x.iter_mut().for_each(|x| *x = exp::sigmoid(*x)),
    softmax,
    add: |acc, x| acc.iter_mut().zip(x).for_each(|(acc, x)| *acc += x),
    axpy: |acc, a, x| acc.iter_mut().zip(x).for_each(|(acc, x)| *acc = a.mul_add(*x, *acc)),
    scale: |x, factor| x.iter_mut().for_each(|x| *x *= factor),
    blend: |acc, a, x, b| acc.iter_mut().zip(x).for_each(|(acc, x)| *acc = *acc * a + *x * b),
    dot_f32: |x, y| dot_float(x, y.iter().copied()),
    f32_to_f16: |x, out| {
        out.iter_mut().zip(x).for_each(|(o, x)| *o = f16::from_f32(*x).to_bits());
    },
    f16_to_f32: tile::f16_to_f32,
    bf16_to_f32: tile::bf16_to_f32,
    dequantize: quant::dequantize,
    tile_dot: tile::tile_dot,
    tile_axpy: tile::tile_axpy,
    tile_softmax: tile::tile_softmax,
};

/// # Safety
/// As [`Kernels::matmul`].
unsafe fn matmul(product: Product, _scratch: &mut Scratch) {
    let (mat, acts) = (product.mat, product.acts);
    for t in 0..acts.tokens() {
        for i in 0..product.rows {
            let dot = dot_row(mat.ty, mat.row(product.first + i), acts, t);
            // SAFETY: the caller vouches for each row and token.
            unsafe { product.place(t, i).write(dot) };
        }
    }
}

fn dot_row(ty: TensorType, row: &[u8], acts: ActView, t: usize) -> f32 {
    match ty {
        TensorType::F32 => {
            let row = row.as_chunks::<4>().0.iter().map(|w| f32::from_le_bytes(*w));
            dot_float(acts.f32s(t), row)
        }
        TensorType::F16 => {
            let row = row.as_chunks::<2>().0.iter().map(|w| f16::from_le_bytes(*w).to_f32());
            dot_float(acts.f32s(t), row)
        }
        TensorType::BF16 => {
            let row = row.as_chunks::<2>().0.iter().map(|w| bf16::from_le_bytes(*w).to_f32());
            dot_float(acts.f32s(t), row)
        }
        TensorType::F8_E4M3 => dot_float(acts.f32s(t), row.iter().map(|w| e4m3::to_f32(*w))),
        TensorType::Q1_0 => dot_parts::<BlockQ1_0>(row, acts.qs(t), acts.scales(t)),
        TensorType::Q2_0 => dot_parts::<BlockQ2_0>(row, acts.qs(t), acts.scales(t)),
        TensorType::NVFP4 => dot_nvfp4(row, acts.qs(t), acts.scales(t)),
        _ => with_int_block!(ty, dot_blocks(row, acts.qs(t), acts.scales(t))),
    }
}

fn dot_blocks<B: IntBlock>(row: &[u8], qs: &[i8], scales: &[f32]) -> f32 {
    let mut lanes = [0f32; 8];
    for (b, (w, a)) in blocks_of::<B>(row).iter().zip(qs.chunks_exact(B::LEN)).enumerate() {
        let (d, dmin) = w.scales();
        let (isum, imins) = w.int_dot(a);
        let lane = &mut lanes[b % 8];
        *lane = (d * scales[b]).mul_add(isum as f32, *lane);
        if B::MINS {
            *lane = (-(dmin * scales[b])).mul_add(imins as f32, *lane);
        }
    }
    tree8(lanes)
}

/// Each part is a block.
fn dot_parts<B: Parts>(row: &[u8], qs: &[i8], scales: &[f32]) -> f32 {
    let mut lanes = [0f32; 8];
    for (b, a) in qs.chunks_exact(32).enumerate() {
        let part = blocks_of::<B>(row)[b / B::PARTS].part(b % B::PARTS);
        let lane = &mut lanes[b % 8];
        *lane = (part.d.get() * scales[b]).mul_add(part.int_dot(a).0 as f32, *lane);
    }
    tree8(lanes)
}

/// Each sub-block of 16 is a block.
fn dot_nvfp4(row: &[u8], qs: &[i8], scales: &[f32]) -> f32 {
    let mut lanes = [0f32; 8];
    for (b, a) in qs.chunks_exact(16).enumerate() {
        let (w, j) = (&blocks_of::<BlockNVFP4>(row)[b / 4], b % 4);
        let isum: i32 = w.values(j).zip(a).map(|(q, a)| q as i32 * *a as i32).sum();
        let lane = &mut lanes[b % 8];
        *lane = (half_e4m3(w.d[j]) * scales[b / 2]).mul_add(isum as f32, *lane);
    }
    tree8(lanes)
}

pub(super) fn dot_float(x: &[f32], y: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0f32; 8];
    for (i, (x, y)) in x.iter().zip(y).enumerate() {
        lanes[i % 8] = x.mul_add(y, lanes[i % 8]);
    }
    if !x.len().is_multiple_of(8) {
        for lane in &mut lanes[x.len() % 8..] {
            *lane = 0f32.mul_add(0.0, *lane);
        }
    }
    tree8(lanes)
}

fn quantize_q8_0(x: &[f32], qs: &mut [i8], scales: &mut [f32], sums32: &mut [i16]) {
    let blocks = x.chunks_exact(32).zip(qs.chunks_exact_mut(32));
    for ((x, qs), (scale, sum)) in blocks.zip(scales.iter_mut().zip(sums32)) {
        *scale = q8_0::quantize_activations(x, qs, sum);
    }
}

fn quantize_q8_k(
    x: &[f32],
    qs: &mut [i8],
    scales: &mut [f32],
    sums32: &mut [i16],
    sums16: &mut [i16],
) {
    let blocks = x.chunks_exact(256).zip(qs.chunks_exact_mut(256));
    let sums = sums32.chunks_exact_mut(8).zip(sums16.chunks_exact_mut(16));
    for (((x, qs), scale), (sums32, sums16)) in blocks.zip(scales.iter_mut()).zip(sums) {
        *scale = q8_k::quantize_activations(x, qs, sums32, sums16);
    }
}

fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let squares = dot_float(x, x.iter().copied());
    let scale = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
        *o = x * scale * w;
    }
}

fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
        *o = exp::swiglu(*g, *u);
    }
}

fn softmax(x: &mut [f32]) {
    let max = x.iter().fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
    let mut lanes = [0f32; 8];
    for (i, x) in x.iter_mut().enumerate() {
        *x = exp::exp(*x - max);
        lanes[i % 8] += *x;
    }
    let inverse = 1.0 / tree8(lanes);
    x.iter_mut().for_each(|x| *x *= inverse);
}
