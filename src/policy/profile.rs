//! The profile of a model: what policies have learned, so that the next run starts warm. It holds
//! named sections, each in the format of its policy, in one checksummed container that belongs to
//! one model. It is a cache: losing it costs time, never correctness.
//!
//! Layout, little-endian: magic, version (u32), model key (32 bytes), number of sections (u32);
//! then for each a name (u16 length, UTF-8) and its bytes (u64 length); last the CRC-32 of all
//! before it.

use std::collections::BTreeMap;

const MAGIC: &[u8; 8] = b"MOEBAPRO";
const VERSION: u32 = 1;
const CRC_BYTES: usize = 4;

/// Names a model: equal keys, equal routing.
pub type ModelKey = [u8; 32];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    sections: BTreeMap<String, Vec<u8>>,
}

impl Profile {
    pub fn is_empty(&self) -> bool {
        self.sections.is_empty()
    }

    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.sections.get(name).map(Vec::as_slice)
    }

    /// Replaces the section of that name.
    pub fn set(&mut self, name: &str, bytes: Vec<u8>) {
        self.sections.insert(name.to_string(), bytes);
    }

    /// Takes over all sections of another, which replace those of the same name.
    pub fn merge(&mut self, other: &Profile) {
        self.sections.extend(other.sections.clone());
    }

    pub fn encode(&self, model: &ModelKey) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend(model);
        out.extend((self.sections.len() as u32).to_le_bytes());
        for (name, bytes) in &self.sections {
            let len = u16::try_from(name.len()).expect("a section's name is short");
            out.extend(len.to_le_bytes());
            out.extend(name.as_bytes());
            out.extend((bytes.len() as u64).to_le_bytes());
            out.extend(bytes);
        }
        out.extend(crc32fast::hash(&out).to_le_bytes());
        out
    }

    /// The error is a clause: what is wrong with these bytes.
    pub fn decode(bytes: &[u8], model: &ModelKey) -> Result<Profile, String> {
        let mut rest = Bytes(bytes);
        if rest.take(MAGIC.len()) != Ok(MAGIC) {
            return Err("not a moeba profile".into());
        }
        let version = u32::from_le_bytes(rest.array()?);
        if version != VERSION {
            return Err(format!(
                "a profile of version {version}; this moeba reads version {VERSION}"
            ));
        }
        let (covered, crc) = bytes.split_at(bytes.len() - CRC_BYTES);
        if crc != crc32fast::hash(covered).to_le_bytes() {
            return Err("a damaged profile (its checksum is wrong)".into());
        }
        if rest.take(model.len())? != model {
            return Err("the profile of another model".into());
        }
        let mut profile = Profile::default();
        for _ in 0..u32::from_le_bytes(rest.array()?) {
            let len = u16::from_le_bytes(rest.array()?);
            let name = std::str::from_utf8(rest.take(len.into())?).map_err(|e| e.to_string())?;
            let len = u64::from_le_bytes(rest.array()?);
            let len = usize::try_from(len).map_err(|e| e.to_string())?;
            profile.set(name, rest.take(len)?.to_vec());
        }
        Ok(profile)
    }
}

/// The part that has not been read yet.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let (head, rest) =
            self.0.split_at_checked(n).ok_or("a damaged profile (it ends too early)")?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        Ok(self.take(N)?.try_into().expect("as many bytes as were taken"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: ModelKey = [7; 32];

    proptest! {
        #[test]
        fn what_was_saved_comes_back(
            sections in prop::collection::btree_map("[a-z.]{0,12}", any::<Vec<u8>>(), 0..5),
        ) {
            let profile = Profile { sections };
            let bytes = profile.encode(&KEY);
            prop_assert_eq!(Profile::decode(&bytes, &KEY).unwrap(), profile);
            prop_assert!(Profile::decode(&bytes, &[8; 32]).unwrap_err().contains("another model"));
        }

        #[test]
        fn damage_is_refused(
            contents in any::<Vec<u8>>(),
            at in any::<prop::sample::Index>(),
            bit in 0..8u32,
        ) {
            let mut profile = Profile::default();
            profile.set("a.section", contents);
            let mut bytes = profile.encode(&KEY);
            let at = at.index(bytes.len());
            prop_assert!(Profile::decode(&bytes[..at], &KEY).is_err());
            bytes[at] ^= 1u8 << bit;
            prop_assert!(Profile::decode(&bytes, &KEY).is_err());
        }
    }
}
