//! Rows moved and numbers changed one by one.

use super::bench::Bench;
use super::data::Random;
use super::report::Report;
use crate::Result;
use crate::backend::gpu::rows::{Columns, Rows};
use crate::backend::gpu::{DeviceBuffer, Stream};

/// Changes `x` on the device; `y` lies there, too.
type Change = fn(&Rows, &Stream, &DeviceBuffer, &DeviceBuffer) -> Result<()>;
/// The same on the CPU.
type Twin = fn(&Bench, &mut [f32], &[f32]);

const FACTOR: f32 = 45.254834;

const CHANGES: &[(&str, Change, Twin)] = &[
    (
        "mul_sigmoid",
        |rows, on, x, y| rows.mul_sigmoid(on, x.all(), y.all()),
        |bench, x, y| {
            let mut gates = y.to_vec();
            bench.cpu.kernels.sigmoid(&mut gates);
            x.iter_mut().zip(gates).for_each(|(x, gate)| *x *= gate);
        },
    ),
    (
        "add_values",
        |rows, on, x, y| rows.add(on, x.all(), y.all()),
        |bench, x, y| bench.cpu.add(x, y),
    ),
    (
        "scale_values",
        |rows, on, x, _| rows.scale(on, x.all(), FACTOR),
        |_, x, _| x.iter_mut().for_each(|x| *x *= FACTOR),
    ),
    (
        "divide_values",
        |rows, on, x, _| rows.divide(on, x.all(), FACTOR),
        |_, x, _| x.iter_mut().for_each(|x| *x /= FACTOR),
    ),
    ("set_values", |rows, on, x, _| rows.set(on, x.all(), FACTOR), |_, x, _| x.fill(FACTOR)),
];

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let rows = Rows::load(&bench.gpu)?;
    for (name, change, twin) in CHANGES {
        report.row(name, "f32", |row| {
            for n in bench.shapes(&[1, 777], &[1 << 20]) {
                let mut random = Random(n as u64);
                let (mut x, y) = (random.floats(n), random.floats(n));
                let (x_up, y_up) = (bench.up_f32(&x)?, bench.up_f32(&y)?);
                change(&rows, &bench.stream, &x_up, &y_up)?;
                twin(bench, &mut x, &y);
                row.bits(n, &bench.down_f32(&x_up)?, &x);
            }
            Ok(())
        });
    }
    report.row("copy_columns", "f32", |row| {
        for (n, cols) in bench.shapes(&[(1, 4), (6, 7)], &[(512, 4096)]) {
            // The middle of rows to the end of longer ones.
            let (from_stride, to_stride) = (cols + 3, cols + 2);
            let x = Random(n as u64).floats(n * from_stride);
            let (from, to) = (bench.up_f32(&x)?, bench.up_f32(&vec![0.5; n * to_stride])?);
            let from = Columns::new(from.all(), from_stride, 1);
            rows.copy_columns(&bench.stream, from, Columns::new(to.all(), to_stride, 2), cols, n)?;
            let mut expected = vec![0.5; n * to_stride];
            for (to, from) in expected.chunks_mut(to_stride).zip(x.chunks(from_stride)) {
                to[2..].copy_from_slice(&from[1..1 + cols]);
            }
            row.bits(format!("{n}×{cols}"), &bench.down_f32(&to)?, &expected);
        }
        Ok(())
    });
    Ok(())
}
