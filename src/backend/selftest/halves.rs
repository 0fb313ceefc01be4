//! Products of F16 and BF16 matrices with prompts' activations, on tensor cores.

use super::bench::Bench;
use super::data::{Random, weights};
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::acts::{DeviceActs, records_of};
use crate::backend::gpu::halves::{DeviceHalves, Halves, halves_bytes};
use crate::backend::gpu::mat::DeviceMat;
use crate::backend::gpu::matvec::ProductOut;
use crate::gguf::TensorType::{self, BF16, F16};
use crate::simd::{ActKind, Activations, MatRef, Scratch};

/// The bound, as a part of the largest result. Activations are rounded, by up to 5·10⁻⁴ and
/// 4·10⁻³ each.
fn bound(ty: TensorType) -> f64 {
    if ty == F16 { 1e-3 } else { 5e-3 }
}

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let halves = Halves::load(&bench.gpu, &[F16, BF16])?;
    for ty in [F16, BF16] {
        report.row("matmul_halves", ty, |row| {
            if !halves.take(ty, 8) {
                row.leave_out("the device's tensor cores do not multiply it");
                return Ok(());
            }
            // Rows, columns, tokens.
            let odd = [[1, 8, 40], [129, 72, 33], [65, 40, 131], [3, 328, 9]];
            let large = [[1024, 2048, 512], [200, 7168, 130]];
            let shapes = bench.shapes(&[[35, 56, 11]], &odd, &large);
            shapes.iter().try_for_each(|shape| product(bench, &halves, ty, *shape, row))
        });
    }
    Ok(())
}

fn product(
    bench: &Bench,
    halves: &Halves,
    ty: TensorType,
    [rows, cols, tokens]: [usize; 3],
    row: &mut Row,
) -> Result<()> {
    const SCALE: f32 = 0.37;
    let mut random = Random(rows as u64);
    let bytes = weights(ty, rows, cols, &mut random);
    // Numbers beyond what F16 has, which a token's scale brings into reach.
    let loud = |(i, x): (usize, f32)| if i / cols % 3 == 1 { 1e6 * x } else { x };
    let x: Vec<f32> = random.floats(tokens * cols).into_iter().enumerate().map(loud).collect();
    let mut acts = Activations::new();
    acts.resize(ActKind::F32, tokens, cols);
    acts.quantize_rows(bench.cpu.kernels, 0..tokens, &x, cols);
    let mut expected = vec![0.0; rows * tokens];
    let mat = MatRef::dense(ty, &bytes, rows, cols);
    bench.cpu.kernels.matmul_all(mat, acts.all(), &mut expected, &mut Scratch::new());
    let (bias, before) = (random.floats(rows), random.floats(rows * tokens));

    let (mat, records) = (bench.up(&bytes)?, bench.up(&records_of(acts.all()))?);
    let mat = DeviceMat::dense(ty, mat.all(), rows, cols);
    let x = DeviceActs::new(ActKind::F32, tokens, cols, records.all());
    let (memory, biases) = (bench.empty(halves_bytes(tokens, cols, cols))?, bench.up_f32(&bias)?);
    let stored = DeviceHalves::at(ty, [tokens, cols, cols], memory.all());
    halves.store(&bench.stream, x, stored)?;
    for scale in [None, Some(SCALE)] {
        let out = bench.up_f32(&before)?;
        let to = ProductOut { data: out.all(), stride: rows, scale };
        let bias_of = scale.map(|_| biases.all());
        halves.product(&bench.stream, mat, stored, bias_of, to)?;
        let got = bench.down_f32(&out)?;
        let want = |i: usize| match scale {
            None => expected[i],
            Some(scale) => scale.mul_add(expected[i] + bias[i % rows], before[i]),
        };
        // Loud tokens would hide what quiet ones differ by.
        for is_loud in [false, true] {
            let own = (0..rows * tokens).filter(|i| (i / rows % 3 == 1) == is_loud);
            let (got, expected): (Vec<f32>, Vec<f32>) = own.map(|i| (got[i], want(i))).unzip();
            if !got.is_empty() {
                row.near(format!("{rows}×{cols}×{tokens}"), &got, &expected, bound(ty));
            }
        }
    }
    Ok(())
}
