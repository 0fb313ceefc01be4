//! An indexer's choice among positions (DeepSeek-V3.2): scores, the best of them, and the rows of
//! these as a cache of their own.

use crate::backend::cpu::{Cpu, SharedOut};
use crate::backend::ops::{RowBytes, Rows, row_bytes};

/// Positions of a piece.
const PIECE: usize = 64;

impl Cpu {
    /// Scores of the first `out.len()` positions for one token: Σ over heads, in their order, of
    /// weight · max(query · key, 0). `q` [heads, dim], `weights` `[heads]`.
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

    /// Scores of blocks of the first `n_seen` positions for one query of one head: the largest
    /// query · key of each. `out` `[blocks]`.
    pub fn block_scores(
        &self,
        q: &[f32],
        keys: Rows,
        n_seen: usize,
        block: usize,
        out: &mut [f32],
    ) {
        assert!(out.len() == n_seen.div_ceil(block) && n_seen <= keys.n_ctx);
        let shared = SharedOut::new(out);
        let n = n_seen.div_ceil(block);
        self.chunks(n, self.row_chunk(n, n_seen * q.len()), &|scratch, blocks| {
            for b in blocks {
                let positions = b * block..n_seen.min((b + 1) * block);
                let (_, buffer) = scratch.split(keys.tile_floats(block));
                let tile = keys.tile(self.kernels, 0, positions.clone(), buffer);
                let product = |i: usize| self.kernels.dot_f32(q, &tile.row(i)[..q.len()]);
                let best = (0..positions.len()).map(product).fold(f32::NEG_INFINITY, f32::max);
                // SAFETY: each block is in one chunk.
                unsafe { shared.slice(b, 1) }.fill(best);
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
    use crate::backend::cpu::Cpu;
    use crate::backend::ops::{RowBytes, Rows};
    use crate::gguf::TensorType;

    #[test]
    fn a_block_is_as_good_as_its_best_position() {
        let (n, dim, block) = (37, 8, 5);
        let values: Vec<f32> = (0..n * dim).map(|i| (i * 29 % 31) as f32 - 15.0).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut data = RowBytes::zeroed(bytes.len());
        data.copy_from_slice(&bytes);
        let keys = Rows { ty: TensorType::F32, data: &data, dim, stride: dim, n_ctx: n };
        let q: Vec<f32> = (0..dim).map(|i| i as f32 - 3.0).collect();
        for (threads, n_seen) in [(1, 37), (3, 37), (2, 33)] {
            let mut scores = vec![0.0; usize::div_ceil(n_seen, block)];
            Cpu::new(threads).block_scores(&q, keys, n_seen, block, &mut scores);
            for (b, score) in scores.iter().enumerate() {
                let rows = values.chunks_exact(dim).take(n_seen).skip(b * block).take(block);
                let dots = rows.map(|row| row.iter().zip(&q).map(|(a, b)| a * b).sum::<f32>());
                assert_eq!(*score, dots.fold(f32::NEG_INFINITY, f32::max));
            }
        }
    }

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
