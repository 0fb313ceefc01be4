//! Keys and values of texts that no session holds any more, in memory, and states of texts that
//! sessions hold or held.
//!
//! A page is [`PAGE`] positions of all layers. Its key is a digest of everything that its bits
//! depend on: the salt, and the tokens from the beginning of the text to the page's end. So texts
//! that begin alike share pages. The states of a model with a recurrent state are kept after some
//! pages, under the same key: without them the pages before are of no use. What was used least
//! recently goes first, and of a text's pages the last one. Behind them there may be a disk, which
//! gets every text as it comes about.

mod disk;

use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::sync::Arc;

pub use disk::Load;

use super::status::PageCounts;
use crate::engine::kv_disk::{Key, KvDisk};
use crate::engine::text_cache::TextCache;

pub use crate::model::kv::PAGE;

/// Pages that are saved at once: those of a device go faster together.
const SAVED_AT_ONCE: usize = 16;

struct Page {
    /// The page before, of the same text.
    before: Option<Key>,
    bytes: Vec<u8>,
    /// Pages that continue this one.
    n_after: usize,
    last_used: u64,
}

/// All states after a page.
struct KeptStates {
    values: Arc<Vec<f32>>,
    last_used: u64,
}

impl KeptStates {
    fn n_bytes(&self) -> usize {
        size_of_val(&self.values[..])
    }
}

/// Pages and states up to a number of bytes. All caches have the same layers and types.
pub struct Pages {
    most_bytes: usize,
    keeps_pages: bool,
    n_bytes: usize,
    pages: HashMap<Key, Page>,
    states: HashMap<Key, KeptStates>,
    now: u64,
    counts: PageCounts,
    disk: Option<KvDisk>,
    /// A part of all keys: what bits depend on besides texts, where there is a disk.
    identity: Key,
}

/// The result of [`Pages::restore`].
pub struct Restored {
    /// Positions that the cache holds.
    pub n: usize,
    /// The states after them, if the model has any and they were put back.
    pub states: Option<Arc<Vec<f32>>>,
}

impl Pages {
    pub fn new(most_bytes: usize) -> Pages {
        Pages {
            most_bytes,
            keeps_pages: true,
            n_bytes: 0,
            pages: HashMap::new(),
            states: HashMap::new(),
            now: 0,
            counts: PageCounts::default(),
            disk: None,
            identity: Key::default(),
        }
    }

    /// States without pages, for a session that has one text after the other.
    pub fn of_states(most_bytes: usize) -> Pages {
        Pages { keeps_pages: false, ..Pages::new(most_bytes) }
    }

    /// Drops all texts, and reads and writes none on disk any more.
    pub fn forget(&mut self) {
        (self.pages, self.states, self.n_bytes) = (HashMap::new(), HashMap::new(), 0);
        (self.disk, self.most_bytes) = (None, 0);
    }

    pub fn len(&self) -> usize {
        self.pages.len()
    }

    pub fn n_states(&self) -> usize {
        self.states.len()
    }

    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    pub fn counts(&self) -> PageCounts {
        self.counts
    }

    /// Whether there is room for the states of such a cache, which has some.
    pub fn has_room_for_states(&self, cache: &TextCache) -> bool {
        cache.has_state() && 4 * cache.n_state_values() <= self.most_bytes
    }

    /// Positions of a text whose pages are here or on disk, from its beginning.
    pub fn n_held(&self, salt: u64, text: &[u32]) -> usize {
        PAGE * self.keys(salt, text).take_while(|key| self.has_page(key)).count()
    }

    fn has_page(&self, key: &Key) -> bool {
        self.pages.contains_key(key) || self.is_on_disk(key)
    }

    /// Puts the text's pages from position `n` on into a cache that holds those before, up to the
    /// last one that the cache can go on from.
    pub fn restore(
        &mut self,
        salt: u64,
        text: &[u32],
        n: usize,
        cache: &mut TextCache,
    ) -> Restored {
        self.now += 1;
        let has_state = cache.has_state();
        let keys: Vec<Key> =
            self.keys(salt, text).take_while(|key| self.pages.contains_key(key)).collect();
        let can_end = |i: &usize| !has_state || self.states.contains_key(&keys[*i]);
        let last = (n / PAGE..keys.len()).rev().find(can_end);
        let (n_wanted, n_hits) = (text.len() / PAGE, last.map_or(0, |last| last + 1 - n / PAGE));
        self.counts.n_hits += n_hits as u64;
        self.counts.n_misses += n_wanted.saturating_sub(n / PAGE + n_hits) as u64;
        let Some(last) = last else { return Restored { n, states: None } };
        let end = last + 1;
        keys[..end].iter().for_each(|key| self.use_page(key));
        let pages = keys[n / PAGE..end].iter().filter_map(|key| self.pages.get(key));
        let pages: Vec<&[u8]> = pages.map(|page| &page.bytes[..]).collect();
        cache.restore(&(n / PAGE * PAGE..end * PAGE), &pages);
        let states = self.states.get_mut(&keys[last]).filter(|_| has_state).map(|states| {
            states.last_used = self.now;
            cache.restore_states(&states.values);
            states.values.clone()
        });
        Restored { n: PAGE * end, states }
    }

    /// Keeps the whole pages of a text that `cache` holds, as far as there is room for and as far
    /// as a text could go on from them.
    pub fn keep(&mut self, salt: u64, text: &[u32], cache: &TextCache) {
        let page_bytes = cache.bytes_of(PAGE);
        if !self.keeps_pages || page_bytes > self.most_bytes {
            return;
        }
        self.now += 1;
        let mut keys: Vec<Key> = self.keys(salt, text).collect();
        if cache.has_state() {
            let last = keys.iter().rposition(|key| self.states.contains_key(key));
            keys.truncate(last.map_or(0, |last| last + 1));
            if let Some(states) = keys.last().and_then(|key| self.states.get_mut(key)) {
                states.last_used = self.now;
            }
        }
        let n_held = keys.iter().take_while(|key| self.pages.contains_key(*key)).count();
        keys[..n_held].iter().for_each(|key| self.use_page(key));
        let mut start = n_held;
        while start < keys.len() {
            let most = (keys.len() - start).min(SAVED_AT_ONCE);
            let has_room = |n: &usize| self.make_room(n * page_bytes);
            let Some(n) = (1..=most).rev().find(has_room) else { return };
            match cache.save(&(start * PAGE..(start + n) * PAGE), PAGE) {
                Ok(pages) => {
                    for (i, bytes) in (start..).zip(pages) {
                        self.insert(keys[i], i.checked_sub(1).map(|i| keys[i]), bytes);
                    }
                }
                Err(why) => return log::warn!("a text is not kept: {why}"),
            }
            start += n;
        }
    }

    fn use_page(&mut self, key: &Key) {
        if let Some(page) = self.pages.get_mut(key) {
            page.last_used = self.now;
        }
    }

    /// Keeps the states after a text of whole pages. Returns those that are kept now: these, or
    /// the same ones from before; `None` if there is no room.
    pub fn keep_states(
        &mut self,
        salt: u64,
        text: &[u32],
        values: &Arc<Vec<f32>>,
    ) -> Option<Arc<Vec<f32>>> {
        debug_assert!(text.len().is_multiple_of(PAGE));
        let key = self.keys(salt, text).last()?;
        self.keep_states_of(key, values)
    }

    fn keep_states_of(&mut self, key: Key, values: &Arc<Vec<f32>>) -> Option<Arc<Vec<f32>>> {
        self.now += 1;
        if let Some(states) = self.states.get_mut(&key) {
            states.last_used = self.now;
            return Some(states.values.clone());
        }
        let states = KeptStates { values: values.clone(), last_used: self.now };
        if !self.make_room(states.n_bytes()) {
            return None;
        }
        self.n_bytes += states.n_bytes();
        self.states.insert(key, states);
        debug_assert!(self.is_whole());
        Some(values.clone())
    }

    /// A session goes on from the states after a text, if they are here.
    pub fn use_states(&mut self, salt: u64, text: &[u32]) {
        self.now += 1;
        let key = self.keys(salt, text).last().filter(|_| text.len().is_multiple_of(PAGE));
        if let Some(states) = key.and_then(|key| self.states.get_mut(&key)) {
            states.last_used = self.now;
        }
    }

    /// Forgets the states after a text.
    pub fn drop_states(&mut self, salt: u64, text: &[u32]) {
        if let Some(key) = self.keys(salt, text).last() {
            self.remove_states(&key);
        }
    }

    fn insert(&mut self, key: Key, before: Option<Key>, bytes: Vec<u8>) {
        if let Some(page) = before.and_then(|before| self.pages.get_mut(&before)) {
            page.n_after += 1;
        }
        self.n_bytes += bytes.len();
        let page = Page { before, bytes, n_after: 0, last_used: self.now };
        self.pages.insert(key, page);
        debug_assert!(self.is_whole());
    }

    /// Removes pages and states until `n_bytes` more fit; false if all that is left is used now.
    fn make_room(&mut self, n_bytes: usize) -> bool {
        while self.n_bytes + n_bytes > self.most_bytes {
            let pages = self.pages.iter().filter(|(_, page)| page.n_after == 0);
            let pages = pages.map(|(key, page)| (page.last_used, true, *key));
            // States go before pages that were used with them: those are useless without.
            let states = self.states.iter().map(|(key, states)| (states.last_used, false, *key));
            let old = pages.chain(states).filter(|(last_used, ..)| *last_used < self.now);
            match old.min() {
                Some((_, true, key)) => {
                    self.counts.n_evicted += 1;
                    self.remove(&key);
                }
                Some((_, false, key)) => self.remove_states(&key),
                None => return false,
            }
        }
        true
    }

    fn remove(&mut self, key: &Key) {
        let Some(page) = self.pages.remove(key) else { return };
        self.n_bytes -= page.bytes.len();
        if let Some(before) = page.before.and_then(|before| self.pages.get_mut(&before)) {
            before.n_after -= 1;
        }
        debug_assert!(self.is_whole());
    }

    fn remove_states(&mut self, key: &Key) {
        let Some(states) = self.states.remove(key) else { return };
        self.n_bytes -= states.n_bytes();
        debug_assert!(self.is_whole());
    }

    /// The keys of a text's whole pages.
    fn keys<'a>(&self, salt: u64, text: &'a [u32]) -> impl Iterator<Item = Key> + use<'a> {
        let start = Sha256::new_with_prefix(self.identity).chain_update(salt.to_le_bytes());
        let pages = text.chunks_exact(PAGE);
        pages.scan(start.finalize().into(), |before: &mut Key, tokens| {
            let mut digest = Sha256::new_with_prefix(*before);
            tokens.iter().for_each(|token| digest.update(token.to_le_bytes()));
            *before = digest.finalize().into();
            Some(*before)
        })
    }

    /// Whether counts agree with the pages, and no page is without the one before it.
    fn is_whole(&self) -> bool {
        let mut n_after: HashMap<Key, usize> = HashMap::new();
        for page in self.pages.values() {
            if let Some(before) = page.before {
                *n_after.entry(before).or_default() += 1;
            }
        }
        let pages = self.pages.values().map(|page| page.bytes.len());
        let n_bytes: usize = pages.chain(self.states.values().map(KeptStates::n_bytes)).sum();
        n_bytes == self.n_bytes
            && n_bytes <= self.most_bytes
            && n_after.keys().all(|key| self.pages.contains_key(key))
            && self.pages.iter().all(|(key, p)| p.n_after == n_after.get(key).copied().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ops::StateSize;
    use crate::model::kv::{CacheType, KvCache, LayerShape};
    use proptest::prelude::*;

    const N_CTX: usize = 6 * PAGE;

    const HEADS: LayerShape = LayerShape::Heads { n_head_kv: 2, k_dim: 8, v_dim: 4 };

    const DELTA: LayerShape = LayerShape::State(StateSize { n_past: 96, n_state: 128 });

    /// A cache whose bytes follow from the text, as a model's do: each position's and the states
    /// from all tokens before.
    fn cache_of(layers: &[LayerShape], text: &[u32]) -> TextCache {
        let host = KvCache::new(layers, N_CTX, CacheType::F32, CacheType::F32);
        let mut cache = TextCache { host, device: None };
        let mut seen = 1u64;
        for (i, token) in text.iter().enumerate() {
            seen = seen.wrapping_mul(6364136223846793005).wrapping_add(u64::from(*token) + 1);
            let bytes = vec![(seen >> 33) as u8; cache.bytes_of(1)];
            cache.restore(&(i..i + 1), &[&bytes]);
        }
        let n_values = cache.n_state_values();
        cache.restore_states(&vec![(seen >> 40) as f32; n_values]);
        cache
    }

    fn cache(text: &[u32]) -> TextCache {
        cache_of(&[HEADS], text)
    }

    fn states(cache: &TextCache) -> Arc<Vec<f32>> {
        Arc::new(cache.host.states())
    }

    #[test]
    fn a_text_comes_back_in_whole_pages() {
        let text: Vec<u32> = (0..200).collect();
        let mut pages = Pages::new(1 << 20);
        pages.keep(1, &text, &cache(&text));
        assert_eq!((pages.len(), pages.n_held(1, &text), pages.n_held(2, &text)), (3, 192, 0));
        let mut other = text.clone();
        other[100] = 7;
        assert_eq!(pages.n_held(1, &other), 64);
        let mut to = cache(&text[..70]);
        assert_eq!(pages.restore(1, &text, 70, &mut to).n, 192);
        assert!(to.host.save(&(0..192)) == cache(&text).host.save(&(0..192)));
        assert_eq!(pages.restore(1, &other, 70, &mut to).n, 70);
    }

    #[test]
    fn a_page_that_does_not_fit_is_not_kept() {
        let text = [3; 2 * PAGE];
        let mut pages = Pages::new(cache(&[]).bytes_of(PAGE) - 1);
        pages.keep(0, &text, &cache(&text));
        assert_eq!((pages.len(), pages.n_bytes()), (0, 0));
    }

    proptest! {
        #[test]
        fn pages_are_those_of_their_texts_within_the_room(
            most in 1usize..9,
            texts in prop::collection::vec((0u64..2, 0usize..5 * PAGE, 0u32..3), 1..30),
        ) {
            let most_bytes = most * cache(&[]).bytes_of(PAGE);
            let mut pages = Pages::new(most_bytes);
            for (salt, n, kind) in texts {
                // Texts that begin alike and part after some pages.
                let text: Vec<u32> = (0..n).map(|i| if i < 100 { 0 } else { kind }).collect();
                let held = pages.n_held(salt, &text);
                let mut to = cache(&[]);
                prop_assert_eq!(pages.restore(salt, &text, 0, &mut to).n, held);
                prop_assert!(to.host.save(&(0..held)) == cache(&text).host.save(&(0..held)));
                pages.keep(salt, &text, &cache(&text));
                prop_assert!(pages.is_whole() && pages.n_bytes() <= most_bytes);
                prop_assert_eq!(pages.n_held(salt, &text) / PAGE, (n / PAGE).min(most));
            }
        }

        #[test]
        fn a_text_goes_on_from_its_last_states_within_the_room(
            most in 1usize..9,
            texts in prop::collection::vec(
                (0u64..2, 0usize..5 * PAGE, 0u32..3, prop::collection::vec(1usize..5, 0..3)),
                1..30,
            ),
        ) {
            let layers = [DELTA, HEADS];
            let state_bytes = 4 * cache_of(&layers, &[]).n_state_values();
            let most_bytes = most * (cache_of(&layers, &[]).bytes_of(PAGE) + state_bytes);
            let mut pages = Pages::new(most_bytes);
            for (salt, n, kind, marks) in texts {
                let text: Vec<u32> = (0..n).map(|i| if i < 100 { 0 } else { kind }).collect();
                let whole = cache_of(&layers, &text);
                let n_held = pages.n_held(salt, &text);
                let has_states = |end: &usize| {
                    let key = pages.keys(salt, &text[..*end]).last();
                    key.is_some_and(|key| pages.states.contains_key(&key))
                };
                let mut ends = (1..=n_held / PAGE).rev().map(|i| i * PAGE);
                let end = ends.find(has_states).unwrap_or(0);
                let mut to = cache_of(&layers, &[]);
                let empty = to.host.states();
                let restored = pages.restore(salt, &text, 0, &mut to);
                prop_assert_eq!(restored.n, end);
                prop_assert!(to.host.save(&(0..end)) == whole.host.save(&(0..end)));
                match restored.states {
                    Some(states) => {
                        prop_assert!(to.host.states() == *states);
                        prop_assert!(*states == cache_of(&layers, &text[..end]).host.states());
                    }
                    None => prop_assert!(end == 0 && to.host.states() == empty),
                }
                for i in marks.into_iter().filter(|i| i * PAGE <= n) {
                    let part = &text[..i * PAGE];
                    let of_part = states(&cache_of(&layers, part));
                    let kept = pages.keep_states(salt, part, &of_part);
                    prop_assert!(kept.is_some_and(|kept| kept == of_part));
                }
                pages.keep(salt, &text, &whole);
                prop_assert!(pages.is_whole() && pages.n_bytes() <= most_bytes);
            }
        }
    }

    #[test]
    fn states_without_pages_and_pages_without_states_are_of_no_use() {
        let layers = [DELTA, HEADS];
        let text: Vec<u32> = (0..200).collect();
        let whole = cache_of(&layers, &text);
        let mut pages = Pages::new(1 << 20);
        pages.keep(0, &text, &whole);
        assert_eq!((pages.len(), pages.n_states()), (0, 0));
        let of_part = states(&cache_of(&layers, &text[..128]));
        pages.keep_states(0, &text[..128], &of_part);
        assert_eq!(pages.restore(0, &text, 0, &mut cache_of(&layers, &[])).n, 0);
        pages.keep(0, &text, &whole);
        assert_eq!((pages.len(), pages.n_states()), (2, 1));
        assert_eq!(pages.restore(0, &text, 0, &mut cache_of(&layers, &[])).n, 128);
        // A session that is further goes on from where it is.
        assert_eq!(pages.restore(0, &text, 130, &mut cache_of(&layers, &text[..130])).n, 130);
        pages.drop_states(0, &text[..128]);
        assert_eq!(pages.restore(0, &text, 0, &mut cache_of(&layers, &[])).n, 0);
    }
}
