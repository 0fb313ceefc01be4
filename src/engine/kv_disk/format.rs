//! A file of the folder: a header of 64 bytes, then the payload. Numbers are little-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 0..8 | `moeba kv` |
//! | 8..12 | [`VERSION`] |
//! | 12..16 | the kind: 1 a page, 2 states |
//! | 16..48 | the key |
//! | 48..56 | bytes of the payload |
//! | 56..60 | CRC-32 of the payload |
//! | 60..64 | CRC-32 of the bytes before |

use std::io;

/// Changes when files of an older version cannot be read.
pub const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"moeba kv";

pub const HEADER_BYTES: usize = 64;

/// A digest of all that an entry's bytes depend on.
pub type Key = [u8; 32];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Page,
    States,
}

impl Kind {
    const ALL: [Kind; 2] = [Kind::Page, Kind::States];

    fn number(self) -> u32 {
        match self {
            Kind::Page => 1,
            Kind::States => 2,
        }
    }

    fn extension(self) -> &'static str {
        match self {
            Kind::Page => "page",
            Kind::States => "states",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryId {
    pub kind: Kind,
    pub key: Key,
}

impl EntryId {
    pub fn page(key: Key) -> EntryId {
        EntryId { kind: Kind::Page, key }
    }

    pub fn states(key: Key) -> EntryId {
        EntryId { kind: Kind::States, key }
    }

    pub fn file_name(&self) -> String {
        let digits: String = self.key.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{digits}.{}", self.kind.extension())
    }

    /// The entry whose file has this name.
    pub fn of_file_name(name: &str) -> Option<EntryId> {
        let (digits, extension) = name.split_once('.')?;
        let kind = Kind::ALL.into_iter().find(|kind| kind.extension() == extension)?;
        let is_lower = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
        if digits.len() != 64 || !digits.bytes().all(is_lower) {
            return None;
        }
        let mut key = Key::default();
        for (i, byte) in key.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).ok()?;
        }
        Some(EntryId { kind, key })
    }
}

/// The header of an entry with a payload of `n_bytes`, whose checksum is `crc`.
pub fn header(id: &EntryId, n_bytes: u64, crc: u32) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&id.kind.number().to_le_bytes());
    header[16..48].copy_from_slice(&id.key);
    header[48..56].copy_from_slice(&n_bytes.to_le_bytes());
    header[56..60].copy_from_slice(&crc.to_le_bytes());
    let own = crc32fast::hash(&header[..60]);
    header[60..].copy_from_slice(&own.to_le_bytes());
    header
}

/// The payload of an entry's file, which is to have `n_bytes` behind the header. The error says
/// what is wrong with it, as a clause.
pub fn read(id: &EntryId, n_bytes: usize, file: &mut impl io::Read) -> Result<Vec<u8>, String> {
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::UnexpectedEof => "the file is cut".into(),
        _ => crate::error::sentence(&e),
    };
    let mut found = [0; HEADER_BYTES];
    file.read_exact(&mut found).map_err(failed)?;
    let mut crc = [0; 4];
    crc.copy_from_slice(&found[56..60]);
    let crc = u32::from_le_bytes(crc);
    if found != header(id, n_bytes as u64, crc) {
        return Err("the header is another one than expected".into());
    }
    let mut payload = vec![0; n_bytes];
    file.read_exact(&mut payload).map_err(failed)?;
    if file.read(&mut [0]).map_err(failed)? > 0 {
        return Err("the file is too long".into());
    }
    match crc32fast::hash(&payload) == crc {
        true => Ok(payload),
        false => Err("the checksum is wrong".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: EntryId = EntryId { kind: Kind::States, key: [0xa7; 32] };

    fn file(payload: &[u8]) -> Vec<u8> {
        let header = header(&ID, payload.len() as u64, crc32fast::hash(payload));
        [&header, payload].concat()
    }

    #[test]
    fn names_are_those_of_their_entries() {
        let name = ID.file_name();
        assert_eq!(name, format!("{}.states", "a7".repeat(32)));
        assert_eq!(EntryId::of_file_name(&name), Some(ID));
        let digits = "0".repeat(64);
        for other in ["kv", ".page", "a7.page", &format!("{digits}.txt"), &digits] {
            assert_eq!(EntryId::of_file_name(other), None, "{other}");
        }
        assert_eq!(EntryId::of_file_name(&name.to_uppercase()), None);
        assert_eq!(EntryId::of_file_name(&format!("{}é.page", "0".repeat(62))), None);
    }

    #[test]
    fn any_changed_byte_and_any_other_length_is_found() {
        let payload = b"keys and values";
        let whole = file(payload);
        let read = |bytes: &[u8]| read(&ID, payload.len(), &mut &bytes[..]);
        assert_eq!(read(&whole).unwrap(), payload);
        for i in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[i] ^= 1 << bit;
                assert!(read(&bytes).is_err(), "byte {i}, bit {bit}");
            }
            assert!(read(&whole[..i]).is_err(), "{i} bytes");
        }
        assert!(read(&[&whole[..], b"x"].concat()).is_err());
        // Whole, but not what was asked for.
        assert!(super::read(&EntryId::page(ID.key), payload.len(), &mut &whole[..]).is_err());
        assert!(super::read(&ID, payload.len() - 1, &mut &whole[..]).is_err());
    }
}
