//! The engine: a model in memory, the sessions that evaluate texts with it, and text generation.
//!
//! [`Engine::load`] opens a GGUF file, plans where its weights go ([`plan`]) and takes the memory.
//! A [`Session`] is one text and its KV cache: [`Session::sync`] keeps the longest prefix that the
//! cache holds, [`Session::eval`] computes tokens and returns logits. [`Generator`] makes text of
//! them until a limit, a stop string or the model ends it. `bench/examples` has whole programs:
//! answers, batches, a policy of one's own, a server.
//!
//! ```no_run
//! use moeba::engine::{Engine, EngineOptions, Want};
//! use moeba::tokenizer::EncodeOptions;
//!
//! # fn main() -> moeba::Result<()> {
//! let options = EngineOptions { ram: "50%".parse()?, ..EngineOptions::default() };
//! let engine = Engine::load("model.gguf".as_ref(), &options, &mut |_| ())?;
//! let tokens = engine.tokenizer().encode("The capital of France is", EncodeOptions::PROMPT);
//!
//! let mut session = engine.new_session()?;
//! let n_left = session.sync(&tokens)?;
//! let logits = session.eval(&tokens[tokens.len() - n_left..], Want::Last)?.all();
//! let best = (0..).zip(logits.iter()).max_by(|a, b| a.1.total_cmp(b.1));
//! println!("the most likely next token: {:?}", best.map(|(id, _)| id));
//! # Ok(())
//! # }
//! ```

mod batch;
mod checkpoints;
mod compute;
mod describe;
pub mod device;
pub mod diffusion;
mod draft_model;
mod embedding;
mod encoder;
mod generate;
pub mod kv_disk;
mod load;
mod loaded;
mod loading;
mod observer;
mod options;
mod peers;
pub mod plan;
mod profile;
mod profile_saver;
mod rank;
mod recording;
mod saved_text;
pub mod scheduler;
mod session;
mod speculation;
mod text_cache;
mod threads;
mod traffic;
mod understand;
mod verification;

pub use crate::backend::ops::RouteRows;
pub use crate::cancel::Cancel;
pub use crate::experts::peers::{PeerCounters, PeerOptions};
pub use crate::experts::{Counters, ExpertPlace, PlacedExpert};
pub use crate::forward::record::Recorder;
pub use crate::forward::{Logits, TopK};
pub use crate::model::adapters::AdapterFile;
pub use crate::model::input_sums::{InputSums, Sums};
pub use crate::model::kv::CacheType;
pub use crate::policy::Phase;
pub use batch::{BatchRow, Interlude};
pub use compute::Rest;
pub use device::DeviceChoice;
pub use embedding::{EUCLIDEAN, Embedding, Pooling};
pub use generate::{
    ContextShift, FinishReason, Generation, Generator, Limits, Outcome, Request, Step, TextSink,
};
pub use load::usual_body_bytes;
pub use loaded::{ARITHMETIC, Engine};
pub use loading::{LoadPhase, Loading};
pub use options::{EngineOptions, TestHooks};
pub(crate) use peers::tensor_types;
pub use peers::{EXPERTS_ROUTE, ExpertsWork, GREETING_ROUTE, MAX_EXPERTS_BYTES, version};
pub use plan::tensor_override::TensorPlace;
pub use plan::vram::CpuMoe;
pub use plan::{DevicePart, MemoryPlan};
pub use profile::{ProfileChoice, ProfileFile};
pub use recording::Experts;
pub use saved_text::SavedText;
pub use session::{EvalHooks, Session, Want};
pub use speculation::{DraftCounts, DraftSource, Drafted, MAX_DRAFTS, SpecMode, Speculation};
pub use threads::default_threads;
pub use traffic::ExpertTraffic;
pub use understand::understand;
