//! moeba: inference for Mixture-of-Experts language models that are bigger than the memory they
//! run in. The README's code map says what each module is for and what it must not know.

pub mod backend;
pub mod cancel;
pub mod chat;
pub mod cli;
#[path = "../convert/mod.rs"]
pub mod convert;
pub mod engine;
pub mod error;
pub mod experts;
pub mod forward;
pub mod gguf;
pub mod hub;
pub mod interrupt;
pub mod machine;
pub mod meter;
pub mod model;
pub mod policy;
pub mod quant;
pub mod sample;
pub mod server;
pub mod simd;
pub mod terminal;
pub mod tokenizer;
pub mod trace;
pub mod train;
pub mod units;

pub use error::{Error, Result};
