//! Routing that other programs recorded, as a trace. Sources say which experts were chosen, and
//! some say with which weights; none has embeddings, hidden states or look-aheads.
//!
//! - `.npz` (begins with `PK`): `ids` or `routed_experts` \[tokens, layers, k\]; and, if they are
//!   there, `starts` (the first token of each request), `experts` (of a layer), `weights` (as
//!   `ids`), `tokens` (ids), `prompt` (whether a token is of one), `kinds` and `meta` (JSON).
//! - `.npy` (`\x93NUMPY`): one request, \[tokens, layers, k\], as vLLM's `routed_experts`.
//! - JSON (`{` or `[`), one value or one after another: `{"tok", "layers": [[ids]]}` is a token;
//!   `{"routed_experts"}` is a request, by itself or in `choices` (vLLM), as nested lists, as an
//!   array in base64, or as `{"data", "shape", "dtype"}`.
//! - CSV (all else), columns by name: `layer` and `expert`, for each token `step` or `token`, and
//!   `turn`, `phase` and `weight`. Without `step` and `token` (llama.cpp's `moe-trace`) tokens are
//!   told apart by their layers.

mod arrays;
mod csv;
mod json;
mod npy;
mod write;
mod zip;

pub use write::{Summary, write};

use crate::{Error, Result};
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};

/// A layer's choice for a token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// Best first, if the source has an order; empty in a dense layer, and where nothing is known.
    pub experts: Vec<u32>,
    /// One for each of `experts`, or none.
    pub weights: Vec<f32>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Token {
    /// The line or the row of an array that it is from, counted as `Source::unit` says.
    pub place: usize,
    pub is_prompt: bool,
    pub id: Option<u32>,
    /// One for each layer.
    pub layers: Vec<Choice>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// The kind of text.
    pub kind: String,
    pub tokens: Vec<Token>,
}

/// A file that has been read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Source {
    pub path: PathBuf,
    /// The unit of places: `line` or `token`.
    pub unit: &'static str,
    pub model: Option<String>,
    /// Experts of a layer.
    pub n_experts: Option<usize>,
    pub requests: Vec<Request>,
}

/// Why a source is refused; the reader adds the file's name.
#[derive(Debug)]
struct Fault {
    place: String,
    expected: String,
    got: String,
}

impl Fault {
    fn new(place: impl Display, expected: impl Display, got: impl Display) -> Fault {
        let (place, expected, got) = (place.to_string(), expected.to_string(), got.to_string());
        Fault { place, expected, got }
    }
}

/// Reads a file of any of the forms, told by its first bytes.
pub fn read(path: &Path) -> Result<Source> {
    let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
    let kind = path.file_stem().unwrap_or_default().to_string_lossy();
    let source = decode(&bytes, &kind)
        .map_err(|Fault { place, expected, got }| Error::format(path, place, expected, got))?;
    Ok(Source { path: path.into(), ..source })
}

/// `kind`: of text, where the source has none.
fn decode(bytes: &[u8], kind: &str) -> std::result::Result<Source, Fault> {
    if bytes.starts_with(zip::MAGIC) {
        return arrays::npz(bytes, kind);
    }
    if bytes.starts_with(npy::MAGIC) {
        return arrays::npy(bytes, kind);
    }
    let text = std::str::from_utf8(bytes)
        .map_err(|e| Fault::new(format!("byte {}", e.valid_up_to()), "UTF-8", "another byte"))?;
    match text.trim_start().chars().next() {
        None => Err(Fault::new("the file", "routing", "nothing")),
        Some('{' | '[') => json::read(text, kind),
        Some(_) => csv::read(text, kind),
    }
}

#[cfg(test)]
mod tests;
