//! Recurrent layers: the short convolution that most begin with, and scans of a state (Mamba, arXiv
//! 2312.00752; Mamba-2, arXiv 2405.21060; lightning attention, arXiv 2501.08313). Each token
//! changes a state of fixed size; tokens go through it one by one, so a text's bits do not depend
//! on how it is cut into micro-batches.

use super::{Cpu, SERIAL_WORK, SharedOut};
use crate::backend::ops::{Scan, ScanShape, ShortConv};
use crate::simd::Kernels;
use std::ops::Range;

/// The inputs of [`Cpu::selective_scan`], for each token and channel or state.
pub struct Selective<'a> {
    /// [tokens, channels]
    pub x: &'a [f32],
    /// Steps: [tokens, channels].
    pub steps: &'a [f32],
    /// Columns `inputs` and `outputs` of these rows, of `width` elements, are put into the states
    /// and read from them.
    pub rows: &'a [f32],
    pub width: usize,
    pub inputs: Range<usize>,
    pub outputs: Range<usize>,
    /// Logarithms of decays for a step of 1: [states, channels].
    pub log_decay: &'a [f32],
    /// Factor on the input, which is added to the output: `[channels]`.
    pub skip: &'a [f32],
}

impl Cpu {
    /// A convolution of `x` [tokens, channels] into `out`. `past` is what came before `x`, and
    /// afterwards what comes before the next.
    pub fn short_conv(&self, conv: &ShortConv, past: &mut [f32], x: &[f32], out: &mut [f32]) {
        let (width, kernel) = (conv.shape.channels, conv.shape.kernel);
        let (tokens, before) = (x.len() / width, kernel - 1);
        assert!(past.len() == conv.shape.n_past() && x.len() == out.len());
        assert_eq!(conv.weight.len(), width * kernel);
        let at = |past: &[f32], t: usize, c: usize| match t < before {
            true => past[t * width + c],
            false => x[(t - before) * width + c],
        };
        let shared = SharedOut::new(out);
        self.chunks(tokens, self.token_chunk(tokens, width * kernel), &|scratch, range| {
            let (_, gates) = scratch.split(width);
            for t in range {
                // SAFETY: each token is in one chunk.
                let out = unsafe { shared.slice(t * width, width) };
                for (c, o) in out.iter_mut().enumerate() {
                    let taps = conv.weight[c * kernel..][..kernel].iter().enumerate();
                    *o = taps.map(|(j, w)| w * at(past, t + j, c)).sum();
                }
                if let Some(bias) = conv.bias {
                    out.iter_mut().zip(bias).for_each(|(o, bias)| *o += bias);
                }
                if conv.silu {
                    gates.copy_from_slice(out);
                    self.kernels.sigmoid(gates);
                    out.iter_mut().zip(&*gates).for_each(|(o, gate)| *o *= gate);
                }
            }
        });
        // The past that stays moves to the front, the last tokens follow it.
        let n_new = tokens.min(before);
        past.copy_within(n_new * width.., 0);
        past[(before - n_new) * width..].copy_from_slice(&x[(tokens - n_new) * width..]);
    }

    /// S ← e^(log_decay · step)·S + k ⊗ (step · v); out = Sᵀq + skip · v: `out` [tokens, n_heads,
    /// v_dim].
    pub fn scan(&self, scan: &Scan, state: &mut [f32], out: &mut [f32]) {
        let shape = scan.shape;
        let tokens = scan.rows.len() / scan.width;
        assert!(state.len() == shape.n_state() && out.len() == tokens * shape.width());
        let work = tokens * shape.n_state() * 3;
        let chunk = if work <= SERIAL_WORK { shape.n_heads } else { 1 };
        let (state, out) = (SharedOut::new(state), SharedOut::new(out));
        let n_head_state = shape.k_dim * shape.v_dim;
        self.chunks(shape.n_heads, chunk, &|scratch, range| {
            let (_, value) = scratch.split(shape.v_dim);
            for h in range {
                // SAFETY: each head is in one chunk, and its state and outputs are its own.
                let state = unsafe { state.slice(h * n_head_state, n_head_state) };
                for t in 0..tokens {
                    let start = t * shape.width() + h * shape.v_dim;
                    // SAFETY: as above.
                    let out = unsafe { out.slice(start, shape.v_dim) };
                    scan_step(self.kernels, &Place { scan, t, h }, value, state, out);
                }
            }
        });
    }

    /// A scan with a decay for each channel and state: S ← e^(log_decay · step) ⊙ S + input ⊗
    /// (step ⊙ x); out = outputᵀS + skip ⊙ x. `state` [states, channels], `out` [tokens, channels].
    pub fn selective_scan(&self, scan: &Selective, state: &mut [f32], out: &mut [f32]) {
        let channels = scan.skip.len();
        let (tokens, n_states) = (scan.x.len() / channels, scan.inputs.len());
        assert!(state.len() == n_states * channels && out.len() == scan.x.len());
        assert_eq!(scan.log_decay.len(), state.len());
        let chunk = self.row_chunk(channels, tokens * state.len() * 4);
        let (state, out) = (SharedOut::new(state), SharedOut::new(out));
        self.chunks(channels, chunk, &|scratch, range| {
            let (first, n) = (range.start, range.len());
            let (_, room) = scratch.split(2 * n);
            let (value, decay) = room.split_at_mut(n);
            for t in 0..tokens {
                let own = t * channels + first..t * channels + first + n;
                let (x, steps) = (&scan.x[own.clone()], &scan.steps[own.clone()]);
                let row = &scan.rows[t * scan.width..][..scan.width];
                let puts = row[scan.inputs.clone()].iter().zip(&row[scan.outputs.clone()]);
                // SAFETY: each channel is in one chunk.
                let out = unsafe { out.slice(own.start, n) };
                for i in 0..n {
                    value[i] = x[i] * steps[i];
                    out[i] = 0.0;
                }
                for (s, (input, output)) in puts.enumerate() {
                    let at = s * channels + first;
                    let logs = scan.log_decay[at..at + n].iter().zip(steps);
                    decay.iter_mut().zip(logs).for_each(|(d, (log, step))| *d = log * step);
                    self.kernels.exp(decay);
                    // SAFETY: as above.
                    let state = unsafe { state.slice(at, n) };
                    state.iter_mut().zip(&*decay).for_each(|(s, decay)| *s *= decay);
                    self.kernels.axpy(state, *input, value);
                    self.kernels.axpy(out, *output, state);
                }
                for (i, o) in out.iter_mut().enumerate() {
                    *o += scan.skip[first + i] * x[i];
                }
            }
        });
    }

    /// `x` [tokens, bias.len()] ← ln(1 + e^(x + bias))
    pub fn steps(&self, x: &mut [f32], bias: &[f32]) {
        for row in x.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
        }
        self.softplus(x);
    }

    /// `x` ← silu(gate) ⊙ x, in rows of `dim`
    pub fn silu_gated(&self, x: &mut [f32], gate: &[f32], dim: usize) {
        assert!(x.len() == gate.len() && x.len().is_multiple_of(dim));
        let rows = x.len() / dim;
        let shared = SharedOut::new(x);
        self.chunks(rows, self.token_chunk(rows, dim), &|scratch, range| {
            let (_, copy) = scratch.split(dim);
            for r in range {
                // SAFETY: each row is in one chunk.
                let x = unsafe { shared.slice(r * dim, dim) };
                copy.copy_from_slice(x);
                self.kernels.swiglu(&gate[r * dim..][..dim], copy, x);
            }
        });
    }

    /// `x` ← x ⊙ sigmoid(gate); `gate` is overwritten.
    pub fn sigmoid_gated(&self, x: &mut [f32], gate: &mut [f32]) {
        assert_eq!(x.len(), gate.len());
        self.kernels.sigmoid(gate);
        x.iter_mut().zip(&*gate).for_each(|(x, gate)| *x *= gate);
    }

    /// RMSNorm of each of `n_groups` parts of rows of weight.len() elements, in place.
    pub fn rms_norm_groups(&self, x: &mut [f32], weight: &[f32], n_groups: usize, eps: f32) {
        let dim = weight.len() / n_groups;
        let groups = x.len() / dim;
        let shared = SharedOut::new(x);
        self.chunks(groups, self.token_chunk(groups, dim), &|scratch, range| {
            let (_, copy) = scratch.split(dim);
            for g in range {
                // SAFETY: each group is in one chunk.
                let x = unsafe { shared.slice(g * dim, dim) };
                copy.copy_from_slice(x);
                let weight = &weight[g % n_groups * dim..][..dim];
                self.kernels.rms_norm(copy, weight, eps, x);
            }
        });
    }
}

/// A token and a head of a scan.
struct Place<'a> {
    scan: &'a Scan<'a>,
    t: usize,
    h: usize,
}

fn scan_step(
    kernels: &Kernels,
    place: &Place,
    value: &mut [f32],
    state: &mut [f32],
    out: &mut [f32],
) {
    let Place { scan, t, h } = *place;
    let ScanShape { n_heads, n_groups, k_dim, v_dim } = scan.shape;
    let row = &scan.rows[t * scan.width..][..scan.width];
    let group = h / (n_heads / n_groups);
    let (q, k) = (scan.q.head(row, group, k_dim), scan.k.head(row, group, k_dim));
    let v = scan.v.head(row, h, v_dim);
    let step = scan.steps.map_or(1.0, |steps| steps[t * n_heads + h]);
    let mut decay = [scan.log_decay[h] * step];
    kernels.exp(&mut decay);
    value.iter_mut().zip(v).for_each(|(value, v)| *value = v * step);
    out.fill(0.0);
    for (row, (k, q)) in state.chunks_exact_mut(v_dim).zip(k.iter().zip(q)) {
        row.iter_mut().for_each(|s| *s *= decay[0]);
        kernels.axpy(row, *k, value);
        kernels.axpy(out, *q, row);
    }
    if let Some(skip) = scan.skip {
        out.iter_mut().zip(v).for_each(|(out, v)| *out += skip[h] * v);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ops::{Columns, ConvShape};

    fn wave(n: usize, step: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * step).sin()).collect()
    }

    /// Ends of the passes over nine tokens that are cut after the tokens that `cuts` says.
    fn passes(cuts: &[usize]) -> impl Iterator<Item = Range<usize>> {
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain([9]);
        starts.zip(ends.collect::<Vec<_>>()).map(|(start, end)| start..end)
    }

    const SHAPE: ScanShape = ScanShape { n_heads: 4, n_groups: 2, k_dim: 3, v_dim: 5 };

    fn scanned(cpu: &Cpu, cuts: &[usize]) -> Vec<f32> {
        let (width, mut state) = (2 * 6 + 20, vec![0.0; SHAPE.n_state()]);
        let (rows, steps) = (wave(9 * width, 0.7), wave(36, 0.3));
        let mut all = Vec::new();
        for pass in passes(cuts) {
            let scan = Scan {
                shape: SHAPE,
                rows: &rows[pass.start * width..pass.end * width],
                width,
                q: Columns { first: 26, step: 3 },
                k: Columns { first: 20, step: 3 },
                v: Columns { first: 0, step: 5 },
                steps: Some(&steps[pass.start * 4..pass.end * 4]),
                log_decay: &[-0.1, -0.4, 0.0, -2.0],
                skip: Some(&[0.5, 1.0, 0.0, -1.0]),
            };
            let mut out = vec![0.0; pass.len() * SHAPE.width()];
            cpu.scan(&scan, &mut state, &mut out);
            all.extend(out);
        }
        all
    }

    fn selected(cpu: &Cpu, cuts: &[usize]) -> Vec<f32> {
        let (channels, n_states, width) = (40, 3, 7);
        let mut state = vec![0.0; n_states * channels];
        let (x, steps) = (wave(9 * channels, 0.7), wave(9 * channels, 0.31));
        let (rows, log_decay) = (wave(9 * width, 0.9), wave(n_states * channels, 0.2));
        let mut all = Vec::new();
        for pass in passes(cuts) {
            let scan = Selective {
                x: &x[pass.start * channels..pass.end * channels],
                steps: &steps[pass.start * channels..pass.end * channels],
                rows: &rows[pass.start * width..pass.end * width],
                width,
                inputs: 1..4,
                outputs: 4..7,
                log_decay: &log_decay,
                skip: &wave(channels, 0.5),
            };
            let mut out = vec![0.0; pass.len() * channels];
            cpu.selective_scan(&scan, &mut state, &mut out);
            all.extend(out);
        }
        all
    }

    fn convolved(cpu: &Cpu, cuts: &[usize]) -> Vec<f32> {
        let shape = ConvShape { channels: 6, kernel: 3 };
        let (x, weight, bias) = (wave(54, 0.7), wave(18, 0.3), wave(6, 1.3));
        let mut past = vec![0.0; shape.n_past()];
        let mut all = Vec::new();
        for pass in passes(cuts) {
            let conv = ShortConv { shape, weight: &weight, bias: Some(&bias), silu: true };
            let mut out = vec![0.0; 6 * pass.len()];
            cpu.short_conv(&conv, &mut past, &x[6 * pass.start..6 * pass.end], &mut out);
            all.extend(out);
        }
        all
    }

    #[test]
    fn cuts_and_threads_change_no_bit() {
        for part in [scanned, selected, convolved] {
            let whole = part(&Cpu::new(1), &[]);
            assert!(whole.iter().all(|v| v.is_finite()) && whole.iter().any(|v| v.abs() > 0.01));
            for cuts in [&[1][..], &[2, 3], &[1, 2, 3, 4, 5, 6, 7, 8]] {
                assert_eq!(part(&Cpu::new(3), cuts), whole, "{cuts:?}");
            }
        }
    }

    /// Against the sum that the recurrence stands for: Σ_s≤t q_t·k_s · e^(decays between) · v_s.
    #[test]
    fn a_scan_is_the_sum_over_the_past() {
        let cpu = Cpu::new(1);
        let shape = ScanShape { n_heads: 1, n_groups: 1, k_dim: 2, v_dim: 1 };
        let rows = wave(4 * 5, 0.8);
        let scan = Scan {
            shape,
            rows: &rows,
            width: 5,
            q: Columns { first: 0, step: 0 },
            k: Columns { first: 2, step: 0 },
            v: Columns { first: 4, step: 0 },
            steps: None,
            log_decay: &[-0.25],
            skip: None,
        };
        let mut out = vec![0.0; 4];
        cpu.scan(&scan, &mut [0.0; 2], &mut out);
        for (t, got) in out.iter().enumerate() {
            let row = |s: usize| &rows[5 * s..][..5];
            let of = |s: usize| {
                let score = row(t)[0] * row(s)[2] + row(t)[1] * row(s)[3];
                score * (-0.25 * (t - s) as f32).exp() * row(s)[4]
            };
            let wanted: f32 = (0..=t).map(of).sum();
            assert!((got - wanted).abs() < 1e-6, "{t}: {got} {wanted}");
        }
    }
}
