//! Graphs of steps of decode. The stages before a layer's experts are the same for every step of
//! the same texts, but for numbers in device memory, so they are captured once and cost the host
//! one call from then on. A text's cache has the graphs for steps of one row of it. Those of
//! several rows are kept for the steps that came last.

use crate::Result;
use crate::forward::gpu::pass::{GpuPass, GpuSegment};
use crate::forward::gpu::steps::StepText;

impl<'a> GpuPass<'a> {
    /// The decoded token's text.
    pub fn decoded(&self) -> GpuSegment<'a> {
        self.segments().next().expect("a batch of one row")
    }

    /// The numbers of positions that the graphs of one row are captured for: of the text and of the
    /// source text.
    pub fn graph_key(&self) -> [usize; 2] {
        let segment = self.decoded();
        [self.max_seen(&segment), self.max_source(&segment)]
    }

    /// The texts that the graphs of a step of several rows depend on.
    pub fn step_texts(&self) -> Vec<StepText> {
        let text = |segment: GpuSegment| StepText {
            cache: segment.cache.id(),
            n_rows: segment.n(),
            max_seen: self.max_seen(&segment),
        };
        self.segments().map(text).collect()
    }

    /// Runs the graph of what is before the layer's experts. Returns whether there is one.
    pub fn replay(&mut self, l: usize) -> Result<bool> {
        if self.is_decode() {
            let graph = self.decoded().cache.graph(self.cache_slots(l).own);
            let (_, graph) = graph.as_ref().expect("captured before the first layer");
            // SAFETY: the graph uses memory of this cache, which owns the graph, of the device's
            // model and of its pipeline slots. The session that owns the cache keeps the latter two
            // alive.
            unsafe { self.stream().run(graph)? };
            self.state.graph_counts.n_launches += 1;
            return Ok(true);
        }
        // A step in this one's rests may have taken its graphs' place.
        let Some(graph) = self.state.steps.graph(&self.step_texts(), l) else { return Ok(false) };
        // SAFETY: the graph uses memory of the device's model, and of the caches with these ids,
        // which are those of this pass's texts: no id is given twice.
        unsafe { self.stream().run(graph)? };
        self.state.graph_counts.n_runs += 1;
        self.state.graph_counts.n_launches += 1;
        Ok(true)
    }
}
