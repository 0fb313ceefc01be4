//! Where a peer computes a layer's experts: a stream, buffers, and the ways from the first device
//! and back.

use super::super::acts::{GpuActs, room_bytes};
use super::super::ops::Ops;
use super::Routed;
use crate::Result;
use crate::backend::gpu::{Device, Stream};
use crate::forward::gpu::expert_parallel::staged_copy::StagedCopy;
use crate::forward::gpu::upload::Staging;
use crate::forward::gpu::workspace::{
    BumpLayout, ByteRange, ExpertLayout, ExpertSizes, LookupLayout, Workspace,
};
use crate::gguf::TensorType;
use crate::model::hyper::HyperParams;
use crate::model::weights::Weights;

/// What comes back at once; longer prompts' sums come in parts.
const BACK_BYTES: usize = 4 << 20;
/// Tables of granules go up through this, or as much as the largest one takes.
const STAGING_BYTES: usize = 256 << 10;

#[derive(Clone, Default)]
pub struct PeerLayout {
    /// f32 [tokens, n_embd]
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
        let layout = PeerLayout {
            h: bump.words(n * hyper.n_embd),
            acts: bump.bytes(room_bytes(n, hyper.n_embd)),
            chosen: bump.words(n * k),
            experts: ExpertLayout::new(&sizes, n * k, hyper.n_embd, &mut bump),
            lookup: LookupLayout::new(weights, n_experts, 1, &mut bump),
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
    /// For what the host sends up.
    pub staging: Staging,
    pub to_peer: StagedCopy,
    pub to_first: StagedCopy,
}

impl PeerWorkspace {
    pub fn new(
        (first, gpu): (&Device, &Device),
        hyper: &HyperParams,
        layout: PeerLayout,
    ) -> Result<PeerWorkspace> {
        let stream = Stream::urgent(gpu)?;
        let workspace = Workspace::of(gpu, layout.n_bytes())?;
        // Rows come back whole, also of pairs that others compute; a look-up reads its number.
        for place in [&layout.experts.partial, &layout.lookup.pass] {
            stream.fill(workspace.slice(place), 0)?;
        }
        stream.synchronize()?;
        let largest = layout.experts.granules.len().max(layout.experts.tokens.len());
        let staging = Staging::new(gpu, STAGING_BYTES.max(largest), 0)?;
        let row = 4 * hyper.n_embd;
        let to_peer = StagedCopy::new(first, gpu, layout.h.len() + layout.chosen.len() + row)?;
        let to_first =
            StagedCopy::new(gpu, first, layout.experts.partial.len().min(BACK_BYTES.max(row)))?;
        Ok(PeerWorkspace { stream, workspace, layout, staging, to_peer, to_first })
    }

    /// What the router saw and chose comes from the first device, and is stored as `types` read it.
    pub fn begin(
        &mut self,
        ops: &Ops,
        routed: Routed,
        types: impl IntoIterator<Item = TensorType>,
        shape: (usize, usize),
    ) -> Result<()> {
        let PeerWorkspace { stream, workspace, layout, to_peer, .. } = self;
        let Routed { stream: from, h, chosen } = routed;
        let to = |place: &ByteRange, len: usize| workspace.slice(place).slice(0..len);
        let h_here = to(&layout.h, h.len());
        to_peer.carry(from, stream, &[(h, h_here), (chosen, to(&layout.chosen, chosen.len()))])?;
        GpuActs::fill(ops, stream, types, shape, h_here, workspace.slice(&layout.acts)).map(drop)
    }
}
