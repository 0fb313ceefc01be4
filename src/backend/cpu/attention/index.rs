//! An indexer's choice among positions (DeepSeek-V3.2): scores, the best of them, and the rows of
//! these as a cache of their own.

use crate::backend::cpu::{Cpu, SharedOut};
use crate::backend::ops::{RowBytes, Rows, row_bytes};

/// Positions of a piece.
const PIECE: usize = 64;

impl Cpu {
    /// Scores of the first `out.len()` positions for one token: Σ over heads, in their order, of
    /// weight · max(query · key, 0). `q` [heads, dim], `weights` [heads].
    pub fn index_scores(&self, q: &[f32], weights: &[f32], keys: Rows, out: &mut [f32]) {
        let (n, dim) = (out.len(), keys.dim);
        assert!(q.len() == weights.len() * dim && n <= keys.n_ctx);
        let shared = SharedOut::new(out);
        let chunk = self.row_chunk(n.div_ceil(PIECE), n * q.len());
        self.chunks(n.div_ceil(PIECE), chunk, &|scratch, pieces| {
            for piece in pieces {
                let positions = piece * PIECE..n.min((piece + 1) * PIECE);
                let (_, buffer) = scratch.split(keys.tile_floats(PIECE));
                let tile = keys.tile(self.kernels, 0, positions.clone(), buffer);
                // SAFETY: each position is in one piece.
                let out = unsafe { shared.slice(positions.start, positions.len()) };
                for (i, score) in out.iter_mut().enumerate() {
                    let key = &tile.row(i)[..dim];
                    *score = 0.0;
                    for (q, weight) in q.chunks_exact(dim).zip(weights) {
                        let product = self.kernels.dot_f32(q, key);
                        *score += weight * if product > 0.0 { product } else { 0.0 };
                    }
                }
            }
        });
    }

    /// Rows of one head at `positions`, as a cache of as many positions in `to`.
    pub fn gather_rows<'a>(&self, rows: Rows, positions: &[u32], to: &'a mut RowBytes) -> Rows<'a> {
        let (n, bytes) = (positions.len(), row_bytes(rows.ty, rows.dim));
        let stride = row_bytes(rows.ty, rows.stride);
        if to.len() < n * bytes {
            *to = RowBytes::zeroed(n * bytes);
        }
        let shared = SharedOut::new(&mut to[..n * bytes]);
        self.chunks(n, self.token_chunk(n, rows.dim), &|_, range| {
            for i in range {
                // SAFETY: each row is in one chunk.
                let out = unsafe { shared.slice(i * bytes, bytes) };
                out.copy_from_slice(&rows.data[positions[i] as usize * stride..][..bytes]);
            }
        });
        Rows { data: &to[..n * bytes], stride: rows.dim, n_ctx: n, ..rows }
    }
}

/// The indices of the `k` largest scores in ascending order; of equal ones the first. `room` is
/// overwritten.
pub fn best(scores: &[f32], room: &mut Vec<u32>, best: &mut [u32]) {
    let k = best.len();
    assert!(0 < k && k < scores.len());
    room.clear();
    room.extend(0..scores.len() as u32);
    room.select_nth_unstable_by(k - 1, |a, b| {
        scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b))
    });
    best.copy_from_slice(&room[..k]);
    best.sort_unstable();
}

#[cfg(test)]
mod tests {
    use super::best;

    #[test]
    fn the_best_are_the_largest_and_of_equal_ones_the_first() {
        let chosen = |scores: &[f32], k: usize| {
            let mut out = vec![0; k];
            best(scores, &mut Vec::new(), &mut out);
            out
        };
        assert_eq!(chosen(&[1.0, 5.0, -1.0, 3.0], 2), [1, 3]);
        assert_eq!(chosen(&[0.0, 0.0, 0.0, 2.0, 0.0], 3), [0, 1, 3]);
        assert_eq!(chosen(&[0.0, f32::NAN, 1.0], 1), [1]);
    }
}
