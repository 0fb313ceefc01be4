//! Whole-layer prefetch for prompts. A prompt that uses most experts of one layer uses most experts
//! of the next, so these are queued before the next layer's router runs. They come after the
//! current layer's own demand, whole, and take only link time and transit slots that are free; the
//! link goes on while the next layer's attention is computed. So at most two layers have loads
//! under way, and nothing leaves the working set for them: double buffering that is read-only
//! towards decode. Where a prompt acquires a layer's experts in parts, the layer prefetch goes on
//! with those of the later parts.

use super::State;
use crate::experts::tier::residency::Entry;

/// Certainty: before whatever a policy predicts.
pub(super) const URGENCY: f32 = f32::INFINITY;

#[derive(Debug, Default)]
pub(super) struct LayerPrefetch {
    layer: Option<u32>,
    /// By expert of the layer.
    is_wanted: Vec<bool>,
    /// Experts of the layer without a queued load yet, the next one last.
    left: Vec<u32>,
}

impl State {
    /// Queues the experts of a layer for which `is_wanted` holds. Replaces the layer prefetch
    /// before it.
    pub fn prefetch_layer(&mut self, layer: usize, is_wanted: &dyn Fn(u32) -> bool) {
        self.replace_layer_prefetch(Some(layer), is_wanted);
        self.queue_layer_prefetch();
    }

    /// Gives up the layer prefetch, and what came by it and was not used.
    pub fn cancel_layer_prefetch(&mut self) {
        self.replace_layer_prefetch(None, &|_| false);
    }

    /// Gives up what the layer prefetch wanted and does not want any more.
    fn replace_layer_prefetch(&mut self, layer: Option<usize>, is_wanted: &dyn Fn(u32) -> bool) {
        let experts = layer.map_or(0..0, |layer| self.experts_of(layer));
        let LayerPrefetch { layer: of_layer, is_wanted: wanted, left } = &mut self.layer_prefetch;
        let before = std::mem::replace(of_layer, layer.map(|layer| layer as u32));
        wanted.clear();
        wanted.extend(experts.clone().map(|e| is_wanted(self.table.get(e).id.expert)));
        left.clear();
        left.extend(experts.zip(&*wanted).rev().filter_map(|(e, is)| is.then_some(e)));
        if let Some(before) = before {
            self.drop_unused(before as usize);
        }
    }

    pub(super) fn is_in_layer_prefetch(&self, entry: &Entry) -> bool {
        let LayerPrefetch { layer, is_wanted, .. } = &self.layer_prefetch;
        *layer == Some(entry.id.layer) && is_wanted[entry.id.expert as usize]
    }

    /// Queues loads of the layer prefetch in its order, until it needs slots that a demand waits
    /// for.
    pub(super) fn queue_layer_prefetch(&mut self) {
        while self.n_lacking_slots == 0
            && let Some(e) = self.layer_prefetch.left.last().copied()
        {
            let entry = self.table.get(e);
            // A pinned expert's demand loads the rest of it.
            let (load, is_wanted) = (entry.load, !entry.is_whole() && entry.pins == 0);
            match load {
                _ if !is_wanted => {}
                Some(load) => self.queue.reprioritise(load, URGENCY),
                None if self.start_prefetch(e, URGENCY) => {}
                None => return,
            }
            self.layer_prefetch.left.pop();
        }
    }

    /// A prompt has reached a layer and pinned the experts that it computes now; it will use
    /// `later` as well. Prefetches of the others are useless from here on.
    pub(super) fn on_prompt_layer(&mut self, layer: usize, later: &[u32]) {
        if !later.is_empty() {
            self.replace_layer_prefetch(Some(layer), &|expert| later.contains(&expert));
        } else if self.layer_prefetch.layer == Some(layer as u32) {
            self.cancel_layer_prefetch();
        }
        self.drop_stale_prefetches(layer);
    }

    /// Drops what came or is coming for a layer and was neither used nor named by the latest
    /// predictions: its slots in transit are worth more.
    fn drop_unused(&mut self, layer: usize) {
        for e in self.experts_of(layer) {
            let entry = self.table.get(e);
            if self.table.is_pinned(e) || self.prefetch_priority(entry).is_some() {
                continue;
            }
            match entry.load {
                Some(load) if self.loads[load as usize].outlives_predictions() => {}
                Some(load) => self.stop(load),
                None if entry.unused_bytes > 0 => self.drop_transit(e),
                None => {}
            }
        }
    }

    /// Panics if a queued prefetch has no reason.
    pub(super) fn check_prefetches(&self) {
        for load in self.queue.prefetches() {
            let load = &self.loads[load as usize];
            let is_wanted = self.prefetch_priority(self.table.get(load.expert)).is_some();
            assert!(is_wanted || load.outlives_predictions(), "a prefetch without a reason");
        }
        for e in &self.layer_prefetch.left {
            assert!(self.is_in_layer_prefetch(self.table.get(*e)));
        }
    }
}
