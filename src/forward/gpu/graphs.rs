//! Graphs of a decoded token. What runs before a layer's experts is the same for every token, but
//! for numbers in device memory, so it is captured once and costs the host one call from then on.

use crate::Result;
use crate::forward::gpu::pass::{GpuPass, GpuSegment};

impl<'a> GpuPass<'a> {
    /// The decoded token's text.
    pub fn decoded(&self) -> GpuSegment<'a> {
        self.segments().next().expect("a batch of one row")
    }

    /// The numbers of positions that a graph is captured for: of the text and of the source text.
    pub fn graph_key(&self) -> [usize; 2] {
        let segment = self.decoded();
        [self.max_seen(&segment), self.max_source(&segment)]
    }

    /// Runs the graph of what is before the layer's experts.
    pub fn replay(&self, l: usize) -> Result<()> {
        let graph = self.decoded().cache.graph(self.cache_slots(l).own);
        let (_, graph) = graph.as_ref().expect("captured before the first layer");
        // SAFETY: the graph uses memory of this cache, which owns the graph, of the device's model
        // and of its pipeline slots. The session that owns the cache keeps the latter two alive.
        unsafe { self.stream().run(graph) }
    }
}
