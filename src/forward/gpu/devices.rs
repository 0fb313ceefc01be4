//! A model's devices between two passes, or between two layers of one.

use crate::cancel::Cancel;
use crate::forward::gpu::device_model::DeviceModel;
use crate::forward::gpu::pass::PassState;

/// A model's devices, for one pass at a time. A pass that lends them between two layers keeps what
/// is its own: `WorkspaceLayout::kept`, its caches and its buffers on the host.
pub struct Devices<'d> {
    pub dev: &'d DeviceModel,
    pub state: &'d mut PassState,
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
