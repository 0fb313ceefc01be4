//! A whole text in one file, as `/slots/ID?action=save` writes it: a header of 72 bytes, the token
//! ids (u32), keys and values in pages, states (f32), and a checksum of all behind the header.
//! Numbers are little-endian.
//!
//! | bytes of the header | content |
//! |---|---|
//! | 0..8 | `moeba tx` |
//! | 8..12 | [`VERSION`] |
//! | 12..16 | tokens |
//! | 16..24 | bytes of keys and values |
//! | 24..32 | values of states |
//! | 32..64 | a digest of what the bits depend on besides the tokens |
//! | 64..68 | zero |
//! | 68..72 | CRC-32 of the bytes before |

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::folder::UNFINISHED;
use super::format::{Key, VERSION};

const MAGIC: &[u8; 8] = b"moeba tx";

const HEADER_BYTES: usize = 72;

const CRC_BYTES: u64 = 4;

/// Bytes that are checked at once.
const CHUNK: usize = 1 << 20;

/// The sizes of a text's parts, and what its bits depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextHeader {
    pub n_tokens: u32,
    pub n_bytes: u64,
    pub n_states: u64,
    pub identity: Key,
}

impl TextHeader {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.n_tokens.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.n_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.n_states.to_le_bytes());
        bytes[32..64].copy_from_slice(&self.identity);
        let crc = crc32fast::hash(&bytes[..68]);
        bytes[68..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn of_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<TextHeader> {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let header = TextHeader {
            n_tokens: word(12),
            n_bytes: long(16),
            n_states: long(24),
            identity: std::array::from_fn(|i| bytes[32 + i]),
        };
        (header.to_bytes() == *bytes).then_some(header)
    }

    /// Bytes of the whole file, unless there cannot be so many.
    fn file_bytes(self) -> Option<u64> {
        let ids = 4 * u64::from(self.n_tokens);
        let states = self.n_states.checked_mul(4)?;
        let body = ids.checked_add(self.n_bytes)?.checked_add(states)?;
        body.checked_add(HEADER_BYTES as u64 + CRC_BYTES)
    }
}

/// Writes a text. Until the end the file has another name.
pub struct TextWriter {
    path: PathBuf,
    unfinished: PathBuf,
    file: BufWriter<File>,
    crc: crc32fast::Hasher,
    n_bytes: u64,
}

impl TextWriter {
    pub fn create(path: &Path, header: TextHeader) -> io::Result<TextWriter> {
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(UNFINISHED);
        let unfinished = PathBuf::from(unfinished);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
        let mut file = BufWriter::new(options.open(&unfinished)?);
        file.write_all(&header.to_bytes())?;
        let (path, crc) = (path.to_owned(), crc32fast::Hasher::new());
        Ok(TextWriter { path, unfinished, file, crc, n_bytes: HEADER_BYTES as u64 })
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.n_bytes += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    /// Ends the file; returns its size.
    pub fn finish(mut self) -> io::Result<u64> {
        let crc = self.crc.clone().finalize();
        self.file.write_all(&crc.to_le_bytes())?;
        self.file.flush()?;
        self.file.get_ref().sync_data()?;
        std::fs::rename(&self.unfinished, &self.path)?;
        Ok(self.n_bytes + CRC_BYTES)
    }
}

impl Drop for TextWriter {
    fn drop(&mut self) {
        // It is there only if the text was not finished.
        let _ = std::fs::remove_file(&self.unfinished);
    }
}

/// Reads a text whose checksum is right.
pub struct TextReader {
    file: File,
    pub header: TextHeader,
}

impl TextReader {
    /// Checks the whole file. The error says what is wrong with it, as a clause.
    pub fn open(path: &Path) -> Result<TextReader, String> {
        let failed = |e: io::Error| crate::error::sentence(&e);
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
        let mut file = options.open(path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        if !meta.is_file() {
            return Err("it is no file".into());
        }
        let mut bytes = [0; HEADER_BYTES];
        let no_text = |_| "it is no text that moeba has saved".to_owned();
        file.read_exact(&mut bytes).map_err(no_text)?;
        let header = TextHeader::of_bytes(&bytes)
            .ok_or("it is no text that this version of moeba has saved")?;
        if header.file_bytes() != Some(meta.len()) {
            return Err("the file is cut or too long".into());
        }
        let mut left = meta.len() - HEADER_BYTES as u64 - CRC_BYTES;
        let (mut crc, mut chunk) = (crc32fast::Hasher::new(), vec![0; CHUNK]);
        while left > 0 {
            let part = &mut chunk[..left.min(CHUNK as u64) as usize];
            file.read_exact(part).map_err(failed)?;
            crc.update(part);
            left -= part.len() as u64;
        }
        let mut found = [0; CRC_BYTES as usize];
        file.read_exact(&mut found).map_err(failed)?;
        if u32::from_le_bytes(found) != crc.finalize() {
            return Err("the checksum is wrong".into());
        }
        file.seek(io::SeekFrom::Start(HEADER_BYTES as u64)).map_err(failed)?;
        Ok(TextReader { file, header })
    }

    /// The next bytes of the body.
    pub fn read(&mut self, n: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; n];
        self.file.read_exact(&mut bytes).map_err(|e| crate::error::sentence(&e))?;
        Ok(bytes)
    }

    /// Bytes of the file.
    pub fn n_bytes(&self) -> u64 {
        self.header.file_bytes().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: TextHeader =
        TextHeader { n_tokens: 3, n_bytes: 5, n_states: 1, identity: [7; 32] };

    fn write(path: &Path) -> u64 {
        let mut writer = TextWriter::create(path, HEADER).unwrap();
        writer.write(&[1; 12]).unwrap();
        writer.write(&[2; 9]).unwrap();
        writer.finish().unwrap()
    }

    #[test]
    fn a_text_comes_back_and_a_changed_byte_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        assert_eq!(write(&path), 72 + 21 + 4);
        let mut reader = TextReader::open(&path).unwrap();
        assert_eq!((reader.header, reader.n_bytes()), (HEADER, 97));
        assert_eq!((reader.read(12).unwrap(), reader.read(9).unwrap()), (vec![1; 12], vec![2; 9]));
        let whole = std::fs::read(&path).unwrap();
        for i in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[i] ^= 1 << (i % 8);
            std::fs::write(&path, &bytes).unwrap();
            assert!(TextReader::open(&path).is_err(), "byte {i}");
            std::fs::write(&path, &whole[..i]).unwrap();
            assert!(TextReader::open(&path).is_err(), "{i} bytes");
        }
        // Sizes that no file has.
        let huge = TextHeader { n_bytes: u64::MAX, n_states: u64::MAX, ..HEADER };
        std::fs::write(&path, huge.to_bytes()).unwrap();
        assert!(TextReader::open(&path).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn links_are_not_followed_and_what_is_not_finished_goes() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("text"), folder.path().join("link"));
        write(&path);
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(TextReader::open(&link).is_err() && TextReader::open(folder.path()).is_err());
        drop(TextWriter::create(&folder.path().join("other"), HEADER).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
