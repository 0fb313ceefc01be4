//! A model's files as a link reads them: past the page cache where the file system allows it.

use crate::experts::DIRECT_ALIGN;
use crate::experts::memory::Region;
use crate::gguf::Gguf;
use crate::{Error, Result};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The shards of a model, opened a second time for the link.
#[derive(Debug)]
pub struct Files {
    shards: Vec<Opened>,
}

#[derive(Debug)]
struct Opened {
    path: PathBuf,
    file: File,
    /// Reads bypass the page cache. Otherwise what was read is dropped from it afterwards: the
    /// cache must not be a hidden budget.
    direct: bool,
}

impl Files {
    /// The very files that `gguf` has open, whatever their paths name by now.
    pub fn new(gguf: &Gguf) -> Result<Files> {
        Files::of(gguf.shards().iter().map(|shard| (shard.path(), shard.file())))
    }

    /// Open files and their paths for messages.
    pub fn of<'a>(files: impl IntoIterator<Item = (&'a Path, &'a File)>) -> Result<Files> {
        Files::collect(files, open_for_reads)
    }

    /// Opens the files with every read through the page cache, for file systems that refuse direct
    /// reads.
    pub fn through_cache<'a>(
        files: impl IntoIterator<Item = (&'a Path, &'a File)>,
    ) -> Result<Files> {
        Files::collect(files, |_, file| Ok((open_cached(file)?, false)))
    }

    fn collect<'a>(
        files: impl IntoIterator<Item = (&'a Path, &'a File)>,
        open: impl Fn(&Path, &File) -> io::Result<(File, bool)>,
    ) -> Result<Files> {
        let open = |(path, file): (&Path, &File)| match open(path, file) {
            Ok((file, direct)) => Ok(Opened { path: path.to_owned(), file, direct }),
            Err(e) => Err(Error::io(path, e)),
        };
        let shards = files.into_iter().map(open).collect::<Result<_>>()?;
        Ok(Files { shards })
    }

    pub fn len(&self) -> usize {
        self.shards.len()
    }

    pub fn is_empty(&self) -> bool {
        self.shards.is_empty()
    }

    /// Whether reads of a shard bypass the page cache.
    pub fn is_direct(&self, shard: usize) -> bool {
        self.shards[shard].direct
    }

    pub fn path(&self, shard: usize) -> &Path {
        &self.shards[shard].path
    }

    pub(crate) fn file(&self, shard: usize) -> &File {
        &self.shards[shard].file
    }

    /// The length of the file at this moment.
    pub(crate) fn n_bytes(&self, shard: usize) -> io::Result<u64> {
        Ok(self.file(shard).metadata()?.len())
    }

    /// After a read that had to go through the page cache.
    pub(crate) fn drop_cached(&self, shard: usize, offset: u64, len: usize) {
        let Opened { file, direct: false, .. } = &self.shards[shard] else { return };
        forget(file, offset, len);
    }
}

#[cfg(target_os = "linux")]
fn forget(file: &File, offset: u64, len: usize) {
    let len = std::num::NonZeroU64::new(len as u64);
    // Advice: where it is not taken, the cache keeps what it would have kept anyway.
    let _ = rustix::fs::fadvise(file, offset, len, rustix::fs::Advice::DontNeed);
}

#[cfg(not(target_os = "linux"))]
fn forget(_file: &File, _offset: u64, _len: usize) {}

/// The file to read from, and whether that is past the page cache.
fn open_for_reads(path: &Path, file: &File) -> io::Result<(File, bool)> {
    match open_direct(file) {
        Ok(file) => Ok((file, true)),
        Err(why) => {
            let cached = "reads go through the page cache and are dropped from it";
            log::info!("{}: no direct reads ({why}): {cached}", path.display());
            Ok((open_cached(file)?, false))
        }
    }
}

/// Opens the file again by its descriptor, not by its path: a path can name another file by now,
/// and the header that was checked is that of the open one.
#[cfg(target_os = "linux")]
fn reopen(file: &File, flags: rustix::fs::OFlags) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    use std::os::fd::AsRawFd;
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(name, flags, Mode::empty())?))
}

#[cfg(target_os = "linux")]
fn open_direct(file: &File) -> io::Result<File> {
    let file = reopen(file, rustix::fs::OFlags::DIRECT)?;
    // Some file systems take the flag and refuse the reads, or want more alignment than ours.
    let page = Region::new(DIRECT_ALIGN)?;
    // SAFETY: the region is this function's alone.
    let page = unsafe { std::slice::from_raw_parts_mut(page.ptr(), page.len()) };
    file.read_at(page, 0)?;
    Ok(file)
}

#[cfg(target_os = "linux")]
fn open_cached(file: &File) -> io::Result<File> {
    let Ok(own) = reopen(file, rustix::fs::OFlags::empty()) else {
        return file.try_clone();
    };
    // No reading ahead of what was asked for. Only on a description of our own: the advice would
    // slow down page faults in the map.
    let _ = rustix::fs::fadvise(&own, 0, None, rustix::fs::Advice::Random);
    Ok(own)
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_file: &File) -> io::Result<File> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "not on this system"))
}

#[cfg(not(target_os = "linux"))]
fn open_cached(file: &File) -> io::Result<File> {
    file.try_clone()
}
