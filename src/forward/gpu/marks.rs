//! States of the device's layers that a pass is asked for: at a mark a copy goes to the host.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::forward::gpu::layers::GpuLayer;
use crate::forward::gpu::mixer::on_device;
use crate::forward::gpu::pass::{GpuPass, GpuSegment};
use crate::model::hyper::HyperParams;

impl<'a> GpuPass<'a> {
    /// Calls `part` for each text's rows in their order, cut where a copy of the state in place `l`
    /// is wanted, with its past inputs and its state. Makes the copies.
    pub fn over_states(
        &mut self,
        l: usize,
        mut part: impl FnMut(&GpuSegment<'a>, [DeviceSlice<'a>; 2]) -> Result<()>,
    ) -> Result<()> {
        for segment in self.segments() {
            let state = segment.cache.state(l);
            for own in self.parts_to_marks(&segment) {
                part(&own, state)?;
                if own.rows.end < segment.rows.end {
                    self.note_state(l, &segment, own.rows.end)?;
                }
            }
        }
        Ok(())
    }

    /// A segment's rows in parts that end at marks.
    fn parts_to_marks(&self, segment: &GpuSegment<'a>) -> Vec<GpuSegment<'a>> {
        let host = &self.caches.host[segment.segment.session];
        let (mut parts, mut start) = (Vec::new(), segment.rows.start);
        while start < segment.rows.end {
            let n = host.n_to_mark(n_past(segment, start)).min(segment.rows.end - start);
            parts.push(GpuSegment { rows: start..start + n, ..segment.clone() });
            start += n;
        }
        parts
    }

    /// Copies the state of a place of the cache, whose layer has computed the segment's rows up to
    /// `end`, if it was asked for. Layers do so in their order; the CPU's values stand before
    /// theirs, which are in the order of the places.
    fn note_state(&mut self, l: usize, segment: &GpuSegment<'a>, end: usize) -> Result<()> {
        let host = &mut self.caches.host[segment.segment.session];
        let Some(mark) = host.mark_at(n_past(segment, end)) else { return Ok(()) };
        self.state.staging.wait(&self.dev.stream)?;
        let mut own = Vec::new();
        segment.cache.read_state(l, &mut own)?;
        let hyper = &self.model.hyper;
        let layer = hyper.layer_of_slot(l);
        let is_behind = |slot: usize| slot > l && hyper.layer_of_slot(slot) <= layer;
        let at = mark.values.len() - segment.cache.n_values_of(is_behind);
        mark.values.splice(at..at, own);
        Ok(())
    }

    /// Copies the states behind the segments' last rows, as far as they were asked for. All layers
    /// are computed.
    pub fn note_last_states(&mut self) -> Result<()> {
        let dev = self.dev;
        let hyper = self.hyper();
        let of_layer =
            |l: usize| dev.layers[l].iter().flat_map(move |layer| state_slots(layer, hyper, l));
        for segment in self.segments() {
            for slot in self.layers().flat_map(of_layer) {
                self.note_state(slot, &segment, segment.rows.end)?;
            }
        }
        Ok(())
    }
}

/// Positions of the segment's text before a row of the batch.
fn n_past(segment: &GpuSegment<'_>, row: usize) -> usize {
    segment.segment.past + row - segment.rows.start
}

/// Places of the cache with states of layer `l`, in the order in which they are computed.
fn state_slots(layer: &GpuLayer, hyper: &HyperParams, l: usize) -> impl Iterator<Item = usize> {
    let of_ngrams = layer.ngrams.is_some().then(|| hyper.ngram_slot(l));
    let of_mixer = on_device(&layer.mixer).and_then(|mixer| mixer.state_slot(hyper, l));
    of_ngrams.into_iter().chain(of_mixer)
}
