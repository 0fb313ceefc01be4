//! Reads the files of a zip archive that NumPy wrote: stored or deflated, below 4 GiB.

use super::Fault;
use flate2::read::DeflateDecoder;
use std::io::Read;

pub const MAGIC: &[u8] = b"PK\x03\x04";

const END: &[u8] = b"PK\x05\x06";
const CENTRAL: &[u8] = b"PK\x01\x02";
const END_BYTES: usize = 22;
const CENTRAL_BYTES: usize = 46;
const LOCAL_BYTES: usize = 30;

/// DEFLATE makes 1032 bytes of one at the most.
const MAX_RATIO: usize = 1032;

/// The names and contents of all files.
pub fn entries(bytes: &[u8]) -> Result<Vec<(String, Vec<u8>)>, Fault> {
    let broken = || Fault::new("the archive", "a whole zip file", "a damaged or cut one");
    let last = bytes.len().checked_sub(END_BYTES).ok_or_else(broken)?;
    // A comment of up to 64 KiB may follow.
    let first = last.saturating_sub(usize::from(u16::MAX));
    let end = (first..=last).rev().find(|at| bytes[*at..].starts_with(END));
    let end = end.ok_or_else(broken)?;
    let n = number(bytes, end + 10, 2).ok_or_else(broken)?;
    let mut at = number(bytes, end + 16, 4).ok_or_else(broken)?;
    let mut entries = Vec::new();
    for _ in 0..n {
        let (name, contents, next) = entry(bytes, at).ok_or_else(broken)??;
        entries.push((name, contents));
        at = next;
    }
    Ok(entries)
}

/// A file's name and contents, and where the next entry begins; `None` if the archive ends within.
fn entry(bytes: &[u8], at: usize) -> Option<Result<(String, Vec<u8>, usize), Fault>> {
    let field = |offset, n| number(bytes, at.checked_add(offset)?, n);
    let (method, crc) = (field(10, 2)?, field(16, 4)?);
    let (n_packed, n_raw, local) = (field(20, 4)?, field(24, 4)?, field(42, 4)?);
    let name_bytes = field(28, 2)?;
    let next = at + CENTRAL_BYTES + name_bytes + field(30, 2)? + field(32, 2)?;
    let name = bytes.get(at + CENTRAL_BYTES..)?.get(..name_bytes)?;
    let name = String::from_utf8_lossy(name).into_owned();
    let start = local + LOCAL_BYTES + number(bytes, local + 26, 2)? + number(bytes, local + 28, 2)?;
    let packed = bytes.get(start..)?.get(..n_packed);
    if !bytes[at..].starts_with(CENTRAL) || packed.is_none() {
        return None;
    }
    let contents = unpacked(packed?, method, n_raw).filter(|raw| checksum(raw) == crc);
    let got = if [0, 8].contains(&method) { "other bytes" } else { "another compression" };
    let fault = || Fault::new(&name, "a file as NumPy packs it", got);
    Some(contents.ok_or_else(fault).map(|contents| (name.clone(), contents, next)))
}

fn unpacked(packed: &[u8], method: usize, n_raw: usize) -> Option<Vec<u8>> {
    match method {
        0 => Some(packed.to_vec()),
        8 if n_raw / MAX_RATIO <= packed.len() => {
            let mut raw = Vec::new();
            DeflateDecoder::new(packed).take(n_raw as u64 + 1).read_to_end(&mut raw).ok()?;
            (raw.len() == n_raw).then_some(raw)
        }
        _ => None,
    }
}

fn checksum(raw: &[u8]) -> usize {
    crc32fast::hash(raw) as usize
}

/// A little-endian number of `n` bytes.
fn number(bytes: &[u8], at: usize, n: usize) -> Option<usize> {
    let bytes = bytes.get(at..)?.get(..n)?;
    Some(bytes.iter().rev().fold(0, |value, byte| value << 8 | usize::from(*byte)))
}
