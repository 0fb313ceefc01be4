//! Matrix times activations, rows spread over the threads.

use super::grid::TokenParts;
use super::{Cpu, SERIAL_WORK, SharedOut, ThreadScratch};
use crate::backend::ops::{Adapted, HeadMats};
use crate::simd::{ActView, Kernels, MatRef, Scratch};
use std::ops::Range;

/// One product of a region: `out[t·stride + r] = scale · (mat[r] · acts[t] + bias[r])`, each
/// product and sum rounded.
pub struct Product<'a> {
    pub mat: MatRef<'a>,
    pub acts: ActView<'a>,
    pub bias: Option<&'a [f32]>,
    pub scale: f32,
    /// [tokens, mat.rows]
    pub out: &'a mut [f32],
    /// Adapters of a matrix of which this one is some rows, with the first of these, and their
    /// input; added last.
    pub adapted: Option<(Adapted<'a>, ActView<'a>, usize)>,
}

impl Cpu {
    /// Several products in one region of the pool.
    pub fn products<const N: usize>(&self, products: [Product; N]) {
        let n_rows: usize = products.iter().map(|p| p.mat.rows).sum();
        let work = products.iter().map(|p| p.out.len() * p.mat.cols).sum();
        let tokens = TokenParts::new(products.first().map_or(0, |p| p.acts.tokens()));
        let adapted = products.each_ref().map(|p| p.adapted);
        let products = products.map(|p| {
            assert_eq!(p.out.len(), p.mat.rows * p.acts.tokens());
            assert_eq!(p.acts.tokens(), tokens.all());
            (p.mat, p.acts, (p.bias, p.scale), SharedOut::new(p.out))
        });
        let total = n_rows * tokens.count();
        self.chunks(total, self.row_chunk(total, work), &|scratch, range| {
            for (rows, tokens) in tokens.pieces(n_rows, range) {
                // The rows in each product that they touch.
                let mut first = 0;
                for product in &products {
                    let n = product.0.rows;
                    let in_product = |r: usize| r.clamp(first, first + n) - first;
                    let rows = in_product(rows.start)..in_product(rows.end);
                    first += n;
                    if !rows.is_empty() {
                        let scratch = &mut scratch.kernels;
                        piece_of(self.kernels, product, rows, tokens.clone(), scratch);
                    }
                }
            }
        });
        for (product, adapted) in products.iter().zip(&adapted) {
            if let Some((adapted, x, first)) = adapted {
                self.add_low_rank(adapted, *x, *first, product.0.rows, &product.3);
            }
        }
    }

    /// One product without bias.
    pub fn product(&self, mat: MatRef, acts: ActView, out: &mut [f32]) {
        self.products([Product { mat, acts, bias: None, scale: 1.0, out, adapted: None }]);
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

/// Some rows times some tokens, which are this thread's alone.
fn piece_of(
    kernels: &Kernels,
    (mat, acts, (bias, scale), out): &(MatRef, ActView, (Option<&[f32]>, f32), SharedOut),
    rows: Range<usize>,
    tokens: Range<usize>,
    scratch: &mut Scratch,
) {
    let n = mat.rows;
    let mut places = out.rows(tokens.start * n, n);
    let is_plain = bias.is_none() && *scale == 1.0;
    places.past_caches &= is_plain;
    let acts = acts.token_range(tokens.clone());
    // SAFETY: these rows of these tokens are this thread's alone, `out` has a place for each
    // row of each token.
    unsafe { kernels.matmul(*mat, rows.clone(), acts, places, scratch) };
    if is_plain {
        return;
    }
    for t in tokens {
        // SAFETY: as above.
        let out = unsafe { out.slice(t * n + rows.start, rows.len()) };
        if let Some(bias) = bias {
            kernels.add(out, &bias[rows.clone()]);
        }
        if *scale != 1.0 {
            out.iter_mut().for_each(|o| *o *= scale);
        }
    }
}
