//! Predictions: their prefetches are queued, moved and dropped. Predictions are a complete
//! statement of the moment they were made; an expert that the latest ones name is protected in
//! transit until it is used or named no more (MoE-Infinity, section 5.2).

use super::State;
use super::layer_prefetch::URGENCY;
use crate::experts::acquisition::Access;
use crate::experts::tier::queue::{Cause, LoadId};
use crate::experts::tier::residency::Entry;
use crate::policy::{Expert, Prediction};

impl State {
    /// Layers' decode steps so far: what a prediction is as old as.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Queues prefetches, most urgent first, as far as transit has room, and gives up those that
    /// are predicted no more. The predictions are as old as `step`: layers that have come by
    /// since are past.
    pub fn prefetch(&mut self, predictions: &[Prediction], step: u64) {
        self.prediction_round += 1;
        let ahead = |p: &&Prediction| self.last_step[p.expert.layer as usize] <= step;
        let predictions: Vec<Prediction> = predictions.iter().filter(ahead).copied().collect();
        for Prediction { expert, priority } in &predictions {
            let e = self.table.index(*expert);
            let entry = self.table.get_mut(e);
            (entry.prediction_round, entry.predicted_priority) = (self.prediction_round, *priority);
        }
        self.drop_unpredicted();
        let mut full = vec![false; self.classes.len()];
        for Prediction { expert, priority } in predictions {
            let e = self.table.index(expert);
            let entry = self.table.get(e);
            let class = entry.class;
            // The work that has pinned it brings the rest of it, as demand; experts that the tier
            // above has are not asked for here.
            let is_here = entry.is_whole() || self.upper.has(expert);
            if is_here || entry.pins > 0 || full[class] {
                continue;
            }
            match entry.load {
                Some(_) if self.is_in_layer_prefetch(entry) => {}
                Some(load) => self.queue.reprioritise(load, priority),
                None => full[class] = !self.start_prefetch(e, priority),
            }
        }
    }

    /// Whether a demand waits for an expert, or will.
    pub fn is_demanded(&self, expert: Expert) -> bool {
        let load = self.table.get(self.table.index(expert)).load;
        load.is_some_and(|load| self.loads[load as usize].cause == Cause::Demand)
    }

    /// Whether an expert is neither in memory, here or in the tier above, nor on its way.
    pub fn lacks(&self, expert: Expert) -> bool {
        let entry = self.table.get(self.table.index(expert));
        !entry.is_whole() && entry.load.is_none() && !self.upper.has(expert)
    }

    /// The priority of an expert in the layer prefetch or the latest predictions, if they name it.
    pub(super) fn prefetch_priority(&self, entry: &Entry) -> Option<f32> {
        let predicted =
            (entry.prediction_round == self.prediction_round).then_some(entry.predicted_priority);
        if self.is_in_layer_prefetch(entry) { Some(URGENCY) } else { predicted }
    }

    fn drop_unpredicted(&mut self) {
        let is_unpredicted = |load: &LoadId| {
            let load = &self.loads[*load as usize];
            !load.outlives_predictions()
                && self.prefetch_priority(self.table.get(load.expert)).is_none()
        };
        let unpredicted: Vec<LoadId> = self.queue.prefetches().filter(is_unpredicted).collect();
        for load in unpredicted {
            self.stop(load);
        }
    }

    pub(super) fn start_prefetch(&mut self, e: u32, priority: f32) -> bool {
        self.start_load(e, Cause::Prefetch, Access::Prompt, priority)
    }
}
