//! A matrix a head, in every type.

use super::data::weights;
use super::operands::{Acts, Mat};
use super::{Bench, Random};
use crate::Result;
use crate::backend::gpu::heads::{DeviceHeadMats, Heads};
use crate::backend::gpu::mat::{all_types, types};
use crate::backend::ops::HeadMats;
use crate::simd::act_kind;

pub fn check(bench: &Bench) -> Result<()> {
    let heads = Heads::load(&bench.gpu, &all_types())?;
    // Heads, rows of each, first row, rows from a head to the next, columns in blocks, tokens.
    let odd = [[3, 5, 0, 5, 2, 1], [3, 5, 0, 5, 2, 11], [4, 33, 7, 40, 2, 11]];
    let shapes = bench.shapes(&[[3, 5, 2, 7, 1, 2]], &odd, &[[16, 128, 2, 256, 2, 9]]);
    for ty in types() {
        bench.each(
            "head_products",
            ty,
            &shapes,
            |&[n_heads, rows, first, step, blocks, tokens]| {
                let cols = blocks * ty.block_len().max(32);
                let (n, all_rows) = (tokens * n_heads, first + n_heads * step);
                let mut random = Random(rows as u64);
                let bytes = weights(ty, all_rows, cols, &mut random);
                let mat = Mat::new(bench, ty, [all_rows, cols], &bytes)?;
                let x = Acts::new(bench, act_kind(ty), &random.floats(n * cols), cols)?;
                let mut out = bench.out(n * rows)?;
                let mats = HeadMats { all: mat.cpu(), n_heads, rows, first, step };
                bench.cpu.head_products(mats, x.cpu.all(), &mut out);
                let mats = DeviceHeadMats { all: mat.gpu(), n_heads, rows, first, step };
                heads.launch(&bench.stream, mats, x.gpu(), out.gpu())?;
                bench.equal(format!("{n_heads}×{rows}×{cols}×{tokens}"), &out)
            },
        );
    }
    Ok(())
}
