//! Norms and sums of rows.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::norm::Norm;
use crate::backend::gpu::rows::Columns;

const EPS: f32 = 1e-6;

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let norm = Norm::load(&bench.gpu)?;
    // One token, heads, odd sizes, several chunks, more rows than a block. Then sizes of models.
    let small = [[1, 8], [3, 5], [17, 128], [2, 513], [1, 2500]];
    let odd = [[1, 2048], [9, 64], [5, 1000], [4, 1024]];
    let shapes: Vec<[usize; 2]> = bench.shapes(&small, &odd, &[[512, 4096], [9, 7168]]);
    let case = |[rows, dim]: [usize; 2]| {
        let mut random = Random(dim as u64);
        (random.floats(rows * dim), random.floats(dim), random.floats(dim))
    };
    report.row("rms_norm", "f32", |row| {
        for shape @ [rows, dim] in shapes.iter().copied() {
            let (x, weight, _) = case(shape);
            let mut expected = vec![0.0; x.len()];
            bench.cpu.rms_norm_rows(&x, &weight, EPS, &mut expected);
            let (x, weight) = (bench.up_f32(&x)?, bench.up_f32(&weight)?);
            let out = bench.empty(x.len())?;
            norm.rms_norm_rows(&bench.stream, x.all(), weight.all(), EPS, out.all())?;
            row.bits(format!("{rows}×{dim}"), &bench.down_f32(&out)?, &expected);
            norm.rms_norm_heads(&bench.stream, x.all(), weight.all(), EPS)?;
            row.bits(format!("{rows}×{dim} in place"), &bench.down_f32(&x)?, &expected);
            columns(bench, &norm, row, shape)?;
        }
        Ok(())
    });
    report.row("layer_norm", "f32", |row| {
        for shape @ [rows, dim] in shapes.iter().copied() {
            let (x, weight, bias) = case(shape);
            let mut expected = vec![0.0; x.len()];
            bench.cpu.layer_norm_rows(&x, (&weight, &bias), EPS, &mut expected);
            let [x, weight, bias] = [&x, &weight, &bias].map(|v| bench.up_f32(v));
            let (x, weight, bias) = (x?, weight?, bias?);
            let out = bench.empty(x.len())?;
            let (weight, bias) = (weight.all(), bias.all());
            norm.layer_norm_rows(&bench.stream, x.all(), weight, bias, EPS, out.all())?;
            row.bits(format!("{rows}×{dim}"), &bench.down_f32(&out)?, &expected);
        }
        Ok(())
    });
    report.row("add_scaled", "f32", |row| {
        for n in bench.shapes(&[1, 777], &[], &[1 << 20]) {
            let mut random = Random(n as u64);
            let (mut acc, x) = (random.floats(n), random.floats(n));
            let (acc_up, x_up) = (bench.up_f32(&acc)?, bench.up_f32(&x)?);
            for scale in [0.37, 1.0, -2.0] {
                norm.add_scaled(&bench.stream, acc_up.all(), scale, x_up.all())?;
                bench.cpu.add_scaled(&mut acc, scale, &x);
                row.bits(n, &bench.down_f32(&acc_up)?, &acc);
            }
        }
        Ok(())
    });
    add_normed(bench, &norm, report);
    Ok(())
}

/// Columns of wider rows, into rows of their own and in place.
fn columns(bench: &Bench, norm: &Norm, row: &mut Row, [rows, dim]: [usize; 2]) -> Result<()> {
    let (mut random, stride, first) = (Random(dim as u64), dim + 5, 3);
    let (mut x, weight) = (random.floats(rows * stride), random.floats(dim));
    let (x_up, weight_up, out) =
        (bench.up_f32(&x)?, bench.up_f32(&weight)?, bench.empty(4 * rows * dim)?);
    let columns = Columns::new(x_up.all(), stride, first);
    for out in [Some(out.all()), None] {
        norm.rms_norm_columns(&bench.stream, columns, weight_up.all(), EPS, out)?;
    }
    for row in x.chunks_exact_mut(stride) {
        bench.cpu.rms_norm_heads(&mut row[first..first + dim], &weight, EPS);
    }
    let own = x.chunks_exact(stride).flat_map(|row| &row[first..first + dim]);
    let expected: Vec<f32> = own.copied().collect();
    row.bits(format!("{rows}×{dim} of columns"), &bench.down_f32(&out)?, &expected);
    row.bits(format!("{rows}×{dim} of columns in place"), &bench.down_f32(&x_up)?, &x);
    Ok(())
}

fn add_normed(bench: &Bench, norm: &Norm, report: &mut Report) {
    report.row("add_normed", "f32", |row| {
        for n in bench.shapes(&[2, 777], &[], &[1 << 20]) {
            let mut random = Random(n as u64);
            let (mut h, mut y) = (random.floats(n), random.floats(n));
            // A zero of either sign.
            (h[0], y[0], h[1], y[1]) = (-0.0, -0.0, 0.0, -0.0);
            let (h_up, y_up) = (bench.up_f32(&h)?, bench.up_f32(&y)?);
            let x_up = bench.empty(4 * n)?;
            for scale in [3.5565588, 1.0, -2.0] {
                norm.add_normed(&bench.stream, scale, h_up.all(), y_up.all(), x_up.all())?;
                let mut x = vec![0.0; n];
                bench.cpu.add_scaled(&mut x, scale, &h);
                bench.cpu.add(&mut x, &y);
                row.bits(n, &bench.down_f32(&x_up)?, &x);
            }
        }
        Ok(())
    });
}
