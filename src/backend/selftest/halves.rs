//! Products of F16 and BF16 matrices with prompts' activations, on tensor cores.

use super::data::weights;
use super::operands::{Acts, Mat};
use super::{Bench, Random};
use crate::Result;
use crate::backend::gpu::halves::{DeviceHalves, Halves, halves_bytes};
use crate::backend::gpu::matvec::ProductOut;
use crate::gguf::TensorType::{self, BF16, F16};
use crate::simd::{ActKind, Scratch};

/// The bound, as a part of the largest result. Activations are rounded, by up to 5·10⁻⁴ and
/// 4·10⁻³ each.
fn bound(ty: TensorType) -> f64 {
    if ty == F16 { 1e-3 } else { 5e-3 }
}

pub fn check(bench: &Bench) -> Result<()> {
    let halves = Halves::load(&bench.gpu, &[F16, BF16])?;
    for ty in [F16, BF16] {
        bench.row("matmul_halves", ty, || {
            if !halves.take(ty, 8) {
                bench.leave_out("the device's tensor cores do not multiply it");
                return Ok(());
            }
            // Rows, columns, tokens.
            let odd = [[1, 8, 40], [129, 72, 33], [65, 40, 131], [3, 328, 9]];
            let large = [[1024, 2048, 512], [200, 7168, 130]];
            let shapes = bench.shapes(&[[35, 56, 11]], &odd, &large);
            shapes.into_iter().try_for_each(|shape| product(bench, &halves, ty, shape))
        });
    }
    Ok(())
}

fn product(
    bench: &Bench,
    halves: &Halves,
    ty: TensorType,
    [rows, cols, tokens]: [usize; 3],
) -> Result<()> {
    const SCALE: f32 = 0.37;
    let mut random = Random(rows as u64);
    let mat = Mat::new(bench, ty, [rows, cols], &weights(ty, rows, cols, &mut random))?;
    // Numbers beyond what F16 has, which a token's scale brings into reach.
    let loud = |(i, x): (usize, f32)| if i / cols % 3 == 1 { 1e6 * x } else { x };
    let x: Vec<f32> = random.floats(tokens * cols).into_iter().enumerate().map(loud).collect();
    let acts = Acts::new(bench, ActKind::F32, &x, cols)?;
    let mut products = vec![0.0; rows * tokens];
    bench.cpu.kernels.matmul_all(mat.cpu(), acts.cpu.all(), &mut products, &mut Scratch::new());
    let [bias, before] = bench.floats(&mut random, [rows, rows * tokens])?;

    let memory = bench.empty(halves_bytes(tokens, cols, cols))?;
    let stored = DeviceHalves::at(ty, [tokens, cols, cols], memory.all());
    halves.store(&bench.stream, acts.gpu(), stored)?;
    for scale in [None, Some(SCALE)] {
        let out = bench.up(before.to_vec())?;
        let to = ProductOut { data: out.gpu(), stride: rows, scale };
        halves.product(&bench.stream, mat.gpu(), stored, scale.map(|_| bias.gpu()), to)?;
        let got: Vec<f32> = bench.down(&out.device)?;
        let want = |i: usize| match scale {
            None => products[i],
            Some(scale) => scale.mul_add(products[i] + bias[i % rows], before[i]),
        };
        // Loud tokens would hide what quiet ones differ by.
        for is_loud in [false, true] {
            let own = (0..rows * tokens).filter(|i| (i / rows % 3 == 1) == is_loud);
            let (got, expected): (Vec<f32>, Vec<f32>) = own.map(|i| (got[i], want(i))).unzip();
            if !got.is_empty() {
                bench.near(format!("{rows}×{cols}×{tokens}"), &got, &expected, bound(ty))?;
            }
        }
    }
    Ok(())
}
