//! Open, validate, map and write GGUF files (versions 2 and 3, split files included).

mod types;

pub use types::TensorType;
