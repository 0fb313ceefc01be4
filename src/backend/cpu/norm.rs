//! Normalisation and sums of rows.

use super::{Cpu, SharedOut};

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

    /// LayerNorm of each row of `x` [n, weight.len()] into `out`: (x − mean) / √(variance + ε) ·
    /// weight + bias, mean and variance summed in f64 in the order of the elements.
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
                let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / dim as f64;
                let square = |v: &f32| (f64::from(*v) - mean).powi(2);
                let variance = x.iter().map(square).sum::<f64>() / dim as f64;
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
