//! Compressed rows of a text and what tokens see of them (`kernels/compress.cu`). Twins:
//! `cpu::compress` and `forward::compressed`, to the bit.

use super::cache::DeviceRows;
use super::index::{DeviceLists, Scores, list_width};
use super::rope::DeviceCosSin;
use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::backend::ops::RopePairing;

const THREADS: u32 = 256;
const GATHER_THREADS: u32 = 128;

kernel_params! {
    pub struct CompressParams[112] {
        values: DevicePtr,
        scores: DevicePtr,
        kept: DevicePtr,
        places: DevicePtr,
        weight: DevicePtr,
        cos_sin: DevicePtr,
        past: DevicePtr,
        block: DevicePtr,
        out: DevicePtr,
        first: u32,
        skipped: u32,
        tokens: u32,
        dim: u32,
        ratio: u32,
        overlaps: u32,
        pairs: u32,
        adjacent: u32,
        eps: f32,
        unused: u32,
    }
}

kernel_params! {
    pub struct GatherParams[80] {
        own: DevicePtr,
        blocks: DevicePtr,
        chosen: DevicePtr,
        past: DevicePtr,
        to: DevicePtr,
        last: DevicePtr,
        first: u32,
        n_ctx: u32,
        window: u32,
        ratio: u32,
        pages: u32,
        n_chosen: u32,
        n_rows: u32,
        row_words: u32,
    }
}

kernels! {
    pub struct Compress {
        keep: CompressParams = "keep_rows",
        compress: CompressParams = "compress_rows",
        gather: GatherParams = "gather_seen",
    }
}

/// Makes one row of several positions'; see `model::weights::Compressor`.
#[derive(Clone, Copy)]
pub struct DeviceCompressor<'a> {
    pub dim: usize,
    pub ratio: usize,
    pub overlaps: bool,
    /// f32 [ratio, width]
    pub places: DeviceSlice<'a>,
    /// f32 `[dim]`: of the norm
    pub norm: DeviceSlice<'a>,
    pub eps: f32,
}

impl DeviceCompressor<'_> {
    /// Elements of a position's row.
    pub fn width(&self) -> usize {
        self.dim * (1 + usize::from(self.overlaps))
    }

    /// Positions whose rows are kept.
    pub fn n_kept(&self) -> usize {
        self.ratio * (1 + usize::from(self.overlaps))
    }
}

/// Neighbouring rows of a text.
#[derive(Clone, Copy)]
pub struct TextRows<'a> {
    /// f32 [tokens, width] each
    pub values: DeviceSlice<'a>,
    pub scores: DeviceSlice<'a>,
    /// f32 [2, n_kept, width]: rows before these, and their scores
    pub kept: DeviceSlice<'a>,
    /// u32 `[1]`; the first row's position is `first` behind it
    pub past: DeviceSlice<'a>,
    pub first: usize,
}

/// Blocks of which compressed rows are made.
#[derive(Clone, Copy)]
pub struct Blocks<'a> {
    pub n: usize,
    /// u32 `[1]`; the first block is `skipped` behind it
    pub block: DeviceSlice<'a>,
    pub skipped: usize,
    /// The turns of positions at which blocks begin, from `block` on.
    pub cos_sin: DeviceCosSin<'a>,
    pub pairing: RopePairing,
    /// f32 [n, dim]. The row of a block that is not whole is left as it is.
    pub out: DeviceSlice<'a>,
}

/// The rows that tokens see: the last of their text, then those of blocks.
#[derive(Clone, Copy)]
pub struct Seen<'a> {
    pub own: DeviceRows<'a>,
    pub blocks: DeviceRows<'a>,
    /// Rows of `blocks` of which each block's is the last.
    pub pages: usize,
    pub ratio: usize,
    pub window: usize,
    /// The positions of so many blocks, of tokens that would see more of them.
    pub chosen: Option<(DeviceLists<'a>, usize)>,
    /// u32 `[1]`; the first token's position is `first` behind it
    pub past: DeviceSlice<'a>,
    pub first: usize,
    /// Rows of each token; n_ctx is the number of them.
    pub to: DeviceRows<'a>,
    /// u32 `[tokens]`: the number of each token's last row
    pub last: DeviceSlice<'a>,
}

impl Compress {
    fn params(c: &DeviceCompressor, text: &TextRows) -> CompressParams {
        let (width, n_kept) = (c.width(), c.n_kept());
        let tokens = text.values.count::<f32>() / width;
        assert!(c.dim > 0 && c.ratio > 0, "rows of {} elements, {} a block", c.dim, c.ratio);
        assert_eq!([text.values, text.scores].map(|x| x.count::<f32>()), [tokens * width; 2]);
        assert_eq!(text.kept.count::<f32>(), 2 * n_kept * width);
        assert_eq!(c.places.count::<f32>(), c.ratio * width);
        assert_eq!(c.norm.count::<f32>(), c.dim);
        assert!(text.past.holds::<u32>(1));
        CompressParams {
            values: text.values.into(),
            scores: text.scores.into(),
            kept: text.kept.into(),
            places: c.places.into(),
            weight: c.norm.into(),
            cos_sin: None.into(),
            past: text.past.into(),
            block: None.into(),
            out: None.into(),
            first: u32_of(text.first),
            skipped: 0,
            tokens: u32_of(tokens),
            dim: u32_of(c.dim),
            ratio: u32_of(c.ratio),
            overlaps: c.overlaps.into(),
            pairs: 0,
            adjacent: 0,
            eps: c.eps,
            unused: 0,
        }
    }

    /// The compressed rows of blocks that end among these rows, normalised and rotated.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn compress(
        &self,
        stream: &Stream,
        c: &DeviceCompressor,
        text: &TextRows,
        blocks: &Blocks,
    ) -> Result<()> {
        let pairs = blocks.cos_sin.n_pairs;
        assert!(2 * pairs <= c.dim, "{pairs} pairs of {} elements", c.dim);
        assert!(blocks.cos_sin.data.holds::<f32>(2 * pairs * (blocks.skipped + blocks.n)));
        assert!(blocks.cos_sin.data.address().is_multiple_of(8), "a pair is one load");
        assert!(blocks.block.holds::<u32>(1) && blocks.out.holds::<f32>(blocks.n * c.dim));
        let params = CompressParams {
            cos_sin: blocks.cos_sin.data.into(),
            block: blocks.block.into(),
            out: blocks.out.into(),
            skipped: u32_of(blocks.skipped),
            pairs: u32_of(pairs),
            adjacent: u32::from(blocks.pairing == RopePairing::Adjacent),
            ..Compress::params(c, text)
        };
        if blocks.n == 0 {
            return Ok(());
        }
        let grid = Grid::new([u32_of(blocks.n), 1, 1], THREADS).with_shared(4 * c.dim);
        // SAFETY: sizes are asserted. Positions before the rows are kept ones, whatever `past` and
        // `block` are, and positions behind them end the block's thread.
        unsafe { stream.launch(self.compress, grid, &params) }
    }

    /// Keeps the last of these rows, and their scores with those of their places.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn keep(&self, stream: &Stream, c: &DeviceCompressor, text: &TextRows) -> Result<()> {
        let params = Compress::params(c, text);
        if params.tokens == 0 {
            return Ok(());
        }
        let rows = params.tokens.min(u32_of(c.n_kept()));
        let blocks = [u32_of(c.width()).div_ceil(THREADS), rows, 1];
        // SAFETY: sizes are asserted, and a row has a place whatever its position is.
        unsafe { stream.launch(self.keep, Grid::new(blocks, THREADS), &params) }
    }

    /// Puts the rows that each token sees side by side.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, `seen.chosen` are whole blocks of which the token sees all positions.
    pub unsafe fn gather(&self, stream: &Stream, seen: &Seen) -> Result<()> {
        let Seen { own, blocks, pages, ratio, window, to, .. } = *seen;
        [own, blocks, to].iter().for_each(DeviceRows::assert_whole);
        let (bytes, tokens) = (own.row_bytes(), seen.last.count::<u32>());
        assert!([blocks, to].iter().all(|rows| rows.row_bytes() == bytes && rows.ty == own.ty));
        assert!(bytes.is_multiple_of(4), "rows of {bytes} bytes are copied in words");
        let are_aligned = [own, blocks, to].iter().all(|rows| rows.data.address() % 4 == 0);
        assert!(are_aligned && ratio > 0 && pages > 0 && window > 0);
        assert!(own.n_ctx / ratio * pages <= blocks.n_ctx, "{} rows of blocks", blocks.n_ctx);
        assert!(tokens * to.n_ctx * bytes <= to.data.len(), "{tokens} tokens' rows");
        let n_chosen = seen.chosen.map_or(0, |(_, n)| n);
        let chosen = seen.chosen.map(|(lists, n)| {
            let width = list_width(Scores::Sums, n, ratio);
            assert_eq!((lists.lists, lists.width), (1, width), "lists of {n} blocks");
            assert!(lists.chosen.holds::<u32>(tokens * width));
            lists.chosen
        });
        assert!(seen.past.holds::<u32>(1));
        if tokens == 0 {
            return Ok(());
        }
        let params = GatherParams {
            own: own.data.into(),
            blocks: blocks.data.into(),
            chosen: chosen.into(),
            past: seen.past.into(),
            to: to.data.into(),
            last: seen.last.into(),
            first: u32_of(seen.first),
            n_ctx: u32_of(own.n_ctx),
            window: u32_of(window.min(own.n_ctx)),
            ratio: u32_of(ratio),
            pages: u32_of(pages),
            n_chosen: u32_of(n_chosen),
            n_rows: u32_of(to.n_ctx),
            row_words: u32_of(bytes / 4),
        };
        let rows = u32_of(to.n_ctx).div_ceil(GATHER_THREADS / 32);
        let grid = Grid::new([rows, u32_of(tokens), 1], GATHER_THREADS);
        // SAFETY: sizes are asserted, and no row from `n_rows` on is written; the blocks are the
        // caller's promise.
        unsafe { stream.launch(self.gather, grid, &params) }
    }
}
