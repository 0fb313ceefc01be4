//! An indexer's keys of blocks of positions (`kernels/block_keys.cu`). Twins: `cpu::compress` and
//! the sums of `forward::mean_index`.

use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;

const THREADS: u32 = 128;

kernel_params! {
    pub struct BlockKeysParams[64] {
        x: DevicePtr,
        scores: DevicePtr,
        places: DevicePtr,
        state: DevicePtr,
        past: DevicePtr,
        out: DevicePtr,
        first_token: u32,
        tokens: u32,
        dim: u32,
        block: u32,
    }
}

kernels! {
    pub struct BlockKeys {
        pool: BlockKeysParams = "pool_keys",
        mean: BlockKeysParams = "mean_keys",
    }
}

/// Scores of positions in each element, which weigh their keys.
#[derive(Clone, Copy)]
pub struct KeyScores<'a> {
    /// f32 [tokens, dim]
    pub of_rows: DeviceSlice<'a>,
    /// f32 [block, dim]: added to them, by a position's place in its block
    pub of_places: DeviceSlice<'a>,
}

/// Keys of tokens that follow one another.
#[derive(Clone, Copy)]
pub struct KeyRows<'a> {
    /// f32 [tokens, dim]
    pub x: DeviceSlice<'a>,
    pub dim: usize,
    /// Positions of a block.
    pub block: usize,
    /// u32: a position of the text, and how far behind it the first token is.
    pub past: DeviceSlice<'a>,
    pub first: usize,
}

impl BlockKeys {
    /// The key of each block that ends among the tokens, in the row of its last one of `out` f32
    /// [tokens, dim]: the mean of its keys, or, with scores, weighed by their softmax. Other rows
    /// become zeros, or stay as they are with scores. `state` is what is kept of a block that is
    /// not whole: f32 `[dim]`, its sum, or [2, block, dim], keys and scores.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn launch(
        &self,
        stream: &Stream,
        rows: KeyRows,
        scores: Option<KeyScores>,
        state: DeviceSlice,
        out: DeviceSlice,
    ) -> Result<()> {
        let KeyRows { x, dim, block, past, first } = rows;
        let (n, n_kept) = (x.count::<f32>(), if scores.is_some() { 2 * block * dim } else { dim });
        assert!(n.is_multiple_of(dim) && out.count::<f32>() == n, "{n} in rows of {dim}");
        assert!(state.holds::<f32>(n_kept) && past.holds::<u32>(1));
        let fits = |scores: KeyScores| {
            scores.of_rows.holds::<f32>(n) && scores.of_places.holds::<f32>(block * dim)
        };
        assert!(scores.is_none_or(fits), "scores of {n} elements");
        if n == 0 {
            return Ok(());
        }
        let tokens = n / dim;
        let params = BlockKeysParams {
            x: x.into(),
            scores: scores.map(|scores| scores.of_rows).into(),
            places: scores.map(|scores| scores.of_places).into(),
            state: state.into(),
            past: past.into(),
            out: out.into(),
            first_token: u32_of(first),
            tokens: u32_of(tokens),
            dim: u32_of(dim),
            block: u32_of(block),
        };
        let kernel = if scores.is_some() { self.pool } else { self.mean };
        let grid = Grid::new([u32_of(tokens.div_ceil(block)), 1, 1], THREADS);
        // SAFETY: sizes are asserted; it reads and writes rows of these tokens, and the state.
        unsafe { stream.launch(kernel, grid, &params) }
    }
}
