//! States of the device's layers that a pass is asked for: at a mark a copy goes to the host.

use crate::Result;
use crate::forward::gpu::layers::GpuMixer;
use crate::forward::gpu::pass::{GpuPass, GpuSegment};

impl<'a> GpuPass<'a> {
    /// A segment's rows in parts that end at marks.
    pub fn parts_to_marks(&self, segment: &GpuSegment<'a>) -> Vec<GpuSegment<'a>> {
        let host = &self.caches.host[segment.segment.session];
        let (mut parts, mut start) = (Vec::new(), segment.rows.start);
        while start < segment.rows.end {
            let n = host.n_to_mark(n_past(segment, start)).min(segment.rows.end - start);
            parts.push(GpuSegment { rows: start..start + n, ..segment.clone() });
            start += n;
        }
        parts
    }

    /// Copies the state of layer `l`, which has computed the segment's rows up to `end`, if it was
    /// asked for. Layers do so in their order, those on the CPU before these.
    pub fn note_state(&mut self, l: usize, segment: &GpuSegment<'a>, end: usize) -> Result<()> {
        let host = &mut self.caches.host[segment.segment.session];
        let Some(mark) = host.mark_at(n_past(segment, end)) else { return Ok(()) };
        self.state.staging.wait(&self.dev.stream)?;
        segment.cache.read_state(l, &mut mark.values)
    }

    /// Copies the states behind the segments' last rows, as far as they were asked for. All layers
    /// are computed.
    pub fn note_last_states(&mut self) -> Result<()> {
        let dev = self.dev;
        let has_state = |l: &usize| match &dev.layers[*l] {
            Some(layer) => matches!(layer.mixer, GpuMixer::Delta(_)),
            None => false,
        };
        for segment in self.segments() {
            for l in self.layers().filter(has_state) {
                self.note_state(l, &segment, segment.rows.end)?;
            }
        }
        Ok(())
    }
}

/// Positions of the segment's text before a row of the batch.
fn n_past(segment: &GpuSegment<'_>, row: usize) -> usize {
    segment.segment.past + row - segment.rows.start
}
