//! SentencePiece's `precompiled_charsmap`: which strings a text's characters become (NFKC and the
//! like), as its trainer compiled them.
//!
//! Little-endian: a u32 n, n bytes of trie, then the replacements, each ended by a NUL. The trie
//! is a double array of u32 units as the library darts-clone lays it out (Kanda et al., "Compressed
//! double-array tries for string dictionaries supporting fast lookup", 2017, call it XCDA):
//!
//! - the child of the node with base b by byte c is unit b ⊕ c, if that unit's label (bits 0–7 and
//!   31) is c;
//! - its base is its position ⊕ its offset (bits 10–30, shifted left by 8 if bit 9 is set);
//! - if bit 8 is set a key ends there, and unit `base` holds, in bits 0–30, where its replacement
//!   starts.
//!
//! Nothing in a file is trusted: [`Charsmap::parse`] walks the whole trie once, so that look-ups
//! cannot leave it.

use crate::{Error, Result};
use std::path::Path;

pub struct Charsmap {
    units: Vec<u32>,
    /// Base of the root.
    root: u32,
    replacements: Vec<u8>,
}

const FIELD: &str = "tokenizer.ggml.precompiled_charsmap";

impl Charsmap {
    /// None for an empty one, which replaces nothing.
    pub fn parse(blob: &[u8], path: &Path) -> Result<Option<Self>> {
        if blob.is_empty() {
            return Ok(None);
        }
        let fail = |expected: &str, got: String| Error::format(path, FIELD, expected, got);
        let Some((n, rest)) = blob.split_first_chunk::<4>() else {
            return Err(fail("at least 4 bytes", blob.len().to_string()));
        };
        let n = u32::from_le_bytes(*n) as usize;
        if n == 0 || !n.is_multiple_of(4) || n > rest.len() {
            let expected = format!("a trie of whole 4-byte units within {} bytes", rest.len());
            return Err(fail(&expected, format!("{n} bytes")));
        }
        let (trie, replacements) = rest.split_at(n);
        let (units, _) = trie.as_chunks::<4>();
        let units: Vec<u32> = units.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        let map = Self { root: offset(units[0]), units, replacements: replacements.to_vec() };
        map.check().map_err(|got| fail("a trie that stays within its units and texts", got))?;
        Ok(Some(map))
    }

    /// Visits every node that look-ups can reach; a sentence about the first that is broken.
    fn check(&self) -> std::result::Result<(), String> {
        let mut seen = vec![false; self.units.len()];
        let mut pending = vec![self.root];
        while let Some(base) = pending.pop() {
            // The 256 units that byte values select from a base lie in one aligned block.
            if (base | 0xFF) as usize >= self.units.len() {
                return Err(format!("base {base} in {} units", self.units.len()));
            }
            for byte in 1..=255u8 {
                let at = (base ^ u32::from(byte)) as usize;
                let unit = self.units[at];
                if label(unit) != u32::from(byte) || std::mem::replace(&mut seen[at], true) {
                    continue;
                }
                let child = at as u32 ^ offset(unit);
                if ends_key(unit) {
                    self.replacement(child).ok_or_else(|| format!("a bad replacement at {at}"))?;
                }
                pending.push(child);
            }
        }
        Ok(())
    }

    fn replacement(&self, base: u32) -> Option<&str> {
        let start = self.units.get(base as usize)? & 0x7FFF_FFFF;
        let text = self.replacements.get(start as usize..)?;
        let end = text.iter().position(|&b| b == 0)?;
        std::str::from_utf8(&text[..end]).ok()
    }

    /// The longest key at the start of `text`: its length and what it becomes.
    pub fn longest(&self, text: &str) -> Option<(usize, &str)> {
        let (mut base, mut best) = (self.root, None);
        for (i, &byte) in text.as_bytes().iter().enumerate() {
            let at = base ^ u32::from(byte);
            let unit = *self.units.get(at as usize)?;
            if byte == 0 || label(unit) != u32::from(byte) {
                break;
            }
            base = at ^ offset(unit);
            if ends_key(unit) && text.is_char_boundary(i + 1) {
                best = Some((i + 1, base));
            }
        }
        best.and_then(|(len, base)| Some((len, self.replacement(base)?)))
    }
}

fn label(unit: u32) -> u32 {
    unit & 0x8000_00FF
}

fn offset(unit: u32) -> u32 {
    (unit >> 10) << ((unit & 0x200) >> 6)
}

fn ends_key(unit: u32) -> bool {
    unit & 0x100 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The key "a" with the replacement "bc", by hand: the root at 0 has base 256, "a" is unit
    /// 256 ⊕ 97 with base 512, where the leaf lies.
    fn blob() -> Vec<u8> {
        let mut units = vec![0u32; 768];
        units[0] = 256 << 10;
        let at = 256 ^ u32::from(b'a');
        units[at as usize] = ((512 ^ at) << 10) | 0x100 | u32::from(b'a');
        units[512] = 0x8000_0001;
        let mut out = (units.len() as u32 * 4).to_le_bytes().to_vec();
        units.iter().for_each(|unit| out.extend(unit.to_le_bytes()));
        out.extend(b"\0bc\0");
        out
    }

    fn parse(blob: &[u8]) -> Result<Option<Charsmap>> {
        Charsmap::parse(blob, Path::new("m.gguf"))
    }

    #[test]
    fn a_key_is_found() {
        let map = parse(&blob()).unwrap().unwrap();
        assert_eq!(map.longest("ab"), Some((1, "bc")));
        assert_eq!(map.longest("ba"), None);
        assert_eq!(map.longest("\0a"), None);
        assert_eq!(map.longest(""), None);
        assert!(parse(&[]).unwrap().is_none());
    }

    #[test]
    fn broken_maps_are_refused() {
        let set = |position: usize, unit: u32| {
            let mut out = blob();
            out[4 + position * 4..][..4].copy_from_slice(&unit.to_le_bytes());
            out
        };
        let at = 256 ^ usize::from(b'a');
        let cases = [
            vec![1, 2, 3],
            vec![0; 8],
            blob()[..100].to_vec(),
            [vec![3, 0, 0, 0], blob()].concat(),
            // The root's base, the child's base and the replacement lie outside.
            set(0, 768 << 10),
            set(at, (0x1F_FFFF << 10) | u32::from(b'a')),
            set(at, (0x1F_FFFF << 10) | 0x300 | u32::from(b'a')),
            set(512, 0x8000_0004),
            // The last replacement has no end, or is no UTF-8.
            blob()[..blob().len() - 1].to_vec(),
            [&blob()[..blob().len() - 2], b"\xFF\0"].concat(),
        ];
        for (i, case) in cases.iter().enumerate() {
            let error = parse(case).err().unwrap_or_else(|| panic!("case {i} was accepted"));
            assert!(error.to_string().starts_with(&format!("m.gguf: {FIELD}")), "{error}");
        }
    }

    /// A node that is its own child must not be walked for ever.
    #[test]
    fn a_circle_ends() {
        let mut units = vec![0u32; 256];
        units[usize::from(b'a')] = u32::from(b'a') << 10 | u32::from(b'a');
        let mut out = 1024u32.to_le_bytes().to_vec();
        units.iter().for_each(|unit| out.extend(unit.to_le_bytes()));
        let map = parse(&out).unwrap().unwrap();
        assert_eq!(map.longest(&"a".repeat(1000)), None);
    }
}
