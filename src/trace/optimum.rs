//! Hits of caches that hold whole experts of all layers together, counted without a machine: what
//! the least recently used, and what the best with all of the future known, would find.
//!
//! The experts that a layer uses for a token are one event: all are looked up before any is brought
//! or dropped, and none of them leaves for another. Prompts leave such a cache as it is.

use super::Routing;
use crate::policy::Phase;
use std::collections::BTreeSet;

/// The experts of all decoded tokens, event by event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Uses {
    /// Experts of all layers.
    n_experts: usize,
    /// Experts, numbered through all layers.
    experts: Vec<usize>,
    /// The end of each event in `experts`.
    ends: Vec<usize>,
    /// For each of `experts` the next event that uses it.
    next: Vec<usize>,
}

const NEVER: usize = usize::MAX;

/// Shares of expert uses that find the expert in the cache, from an empty one on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hits {
    /// The least recently used leaves.
    pub lru: f64,
    /// The expert that is used last leaves, and what is used is kept until the next event (Belady,
    /// 1966).
    pub belady: f64,
    /// The future is known, and an expert that was used need not be kept: no cache of this size has
    /// more hits.
    pub optimum: f64,
}

impl Hits {
    /// The part that knowing the future adds to the least recently used.
    pub fn of_future(&self) -> f64 {
        self.belady - self.lru
    }

    /// The part that bypass adds to that.
    pub fn of_bypass(&self) -> f64 {
        self.optimum - self.belady
    }
}

impl Uses {
    /// All decode steps of a routing.
    pub fn of(routing: &dyn Routing) -> Uses {
        let mut uses = Uses::default();
        let starts: Vec<usize> = routing
            .n_experts()
            .iter()
            .map(|n_experts| {
                uses.n_experts += n_experts;
                uses.n_experts - n_experts
            })
            .collect();
        let mut chosen = Vec::new();
        let passes = (0..routing.n_requests()).flat_map(|request| routing.passes(request));
        for pass in passes.filter(|pass| pass.phase() == Phase::Decode) {
            for (layer, start) in starts.iter().enumerate() {
                if routing.n_experts()[layer] > 0 {
                    routing.chosen(pass.tokens.start, layer, &mut chosen);
                    uses.experts.extend(chosen.iter().map(|expert| start + *expert as usize));
                    uses.ends.push(uses.experts.len());
                }
            }
        }
        uses.next = uses.next_uses();
        uses
    }

    /// Uses of experts.
    pub fn n_uses(&self) -> usize {
        self.experts.len()
    }

    fn events(&self) -> impl DoubleEndedIterator<Item = std::ops::Range<usize>> + '_ {
        (0..self.ends.len()).map(|event| self.event(event))
    }

    fn event(&self, event: usize) -> std::ops::Range<usize> {
        event.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[event]
    }

    fn next_uses(&self) -> Vec<usize> {
        let mut of_expert = vec![NEVER; self.n_experts];
        let mut next = vec![NEVER; self.experts.len()];
        for event in (0..self.ends.len()).rev() {
            for at in self.event(event) {
                next[at] = std::mem::replace(&mut of_expert[self.experts[at]], event);
            }
        }
        next
    }

    /// With room for so many experts.
    pub fn hits(&self, capacity: usize) -> Hits {
        // Of an event's experts the best counts as used last.
        let recency =
            |at: usize, event: &std::ops::Range<usize>| NEVER - (event.start + event.end - 1 - at);
        let distance = |at: usize, _: &std::ops::Range<usize>| self.next[at];
        Hits {
            lru: self.share_of_hits(capacity, true, recency),
            belady: self.share_of_hits(capacity, true, distance),
            optimum: self.share_of_hits(capacity, false, distance),
        }
    }

    /// The expert with the highest key leaves; `keeps`: an event's own only if there is no other.
    fn share_of_hits(
        &self,
        capacity: usize,
        keeps: bool,
        key: impl Fn(usize, &std::ops::Range<usize>) -> usize,
    ) -> f64 {
        let mut keys: Vec<Option<usize>> = vec![None; self.n_experts];
        let mut resident = BTreeSet::new();
        let mut n_hits = 0;
        for event in self.events() {
            for at in event.clone() {
                let expert = self.experts[at];
                if let Some(key) = keys[expert].take() {
                    n_hits += 1;
                    resident.remove(&(key, expert));
                }
            }
            let room = if keeps { capacity.saturating_sub(event.len()) } else { NEVER };
            shrink(&mut resident, &mut keys, room);
            for at in event.clone() {
                let (expert, key) = (self.experts[at], key(at, &event));
                keys[expert] = Some(key);
                resident.insert((key, expert));
            }
            shrink(&mut resident, &mut keys, capacity);
        }
        n_hits as f64 / self.experts.len().max(1) as f64
    }
}

fn shrink(resident: &mut BTreeSet<(usize, usize)>, keys: &mut [Option<usize>], room: usize) {
    while resident.len() > room {
        let (_, expert) = resident.pop_last().expect("more than there is room for");
        keys[expert] = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events of one layer of `n_experts` experts.
    fn uses(n_experts: usize, events: &[&[usize]]) -> Uses {
        let mut uses = Uses { n_experts, ..Uses::default() };
        for event in events {
            uses.experts.extend(*event);
            uses.ends.push(uses.experts.len());
        }
        uses.next = uses.next_uses();
        uses
    }

    fn hits(uses: &Uses, capacity: usize) -> [f64; 3] {
        let Hits { lru, belady, optimum } = uses.hits(capacity);
        [lru, belady, optimum].map(|share| share * uses.experts.len() as f64)
    }

    /// By hand, with room for two and one expert an event, A B A C A B:
    /// least recently used: A and B are missed, A hits, C takes B's place, A hits, B is missed: 2.
    /// Belady: the same but C takes B's place, as A comes sooner; B is missed: 2. With bypass C is
    /// not kept, so that B hits, too: 3.
    #[test]
    fn bypass_is_told_from_knowing_the_future() {
        let uses = uses(3, &[&[0], &[1], &[0], &[2], &[0], &[1]]);
        assert_eq!(hits(&uses, 2), [2.0, 2.0, 3.0]);
        assert_eq!(hits(&uses, 1), [0.0, 0.0, 2.0]);
        assert_eq!(hits(&uses, 3), [3.0, 3.0, 3.0]);
    }

    /// By hand, with room for two, A B C A B C: recency misses all. With the future known C takes
    /// B's place, A hits, B takes A's place and C hits: 2; bypass adds nothing.
    #[test]
    fn a_loop_is_where_the_future_helps() {
        let uses = uses(3, &[&[0], &[1], &[2], &[0], &[1], &[2]]);
        assert_eq!(hits(&uses, 2), [0.0, 2.0, 2.0]);
    }

    /// By hand, with room for two, {A B} {C A} {A B}. One expert after the other, C would take the
    /// place of A, which is the oldest, before A is looked up, and A then that of B: the last A
    /// alone would hit. As events, A is looked up before C comes and stays for its event, so that
    /// both later uses of A hit: 2. With bypass B stays as well, and hits: 3.
    #[test]
    fn a_layers_experts_are_one_event() {
        assert_eq!(hits(&uses(3, &[&[0, 1], &[2, 0], &[0, 1]]), 2), [2.0, 2.0, 3.0]);
        let one_by_one: [&[usize]; 6] = [&[0], &[1], &[2], &[0], &[0], &[1]];
        assert_eq!(hits(&uses(3, &one_by_one), 2)[0], 1.0);
    }

    /// More experts in an event than there is room for: the best stays.
    #[test]
    fn an_event_may_be_larger_than_the_cache() {
        let uses = uses(2, &[&[0, 1], &[0, 1]]);
        assert_eq!(hits(&uses, 1), [1.0, 1.0, 1.0]);
        assert_eq!(hits(&uses, 0), [0.0; 3]);
    }

    /// The most hits that any choice of what to keep has.
    fn most(uses: &Uses, capacity: usize, event: usize, resident: &BTreeSet<usize>) -> usize {
        if event == uses.ends.len() {
            return 0;
        }
        let own = &uses.experts[uses.event(event)];
        let n_hits = own.iter().filter(|expert| resident.contains(expert)).count();
        let all: Vec<usize> =
            resident.iter().chain(own).copied().collect::<BTreeSet<_>>().into_iter().collect();
        let n_kept = all.len().min(capacity);
        let kept = (0..1_u32 << all.len()).filter(|set| set.count_ones() as usize == n_kept);
        let rest = kept.map(|set| {
            let kept = all.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1);
            most(uses, capacity, event + 1, &kept.map(|(_, expert)| *expert).collect())
        });
        n_hits + rest.max().unwrap_or(0)
    }

    #[test]
    fn nothing_has_more_hits_than_the_optimum() {
        for seed in 0..40_u64 {
            let draw = |i: u64, n: u64| (crate::policy::mix(seed * 100 + i) % n) as usize;
            let events: Vec<Vec<usize>> = (0..6)
                .map(|i| {
                    let first = draw(2 * i, 4);
                    vec![first, (first + 1 + draw(2 * i + 1, 3)) % 4]
                })
                .collect();
            let events: Vec<&[usize]> = events.iter().map(Vec::as_slice).collect();
            let uses = uses(4, &events);
            for capacity in 1..4 {
                let [lru, belady, optimum] = hits(&uses, capacity);
                assert!(lru <= belady && belady <= optimum, "{events:?}, {capacity}");
                let most = most(&uses, capacity, 0, &BTreeSet::new());
                assert_eq!(optimum, most as f64, "{events:?}, {capacity}");
            }
        }
    }
}
