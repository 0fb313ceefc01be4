//! Importance matrices: how much an error in each input column of a matrix matters, measured as the
//! mean square of the activations that the column met. llama.cpp's `llama-imatrix` writes them in
//! two formats, and both are read here:
//!
//! - GGUF with `general.type` "imatrix": for a tensor NAME the f32 tensors `NAME.in_sum2` (sums of
//!   squares, a row for each expert) and `NAME.counts` (activations summed, one for each expert);
//! - before that, a binary file, little-endian: the number of entries, an i32; for each an i32
//!   length and the name, the number of passes, the number of values, and the values, f32 sums of
//!   means over the passes; then, perhaps, the number of chunks, an i32 length and the data set.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use byteorder::{ByteOrder, LittleEndian as LE};

use super::layout::Target;
use super::mix::{self, Mix};
use super::stream::Importance;
use crate::gguf::{Gguf, OwnedValue, TensorType, Writer};
use crate::model::input_sums::Sums;
use crate::{Error, Result};

/// An open importance matrix. Values stay in the file until they are asked for.
pub struct Imatrix {
    path: PathBuf,
    source: Source,
    datasets: Vec<String>,
    chunks: u32,
}

enum Source {
    Gguf(Gguf),
    Legacy { bytes: Vec<u8>, entries: BTreeMap<String, Legacy> },
}

struct Legacy {
    passes: i32,
    values: Range<usize>,
}

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

impl Imatrix {
    /// Opens a file of either format and checks every entry.
    pub fn open(path: &Path) -> Result<Imatrix> {
        let mut magic = [0; 4];
        let read = std::fs::File::open(path).and_then(|mut file| {
            use std::io::Read;
            file.read_exact(&mut magic)
        });
        let imatrix = match read {
            Ok(()) if &magic == b"GGUF" => Self::open_gguf(path)?,
            Ok(()) => Self::open_legacy(path)?,
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
                let got = "a file of fewer than 4 bytes";
                return Err(Error::format(path, "file", "an importance matrix", got));
            }
            Err(e) => return Err(Error::io(path, e)),
        };
        for name in imatrix.names() {
            imatrix.columns(name)?;
        }
        Ok(imatrix)
    }

    fn open_gguf(path: &Path) -> Result<Imatrix> {
        let gguf = Gguf::open(path)?;
        let kind = gguf.require_str("general.type")?;
        if kind != "imatrix" {
            return Err(Error::format(path, "general.type", "imatrix", kind));
        }
        let datasets = gguf.strings("imatrix.datasets")?.unwrap_or_default();
        let datasets = datasets.iter().map(|s| String::from_utf8_lossy(s).into_owned()).collect();
        let chunks = gguf.u32("imatrix.chunk_count")?.unwrap_or(0);
        for tensor in gguf.tensors() {
            let (name, other) = match tensor.name.strip_suffix(COUNTS) {
                Some(name) => (name, SUMS),
                None => (tensor.name.strip_suffix(SUMS).unwrap_or_default(), COUNTS),
            };
            let fail = |expected: String, got: &str| {
                Err(Error::format(path, format!("tensor {}", tensor.name), expected, got))
            };
            if name.is_empty() {
                return fail(format!("a name that ends in {SUMS} or {COUNTS}"), "another");
            }
            if tensor.ty != TensorType::F32 {
                return fail("F32".into(), tensor.ty.name());
            }
            if gguf.tensor(&format!("{name}{other}")).is_none() {
                return fail(format!("{name}{other} beside it"), "nothing");
            }
        }
        Ok(Imatrix { path: path.to_owned(), source: Source::Gguf(gguf), datasets, chunks })
    }

    fn open_legacy(path: &Path) -> Result<Imatrix> {
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
        let mut cursor = Cursor { path, bytes: &bytes, at: 0 };
        let n_entries = cursor.count("number of entries", 1)?;
        let mut entries = BTreeMap::new();
        for i in 0..n_entries {
            let field = |part: &str| format!("entry {}: {part}", i + 1);
            let n = cursor.count(&field("length of the name"), 1)?;
            let name = cursor.take(&field("name"), n)?;
            let name = String::from_utf8_lossy(&bytes[name]).into_owned();
            let passes = cursor.i32(&field("number of passes"))?;
            let n = cursor.count(&field("number of values"), 1)?;
            let values = cursor.take(&format!("{name}: values"), n.saturating_mul(4))?;
            entries.insert(name, Legacy { passes, values });
        }
        let (mut chunks, mut datasets) = (0, Vec::new());
        if cursor.at < bytes.len() {
            chunks = cursor.count("number of chunks", 0)? as u32;
        }
        if cursor.at < bytes.len() {
            let n = cursor.count("length of the data set's name", 0)?;
            let name = cursor.take("data set", n)?;
            datasets.push(String::from_utf8_lossy(&bytes[name]).into_owned());
        }
        datasets.retain(|name| !name.is_empty());
        let source = Source::Legacy { bytes, entries };
        Ok(Imatrix { path: path.to_owned(), source, datasets, chunks })
    }

    /// The tensors that it has entries of.
    fn names(&self) -> Vec<&str> {
        match &self.source {
            Source::Gguf(gguf) => {
                gguf.tensors().iter().filter_map(|t| t.name.strip_suffix(SUMS)).collect()
            }
            Source::Legacy { entries, .. } => entries.keys().map(String::as_str).collect(),
        }
    }

    /// Adds its sums to others, and what they were made of.
    pub fn add_to(&self, all: &mut BTreeMap<String, Sums>, facts: &mut ImatrixFacts) -> Result<()> {
        let Source::Gguf(gguf) = &self.source else {
            let expected = "an importance matrix in GGUF, which keeps its sums";
            return Err(Error::format(&self.path, "file", expected, "one of the old format"));
        };
        for name in self.names() {
            let Some((squares, counts)) = floats(gguf, name) else { continue };
            let sums = all.entry(name.to_owned()).or_default();
            if sums.counts.is_empty() {
                sums.squares.resize(squares.len(), 0.0);
                sums.counts.resize(counts.len(), 0);
            }
            if (sums.squares.len(), sums.counts.len()) != (squares.len(), counts.len()) {
                let expected = format!("{} sums of {}", sums.squares.len(), sums.counts.len());
                let got = format!("{} of {}", squares.len(), counts.len());
                return Err(Error::format(&self.path, name, expected, got));
            }
            sums.squares.iter_mut().zip(squares).for_each(|(sum, more)| *sum += more);
            sums.counts.iter_mut().zip(counts).for_each(|(n, more)| *n += more.round() as u64);
        }
        facts.datasets.extend(self.datasets.iter().cloned());
        facts.n_chunks += self.chunks;
        Ok(())
    }

    /// The weight of each column of a tensor, matrix after matrix.
    fn columns(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let columns = match &self.source {
            Source::Gguf(gguf) => {
                let Some((sums, counts)) = floats(gguf, name) else { return Ok(None) };
                self.means(name, sums, &counts)?
            }
            Source::Legacy { bytes, entries } => {
                let Some(entry) = entries.get(name) else { return Ok(None) };
                let sums = bytes[entry.values.clone()].as_chunks::<4>().0;
                let passes = entry.passes.max(1) as f32;
                sums.iter().map(|b| f32::from_le_bytes(*b) / passes).collect()
            }
        };
        match columns.iter().find(|w| !w.is_finite() || **w < 0.0) {
            None => Ok(Some(columns)),
            Some(w) => {
                let expected = "mean squares, which are finite and not negative";
                Err(Error::format(&self.path, name, expected, w.to_string()))
            }
        }
    }

    /// Sums over counts; ones for an expert that met nothing, so that its weights count alike.
    fn means(&self, name: &str, mut sums: Vec<f32>, counts: &[f32]) -> Result<Vec<f32>> {
        if counts.is_empty() || !sums.len().is_multiple_of(counts.len()) {
            let expected = format!("a multiple of {} values, one row a count", counts.len());
            let got = sums.len().to_string();
            return Err(Error::format(&self.path, format!("{name}{SUMS}"), expected, got));
        }
        let row_len = sums.len() / counts.len();
        for (row, count) in sums.chunks_exact_mut(row_len).zip(counts) {
            let count = count.round();
            row.iter_mut().for_each(|x| *x = if count > 0.0 { *x / count } else { 1.0 });
        }
        Ok(sums)
    }

    /// The importance of the columns of a tensor of these dimensions, if there is an entry.
    /// A wrong size is an error, but for the embedding, whose rows no product has as inputs.
    pub fn of(&self, name: &str, dims: &[u64]) -> Result<Option<Importance>> {
        let Some(columns) = self.columns(name)? else { return Ok(None) };
        let matrices: u64 = dims.iter().skip(2).product();
        let expected = dims[0] * matrices;
        if columns.len() as u64 == expected {
            return Ok(Some(Importance { columns, rows: dims.get(1).copied().unwrap_or(1) }));
        }
        if name == "token_embd.weight" {
            return Ok(None);
        }
        let expected = format!("{expected} values ({} columns of {matrices} matrices)", dims[0]);
        let got = columns.len().to_string();
        Err(Error::format(&self.path, format!("entry {name}"), expected, got))
    }

    /// The importance of a tensor that `open_for` was shown.
    pub fn checked(&self, name: &str, dims: &[u64]) -> Option<Importance> {
        self.of(name, dims).expect("its size has been checked")
    }

    /// The output's metadata about it, in llama.cpp's keys.
    pub fn keys(&self) -> Vec<(&'static str, OwnedValue)> {
        let file = self.path.to_string_lossy();
        let mut keys = vec![("quantize.imatrix.file", file.as_ref().into())];
        if let Some(dataset) = self.datasets.first() {
            keys.push(("quantize.imatrix.dataset", dataset.as_str().into()));
        }
        keys.push(("quantize.imatrix.entries_count", (self.names().len() as u32).into()));
        if self.chunks > 0 {
            keys.push(("quantize.imatrix.chunks_count", self.chunks.into()));
        }
        keys
    }
}

/// The origin of an importance matrix.
#[derive(Clone, Debug)]
pub struct ImatrixFacts {
    pub datasets: Vec<String>,
    /// Windows of text that were computed, and their tokens.
    pub n_chunks: u32,
    pub chunk_size: u32,
}

/// Writes sums by tensor as llama-imatrix does, in GGUF.
pub fn write(path: &Path, sums: &BTreeMap<String, Sums>, facts: &ImatrixFacts) -> Result<()> {
    let mut writer = Writer::create(path, None)?;
    writer.set("general.type", "imatrix")?;
    writer.set("imatrix.datasets", facts.datasets.clone())?;
    writer.set("imatrix.chunk_count", facts.n_chunks)?;
    writer.set("imatrix.chunk_size", facts.chunk_size)?;
    for (name, sums) in sums {
        let n = sums.counts.len() as u64;
        // One matrix has no dimension of its own.
        let n_dims = if n == 1 { 1 } else { 2 };
        for (part, row_len) in [(SUMS, sums.squares.len() as u64 / n), (COUNTS, 1)] {
            let dims = [row_len, n];
            writer.declare(&format!("{name}{part}"), &dims[..n_dims], TensorType::F32)?;
        }
    }
    for (name, sums) in sums {
        let counts: Vec<f32> = sums.counts.iter().map(|n| *n as f32).collect();
        for (part, values) in [(SUMS, &sums.squares), (COUNTS, &counts)] {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            writer.write_tensor(&format!("{name}{part}"), &bytes)?;
        }
    }
    writer.finish()
}

/// The matrix at `path`, if there is one, with the sizes of its entries checked against the
/// tensors that are going to be quantised. What it lacks is a warning, or an error for tensors
/// that are nothing without.
pub fn open_for<'a>(
    path: Option<&Path>,
    mix: Option<Mix>,
    tensors: impl Iterator<Item = &'a Target>,
) -> Result<Option<Imatrix>> {
    let imatrix = path.map(Imatrix::open).transpose()?;
    let mut missing = Vec::new();
    for Target { name, dims, ty } in tensors.filter(|t| t.ty.block_len() > 1) {
        if let Some(imatrix) = &imatrix
            && imatrix.of(name, dims)?.is_some()
        {
            continue;
        }
        if let Some(mix) = mix.filter(|mix| mix::needs_importance(*mix, name, *ty)) {
            let what = format!("{} of {name} in {}", ty, mix.name());
            return Err(Error::invalid(match path {
                Some(path) => format!("{}: {what} needs an entry, but has none", path.display()),
                None => format!("{what} needs an importance matrix: --imatrix FILE"),
            }));
        }
        missing.push(name.as_str());
    }
    if imatrix.is_some() && !missing.is_empty() {
        log::warn!(
            "{} tensors have no entry in the importance matrix: {}",
            missing.len(),
            missing.join(", ")
        );
    }
    Ok(imatrix)
}

/// The sums and counts of a tensor.
fn floats(gguf: &Gguf, name: &str) -> Option<(Vec<f32>, Vec<f32>)> {
    let of = |part: &str| {
        let tensor = gguf.tensor(&format!("{name}{part}"))?;
        let bytes = gguf.bytes(tensor).as_chunks::<4>().0;
        Some(bytes.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>())
    };
    Some((of(SUMS)?, of(COUNTS)?))
}

/// A place in a file of the old format.
struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn take(&mut self, field: &str, n: usize) -> Result<Range<usize>> {
        let left = self.bytes.len() - self.at;
        if n > left {
            let expected = format!("{n} bytes at position {}", self.at);
            return Err(Error::format(self.path, field, expected, format!("{left}")));
        }
        self.at += n;
        Ok(self.at - n..self.at)
    }

    fn i32(&mut self, field: &str) -> Result<i32> {
        Ok(LE::read_i32(&self.bytes[self.take(field, 4)?]))
    }

    fn count(&mut self, field: &str, least: i32) -> Result<usize> {
        let n = self.i32(field)?;
        if n < least {
            let expected = format!("an importance matrix, with a number from {least} here");
            return Err(Error::format(self.path, field, expected, n.to_string()));
        }
        Ok(n as usize)
    }
}
