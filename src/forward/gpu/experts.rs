//! Granules of experts on a device: few tokens pair by pair, many grouped by expert.

use super::acts::GpuActs;
use super::layers::GpuBiases;
use super::ops::Ops;
use super::pass::Pass;
use super::weights::GpuWeights;
use crate::Result;
use crate::backend::gpu::acts::DeviceActs;
use crate::backend::gpu::expert::{Chosen, DeviceBiases, ExpertShape as DeviceShape};
use crate::backend::gpu::matmul::Groups;
use crate::backend::gpu::matvec::MAX_TOKENS;
use crate::backend::gpu::{DeviceSlice, Stream};
use crate::backend::ops::ExpertShape;
use crate::experts::vram::GranuleLayout;
use crate::forward::gpu::workspace::{ExpertLayout, Workspace};
use crate::gguf::TensorType;
use std::ops::Range;

/// Whether so many tokens are computed grouped by expert: the kernels for that read blocks of
/// integers.
pub fn is_grouped(shape: &ExpertShape, n_tokens: usize) -> bool {
    let mut types = shape.inputs().chain([shape.down]);
    n_tokens > MAX_TOKENS && types.all(|ty| ty.block_len() > 1)
}

/// Experts that lie by `layout`, as the kernels want them, for tokens that use `k` each.
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
        activation: expert.activation,
    }
}

/// What is added to an expert's products.
pub struct Biases<'a> {
    all: DeviceBiases<'a>,
    weights: &'a GpuWeights,
    granules: &'a GpuBiases,
}

impl<'a> Biases<'a> {
    pub fn new(weights: &'a GpuWeights, b: &'a GpuBiases) -> Biases<'a> {
        let gate = b.gate.as_ref().map(|gate| weights.vector(gate));
        let all = DeviceBiases { gate, up: weights.vector(&b.up), down: weights.vector(&b.down) };
        Biases { all, weights, granules: b }
    }

    fn up(&self, granule: usize) -> Option<DeviceSlice<'a>> {
        self.granules.up_granules.get(granule).map(|up| self.weights.vector(up))
    }

    fn gate(&self, granule: usize) -> Option<DeviceSlice<'a>> {
        self.granules.gate_granules.get(granule).map(|gate| self.weights.vector(gate))
    }
}

/// Where granules are computed: a device's operations, a stream of it, and the room for what is
/// between.
#[derive(Clone, Copy)]
pub struct ExpertContext<'a> {
    pub ops: &'a Ops,
    pub stream: &'a Stream,
    pub workspace: &'a Workspace,
    pub layout: &'a ExpertLayout,
}

/// Pairs of few tokens. Pair `t·k + rank`.
pub struct DecodePairs<'a> {
    pub shape: &'a DeviceShape,
    pub chosen: Chosen<'a>,
}

/// Pairs sorted by expert. An *item* is an expert of the demand.
pub struct GroupedPairs<'a> {
    pub shape: &'a DeviceShape,
    pub n_items: usize,
    pub n_pairs: usize,
    /// u64 [granules, items]: where granules lie; 0 where one is not to be computed now.
    pub matrices: DeviceSlice<'a>,
    /// u32 [items + 1]
    pub starts: DeviceSlice<'a>,
    /// u32 [pairs]; pair i is token i's without.
    pub tokens: Option<DeviceSlice<'a>>,
    /// u32 [items]
    pub experts: DeviceSlice<'a>,
    pub max_pairs: usize,
    /// A run of pairs that has those of all items whose granules are to be computed now.
    pub pairs: Range<usize>,
}

impl<'a> Pass<'a> {
    /// With the other operations of the layer.
    pub fn expert_context(&self) -> ExpertContext<'a> {
        let (stream, layout) = (self.stream(), &self.layout().ffn.experts);
        ExpertContext { ops: &self.dev.ops, stream, workspace: &self.dev.workspace, layout }
    }
}

impl<'a> ExpertContext<'a> {
    /// f32 [pairs, n_embd]
    pub fn partial(&self, shape: &DeviceShape, n_pairs: usize) -> DeviceSlice<'a> {
        self.workspace.words(&self.layout.partial, n_pairs * shape.n_embd)
    }

    /// `partial` [pairs, n_embd] of the granules that the table has, added to what earlier calls of
    /// this layer left where a pair's first granule is not among them.
    ///
    /// # Safety
    /// When it runs, the table holds 0 or addresses of granules of this shape, and experts with
    /// biases are among theirs.
    pub unsafe fn decode_pairs(
        &self,
        decode_pairs: &DecodePairs,
        biases: Option<&Biases>,
        acts: &GpuActs,
    ) -> Result<()> {
        let (experts, stream) = (&self.ops.experts, self.stream);
        let (shape, n_pairs) = (decode_pairs.shape, decode_pairs.chosen.n_pairs);
        let biases = biases.map(|b| b.all);
        let inner = self.workspace.words(&self.layout.inner, n_pairs * shape.n_ff);
        let x = |ty| acts.view(ty);
        // SAFETY: the caller's promise, passed on.
        unsafe { experts.gate_up(stream, shape, decode_pairs.chosen, biases, x, inner)? };
        let inner = self.inner_acts(shape, (n_pairs, 0..n_pairs), inner)?;
        let partial = self.partial(shape, n_pairs);
        // SAFETY: as above.
        unsafe { experts.down(stream, shape, decode_pairs.chosen, biases, inner, partial) }
    }

    /// What down reads of all pairs, made anew of `inner` for those of `pairs`.
    fn inner_acts(
        &self,
        shape: &DeviceShape,
        (n_pairs, pairs): (usize, Range<usize>),
        inner: DeviceSlice,
    ) -> Result<DeviceActs<'a>> {
        let (memory, size) = (self.workspace.slice(&self.layout.inner_acts), (n_pairs, shape.n_ff));
        let acts = GpuActs::at([shape.down], size, memory).view(shape.down);
        let rows = inner_rows(shape, inner, &pairs);
        self.ops.quantize.store(self.stream, rows, shape.n_ff, acts.token_range(pairs))?;
        Ok(acts)
    }

    /// Where granules land one after the other, what has not yet been computed must be something:
    /// zeros.
    pub fn begin_grouped(&self, shape: &DeviceShape, n_pairs: usize) -> Result<()> {
        for place in [&self.layout.gate, &self.layout.up] {
            self.stream.fill(self.workspace.words(place, n_pairs * shape.n_ff), 0)?;
        }
        Ok(())
    }

    /// As `few`, for granules `granules` of the items. Those of an item come in index order from
    /// call to call.
    ///
    /// # Safety
    /// As `few`; `starts` ascends to `n_pairs`, items have at most `max_pairs`, and `tokens` are
    /// among those of the pass.
    pub unsafe fn grouped_pairs(
        &self,
        grouped_pairs: &GroupedPairs,
        biases: Option<&Biases>,
        acts: &GpuActs,
        granules: Range<usize>,
    ) -> Result<()> {
        let (shape, f) = (grouped_pairs.shape, self.layout);
        let n = grouped_pairs.n_pairs * shape.n_ff;
        let [gate, up, inner] =
            [&f.gate, &f.up, &f.inner].map(|place| self.workspace.words(place, n));
        let gated = shape.activation.is_gated();
        for g in granules.clone() {
            let up_bias = biases.and_then(|b| b.up(g));
            // SAFETY: the caller's promise, passed on.
            unsafe { self.rows_of(grouped_pairs, g, (shape.up, shape.up_at), up_bias, acts, up)? };
            if gated {
                let bias = biases.and_then(|b| b.gate(g));
                // SAFETY: as above.
                unsafe {
                    self.rows_of(grouped_pairs, g, (shape.gate, shape.gate_at), bias, acts, gate)?
                };
            }
        }
        let rows = |all| inner_rows(shape, all, &grouped_pairs.pairs);
        let (gate, activated) = (gated.then(|| rows(gate)), rows(inner));
        self.ops.activate.gated(self.stream, shape.activation, gate, rows(up), activated)?;
        let inner =
            self.inner_acts(shape, (grouped_pairs.n_pairs, grouped_pairs.pairs.clone()), inner)?;
        let partial = self.partial(shape, grouped_pairs.n_pairs);
        for g in granules {
            let rows = rows_of(shape, g);
            let bias = biases.filter(|_| g == 0).map(|b| b.all.down);
            let matrix = (shape.down, shape.n_embd, rows.len(), shape.down_at);
            let mut groups = groups(grouped_pairs, g, matrix, bias);
            (groups.tokens, groups.accumulate) = (None, g > 0);
            let (inner, stride) = (inner.column_range(rows), shape.n_embd);
            // SAFETY: as above.
            unsafe { self.ops.products.grouped(self.stream, groups, inner, partial, stride)? };
        }
        Ok(())
    }

    /// Products of granule g's rows of gate or up.
    ///
    /// # Safety
    /// As `grouped`.
    unsafe fn rows_of(
        &self,
        grouped_pairs: &GroupedPairs,
        g: usize,
        (ty, at): (TensorType, usize),
        bias: Option<DeviceSlice>,
        acts: &GpuActs,
        out: DeviceSlice,
    ) -> Result<()> {
        let (shape, rows) = (grouped_pairs.shape, rows_of(grouped_pairs.shape, g));
        let groups = groups(grouped_pairs, g, (ty, rows.len(), shape.n_embd, at), bias);
        let (out, x) = (out.slice(4 * rows.start..out.len()), acts.view(ty));
        // SAFETY: the caller's promise, passed on.
        unsafe { self.ops.products.grouped(self.stream, groups, x, out, shape.n_ff) }
    }
}

/// Intermediate rows of a granule.
fn rows_of(shape: &DeviceShape, g: usize) -> Range<usize> {
    let start = g * shape.granule_rows;
    start..shape.n_ff.min(start + shape.granule_rows)
}

/// Rows of f32 [pairs, n_ff].
fn inner_rows<'a>(
    shape: &DeviceShape,
    all: DeviceSlice<'a>,
    pairs: &Range<usize>,
) -> DeviceSlice<'a> {
    all.slice(4 * shape.n_ff * pairs.start..4 * shape.n_ff * pairs.end)
}

/// The matrices (type, rows, columns, where in a granule) of granule g of each item.
fn groups<'a>(
    grouped_pairs: &GroupedPairs<'a>,
    g: usize,
    (ty, rows, cols, matrix_at): (TensorType, usize, usize, usize),
    bias: Option<DeviceSlice<'a>>,
) -> Groups<'a> {
    let matrices =
        grouped_pairs.matrices.slice(8 * g * grouped_pairs.n_items..grouped_pairs.matrices.len());
    Groups {
        ty,
        rows,
        cols,
        n_items: grouped_pairs.n_items,
        matrices,
        matrix_at,
        starts: grouped_pairs.starts,
        tokens: grouped_pairs.tokens,
        max_pairs: grouped_pairs.max_pairs,
        bias: bias.map(|bias| (grouped_pairs.experts, bias)),
        accumulate: false,
    }
}
