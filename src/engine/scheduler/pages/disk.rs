//! Pages and states on disk: how a text gets there, and how it comes back, some of it at a time so
//! that other texts go on meanwhile.

use std::sync::Arc;

use super::{Key, PAGE, Pages, Restored, SAVED_AT_ONCE};
use crate::engine::kv_disk::{DiskCounts, EntryId, KvDisk, Payload};
use crate::engine::text_cache::TextCache;

/// Bytes that are read from disk between two passes; a page at least.
const LOADED_AT_ONCE: usize = 32 << 20;

/// A text that comes from disk into a session. Until it is there the session's own text stays.
pub struct Load {
    /// Keys of the text's whole pages.
    keys: Vec<Key>,
    /// The page that the session needs first, the one that is next, and the end.
    first: usize,
    next: usize,
    end: usize,
}

impl Load {
    /// Positions of the text that the session will have.
    pub fn n(&self) -> usize {
        self.end * PAGE
    }
}

impl Pages {
    /// Puts a disk behind the pages. `identity` tells models, and all else that bits depend on.
    pub fn on_disk(self, disk: KvDisk, identity: Key) -> Pages {
        Pages { disk: Some(disk), identity, ..self }
    }

    pub fn has_disk(&self) -> bool {
        self.disk.is_some()
    }

    pub fn disk_counts(&self) -> Option<DiskCounts> {
        self.disk.as_ref().map(KvDisk::counts)
    }

    pub(super) fn is_on_disk(&self, key: &Key) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.has(&EntryId::page(*key)))
    }

    fn has_states(&self, key: &Key) -> bool {
        let on_disk = |disk: &KvDisk| disk.has(&EntryId::states(*key));
        self.states.contains_key(key) || self.disk.as_ref().is_some_and(on_disk)
    }

    /// Prepares to load what the disk has of a text beyond the `n` positions that a cache holds;
    /// `None` if that is nothing.
    pub fn begin_load(&self, salt: u64, text: &[u32], n: usize, cache: &TextCache) -> Option<Load> {
        self.disk.as_ref()?;
        let keys: Vec<Key> = self.keys(salt, text).take_while(|key| self.has_page(key)).collect();
        let end = match cache.has_state() {
            true => keys.iter().rposition(|key| self.has_states(key)).map_or(0, |last| last + 1),
            false => keys.len(),
        };
        let first = n / PAGE;
        (end > first).then_some(Load { keys, first, next: first, end })
    }

    /// Loads some pages; `None` while there are more. A page that is damaged ends the text before
    /// it.
    pub fn load(&mut self, load: &mut Load, cache: &mut TextCache) -> Option<Restored> {
        let n_bytes = cache.bytes_of(PAGE);
        let stop = load.end.min(load.next + (LOADED_AT_ONCE / n_bytes.max(1)).max(1));
        let keys = &load.keys[load.next..stop];
        let pages: Vec<Vec<u8>> = keys.iter().map_while(|key| self.bytes(key, n_bytes)).collect();
        if !pages.is_empty() {
            let next = load.next + pages.len();
            let pages: Vec<&[u8]> = pages.iter().map(|page| &page[..]).collect();
            cache.restore(&(load.next * PAGE..next * PAGE), &pages);
            load.next = next;
        }
        if load.next < stop {
            load.end = load.next;
        }
        (load.next >= load.end).then(|| self.end_load(load, cache))
    }

    /// A page's bytes from memory or disk.
    fn bytes(&self, key: &Key, n_bytes: usize) -> Option<Vec<u8>> {
        match self.pages.get(key) {
            Some(page) => Some(page.bytes.clone()),
            None => self.disk.as_ref()?.read(&EntryId::page(*key), n_bytes),
        }
    }

    fn end_load(&mut self, load: &Load, cache: &mut TextCache) -> Restored {
        let used = &load.keys[..load.end];
        if let Some(disk) = &self.disk {
            disk.touch(&used.iter().map(|key| EntryId::page(*key)).collect::<Vec<_>>());
        }
        if !cache.has_state() {
            return Restored { n: PAGE * load.end, states: None };
        }
        for last in (load.first..load.end).rev() {
            let key = load.keys[last];
            if let Some(values) = self.states_of(&key, cache.n_state_values()) {
                cache.restore_states(&values);
                let states = self.keep_states_of(key, &values);
                return Restored { n: PAGE * (last + 1), states };
            }
        }
        Restored { n: 0, states: None }
    }

    /// States from memory or disk.
    fn states_of(&self, key: &Key, n_values: usize) -> Option<Arc<Vec<f32>>> {
        if let Some(states) = self.states.get(key) {
            return Some(states.values.clone());
        }
        let bytes = self.disk.as_ref()?.read(&EntryId::states(*key), 4 * n_values)?;
        let (values, _) = bytes.as_chunks::<4>();
        Some(Arc::new(values.iter().map(|value| f32::from_le_bytes(*value)).collect()))
    }

    /// Hands pages of a text that `cache` holds to the disk, from page `first` on; those before
    /// were handed over. Returns the number of pages that were by now: fewer than the text has if
    /// too many wait to be written.
    pub fn save(&self, salt: u64, text: &[u32], first: usize, cache: &TextCache) -> usize {
        let Some(disk) = &self.disk else { return first };
        let ids: Vec<EntryId> = self.keys(salt, text).map(EntryId::page).collect();
        let (last_used, n_bytes) = (disk.touch(&ids), cache.bytes_of(PAGE));
        let mut n = first;
        while n < ids.len() {
            let most = ids.len().min(n + SAVED_AT_ONCE);
            let n_new = ids[n..most].iter().take_while(|id| !disk.will_have(id)).count();
            if n_new == 0 {
                n += 1;
                continue;
            }
            let end = n + n_new.min(disk.n_room(n_bytes));
            if end == n {
                return n;
            }
            match cache.save(&(n * PAGE..end * PAGE), PAGE) {
                Ok(pages) => {
                    for (i, page) in (n..).zip(pages) {
                        disk.write(ids[i], Payload::Bytes(page), last_used - i as u64);
                    }
                }
                Err(why) => {
                    log::warn!("a text is not kept: {why}");
                    return ids.len();
                }
            }
            n = end;
        }
        n
    }

    /// Hands states after a text of whole pages to the disk; false if too much waits there.
    pub fn save_states(&self, salt: u64, text: &[u32], values: &Arc<Vec<f32>>) -> bool {
        let (Some(disk), Some(key)) = (&self.disk, self.keys(salt, text).last()) else {
            return true;
        };
        let id = EntryId::states(key);
        if disk.will_have(&id) {
            disk.touch(&[id]);
            return true;
        }
        let has_room = disk.n_room(size_of_val(&values[..])) > 0;
        if has_room {
            disk.write(id, Payload::Values(values.clone()), disk.touch(&[]));
        }
        has_room
    }

    /// Waits until the disk has written something of what it was handed.
    pub fn wait_for_disk(&self) {
        self.disk.iter().for_each(KvDisk::wait);
    }
}
