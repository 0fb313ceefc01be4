//! The cut of an expert into granules: a run of intermediate rows of gate and up with the matching
//! columns of down. It depends on the file's shapes and types alone, never on a budget or a
//! machine, because the partial results of granules are summed in index order and so the cut is
//! part of the computation.

use std::ops::Range;

/// Granules are as large as one block of intermediate rows allows and no larger than this, unless
/// one block is: large enough for a link to run at full rate, small enough for a demand load not
/// to wait long behind a prefetch.
pub const GRANULE_BYTES_TARGET: u64 = 1 << 20;

/// The cut of one layer's experts, all of which have the same shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Intermediate rows of an expert.
    pub n_ff: usize,
    /// Intermediate rows of a granule; the last may have fewer.
    pub granule_rows: usize,
}

impl Geometry {
    /// `row_bytes`: bytes of one intermediate row, that is a row of gate, a row of up and a column
    /// of down together. `block`: elements a block of the down tensor's type.
    ///
    /// If the rest of the file needs 32-wide blocks but rows are many, granules still start at
    /// multiples of the block.
    pub fn new(n_ff: usize, block: usize, row_bytes: u64) -> Geometry {
        assert!(n_ff > 0 && block > 0 && row_bytes > 0);
        let block = block.max(32);
        let most = (GRANULE_BYTES_TARGET / row_bytes.saturating_mul(block as u64)).max(1);
        let blocks = blocks_a_granule(n_ff.div_ceil(block), most as usize);
        Geometry { n_ff, granule_rows: (block * blocks).min(n_ff) }
    }

    pub fn n_granules(&self) -> usize {
        self.n_ff.div_ceil(self.granule_rows)
    }

    /// The intermediate rows of granule `index`.
    pub fn rows(&self, index: usize) -> Range<usize> {
        assert!(index < self.n_granules());
        let start = index * self.granule_rows;
        start..(start + self.granule_rows).min(self.n_ff)
    }
}

/// A granule's share of `n` blocks: from half of `most` to `most`, such that the last granule is as
/// full as can be, because slots have the size of the first; the larger of two that are as good.
fn blocks_a_granule(n: usize, most: usize) -> usize {
    let most = most.min(n);
    let slots_of = |blocks: &usize| n.div_ceil(*blocks) * blocks;
    (most.div_ceil(2)..=most).rev().min_by_key(slots_of).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn granules_cover_the_expert_in_order() {
        for n_ff in [32, 96, 128, 768, 1408, 11008, 14336] {
            for block in [1, 32, 256] {
                if n_ff % block != 0 {
                    continue;
                }
                for row_bytes in [100, 3456, 6912, 90_000] {
                    let g = Geometry::new(n_ff, block, row_bytes);
                    let mut next = 0;
                    for i in 0..g.n_granules() {
                        let rows = g.rows(i);
                        assert_eq!(rows.start, next);
                        assert!(rows.start.is_multiple_of(block) && !rows.is_empty());
                        next = rows.end;
                    }
                    assert_eq!(next, n_ff);
                }
            }
        }
    }

    #[test]
    fn published_shapes() {
        // Qwen3-30B-A3B in Q4_K: 3 × 1152 bytes a row, so 256 rows a granule, 3 granules.
        assert_eq!(Geometry::new(768, 256, 3456).n_granules(), 3);
        // Mixtral-8x7B in Q4_K: a block of rows is 1.7 MiB, so 56 granules of one block.
        assert_eq!(Geometry::new(14336, 256, 6912).n_granules(), 56);
        // Qwen1.5-MoE: 1408 is 5.5 × 256, so down has 32-wide blocks, 44 of them; 7 would fit the
        // target, but 11 granules of 4 leave no slot half empty.
        let g = Geometry::new(1408, 32, 1152 * 2 + 2176);
        assert_eq!((g.granule_rows, g.n_granules()), (128, 11));
        // The demo model, in any type: one granule.
        assert_eq!(Geometry::new(192, 32, 3 * 192 * 4).n_granules(), 1);
    }

    #[test]
    fn the_last_granule_is_as_full_as_can_be() {
        assert_eq!(blocks_a_granule(44, 7), 4);
        // All divide: the largest.
        assert_eq!(blocks_a_granule(12, 6), 6);
        // A prime number of blocks: 23 in 2 × 12 leaves the least.
        assert_eq!(blocks_a_granule(23, 12), 12);
        assert_eq!(blocks_a_granule(3, 100), 3);
        assert_eq!(blocks_a_granule(5, 1), 1);
        for n in 1..60 {
            for most in 1..20 {
                let chosen = blocks_a_granule(n, most);
                assert!(chosen <= most && (2 * chosen >= most || chosen == n));
            }
        }
    }
}
