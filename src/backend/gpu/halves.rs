//! Products of F16 and BF16 matrices with the activations of prompts, on tensor cores
//! (`kernels/matmul_halves.cu`): not to the bit those of `Products`.

use super::acts::{DeviceActs, record_bytes};
use super::expert::ExpertShape;
use super::mat::DeviceMat;
use super::matmul::{Groups, TILE_TOKENS, TILE_WORDS, tile_kind};
use super::matvec::ProductOut;
use super::{Device, DevicePtr, DeviceSlice, GRID_MAX, Grid, Kernel, Stream, Version};
use super::{kernel_params, u32_of};
use crate::Result;
use crate::gguf::TensorType;
use crate::simd::ActKind;
use std::ops::Range;

const THREADS: u32 = 256;
/// Rows and tokens of a block.
const ROWS: u32 = 128;
const TOKENS: usize = 128;
/// Rows of a block of the kernel for groups.
const GROUPED_ROWS: usize = 64;
/// Rows, and granules of columns, begin at multiples of what a thread copies at once.
const CHUNK: usize = 8;

kernel_params! {
    pub struct StoreHalvesParams[40] {
        x: DevicePtr,
        out: DevicePtr,
        scales: DevicePtr,
        stride: u32,
        cols: u32,
        part: u32,
        is_bf16: u32,
    }
}

kernel_params! {
    pub struct MatmulHalvesParams[64] {
        weights: DevicePtr,
        x: DevicePtr,
        scales: DevicePtr,
        bias: DevicePtr,
        out: DevicePtr,
        n_rows: u32,
        n_cols: u32,
        n_tokens: u32,
        out_stride: u32,
        scale: f32,
        is_bf16: u32,
    }
}

kernel_params! {
    pub struct GroupedHalvesParams[120] {
        matrices: DevicePtr,
        matrix_at: u64,
        x: DevicePtr,
        scales: DevicePtr,
        tokens: DevicePtr,
        tiles: DevicePtr,
        experts: DevicePtr,
        bias: DevicePtr,
        out: DevicePtr,
        n_rows: u32,
        n_cols: u32,
        x_cols: u32,
        scales_stride: u32,
        n_pairs: u32,
        out_stride: u32,
        bias_stride: u32,
        granule_rows: u32,
        granule_cols: u32,
        n_granules: u32,
        accumulate: u32,
        is_bf16: u32,
    }
}

/// Activations rounded to F16 or BF16.
#[derive(Clone, Copy, Debug)]
pub struct DeviceHalves<'a> {
    pub ty: TensorType,
    pub tokens: usize,
    pub cols: usize,
    /// Columns that are scaled together; the last ones of a row may be fewer.
    pub part: usize,
    /// [tokens, cols]
    values: DeviceSlice<'a>,
    /// f32 [tokens, parts]: the factors that undo the scaling of F16.
    scales: DeviceSlice<'a>,
}

impl<'a> DeviceHalves<'a> {
    /// Their place in memory that begins on a line and has [`halves_bytes`].
    ///
    /// # Panics
    /// If they do not fit, or parts are no whole chunks.
    pub fn at(
        ty: TensorType,
        [tokens, cols, part]: [usize; 3],
        memory: DeviceSlice<'a>,
    ) -> DeviceHalves<'a> {
        assert!(cols.is_multiple_of(CHUNK) && (part == cols || part.is_multiple_of(CHUNK)));
        assert!(memory.address().is_multiple_of(64));
        let scales = scales_at(tokens, cols);
        DeviceHalves {
            ty,
            tokens,
            cols,
            part,
            values: memory.slice(0..2 * tokens * cols),
            scales: memory.slice(scales..halves_bytes(tokens, cols, part)),
        }
    }

    fn n_parts(&self) -> usize {
        self.cols.div_ceil(self.part)
    }

    /// The rows of some tokens.
    pub fn token_range(self, tokens: Range<usize>) -> Self {
        assert!(tokens.start <= tokens.end && tokens.end <= self.tokens);
        let slice =
            |all: DeviceSlice<'a>, row: usize| all.slice(row * tokens.start..row * tokens.end);
        DeviceHalves {
            tokens: tokens.len(),
            values: slice(self.values, 2 * self.cols),
            scales: slice(self.scales, 4 * self.n_parts()),
            ..self
        }
    }
}

pub struct Halves {
    store: Kernel<StoreHalvesParams>,
    matmul: Kernel<MatmulHalvesParams>,
    grouped: Kernel<GroupedHalvesParams>,
    serves: bool,
    has_bf16: bool,
}

fn scales_at(tokens: usize, cols: usize) -> usize {
    (2 * tokens * cols).next_multiple_of(64)
}

/// Bytes of rounded activations, of whose columns `part` are scaled together.
pub fn halves_bytes(tokens: usize, cols: usize, part: usize) -> usize {
    scales_at(tokens, cols) + 4 * tokens * cols.div_ceil(part)
}

/// Whether tensor cores multiply the halves of a model with matrices of these types: if it has
/// some and no blocks, because its prompts would be slow. In a file of blocks the few halves keep
/// the CPU's bits.
pub fn serve(types: &[TensorType]) -> bool {
    let is_half = |ty: &TensorType| [TensorType::F16, TensorType::BF16].contains(ty);
    types.iter().all(|ty| ty.block_len() == 1) && types.iter().any(is_half)
}

impl Halves {
    /// For models with matrices of these types.
    pub fn load(gpu: &Device, types: &[TensorType]) -> Result<Halves> {
        Ok(Halves {
            store: Kernel::find(gpu, "store_halves")?,
            matmul: Kernel::find(gpu, "matmul_halves")?,
            grouped: Kernel::find(gpu, "matmul_halves_grouped")?,
            serves: serve(types),
            // Turing multiplies halves of F16 only.
            has_bf16: gpu.info().compute >= Version::new(8, 0),
        })
    }

    /// Whether rows of `cols` columns of this type are multiplied.
    pub fn take(&self, ty: TensorType, cols: usize) -> bool {
        let is_half = ty == TensorType::F16 || ty == TensorType::BF16 && self.has_bf16;
        self.serves && is_half && cols > 0 && cols.is_multiple_of(CHUNK)
    }

    /// Whether all matrices of such experts are multiplied. Rows of f32 are whole lines then.
    pub fn take_expert(&self, shape: &ExpertShape) -> bool {
        let ExpertShape { n_embd, n_ff, granule_rows, .. } = *shape;
        let is_line = |cols: usize| record_bytes(ActKind::F32, cols) == 4 * cols;
        let is_cut_well = granule_rows >= n_ff || granule_rows.is_multiple_of(CHUNK);
        self.take(shape.gate, n_embd)
            && self.take(shape.up, n_embd)
            && self.take(shape.down, n_ff)
            && is_line(n_embd)
            && is_line(n_ff)
            && is_cut_well
    }

    /// Rounds activations to the type of `to`, of as many tokens and columns.
    ///
    /// # Panics
    /// If they are not f32, are a part of records' columns, or sizes differ.
    pub fn store(&self, stream: &Stream, x: DeviceActs, to: DeviceHalves) -> Result<()> {
        let DeviceActs { tokens, cols, .. } = x;
        assert!(x.kind == ActKind::F32 && x.first_col == 0 && x.record_cols == cols);
        assert_eq!([tokens, cols], [to.tokens, to.cols]);
        assert!(self.take(to.ty, cols), "{cols} columns of {}", to.ty);
        let params = StoreHalvesParams {
            x: x.records.into(),
            out: to.values.into(),
            scales: to.scales.into(),
            stride: u32_of(record_bytes(x.kind, cols) / 4),
            cols: u32_of(cols),
            part: u32_of(to.part),
            is_bf16: (to.ty == TensorType::BF16).into(),
        };
        if tokens == 0 {
            return Ok(());
        }
        let grid = Grid::new([u32_of(tokens), u32_of(to.n_parts()), 1], THREADS);
        // SAFETY: the records are there (asserted where they were made), and so is what it writes.
        unsafe { stream.launch(self.store, grid, &params) }
    }

    /// `Products::product`, or `Products::add_product` where there is a scale, however many tokens
    /// there are.
    ///
    /// # Panics
    /// If sizes or types do not fit each other, or the scale is 0.
    pub fn product(
        &self,
        stream: &Stream,
        mat: DeviceMat,
        x: DeviceHalves,
        bias: Option<DeviceSlice>,
        out: ProductOut,
    ) -> Result<()> {
        assert_eq!((mat.ty, mat.cols), (x.ty, x.cols), "the matrix and its activations");
        assert_eq!(x.n_parts(), 1, "a scale a token");
        assert!(mat.is_dense() && mat.data.address().is_multiple_of(16), "rows without gaps");
        assert!(bias.is_none_or(|bias| bias.holds::<f32>(mat.rows)), "a bias a row");
        assert!(mat.rows <= out.stride && out.scale != Some(0.0));
        if mat.rows == 0 || x.tokens == 0 {
            return Ok(());
        }
        assert!(out.data.holds::<f32>((x.tokens - 1) * out.stride + mat.rows), "the results");
        let tiles = x.tokens.div_ceil(TOKENS);
        assert!(tiles <= GRID_MAX, "{} tokens", x.tokens);
        let params = MatmulHalvesParams {
            weights: mat.data.into(),
            x: x.values.into(),
            scales: x.scales.into(),
            bias: bias.into(),
            out: out.data.into(),
            n_rows: u32_of(mat.rows),
            n_cols: u32_of(mat.cols),
            n_tokens: u32_of(x.tokens),
            out_stride: u32_of(out.stride),
            scale: out.scale.unwrap_or(0.0),
            is_bf16: (mat.ty == TensorType::BF16).into(),
        };
        let grid = Grid::new([params.n_rows.div_ceil(ROWS), u32_of(tiles), 1], THREADS);
        // SAFETY: matrix, activations, bias and results are there (asserted above and where they
        // were made).
        unsafe { stream.launch(self.matmul, grid, &params) }
    }

    /// `Products::grouped` with all granules of columns in one launch: granule i, of matrices with
    /// as many rows, has the columns of part `first + i` of `x`.
    ///
    /// # Panics
    /// If sizes or types do not fit each other.
    ///
    /// # Safety
    /// As for `Products::grouped`; addresses are multiples of 16.
    pub unsafe fn grouped(
        &self,
        stream: &Stream,
        groups: Groups,
        x: DeviceHalves,
        first: usize,
        out: DeviceSlice,
        out_stride: usize,
    ) -> Result<()> {
        let Groups { ty, rows, cols, granule_rows, n_items, .. } = groups;
        assert!(ty == x.ty && first * x.part + cols <= x.cols && rows <= out_stride);
        let n_tiles = match groups.tiles {
            Some(tiles) => tiles.count::<u32>() / TILE_WORDS,
            None => groups.n_pairs.div_ceil(TILE_TOKENS[tile_kind(ty)]),
        };
        if rows == 0 || cols == 0 || n_items == 0 || n_tiles == 0 {
            return Ok(());
        }
        let n_granules = [rows.div_ceil(granule_rows), cols.div_ceil(x.part)];
        assert!(n_granules.contains(&1), "cut between rows or between columns");
        let n_granules = n_granules.into_iter().max().expect("two");
        assert!(groups.matrices.holds::<u64>((n_items - 1) * groups.n_granules + n_granules));
        assert!(n_items == 1 || groups.tiles.is_some(), "tiles of {n_items} items");
        assert!(out.holds::<f32>((groups.n_pairs - 1) * out_stride + rows));
        assert!(groups.tokens.is_none_or(|tokens| tokens.holds::<u32>(groups.n_pairs)));
        assert!(groups.tokens.is_some() || groups.n_pairs <= x.tokens, "a row a pair");
        assert!(groups.matrix_at.is_multiple_of(16) && n_tiles <= GRID_MAX, "{n_tiles} tiles");
        let experts = groups.bias.and_then(|bias| bias.experts);
        assert!(experts.is_none_or(|experts| experts.holds::<u32>(n_items)), "an expert an item");
        let (from, scale) = (2 * first * x.part, 4 * first);
        let params = GroupedHalvesParams {
            matrices: groups.matrices.into(),
            matrix_at: groups.matrix_at as u64,
            x: x.values.slice(from..x.values.len()).into(),
            scales: x.scales.slice(scale..x.scales.len()).into(),
            tokens: groups.tokens.into(),
            tiles: groups.tiles.into(),
            experts: experts.into(),
            bias: groups.bias.map(|bias| bias.values).into(),
            out: out.into(),
            n_rows: u32_of(rows),
            n_cols: u32_of(cols),
            x_cols: u32_of(x.cols),
            scales_stride: u32_of(x.n_parts()),
            n_pairs: u32_of(groups.n_pairs),
            out_stride: u32_of(out_stride),
            bias_stride: groups.bias.map_or(0, |bias| u32_of(bias.stride)),
            granule_rows: u32_of(granule_rows),
            granule_cols: u32_of(x.part),
            n_granules: u32_of(groups.n_granules),
            accumulate: groups.accumulate.into(),
            is_bf16: (ty == TensorType::BF16).into(),
        };
        let blocks = [u32_of(rows.div_ceil(GROUPED_ROWS)), u32_of(n_tiles), 1];
        // SAFETY: the tables are as large as the kernel reads (asserted); their content is the
        // caller's promise.
        unsafe { stream.launch(self.grouped, Grid::new(blocks, THREADS), &params) }
    }
}
