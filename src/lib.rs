//! moeba: inference for Mixture-of-Experts language models that are bigger than the memory they
//! run in.
//!
//! A program that embeds moeba loads an [`Engine`] and generates text with a [`Generator`], or
//! computes logits with a [`Session`]; [`engine`] has an example, `bench/examples` whole programs.
//! [`policy::register`] adds policies of one's own, [`server::Server`] serves HTTP, [`chat`]
//! renders a model's template. `src/README.md` says what each module is for and what it must not
//! know.

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

pub use engine::{Engine, EngineOptions, Generator, Request, Session};
pub use error::{Error, Result};
pub use policy::PolicySpec;
