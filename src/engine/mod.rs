//! Engine (loaded, immutable) and Session (one timeline of one text).

mod compute;
mod describe;
pub mod device;
mod encoder;
mod load;
mod options;
pub mod plan;
mod profile;
mod recording;
mod session;
mod understand;

use std::sync::atomic::AtomicU32;

pub use crate::backend::ops::RouteRows;
use crate::experts::Counters;
use crate::forward::encoder_decoder::EncoderParams;
pub use crate::forward::record::Recorder;
pub use crate::forward::{Logits, TopK, Want};
use crate::gguf::Gguf;
use crate::model::Model;
pub use crate::model::kv::CacheType;
use crate::tokenizer::Tokenizer;
use compute::Compute;
pub use device::DeviceChoice;
pub use load::default_threads;
use load::kv_bytes;
pub use options::{EngineOptions, TestHooks};
use plan::ram::Place;
pub use plan::tensor_override::TensorPlace;
pub use plan::vram::CpuMoe;
pub use plan::{DevicePart, MemoryPlan};
pub use profile::{ProfileChoice, ProfileFile};
pub use recording::Experts;
pub use session::Session;
pub use understand::understand;

/// A loaded model, its tokenizer and the threads that compute it.
pub struct Engine {
    model: Model,
    tokenizer: Tokenizer,
    compute: Compute,
    n_threads: usize,
    options: EngineOptions,
    n_ctx: usize,
    plan: MemoryPlan,
    store: Option<ProfileFile>,
    next_session: AtomicU32,
}

impl Engine {
    pub fn gguf(&self) -> &Gguf {
        self.model.gguf()
    }

    /// A file's weights where they are computed with, the most that lie together; `None` where
    /// experts are streamed.
    pub fn weights_in_place(&self) -> Option<&[u8]> {
        let maps = self.gguf().shards().iter().map(|shard| shard.map());
        maps.max_by_key(|map| map.len()).filter(|_| self.plan.place == Place::InPlace)
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    pub fn n_vocab(&self) -> usize {
        self.model.n_vocab()
    }

    pub fn n_layers(&self) -> usize {
        self.model.hyper().n_layers
    }

    /// What an encoder–decoder model has besides a decoder's numbers.
    pub fn encoder(&self) -> Option<&EncoderParams> {
        self.model.hyper().encoder.as_ref()
    }

    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Bytes of one session's KV cache when its context is full.
    pub fn kv_bytes(&self) -> u64 {
        kv_bytes(self.model.hyper(), &self.options, self.n_ctx)
    }

    /// Where everything is.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// What getting experts to where they are computed has cost so far: to devices, or to memory
    /// where there are none. `None` where nothing moves.
    pub fn expert_counters(&self) -> Option<Counters> {
        self.link_counters().or_else(|| self.disk_counters())
    }

    /// What moving experts from disk to memory has cost; `None` where they are in place.
    pub fn disk_counters(&self) -> Option<Counters> {
        self.model.hierarchy().disk_counters()
    }

    /// What moving them from memory to devices has; `None` where there are none on a device.
    pub fn link_counters(&self) -> Option<Counters> {
        self.model.hierarchy().link_counters()
    }
}

impl Drop for Engine {
    /// What was learned in this run helps the next one.
    fn drop(&mut self) {
        if let Some(verdict) = self.model.hierarchy().verdict() {
            log::info!("{verdict}");
        }
        if let Some(store) = &self.store {
            store.save(&self.model.hierarchy().learned());
        }
    }
}
