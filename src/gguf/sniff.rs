//! Recognises files that are not a supported GGUF. A wrong file is more frequent than a broken one,
//! so each common kind has its own message.

use super::parse::CUT;
use crate::{Error, Result};
use byteorder::{ByteOrder, LittleEndian as LE};
use std::path::Path;

const MAGIC: &[u8; 4] = b"GGUF";

/// Checks magic and version; answers the version.
pub(super) fn version(path: &Path, bytes: &[u8]) -> Result<u32> {
    if !bytes.starts_with(MAGIC) {
        return Err(Error::format(path, "file", "a GGUF file", describe(bytes)));
    }
    if bytes.len() < 8 {
        let got = format!("the end of the file {} bytes later ({CUT})", bytes.len() - 4);
        return Err(Error::format(path, "version", "4 bytes at position 4", got));
    }
    let version = LE::read_u32(&bytes[4..8]);
    let got = match version {
        2 | 3 => return Ok(version),
        1 => "1, an obsolete GGUF version: convert the model again".into(),
        // Read in the wrong byte order, a small number has its low half empty.
        v if v != 0 && v & 0xffff == 0 => {
            format!("{} in big-endian byte order, which is not supported", v.swap_bytes())
        }
        v => v.to_string(),
    };
    Err(Error::format(path, "version", "2 or 3", got))
}

fn describe(bytes: &[u8]) -> String {
    let text = bytes.trim_ascii_start();
    let html = text.starts_with(b"<");
    if bytes.is_empty() {
        "an empty file".into()
    } else if html {
        "an HTML or XML page (a failed download?)".into()
    } else if bytes.starts_with(b"version https://git-lfs") {
        "a Git LFS pointer: fetch the real file with `git lfs pull`".into()
    } else if is_safetensors(bytes) {
        "a safetensors file: `moeba convert` makes GGUF of a checkpoint's folder".into()
    } else if bytes.starts_with(b"PK\x03\x04") {
        "a zip archive or PyTorch checkpoint".into()
    } else if [b"lmgg", b"tjgg", b"fmgg", b"algg"].iter().any(|m| bytes.starts_with(*m)) {
        "a file in a format older than GGUF: convert the model again".into()
    } else if bytes.starts_with(b"FUGG") {
        "a byte-swapped file".into()
    } else if MAGIC.starts_with(bytes) {
        format!("the end of the file after {} bytes ({CUT})", bytes.len())
    } else if text.starts_with(b"{") {
        "a JSON document".into()
    } else if text.starts_with(b"FROM ") {
        "a Modelfile: run the file or the name behind FROM".into()
    } else {
        let shown = &bytes[..bytes.len().min(16)];
        let is_text = |b: &u8| b.is_ascii_graphic() || b.is_ascii_whitespace();
        match shown.len() >= 4 && shown.iter().all(is_text) {
            true => format!("a text that starts with {:?}", String::from_utf8_lossy(shown)),
            false => {
                let first = &shown[..shown.len().min(4)];
                format!("a file that starts with the bytes {first:02x?}")
            }
        }
    }
}

/// A length in 8 bytes, then JSON.
fn is_safetensors(bytes: &[u8]) -> bool {
    bytes.len() > 8 && bytes[8] == b'{' && LE::read_u64(bytes) < 1 << 32
}
