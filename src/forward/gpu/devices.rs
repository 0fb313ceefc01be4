//! A model's devices: what passes keep there, and how one pass lends them to another.

use crate::Result;
use crate::cancel::Cancel;
use crate::forward::Rests;
use crate::forward::gpu::decode_pipeline::queue::DecodePipeline;
use crate::forward::gpu::device_model::DeviceModel;
use crate::forward::gpu::device_moe::route::RouteDownload;
use crate::forward::gpu::expert_parallel::peer::Peer;
use crate::forward::gpu::hybrid_moe::division::HybridMoe;
use crate::forward::gpu::steps::{GraphCounts, Steps};
use crate::forward::gpu::upload::Staging;

/// State that passes change and keep from one to the next, beside the device's memory.
pub struct PassState {
    /// Declared before the other fields, so that peers finish before what they work with is freed.
    pub peers: Vec<Peer>,
    pub staging: Staging,
    pub hybrid: HybridMoe,
    pub pipeline: DecodePipeline,
    pub route: RouteDownload,
    pub steps: Steps,
    pub graph_counts: GraphCounts,
}

/// A model's devices, for one pass at a time. A pass that lends them between two layers keeps what
/// is its own: `WorkspaceLayout::kept`, its caches and its buffers on the host.
pub struct Devices<'d> {
    pub dev: &'d DeviceModel,
    pub state: &'d mut PassState,
}

/// Rests of a pass on devices, which other passes may use meanwhile.
pub trait DeviceRests: Rests {
    /// Called before layer `l` instead of [`Rests::layer`]. An error ends the pass.
    fn layer_on(&mut self, l: usize, _devices: Devices<'_>) -> Result<()> {
        self.layer(l)
    }

    /// Whether `layer_on` may let other passes use the devices.
    fn lends_devices(&self) -> bool {
        false
    }
}

impl Devices<'_> {
    /// Lends the devices for one pass.
    pub fn again(&mut self) -> Devices<'_> {
        Devices { dev: self.dev, state: self.state }
    }

    /// From the next pass on, waits for experts end once `cancel` is set.
    pub(crate) fn set_cancel(&mut self, cancel: &Cancel) {
        self.state.hybrid.set_cancel(cancel);
    }

    /// Goes on with a pass that had lent the devices: waits end once `cancel` is set, and the time
    /// of others is not that of its attention.
    pub(crate) fn resume(&mut self, cancel: &Cancel) {
        self.set_cancel(cancel);
        self.state.hybrid.placer.attention.reset();
    }

    /// The token that ends waits for experts.
    pub(crate) fn cancel(&self) -> Cancel {
        self.state.hybrid.cancel()
    }
}
