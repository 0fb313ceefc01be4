//! Matrix times the activations of many tokens (`kernels/matmul.cu`), for one matrix or for one an
//! expert; and the choice between that and `matvec`.

use super::acts::DeviceActs;
use super::mat::{DeviceMat, TypeKernels};
use super::matvec::{self, Matvec, ProductOut};
use super::{Device, DevicePtr, DeviceSlice, Grid, Stream, kernel_params, u32_of};
use crate::Result;
use crate::gguf::TensorType;
use crate::simd::act_kind;

const THREADS: u32 = 256;
/// Rows of a tile, all of which are one granule's.
const ROWS: u32 = 64;

/// Tokens of a tile, by [`tile_kind`].
pub const TILE_TOKENS: [usize; 2] = [64, 32];

/// Words of a tile in a list: its item, its first pair, how many it has, and nothing.
pub const TILE_WORDS: usize = 4;

/// Blocks below 256 need eight sums for each output, which leaves registers for half as many
/// tokens. Halves, which tensor cores multiply as they are, have the wide tile.
pub fn tile_kind(ty: TensorType) -> usize {
    usize::from(![1, 256].contains(&ty.block_len()))
}

/// The most tiles of `n_pairs` pairs of up to `n_items` items: a tile that is not full is its
/// item's last.
pub fn max_tiles(n_pairs: usize, n_items: usize, tokens: usize) -> usize {
    (n_pairs + n_items.min(n_pairs) * (tokens - 1)) / tokens
}

kernel_params! {
    pub struct MatmulParams[112] {
        weights: DevicePtr,
        matrices: DevicePtr,
        matrix_at: u64,
        n_rows: u32,
        n_cols: u32,
        x: DevicePtr,
        x_cols: u32,
        first_col: u32,
        tokens: DevicePtr,
        tiles: DevicePtr,
        experts: DevicePtr,
        bias: DevicePtr,
        out: DevicePtr,
        n_tokens: u32,
        accumulate: u32,
        out_stride: u32,
        bias_stride: u32,
        granule_rows: u32,
        n_granules: u32,
    }
}

/// Products of any number of tokens.
pub struct Products {
    matvec: Matvec,
    matmul: TypeKernels<MatmulParams>,
}

/// The matrices of a grouped product, and the tokens of each. The tables lie in device memory, so
/// that the device can write them.
#[derive(Clone, Copy)]
pub struct Groups<'a> {
    pub ty: TensorType,
    /// An item's, of all granules.
    pub rows: usize,
    pub cols: usize,
    /// Rows of a granule but the last.
    pub granule_rows: usize,
    pub n_items: usize,
    /// Pairs of all items.
    pub n_pairs: usize,
    /// u64 [items, n_granules] from the first granule's on: the address of each; 0 leaves it out.
    pub matrices: DeviceSlice<'a>,
    /// Granules of a row of `matrices`.
    pub n_granules: usize,
    /// Bytes from a granule's beginning to its rows.
    pub matrix_at: usize,
    /// u32 [tiles, `TILE_WORDS`], of `TILE_TOKENS` pairs of one item. Tiles without pairs are left
    /// out. `None`: those of all pairs of one item.
    pub tiles: Option<DeviceSlice<'a>>,
    /// u32 `[pairs]`: the token of a pair; without it pair i reads record i.
    pub tokens: Option<DeviceSlice<'a>>,
    /// Added to each product.
    pub bias: Option<GroupBias<'a>>,
    /// Adds to what `out` holds: granules of down after the first.
    pub accumulate: bool,
}

/// Biases of a grouped product.
#[derive(Clone, Copy)]
pub struct GroupBias<'a> {
    /// u32 `[items]`; `None`: item i is expert i.
    pub experts: Option<DeviceSlice<'a>>,
    /// f32 [experts, stride], of which the first `rows` columns
    pub values: DeviceSlice<'a>,
    pub stride: usize,
}

/// Whether one launch multiplies several granules of so many rows.
pub fn is_whole_tiles(granule_rows: usize) -> bool {
    granule_rows.is_multiple_of(ROWS as usize)
}

/// Whether products of so many tokens go the way of few.
pub fn is_few(mat: &DeviceMat, tokens: usize) -> bool {
    tokens <= matvec::MAX_TOKENS || mat.ty.block_len() == 1 || !mat.is_dense()
}

impl Products {
    /// For matrices of these types.
    pub fn load(gpu: &Device, types: &[TensorType]) -> Result<Products> {
        let blocks: Vec<_> = types.iter().copied().filter(|ty| ty.block_len() > 1).collect();
        let matmul = TypeKernels::load(gpu, "matmul", &blocks)?;
        Ok(Products { matvec: Matvec::load(gpu, types)?, matmul })
    }

    /// `out[t·out_stride + r] = mat[r] · x[t] (+ bias[r])`, however many tokens there are: the bits
    /// do not depend on it. Plain floats always go the way of few tokens.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn product(
        &self,
        stream: &Stream,
        mat: DeviceMat,
        x: DeviceActs,
        bias: Option<DeviceSlice>,
        out: DeviceSlice,
        out_stride: usize,
    ) -> Result<()> {
        if is_few(&mat, x.tokens) {
            let out = ProductOut { data: out, stride: out_stride, scale: None };
            self.matvec.launch(stream, mat, x, bias, out)
        } else {
            self.matmul(stream, mat, x, bias, out, out_stride)
        }
    }

    /// `out[t, r] = fma(scale, mat[r] · x[t] (+ bias[r]), out[t, r])`, of few tokens
    /// ([`is_few`]): the bits of `product` and `Norm::add_scaled` behind it.
    ///
    /// # Panics
    /// If sizes do not fit each other, there are many tokens, or the scale is 0.
    pub fn add_product(
        &self,
        stream: &Stream,
        mat: DeviceMat,
        x: DeviceActs,
        bias: Option<DeviceSlice>,
        scale: f32,
        out: DeviceSlice,
    ) -> Result<()> {
        assert!(is_few(&mat, x.tokens), "{} tokens", x.tokens);
        let out = ProductOut { data: out, stride: mat.rows, scale: Some(scale) };
        self.matvec.launch(stream, mat, x, bias, out)
    }

    /// The way of many tokens.
    ///
    /// # Panics
    /// If sizes do not fit each other, rows have gaps, or the type has no blocks.
    pub fn matmul(
        &self,
        stream: &Stream,
        mat: DeviceMat,
        x: DeviceActs,
        bias: Option<DeviceSlice>,
        out: DeviceSlice,
        out_stride: usize,
    ) -> Result<()> {
        matvec::assert_fits(&mat, &x, bias, out, out_stride);
        assert!(mat.is_dense(), "rows without gaps");
        if mat.rows == 0 || x.tokens == 0 {
            return Ok(());
        }
        let params = MatmulParams {
            weights: mat.data.into(),
            n_rows: u32_of(mat.rows),
            n_cols: u32_of(mat.cols),
            bias: bias.into(),
            bias_stride: u32_of(mat.rows),
            granule_rows: u32_of(mat.rows),
            n_tokens: u32_of(x.tokens),
            ..Default::default()
        };
        let params = with_operands(params, x, out, out_stride);
        // SAFETY: matrix, activations, bias and results are there (asserted above and where they
        // were made).
        unsafe {
            let grid = grid(&params, whole_tiles(mat.ty, x.tokens));
            stream.launch(self.matmul.get(mat.ty), grid, &params)
        }
    }

    /// `out[pair·out_stride + r] (+)= matrix of the pair's item[r] · x[token of the pair]`.
    ///
    /// # Panics
    /// If sizes do not fit each other, the type has no blocks, or there are several granules whose
    /// rows are no whole tiles.
    ///
    /// # Safety
    /// When the launch runs, `matrices` holds 0 or addresses of device memory from which on, at
    /// `matrix_at`, rows of the type and shape lie, aligned to `mat::alignment`; pairs of tiles are
    /// among those of `out` and of `tokens`, and their items among the items; `tokens` (or pairs)
    /// are among those of `x`, and experts of a bias among its rows.
    pub unsafe fn grouped(
        &self,
        stream: &Stream,
        groups: Groups,
        x: DeviceActs,
        out: DeviceSlice,
        out_stride: usize,
    ) -> Result<()> {
        let Groups { ty, rows, cols, granule_rows, n_items, .. } = groups;
        assert_eq!((cols, act_kind(ty)), (x.cols, x.kind), "activations for {ty}");
        assert!(rows <= out_stride, "{rows} rows in {out_stride}");
        let n_tiles = match groups.tiles {
            Some(tiles) => tiles.count::<u32>() / TILE_WORDS,
            None => whole_tiles(ty, groups.n_pairs),
        };
        if rows == 0 || n_items == 0 || n_tiles == 0 {
            return Ok(());
        }
        let n_granules = rows.div_ceil(granule_rows);
        assert!(n_granules == 1 || is_whole_tiles(granule_rows), "granules of {granule_rows} rows");
        assert!(groups.matrices.holds::<u64>((n_items - 1) * groups.n_granules + n_granules));
        assert!(n_items == 1 || groups.tiles.is_some(), "tiles of {n_items} items");
        assert!(out.holds::<f32>((groups.n_pairs - 1) * out_stride + rows));
        assert!(groups.tokens.is_none_or(|tokens| tokens.holds::<u32>(groups.n_pairs)));
        let is_an_item = |experts: DeviceSlice| experts.holds::<u32>(n_items);
        let experts = groups.bias.and_then(|bias| bias.experts);
        assert!(experts.is_none_or(is_an_item), "an expert an item");
        let params = MatmulParams {
            matrices: groups.matrices.into(),
            matrix_at: groups.matrix_at as u64,
            n_rows: u32_of(rows),
            n_cols: u32_of(cols),
            tokens: groups.tokens.into(),
            tiles: groups.tiles.into(),
            n_tokens: u32_of(groups.n_pairs),
            n_granules: u32_of(groups.n_granules),
            experts: experts.into(),
            bias: groups.bias.map(|bias| bias.values).into(),
            bias_stride: groups.bias.map_or(0, |bias| u32_of(bias.stride)),
            granule_rows: u32_of(granule_rows),
            accumulate: groups.accumulate.into(),
            ..Default::default()
        };
        let params = with_operands(params, x, out, out_stride);
        // SAFETY: the tables are as large as the kernel reads (asserted); their content is the
        // caller's promise.
        unsafe { stream.launch(self.matmul.get(ty), grid(&params, n_tiles), &params) }
    }
}

/// The parameters with these activations and results.
fn with_operands(
    params: MatmulParams,
    x: DeviceActs,
    out: DeviceSlice,
    out_stride: usize,
) -> MatmulParams {
    MatmulParams {
        x: x.records.into(),
        x_cols: u32_of(x.record_cols),
        first_col: u32_of(x.first_col),
        out: out.into(),
        out_stride: u32_of(out_stride),
        ..params
    }
}

/// Tiles of so many tokens of one item.
fn whole_tiles(ty: TensorType, n_tokens: usize) -> usize {
    n_tokens.div_ceil(TILE_TOKENS[tile_kind(ty)])
}

/// A block for 64 rows of each tile.
fn grid(params: &MatmulParams, n_tiles: usize) -> Grid {
    Grid::new([params.n_rows.div_ceil(ROWS), u32_of(n_tiles), 1], THREADS)
}

#[cfg(test)]
mod tests {
    use super::max_tiles;

    #[test]
    fn no_grouping_has_more_tiles() {
        let mut most = [0; 37];
        for counts in 0..13usize.pow(3) {
            let counts = [counts % 13, counts / 13 % 13, counts / 169];
            let n_pairs: usize = counts.iter().sum();
            let n_tiles: usize = counts.iter().map(|n| n.div_ceil(4)).sum();
            most[n_pairs] = n_tiles.max(most[n_pairs]);
        }
        for (n_pairs, most) in most.into_iter().enumerate().take(13) {
            assert_eq!(most, max_tiles(n_pairs, 3, 4), "{n_pairs} pairs");
        }
        assert_eq!([max_tiles(72, 512, 32), max_tiles(4096, 128, 64)], [72, 190]);
    }
}
