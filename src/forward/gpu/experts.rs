//! Products of experts on a device: pair by pair for few tokens, grouped by expert for many. Each
//! call computes the granules of experts that are resident.

use crate::Result;
use crate::backend::gpu::acts::DeviceActs;
use crate::backend::gpu::expert::{
    Chosen, DeviceBiases, DeviceForm, DeviceScales, ExpertShape as DeviceShape, Scaled,
};
use crate::backend::gpu::halves::DeviceHalves;
use crate::backend::gpu::matmul::{GroupBias, Groups, is_whole_tiles, tile_kind};
use crate::backend::gpu::matvec::MAX_TOKENS;
use crate::backend::gpu::{DeviceSlice, Stream};
use crate::backend::ops::{ExpertForm, ExpertShape};
use crate::experts::vram::GranuleLayout;
use crate::forward::gpu::acts::{GpuActs, RowShape, is_at};
use crate::forward::gpu::layers::GpuForm;
use crate::forward::gpu::ops::Ops;
use crate::forward::gpu::weights::{GpuVector, GpuWeights};
use crate::forward::gpu::workspace::{ExpertLayout, Workspace};
use crate::gguf::TensorType;
use crate::simd::ActKind;
use std::ops::Range;

/// Whether so many tokens are computed grouped by expert with the bits that they have pair by pair.
/// The kernels for that read quantized blocks only.
pub fn is_grouped(shape: &DeviceShape, n_tokens: usize) -> bool {
    let types = [shape.gate, shape.up, shape.down];
    n_tokens > MAX_TOKENS && types.iter().all(|ty| ty.block_len() > 1)
}

/// The shape that kernels are given, for experts that lie by `layout` and tokens that use `k` each.
pub fn device_shape(layout: &GranuleLayout, expert: &ExpertShape, k: usize) -> DeviceShape {
    DeviceShape {
        gate: expert.gate.unwrap_or(expert.up),
        up: expert.up,
        down: expert.down,
        n_embd: expert.n_embd,
        n_ff: expert.n_ff,
        granule_rows: layout.granule_rows,
        gate_at: layout.gate_at,
        up_at: layout.up_at,
        down_at: layout.down_at,
        k,
        pairs_a_row: k,
        activation: expert.activation,
        limit: expert.limit,
        up_limit: expert.up_limit,
    }
}

/// Biases and factors of a layer's experts, beside their matrices.
pub fn device_form<'a>(weights: &'a GpuWeights, form: &GpuForm) -> DeviceForm<'a> {
    let vector = |v: &GpuVector| weights.vector(v);
    let biases = form.biases.as_ref().map(|b| DeviceBiases {
        gate: b.gate.as_ref().map(vector),
        up: vector(&b.up),
        down: vector(&b.down),
    });
    let scales = form
        .scales
        .as_ref()
        .map(|s| DeviceScales { gate: s.gate.as_ref().map(vector), up: vector(&s.up) });
    DeviceForm { biases, scales }
}

/// The context that experts run in: a device's operations, a stream, and memory for intermediate
/// results.
#[derive(Clone, Copy)]
pub struct ExpertContext<'a> {
    pub ops: &'a Ops,
    pub stream: &'a Stream,
    pub workspace: &'a Workspace,
    pub layout: &'a ExpertLayout,
}

/// All (token, rank) pairs of few tokens. Pair `t·k + rank` is the token's expert of that rank.
pub struct DecodePairs<'a> {
    pub shape: &'a DeviceShape,
    pub chosen: Chosen<'a>,
}

/// The pairs of many tokens, sorted by expert. An *item* is an expert of the demand.
pub struct GroupedPairs<'a> {
    pub shape: &'a DeviceShape,
    pub n_items: usize,
    pub n_pairs: usize,
    /// u64 [items, granules]: the address of each granule, 0 if this call does not compute it
    pub matrices: DeviceSlice<'a>,
    /// The tiles of items that this call computes, by `tile_kind`, and u32 [items + 1]: the pairs
    /// of each item. `None`: one item has all pairs.
    pub tiles: Option<PairTiles<'a>>,
    /// u32 [pairs]: the row of input of each pair. Pair i reads row i if there are none.
    pub tokens: Option<DeviceSlice<'a>>,
    /// u32 [items]; `None`: item i is expert i.
    pub experts: Option<DeviceSlice<'a>>,
    /// A run of pairs that includes those of all items that this call computes.
    pub pairs: Range<usize>,
}

/// The pairs of items; see `GroupedPairs`.
#[derive(Clone, Copy)]
pub struct PairTiles<'a> {
    pub tiles: [DeviceSlice<'a>; 2],
    pub starts: DeviceSlice<'a>,
}

impl<'a> ExpertContext<'a> {
    /// The sums of the pairs' granules: f32 [pairs, n_embd].
    pub fn partial(&self, shape: &DeviceShape, n_pairs: usize) -> DeviceSlice<'a> {
        self.workspace.words(&self.layout.partial, n_pairs * shape.n_embd)
    }

    /// Computes the granules that are in the table. Adds to `partial`; a pair's first granule
    /// begins its sum.
    ///
    /// # Safety
    /// When the kernels run, the table holds 0 or addresses of granules of this shape. With biases
    /// or factors, `chosen.experts` are experts that have them.
    pub unsafe fn compute_pairs(
        &self,
        pairs: &DecodePairs,
        form: DeviceForm,
        acts: &GpuActs,
    ) -> Result<()> {
        let (experts, stream) = (&self.ops.experts, self.stream);
        let (shape, n_pairs) = (pairs.shape, pairs.chosen.n_pairs);
        let inner = self.workspace.words(&self.layout.inner, n_pairs * shape.n_ff);
        let x = |ty| acts.view(ty);
        // SAFETY: the caller's promise, passed on.
        unsafe { experts.gate_up(stream, shape, pairs.chosen, form, x, inner)? };
        let inner = self.inner_acts(shape, n_pairs, 0..n_pairs, inner)?;
        let partial = self.partial(shape, n_pairs);
        // SAFETY: as above.
        unsafe { experts.down(stream, shape, pairs.chosen, form.biases, inner, partial) }
    }

    /// The activations that down reads, of all pairs. Stores those of `pairs`, from `inner`.
    fn inner_acts(
        &self,
        shape: &DeviceShape,
        n_pairs: usize,
        pairs: Range<usize>,
        inner: DeviceSlice<'a>,
    ) -> Result<DeviceActs<'a>> {
        let memory = self.workspace.slice(&self.layout.inner_acts);
        let size = RowShape { n: n_pairs, cols: shape.n_ff };
        let acts = GpuActs::at([shape.down], size, inner, memory).view(shape.down);
        if is_at(&acts, inner) {
            return Ok(acts);
        }
        let rows = inner_rows(shape, inner, &pairs);
        self.ops.quantize.store(self.stream, rows, shape.n_ff, acts.token_range(pairs))?;
        Ok(acts)
    }

    /// Zeroes the intermediate results: a call may read rows of granules that are computed later.
    pub fn begin_grouped(&self, shape: &DeviceShape, n_pairs: usize) -> Result<()> {
        for range in [&self.layout.gate, &self.layout.up] {
            self.stream.fill(self.workspace.words(range, n_pairs * shape.n_ff), 0)?;
        }
        Ok(())
    }

    /// Computes granules `granules` of the items that have them in the table. Calls of a layer come
    /// in the order of an item's granules.
    ///
    /// # Safety
    /// As for `compute_pairs`. Also `starts` ascends to `n_pairs`, tiles are of these pairs, and
    /// `tokens` are rows of the experts' input.
    pub unsafe fn compute_grouped(
        &self,
        pairs: &GroupedPairs,
        form: DeviceForm,
        acts: &GpuActs,
        granules: Range<usize>,
    ) -> Result<()> {
        let (shape, f) = (pairs.shape, self.layout);
        let n = pairs.n_pairs * shape.n_ff;
        let [gate, up, inner] =
            [&f.gate, &f.up, &f.inner].map(|range| self.workspace.words(range, n));
        let (biases, scales) = (form.biases, form.scales);
        let mat = RowMatrix {
            ty: shape.up,
            at: shape.up_at,
            bias: biases.map(|b| b.up),
            scales: scales.map(|s| s.up),
        };
        // SAFETY: the caller's promise, passed on.
        unsafe { self.row_products(pairs, mat, granules.clone(), acts, up)? };
        let gated = shape.activation.is_gated();
        if gated {
            let mat = RowMatrix {
                ty: shape.gate,
                at: shape.gate_at,
                bias: biases.and_then(|b| b.gate),
                scales: scales.and_then(|s| s.gate),
            };
            // SAFETY: as above.
            unsafe { self.row_products(pairs, mat, granules.clone(), acts, gate)? };
        }
        let rows = |all| inner_rows(shape, all, &pairs.pairs);
        let (gate, activated) = (gated.then(|| rows(gate)), rows(inner));
        let DeviceShape { activation, limit, up_limit, .. } = *shape;
        let function =
            ExpertForm { activation, limit, up_limit, biases: None, scales: None, adapted: None };
        self.ops.activate.gated(self.stream, function, gate, rows(up), activated)?;
        if shape.down.block_len() == 1 {
            // SAFETY: as above.
            return unsafe { self.down_of_halves(pairs, biases, granules, inner) };
        }
        let inner = self.inner_acts(shape, pairs.n_pairs, pairs.pairs.clone(), inner)?;
        let (partial, stride) = (self.partial(shape, pairs.n_pairs), shape.n_embd);
        for g in granules {
            let (cols, biases) = (granule_rows(shape, &(g..g + 1)), biases.filter(|_| g == 0));
            let bias = biases.map(|b| (b.down, stride));
            let mat = GranuleMatrix { ty: shape.down, rows: stride, cols: cols.len(), bias };
            let groups = Groups {
                matrix_at: shape.down_at,
                tokens: None,
                accumulate: g > 0,
                ..groups(pairs, g, mat)
            };
            let inner = inner.column_range(cols);
            // SAFETY: as above.
            unsafe { self.ops.products.grouped(self.stream, groups, inner, partial, stride)? };
        }
        Ok(())
    }

    /// Products of these granules' columns of down, whose rows of `inner` are rounded.
    ///
    /// # Safety
    /// As for `compute_grouped`.
    unsafe fn down_of_halves(
        &self,
        pairs: &GroupedPairs,
        biases: Option<DeviceBiases>,
        granules: Range<usize>,
        inner: DeviceSlice<'a>,
    ) -> Result<()> {
        let (shape, halves) = (pairs.shape, &self.ops.halves);
        let rows = inner_rows(shape, inner, &pairs.pairs);
        let acts = DeviceActs::new(ActKind::F32, pairs.pairs.len(), shape.n_ff, rows);
        let sizes = [pairs.n_pairs, shape.n_ff, shape.granule_rows.min(shape.n_ff)];
        let memory = self.workspace.slice(&self.layout.inner_acts);
        let inner = DeviceHalves::at(shape.down, sizes, memory);
        halves.store(self.stream, acts, inner.token_range(pairs.pairs.clone()))?;
        let (first, stride) = (granules.start, shape.n_embd);
        let bias = biases.filter(|_| first == 0).map(|b| (b.down, stride));
        let cols = granule_rows(shape, &granules).len();
        let mat = GranuleMatrix { ty: shape.down, rows: stride, cols, bias };
        let groups = Groups {
            matrix_at: shape.down_at,
            tokens: None,
            accumulate: first > 0,
            ..groups(pairs, first, mat)
        };
        let partial = self.partial(shape, pairs.n_pairs);
        // SAFETY: the caller's promise, passed on; granules and their parts lie on multiples of 16
        // bytes.
        unsafe { halves.grouped(self.stream, groups, inner, first, partial, stride) }
    }

    /// Products of these granules' rows of gate or up: one launch if tiles do not cross granules,
    /// or may.
    ///
    /// # Safety
    /// As for `compute_grouped`.
    unsafe fn row_products(
        &self,
        pairs: &GroupedPairs,
        mat: RowMatrix,
        granules: Range<usize>,
        acts: &GpuActs,
        out: DeviceSlice,
    ) -> Result<()> {
        let (shape, halves) = (pairs.shape, acts.halves(mat.ty));
        let is_one = halves.is_some() || is_whole_tiles(shape.granule_rows);
        let step = if is_one { granules.len() } else { 1 };
        let Range { start, end } = granules;
        for g in (start..end).step_by(step.max(1)) {
            let rows = granule_rows(shape, &(g..g + step));
            let bias = mat.bias.filter(|_| mat.scales.is_none());
            let bias = bias.map(|bias| (from(bias, &rows), shape.n_ff));
            let product = GranuleMatrix { ty: mat.ty, rows: rows.len(), cols: shape.n_embd, bias };
            let groups = Groups {
                matrix_at: mat.at,
                granule_rows: shape.granule_rows,
                ..groups(pairs, g, product)
            };
            let (out, stride) = (from(out, &rows), shape.n_ff);
            let Some(x) = halves else {
                let x = acts.view(mat.ty);
                // SAFETY: the caller's promise, passed on.
                unsafe { self.ops.products.grouped(self.stream, groups, x, out, stride)? };
                continue;
            };
            // SAFETY: as above; granules and their parts lie on multiples of 16 bytes.
            unsafe { self.ops.halves.grouped(self.stream, groups, x, 0, out, stride)? };
        }
        let Some(scales) = mat.scales else { return Ok(()) };
        for g in start..end {
            let rows = granule_rows(shape, &(g..g + 1));
            let scaled = Scaled {
                x: from(out, &rows),
                stride: shape.n_ff,
                rows: rows.len(),
                n_items: pairs.n_items,
                n_pairs: pairs.n_pairs,
                granules: granule_table(pairs, g),
                n_granules: shape.n_granules(),
                starts: pairs.tiles.map(|tiles| tiles.starts),
                experts: pairs.experts,
                scales,
                bias: mat.bias.map(|bias| from(bias, &rows)),
                bias_stride: shape.n_ff,
            };
            // SAFETY: as above.
            unsafe { self.ops.experts.scale_pairs(self.stream, scaled)? };
        }
        Ok(())
    }
}

/// Gate or up of the items, and what changes its products: f32 [experts, n_ff] is added, behind a
/// multiplication by f32 [experts].
#[derive(Clone, Copy)]
struct RowMatrix<'a> {
    ty: TensorType,
    /// Its offset in a granule, in bytes.
    at: usize,
    bias: Option<DeviceSlice<'a>>,
    scales: Option<DeviceSlice<'a>>,
}

/// The matrix of one granule of an item, or of several between whose rows it is cut.
struct GranuleMatrix<'a> {
    ty: TensorType,
    rows: usize,
    cols: usize,
    /// f32 [experts, stride], from the matrix's first row on, and the stride.
    bias: Option<(DeviceSlice<'a>, usize)>,
}

/// Intermediate rows of some granules.
fn granule_rows(shape: &DeviceShape, granules: &Range<usize>) -> Range<usize> {
    let at = |g: usize| shape.n_ff.min(g * shape.granule_rows);
    at(granules.start)..at(granules.end)
}

/// The columns of an f32 matrix from those of some rows of a granule on.
fn from<'a>(all: DeviceSlice<'a>, rows: &Range<usize>) -> DeviceSlice<'a> {
    all.slice(4 * rows.start..all.len())
}

/// The rows of some pairs in f32 [pairs, n_ff].
fn inner_rows<'a>(
    shape: &DeviceShape,
    all: DeviceSlice<'a>,
    pairs: &Range<usize>,
) -> DeviceSlice<'a> {
    all.slice(4 * shape.n_ff * pairs.start..4 * shape.n_ff * pairs.end)
}

/// The table of granules, from granule `g` on.
fn granule_table<'a>(pairs: &GroupedPairs<'a>, g: usize) -> DeviceSlice<'a> {
    pairs.matrices.slice(8 * g..pairs.matrices.len())
}

/// A matrix of all items, from granule `g` on.
fn groups<'a>(pairs: &GroupedPairs<'a>, g: usize, mat: GranuleMatrix<'a>) -> Groups<'a> {
    let bias = |(values, stride)| GroupBias { experts: pairs.experts, values, stride };
    Groups {
        ty: mat.ty,
        rows: mat.rows,
        cols: mat.cols,
        granule_rows: mat.rows,
        n_items: pairs.n_items,
        n_pairs: pairs.n_pairs,
        matrices: granule_table(pairs, g),
        n_granules: pairs.shape.n_granules(),
        matrix_at: 0,
        tiles: pairs.tiles.map(|of| of.tiles[tile_kind(mat.ty)]),
        tokens: pairs.tokens,
        bias: mat.bias.map(bias),
        accumulate: false,
    }
}
