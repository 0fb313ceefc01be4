//! The folder: one program has it at a time, and only files with names of its own are touched.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock, statvfs};
use rustix::io::Errno;

use super::format::{EntryId, VERSION};
use super::index::{Index, moment_of};
use crate::units::{at_least, size};
use crate::{Error, Result, error};

/// The file that makes a folder ours; its lock is the folder's.
const MARKER: &str = "moeba-kv-cache";

/// Files that are being written end so.
pub const UNFINISHED: &str = ".unfinished";

/// Bytes of files at most, where nothing is said; and no more than half of what is free.
const USUAL_BYTES: u64 = 32 << 30;

/// Less is of no use for any model.
const LEAST_BYTES: u64 = 64 << 10;

/// A folder that is locked while this lives.
#[derive(Debug)]
pub struct KvFolder {
    path: PathBuf,
    most_bytes: u64,
    /// Its lock is the folder's.
    _marker: File,
    /// The entries that were there when it was opened.
    index: Index,
}

impl KvFolder {
    /// Makes the folder if it is not there, and locks it. Files of all entries together take at
    /// most `most_bytes`; `None`: a size that the disk has room for.
    pub fn open(path: &Path, most_bytes: Option<u64>) -> Result<KvFolder> {
        let failed = |e: io::Error| {
            let (path, why) = (path.display(), error::sentence(&e));
            Error::invalid(format!("{path}: the cache cannot be kept there: {why}"))
        };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
        let marker = path.join(MARKER);
        let is_ours = marker.symlink_metadata().is_ok_and(|meta| meta.is_file());
        if !is_ours && fs::read_dir(path).map_err(failed)?.next().is_some() {
            return Err(Error::invalid(format!(
                "{}: the folder has files that are no cache of moeba's: give an empty one, or one \
                 that is to be made",
                path.display()
            )));
        }
        let marker = open_marker(&marker).map_err(failed)?;
        lock(&marker, path)?;
        // A disk that is mounted to read shows now.
        let probe = path.join(format!("probe{UNFINISHED}"));
        File::create(&probe).and_then(|_| fs::remove_file(&probe)).map_err(failed)?;
        clear_if_old(path, &marker).map_err(failed)?;
        let index = scan(path).map_err(failed)?;
        let most_bytes = match most_bytes {
            Some(most) if most < LEAST_BYTES => {
                return Err(Error::Usage(format!(
                    "a cache on disk takes {} at least, got {}",
                    at_least(LEAST_BYTES),
                    size(most)
                )));
            }
            Some(most) => most,
            None => usual_bytes(path, index.n_bytes()),
        };
        Ok(KvFolder { path: path.to_owned(), most_bytes, _marker: marker, index })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn most_bytes(&self) -> u64 {
        self.most_bytes
    }

    pub(super) fn take_index(&mut self) -> Index {
        std::mem::take(&mut self.index)
    }

    pub(super) fn file(&self, id: &EntryId) -> PathBuf {
        self.path.join(id.file_name())
    }
}

fn open_marker(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    options.open(path)
}

fn lock(marker: &File, path: &Path) -> Result<()> {
    loop {
        match flock(marker, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(Error::invalid(format!(
                    "{}: another server keeps its cache there: give this one a folder of its own",
                    path.display()
                )));
            }
            // A file system without locks: what two servers spoil, the checksums find.
            Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK) => {
                log::warn!("{}: the file system has no locks", path.display());
                return Ok(());
            }
            Err(e) => return Err(Error::io(path, e.into())),
        }
    }
}

/// Removes the entries if another version has written them, and says in the marker which one will.
fn clear_if_old(path: &Path, marker: &File) -> io::Result<()> {
    let expected = format!("moeba kv cache, version {VERSION}\n");
    let mut found = String::new();
    // What is no text is no version, either.
    let _ = marker.take(100).read_to_string(&mut found);
    if found == expected {
        return Ok(());
    }
    let mut n_removed = 0;
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name();
        if name.to_str().is_some_and(|name| EntryId::of_file_name(name).is_some()) {
            fs::remove_file(path.join(name))?;
            n_removed += 1;
        }
    }
    if n_removed > 0 {
        let path = path.display();
        log::warn!("{path}: {n_removed} files of another version's cache were removed");
    }
    marker.set_len(0)?;
    let mut marker = marker;
    io::Seek::rewind(&mut marker)?;
    marker.write_all(expected.as_bytes())
}

/// The entries of the folder. Files that were not finished go.
fn scan(path: &Path) -> io::Result<Index> {
    let mut index = Index::default();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if name.ends_with(UNFINISHED) {
            fs::remove_file(entry.path())?;
        }
        let Some(id) = EntryId::of_file_name(name) else { continue };
        let meta = entry.metadata()?;
        if meta.is_file() {
            let last_used = meta.modified().map_or(0, moment_of);
            index.insert(id, meta.len(), last_used);
        }
    }
    Ok(index)
}

fn usual_bytes(path: &Path, used: u64) -> u64 {
    let free = statvfs(path).map_or(u64::MAX, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    USUAL_BYTES.min(free.saturating_add(used) / 2).max(LEAST_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &Path) -> Vec<String> {
        let names = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_is_made_locked_and_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let first = KvFolder::open(&path, Some(1 << 20)).unwrap();
        let why = KvFolder::open(&path, None).unwrap_err().to_string();
        assert!(why.contains("a/b: another server"), "{why}");
        let id = EntryId::page([1; 32]);
        fs::write(first.file(&id), b"bytes").unwrap();
        fs::write(path.join(format!("x{UNFINISHED}")), b"half").unwrap();
        drop(first);
        let mut again = KvFolder::open(&path, None).unwrap();
        let index = again.take_index();
        assert!(index.has(&id) && index.n_bytes() == 5 && index.len() == 1);
        assert_eq!(names(&path), [id.file_name(), MARKER.into()]);
        assert!(again.most_bytes() >= LEAST_BYTES && again.most_bytes() <= USUAL_BYTES);
        drop(again);
        assert!(KvFolder::open(&path, Some(LEAST_BYTES - 1)).is_err());
    }

    #[test]
    fn what_is_not_ours_stays() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("letter");
        fs::write(&file, b"Dear").unwrap();
        let why = KvFolder::open(folder.path(), None).unwrap_err().to_string();
        assert!(why.contains("no cache of moeba's"), "{why}");
        assert_eq!(names(folder.path()), ["letter"]);
        assert!(KvFolder::open(&file, None).is_err());
        // A marker that leads elsewhere is none.
        let other = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(&file, other.path().join(MARKER)).unwrap();
        assert!(KvFolder::open(other.path(), None).is_err());
        assert_eq!(fs::read(&file).unwrap(), b"Dear");
    }

    #[test]
    fn entries_of_another_version_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        drop(KvFolder::open(path, None).unwrap());
        fs::write(path.join(EntryId::page([1; 32]).file_name()), b"bytes").unwrap();
        fs::write(path.join("notes"), b"kept").unwrap();
        fs::write(path.join(MARKER), b"moeba kv cache, version 99999999999999\n").unwrap();
        let mut new = KvFolder::open(path, None).unwrap();
        assert_eq!(new.take_index().len(), 0);
        drop(new);
        assert_eq!(names(path), [MARKER, "notes"]);
        let text = fs::read_to_string(path.join(MARKER)).unwrap();
        assert_eq!(text, format!("moeba kv cache, version {VERSION}\n"));
    }
}
