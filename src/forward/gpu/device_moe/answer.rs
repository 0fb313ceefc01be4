//! The host's part in a layer that the device has grouped: it reads the route and counts.

use crate::Result;
use crate::forward::gpu::device_moe::route::PendingRoute;
use crate::forward::gpu::devices::PassState;
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::upload::{floats, starts};

impl GpuPass<'_> {
    /// Rows of which policies get what the router saw. They are the first ones.
    pub fn n_activations(&self) -> usize {
        match self.b.events.want_activation() {
            true => self.batch.decode_rows().len(),
            false => 0,
        }
    }

    /// Queues the download of what `answer_grouped` reads. Returns the sizes of the parts.
    pub fn send_route(&mut self) -> Result<Vec<usize>> {
        let (stream, mut parts) = (self.stream(), vec![self.route_bytes()]);
        let n = self.n_activations();
        if n > 0 {
            let bytes = 0..4 * n * self.hyper().n_embd;
            parts.extend([self.h(), self.x()].map(|all| all.slice(bytes.clone())));
        }
        self.state.route.send(stream, &parts)
    }

    /// Reads the route of the last layer that was grouped on the device, tells policies, counts the
    /// use of its experts and unpins them.
    pub fn answer_grouped(&mut self) -> Result<()> {
        let Some(PendingRoute { l, sizes, end }) = self.state.route.pending.take() else {
            return Ok(());
        };
        let (route_parts, b, download) = (self.route_parts(), &mut *self.b, &self.state.route);
        download.copied.synchronize_watched()?;
        for (i, (at, size)) in starts(&sizes).zip(&sizes).enumerate() {
            // SAFETY: the copies are done.
            let bytes = unsafe { download.memory.bytes(at..at + size) };
            match i {
                0 => route_parts.read(bytes, &mut b.ffn.route),
                1 => floats(bytes, &mut b.h),
                _ => floats(bytes, &mut b.x),
            }
        }
        let tiers = self.tiers(l).expect("experts in VRAM");
        self.state.hybrid.end_attention(Some(tiers));
        self.model.publish_routed(self.cpu, self.batch, l, &mut self.b.routing());
        let call = self.layer_call(l);
        let PassState { hybrid, pipeline, .. } = &mut *self.state;
        hybrid.plan(&call, self.b.ffn.route.chosen.iter().copied());
        hybrid.count_resident(&call, &end)?;
        pipeline.pinned.retain(|pinned| *pinned != l);
        tiers.unpin_layer(l, &[], Some(&end));
        hybrid.begin_attention();
        Ok(())
    }
}
