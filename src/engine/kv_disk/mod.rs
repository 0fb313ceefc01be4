//! Pages of keys and values, and states, in files of a folder: they outlive the program.
//!
//! [`KvFolder`] is the folder, which one program has at a time. [`KvDisk`] knows what is in it and
//! writes to it on a thread of its own, which rests while experts are read. Whoever reads waits for
//! the file, and finds nothing where the file is not whole: every byte is covered by a checksum.
//! Entries that were used least recently make room for new ones.
//!
//! Nothing here knows tokens: a key is a digest of all that the bytes depend on.

mod folder;
mod format;
mod index;
mod text_file;
mod writer;

pub use folder::KvFolder;
pub use format::{EntryId, Key, Kind};
pub use text_file::{TextHeader, TextReader, TextWriter};
pub use writer::{DiskCounts, KvDisk, Payload};
