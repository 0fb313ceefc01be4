//! Matrix times activations, rows spread over the threads.

use super::{Cpu, SERIAL_WORK, SharedOut, ThreadScratch};
use crate::simd::{ActView, MatRef};

/// One product of a region: `out[t·stride + r] = mat[r] · acts[t] + bias[r]`.
pub struct Product<'a> {
    pub mat: MatRef<'a>,
    pub acts: ActView<'a>,
    pub bias: Option<&'a [f32]>,
    /// [tokens, mat.rows]
    pub out: &'a mut [f32],
}

/// A matrix a head, all in one: head h has `rows` rows from `first + h · step` on.
#[derive(Clone, Copy)]
pub struct HeadMats<'a> {
    pub all: MatRef<'a>,
    pub n_heads: usize,
    pub rows: usize,
    pub first: usize,
    pub step: usize,
}

impl<'a> HeadMats<'a> {
    fn head(&self, h: usize) -> MatRef<'a> {
        let start = self.first + h * self.step;
        self.all.row_range(start..start + self.rows)
    }
}

impl Cpu {
    /// Several products in one region of the pool.
    pub fn products<const N: usize>(&self, products: [Product; N]) {
        let n_rows: usize = products.iter().map(|p| p.mat.rows).sum();
        let work = products.iter().map(|p| p.out.len() * p.mat.cols).sum();
        let parts = products.map(|p| {
            assert_eq!(p.out.len(), p.mat.rows * p.acts.tokens());
            (p.mat, p.acts, p.bias, SharedOut::new(p.out))
        });
        self.chunks(n_rows, self.row_chunk(n_rows, work), &|scratch, range| {
            // The chunk in each product that it touches.
            let mut first = 0;
            for (mat, acts, bias, out) in &parts {
                let n = mat.rows;
                let start = range.start.clamp(first, first + n) - first;
                let end = range.end.clamp(first, first + n) - first;
                first += n;
                if start == end {
                    continue;
                }
                // SAFETY: these rows are this chunk's alone, `out` has a place for each row of
                // each token (asserted above).
                unsafe {
                    let (out, kernels) = (out.rows(0, n), &mut scratch.kernels);
                    self.kernels.matmul(*mat, start..end, *acts, out, kernels);
                }
                let Some(bias) = bias else { continue };
                for t in 0..acts.tokens() {
                    // SAFETY: as above.
                    let out = unsafe { out.slice(t * n + start, end - start) };
                    self.kernels.add(out, &bias[start..end]);
                }
            }
        });
    }

    /// One product without bias.
    pub fn product(&self, mat: MatRef, acts: ActView, out: &mut [f32]) {
        self.products([Product { mat, acts, bias: None, out }]);
    }

    /// A product for each head: `out[t, h, r] = mats[h][r] · acts[t, h]`, `acts` and `out` with
    /// the heads of a token one after the other.
    pub fn head_products(&self, mats: HeadMats, acts: ActView, out: &mut [f32]) {
        let (n_heads, n_rows) = (mats.n_heads, mats.rows);
        let n_tokens = acts.tokens() / n_heads;
        assert_eq!(acts.tokens(), n_tokens * n_heads);
        assert_eq!(out.len(), n_tokens * n_heads * n_rows);
        let work = out.len() * mats.all.cols;
        let chunk = if work <= SERIAL_WORK { n_heads } else { 1 };
        let out = SharedOut::new(out);
        self.chunks(n_heads, chunk, &|scratch, range| {
            let ThreadScratch { kernels, ids, .. } = scratch;
            for h in range {
                ids.clear();
                ids.extend((0..n_tokens).map(|t| (t * n_heads + h) as u32));
                let out = out.rows(h * n_rows, n_heads * n_rows);
                let acts = acts.select(ids);
                // SAFETY: head h of each token is this piece's alone, and `out` has a place for
                // each row of each (asserted above).
                unsafe { self.kernels.matmul(mats.head(h), 0..n_rows, acts, out, kernels) };
            }
        });
    }
}
