//! Matrix times activations, rows spread over the threads.

use super::{Cpu, SharedOut};
use crate::simd::{ActView, MatRef};

/// One product of a region: `out[t·stride + r] = mat[r] · acts[t] + bias[r]`.
pub struct Product<'a> {
    pub mat: MatRef<'a>,
    pub acts: ActView<'a>,
    pub bias: Option<&'a [f32]>,
    /// [tokens, mat.rows]
    pub out: &'a mut [f32],
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
                    let (out, kernels) = (out.at(0), &mut scratch.kernels);
                    self.kernels.matmul(*mat, start..end, *acts, out, n, kernels);
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
}
