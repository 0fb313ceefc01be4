//! Copies of columns and element-wise operations.

use super::bench::Bench;
use super::data::Random;
use super::report::Report;
use crate::Result;
use crate::backend::gpu::rows::{Columns, Rows};
use crate::backend::gpu::{DeviceBuffer, Stream};

/// Changes `x` on the device; `y` lies there, too.
type Change = fn(&Rows, &Stream, &DeviceBuffer, &DeviceBuffer) -> Result<()>;
/// Changes `x` on the CPU.
type Twin = fn(&Bench, &mut [f32], &[f32]);

const FACTOR: f32 = 45.254834;
const DIVISOR: f32 = 1.7;
const LIMIT: f32 = 0.6;

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
        |rows, on, x, _| rows.divide(on, x.all(), DIVISOR),
        |_, x, _| x.iter_mut().for_each(|x| *x /= DIVISOR),
    ),
    (
        "clamp_values",
        |rows, on, x, _| rows.clamp(on, x.all(), LIMIT),
        |_, x, _| x.iter_mut().for_each(|x| *x = x.clamp(-LIMIT, LIMIT)),
    ),
    (
        "cap_values",
        |rows, on, x, _| rows.soft_cap(on, x.all(), LIMIT),
        |bench, x, _| bench.cpu.kernels.soft_cap(x, LIMIT),
    ),
    ("set_values", |rows, on, x, _| rows.set(on, x.all(), FACTOR), |_, x, _| x.fill(FACTOR)),
];

/// Rows and columns; then length of a row and first column, from and to. Parts of the middle, the
/// halves of a head, what joins two parts to a row.
const COPIES: [[usize; 6]; 9] = [
    [1, 4, 7, 1, 6, 2],
    [6, 7, 10, 1, 9, 2],
    [6, 7, 14, 7, 7, 0],
    [40, 128, 256, 0, 128, 0],
    [40, 128, 256, 128, 128, 0],
    [1, 3, 3, 0, 6, 0],
    [6, 6, 7, 1, 9, 3],
    [40, 127, 128, 1, 130, 3],
    [512, 4096, 4099, 1, 4098, 2],
];

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let rows = Rows::load(&bench.gpu)?;
    for (name, change, twin) in CHANGES {
        report.row(name, "f32", |row| {
            for n in bench.shapes(&[1, 777], &[31, 256, 2048], &[1 << 20]) {
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
    report.row("mul_rows", "f32", |row| {
        for (n, cols) in bench.shapes(&[(1, 5), (7, 64)], &[(3, 333)], &[(512, 2048)]) {
            let mut random = Random(cols as u64);
            let (mut x, factors) = (random.floats(n * cols), random.floats(n));
            let (x_up, factors_up) = (bench.up_f32(&x)?, bench.up_f32(&factors)?);
            rows.mul_rows(&bench.stream, x_up.all(), factors_up.all())?;
            for (row, factor) in x.chunks_exact_mut(cols).zip(&factors) {
                row.iter_mut().for_each(|x| *x *= factor);
            }
            row.bits(format!("{n}×{cols}"), &bench.down_f32(&x_up)?, &x);
        }
        Ok(())
    });
    report.row("copy_columns", "f32", |row| {
        for case in bench.shapes(&COPIES[..2], &COPIES[2..8], &COPIES[8..]) {
            let [n, cols, from_stride, from_first, to_stride, to_first] = case;
            let x = Random(n as u64).floats(n * from_stride);
            let (from, to) = (bench.up_f32(&x)?, bench.up_f32(&vec![0.5; n * to_stride])?);
            let from = Columns::new(from.all(), from_stride, from_first);
            let out = Columns::new(to.all(), to_stride, to_first);
            rows.copy_columns(&bench.stream, from, out, cols, n)?;
            let mut expected = vec![0.5; n * to_stride];
            for (to, from) in expected.chunks_mut(to_stride).zip(x.chunks(from_stride)) {
                to[to_first..][..cols].copy_from_slice(&from[from_first..][..cols]);
            }
            row.bits(format!("{n}×{cols}"), &bench.down_f32(&to)?, &expected);
        }
        Ok(())
    });
    Ok(())
}
