//! Copies of columns and element-wise operations.

use super::Bench;
use crate::Result;
use crate::backend::gpu::rows::{Columns, Rows};
use crate::backend::gpu::{DeviceSlice, Stream};

/// Changes `x` on the device; `y` lies there, too.
type Change = fn(&Rows, &Stream, DeviceSlice, DeviceSlice) -> Result<()>;
/// Changes `x` on the CPU.
type Twin = fn(&Bench, &mut [f32], &[f32]);

const FACTOR: f32 = 45.254834;
const DIVISOR: f32 = 1.7;
const LIMIT: f32 = 0.6;

const CHANGES: &[(&str, Change, Twin)] = &[
    (
        "mul_sigmoid",
        |rows, on, x, y| rows.mul_sigmoid(on, x, y),
        |bench, x, y| {
            let mut gates = y.to_vec();
            bench.cpu.kernels.sigmoid(&mut gates);
            x.iter_mut().zip(gates).for_each(|(x, gate)| *x *= gate);
        },
    ),
    ("add_values", |rows, on, x, y| rows.add(on, x, y), |bench, x, y| bench.cpu.add(x, y)),
    (
        "scale_values",
        |rows, on, x, _| rows.scale(on, x, FACTOR),
        |_, x, _| x.iter_mut().for_each(|x| *x *= FACTOR),
    ),
    (
        "divide_values",
        |rows, on, x, _| rows.divide(on, x, DIVISOR),
        |_, x, _| x.iter_mut().for_each(|x| *x /= DIVISOR),
    ),
    (
        "clamp_values",
        |rows, on, x, _| rows.clamp(on, x, LIMIT),
        |_, x, _| x.iter_mut().for_each(|x| *x = x.clamp(-LIMIT, LIMIT)),
    ),
    (
        "cap_values",
        |rows, on, x, _| rows.soft_cap(on, x, LIMIT),
        |bench, x, _| bench.cpu.kernels.soft_cap(x, LIMIT),
    ),
    ("set_values", |rows, on, x, _| rows.set(on, x, FACTOR), |_, x, _| x.fill(FACTOR)),
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

pub fn check(bench: &Bench) -> Result<()> {
    let (rows, stream) = (Rows::load(&bench.gpu)?, &bench.stream);
    for (name, change, twin) in CHANGES {
        bench.each(name, "f32", bench.shapes(&[1, 777], &[31, 256, 2048], &[1 << 20]), |n| {
            let [mut x, y] = bench.seeded(n, [n, n])?;
            change(&rows, stream, x.gpu(), y.gpu())?;
            twin(bench, &mut x, &y);
            bench.equal(n, &x)
        });
    }
    let shapes = bench.shapes(&[(1, 5), (7, 64)], &[(3, 333)], &[(512, 2048)]);
    bench.each("mul_rows", "f32", shapes, |(n, cols)| {
        let [mut x, factors] = bench.seeded(cols, [n * cols, n])?;
        rows.mul_rows(stream, x.gpu(), factors.gpu())?;
        for (row, factor) in x.chunks_exact_mut(cols).zip(factors.iter()) {
            row.iter_mut().for_each(|x| *x *= factor);
        }
        bench.equal(format!("{n}×{cols}"), &x)
    });
    let copies = bench.shapes(&COPIES[..2], &COPIES[2..8], &COPIES[8..]);
    bench.each("copy_columns", "f32", copies, |case| {
        let [n, cols, from_stride, from_first, to_stride, to_first] = case;
        let ([x], mut to) =
            (bench.seeded(n, [n * from_stride])?, bench.up(vec![0.5; n * to_stride])?);
        let from = Columns::new(x.gpu(), from_stride, from_first);
        rows.copy_columns(stream, from, Columns::new(to.gpu(), to_stride, to_first), cols, n)?;
        for (to, from) in to.chunks_mut(to_stride).zip(x.chunks(from_stride)) {
            to[to_first..][..cols].copy_from_slice(&from[from_first..][..cols]);
        }
        bench.equal(format!("{n}×{cols}"), &to)
    });
    Ok(())
}
