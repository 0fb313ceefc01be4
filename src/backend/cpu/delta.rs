//! Gated delta rule (arXiv 2412.06464, equation 10): what mixes positions in linear-attention
//! layers. Each token changes a state of fixed size; tokens go
//! through it one by one, so a text's bits do not depend on how it is cut into micro-batches.

use super::{Cpu, SERIAL_WORK, SharedOut};
use crate::backend::ops::DeltaShape;
use crate::simd::Kernels;

/// Added to the sum of squares of a query or key before it is made a unit vector.
const UNIT_EPS: f32 = 1e-6;

impl Cpu {
    /// `x = ln(1 + e^x)`
    pub fn softplus(&self, x: &mut [f32]) {
        let n = x.len();
        let shared = SharedOut::new(x);
        self.chunks(n, self.token_chunk(n, 1), &|scratch, range| {
            // SAFETY: each element is in one chunk.
            let x = unsafe { shared.slice(range.start, range.len()) };
            let (_, small) = scratch.split(x.len());
            small.iter_mut().zip(&*x).for_each(|(small, x)| *small = -x.abs());
            self.kernels.exp(small);
            x.iter_mut().zip(&*small).for_each(|(x, small)| *x = x.max(0.0) + ln_1p(*small));
        });
    }

    /// `alpha` [tokens, n_v_heads] → log decays, a · softplus(alpha + dt) with `dt` and `a`
    /// `[n_v_heads]`.
    pub fn log_decays(&self, alpha: &mut [f32], dt: &[f32], a: &[f32]) {
        let n = a.len();
        assert!(alpha.len().is_multiple_of(n) && dt.len() == n);
        let tokens = alpha.len() / n;
        let shared = SharedOut::new(alpha);
        self.chunks(tokens, self.token_chunk(tokens, n), &|scratch, range| {
            let (_, small) = scratch.split(n);
            for t in range {
                // SAFETY: each token is in one chunk.
                let row = unsafe { shared.slice(t * n, n) };
                row.iter_mut().zip(dt).for_each(|(x, dt)| *x += dt);
                small.iter_mut().zip(&*row).for_each(|(small, x)| *small = -x.abs());
                self.kernels.exp(small);
                for ((x, small), a) in row.iter_mut().zip(&*small).zip(a) {
                    *x = a * (x.max(0.0) + ln_1p(*small));
                }
            }
        });
    }

    /// `x` [tokens, n_heads, k_dim] → logarithms of decays, a · softplus(x + dt), or bound ·
    /// sigmoid(a · (x + dt)) if there is a bound; `dt` [n_heads, k_dim] and `a` `[n_heads]`.
    pub fn element_decays(&self, x: &mut [f32], dt: &[f32], a: &[f32], bound: Option<f32>) {
        let k_dim = dt.len() / a.len();
        let factors = |x: &mut [f32]| {
            for row in x.chunks_exact_mut(dt.len()) {
                for (head, a) in row.chunks_exact_mut(k_dim).zip(a) {
                    head.iter_mut().for_each(|decay| *decay *= a);
                }
            }
        };
        match bound {
            None => {
                self.steps(x, dt);
                factors(x);
            }
            Some(bound) => {
                for row in x.chunks_exact_mut(dt.len()) {
                    row.iter_mut().zip(dt).for_each(|(x, dt)| *x += dt);
                }
                factors(x);
                self.kernels.sigmoid(x);
                x.iter_mut().for_each(|x| *x *= bound);
            }
        }
    }

    /// The recurrence: `qkv` [tokens, channels] → `out` [tokens, n_v_heads, v_dim]. `log_decay`
    /// [tokens, n_v_heads] or [tokens, n_v_heads, k_dim] is the logarithm of what the state or each
    /// of its rows is multiplied by, `beta` [tokens, n_v_heads] how much of a key's old value is
    /// replaced by the new.
    pub fn delta_rule(
        &self,
        shape: DeltaShape,
        qkv: &[f32],
        (log_decay, beta): (&[f32], &[f32]),
        state: &mut [f32],
        out: &mut [f32],
    ) {
        let (width, n_heads) = (shape.channels(), shape.n_v_heads);
        let tokens = qkv.len() / width;
        assert!(state.len() == shape.n_state() && out.len() == tokens * shape.value_width());
        let work = tokens * shape.n_state() * 4;
        let chunk = if work <= SERIAL_WORK { n_heads } else { 1 };
        let (state, out) = (SharedOut::new(state), SharedOut::new(out));
        let n_head_state = shape.k_dim * shape.v_dim;
        let n_decays = log_decay.len() / (tokens * n_heads).max(1);
        assert!(n_decays == 1 || n_decays == shape.k_dim || tokens == 0);
        self.chunks(n_heads, chunk, &|scratch, range| {
            for h in range {
                // SAFETY: each head is in one chunk, and its state and outputs are its own.
                let state = unsafe { state.slice(h * n_head_state, n_head_state) };
                let (_, room) = scratch.split(3 * shape.k_dim + 2 * shape.v_dim);
                let (decays, room) = room.split_at_mut(n_decays);
                for t in 0..tokens {
                    let qkv = Token { row: &qkv[t * width..][..width], shape };
                    decays.copy_from_slice(&log_decay[(t * n_heads + h) * n_decays..][..n_decays]);
                    self.kernels.exp(decays);
                    let gates = (&*decays, beta[t * n_heads + h]);
                    // SAFETY: as above.
                    let out = unsafe { out.slice((t * n_heads + h) * shape.v_dim, shape.v_dim) };
                    delta_step(self.kernels, qkv, h, gates, room, state, out);
                }
            }
        });
    }

    /// `x` [n, weight.len()] ← rms_norm(x) · weight ⊙ silu(gate)
    pub fn rms_norm_gated(&self, x: &mut [f32], weight: &[f32], eps: f32, gate: &[f32]) {
        assert_eq!(x.len(), gate.len());
        self.rms_norm_heads(x, weight, eps);
        let dim = weight.len();
        let rows = x.len() / dim;
        let shared = SharedOut::new(x);
        self.chunks(rows, self.token_chunk(rows, dim), &|scratch, range| {
            let (_, normed) = scratch.split(dim);
            for r in range {
                // SAFETY: each row is in one chunk.
                let x = unsafe { shared.slice(r * dim, dim) };
                normed.copy_from_slice(x);
                self.kernels.swiglu(&gate[r * dim..][..dim], normed, x);
            }
        });
    }
}

/// ln(1 + x) for 0 ≤ x ≤ 1: 2·artanh(x/(2 + x)), whose series is cut where a term is less than
/// 2·10⁻⁹ of the sum. Products and sums of f32, so that a GPU repeats them to the bit.
pub(super) fn ln_1p(x: f32) -> f32 {
    const TERMS: [f32; 7] =
        [1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0];
    let s = x / (2.0 + x);
    let square = s * s;
    let series = TERMS.iter().fold(0.0, |sum, term| (sum + term) * square);
    let twice = s + s;
    twice + twice * series
}

/// One token's convolved channels.
#[derive(Clone, Copy)]
struct Token<'a> {
    row: &'a [f32],
    shape: DeltaShape,
}

impl<'a> Token<'a> {
    fn query(&self, head: usize) -> &'a [f32] {
        &self.row[head * self.shape.k_dim..][..self.shape.k_dim]
    }

    fn key(&self, head: usize) -> &'a [f32] {
        &self.row[self.shape.key_width() + head * self.shape.k_dim..][..self.shape.k_dim]
    }

    fn value(&self, head: usize) -> &'a [f32] {
        &self.row[2 * self.shape.key_width() + head * self.shape.v_dim..][..self.shape.v_dim]
    }
}

/// S ← decay·S; S ← S + k ⊗ beta·(v − Sᵀk); out = Sᵀq
fn delta_step(
    kernels: &Kernels,
    token: Token,
    head: usize,
    (decays, beta): (&[f32], f32),
    room: &mut [f32],
    state: &mut [f32],
    out: &mut [f32],
) {
    let Token { shape, .. } = token;
    let (q, room) = room.split_at_mut(shape.k_dim);
    let (k, room) = room.split_at_mut(shape.k_dim);
    let (memory, _) = room.split_at_mut(shape.v_dim);
    let key_head = shape.key_head(head);
    unit(token.query(key_head), 1.0 / (shape.k_dim as f32).sqrt(), q);
    unit(token.key(key_head), 1.0, k);
    memory.fill(0.0);
    for ((row, k), decay) in state.chunks_exact_mut(shape.v_dim).zip(&*k).zip(each(decays)) {
        row.iter_mut().for_each(|s| *s *= decay);
        kernels.axpy(memory, *k, row);
    }
    for (m, v) in memory.iter_mut().zip(token.value(head)) {
        *m = (v - *m) * beta;
    }
    out.fill(0.0);
    for (row, (k, q)) in state.chunks_exact_mut(shape.v_dim).zip(k.iter().zip(&*q)) {
        kernels.axpy(row, *k, memory);
        kernels.axpy(out, *q, row);
    }
}

/// A decay for each row of a state, of which there is one or as many as rows.
fn each(decays: &[f32]) -> impl Iterator<Item = f32> {
    let last = *decays.last().expect("a decay");
    decays.iter().copied().chain(std::iter::repeat(last))
}

/// `x` as a unit vector, times `scale`.
fn unit(x: &[f32], scale: f32, out: &mut [f32]) {
    let norm = (x.iter().map(|v| v * v).sum::<f32>() + UNIT_EPS).sqrt();
    out.iter_mut().zip(x).for_each(|(o, x)| *o = x / norm * scale);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ops::{HeadOrder, ShortConv};

    const SHAPE: DeltaShape = DeltaShape {
        n_k_heads: 2,
        n_v_heads: 4,
        k_dim: 3,
        v_dim: 5,
        kernel: 4,
        order: HeadOrder::Grouped,
    };

    fn wave(n: usize, step: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * step).sin()).collect()
    }

    /// Both steps over `x`, cut after the tokens that `cuts` says.
    fn mixed(cpu: &Cpu, cuts: &[usize]) -> Vec<f32> {
        let (width, n) = (SHAPE.channels(), 9);
        let (x, weight) = (wave(n * width, 0.7), wave(width * 4, 0.3));
        let (decay, beta) = (wave(n * 4, 1.1), wave(n * 4, 0.9));
        let (mut past, mut state) = (vec![0.0; SHAPE.n_past()], vec![0.0; SHAPE.n_state()]);
        let mut all = Vec::new();
        let ends = cuts.iter().copied().chain([n]);
        let mut start = 0;
        for end in ends {
            let x = &x[start * width..end * width];
            let (mut conv, mut out) = (vec![0.0; x.len()], vec![0.0; (end - start) * 20]);
            let own = ShortConv { shape: SHAPE.conv(), weight: &weight, bias: None, silu: true };
            cpu.short_conv(&own, &mut past, x, &mut conv);
            let gates = (&decay[start * 4..end * 4], &beta[start * 4..end * 4]);
            cpu.delta_rule(SHAPE, &conv, gates, &mut state, &mut out);
            all.extend(out);
            start = end;
        }
        all
    }

    #[test]
    fn cuts_and_threads_change_no_bit() {
        let whole = mixed(&Cpu::new(1), &[]);
        assert!(whole.iter().all(|v| v.is_finite()) && whole.iter().any(|v| v.abs() > 0.01));
        for cuts in [&[1][..], &[2, 3], &[1, 2, 3, 4, 5, 6, 7, 8]] {
            assert_eq!(mixed(&Cpu::new(3), cuts), whole, "{cuts:?}");
        }
    }

    /// With beta = 1 and no decay the state answers a key with the last value stored under it.
    #[test]
    fn a_key_recalls_its_value() {
        let cpu = Cpu::new(1);
        let shape = DeltaShape { n_k_heads: 1, n_v_heads: 1, ..SHAPE };
        let token = |q: [f32; 3], k: [f32; 3], v: f32| [&q[..], &k[..], &[v; 5][..]].concat();
        let (a, b) = ([2.0, 0.0, 0.0], [0.0, 3.0, 0.0]);
        let qkv = [token(b, a, 7.0), token(a, b, 9.0), token(a, a, 4.0)].concat();
        let mut out = vec![0.0; 15];
        let gates = (&[0.0; 3][..], &[1.0; 3][..]);
        cpu.delta_rule(shape, &qkv, gates, &mut [0.0; 15], &mut out);
        let scale = 1.0 / 3f32.sqrt();
        for (got, wanted) in out.chunks_exact(5).zip([0.0, 7.0, 4.0]) {
            assert!((got[0] - wanted * scale).abs() < 1e-4, "{got:?} {wanted}");
        }
    }

    #[test]
    fn softplus_is_exact_to_a_few_last_bits() {
        let cpu = Cpu::new(1);
        for i in -4000..4000 {
            let x = i as f32 * 0.01;
            let mut got = [x - 0.5];
            cpu.log_decays(&mut got, &[0.5], &[-2.0]);
            let exact = -2.0 * f64::from(x - 0.5 + 0.5).exp().ln_1p();
            let error = (f64::from(got[0]) - exact).abs() / exact.abs();
            assert!(error < 4e-7, "{x}: {} for {exact}", got[0]);
        }
    }

    #[test]
    fn value_heads_find_their_key_head() {
        let tiled = DeltaShape { order: HeadOrder::Tiled, ..SHAPE };
        let of = |shape: DeltaShape| [0, 1, 2, 3].map(|h| shape.key_head(h));
        assert_eq!((of(SHAPE), of(tiled)), ([0, 0, 1, 1], [0, 1, 0, 1]));
    }
}
