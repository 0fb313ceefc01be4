//! Which entries the folder has, in the order of their last use.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::format::EntryId;

/// A time of use, in ns since 1970: it survives as a file's time.
pub type Moment = u64;

pub fn time_of(moment: Moment) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(moment)
}

pub fn moment_of(time: SystemTime) -> Moment {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as Moment)
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Bytes of the file.
    n_bytes: u64,
    last_used: Moment,
}

#[derive(Debug, Default)]
pub struct Index {
    entries: HashMap<EntryId, Entry>,
    by_use: BTreeSet<(Moment, EntryId)>,
    n_bytes: u64,
    /// The latest moment that was given out.
    latest: Moment,
}

impl Index {
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Bytes of all files.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    pub fn has(&self, id: &EntryId) -> bool {
        self.entries.contains_key(id)
    }

    pub fn insert(&mut self, id: EntryId, n_bytes: u64, last_used: Moment) {
        self.remove(&id);
        self.latest = self.latest.max(last_used);
        self.n_bytes += n_bytes;
        self.by_use.insert((last_used, id));
        self.entries.insert(id, Entry { n_bytes, last_used });
    }

    pub fn remove(&mut self, id: &EntryId) {
        if let Some(entry) = self.entries.remove(id) {
            self.n_bytes -= entry.n_bytes;
            self.by_use.remove(&(entry.last_used, *id));
        }
    }

    /// The last of `n` moments that are later than all before: a text's first entry gets the last
    /// one, so that of entries that were used together those at its end go first.
    pub fn moments(&mut self, n: usize) -> Moment {
        self.latest = moment_of(SystemTime::now()).max(self.latest) + n as Moment;
        self.latest
    }

    pub fn touch(&mut self, id: &EntryId, last_used: Moment) {
        if let Some(entry) = self.entries.get_mut(id) {
            self.by_use.remove(&(entry.last_used, *id));
            entry.last_used = last_used;
            self.by_use.insert((last_used, *id));
        }
    }

    /// The entry that was used least recently.
    pub fn oldest(&self) -> Option<EntryId> {
        self.by_use.first().map(|(_, id)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> EntryId {
        EntryId::page([n; 32])
    }

    #[test]
    fn the_end_of_the_text_that_was_used_least_recently_is_the_oldest() {
        let mut index = Index::default();
        for text in [0..3, 3..6] {
            let last = index.moments(3);
            (0..).zip(text).for_each(|(i, n)| index.insert(id(n), 10, last - i));
        }
        assert_eq!((index.len(), index.n_bytes()), (6, 60));
        let last = index.moments(3);
        (0..3).for_each(|n| index.touch(&id(n as u8), last - n));
        let mut order = Vec::new();
        while let Some(oldest) = index.oldest() {
            order.push(oldest.key[0]);
            index.remove(&oldest);
        }
        assert_eq!(order, [5, 4, 3, 2, 1, 0]);
        assert_eq!((index.len(), index.n_bytes()), (0, 0));
        index.remove(&id(1));
        index.touch(&id(1), 7);
        assert_eq!(index.oldest(), None);
    }

    #[test]
    fn an_entry_that_comes_again_counts_once() {
        let mut index = Index::default();
        index.insert(id(1), 10, 5);
        index.insert(id(1), 7, 6);
        assert_eq!((index.len(), index.n_bytes()), (1, 7));
        // The clock may have been set back.
        index.insert(id(2), 1, u64::MAX / 2);
        assert_eq!(index.moments(2), u64::MAX / 2 + 2);
        assert_eq!(moment_of(time_of(1_700_000_000_123_456_789)), 1_700_000_000_123_456_789);
    }
}
