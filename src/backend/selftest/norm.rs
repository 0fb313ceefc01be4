//! Norms and sums of rows.

use super::{Bench, Random};
use crate::Result;
use crate::backend::gpu::norm::Norm;
use crate::backend::gpu::rows::Columns;

const EPS: f32 = 1e-6;

pub fn check(bench: &Bench) -> Result<()> {
    let (norm, stream) = (Norm::load(&bench.gpu)?, &bench.stream);
    // One token, heads, odd sizes, several chunks, more rows than a block. Then sizes of models.
    let small = [[1, 8], [3, 5], [17, 128], [2, 513], [1, 2500]];
    let odd = [[1, 2048], [9, 64], [5, 1000], [4, 1024]];
    let shapes: Vec<[usize; 2]> = bench.shapes(&small, &odd, &[[512, 4096], [9, 7168]]);
    bench.each("rms_norm", "f32", &shapes, |&[rows, dim]| {
        let [x, weight] = bench.seeded(dim, [rows * dim, dim])?;
        let mut out = bench.out(x.len())?;
        bench.cpu.rms_norm_rows(&x, &weight, EPS, &mut out);
        norm.rms_norm_rows(stream, x.gpu(), weight.gpu(), EPS, out.gpu())?;
        bench.equal(format!("{rows}×{dim}"), &out)?;
        norm.rms_norm_heads(stream, x.gpu(), weight.gpu(), EPS)?;
        bench.equal_to(format!("{rows}×{dim} in place"), &x.device, &out)?;
        columns(bench, &norm, [rows, dim])
    });
    bench.each("layer_norm", "f32", &shapes, |&[rows, dim]| {
        let [x, weight, bias] = bench.seeded(dim, [rows * dim, dim, dim])?;
        let mut out = bench.out(x.len())?;
        bench.cpu.layer_norm_rows(&x, (&weight, &bias), EPS, &mut out);
        norm.layer_norm_rows(stream, x.gpu(), weight.gpu(), bias.gpu(), EPS, out.gpu())?;
        bench.equal(format!("{rows}×{dim}"), &out)
    });
    bench.each("add_scaled", "f32", bench.shapes(&[1, 777], &[], &[1 << 20]), |n| {
        let [mut acc, x] = bench.seeded(n, [n, n])?;
        for scale in [0.37, 1.0, -2.0] {
            norm.add_scaled(stream, acc.gpu(), scale, x.gpu())?;
            bench.cpu.add_scaled(&mut acc, scale, &x);
            bench.equal(n, &acc)?;
        }
        Ok(())
    });
    bench.each("add_normed", "f32", bench.shapes(&[2, 777], &[], &[1 << 20]), |n| {
        let [mut h, mut y] = Random(n as u64).vectors([n, n]);
        // A zero of either sign.
        (h[0], y[0], h[1], y[1]) = (-0.0, -0.0, 0.0, -0.0);
        let (h, y, mut x) = (bench.up(h)?, bench.up(y)?, bench.out(n)?);
        for scale in [3.5565588, 1.0, -2.0] {
            norm.add_normed(stream, scale, h.gpu(), y.gpu(), x.gpu())?;
            x.fill(0.0);
            bench.cpu.add_scaled(&mut x, scale, &h);
            bench.cpu.add(&mut x, &y);
            bench.equal(n, &x)?;
        }
        Ok(())
    });
    Ok(())
}

/// Columns of wider rows, into rows of their own and in place.
fn columns(bench: &Bench, norm: &Norm, [rows, dim]: [usize; 2]) -> Result<()> {
    let (stride, first) = (dim + 5, 3);
    let [mut x, weight] = bench.seeded(dim, [rows * stride, dim])?;
    let mut out = bench.out(rows * dim)?;
    let columns = Columns::new(x.gpu(), stride, first);
    for out in [Some(out.gpu()), None] {
        norm.rms_norm_columns(&bench.stream, columns, weight.gpu(), EPS, out)?;
    }
    for (row, out) in x.chunks_exact_mut(stride).zip(out.chunks_exact_mut(dim)) {
        let own = &mut row[first..first + dim];
        bench.cpu.rms_norm_heads(own, &weight, EPS);
        out.copy_from_slice(own);
    }
    bench.equal(format!("{rows}×{dim} of columns"), &out)?;
    bench.equal(format!("{rows}×{dim} of columns in place"), &x)
}
