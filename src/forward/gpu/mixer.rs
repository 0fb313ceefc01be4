//! The trait of a layer's mixer on a device.

use crate::Result;
use crate::forward::gpu::pack::OnDevice;
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::weights::GpuLinear;
use crate::model::hyper::HyperParams;
use crate::model::weights::{Mixer, any_mixer};

/// A mixer on a device: weights of one kind.
pub trait GpuMixer {
    /// x → y, or added to x: see `GpuPass::mixer_residual`.
    fn mix(&self, cx: &mut GpuPass, l: usize) -> Result<()>;

    /// The projection that comes last, if it comes in one part.
    fn output(&self) -> Option<&GpuLinear>;

    /// The place of the cache with its state of a text, if it is layer `l` and has one.
    fn state_slot(&self, _hyper: &HyperParams, l: usize) -> Option<usize> {
        Some(l)
    }
}

/// `None` for a layer that has a feed-forward part only.
pub fn on_device(mixer: &Mixer<OnDevice>) -> Option<&dyn GpuMixer> {
    any_mixer!(mixer)
}
