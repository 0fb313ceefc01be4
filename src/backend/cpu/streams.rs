//! Several residual streams a token: hyper-connections (arXiv 2409.19606, DeepSeek-V4, Hunyuan 4),
//! and streams that earlier layers have left behind (Kimi K3). Rows of streams are
//! [n, n_embd]; each row's bits depend on that row alone.

use super::{Cpu, SharedOut};
use crate::backend::ops::Mixing;

impl Cpu {
    /// A token's mixes → weights, in place: `σ(scale · mix + base) + ε` of inputs, `magnitude ·
    /// σ(scale · mix + base)` of outputs, with + ε where streams are not mixed, and for each old
    /// stream weights in the new ones, [old, new].
    pub fn stream_weights(&self, mixing: &Mixing, mixes: &mut [f32]) {
        let Mixing { n, eps, .. } = *mixing;
        for (i, (mix, base)) in mixes.iter_mut().zip(mixing.bases).enumerate() {
            *mix = *mix * mixing.scales[(i / n).min(2)] + base;
        }
        let (gates, among) = mixes.split_at_mut((2 * n).min(mixing.width()));
        self.kernels.sigmoid(gates);
        let (inputs, outputs) = gates.split_at_mut(n);
        inputs.iter_mut().for_each(|w| *w += eps);
        let plus = if among.is_empty() { eps } else { 0.0 };
        outputs.iter_mut().for_each(|w| *w = *w * mixing.magnitude + plus);
        if !among.is_empty() {
            self.balance(mixing, among);
        }
    }

    /// Softmax of each row, then columns and rows divided by their sums in turn.
    fn balance(&self, mixing: &Mixing, among: &mut [f32]) {
        let Mixing { n, eps, .. } = *mixing;
        for row in among.chunks_exact_mut(n) {
            self.kernels.softmax(row);
            row.iter_mut().for_each(|w| *w += eps);
        }
        for round in 0..mixing.rounds.max(1) {
            if round > 0 {
                for row in among.chunks_exact_mut(n) {
                    let sum = row.iter().sum::<f32>() + eps;
                    row.iter_mut().for_each(|w| *w /= sum);
                }
            }
            for column in 0..n {
                let sum = among.iter().skip(column).step_by(n).sum::<f32>() + eps;
                among.iter_mut().skip(column).step_by(n).for_each(|w| *w /= sum);
            }
        }
    }

    /// `out` [tokens, n_embd]: Σ weight · stream, in order. Each token has `n` weights, the first
    /// of its `width`.
    pub fn join_streams(
        &self,
        streams: &[f32],
        weights: &[f32],
        [n, width]: [usize; 2],
        out: &mut [f32],
    ) {
        let tokens = weights.len() / width;
        let n_embd = out.len() / tokens.max(1);
        assert!(streams.len() == n * out.len() && out.len() == tokens * n_embd);
        let shared = SharedOut::new(out);
        self.chunks(tokens, self.token_chunk(tokens, n * n_embd), &|_, range| {
            for t in range {
                // SAFETY: each token is in one chunk.
                let out = unsafe { shared.slice(t * n_embd, n_embd) };
                out.fill(0.0);
                let streams = streams[t * n * n_embd..].chunks_exact(n_embd);
                for (weight, stream) in weights[t * width..][..n].iter().zip(streams) {
                    self.kernels.axpy(out, *weight, stream);
                }
            }
        });
    }

    /// `stream_i = output_i · y + Σ_j among[j, i] · stream_j`, or `output_i · y + stream_i` if
    /// streams are not mixed, by the weights that [`Cpu::stream_weights`] makes, [tokens, width].
    pub fn feed_streams(&self, mixing: &Mixing, weights: &[f32], y: &[f32], streams: &mut [f32]) {
        let (n, width) = (mixing.n, mixing.width());
        let tokens = weights.len() / width;
        let n_embd = y.len() / tokens.max(1);
        assert!(streams.len() == n * y.len() && y.len() == tokens * n_embd);
        let shared = SharedOut::new(streams);
        self.chunks(tokens, self.token_chunk(tokens, n * n_embd), &|scratch, range| {
            let (_, old) = scratch.split(n * n_embd);
            for t in range {
                // SAFETY: each token is in one chunk.
                let own = unsafe { shared.slice(t * n * n_embd, n * n_embd) };
                let (gates, among) = weights[t * width..][..width].split_at(2 * n);
                let y = &y[t * n_embd..][..n_embd];
                if !among.is_empty() {
                    old.copy_from_slice(own);
                    own.fill(0.0);
                }
                for (i, stream) in own.chunks_exact_mut(n_embd).enumerate() {
                    self.kernels.axpy(stream, gates[n + i], y);
                    let from = among.iter().skip(i).step_by(n).zip(old.chunks_exact(n_embd));
                    from.for_each(|(weight, old)| self.kernels.axpy(stream, *weight, old));
                }
            }
        });
    }

    /// `stream_i += weight_i · y`: `weights` [tokens, n], `y` [tokens, n_embd].
    pub fn add_to_streams(&self, weights: &[f32], y: &[f32], streams: &mut [f32]) {
        let n = streams.len() / y.len().max(1);
        let tokens = weights.len() / n.max(1);
        let n_embd = y.len() / tokens.max(1);
        assert!(streams.len() == weights.len() * n_embd && y.len() == tokens * n_embd);
        let shared = SharedOut::new(streams);
        self.chunks(tokens, self.token_chunk(tokens, n * n_embd), &|_, range| {
            for t in range {
                // SAFETY: each token is in one chunk.
                let own = unsafe { shared.slice(t * n * n_embd, n * n_embd) };
                let y = &y[t * n_embd..][..n_embd];
                for (stream, weight) in own.chunks_exact_mut(n_embd).zip(&weights[t * n..]) {
                    self.kernels.axpy(stream, *weight, y);
                }
            }
        });
    }

    /// `key` [tokens, n, n_embd] becomes `value` [tokens, n_embd] times a gate a stream:
    /// σ(sign(s) · √max(|s|, 10⁻⁶)), s the scaled product of key and `query`; σ(0) where s is 0,
    /// unless 0 `has_sign`, which is plus.
    pub fn gate_ngrams(
        &self,
        tokens: usize,
        key: &mut [f32],
        query: &[f32],
        value: &[f32],
        has_sign: bool,
    ) {
        const LEAST: f32 = 1e-6;
        let (n_embd, n) = (value.len() / tokens.max(1), key.len() / value.len().max(1));
        assert!(key.len() == query.len() && key.len() == tokens * n * n_embd);
        let scale = 1.0 / (n_embd as f32).sqrt();
        let values = value.chunks_exact(n_embd).flat_map(|row| std::iter::repeat_n(row, n));
        let pairs = key.chunks_exact_mut(n_embd).zip(query.chunks_exact(n_embd));
        for ((key, query), value) in pairs.zip(values) {
            let mut gate = [match self.kernels.dot_f32(key, query) * scale {
                0.0 if has_sign => LEAST.sqrt(),
                0.0 => 0.0,
                s => s.abs().max(LEAST).sqrt().copysign(s),
            }];
            self.kernels.sigmoid(&mut gate);
            key.iter_mut().zip(value).for_each(|(key, x)| *key = x * gate[0]);
        }
    }

    /// `out` [tokens, n_embd]: Σ p · source over `kept` streams and the present one, in this order,
    /// p the softmax of `weight · source / rms(source)`. Kept ones are [kept, tokens, n_embd].
    pub fn recall_streams(
        &self,
        kept: &[f32],
        present: &[f32],
        weight: &[f32],
        eps: f32,
        out: &mut [f32],
    ) {
        let (n_embd, all) = (weight.len(), present.len());
        assert!(all == out.len() && kept.len().is_multiple_of(all) && all.is_multiple_of(n_embd));
        let (tokens, n) = (all / n_embd, kept.len() / all + 1);
        let shared = SharedOut::new(out);
        self.chunks(tokens, self.token_chunk(tokens, n * n_embd), &|scratch, range| {
            let (_, p) = scratch.split(n);
            for t in range {
                let own = |i: usize| {
                    let source = if i + 1 < n { &kept[i * all..][..all] } else { present };
                    &source[t * n_embd..][..n_embd]
                };
                for (i, p) in p.iter_mut().enumerate() {
                    let mean = self.kernels.dot_f32(own(i), own(i)) / n_embd as f32;
                    *p = self.kernels.dot_f32(own(i), weight) * (1.0 / (mean + eps).sqrt());
                }
                self.kernels.softmax(p);
                // SAFETY: each token is in one chunk.
                let out = unsafe { shared.slice(t * n_embd, n_embd) };
                out.fill(0.0);
                p.iter().enumerate().for_each(|(i, p)| self.kernels.axpy(out, *p, own(i)));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const N: usize = 4;
    const WIDTH: usize = 48;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32).map(|i| ((i * 37 + seed * 101) % 113) as f32 / 56.0 - 1.0).collect()
    }

    fn near(got: &[f32], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        let off = got.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs());
        assert!(off.fold(0.0, f64::max) < 1e-5, "{got:?} is not {expected:?}");
    }

    #[test]
    fn balanced_weights_are_nearly_doubly_stochastic() {
        let (scales, bases) = ([0.5, 0.7, 2.0], values(2 * N + N * N, 3));
        let mixing =
            Mixing { n: N, scales: &scales, bases: &bases, eps: 1e-6, magnitude: 2.0, rounds: 20 };
        let mut mixes = values(mixing.width(), 9);
        Cpu::new(1).stream_weights(&mixing, &mut mixes);
        let among = &mixes[2 * N..];
        for i in 0..N {
            let row: f32 = among[i * N..][..N].iter().sum();
            let column: f32 = among.iter().skip(i).step_by(N).sum();
            assert!((row - 1.0).abs() < 1e-3 && (column - 1.0).abs() < 1e-3, "{row} {column}");
        }
        assert!(mixes[..N].iter().all(|w| *w > 0.0 && *w < 1.001));
        assert!(mixes[N..2 * N].iter().all(|w| *w > 0.0 && *w < 2.0));
    }

    #[test]
    fn streams_are_joined_and_fed_as_defined() {
        for n_scales in [2, 3] {
            let scales = &[0.5, 0.7, 2.0][..n_scales];
            let bases = values(2 * N + (n_scales - 2) * N * N, 3);
            let mixing =
                Mixing { n: N, scales, bases: &bases, eps: 1e-6, magnitude: 1.5, rounds: 2 };
            let (tokens, width) = (3, mixing.width());
            let mut weights = values(tokens * width, 5);
            let one = Cpu::new(1);
            weights.chunks_exact_mut(width).for_each(|mixes| one.stream_weights(&mixing, mixes));
            let (old, y) = (values(tokens * N * WIDTH, 7), values(tokens * WIDTH, 8));
            for threads in [1, 3] {
                let (cpu, mut streams) = (Cpu::new(threads), old.clone());
                let mut joined = vec![9.0; y.len()];
                cpu.join_streams(&old, &weights, [N, width], &mut joined);
                cpu.feed_streams(&mixing, &weights, &y, &mut streams);
                for t in 0..tokens {
                    let w: Vec<f64> =
                        weights[t * width..][..width].iter().map(|w| f64::from(*w)).collect();
                    let of = |s: usize, i: usize| f64::from(old[(t * N + s) * WIDTH + i]);
                    let joins = |i| (0..N).map(|s| w[s] * of(s, i)).sum::<f64>();
                    let expected: Vec<f64> = (0..WIDTH).map(joins).collect();
                    near(&joined[t * WIDTH..][..WIDTH], &expected);
                    for s in 0..N {
                        let from = |i| match n_scales {
                            2 => of(s, i),
                            _ => (0..N).map(|j| w[2 * N + j * N + s] * of(j, i)).sum::<f64>(),
                        };
                        let value = |i: usize| w[N + s] * f64::from(y[t * WIDTH + i]) + from(i);
                        let expected: Vec<f64> = (0..WIDTH).map(value).collect();
                        near(&streams[(t * N + s) * WIDTH..][..WIDTH], &expected);
                    }
                }
            }
        }
    }

    #[test]
    fn each_stream_gets_its_part_of_a_result() {
        let tokens = 3;
        let (weights, y) = (values(tokens * N, 5), values(tokens * WIDTH, 8));
        let old = values(tokens * N * WIDTH, 7);
        for threads in [1, 3] {
            let mut streams = old.clone();
            Cpu::new(threads).add_to_streams(&weights, &y, &mut streams);
            for (i, row) in streams.chunks_exact(WIDTH).enumerate() {
                let added = |at: usize| f64::from(weights[i]) * f64::from(y[i / N * WIDTH + at]);
                let expected: Vec<f64> =
                    (0..WIDTH).map(|at| f64::from(old[i * WIDTH + at]) + added(at)).collect();
                near(row, &expected);
            }
        }
    }

    #[test]
    fn kept_streams_are_weighed_by_their_scores() {
        let (tokens, n, eps) = (3, 3, 1e-5);
        let (kept, present) = (values((n - 1) * tokens * WIDTH, 2), values(tokens * WIDTH, 4));
        let weight = values(WIDTH, 6);
        let mut out = [vec![0.0; present.len()], vec![0.0; present.len()]];
        for (out, threads) in out.iter_mut().zip([1, 3]) {
            Cpu::new(threads).recall_streams(&kept, &present, &weight, eps as f32, out);
        }
        assert_eq!(out[0], out[1]);
        for t in 0..tokens {
            let source = |i: usize| -> Vec<f64> {
                let all = if i + 1 < n { &kept[i * present.len()..] } else { &present[..] };
                all[t * WIDTH..][..WIDTH].iter().map(|x| f64::from(*x)).collect()
            };
            let score = |x: &[f64]| {
                let mean = x.iter().map(|x| x * x).sum::<f64>() / WIDTH as f64;
                let dot: f64 = x.iter().zip(&weight).map(|(x, w)| x * f64::from(*w)).sum();
                (dot / (mean + eps).sqrt()).exp()
            };
            let scores: Vec<f64> = (0..n).map(|i| score(&source(i))).collect();
            let sum: f64 = scores.iter().sum();
            let value = |at: usize| (0..n).map(|i| scores[i] / sum * source(i)[at]).sum();
            let expected: Vec<f64> = (0..WIDTH).map(value).collect();
            near(&out[0][t * WIDTH..][..WIDTH], &expected);
        }
    }
}
