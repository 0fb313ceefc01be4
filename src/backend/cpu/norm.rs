//! Normalisation and sums of rows.

use super::{Cpu, SharedOut};

/// Lanes of a sum in f64, and those that one tree adds up: a block's threads and a warp's of
/// `kernels/norm.cu`.
const LANES: usize = 256;
const TREE: usize = 32;

/// Σ of(x) in f64. Lane i adds up the elements i, i + 256, …; each 32 lanes are added up by a tree,
/// lanes sixteen apart first, then eight and so on, and the trees' sums in order.
fn sum(x: &[f32], of: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0; LANES];
    for x in x.chunks(LANES) {
        lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane += of(f64::from(*x)));
    }
    let tree = |lanes: &mut [f64]| {
        for step in [16, 8, 4, 2, 1] {
            let (low, high) = lanes.split_at_mut(step);
            low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
        }
        lanes[0]
    };
    lanes.chunks_exact_mut(TREE).fold(0.0, |sum, lanes| sum + tree(lanes))
}

impl Cpu {
    /// RMSNorm of each row of `x` [n, weight.len()] into `out`.
    pub fn rms_norm_rows(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let dim = weight.len();
        assert!(x.len() == out.len() && x.len().is_multiple_of(dim));
        let shared = SharedOut::new(out);
        let rows = x.len() / dim;
        self.chunks(rows, self.token_chunk(rows, dim), &|_, range| {
            for r in range {
                // SAFETY: each row is in one chunk.
                let out = unsafe { shared.slice(r * dim, dim) };
                self.kernels.rms_norm(&x[r * dim..][..dim], weight, eps, out);
            }
        });
    }

    /// `x · weight` divided by the root of its mean square, for each row of `x`
    /// [n, weight.len()], in place.
    pub fn scaled_rms_norm_rows(&self, x: &mut [f32], weight: &[f32], eps: f32) {
        let dim = weight.len();
        let rows = x.len() / dim;
        let shared = SharedOut::new(x);
        self.chunks(rows, self.token_chunk(rows, dim), &|_, range| {
            for r in range {
                // SAFETY: each row is in one chunk.
                let row = unsafe { shared.slice(r * dim, dim) };
                row.iter_mut().zip(weight).for_each(|(x, w)| *x *= w);
                let mean = sum(row, |v| v * v) / dim as f64;
                let scale = 1.0 / (mean + f64::from(eps)).sqrt();
                row.iter_mut().for_each(|x| *x = (f64::from(*x) * scale) as f32);
            }
        });
    }

    /// LayerNorm of each row of `x` [n, weight.len()] into `out`: (x − mean) / √(variance + ε) ·
    /// weight + bias, mean and variance by `sum`.
    pub fn layer_norm_rows(
        &self,
        x: &[f32],
        (weight, bias): (&[f32], &[f32]),
        eps: f32,
        out: &mut [f32],
    ) {
        let dim = weight.len();
        assert!(x.len() == out.len() && x.len().is_multiple_of(dim) && bias.len() == dim);
        let shared = SharedOut::new(out);
        let rows = x.len() / dim;
        self.chunks(rows, self.token_chunk(rows, dim), &|_, range| {
            for r in range {
                let x = &x[r * dim..][..dim];
                let mean = sum(x, |v| v) / dim as f64;
                let variance = sum(x, |v| (v - mean) * (v - mean)) / dim as f64;
                let scale = 1.0 / (variance + f64::from(eps)).sqrt();
                // SAFETY: each row is in one chunk.
                let out = unsafe { shared.slice(r * dim, dim) };
                for (i, o) in out.iter_mut().enumerate() {
                    *o = ((f64::from(x[i]) - mean) * scale) as f32 * weight[i] + bias[i];
                }
            }
        });
    }

    /// RMSNorm of each head of each token in place; `x` is [tokens, heads, weight.len()].
    pub fn rms_norm_heads(&self, x: &mut [f32], weight: &[f32], eps: f32) {
        let dim = weight.len();
        let rows = x.len() / dim;
        let shared = SharedOut::new(x);
        self.chunks(rows, self.token_chunk(rows, dim), &|scratch, range| {
            let (_, copy) = scratch.split(dim);
            for r in range {
                // SAFETY: each head is in one chunk.
                let head = unsafe { shared.slice(r * dim, dim) };
                copy.copy_from_slice(head);
                self.kernels.rms_norm(copy, weight, eps, head);
            }
        });
    }

    /// `acc += scale · x`
    pub fn add_scaled(&self, acc: &mut [f32], scale: f32, x: &[f32]) {
        if scale == 1.0 {
            return self.add(acc, x);
        }
        assert_eq!(acc.len(), x.len());
        let shared = SharedOut::new(acc);
        self.chunks(x.len(), self.token_chunk(x.len(), 1), &|_, range| {
            // SAFETY: chunks do not overlap.
            let acc = unsafe { shared.slice(range.start, range.len()) };
            self.kernels.axpy(acc, scale, &x[range]);
        });
    }

    /// `acc += x`
    pub fn add(&self, acc: &mut [f32], x: &[f32]) {
        assert_eq!(acc.len(), x.len());
        let shared = SharedOut::new(acc);
        self.chunks(x.len(), self.token_chunk(x.len(), 1), &|_, range| {
            // SAFETY: chunks do not overlap.
            let acc = unsafe { shared.slice(range.start, range.len()) };
            self.kernels.add(acc, &x[range]);
        });
    }
}
