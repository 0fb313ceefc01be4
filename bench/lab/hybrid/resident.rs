//! Which experts the GPU keeps.

use std::collections::{BTreeMap, BTreeSet};

/// MoE layer, expert.
pub type Id = (usize, u32);

/// How it is decided.
#[derive(Clone, Debug, PartialEq)]
pub enum Keep {
    /// The most used of [MoE layers][experts], fixed: PreScope's hot-expert table (4.1).
    Hot(Vec<Vec<u32>>),
    /// Any, fixed, drawn from a seed: what PreScope's ablation compares the table with.
    Random(u64),
    /// The experts that were used last. Uploaded experts stay.
    Lru,
}

/// A set of at most `room` experts.
#[derive(Clone, Debug)]
pub struct Resident {
    room: usize,
    /// When each was used last; 0 where that does not count.
    last: BTreeMap<Id, u64>,
    is_fixed: bool,
    n_uses: u64,
}

impl Resident {
    pub fn new(keep: &Keep, n_experts: &[usize], room: usize) -> Resident {
        let all =
            || n_experts.iter().enumerate().flat_map(|(l, n)| (0..*n as u32).map(move |e| (l, e)));
        let mut order: Vec<(u64, Id)> = match keep {
            Keep::Hot(counts) => {
                all().map(|id| (u64::from(u32::MAX - counts[id.0][id.1 as usize]), id)).collect()
            }
            Keep::Random(seed) => {
                let draw =
                    |id: &Id| moeba::policy::mix(seed ^ ((id.0 as u64) << 32 | u64::from(id.1)));
                all().map(|id| (draw(&id), id)).collect()
            }
            Keep::Lru => Vec::new(),
        };
        order.sort_unstable();
        let last = order.into_iter().take(room).map(|(_, id)| (id, 0)).collect();
        Resident { room, last, is_fixed: *keep != Keep::Lru, n_uses: 0 }
    }

    pub fn contains(&self, id: &Id) -> bool {
        self.last.contains_key(id)
    }

    /// The GPU has computed these of one layer; what it had not before is kept if there is room
    /// beside what the layer uses.
    pub fn used(&mut self, experts: &BTreeSet<Id>) {
        if self.is_fixed {
            return;
        }
        self.n_uses += 1;
        experts.iter().for_each(|id| _ = self.last.insert(*id, self.n_uses));
        while self.last.len() > self.room {
            let oldest = self.last.iter().min_by_key(|(id, last)| (**last, **id));
            let oldest = *oldest.expect("more than there is room for").0;
            self.last.remove(&oldest);
        }
    }
}
