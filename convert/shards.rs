//! Models in several files, as llama-gguf-split cuts them and puts them together: names
//! `PREFIX-00001-of-00003.gguf`, all metadata in the first, and in each its number (`split.no`),
//! how many there are (`split.count`) and the tensors of all (`split.tensors.count`).

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::Written;
use super::layout::{self, Layout, Target};
use super::source::Source;
use crate::gguf::{Gguf, Writer, shard_name};
use crate::{Error, Result};

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const N_TENSORS: &str = "split.tensors.count";

/// The keys that say how a model is cut.
pub const KEYS: [&str; 3] = [NO, COUNT, N_TENSORS];

/// The places at which a model is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    MaxTensors(usize),
    /// Bytes of tensors; the metadata comes on top.
    MaxBytes(u64),
}

#[derive(Clone, Debug)]
pub struct SplitOptions {
    pub input: PathBuf,
    /// The beginning of the names of the files.
    pub prefix: PathBuf,
    pub cut: Cut,
    /// The first file has metadata alone.
    pub no_tensor_first_split: bool,
}

/// The file of shard `no` of `n`.
pub fn path(prefix: &Path, no: usize, n: usize) -> PathBuf {
    let stem = prefix.file_name().unwrap_or_default().to_string_lossy();
    prefix.with_file_name(shard_name(&stem, no as u32, n as u32))
}

/// The parts of a model that its files get: numbers of tensors, and their bytes.
pub fn plan(input: &Gguf, options: &SplitOptions) -> Vec<(Range<usize>, u64)> {
    let sizes = input.tensors().iter().map(|t| t.n_bytes.next_multiple_of(input.alignment()));
    let mut parts = vec![(0..0, 0)];
    if options.no_tensor_first_split {
        parts.push((0..0, 0));
    }
    for (i, size) in sizes.enumerate() {
        let (part, bytes) = parts.last_mut().expect("there is a first part");
        let is_full = match options.cut {
            Cut::MaxTensors(n) => i > 0 && i.is_multiple_of(n),
            Cut::MaxBytes(n) => part.start < part.end && *bytes + size > n,
        };
        if is_full {
            parts.push((i..i + 1, size));
        } else {
            (part.end, *bytes) = (i + 1, *bytes + size);
        }
    }
    parts
}

/// Cuts a model, whose tensors stay as they are.
pub fn split(options: &SplitOptions) -> Result<Written> {
    let input = Gguf::open(&options.input)?;
    let parts = plan(&input, options);
    let (sources, targets) = as_they_are(&input);
    let paths: Vec<PathBuf> =
        (0..parts.len()).map(|no| path(&options.prefix, no, parts.len())).collect();
    write(&paths, |no, path| {
        let mut writer = Writer::create(path, own_alignment(&input))?;
        if no == 0 {
            copy_keys(&input, &mut writer, &[])?;
        }
        set_keys(&mut writer, [no, parts.len(), targets.len()])?;
        let part = parts[no].0.clone();
        let job = |i: usize| sources[part.start + i].job();
        layout::write(writer, Layout::Standard, &targets[part.clone()], "splitting", job)
    })
}

/// Puts the files of a model together; `input` is the first.
pub fn merge(input: &Path, output: &Path) -> Result<Written> {
    let input = Gguf::open(input)?;
    if input.shards().len() < 2 && input.get(COUNT).is_none() {
        return Err(Error::format(input.path(), COUNT, "a file of a split model", "nothing"));
    }
    let (sources, targets) = as_they_are(&input);
    let mut writer = Writer::create(output, own_alignment(&input))?;
    // llama-gguf-split leaves the other keys, and says by this one that the model is whole.
    copy_keys(&input, &mut writer, &[NO, N_TENSORS])?;
    writer.set(COUNT, 0u16)?;
    layout::write(writer, Layout::Standard, &targets, "merging", |i| sources[i].job())
}

/// Writes files, of which each gets its name when it is whole; if one fails, those before it go.
pub fn write(paths: &[PathBuf], one: impl Fn(usize, &Path) -> Result<Written>) -> Result<Written> {
    let mut all = Written { n_tensors: 0, bytes_in: None, bytes_out: 0, seconds: 0.0 };
    for (no, path) in paths.iter().enumerate() {
        let written = one(no, path).inspect_err(|_| {
            for path in &paths[..no] {
                let _ = std::fs::remove_file(path);
            }
        })?;
        all.n_tensors += written.n_tensors;
        all.bytes_out += written.bytes_out;
        all.seconds += written.seconds;
    }
    Ok(all)
}

/// Says which file of how many this is, and how many tensors all have.
pub fn set_keys(writer: &mut Writer, [no, count, n_tensors]: [usize; 3]) -> Result<()> {
    let small = |n: usize| {
        let got = format!("{count} files");
        u16::try_from(n).map_err(|_| Error::format(writer.path(), COUNT, "at most 65535", got))
    };
    let (no, count) = (small(no)?, small(count)?);
    writer.set(NO, no)?;
    writer.set(N_TENSORS, n_tensors as i32)?;
    writer.set(COUNT, count)
}

/// All keys but those of the cut, of which `kept` stay.
fn copy_keys(input: &Gguf, writer: &mut Writer, kept: &[&str]) -> Result<()> {
    let is_dropped =
        |key: &str| key == "general.alignment" || KEYS.contains(&key) && !kept.contains(&key);
    input
        .keys()
        .filter(|(key, _)| !is_dropped(key))
        .try_for_each(|(key, value)| writer.set(key, value))
}

fn own_alignment(input: &Gguf) -> Option<u32> {
    let is_named = input.get("general.alignment").is_some();
    u32::try_from(input.alignment()).ok().filter(|_| is_named)
}

/// Tensors as the file has them, whatever its layout.
fn as_they_are(input: &Gguf) -> (Vec<Source<'_>>, Vec<Target>) {
    let sources: Vec<Source<'_>> =
        input.tensors().iter().map(|tensor| Source::whole(input, tensor)).collect();
    let target = |s: &Source<'_>| Target { name: s.name.clone(), dims: s.dims.clone(), ty: s.ty };
    let targets = sources.iter().map(target).collect();
    (sources, targets)
}
