//! The host's view of a layer's routing, for policies, recorders and its own share of the work.

use crate::Result;
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::upload::floats;

impl GpuPass<'_> {
    /// Passes a dense layer's input to the recorder, if there is one.
    pub fn record_dense(&mut self, l: usize) -> Result<()> {
        if !self.is_recorded() {
            return Ok(());
        }
        self.finish_pending()?;
        let (stream, h, n) = (self.stream(), self.h(), self.n());
        self.b.ffn.route.dense(n, 1.0);
        let to = &mut self.b.h;
        self.state.staging.download(stream, &[h], &mut |_, bytes| floats(bytes, to))?;
        self.model.record_routed(self.cpu, self.batch, l, &mut self.b.routing(), self.outputs);
        Ok(())
    }

    /// Downloads the route into `b.ffn.route`, and what policies and recorders want besides, and
    /// tells them.
    pub fn download_route(&mut self, l: usize) -> Result<()> {
        self.finish_pending()?;
        self.state.graph_counts.n_read_first += 1;
        let (stream, route_parts) = (self.stream(), self.route_parts());
        // Rows of decode come first, and policies want no others.
        let n = match self.batch.decode_rows().len() {
            _ if self.is_recorded() => self.n(),
            n if self.b.events.want_activation() => n,
            _ => 0,
        };
        let mut parts = vec![self.route_bytes()];
        if n > 0 {
            let bytes = 0..4 * n * self.hyper().n_embd;
            parts.extend([self.h(), self.x()].map(|all| all.slice(bytes.clone())));
        }
        let b = &mut *self.b;
        self.state.staging.download(stream, &parts, &mut |i, bytes| match i {
            0 => route_parts.read(bytes, &mut b.ffn.route),
            1 => floats(bytes, &mut b.h),
            _ => floats(bytes, &mut b.x),
        })?;
        let tiers = self.tiers(l);
        self.state.hybrid.end_attention(tiers);
        self.model.record_routed(self.cpu, self.batch, l, &mut self.b.routing(), self.outputs);
        self.model.publish_routed(self.cpu, self.batch, l, &mut self.b.routing());
        Ok(())
    }
}
