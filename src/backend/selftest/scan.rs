//! Scans with one decay a head, selective scans, and norms over groups.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::cpu::scan::Selective;
use crate::backend::gpu::norm::Norm;
use crate::backend::gpu::scan::{DeviceScan, DeviceSelective, DeviceSteps, Scanner};
use crate::backend::ops::{Columns, Scan, ScanShape};

const EPS: f32 = 1e-6;
/// A prompt, single tokens, and a prompt of more tokens than a warp makes steps of at once.
const PASSES: [usize; 4] = [9, 1, 1, 3];
const LONG_PASSES: [usize; 3] = [1, 70, 33];

/// Passes that follow one another on one state.
#[derive(Clone, Copy)]
struct Case {
    shape: ScanShape,
    /// Steps, skips and gates, as of Mamba-2; else silu on the way, as of lightning attention.
    has_steps: bool,
    passes: &'static [usize],
}

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let (scanner, norm) = (Scanner::load(&bench.gpu)?, Norm::load(&bench.gpu)?);
    let shape = |[n_heads, n_groups, k_dim, v_dim]: [usize; 4]| ScanShape {
        n_heads,
        n_groups,
        k_dim,
        v_dim,
    };
    let small = shape([4, 2, 3, 5]);
    let shapes = bench.shapes(
        &[small, shape([6, 1, 65, 33])],
        &[shape([3, 3, 32, 64]), shape([2, 1, 128, 64])],
        &[shape([64, 8, 128, 64]), shape([64, 64, 128, 128])],
    );
    report.row("scan", "f32", |row| {
        for has_steps in [true, false] {
            for shape in shapes.iter().copied() {
                Case { shape, has_steps, passes: &PASSES }.compare(bench, &scanner, row)?;
            }
            for shape in bench.shapes(&[], &[small], &[]) {
                Case { shape, has_steps, passes: &LONG_PASSES }.compare(bench, &scanner, row)?;
            }
        }
        Ok(())
    });
    report.row("selective_scan", "f32", |row| {
        let shapes =
            bench.shapes(&[[5, 3], [130, 16]], &[[64, 1], [200, 33]], &[[8192, 16], [4096, 64]]);
        for [channels, n_states] in shapes {
            selective(bench, &scanner, row, [channels, n_states])?;
        }
        Ok(())
    });
    report.row("rms_norm_groups", "f32", |row| {
        let large = [[9, 8, 1024], [512, 1, 8192]];
        for [rows, groups, dim] in bench.shapes(&[[3, 4, 7], [1, 2, 600]], &[[5, 3, 64]], &large) {
            let mut random = Random(dim as u64);
            let (mut x, weight) = (random.floats(rows * groups * dim), random.floats(groups * dim));
            let (x_up, weight_up) = (bench.up_f32(&x)?, bench.up_f32(&weight)?);
            norm.rms_norm_groups(&bench.stream, x_up.all(), weight_up.all(), groups, EPS)?;
            bench.cpu.rms_norm_groups(&mut x, &weight, groups, EPS);
            row.bits(format!("{rows}×{groups}×{dim}"), &bench.down_f32(&x_up)?, &x);
        }
        Ok(())
    });
    Ok(())
}

/// Passes that follow one another on one state.
fn selective(
    bench: &Bench,
    scanner: &Scanner,
    row: &mut Row,
    [channels, n_states]: [usize; 2],
) -> Result<()> {
    let (mut random, n) = (Random(channels as u64), n_states * channels);
    let skip = random.floats(channels);
    let log_decay: Vec<f32> = random.floats(n).into_iter().map(|log| -log.abs()).collect();
    let mut state = random.floats(n);
    let [skip_up, log_up, state_up] = [&skip, &log_decay, &state].map(|v| bench.up_f32(v));
    let (skip_up, log_up, state_up) = (skip_up?, log_up?, state_up?);
    // Columns that no one reads lie around the others.
    let (width, gate_stride) = (2 * n_states + 5, channels + 2);
    for tokens in PASSES {
        let (x, mut steps) = (random.floats(tokens * channels), random.floats(tokens * channels));
        let (rows, gated) = (random.floats(tokens * width), random.floats(tokens * gate_stride));
        let [x_up, steps_up, rows_up, gated_up] =
            [&x, &steps, &rows, &gated].map(|v| bench.up_f32(v));
        let (x_up, steps_up, rows_up, gated_up) = (x_up?, steps_up?, rows_up?, gated_up?);
        let out = bench.empty(4 * x.len())?;
        let (input, output) = (2, n_states + 3);
        let scan = DeviceSelective {
            x: x_up.all(),
            steps: steps_up.all(),
            rows: rows_up.all(),
            width,
            input,
            output,
            n_states,
            log_decay: log_up.all(),
            skip: skip_up.all(),
            gate: gated_up.all(),
            gate_stride,
            gate_first: 1,
        };
        scanner.selective(&bench.stream, &scan, state_up.all(), out.all())?;

        bench.cpu.softplus(&mut steps);
        let scan = Selective {
            x: &x,
            steps: &steps,
            rows: &rows,
            width,
            inputs: input..input + n_states,
            outputs: output..output + n_states,
            log_decay: &log_decay,
            skip: &skip,
        };
        let mut expected = vec![0.0; x.len()];
        bench.cpu.selective_scan(&scan, &mut state, &mut expected);
        let gates = gated.chunks_exact(gate_stride).flat_map(|row| &row[1..1 + channels]);
        let gates: Vec<f32> = gates.copied().collect();
        bench.cpu.silu_gated(&mut expected, &gates, channels);
        assert!(expected.iter().all(|x| x.is_finite()), "data whose errors would show nowhere");
        let name = format!("{tokens}×{channels}×{n_states}");
        row.bits(&name, &bench.down_f32(&out)?, &expected);
        row.bits(format!("state of {name}"), &bench.down_f32(&state_up)?, &state);
    }
    Ok(())
}

impl Case {
    /// The columns of q, k and v, and the width of the rows that have them.
    fn columns(&self) -> ([Columns; 3], usize) {
        let ScanShape { n_heads, n_groups, k_dim, v_dim } = self.shape;
        let (inputs, outputs) = (n_heads * v_dim, n_heads * v_dim + n_groups * k_dim);
        let of = |first, step| Columns { first, step };
        match self.has_steps {
            true => {
                let columns = [of(outputs, k_dim), of(inputs, k_dim), of(0, v_dim)];
                (columns, outputs + n_groups * k_dim)
            }
            // A head's q, k and v one after the other; adjacent heads share those of a group.
            false => {
                let step = 2 * k_dim + v_dim;
                ([of(0, step), of(k_dim, step), of(2 * k_dim, step)], n_heads * step)
            }
        }
    }

    /// Compares the outputs and the state after each pass.
    fn compare(&self, bench: &Bench, scanner: &Scanner, row: &mut Row) -> Result<()> {
        let Case { shape, has_steps, passes } = *self;
        let (n_heads, inner, ([q, k, v], width)) = (shape.n_heads, shape.width(), self.columns());
        let mut random = Random((shape.k_dim + shape.v_dim) as u64);
        let mut numbers = || random.floats(n_heads);
        let (bias, skip) = (numbers(), numbers());
        // Not positive, as in models: a state that grew without bound would hide differences.
        let log_decay: Vec<f32> = numbers().into_iter().map(|log| -log.abs()).collect();
        let mut state = random.floats(shape.n_state());
        let [bias_up, skip_up, log_up, state_up] =
            [&bias, &skip, &log_decay, &state].map(|v| bench.up_f32(v));
        let (bias_up, skip_up, log_up, state_up) = (bias_up?, skip_up?, log_up?, state_up?);
        // No one reads the columns between gate and steps.
        let (stride, first) = (inner + 2 + n_heads, inner + 2);
        for tokens in passes.iter().copied() {
            let mut rows = random.floats(tokens * width);
            let gated = random.floats(tokens * stride);
            let (rows_up, gated_up) = (bench.up_f32(&rows)?, bench.up_f32(&gated)?);
            let out = bench.empty(4 * tokens * inner)?;
            let steps = DeviceSteps { rows: gated_up.all(), stride, first, bias: bias_up.all() };
            let scan = DeviceScan {
                shape,
                rows: rows_up.all(),
                width,
                q,
                k,
                v,
                silu: !has_steps,
                steps: has_steps.then_some(steps),
                log_decay: log_up.all(),
                skip: has_steps.then(|| skip_up.all()),
            };
            scanner.launch(&bench.stream, &scan, state_up.all(), out.all())?;

            let cpu = &bench.cpu;
            let columns = |from: usize, n: usize| -> Vec<f32> {
                let rows = gated.chunks_exact(stride);
                rows.flat_map(|row| &row[from..from + n]).copied().collect()
            };
            let mut steps = columns(first, n_heads);
            cpu.steps(&mut steps, &bias);
            if !has_steps {
                let mut gates = rows.clone();
                cpu.sigmoid_gated(&mut rows, &mut gates);
            }
            let scan = Scan {
                shape,
                rows: &rows,
                width,
                q,
                k,
                v,
                steps: has_steps.then_some(&steps),
                log_decay: &log_decay,
                skip: has_steps.then_some(&skip),
            };
            let mut expected = vec![0.0; tokens * inner];
            cpu.scan(&scan, &mut state, &mut expected);
            if has_steps {
                cpu.silu_gated(&mut expected, &columns(0, inner), inner);
            }

            assert!(expected.iter().all(|x| x.is_finite()), "data whose errors would show nowhere");
            let ScanShape { n_groups, k_dim, v_dim, .. } = shape;
            let name = format!("{tokens}×{n_heads}/{n_groups}×{k_dim}×{v_dim}");
            row.bits(&name, &bench.down_f32(&out)?, &expected);
            row.bits(format!("state of {name}"), &bench.down_f32(&state_up)?, &state);
        }
        Ok(())
    }
}
