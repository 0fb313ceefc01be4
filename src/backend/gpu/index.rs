//! An indexer's scores of positions or of blocks of them, the choice of the best, and the rows that
//! are chosen (`kernels/index.cu`). Twins: `cpu::attention::index`.

use super::cache::DeviceRows;
use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;

/// The sizes of `kernels/index.cu`.
const THREADS: u32 = 256;
const TILE: usize = 64;
const HEADS: usize = 8;
const SLICE: usize = 192;
const CHOOSERS: usize = 1024;
const WARP: usize = 32;
/// Tokens of a prompt that a block takes with the same keys.
const TOKENS: usize = 8;
/// Scores that a thread of a choice goes over, if there are few.
const SCORES_A_THREAD: usize = 4;
/// Blocks of a launch in its second and third dimension, at most.
const GRID_MAX: usize = 65_535;

kernel_params! {
    pub struct IndexScoresParams[80] {
        q: DevicePtr,
        weights: DevicePtr,
        keys: DevicePtr,
        past: DevicePtr,
        scores: DevicePtr,
        first_token: u32,
        tokens: u32,
        n_heads: u32,
        dim: u32,
        type_code: u32,
        row: u32,
        block: u32,
        n_scores: u32,
        each: u32,
        unused: u32,
    }
}

kernel_params! {
    pub struct ChooseParams[64] {
        scores: DevicePtr,
        past: DevicePtr,
        chosen: DevicePtr,
        last: DevicePtr,
        first_token: u32,
        n_scores: u32,
        width: u32,
        block: u32,
        top_k: u32,
        n_near: u32,
        whole: u32,
        unused: u32,
    }
}

kernel_params! {
    pub struct GatherRowsParams[56] {
        rows: DevicePtr,
        chosen: DevicePtr,
        last: DevicePtr,
        to: DevicePtr,
        row: u32,
        n_ctx: u32,
        width: u32,
        lists: u32,
        unit: u32,
        unused: u32,
    }
}

kernels! {
    pub struct Index {
        scores: IndexScoresParams = "index_scores",
        block_scores: IndexScoresParams = "block_scores",
        choose: ChooseParams = "index_choose",
        gather: GatherRowsParams = "gather_rows",
    }
}

/// The number of lists of positions that a token has, and the scores that they are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// One list, by the sum over heads of weight · max(query · key, 0). A block has one key.
    Sums,
    /// A list a head, by the largest query · key of a block's positions.
    Largest,
}

/// An indexer over a text.
#[derive(Clone, Copy, Debug)]
pub struct DeviceIndex<'a> {
    pub scores: Scores,
    pub n_heads: usize,
    /// Keys of positions, or of blocks: one head's rows.
    pub keys: DeviceRows<'a>,
    /// Positions of a block.
    pub block: usize,
    /// Blocks that are chosen, the last `n_near` whatever their scores.
    pub top_k: usize,
    pub n_near: usize,
    /// u32: the position of the first query. It is read when the kernels run.
    pub past: DeviceSlice<'a>,
    /// No query of this launch, or of the graph that it becomes, sees positions from here on.
    pub max_seen: usize,
}

impl DeviceIndex<'_> {
    /// Scores of a list, at most.
    fn n_scores(&self) -> usize {
        self.max_seen.div_ceil(self.block)
    }

    pub fn n_lists(&self) -> usize {
        match self.scores {
            Scores::Sums => 1,
            Scores::Largest => self.n_heads,
        }
    }

    /// The longest list of positions: those of a block that is not whole are seen, too.
    pub fn width(&self) -> usize {
        list_width(self.scores, self.top_k, self.block)
    }

    /// The bytes of scores that a token needs.
    pub fn token_bytes(&self) -> usize {
        4 * self.n_lists() * self.n_scores()
    }
}

/// The length of the longest list of the positions of `top_k` blocks.
pub fn list_width(scores: Scores, top_k: usize, block: usize) -> usize {
    top_k * block + if scores == Scores::Sums { block - 1 } else { 0 }
}

/// Queries of tokens that follow one another.
#[derive(Clone, Copy)]
pub struct IndexQueries<'a> {
    /// The first of them, counted from the text's first query, and their number.
    pub first: usize,
    pub tokens: usize,
    /// f32 [tokens, n_heads, dim]
    pub q: DeviceSlice<'a>,
    /// f32 [tokens, n_heads]; 1 each if there are none.
    pub weights: Option<DeviceSlice<'a>>,
}

/// Lists of positions in ascending order.
#[derive(Clone, Copy)]
pub struct DeviceLists<'a> {
    /// Lists of a token: one for all heads of rows, or one for each.
    pub lists: usize,
    /// The length of the longest.
    pub width: usize,
    /// u32 [tokens, lists, width]
    pub chosen: DeviceSlice<'a>,
    /// u32 [tokens, lists]: the place of the last of a list.
    pub last: DeviceSlice<'a>,
}

impl<'a> DeviceLists<'a> {
    /// The lists of some tokens.
    pub fn of_tokens(&self, first: usize, n: usize) -> DeviceLists<'a> {
        let part = |all: DeviceSlice<'a>, each: usize| {
            let each = 4 * self.lists * each;
            all.slice(first * each..(first + n) * each)
        };
        DeviceLists { chosen: part(self.chosen, self.width), last: part(self.last, 1), ..*self }
    }
}

/// The shared memory of `Tiles` in `kernels/index.cu`.
fn shared_bytes(dim: usize) -> usize {
    4 * (TILE + HEADS) * 8 * 4 * (dim.min(SLICE).div_ceil(32) | 1)
}

impl Index {
    /// The scores of what each token sees: f32 [tokens, lists, max_seen / block, rounded up].
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn scores(
        &self,
        stream: &Stream,
        index: &DeviceIndex,
        queries: IndexQueries,
        scores: DeviceSlice,
    ) -> Result<()> {
        let IndexQueries { first, tokens, q, weights } = queries;
        let DeviceIndex { n_heads, keys, block, past, .. } = *index;
        keys.assert_whole();
        assert_eq!(keys.heads, 1, "{keys:?}");
        assert!(past.holds::<u32>(1) && q.holds::<f32>(tokens * n_heads * keys.dim));
        assert!(weights.is_none_or(|weights| weights.holds::<f32>(tokens * n_heads)));
        assert!(scores.len() >= tokens * index.token_bytes() && scores.holds::<f32>(0));
        assert!(tokens <= GRID_MAX, "{tokens} tokens at once");
        let is_sum = index.scores == Scores::Sums;
        let n_keys = if is_sum { index.max_seen / block } else { index.max_seen };
        assert!(n_keys <= keys.n_ctx, "{n_keys} keys of {}", keys.n_ctx);
        if tokens == 0 || n_keys == 0 {
            return Ok(());
        }
        let each = if is_sum { tokens.min(TOKENS) } else { 1 };
        let params = IndexScoresParams {
            q: q.into(),
            weights: weights.into(),
            keys: keys.data.into(),
            past: past.into(),
            scores: scores.into(),
            first_token: u32_of(first),
            tokens: u32_of(tokens),
            n_heads: u32_of(n_heads),
            dim: u32_of(keys.dim),
            type_code: keys.type_code(),
            row: u32_of(keys.row_bytes()),
            block: u32_of(block),
            n_scores: u32_of(index.n_scores()),
            each: u32_of(each),
            unused: 0,
        };
        let (kernel, blocks) = match index.scores {
            Scores::Sums => (self.scores, n_keys.div_ceil(TILE)),
            Scores::Largest => (self.block_scores, index.n_scores()),
        };
        let blocks = [blocks, tokens.div_ceil(each), 1].map(u32_of);
        let grid = Grid::new(blocks, THREADS).with_shared(shared_bytes(keys.dim));
        // SAFETY: it reads keys of positions below max_seen and writes scores of these: asserted.
        unsafe { stream.launch(kernel, grid, &params) }
    }

    /// Chooses positions of each token; all that it sees if these are no more than may be chosen.
    /// `work` has room for the scores of one token or more, see [`DeviceIndex::token_bytes`].
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn choose(
        &self,
        stream: &Stream,
        index: &DeviceIndex,
        queries: IndexQueries,
        work: DeviceSlice,
        lists: DeviceLists,
    ) -> Result<()> {
        let IndexQueries { tokens, q, weights, .. } = queries;
        assert_eq!((lists.lists, lists.width), (index.n_lists(), index.width()));
        assert!(index.top_k > 0, "some are chosen");
        let at_once = (work.len() / index.token_bytes()).min(GRID_MAX);
        assert!(at_once > 0, "{} bytes of scores in {}", index.token_bytes(), work.len());
        for first in (0..tokens).step_by(at_once) {
            let n = at_once.min(tokens - first);
            let of = |all: DeviceSlice<'_>, each: usize| 4 * first * each..all.len();
            let queries = IndexQueries {
                first: queries.first + first,
                tokens: n,
                q: q.slice(of(q, index.n_heads * index.keys.dim)),
                weights: weights.map(|w| w.slice(of(w, index.n_heads))),
            };
            self.scores(stream, index, queries, work)?;
            self.choose_by(stream, index, queries, work, lists.of_tokens(first, n))?;
        }
        Ok(())
    }

    /// Chooses by scores that are there.
    fn choose_by(
        &self,
        stream: &Stream,
        index: &DeviceIndex,
        queries: IndexQueries,
        scores: DeviceSlice,
        lists: DeviceLists,
    ) -> Result<()> {
        let (n_lists, n_scores) = (index.n_lists(), index.n_scores());
        let params = ChooseParams {
            scores: scores.into(),
            past: index.past.into(),
            chosen: lists.chosen.into(),
            last: lists.last.into(),
            first_token: u32_of(queries.first),
            n_scores: u32_of(n_scores),
            width: u32_of(lists.width),
            block: u32_of(index.block),
            top_k: u32_of(index.top_k),
            n_near: u32_of(index.n_near),
            whole: (index.scores == Scores::Sums).into(),
            unused: 0,
        };
        let threads = n_scores.div_ceil(SCORES_A_THREAD).next_multiple_of(WARP).min(CHOOSERS);
        let grid = Grid::new([queries.tokens, n_lists, 1].map(u32_of), u32_of(threads));
        // SAFETY: there are scores of what each token sees, and lists are as long as they may be.
        unsafe { stream.launch(self.choose, grid, &params) }
    }

    /// Copies the rows of each token's lists to `to`: as many bytes for each token and head of
    /// `rows` as [`lists.width`](DeviceLists::width) rows have.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, the lists have positions below `rows.n_ctx`.
    pub unsafe fn gather<'a>(
        &self,
        stream: &Stream,
        rows: DeviceRows,
        lists: DeviceLists,
        tokens: usize,
        to: DeviceSlice<'a>,
    ) -> Result<DeviceRows<'a>> {
        rows.assert_whole();
        let DeviceLists { lists: n_lists, width, chosen, last } = lists;
        assert!(n_lists == 1 || n_lists == rows.heads, "{n_lists} lists of {} heads", rows.heads);
        assert!(last.holds::<u32>(tokens * n_lists) && tokens <= GRID_MAX);
        assert!(chosen.holds::<u32>(tokens * n_lists * width));
        let gathered = DeviceRows { data: to, heads: tokens * rows.heads, n_ctx: width, ..rows };
        gathered.assert_whole();
        let row = rows.row_bytes();
        let fits = |unit: &u64| {
            let addresses = [rows.data.address(), to.address(), row as u64];
            addresses.iter().all(|address| address.is_multiple_of(*unit))
        };
        let params = GatherRowsParams {
            rows: rows.data.into(),
            chosen: chosen.into(),
            last: last.into(),
            to: to.into(),
            row: u32_of(row),
            n_ctx: u32_of(rows.n_ctx),
            width: u32_of(width),
            lists: u32_of(n_lists),
            unit: [16, 4].into_iter().find(fits).unwrap_or(2) as u32,
            unused: 0,
        };
        let blocks = [width.div_ceil(THREADS as usize / WARP), rows.heads, tokens];
        let grid = Grid::new(blocks.map(u32_of), THREADS);
        // SAFETY: sizes are asserted; positions are the caller's promise.
        unsafe { stream.launch(self.gather, grid, &params)? };
        Ok(gathered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_every_device() {
        // Beside them lie the largest products of eight heads, of eight warps.
        assert!(shared_bytes(usize::MAX) + 256 <= 64 << 10);
    }
}
