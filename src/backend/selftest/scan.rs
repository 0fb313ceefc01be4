//! Scans with one decay a head, selective scans, and norms over groups.

use super::{Bench, Random};
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
struct Case<'a> {
    shape: ScanShape,
    /// Steps, skips and gates, as of Mamba-2; else silu on the way, as of lightning attention.
    has_steps: bool,
    passes: &'a [usize],
}

pub fn check(bench: &Bench) -> Result<()> {
    let (scanner, norm) = (Scanner::load(&bench.gpu)?, Norm::load(&bench.gpu)?);
    let small = [4, 2, 3, 5];
    let odd = [[3, 3, 32, 64], [2, 1, 128, 64]];
    let large = [[64, 8, 128, 64], [64, 64, 128, 128]];
    let shapes = bench.shapes(&[small, [6, 1, 65, 33]], &odd, &large);
    bench.each("scan", "f32", [true, false], |has_steps| {
        let compare = |[n_heads, n_groups, k_dim, v_dim]: [usize; 4], passes: &[usize]| {
            let shape = ScanShape { n_heads, n_groups, k_dim, v_dim };
            Case { shape, has_steps, passes }.compare(bench, &scanner)
        };
        shapes.iter().try_for_each(|shape| compare(*shape, &PASSES))?;
        let mut long = bench.shapes(&[], &[small], &[]).into_iter();
        long.try_for_each(|shape| compare(shape, &LONG_PASSES))
    });
    let large = [[8192, 16], [4096, 64]];
    let shapes = bench.shapes(&[[5, 3], [130, 16]], &[[64, 1], [200, 33]], &large);
    bench.each("selective_scan", "f32", shapes, |shape| selective(bench, &scanner, shape));
    let large = [[9, 8, 1024], [512, 1, 8192]];
    let shapes = bench.shapes(&[[3, 4, 7], [1, 2, 600]], &[[5, 3, 64]], &large);
    bench.each("rms_norm_groups", "f32", shapes, |[rows, groups, dim]| {
        let [mut x, weight] = bench.seeded(dim, [rows * groups * dim, groups * dim])?;
        norm.rms_norm_groups(&bench.stream, x.gpu(), weight.gpu(), groups, EPS)?;
        bench.cpu.rms_norm_groups(&mut x, &weight, groups, EPS);
        bench.equal(format!("{rows}×{groups}×{dim}"), &x)
    });
    Ok(())
}

/// Columns from `first` on of rows of `stride`.
fn columns(rows: &[f32], stride: usize, first: usize, n: usize) -> Vec<f32> {
    rows.chunks_exact(stride).flat_map(|row| &row[first..first + n]).copied().collect()
}

/// Not positive, as in models: a state that grew without bound would hide differences.
fn log_decays(random: &mut Random, n: usize) -> Vec<f32> {
    random.floats(n).into_iter().map(|log| -log.abs()).collect()
}

/// Passes that follow one another on one state.
fn selective(bench: &Bench, scanner: &Scanner, [channels, n_states]: [usize; 2]) -> Result<()> {
    let (mut random, n) = (Random(channels as u64), n_states * channels);
    let [skip] = bench.floats(&mut random, [channels])?;
    let log_decay = bench.up(log_decays(&mut random, n))?;
    let [mut state] = bench.floats(&mut random, [n])?;
    // Columns that no one reads lie around the others.
    let (width, gate_stride) = (2 * n_states + 5, channels + 2);
    let (input, output) = (2, n_states + 3);
    for tokens in PASSES {
        let lengths = [channels, channels, width, gate_stride].map(|n| tokens * n);
        let [x, mut steps, rows, gated] = bench.floats(&mut random, lengths)?;
        let mut out = bench.out(x.len())?;
        let scan = DeviceSelective {
            x: x.gpu(),
            steps: steps.gpu(),
            rows: rows.gpu(),
            width,
            input,
            output,
            n_states,
            log_decay: log_decay.gpu(),
            skip: skip.gpu(),
            gate: gated.gpu(),
            gate_stride,
            gate_first: 1,
        };
        scanner.selective(&bench.stream, &scan, state.gpu(), out.gpu())?;

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
        bench.cpu.selective_scan(&scan, &mut state, &mut out);
        bench.cpu.silu_gated(&mut out, &columns(&gated, gate_stride, 1, channels), channels);
        assert!(out.iter().all(|x| x.is_finite()), "data whose errors would show nowhere");
        let name = format!("{tokens}×{channels}×{n_states}");
        bench.equal(&name, &out)?;
        bench.equal(format!("state of {name}"), &state)?;
    }
    Ok(())
}

impl Case<'_> {
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
    fn compare(&self, bench: &Bench, scanner: &Scanner) -> Result<()> {
        let Case { shape, has_steps, passes } = *self;
        let (n_heads, inner, ([q, k, v], width)) = (shape.n_heads, shape.width(), self.columns());
        let mut random = Random((shape.k_dim + shape.v_dim) as u64);
        let [bias, skip] = bench.floats(&mut random, [n_heads; 2])?;
        let log_decay = bench.up(log_decays(&mut random, n_heads))?;
        let [mut state] = bench.floats(&mut random, [shape.n_state()])?;
        // No one reads the columns between gate and steps.
        let (stride, first) = (inner + 2 + n_heads, inner + 2);
        for tokens in passes.iter().copied() {
            let [mut rows, gated] =
                bench.floats(&mut random, [width, stride].map(|n| tokens * n))?;
            let mut out = bench.out(tokens * inner)?;
            let steps = DeviceSteps { rows: gated.gpu(), stride, first, bias: bias.gpu() };
            let scan = DeviceScan {
                shape,
                rows: rows.gpu(),
                width,
                q,
                k,
                v,
                silu: !has_steps,
                steps: has_steps.then_some(steps),
                log_decay: log_decay.gpu(),
                skip: has_steps.then(|| skip.gpu()),
            };
            scanner.launch(&bench.stream, &scan, state.gpu(), out.gpu())?;

            let cpu = &bench.cpu;
            let mut steps = columns(&gated, stride, first, n_heads);
            cpu.steps(&mut steps, &bias);
            if !has_steps {
                let mut gates = rows.to_vec();
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
            cpu.scan(&scan, &mut state, &mut out);
            if has_steps {
                cpu.silu_gated(&mut out, &columns(&gated, stride, 0, inner), inner);
            }

            assert!(out.iter().all(|x| x.is_finite()), "data whose errors would show nowhere");
            let ScanShape { n_groups, k_dim, v_dim, .. } = shape;
            let name = format!("{tokens}×{n_heads}/{n_groups}×{k_dim}×{v_dim}");
            bench.equal(&name, &out)?;
            bench.equal(format!("state of {name}"), &state)?;
        }
        Ok(())
    }
}
