//! A Hugging Face checkpoint's tensors: one safetensors file or several behind an index.
//!
//! A safetensors file is a header length (u64, little-endian), a JSON header, and the data. The
//! crate of that name wants the whole file in memory before it reads a header, so only its types
//! are used: headers are checked here against the file's length, and data comes by positioned
//! reads of the rows wanted, never by mapping a shard.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::encoding::Encoding;
use super::json::{Json, shown};
use crate::{Error, Result};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The format's own limit for headers, which keeps a hostile length from allocating much.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of the header's length.
const LENGTH_BYTES: u64 = 8;

#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, HfTensor>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
}

/// One tensor of the checkpoint. `shape` has the row length last.
#[derive(Clone, Debug)]
pub struct HfTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// `None` if it holds no weights.
    pub encoding: Option<Encoding>,
    shard: usize,
    offset: u64,
}

impl HfTensor {
    /// This tensor under another name.
    pub fn named(&self, name: impl Into<String>) -> HfTensor {
        HfTensor { name: name.into(), ..self.clone() }
    }
}

impl Checkpoint {
    /// Opens every shard and checks every header.
    pub fn open(folder: &Path) -> Result<Checkpoint> {
        if !folder.is_dir() {
            let got = if folder.exists() { "a file" } else { "nothing of that name" };
            return Err(Error::format(folder, "folder", "a checkpoint's folder", got));
        }
        let mut checkpoint =
            Checkpoint { folder: folder.to_owned(), shards: Vec::new(), tensors: BTreeMap::new() };
        match Json::open_optional(folder.join(INDEX))? {
            Some(index) => checkpoint.open_shards(&index)?,
            None if folder.join(SINGLE).exists() => checkpoint.open_shard(SINGLE)?,
            None => {
                let expected = format!("{SINGLE} or {INDEX}");
                return Err(Error::format(folder, "weights", expected, "neither"));
            }
        }
        Ok(checkpoint)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = &HfTensor> {
        self.tensors.values()
    }

    /// The file that a tensor is in.
    pub fn path_of(&self, tensor: &HfTensor) -> &Path {
        &self.shards[tensor.shard].path
    }

    pub fn get(&self, name: &str) -> Option<&HfTensor> {
        self.tensors.get(name)
    }

    /// Puts a tensor in the place of the one of its name.
    pub fn insert(&mut self, tensor: HfTensor) {
        self.tensors.insert(tensor.name.clone(), tensor);
    }

    pub fn remove(&mut self, name: &str) -> Option<HfTensor> {
        self.tensors.remove(name)
    }

    /// Fills `out` with the tensor's bytes from `offset` on.
    pub fn read_bytes(&self, tensor: &HfTensor, offset: u64, out: &mut [u8]) -> Result<()> {
        let shard = &self.shards[tensor.shard];
        let read = shard.file.read_exact_at(out, tensor.offset + offset);
        read.map_err(|e| Error::io(&shard.path, e))
    }

    /// Whether two tensors have the same values.
    pub fn is_same(&self, a: &HfTensor, b: &HfTensor) -> Result<bool> {
        const AT_ONCE: u64 = 1 << 18;
        let n: u64 = a.shape.iter().product();
        if a.shape != b.shape {
            return Ok(false);
        }
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for first in (0..n).step_by(AT_ONCE as usize) {
            let len = AT_ONCE.min(n - first) as usize;
            left.resize(len, 0.0);
            right.resize(len, 0.0);
            self.read(a, first, &mut left)?;
            self.read(b, first, &mut right)?;
            if left != right {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The complaint about a tensor of a type that holds no weights.
    pub fn bad_type(&self, tensor: &HfTensor) -> Error {
        self.bad_dtype(tensor, "F32, F16 or BF16")
    }

    pub fn bad_dtype(&self, tensor: &HfTensor, expected: &str) -> Error {
        let field = format!("tensor {}: dtype", tensor.name);
        Error::format(self.path_of(tensor), field, expected, tensor.dtype.to_string())
    }

    /// The tensors of a file beside the checkpoint's own, which are read as those are and are none
    /// of its tensors.
    pub fn open_beside(&mut self, path: &Path) -> Result<Vec<HfTensor>> {
        let n_bytes = fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        let tensors = read_header(path, &file, n_bytes, self.shards.len())?;
        self.shards.push(Shard { path: path.to_owned(), file });
        Ok(tensors)
    }

    /// All shards that the index names; what it says of a tensor's place must be true.
    fn open_shards(&mut self, index: &Json) -> Result<()> {
        let map = index.at("weight_map").and_then(Value::as_object);
        let map = map.ok_or_else(|| {
            index.fail("weight_map", "an object of tensor names and files", "none")
        })?;
        let mut opened: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, file) in map {
            let field = || format!("weight_map: {name}");
            let file = file
                .as_str()
                .filter(|f| is_plain_name(f))
                .ok_or_else(|| index.fail(&field(), "a file name without a path", shown(file)))?;
            if !opened.contains_key(file) {
                opened.insert(file, self.shards.len());
                self.open_shard(file)?;
            }
            let found = self.tensors.get(name).map(|t| t.shard);
            if found != opened.get(file).copied() {
                return Err(index.fail(&field(), format!("a tensor of {file}"), "none there"));
            }
        }
        Ok(())
    }

    fn open_shard(&mut self, name: &str) -> Result<()> {
        let path = self.folder.join(name);
        // Asked before opening: opening a named pipe would wait for ever.
        let kind = fs::metadata(&path).map_err(|e| Error::io(&path, e))?;
        if !kind.is_file() {
            return Err(Error::format(path, "file", "a regular file", "something else"));
        }
        let file = File::open(&path).map_err(|e| Error::io(&path, e))?;
        let tensors = read_header(&path, &file, kind.len(), self.shards.len())?;
        for tensor in tensors {
            if let Some(other) = self.tensors.get(&tensor.name) {
                let field = format!("tensor {}", tensor.name);
                let got = format!("one that {} has too", self.path_of(other).display());
                return Err(Error::format(path, field, "a tensor of no other shard", got));
            }
            self.tensors.insert(tensor.name.clone(), tensor);
        }
        self.shards.push(Shard { path, file });
        Ok(())
    }
}

/// One component, which is not `..`, and no Windows path in disguise either.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(p)), None) if p == name)
        && !name.contains(['\\', ':'])
}

fn read_header(path: &Path, file: &File, file_len: u64, shard: usize) -> Result<Vec<HfTensor>> {
    let fail = |expected: String, got: String| Error::format(path, "header length", expected, got);
    if file_len < LENGTH_BYTES {
        return Err(fail(format!("{LENGTH_BYTES} bytes"), format!("a file of {file_len}")));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact_at(&mut length, 0).map_err(|e| Error::io(path, e))?;
    let n = u64::from_le_bytes(length);
    let most = MAX_HEADER_BYTES.min(file_len - LENGTH_BYTES);
    if n > most {
        let expected = format!("at most {most} in a file of {file_len} bytes");
        return Err(fail(expected, n.to_string()));
    }
    let mut header = vec![0; n as usize];
    file.read_exact_at(&mut header, LENGTH_BYTES).map_err(|e| Error::io(path, e))?;
    let Entries(entries) = serde_json::from_slice(&header)
        .map_err(|e| Error::format(path, "header", "JSON that describes tensors", e.to_string()))?;
    check_extents(path, entries, LENGTH_BYTES + n, file_len, shard)
}

/// Sizes must be those of the shapes, and the tensors must fill the data without gap or overlap,
/// as the format asks: a second meaning of the same bytes is how files lie.
fn check_extents(
    path: &Path,
    mut entries: Vec<(String, TensorInfo)>,
    data_start: u64,
    file_len: u64,
    shard: usize,
) -> Result<Vec<HfTensor>> {
    entries.sort_by_key(|(_, info)| info.data_offsets);
    let mut end_before = 0;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, info) in entries {
        let fail = |part: &str, expected: String, got: String| {
            Error::format(path, format!("tensor {name}: {part}"), expected, got)
        };
        let (start, end) = info.data_offsets;
        let offsets = format!("{start} to {end}");
        if start as u64 != end_before {
            let expected = format!("data from {end_before}, where the tensor before ends");
            return Err(fail("data_offsets", expected, offsets));
        }
        let shape: Vec<u64> = info.shape.iter().map(|d| *d as u64).collect();
        let n_bytes = byte_size(info.dtype, &shape)
            .ok_or_else(|| fail("shape", "fewer than 2^63 bytes".into(), format!("{shape:?}")))?;
        if (start as u64).checked_add(n_bytes) != Some(end as u64) {
            let expected = format!("{n_bytes} bytes for {:?} {shape:?}", info.dtype);
            return Err(fail("data_offsets", expected, offsets));
        }
        end_before = end as u64;
        // Cannot wrap: n_bytes < 2^63 and the start is the sum of ends checked before.
        if data_start + end_before > file_len {
            let expected = format!("data up to byte {}", data_start + end_before);
            return Err(fail("data_offsets", expected, format!("a file of {file_len} bytes")));
        }
        let offset = data_start + start as u64;
        let (dtype, encoding) = (info.dtype, Encoding::of(info.dtype));
        tensors.push(HfTensor { name, dtype, shape, encoding, shard, offset });
    }
    if data_start + end_before != file_len {
        let expected = format!("{} bytes", data_start + end_before);
        return Err(Error::format(path, "file size", expected, file_len.to_string()));
    }
    Ok(tensors)
}

fn byte_size(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    let n = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d))?;
    let bits = n.checked_mul(dtype.bitsize() as u64)?;
    (bits % 8 == 0).then_some(bits / 8).filter(|n| *n < 1 << 62)
}

/// The header's tensors in its own order. A name that comes twice is an error, which a map would
/// hide.
struct Entries(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        from.deserialize_map(CollectEntries)
    }
}

struct CollectEntries;

impl<'de> Visitor<'de> for CollectEntries {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A>(self, mut map: A) -> std::result::Result<Entries, A::Error>
    where
        A: MapAccess<'de>,
    {
        let mut entries = Vec::new();
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("{name} twice")));
            }
            let info = map.next_value::<TensorInfo>();
            let info = info.map_err(|e| A::Error::custom(format!("{name}: {e}")))?;
            entries.push((name, info));
        }
        Ok(Entries(entries))
    }
}
