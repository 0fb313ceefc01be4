//! Open, validate, map and write GGUF files (versions 2 and 3, split files included).
//!
//! `Header` parses bytes and knows no files; `Gguf` maps one file or all shards of a split one;
//! `Writer` streams a file to disk and gives it its name only when it is whole.

mod check;
mod detach;
mod file;
mod getters;
mod header;
mod json;
mod key;
mod lost_pages;
mod overrides;
mod parse;
#[cfg(feature = "gguf-rs")]
mod second_opinion;
mod sniff;
mod stamp;
mod types;
mod value;
mod writer;

pub use check::first_non_finite;
pub use file::{Gguf, Shard, shard_name};
pub use header::{Header, Metadata, TensorInfo};
#[cfg(unix)]
pub(crate) use lost_pages::install as report_lost_pages;
pub use overrides::Override;
#[cfg(feature = "gguf-rs")]
pub use second_opinion::second_opinion;
pub use types::TensorType;
pub use value::{Array, ArrayIter, OwnedArray, OwnedValue, Value, ValueType};
pub use writer::Writer;

/// Alignment of tensors in bytes, unless the file says another.
pub const DEFAULT_ALIGNMENT: u32 = 32;

/// Tensor names are shorter than this many bytes, as ggml keeps them in a fixed array.
pub const MAX_NAME_BYTES: usize = 64;

/// A tensor has at most this many dimensions.
pub const MAX_DIMS: usize = 4;

/// Longest key the format allows, in bytes.
pub const MAX_KEY_BYTES: usize = 65_535;

/// Largest alignment we accept, in bytes; more only wastes space and would let a few tensors
/// claim any offset.
pub const MAX_ALIGNMENT: u32 = 1 << 20;

/// `None` if `alignment` is fine, otherwise what it should have been. The format asks for a
/// multiple of 8, ggml for a power of two.
pub(crate) fn alignment_fault(alignment: u32) -> Option<String> {
    let fine = alignment.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&alignment);
    (!fine).then(|| format!("a power of two from 8 to {MAX_ALIGNMENT}"))
}
