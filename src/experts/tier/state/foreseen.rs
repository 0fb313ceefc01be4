//! What a prompt wants next. Where its tokens have chosen most of a layer's experts they will
//! choose most of the next layer's too, so these are known before that layer's router has spoken.
//! They come behind the layer's own demand, whole, by what link and transit have to spare, and the
//! link goes on working while the next layer's attention is computed. Of two layers at most
//! something is on its way then, and nothing leaves the working set for it: double buffers,
//! read-only towards decode.

use super::State;
use crate::experts::tier::residency::Entry;

/// As good as known: before whatever is predicted.
pub(super) const URGENCY: f32 = f32::INFINITY;

#[derive(Debug, Default)]
pub(super) struct Foreseen {
    layer: Option<u32>,
    /// Those of its experts of which no load has been queued yet, the next one last.
    left: Vec<u32>,
}

impl State {
    /// The prompt that is being computed will want a layer's experts next, those that `is_wanted`
    /// says; `None`: nothing that could be told. This replaces what was told before.
    pub fn foresee(&mut self, layer: Option<usize>, is_wanted: &dyn Fn(u32) -> bool) {
        if let Some(layer) = self.foreseen.layer.take() {
            self.foreseen.left.clear();
            self.drop_unused(layer as usize);
        }
        if let Some(layer) = layer {
            self.foreseen.layer = Some(layer as u32);
            let all = self.experts_of(layer).rev();
            let wanted = all.filter(|e| is_wanted(self.table.get(*e).id.expert));
            self.foreseen.left.extend(wanted);
            self.bring_foreseen();
        }
    }

    /// Whether it is told to be wanted next.
    pub(super) fn is_foreseen(&self, entry: &Entry) -> bool {
        self.foreseen.layer == Some(entry.id.layer)
    }

    /// Queues what is foreseen in its order, as far as there is room that no demand waits for.
    pub(super) fn bring_foreseen(&mut self) {
        while self.n_short == 0
            && let Some(e) = self.foreseen.left.last().copied()
        {
            let entry = self.table.get(e);
            // Who has pinned it brings the rest of it, as demand.
            let (load, is_wanted) = (entry.load, !entry.is_whole() && entry.pins == 0);
            match load {
                _ if !is_wanted => {}
                Some(load) => self.queue.reprioritise(load, URGENCY),
                None if self.start_prefetch(e, URGENCY) => {}
                None => return,
            }
            self.foreseen.left.pop();
        }
    }

    /// A prompt has come to a layer and pinned what it wants of it: the rest of what was foreseen
    /// was so in vain.
    pub(super) fn meet(&mut self, layer: usize) {
        if self.foreseen.layer == Some(layer as u32) {
            self.foresee(None, &|_| false);
        }
        self.drop_stale_prefetches(layer);
    }

    /// What came for a layer, or is on its way, and neither anybody has asked for nor the latest
    /// predictions name: its room in transit is worth more.
    fn drop_unused(&mut self, layer: usize) {
        for e in self.experts_of(layer) {
            let entry = self.table.get(e);
            if entry.pins > 0 || self.foretold(entry).is_some() {
                continue;
            }
            match entry.load {
                Some(load) if self.loads[load as usize].is_admission() => {}
                Some(load) => self.stop(load),
                None if entry.unused_bytes > 0 => self.drop_transit(e),
                None => {}
            }
        }
    }

    /// Panics if more is on its way than somebody wants or foretells.
    pub(super) fn check_foreseen(&self) {
        for load in self.queue.prefetches() {
            let load = &self.loads[load as usize];
            let is_wanted = self.foretold(self.table.get(load.expert)).is_some();
            assert!(is_wanted || load.is_admission(), "a prefetch for nobody");
        }
        for e in &self.foreseen.left {
            assert!(self.is_foreseen(self.table.get(*e)));
        }
    }
}
