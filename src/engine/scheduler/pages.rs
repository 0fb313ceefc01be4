//! Keys and values of texts that no session holds any more, in memory.
//!
//! A page is [`PAGE`] positions of all layers. Its key is a digest of everything that its bits
//! depend on: the salt, and the tokens from the beginning of the text to the page's end. So texts
//! that begin alike share pages. The least recently used page that no other one continues goes
//! first.

use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ops::Range;

use crate::model::kv::KvCache;

/// Positions of a page.
pub const PAGE: usize = 64;

type Key = [u8; 32];

struct Page {
    /// The page before, of the same text.
    before: Option<Key>,
    bytes: Vec<u8>,
    /// Pages that continue this one.
    n_after: usize,
    last_used: u64,
}

/// Pages up to a number of bytes. All caches have the same layers and types.
pub struct Pages {
    most_bytes: usize,
    n_bytes: usize,
    pages: HashMap<Key, Page>,
    now: u64,
}

impl Pages {
    pub fn new(most_bytes: usize) -> Pages {
        Pages { most_bytes, n_bytes: 0, pages: HashMap::new(), now: 0 }
    }

    pub fn len(&self) -> usize {
        self.pages.len()
    }

    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Puts the text's pages from position `n` on into a cache that holds those before; returns how
    /// many positions it holds then.
    pub fn restore(&mut self, salt: u64, text: &[u32], n: usize, cache: &mut KvCache) -> usize {
        self.now += 1;
        let mut n_held = n;
        for (key, positions) in keys(salt, text).zip(positions(text)) {
            let Some(page) = self.pages.get_mut(&key) else { break };
            page.last_used = self.now;
            if positions.end > n {
                cache.restore(&positions, &page.bytes);
                n_held = positions.end;
            }
        }
        n_held
    }

    /// Keeps the whole pages of a text that `cache` holds, as far as there is room for.
    pub fn keep(&mut self, salt: u64, text: &[u32], cache: &KvCache) {
        let page_bytes = cache.bytes_of(PAGE);
        if page_bytes > self.most_bytes {
            return;
        }
        self.now += 1;
        let mut before = None;
        for (key, positions) in keys(salt, text).zip(positions(text)) {
            match self.pages.get_mut(&key) {
                Some(page) => page.last_used = self.now,
                None => {
                    if !self.make_room(page_bytes) {
                        return;
                    }
                    self.insert(key, before, cache.save(&positions));
                }
            }
            before = Some(key);
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

    /// Removes pages until `n_bytes` more fit; false if all that is left is used now.
    fn make_room(&mut self, n_bytes: usize) -> bool {
        while self.n_bytes + n_bytes > self.most_bytes {
            let old = self.pages.iter().filter(|(_, p)| p.n_after == 0 && p.last_used < self.now);
            let Some((&key, _)) = old.min_by_key(|(key, page)| (page.last_used, **key)) else {
                return false;
            };
            self.remove(&key);
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

    /// Whether counts agree with the pages, and no page is without the one before it.
    fn is_whole(&self) -> bool {
        let mut n_after: HashMap<Key, usize> = HashMap::new();
        for page in self.pages.values() {
            if let Some(before) = page.before {
                *n_after.entry(before).or_default() += 1;
            }
        }
        let n_bytes: usize = self.pages.values().map(|page| page.bytes.len()).sum();
        n_bytes == self.n_bytes
            && n_bytes <= self.most_bytes
            && n_after.keys().all(|key| self.pages.contains_key(key))
            && self.pages.iter().all(|(key, p)| p.n_after == n_after.get(key).copied().unwrap_or(0))
    }
}

/// The positions of a text's whole pages.
fn positions(text: &[u32]) -> impl Iterator<Item = Range<usize>> {
    (0..text.len() / PAGE).map(|i| i * PAGE..(i + 1) * PAGE)
}

/// The keys of a text's whole pages.
fn keys(salt: u64, text: &[u32]) -> impl Iterator<Item = Key> {
    let start = Sha256::digest(salt.to_le_bytes()).into();
    let pages = text.chunks_exact(PAGE);
    pages.scan(start, |before: &mut Key, tokens| {
        let mut digest = Sha256::new_with_prefix(*before);
        tokens.iter().for_each(|token| digest.update(token.to_le_bytes()));
        *before = digest.finalize().into();
        Some(*before)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::kv::{CacheType, LayerShape};
    use proptest::prelude::*;

    const N_CTX: usize = 6 * PAGE;

    impl Pages {
        /// Positions of a text that are here, from its beginning.
        fn n_held(&self, salt: u64, text: &[u32]) -> usize {
            PAGE * keys(salt, text).take_while(|key| self.pages.contains_key(key)).count()
        }
    }

    /// A cache whose bytes follow from the text, as a model's do: each position's from all tokens
    /// before it.
    fn cache(text: &[u32]) -> KvCache {
        let shape = LayerShape::Heads { n_head_kv: 2, k_dim: 8, v_dim: 4 };
        let mut cache = KvCache::new(&[shape], N_CTX, CacheType::F32, CacheType::F32);
        let mut state = 1u64;
        for (i, token) in text.iter().enumerate() {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(u64::from(*token) + 1);
            let bytes = vec![(state >> 33) as u8; cache.bytes_of(1)];
            cache.restore(&(i..i + 1), &bytes);
        }
        cache
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
        assert_eq!(pages.restore(1, &text, 70, &mut to), 192);
        assert!(to.save(&(0..192)) == cache(&text).save(&(0..192)));
        assert_eq!(pages.restore(1, &other, 70, &mut to), 70);
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
                prop_assert_eq!(pages.restore(salt, &text, 0, &mut to), held);
                prop_assert!(to.save(&(0..held)) == cache(&text).save(&(0..held)));
                pages.keep(salt, &text, &cache(&text));
                prop_assert!(pages.is_whole() && pages.n_bytes() <= most_bytes);
                prop_assert_eq!(pages.n_held(salt, &text) / PAGE, (n / PAGE).min(most));
            }
        }
    }
}
