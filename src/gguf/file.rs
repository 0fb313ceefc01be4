//! A GGUF file on disk, mapped: one file, or all the shards of a split one.

use super::header::{Header, Metadata, TensorInfo};
use super::lost_pages::Known;
use super::overrides::Override;
use super::stamp::Stamp;
use super::value::Value;
use crate::error::sentence;
use crate::{Error, Result};
use memmap2::{Mmap, MmapOptions};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// One file of a model.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    file: File,
    /// The file as it was before anything of it was read.
    stamp: Stamp,
    /// Dropped before the map.
    known: Known,
    /// The file, or, once it is detached, memory of its length.
    map: Mmap,
    /// Metadata and descriptions, from the start of the file.
    header_bytes: usize,
    /// Ranges of `map` that still have the file's bytes, in order, not adjacent; `None`: all.
    kept: Option<Vec<Range<usize>>>,
}

impl Shard {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file, for reads that bypass the map (streamed experts).
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Whether the file is as it was when it was opened, as far as its size and times tell.
    pub fn is_unchanged(&self) -> bool {
        Stamp::of(&self.file).is_ok_and(|now| now == self.stamp)
    }

    /// The whole file as mapped; of a detached one, zeros where nothing was kept.
    pub fn map(&self) -> &[u8] {
        &self.map
    }

    /// Lets pages of a range of the map that are read from now on come two MiB at a time, where the
    /// file system can do that. Elsewhere nothing changes.
    pub fn use_huge_pages(&self, range: &Range<usize>) {
        let _ = self.map.advise_range(memmap2::Advice::HugePage, range.start, range.len());
    }

    pub(super) fn header_bytes(&self) -> usize {
        self.header_bytes
    }

    /// Takes memory that has the file's bytes in `kept` for the map.
    pub(super) fn replace_map(&mut self, memory: Mmap, kept: Vec<Range<usize>>) {
        assert_eq!(memory.len(), self.map.len());
        self.known = Known::none();
        self.map = memory;
        self.kept = Some(kept);
    }

    fn holds(&self, range: &Range<usize>) -> bool {
        let Some(kept) = &self.kept else { return true };
        let run = kept.partition_point(|run| run.end < range.end);
        kept.get(run).is_some_and(|run| run.start <= range.start)
    }

    pub fn n_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    fn open(path: &Path) -> Result<(Shard, Header)> {
        let kind = fs::metadata(path).map_err(|e| Error::io(path, e))?;
        // Asked before opening: opening a named pipe would wait for ever.
        if kind.is_dir() {
            return Err(Error::format(path, "file", "a GGUF file", describe_folder(path)));
        }
        if !kind.is_file() {
            return Err(Error::format(path, "file", "a regular file", "a device, pipe or socket"));
        }
        Shard::map_file(path, File::open(path).map_err(|e| Error::io(path, e))?)
    }

    fn map_file(path: &Path, file: File) -> Result<(Shard, Header)> {
        let stamp = Stamp::of(&file).map_err(|e| Error::io(path, e))?;
        // SAFETY: the map is read-only and private to this value, and `&[u8]` handed out borrows
        // it. What Rust cannot rule out is another process writing to or truncating the file.
        // Changed bytes: everything taken from the map after the checks is either re-checked when
        // used (`ArrayIter`, UTF-8) or plain numbers, for which any bit pattern is valid, so the
        // result is wrong numbers and not undefined memory; the engine looks at `is_unchanged` and
        // gives no such result away. Truncation: the next touch of a lost page ends the process
        // with SIGBUS, and `lost_pages` says why. Where everything is computed in place we accept
        // that, as every program does that maps its model: the alternative is a second copy in
        // memory. A program that streams experts for as long as it runs calls `Gguf::detached`.
        let map = unsafe { Mmap::map(&file) };
        let map = match map {
            // FUSE with direct_io has no maps but private ones.
            Err(e) if e.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => {
                // SAFETY: the argument above, word for word: this map is read-only and private to
                // this value, too. That it is a copy on write changes only whether another
                // process's writes are seen, and old bytes are as valid as new ones.
                unsafe { MmapOptions::new().map_copy_read_only(&file) }.map_err(|_| e)
            }
            map => map,
        };
        let map = map.map_err(|e| cannot_map(path, &e))?;
        let header = Header::parse(path, &map, map.len() as u64)?;
        let header_bytes = map.len().min(header.data_offset as usize);
        let (path, known) = (path.to_owned(), Known::new(path, &map));
        Ok((Shard { path, file, stamp, known, map, header_bytes, kept: None }, header))
    }
}

/// An open model file.
#[derive(Debug)]
pub struct Gguf {
    version: u32,
    alignment: u64,
    /// Metadata of the first shard; the others have nothing more of use.
    metadata: Metadata,
    /// Keys that replace or extend it, each at most once.
    overrides: Vec<Override>,
    shards: Vec<Shard>,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
    is_header: bool,
    /// Keys that somebody has asked for.
    read: Mutex<HashSet<String>>,
}

impl Gguf {
    /// Maps and checks a file. The first shard of a split file brings in the others.
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf> {
        let (first, header) = Shard::open(path.as_ref())?;
        let mut gguf = Gguf::of_shard(first, header)?;
        gguf.open_other_shards()?;
        Ok(gguf)
    }

    /// Opens a file and takes other metadata for it.
    pub fn open_with(path: impl AsRef<Path>, overrides: &[Override]) -> Result<Gguf> {
        Gguf::open(path)?.with(overrides)
    }

    /// A file of `n_bytes` that is in no file system and has nothing but this header: its tensors
    /// are zeros that take no memory. `name` is for messages.
    pub fn of_header(name: &Path, header: &[u8], n_bytes: u64) -> Result<Gguf> {
        let file = unnamed_file(header, n_bytes).map_err(|e| Error::io(name, e))?;
        let (first, header) = Shard::map_file(name, file)?;
        Ok(Gguf { is_header: true, ..Gguf::of_shard(first, header)? })
    }

    /// Whether the tensors have no data, as [`Gguf::of_header`] says.
    pub fn is_header(&self) -> bool {
        self.is_header
    }

    fn of_shard(first: Shard, header: Header) -> Result<Gguf> {
        let mut gguf = Gguf {
            version: header.version,
            alignment: header.alignment,
            metadata: header.metadata,
            overrides: Vec::new(),
            shards: vec![first],
            tensors: Vec::new(),
            index: HashMap::new(),
            is_header: false,
            read: Mutex::default(),
        };
        gguf.add_tensors(header.tensors)?;
        Ok(gguf)
    }

    /// Other metadata, for all that reads it from here on. What the file says of its own form, its
    /// alignment and shards, has been read by then.
    pub fn with(mut self, overrides: &[Override]) -> Result<Gguf> {
        for given in overrides {
            let found = self.metadata.get(&self.shards[0].map, given.key());
            let fitted = given.fitted(self.path(), found)?;
            self.overrides.retain(|earlier| earlier.key() != given.key());
            self.overrides.push(fitted);
        }
        Ok(self)
    }

    /// The file that was given to `open`.
    pub fn path(&self) -> &Path {
        &self.shards[0].path
    }

    pub fn version(&self) -> u32 {
        self.version
    }

    /// Bytes at whose multiples tensors start.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Bytes of all files together.
    pub fn n_bytes(&self) -> u64 {
        self.shards.iter().map(Shard::n_bytes).sum()
    }

    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if !read.contains(key) {
            read.insert(key.to_owned());
        }
        drop(read);
        self.overridden(key).or_else(|| self.metadata.get(&self.shards[0].map, key))
    }

    /// Keys that start with `prefix` and that [`get`](Self::get) was not asked for so far, with
    /// their values.
    pub fn unread(&self, prefix: &str) -> Vec<(&str, Value<'_>)> {
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        self.keys().filter(|(key, _)| key.starts_with(prefix) && !read.contains(*key)).collect()
    }

    pub(super) fn overrides(&self) -> &[Override] {
        &self.overrides
    }

    fn overridden(&self, key: &str) -> Option<Value<'_>> {
        self.overrides.iter().find(|given| given.key() == key).map(Override::value)
    }

    /// All metadata, in file order; what only overrides say comes last.
    pub fn keys(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        let map = &self.shards[0].map;
        let own = self
            .metadata
            .iter(map)
            .map(|(key, value)| (key, self.overridden(key).unwrap_or(value)));
        let added = self.overrides.iter().filter(|o| self.metadata.get(map, o.key()).is_none());
        own.chain(added.map(|given| (given.key(), given.value())))
    }

    /// All tensors, in file order, shard by shard.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensor_index(name).map(|i| &self.tensors[i])
    }

    /// The index in `tensors` of the tensor of this name.
    pub fn tensor_index(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    /// A tensor that must be there.
    pub fn require_tensor(&self, name: &str) -> Result<&TensorInfo> {
        self.tensor(name)
            .ok_or_else(|| Error::format(self.path(), name, "a tensor", "no tensor of that name"))
    }

    pub(super) fn shards_mut(&mut self) -> &mut [Shard] {
        &mut self.shards
    }

    /// A tensor's data. `tensor` must be one of this file's.
    ///
    /// # Panics
    /// If the file was detached and the tensor not kept: there would be zeros.
    pub fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        // Cannot wrap: the parser has compared the end with the file's length.
        let start = tensor.file_offset as usize;
        let range = start..start + tensor.n_bytes as usize;
        let shard = &self.shards[tensor.shard];
        assert!(shard.holds(&range), "{}: not kept when the file was detached", tensor.name);
        &shard.map[range]
    }

    /// Some of a tensor's data: where the file was detached and the tensor not kept, they are read
    /// to `room` now.
    pub fn read_bytes<'a>(
        &'a self,
        tensor: &TensorInfo,
        range: Range<usize>,
        room: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        assert!(range.end as u64 <= tensor.n_bytes);
        let start = tensor.file_offset as usize;
        let (range, shard) = (start + range.start..start + range.end, &self.shards[tensor.shard]);
        if shard.holds(&range) {
            return Ok(&shard.map[range]);
        }
        room.resize(range.len(), 0);
        let read = shard.file.read_exact_at(room, range.start as u64);
        read.map_err(|e| Error::io(&shard.path, e))?;
        Ok(room)
    }

    /// Adds the last shard's tensors.
    fn add_tensors(&mut self, tensors: Vec<TensorInfo>) -> Result<()> {
        let shard = self.shards.len() - 1;
        for mut tensor in tensors {
            tensor.shard = shard;
            if self.index.insert(tensor.name.clone(), self.tensors.len()).is_some() {
                let field = format!("tensor {}", tensor.name);
                let got = "one of an earlier shard again";
                return Err(Error::format(&self.shards[shard].path, field, "a new name", got));
            }
            self.tensors.push(tensor);
        }
        Ok(())
    }

    fn open_other_shards(&mut self) -> Result<()> {
        let n = self.u32("split.count")?.unwrap_or(1);
        if n <= 1 {
            return Ok(());
        }
        let first = self.path().to_owned();
        let no = self.require_u32("split.no")?;
        let stem = shard_stem(&first, no, n)?;
        if no != 0 {
            let expected = format!("the first shard, {}", shard_name(&stem, 0, n));
            let got = format!("shard {} of {n}", u64::from(no) + 1);
            return Err(Error::format(first, "file", expected, got));
        }
        for no in 1..n {
            let path = first.with_file_name(shard_name(&stem, no, n));
            self.open_shard(&path, no, n)?;
        }
        self.check_split_tensors()
    }

    fn open_shard(&mut self, path: &Path, no: u32, n: u32) -> Result<()> {
        if !path.exists() {
            let expected = format!("shard {} of {n} beside the first", no + 1);
            return Err(Error::format(path, "file", expected, "no such file"));
        }
        let (shard, header) = Shard::open(path)?;
        for (key, expected) in [("split.no", no), ("split.count", n)] {
            let value = header.metadata.get(&shard.map, key);
            if value.and_then(|v| v.as_u64()) != Some(expected.into()) {
                let got = value.map_or("nothing".into(), |v| v.to_string());
                return Err(Error::format(path, key, expected.to_string(), got));
            }
        }
        self.shards.push(shard);
        self.add_tensors(header.tensors)
    }

    fn check_split_tensors(&self) -> Result<()> {
        let found = self.tensors.len() as u64;
        let expected = self.require_u64("split.tensors.count")?;
        if expected == found {
            return Ok(());
        }
        let expected = format!("{expected} tensors in all shards");
        Err(Error::format(self.path(), "split.tensors.count", expected, found.to_string()))
    }
}

/// The error of a file that cannot be mapped.
fn cannot_map(path: &Path, e: &io::Error) -> Error {
    let why = sentence(e);
    let hint = "its file system does not map files: copy it to a local disk, or mount that one \
                without direct_io";
    Error::io(path, io::Error::new(e.kind(), format!("{why}: {hint}")))
}

/// A file without a name that starts with `bytes`; the rest is a hole.
fn unnamed_file(bytes: &[u8], n_bytes: u64) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    let mut file = {
        use rustix::fs::{MemfdFlags, memfd_create};
        File::from(memfd_create("moeba-header", MemfdFlags::CLOEXEC)?)
    };
    #[cfg(not(target_os = "linux"))]
    let mut file = tempfile::tempfile()?;
    file.write_all(bytes)?;
    file.set_len(n_bytes)?;
    Ok(file)
}

/// Describes a folder that was given instead of a model file, and says what to do.
fn describe_folder(path: &Path) -> String {
    let names = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    let gguf = names.iter().filter(|name| name.ends_with(".gguf")).min();
    let checkpoint = |name: &String| name == "config.json" || name.ends_with(".safetensors");
    if let Some(gguf) = gguf {
        format!("a directory: give a file in it, such as {}", path.join(gguf).display())
    } else if names.iter().any(checkpoint) {
        let folder = path.display();
        format!(
            "a directory with a Hugging Face checkpoint: `moeba convert {folder} -o MODEL.gguf` \
             makes a GGUF file of it"
        )
    } else {
        "a directory".into()
    }
}

/// `stem-00001-of-00003.gguf`: the name that llama.cpp gives shard `no` (from 0) of `n`.
pub fn shard_name(stem: &str, no: u32, n: u32) -> String {
    format!("{stem}-{:05}-of-{n:05}.gguf", u64::from(no) + 1)
}

/// The stem of a shard's name, which must say what the file's metadata says.
fn shard_stem(path: &Path, no: u32, n: u32) -> Result<String> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let tail = shard_name("", no, n);
    match name.strip_suffix(&tail) {
        Some(stem) => Ok(stem.to_owned()),
        None => {
            let expected = format!("a name that ends in {tail}, as its metadata says");
            Err(Error::format(path, "file name", expected, format!("{name:?}")))
        }
    }
}
