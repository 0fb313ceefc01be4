//! Writes a GGUF file as a stream: metadata and descriptions first, then each tensor's bytes in
//! declared order. The file is written beside its final name and gets that name only when it is
//! whole and on disk; whatever goes wrong before leaves nothing behind.

use super::header::tensor_bytes;
use super::value::OwnedValue;
use super::{
    DEFAULT_ALIGNMENT, Gguf, MAX_KEY_BYTES, MAX_NAME_BYTES, TensorInfo, TensorType, alignment_fault,
};
use crate::{Error, Result, interrupt};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Bytes gathered before a write reaches the system.
const BUFFER_BYTES: usize = 1 << 20;

/// The argument that data is written to a file: the writer was made by `create`.
const HAS_FILE: &str = "a writer of a file";

const ALIGNMENT_KEY: &str = "general.alignment";

/// Use: `create`, `set` and `declare` all, then for each tensor in declared order
/// `begin_tensor`, `write` any number of times, `end_tensor`; then `finish`.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    /// `None` where only the header is wanted.
    out: Option<BufWriter<NamedTempFile>>,
    alignment: u64,
    /// Encoded keys and values.
    metadata: Vec<u8>,
    keys: HashSet<String>,
    /// `file_offset` counts from the start of the data until the header is written.
    tensors: Vec<TensorInfo>,
    names: HashSet<String>,
    data_bytes: u64,
    stage: Stage,
    _guard: Option<interrupt::Guard>,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    /// Nothing is written yet.
    Declaring,
    /// Tensor `next` is the next to begin.
    Between { next: usize },
    /// In a tensor's data, so many bytes short.
    Inside { tensor: usize, left: u64 },
}

impl Writer {
    /// Starts a file that will be called `path`. No `alignment` means the format's default.
    pub fn create(path: impl AsRef<Path>, alignment: Option<u32>) -> Result<Writer> {
        let path = path.as_ref();
        let mut writer = Writer::of_header(path, alignment)?;
        if path.is_dir() {
            return Err(Error::format(path, "file", "the name of a file", "a directory"));
        }
        // The rename at the end would put a file in the place of /dev/null.
        if path.exists() && !path.is_file() {
            let got = "a device, pipe or socket";
            return Err(Error::format(path, "file", "the name of a file", got));
        }
        let temp = temporary(path).map_err(|e| Error::io(path, e))?;
        writer._guard = Some(interrupt::guard(temp.path()));
        writer.out = Some(BufWriter::with_capacity(BUFFER_BYTES, temp));
        Ok(writer)
    }

    /// Takes metadata and descriptions alone, for `into_gguf`. `name` is for messages.
    pub fn of_header(name: &Path, alignment: Option<u32>) -> Result<Writer> {
        if let Some(expected) = alignment.and_then(alignment_fault) {
            let got = alignment.unwrap_or_default().to_string();
            return Err(Error::format(name, ALIGNMENT_KEY, expected, got));
        }
        let mut writer = Writer {
            path: name.to_owned(),
            out: None,
            alignment: alignment.unwrap_or(DEFAULT_ALIGNMENT).into(),
            metadata: Vec::new(),
            keys: HashSet::new(),
            tensors: Vec::new(),
            names: HashSet::new(),
            data_bytes: 0,
            stage: Stage::Declaring,
            _guard: None,
        };
        if let Some(alignment) = alignment {
            writer.put(ALIGNMENT_KEY, alignment.into())?;
        }
        Ok(writer)
    }

    /// The name that the file will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn fail(&self, field: &str, expected: impl Into<String>, got: impl Into<String>) -> Error {
        Error::format(&self.path, field, expected, got)
    }

    /// Adds a key; each may come once. The alignment is `create`'s to set.
    pub fn set(&mut self, key: &str, value: impl Into<OwnedValue>) -> Result<()> {
        if key == ALIGNMENT_KEY {
            return Err(self.fail(key, "the alignment given on creation", "a key"));
        }
        self.put(key, value.into())
    }

    fn put(&mut self, key: &str, value: OwnedValue) -> Result<()> {
        self.check_declaring(key)?;
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            let expected = format!("a key of 1 to {MAX_KEY_BYTES} bytes");
            return Err(self.fail(key, expected, format!("{} bytes", key.len())));
        }
        if !self.keys.insert(key.to_owned()) {
            return Err(self.fail(key, "a new key", "one that was set before"));
        }
        self.metadata.extend((key.len() as u64).to_le_bytes());
        self.metadata.extend(key.as_bytes());
        value.encode(&mut self.metadata);
        Ok(())
    }

    fn check_declaring(&self, field: &str) -> Result<()> {
        match self.stage {
            Stage::Declaring => Ok(()),
            _ => Err(self.fail(field, "all metadata and tensors before any data", "one after")),
        }
    }

    /// Declares the next tensor; `dims[0]` is the row length. Answers its size in bytes.
    pub fn declare(&mut self, name: &str, dims: &[u64], ty: TensorType) -> Result<u64> {
        self.check_declaring(name)?;
        if name.is_empty() || name.len() >= MAX_NAME_BYTES {
            let expected = format!("a tensor name of 1 to {} bytes", MAX_NAME_BYTES - 1);
            return Err(self.fail(name, expected, format!("{} bytes", name.len())));
        }
        let n_bytes = tensor_bytes(ty, dims).map_err(|(part, expected, got)| {
            self.fail(&format!("tensor {name}: {part}"), expected, got)
        })?;
        let padded = n_bytes.checked_next_multiple_of(self.alignment);
        let end = padded.and_then(|n| self.data_bytes.checked_add(n)).filter(|n| *n < 1 << 63);
        let Some(end) = end else {
            return Err(self.fail(name, "fewer than 2^63 bytes of data", "more"));
        };
        if !self.names.insert(name.to_owned()) {
            return Err(self.fail(name, "a new tensor name", "one that was declared before"));
        }
        self.tensors.push(TensorInfo {
            name: name.to_owned(),
            ty,
            dims: dims.to_vec(),
            shard: 0,
            file_offset: self.data_bytes,
            n_bytes,
        });
        self.data_bytes = end;
        Ok(n_bytes)
    }

    /// The model as it is declared, without data.
    pub fn into_gguf(mut self) -> Result<Gguf> {
        let header = self.header();
        let start = (header.len() as u64).next_multiple_of(self.alignment);
        Gguf::of_header(&self.path, &header, start + self.data_bytes)
    }

    /// The declared tensors, in order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Starts the data of the next declared tensor, which must be `name`.
    pub fn begin_tensor(&mut self, name: &str) -> Result<()> {
        if let Stage::Declaring = self.stage {
            self.write_header()?;
        }
        let Stage::Between { next } = self.stage else {
            return Err(self.fail(name, "the end of the previous tensor", "the next tensor"));
        };
        match self.tensors.get(next) {
            Some(tensor) if tensor.name == name => {
                self.stage = Stage::Inside { tensor: next, left: tensor.n_bytes };
                Ok(())
            }
            Some(tensor) => {
                let expected = format!("the data of {} next", tensor.name);
                Err(self.fail(name, expected, format!("the data of {name}")))
            }
            None => Err(self.fail(name, "no more tensors", format!("the data of {name}"))),
        }
    }

    /// More of the current tensor's data.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let Stage::Inside { tensor, left } = self.stage else {
            return Err(self.fail("data", "the start of a tensor", "bytes of no tensor"));
        };
        let n = bytes.len() as u64;
        if n > left {
            let field = self.tensors[tensor].name.clone();
            let expected = format!("{} bytes", self.tensors[tensor].n_bytes);
            return Err(self.fail(&field, expected, format!("at least {} more", n - left)));
        }
        self.put_bytes(bytes)?;
        self.stage = Stage::Inside { tensor, left: left - n };
        Ok(())
    }

    /// Ends the current tensor, which must be complete, and pads to the next.
    pub fn end_tensor(&mut self) -> Result<()> {
        let Stage::Inside { tensor, left } = self.stage else {
            return Err(self.fail("data", "the start of a tensor", "an end"));
        };
        let TensorInfo { name, n_bytes, .. } = &self.tensors[tensor];
        if left > 0 {
            let got = format!("{}", n_bytes - left);
            return Err(self.fail(name, format!("{n_bytes} bytes"), got));
        }
        self.pad(*n_bytes)?;
        self.stage = Stage::Between { next: tensor + 1 };
        Ok(())
    }

    /// A tensor's data at once.
    pub fn write_tensor(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.begin_tensor(name)?;
        self.write(bytes)?;
        self.end_tensor()
    }

    /// Puts the file on disk and gives it its name, which until now was free or another file's.
    pub fn finish(mut self) -> Result<()> {
        if let Stage::Declaring = self.stage {
            self.write_header()?;
        }
        let missing = match self.stage {
            Stage::Between { next } if next == self.tensors.len() => None,
            Stage::Between { next } | Stage::Inside { tensor: next, .. } => Some(next),
            Stage::Declaring => unreachable!("the header is written by now"),
        };
        if let Some(next) = missing {
            let name = &self.tensors[next].name;
            return Err(self.fail(name, "all of its data", "the end of the file"));
        }
        let path = self.path;
        let temp =
            self.out.expect(HAS_FILE).into_inner().map_err(|e| Error::io(&path, e.into_error()))?;
        persist(temp, &path).map_err(|e| Error::io(&path, e))
    }

    fn header(&mut self) -> Vec<u8> {
        let mut head = Vec::with_capacity(self.metadata.len() + 100 * self.tensors.len() + 64);
        head.extend(b"GGUF");
        head.extend(3u32.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.keys.len() as u64).to_le_bytes());
        head.append(&mut self.metadata);
        for tensor in &self.tensors {
            encode_tensor(tensor, &mut head);
        }
        head
    }

    fn write_header(&mut self) -> Result<()> {
        let head = self.header();
        self.reserve((head.len() as u64).next_multiple_of(self.alignment) + self.data_bytes)?;
        self.put_bytes(&head)?;
        self.pad(head.len() as u64)?;
        self.stage = Stage::Between { next: 0 };
        Ok(())
    }

    /// Asks for all the space now, where the file system can: a full disk is better found at the
    /// start than after an hour.
    fn reserve(&self, n_bytes: u64) -> Result<()> {
        #[cfg(target_os = "linux")]
        {
            use rustix::fs::{FallocateFlags, fallocate};
            let file = self.out.as_ref().expect(HAS_FILE).get_ref().as_file();
            if let Err(rustix::io::Errno::NOSPC) =
                fallocate(file, FallocateFlags::KEEP_SIZE, 0, n_bytes)
            {
                return Err(Error::io(&self.path, rustix::io::Errno::NOSPC.into()));
            }
        }
        let _ = n_bytes;
        Ok(())
    }

    fn put_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let out = self.out.as_mut().expect(HAS_FILE);
        out.write_all(bytes).map_err(|e| Error::io(&self.path, e))
    }

    /// Zeros from position `n` to the next multiple of the alignment.
    fn pad(&mut self, n: u64) -> Result<()> {
        let zeros = vec![0; (n.next_multiple_of(self.alignment) - n) as usize];
        self.put_bytes(&zeros)
    }
}

fn encode_tensor(tensor: &TensorInfo, out: &mut Vec<u8>) {
    out.extend((tensor.name.len() as u64).to_le_bytes());
    out.extend(tensor.name.as_bytes());
    out.extend((tensor.dims.len() as u32).to_le_bytes());
    tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
    out.extend(tensor.ty.id().to_le_bytes());
    out.extend(tensor.file_offset.to_le_bytes());
}

/// The folder that a file is in.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// A hidden file beside `path`, so that the rename stays within one file system.
fn temporary(path: &Path) -> io::Result<NamedTempFile> {
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(path.file_name().unwrap_or_default());
    prefix.push(".");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".part");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As an ordinary file would have, less the umask; the default is the owner's eyes only.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder(path))
}

/// Data to disk, then the name, then the name to disk: after a power cut there is the old file or
/// the whole new one.
fn persist(temp: NamedTempFile, path: &Path) -> io::Result<()> {
    temp.as_file().sync_all()?;
    temp.persist(path).map_err(|e| e.error)?;
    #[cfg(unix)]
    File::open(folder(path))?.sync_all()?;
    Ok(())
}
