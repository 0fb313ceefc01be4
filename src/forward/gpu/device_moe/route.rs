//! The way of a layer's route to the host, beside the experts that the device computes.

use crate::Result;
use crate::backend::gpu::{Device, DeviceSlice, Event, Pinned, PinnedKind, Stream};
use crate::experts::vram::Fence;
use crate::forward::gpu::upload::starts;
use crate::forward::gpu::workspace::RouteParts;
use crate::model::hyper::HyperParams;

/// The most rows of which policies get what the router saw.
pub const MAX_ACTIVATIONS: usize = 64;

/// The way of a layer's route to the host.
pub struct RouteDownload {
    pub pending: Option<PendingRoute>,
    /// The route, and rows of h and of the residual stream.
    pub memory: Pinned,
    /// Its copies run beside the experts.
    stream: Stream,
    pub copied: Event,
}

/// A layer that is queued and whose route the host has not read.
pub struct PendingRoute {
    pub l: usize,
    /// Bytes of each part.
    pub sizes: Vec<usize>,
    /// Behind the layer's sum.
    pub end: Fence,
}

impl RouteDownload {
    /// For micro-batches of up to `n` tokens.
    pub fn new(gpu: &Device, hyper: &HyperParams, n: usize) -> Result<RouteDownload> {
        let route = RouteParts::new(n, hyper.routing.k, hyper.routing.n_experts).n_bytes();
        let rows = 8 * n.min(MAX_ACTIVATIONS) * hyper.n_embd;
        let (kind, what) = (PinnedKind::Cached, "a micro-batch (-ub)");
        let memory = Pinned::of(gpu, route + rows + 256, kind, what)?;
        let (stream, copied) = (Stream::new(gpu)?, Event::new(gpu)?);
        Ok(RouteDownload { pending: None, memory, stream, copied })
    }

    /// Queues the copies of `parts` beside `stream`.
    pub fn send(&mut self, stream: &Stream, parts: &[DeviceSlice]) -> Result<Vec<usize>> {
        let sizes: Vec<usize> = parts.iter().map(|part| part.len()).collect();
        stream.then(&self.stream)?;
        for (part, at) in parts.iter().zip(starts(&sizes)) {
            assert!(at + part.len() <= self.memory.len(), "{} bytes to download", part.len());
            // SAFETY: the part fits the memory, by the assertion, and the host has read what was
            // copied there before.
            unsafe { self.stream.download(self.memory.as_ptr().add(at), *part)? };
        }
        self.stream.record(&self.copied)?;
        Ok(sizes)
    }
}
