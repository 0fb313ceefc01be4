//! Experts that were used elsewhere and are worth keeping here the next time: they come when the
//! link has nothing else to do, and only in the place of what is worth less.

use super::State;
use crate::experts::acquisition::Access;
use crate::experts::tier::class::Role;
use crate::experts::tier::queue::Cause;

/// Loads of this kind at a time: their slots are empty until the link has come to them.
const LOADS_MAX: usize = 2;

/// After whatever is predicted.
const PRIORITY: f32 = 0.0;

impl State {
    /// Queues loads of the layer's `experts` as far as they lack granules, nothing brings them and
    /// the eviction holds them to be worth more than what would leave.
    pub fn admit(&mut self, layer: usize, experts: &[u32]) {
        let mut n_loads = self.loads.iter().filter(|(_, load)| load.is_admission()).count();
        for expert in experts {
            let e = self.index(layer, *expert);
            let entry = self.table.get(e);
            let is_wanted = entry.pins == 0 && entry.load.is_none() && !entry.is_whole();
            if n_loads < LOADS_MAX && is_wanted && self.is_worth_room(e) {
                let access = Access::Upload { keep: true };
                n_loads += usize::from(self.start_load(e, Cause::Prefetch, access, PRIORITY));
            }
        }
    }

    fn is_worth_room(&self, e: u32) -> bool {
        let entry = self.table.get(e);
        if self.classes[entry.class].free(Role::Working) >= entry.n_granules - entry.held {
            return true;
        }
        let priority = |e: u32| self.eviction.priority(self.table.get(e).id);
        self.working_victim(entry.class, None).is_some_and(|victim| priority(victim) < priority(e))
    }
}
