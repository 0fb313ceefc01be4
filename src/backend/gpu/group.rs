//! Grouping of pairs by expert on the device (`kernels/group.cu`). Twins: `Demand::group` and
//! `tiles` of `backend::ops`.

use super::matmul::{TILE_TOKENS, TILE_WORDS, max_tiles};
use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;

const THREADS: u32 = 512;
const MAX_EXPERTS: usize = 1024;
/// Places among an expert's pairs are 16 bits wide.
const MAX_PAIRS: usize = 1 << 16;

kernel_params! {
    pub struct GroupPairsParams[88] {
        chosen: DevicePtr,
        table: DevicePtr,
        matrices: DevicePtr,
        starts: DevicePtr,
        tokens: DevicePtr,
        places: DevicePtr,
        wide_tiles: DevicePtr,
        narrow_tiles: DevicePtr,
        n_wide: u32,
        n_narrow: u32,
        n_pairs: u32,
        n_experts: u32,
        n_granules: u32,
        pairs_a_row: u32,
    }
}

kernels! {
    pub struct Grouper {
        group: GroupPairsParams = "group_pairs",
    }
}

/// The device memory that a grouping reads and writes.
#[derive(Clone, Copy)]
pub struct Grouping<'a> {
    /// u32 [tokens, k], below `n_experts` or `NO_EXPERT`
    pub chosen: DeviceSlice<'a>,
    pub n_experts: usize,
    /// Pairs of a token that read one row of input: k, or 1 where each has a row of its own.
    pub pairs_a_row: usize,
    /// u64 [n_experts, granules]: a slot table, and a copy of it
    pub table: DeviceSlice<'a>,
    pub matrices: DeviceSlice<'a>,
    /// u32 [n_experts + 1]: the pairs of each expert, ordered by expert
    pub starts: DeviceSlice<'a>,
    /// u32 `[pairs]`: the row of input of each pair
    pub tokens: DeviceSlice<'a>,
    /// u32 [tokens, k]: the pair of a token and rank, or `NO_EXPERT`
    pub places: DeviceSlice<'a>,
    /// u32 [`max_tiles`, `TILE_WORDS`], by `tile_kind`; those behind the last have no pairs
    pub tiles: [DeviceSlice<'a>; 2],
}

impl Grouper {
    /// Whether so many pairs can be grouped.
    pub fn takes(n_pairs: usize, n_experts: usize) -> bool {
        n_pairs < MAX_PAIRS && n_experts <= MAX_EXPERTS
    }

    /// # Panics
    /// If sizes do not fit each other, or are too large.
    ///
    /// # Safety
    /// When the launch runs, the ids in `chosen` are below `n_experts` or `NO_EXPERT`.
    pub unsafe fn launch(&self, stream: &Stream, grouping: &Grouping) -> Result<()> {
        let Grouping { chosen, n_experts, pairs_a_row, table, matrices, .. } = *grouping;
        let (n_pairs, n_addresses) = (chosen.count::<u32>(), table.count::<u64>());
        assert!(Grouper::takes(n_pairs, n_experts), "{n_pairs} pairs of {n_experts} experts");
        assert!(n_experts > 0 && n_addresses.is_multiple_of(n_experts) && pairs_a_row > 0);
        assert_eq!(matrices.count::<u64>(), n_addresses);
        assert_eq!(grouping.starts.count::<u32>(), n_experts + 1);
        assert_eq!([grouping.tokens, grouping.places].map(DeviceSlice::count::<u32>), [n_pairs; 2]);
        for (tiles, tokens) in grouping.tiles.iter().zip(TILE_TOKENS) {
            let n_words = TILE_WORDS * max_tiles(n_pairs, n_experts, tokens);
            assert_eq!(tiles.count::<u32>(), n_words);
            assert!(tiles.address().is_multiple_of(16), "tiles of 16 bytes");
        }
        let [wide_tiles, narrow_tiles] = grouping.tiles;
        let params = GroupPairsParams {
            chosen: chosen.into(),
            table: table.into(),
            matrices: matrices.into(),
            starts: grouping.starts.into(),
            tokens: grouping.tokens.into(),
            places: grouping.places.into(),
            wide_tiles: wide_tiles.into(),
            narrow_tiles: narrow_tiles.into(),
            n_wide: u32_of(wide_tiles.count::<u32>() / TILE_WORDS),
            n_narrow: u32_of(narrow_tiles.count::<u32>() / TILE_WORDS),
            n_pairs: u32_of(n_pairs),
            n_experts: u32_of(n_experts),
            n_granules: u32_of(n_addresses / n_experts),
            pairs_a_row: u32_of(pairs_a_row),
        };
        // SAFETY: sizes are asserted; the ids are the caller's promise.
        unsafe { stream.launch(self.group, Grid::new([1; 3], THREADS), &params) }
    }
}
