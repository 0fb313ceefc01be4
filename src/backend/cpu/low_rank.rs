//! Adapters beside matrices: scale·B·(A·x), added to a row's product. A row is one thread's, and
//! ranks come in their order, so its bits depend on nothing but the row.

use super::{Cpu, SharedOut};
use crate::backend::ops::Adapted;
use crate::simd::{ActView, Kernels};
use std::ops::Range;

/// out = factor · A·x of each pair, 0 where the factor is.
pub(super) fn project(
    kernels: &Kernels,
    adapted: &Adapted<'_>,
    row: usize,
    matrix: usize,
    x: &[f32],
    out: &mut [f32],
) {
    let mut out = out.iter_mut();
    for pair in adapted.pairs {
        let factor = adapted.factor(row, pair);
        for (k, out) in (0..pair.rank).zip(&mut out) {
            *out = match factor {
                0.0 => 0.0,
                factor => factor * kernels.dot_f32(pair.a(matrix, k), x),
            };
        }
    }
}

/// out += B·ranks, of these rows of B.
pub(super) fn expand(
    kernels: &Kernels,
    adapted: &Adapted<'_>,
    matrix: usize,
    ranks: &[f32],
    rows: Range<usize>,
    out: &mut [f32],
) {
    let mut ranks = ranks.iter();
    for pair in adapted.pairs {
        for (k, rank) in (0..pair.rank).zip(&mut ranks) {
            if *rank != 0.0 {
                kernels.axpy(out, *rank, &pair.b(matrix, k)[rows.clone()]);
            }
        }
    }
}

impl Cpu {
    /// out[t] += scale·B·(A·x[t]) for the rows of B from `first` on; `out` is [tokens, n_rows].
    pub(super) fn add_low_rank(
        &self,
        adapted: &Adapted<'_>,
        x: ActView<'_>,
        first: usize,
        n_rows: usize,
        out: &SharedOut<'_>,
    ) {
        let (n, n_ranks) = (x.tokens(), adapted.n_ranks());
        let chunk = self.token_chunk(n, n_ranks * (x.cols() + n_rows));
        self.chunks(n, chunk, &|scratch, range| {
            for t in range {
                let (_, ranks) = scratch.split(n_ranks);
                project(self.kernels, adapted, t, 0, x.f32s(t), ranks);
                // SAFETY: a token is in one chunk, and the product was computed before.
                let out = unsafe { out.slice(t * n_rows, n_rows) };
                expand(self.kernels, adapted, 0, ranks, first..first + n_rows, out);
            }
        });
    }
}
