//! A GGUF header from bytes: metadata and tensor descriptions, fully checked. It knows no files
//! and allocates no more than a small multiple of the bytes it is given, so that it can be fuzzed.

use super::parse::{Cursor, Extent, FieldName};
use super::value::Value;
use super::{
    DEFAULT_ALIGNMENT, MAX_DIMS, MAX_KEY_BYTES, MAX_NAME_BYTES, TensorType, alignment_fault, sniff,
};
use crate::{Error, Result};
use std::collections::HashMap;
use std::path::Path;

/// The fewest bytes of a key with its value: key length, one byte of key, type, one byte.
const MIN_KEY_VALUE_BYTES: usize = 8 + 1 + 4 + 1;

/// The fewest bytes of a tensor description: name length, one byte of name, number of
/// dimensions, one dimension, type, offset.
const MIN_TENSOR_BYTES: usize = 8 + 1 + 4 + 8 + 4 + 8;

/// Keys and values, in file order. Values stay in the file's bytes.
#[derive(Debug)]
pub struct Metadata {
    entries: Vec<(Box<str>, Extent)>,
    index: HashMap<Box<str>, usize>,
}

impl Metadata {
    fn parse(cursor: &mut Cursor<'_>, n: usize) -> Result<Metadata> {
        let mut meta = Metadata { entries: Vec::with_capacity(n), index: HashMap::new() };
        for i in 0..n {
            let field = FieldName::Key(i as u64);
            let key = cursor.name(field, MAX_KEY_BYTES)?;
            if meta.index.insert(key.into(), i).is_some() {
                return Err(cursor.fail(
                    field,
                    "a new key",
                    format!("{} again", Value::String(key.as_bytes())),
                ));
            }
            meta.entries.push((key.into(), cursor.extent(key)?));
        }
        Ok(meta)
    }

    /// `bytes` must be those that were parsed, here and in `iter`.
    pub fn get<'b>(&self, bytes: &'b [u8], key: &str) -> Option<Value<'b>> {
        let &i = self.index.get(key)?;
        Some(self.entries[i].1.value(bytes))
    }

    /// All keys and values in file order.
    pub fn iter<'b>(&'b self, bytes: &'b [u8]) -> impl Iterator<Item = (&'b str, Value<'b>)> {
        self.entries.iter().map(move |(key, extent)| (&**key, extent.value(bytes)))
    }
}

/// A tensor's description. `dims` are in the file's order: `dims[0]` is the row length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    pub ty: TensorType,
    pub dims: Vec<u64>,
    /// Index in `Gguf::shards` of the shard with the data.
    pub shard: usize,
    /// Offset of the data in the shard's file.
    pub file_offset: u64,
    pub n_bytes: u64,
}

impl TensorInfo {
    pub fn n_elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Bytes of one row of `dims[0]` elements.
    pub fn row_bytes(&self) -> u64 {
        self.n_bytes / self.n_rows()
    }

    pub fn n_rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }
}

/// Bytes of a tensor of these dimensions, or what is wrong with them: (part, expected, got).
pub(super) fn tensor_bytes(
    ty: TensorType,
    dims: &[u64],
) -> std::result::Result<u64, (&'static str, String, String)> {
    if dims.is_empty() || dims.len() > MAX_DIMS {
        let expected = format!("1 to {MAX_DIMS}");
        return Err(("number of dimensions", expected, dims.len().to_string()));
    }
    if dims.contains(&0) {
        return Err(("dimensions", "at least 1 each".into(), format!("{dims:?}")));
    }
    let overflow = || ("dimensions", "fewer than 2^63 bytes".into(), format!("{dims:?}"));
    let n_rows = dims[1..].iter().try_fold(1u64, |n, &d| n.checked_mul(d)).ok_or_else(overflow)?;
    if !dims[0].is_multiple_of(ty.block_len() as u64) {
        let expected = format!("a multiple of {} for type {ty}", ty.block_len());
        return Err(("row length", expected, dims[0].to_string()));
    }
    let row_bytes = ty.row_bytes(dims[0]).ok_or_else(overflow)?;
    let fits = |n: &u64| *n < 1 << 63;
    dims[0].checked_mul(n_rows).filter(fits).ok_or_else(overflow)?;
    row_bytes.checked_mul(n_rows).filter(fits).ok_or_else(overflow)
}

/// A parsed header. Its tensors are all in shard 0.
#[derive(Debug)]
pub struct Header {
    pub version: u32,
    pub alignment: u64,
    pub metadata: Metadata,
    pub tensors: Vec<TensorInfo>,
    /// Offset of tensor data in the file.
    pub data_offset: u64,
}

impl Header {
    /// Parses a file's bytes (all of them, or at least the whole header) and checks it against
    /// the file's length. `path` is for messages only.
    pub fn parse(path: &Path, bytes: &[u8], file_len: u64) -> Result<Header> {
        let version = sniff::version(path, bytes)?;
        let mut cursor = Cursor::new(path, bytes);
        cursor.take(8, FieldName::Header("version"))?;
        let n_tensors = cursor.count(FieldName::Header("tensor count"), MIN_TENSOR_BYTES)?;
        let n_keys = cursor.count(FieldName::Header("metadata count"), MIN_KEY_VALUE_BYTES)?;
        let metadata = Metadata::parse(&mut cursor, n_keys)?;
        let alignment = alignment(path, metadata.get(bytes, "general.alignment"))?;
        let tensors = parse_tensors(&mut cursor, n_tensors, alignment)?;
        let data_offset = (cursor.position() as u64).next_multiple_of(alignment);
        let mut header = Header { version, alignment, metadata, tensors, data_offset };
        header.place_tensors(path, file_len)?;
        Ok(header)
    }

    /// Turns offsets within the data into offsets within the file, which must hold them all.
    fn place_tensors(&mut self, path: &Path, file_len: u64) -> Result<()> {
        for tensor in &mut self.tensors {
            let start = tensor.file_offset.checked_add(self.data_offset);
            let end = start.and_then(|start| start.checked_add(tensor.n_bytes));
            match (start, end) {
                (Some(start), Some(end)) if end <= file_len => tensor.file_offset = start,
                _ => {
                    let field = FieldName::Tensor(&tensor.name, "").to_string();
                    let end = u128::from(tensor.file_offset)
                        + u128::from(self.data_offset)
                        + u128::from(tensor.n_bytes);
                    let expected = format!("data up to position {end}");
                    let got = format!("a file of {file_len} bytes (cut short: download it again)");
                    return Err(Error::format(path, field, expected, got));
                }
            }
        }
        Ok(())
    }
}

fn alignment(path: &Path, value: Option<Value<'_>>) -> Result<u64> {
    let (expected, got) = match value {
        None => return Ok(DEFAULT_ALIGNMENT.into()),
        Some(Value::U32(n)) => match alignment_fault(n) {
            None => return Ok(n.into()),
            Some(expected) => (expected, n.to_string()),
        },
        Some(other) => ("a u32".to_string(), format!("{} {other}", other.type_name())),
    };
    Err(Error::format(path, "general.alignment", expected, got))
}

fn parse_tensors(cursor: &mut Cursor<'_>, n: usize, alignment: u64) -> Result<Vec<TensorInfo>> {
    let mut tensors = Vec::with_capacity(n);
    let mut names = HashMap::with_capacity(n);
    let mut offset = 0;
    for i in 0..n as u64 {
        let field = FieldName::Name(i);
        let name = cursor.name(field, MAX_NAME_BYTES - 1)?;
        if names.insert(name, i).is_some() {
            return Err(cursor.fail(field, "a new name", format!("{name:?} again")));
        }
        let tensor = parse_tensor(cursor, name, offset)?;
        let next = tensor.n_bytes.checked_next_multiple_of(alignment);
        offset = next.and_then(|n| offset.checked_add(n)).ok_or_else(|| {
            cursor.fail(FieldName::Tensor(name, ""), "data of fewer than 2^64 bytes", "more")
        })?;
        tensors.push(tensor);
    }
    Ok(tensors)
}

/// One description; `file_offset` is still that within the data, which must be `offset`.
fn parse_tensor(cursor: &mut Cursor<'_>, name: &str, offset: u64) -> Result<TensorInfo> {
    let field = FieldName::Tensor(name, "number of dimensions");
    let n_dims = cursor.u32(field)? as usize;
    if n_dims > MAX_DIMS {
        return Err(cursor.fail(field, format!("at most {MAX_DIMS}"), n_dims.to_string()));
    }
    let mut dims = Vec::with_capacity(n_dims);
    for _ in 0..n_dims {
        dims.push(cursor.u64(FieldName::Tensor(name, "dimensions"))?);
    }
    // gguf-py writes a single number so.
    if dims.is_empty() {
        dims.push(1);
    }
    let field = FieldName::Tensor(name, "type");
    let id = cursor.u32(field)?;
    let ty = TensorType::from_id(id)
        .ok_or_else(|| cursor.fail(field, "a known tensor type", id.to_string()))?;
    let n_bytes = tensor_bytes(ty, &dims).map_err(|(part, expected, got)| {
        cursor.fail(FieldName::Tensor(name, part), expected, got)
    })?;
    let field = FieldName::Tensor(name, "offset");
    let found = cursor.u64(field)?;
    if found != offset {
        let expected = format!("{offset}, right behind the tensor before");
        return Err(cursor.fail(field, expected, found.to_string()));
    }
    Ok(TensorInfo { name: name.into(), ty, dims, shard: 0, file_offset: offset, n_bytes })
}
