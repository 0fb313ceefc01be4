//! A peer's stream and buffers for the experts of one layer, and the copies from and to the first
//! device.

use crate::Result;
use crate::backend::gpu::{Device, DeviceSlice, Stream};
use crate::forward::gpu::acts::{GpuActs, HalfTypes, RowShape, acts_bytes};
use crate::forward::gpu::expert_parallel::staged_copy::StagedCopy;
use crate::forward::gpu::ops::Ops;
use crate::forward::gpu::upload::Staging;
use crate::forward::gpu::workspace::{
    BumpLayout, ByteRange, ExpertLayout, ExpertSizes, LookupLayout, Workspace, expert_width,
    n_input_floats,
};
use crate::model::hyper::HyperParams;
use crate::model::weights::{FfnWeights, Weights};

/// Sums are returned through a staging buffer of this size; longer ones are split.
const RETURN_BYTES: usize = 4 << 20;
/// The staging buffer for uploads from the host has this size, or that of the largest table.
const STAGING_BYTES: usize = 256 << 10;

/// A layer whose router has run on the first device.
#[derive(Clone, Copy)]
pub struct RoutedLayer<'a> {
    pub l: usize,
    pub w: &'a FfnWeights,
    pub n_tokens: usize,
    /// The first device's stream, on which `h` and `chosen` are written.
    pub stream: &'a Stream,
    /// The experts' input: f32 [tokens, width], or [tokens, k, width]
    pub h: DeviceSlice<'a>,
    /// u32 [tokens, k]
    pub chosen: DeviceSlice<'a>,
    /// The types that the input is rounded to.
    pub halves: HalfTypes,
}

/// The ranges of a peer's buffers in its allocation.
#[derive(Clone, Default)]
pub struct PeerLayout {
    /// The experts' input
    pub h: ByteRange,
    pub acts: ByteRange,
    /// u32 [tokens, k]
    pub chosen: ByteRange,
    pub experts: ExpertLayout,
    pub lookup: LookupLayout,
    n_bytes: usize,
}

impl PeerLayout {
    /// For up to `n` tokens at once.
    pub fn new(hyper: &HyperParams, weights: &Weights, n: usize) -> PeerLayout {
        let mut bump = BumpLayout::default();
        let (k, n_experts) = (hyper.routing.k.max(1), hyper.routing.n_experts.max(1));
        let sizes = ExpertSizes::routed(weights, n * k);
        let width = expert_width(hyper, weights);
        let inputs = weights.layers.iter().filter_map(|layer| layer.ffn.as_ref());
        let acts = inputs.map(|ffn| acts_bytes(ffn.n_inputs(n, k), ffn.expert.n_embd));
        let layout = PeerLayout {
            h: bump.words(n_input_floats(weights, n, k)),
            acts: bump.bytes(acts.max().unwrap_or(0)),
            chosen: bump.words(n * k),
            experts: ExpertLayout::new(&sizes, n * k, width, &mut bump),
            lookup: LookupLayout::new(weights, n_experts, hyper.n_layers, &mut bump),
            n_bytes: 0,
        };
        PeerLayout { n_bytes: bump.n_bytes(), ..layout }
    }

    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }
}

pub struct PeerWorkspace {
    pub stream: Stream,
    pub workspace: Workspace,
    pub layout: PeerLayout,
    /// For uploads from the host.
    pub staging: Staging,
    pub to_peer: StagedCopy,
    pub to_first: StagedCopy,
}

impl PeerWorkspace {
    /// Allocates memory of the device `peer`.
    pub fn new(
        first: &Device,
        peer: &Device,
        hyper: &HyperParams,
        layout: PeerLayout,
    ) -> Result<PeerWorkspace> {
        let stream = Stream::urgent(peer)?;
        let workspace = Workspace::of(peer, layout.n_bytes())?;
        // Sums are returned for all pairs, also those that other devices compute; a look-up reads
        // the layer's number.
        for range in [&layout.experts.partial, &layout.lookup.pass] {
            stream.fill(workspace.slice(range), 0)?;
        }
        stream.synchronize()?;
        let ExpertLayout { granules, tiles, tokens, .. } = &layout.experts;
        let largest = [granules, &tiles[1], tokens].map(|range| range.len());
        let largest = largest.into_iter().max().unwrap_or(0);
        let staging = Staging::new(peer, STAGING_BYTES.max(largest), 0)?;
        let row = 4 * hyper.n_embd;
        let to_peer = StagedCopy::new(first, peer, layout.h.len() + layout.chosen.len() + row)?;
        let sums_bytes = layout.experts.partial.len().min(RETURN_BYTES.max(row));
        let to_first = StagedCopy::new(peer, first, sums_bytes)?;
        Ok(PeerWorkspace { stream, workspace, layout, staging, to_peer, to_first })
    }

    /// Copies the experts' input and the router's choice from the first device, and stores the
    /// input in the forms that experts read.
    pub fn begin(&mut self, ops: &Ops, routed: RoutedLayer) -> Result<()> {
        let PeerWorkspace { stream, workspace, layout, to_peer, .. } = self;
        let RoutedLayer { w, stream: from, h, chosen, .. } = routed;
        let to = |range: &ByteRange, len: usize| workspace.slice(range).slice(0..len);
        let h_here = to(&layout.h, h.len());
        let pieces = [(h, h_here), (chosen, to(&layout.chosen, chosen.len()))];
        to_peer.copy(from, stream, &pieces)?;
        let memory = workspace.slice(&layout.acts);
        let acts = GpuActs::fill(ops, stream, w.expert.inputs(), routed.shape(), h_here, memory)?;
        acts.with_halves(ops, stream, routed.halves, h_here, memory).map(drop)
    }
}

impl RoutedLayer<'_> {
    /// The shape of `h`.
    pub fn shape(&self) -> RowShape {
        let cols = self.w.expert.n_embd;
        RowShape { n: self.h.count::<f32>() / cols, cols }
    }
}
