//! Finds operations that may run at the same time and touch a byte that one of them writes. It uses
//! vector clocks (Fidge 1988; Mattern 1989) over *chains*, which are streams and the branches of
//! graphs, so it finds a missing wait in any order of execution.

use std::ops::Range;

/// For each chain, the number of its operations that are certainly done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Clock(Vec<u64>);

impl Clock {
    pub fn get(&self, chain: usize) -> u64 {
        self.0.get(chain).copied().unwrap_or(0)
    }

    pub fn set(&mut self, chain: usize, tick: u64) {
        if self.0.len() <= chain {
            self.0.resize(chain + 1, 0);
        }
        self.0[chain] = tick;
    }

    /// The operations that either knows to be done.
    pub fn join(&mut self, other: &Clock) {
        for (chain, tick) in other.0.iter().enumerate() {
            if self.get(chain) < *tick {
                self.set(chain, *tick);
            }
        }
    }

    /// The operations that both know to be done.
    pub fn intersect(&mut self, other: &Clock) {
        for (chain, tick) in self.0.iter_mut().enumerate() {
            *tick = (*tick).min(other.get(chain));
        }
    }
}

/// The order of an operation: number `tick` of its chain, after everything in `after`.
#[derive(Clone, Debug, Default)]
pub struct Stamp {
    pub chain: usize,
    pub tick: u64,
    pub after: Clock,
}

/// An access of an operation to a piece of memory.
#[derive(Clone, Debug)]
struct Touch {
    chain: usize,
    tick: u64,
    /// The operations that are done when this one is.
    after: Clock,
    writes: bool,
    /// Ascending, none empty.
    ranges: Vec<Range<usize>>,
    /// "kernel rope", "copy up"
    what: String,
}

/// The accesses to one piece of memory that may be concurrent with later operations.
#[derive(Debug, Default)]
pub struct History(Vec<Touch>);

fn first_common(a: &[Range<usize>], b: &[Range<usize>]) -> Option<Range<usize>> {
    let (mut i, mut j) = (0, 0);
    while i < a.len() && j < b.len() {
        let common = a[i].start.max(b[j].start)..a[i].end.min(b[j].end);
        if !common.is_empty() {
            return Some(common);
        }
        if a[i].end <= b[j].end {
            i += 1;
        } else {
            j += 1;
        }
    }
    None
}

impl History {
    /// Records an access. The error is a clause about a conflicting access that may be concurrent.
    pub fn touch(
        &mut self,
        stamp: &Stamp,
        ranges: Vec<Range<usize>>,
        writes: bool,
        what: &str,
    ) -> Result<(), String> {
        if ranges.is_empty() {
            return Ok(());
        }
        self.check(&stamp.after, &ranges, writes)
            .map_err(|other| format!("{what} {} {other}", verb(writes)))?;
        let (chain, tick) = (stamp.chain, stamp.tick);
        // Later operations of its chain come after the accesses that it covers, too.
        self.0.retain(|t| {
            let covered = ranges.len() == 1 && {
                let (first, last) = (&t.ranges[0], &t.ranges[t.ranges.len() - 1]);
                ranges[0].start <= first.start && last.end <= ranges[0].end
            };
            !(t.chain == chain && covered && (writes || !t.writes))
        });
        let after = stamp.after.clone();
        self.0.push(Touch { chain, tick, after, writes, ranges, what: what.to_owned() });
        Ok(())
    }

    /// An error if an access to `ranges` conflicts and is not among the operations of `after`.
    pub fn check(
        &self,
        after: &Clock,
        ranges: &[Range<usize>],
        writes: bool,
    ) -> Result<(), String> {
        for t in &self.0 {
            if after.get(t.chain) >= t.tick || !(writes || t.writes) {
                continue;
            }
            if let Some(common) = first_common(&t.ranges, ranges) {
                let (what, did) = (&t.what, verb(t.writes));
                return Err(format!(
                    "bytes {}..{}, which {what} {did} with no event between them",
                    common.start, common.end
                ));
            }
        }
        Ok(())
    }

    /// The operations that are done when the latest write to `range` is; none if it was forgotten.
    pub fn last_write(&self, range: &Range<usize>) -> Clock {
        let meets =
            |t: &&Touch| t.writes && first_common(&t.ranges, std::slice::from_ref(range)).is_some();
        self.0.iter().rfind(meets).map(|t| t.after.clone()).unwrap_or_default()
    }

    /// Forgets accesses that all later operations come after.
    pub fn forget(&mut self, horizon: &Clock) {
        self.0.retain(|t| horizon.get(t.chain) < t.tick);
    }
}

fn verb(writes: bool) -> &'static str {
    if writes { "writes" } else { "reads" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(chain: usize, tick: u64, after: &[(usize, u64)]) -> Stamp {
        let mut clock = Clock::default();
        after.iter().for_each(|(c, t)| clock.set(*c, *t));
        clock.set(chain, tick);
        Stamp { chain, tick, after: clock }
    }

    #[test]
    fn a_write_beside_a_read_is_found_in_either_order() {
        for writes_first in [false, true] {
            let mut history = History::default();
            let whole = 0..8;
            history.touch(&stamp(0, 1, &[]), vec![whole], writes_first, "first").unwrap();
            let part = 4..5;
            let beside =
                history.touch(&stamp(1, 1, &[]), vec![part.clone()], !writes_first, "second");
            let sentence = beside.unwrap_err();
            assert!(sentence.contains("bytes 4..5"), "{sentence}");
            history.touch(&stamp(1, 2, &[(0, 1)]), vec![part], !writes_first, "third").unwrap();
        }
    }

    #[test]
    fn readers_and_neighbours_do_not_disturb() {
        let mut history = History::default();
        let (low, high) = (0..8, 8..16);
        history.touch(&stamp(0, 1, &[]), vec![low.clone()], false, "a").unwrap();
        history.touch(&stamp(1, 1, &[]), vec![low], false, "b").unwrap();
        history.touch(&stamp(2, 1, &[]), vec![high], true, "c").unwrap();
    }

    #[test]
    fn the_latest_write_tells_what_is_done() {
        let mut history = History::default();
        let (word, beside) = (4..8, 8..16);
        history.touch(&stamp(0, 1, &[]), vec![word.clone()], true, "a").unwrap();
        history.touch(&stamp(1, 7, &[(0, 1)]), vec![word.clone()], true, "b").unwrap();
        history.touch(&stamp(2, 1, &[]), vec![beside], true, "c").unwrap();
        history.touch(&stamp(0, 2, &[(1, 7)]), vec![word.clone()], false, "d").unwrap();
        assert_eq!(history.last_write(&word), stamp(1, 7, &[(0, 1)]).after);
        let never = 0..4;
        assert_eq!(history.last_write(&never), Clock::default());
    }

    #[test]
    fn only_what_all_are_after_is_forgotten() {
        let mut history = History::default();
        let (a, b) = (0..8, 8..16);
        history.touch(&stamp(0, 1, &[]), vec![a], true, "a").unwrap();
        history.touch(&stamp(0, 2, &[]), vec![b], true, "b").unwrap();
        let mut horizon = stamp(0, 9, &[]).after;
        horizon.intersect(&stamp(0, 1, &[]).after);
        history.forget(&horizon);
        assert_eq!(history.0.len(), 1);
        assert_eq!(history.0[0].what, "b");
    }
}
