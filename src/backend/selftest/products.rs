//! Matrices times activations of few tokens and of many, in every type.

use super::bench::Bench;
use super::data::{Random, weights};
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::acts::{DeviceActs, records_of};
use crate::backend::gpu::mat::{DeviceMat, types};
use crate::backend::gpu::matmul::Products;
use crate::gguf::TensorType;
use crate::simd::{Activations, MatRef, Scratch, act_kind};

/// Rows, columns in blocks, tokens.
type Shape = [usize; 3];

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let products = Products::load(&bench.gpu)?;
    for ty in types() {
        report.row("matvec", ty, |row| {
            for shape in bench.shapes(&[[5, 3, 1], [35, 1, 3]], &[[2048, 8, 1], [768, 17, 7]]) {
                compare(bench, &products, row, ty, shape, false)?;
            }
            Ok(())
        });
    }
    for ty in types().filter(|ty| ty.block_len() > 1) {
        report.row("matmul", ty, |row| {
            for shape in bench.shapes(&[[33, 1, 9]], &[[65, 2, 35], [768, 8, 130], [256, 17, 64]]) {
                compare(bench, &products, row, ty, shape, true)?;
            }
            Ok(())
        });
    }
    Ok(())
}

fn compare(
    bench: &Bench,
    products: &Products,
    row: &mut Row,
    ty: TensorType,
    [rows, blocks, tokens]: Shape,
    many: bool,
) -> Result<()> {
    let cols = blocks * ty.block_len().max(32);
    let (kernels, mut random) = (bench.cpu.kernels, Random(rows as u64));
    let bytes = weights(ty, rows, cols, &mut random);
    let x = random.floats(tokens * cols);
    let mut acts = Activations::new();
    acts.resize(act_kind(ty), tokens, cols);
    acts.quantize_rows(kernels, 0..tokens, &x, cols);
    let mut expected = vec![f32::NAN; rows * tokens];
    let mat = MatRef::dense(ty, &bytes, rows, cols);
    kernels.matmul_all(mat, acts.all(), &mut expected, &mut Scratch::new());

    let (mat, records) = (bench.up(&bytes)?, bench.up(&records_of(acts.all()))?);
    let out = bench.empty(4 * rows * tokens)?;
    let mat = DeviceMat::dense(ty, mat.all(), rows, cols);
    let x = DeviceActs::new(act_kind(ty), tokens, cols, records.all());
    match many {
        true => products.matmul(&bench.stream, mat, x, None, out.all(), rows)?,
        false => products.product(&bench.stream, mat, x, None, out.all(), rows)?,
    }
    row.bits(format!("{rows}×{cols}×{tokens}"), &bench.down_f32(&out)?, &expected);
    Ok(())
}
