//! A matrix a head, in every type.

use super::bench::Bench;
use super::data::{Random, weights};
use super::report::Report;
use crate::Result;
use crate::backend::gpu::acts::{DeviceActs, records_of};
use crate::backend::gpu::heads::{DeviceHeadMats, Heads};
use crate::backend::gpu::mat::{DeviceMat, all_types, types};
use crate::backend::ops::HeadMats;
use crate::simd::{Activations, MatRef, act_kind};

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let heads = Heads::load(&bench.gpu, &all_types())?;
    for ty in types() {
        report.row("head_products", ty, |row| {
            // Heads, rows of each, first row, rows from a head to the next, columns in blocks,
            // tokens.
            let odd = [[3, 5, 0, 5, 2, 1], [3, 5, 0, 5, 2, 11], [4, 33, 7, 40, 2, 11]];
            let large = [[16, 128, 2, 256, 2, 9]];
            for [n_heads, rows, first, step, blocks, tokens] in
                bench.shapes(&[[3, 5, 2, 7, 1, 2]], &odd, &large)
            {
                let cols = blocks * ty.block_len().max(32);
                let n = tokens * n_heads;
                let (all_rows, mut random) = (first + n_heads * step, Random(rows as u64));
                let bytes = weights(ty, all_rows, cols, &mut random);
                let x = random.floats(n * cols);
                let mut acts = Activations::new();
                acts.resize(act_kind(ty), n, cols);
                acts.quantize_rows(bench.cpu.kernels, 0..n, &x, cols);
                let mut expected = vec![0.0; n * rows];
                let all = MatRef::dense(ty, &bytes, all_rows, cols);
                let mats = HeadMats { all, n_heads, rows, first, step };
                bench.cpu.head_products(mats, acts.all(), &mut expected);

                let (mat, records) = (bench.up(&bytes)?, bench.up(&records_of(acts.all()))?);
                let out = bench.empty(4 * expected.len())?;
                let all = DeviceMat::dense(ty, mat.all(), all_rows, cols);
                let mats = DeviceHeadMats { all, n_heads, rows, first, step };
                let x = DeviceActs::new(act_kind(ty), n, cols, records.all());
                heads.launch(&bench.stream, mats, x, out.all())?;
                let shape = format!("{n_heads}×{rows}×{cols}×{tokens}");
                row.bits(shape, &bench.down_f32(&out)?, &expected);
            }
            Ok(())
        });
    }
    Ok(())
}
