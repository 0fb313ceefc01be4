//! The engine: a model in memory, and what computes it.

use super::compute::Compute;
use super::options::EngineOptions;
use super::plan::MemoryPlan;
use super::plan::ram::Place;
use super::profile_saver::ProfileSaver;
use super::session::Session;
use crate::experts::{Counters, PlacedExpert};
use crate::forward::encoder_decoder::EncoderParams;
use crate::forward::gpu::{GraphCounts, multiplies_halves};
use crate::gguf::Gguf;
use crate::model::Model;
use crate::model::input_sums::InputSums;
use crate::model::kv::CacheType;
use crate::sample::grammar::Grammars;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use sha2::{Digest, Sha256};
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};

/// Changes when the same model, prompt and seed lead to other bits.
pub const ARITHMETIC: u32 = 2;

/// A loaded model, its tokenizer, and the threads and GPUs that compute it. It never changes, and
/// any number of sessions share it.
pub struct Engine {
    pub(super) model: Model,
    pub(super) tokenizer: Tokenizer,
    pub(super) compute: Compute,
    pub(super) n_threads: usize,
    pub(super) options: EngineOptions,
    pub(super) n_ctx: usize,
    pub(super) plan: MemoryPlan,
    /// The model that drafts.
    pub(super) draft: Option<Arc<Engine>>,
    /// A file of the model that has changed under its weights.
    pub(super) changed: OnceLock<PathBuf>,
    pub(super) profile: Option<ProfileSaver>,
    /// The number of the next session.
    pub(super) next_session: AtomicU32,
    /// Built when it is first asked for.
    pub(super) grammars: OnceLock<Grammars>,
}

impl Engine {
    /// A new, empty text. Reserves the KV cache of a whole context, [`Engine::kv_bytes`], which
    /// takes memory as it is used; on a GPU it takes its part at once and fails if there is no
    /// room.
    pub fn new_session(self: &Arc<Engine>) -> Result<Session> {
        Session::new(self)
    }

    /// The options that it was loaded with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// How much of each adapter texts take that do not say; empty without adapters.
    pub fn adapter_scales(&self) -> &[f32] {
        self.model.adapters.as_ref().map_or(&[], |adapters| &adapters.defaults)
    }

    /// Sums of the inputs of the model's matrices so far; `None` if the options ask for none.
    pub fn input_sums(&self) -> Option<&InputSums> {
        self.model.input_sums.as_ref()
    }

    /// The file that the model was loaded from: metadata and tensors.
    pub fn gguf(&self) -> &Gguf {
        self.model.gguf()
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Compiles grammars for this model's tokenizer. The first call builds their tables.
    pub fn grammars(&self) -> Result<&Grammars> {
        match self.grammars.get() {
            Some(grammars) => Ok(grammars),
            None => {
                let grammars = Grammars::new(&self.tokenizer)?;
                Ok(self.grammars.get_or_init(|| grammars))
            }
        }
    }

    /// Whether a text's bits depend on its tokens alone, and not on which of them were a prompt:
    /// tensor cores, which serve prompts over a cache of halves or blocks, and with weights of
    /// halves, round in another way.
    pub fn is_exact(&self) -> bool {
        let types = [self.options.cache_type_k, self.options.cache_type_v];
        let is_without = types.iter().all(|ty| [CacheType::F32, CacheType::BF16].contains(ty));
        let keeps_bits = is_without && !multiplies_halves(&self.model);
        self.plan.device.is_none() || self.options.exact || keeps_bits
    }

    /// A digest of what the bits of keys and values depend on besides a text's tokens, and of where
    /// they are.
    pub(in crate::engine) fn kv_identity(&self) -> Result<[u8; 32]> {
        let mut hash = Sha256::new();
        hash.update(ARITHMETIC.to_le_bytes());
        hash.update(self.gguf().identity()?);
        if let Some(adapters) = &self.model.adapters {
            hash.update(adapters.identity);
            adapters.defaults.iter().for_each(|scale| hash.update(scale.to_le_bytes()));
        }
        let types = (self.options.cache_type_k, self.options.cache_type_v);
        let layers = self.plan.device.as_ref().map(|part| part.plan.gpu_layers.clone());
        let is_long = self.model.hyper().rope.is_long(self.n_ctx);
        hash.update(format!("{types:?} {layers:?} {is_long} {}", self.is_exact()));
        Ok(hash.finalize().into())
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The smaller model that drafts, if there is one.
    pub fn draft_model(&self) -> Option<&Engine> {
        self.draft.as_deref()
    }

    /// The plan of the weights: their places and the memory that they take.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Context of a session in tokens.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Logits of a token: the rows of the output matrix. May be more than the tokenizer's ids.
    pub fn n_vocab(&self) -> usize {
        self.model.n_vocab()
    }

    pub fn n_layers(&self) -> usize {
        self.model.hyper().n_layers
    }

    /// Threads of the CPU.
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Fails if the model does not continue texts: its tokens see what follows them.
    pub fn check_continues(&self) -> Result<()> {
        self.check_has_logits()?;
        if !self.model.hyper().sees_all {
            return Ok(());
        }
        let file = self.gguf().path().display();
        Err(Error::invalid(format!(
            "{file}: the model fills in masked tokens of a whole text (diffusion) and does not \
             continue one: use moeba diffuse"
        )))
    }

    /// Whether embeddings are all that the model has.
    pub fn only_embeds(&self) -> bool {
        self.model.hyper().embeds
    }

    /// Fails if the model has embeddings only.
    pub fn check_has_logits(&self) -> Result<()> {
        if !self.only_embeds() {
            return Ok(());
        }
        let file = self.gguf().path().display();
        let why = format!("{file}: the model is an embedding model: use moeba embed");
        Err(Error::invalid(why))
    }

    /// Parameters of an encoder–decoder model; `None` for the usual decoder.
    pub fn encoder(&self) -> Option<&EncoderParams> {
        self.model.hyper().encoder.as_ref()
    }

    /// Bytes of one session's KV cache when its context is full.
    pub fn kv_bytes(&self) -> u64 {
        self.options.kv_bytes(self.model.hyper(), self.n_ctx)
    }

    /// The largest mapped part of the file, if weights are computed with where they are mapped;
    /// `None` where experts are streamed.
    pub fn weights_in_place(&self) -> Option<&[u8]> {
        let maps = self.gguf().shards().iter().map(|shard| shard.map());
        maps.max_by_key(|map| map.len()).filter(|_| self.plan.place == Place::InPlace)
    }

    /// Whether the rows of a step of decode may be drafts: the bits of the first one must not
    /// depend on those behind it.
    pub(in crate::engine) fn can_verify(&self) -> bool {
        self.encoder().is_none() && self.model.hyper().routing.capacity.is_none()
    }

    /// Fails once a file that weights are read from is not what it was when it was opened, and from
    /// then on: what was computed since is not the model's. Weights that are in memory as a whole,
    /// and adapters, are read no more.
    pub fn check_files(&self) -> Result<()> {
        if self.plan.place == Place::InPlace && !self.plan.is_mapped {
            return Ok(());
        }
        let mut shards = self.gguf().shards().iter();
        if self.changed.get().is_none()
            && let Some(shard) = shards.find(|shard| !shard.is_unchanged())
        {
            let _ = self.changed.set(shard.path().to_owned());
        }
        let Some(path) = self.changed.get() else { return Ok(()) };
        let why = "the file has changed since it was loaded: start again with the file as it is to \
                   be";
        Err(Error::io(path, std::io::Error::other(why)))
    }

    /// Counters of moving experts to where they are computed, since the engine was loaded: to
    /// GPUs, or to memory without a GPU. `None` where nothing moves.
    pub fn expert_counters(&self) -> Option<Counters> {
        self.link_counters().or_else(|| self.disk_counters())
    }

    /// Counters of reading experts from disk to memory; `None` where they are in place.
    pub fn disk_counters(&self) -> Option<Counters> {
        self.model.hierarchy().disk_counters()
    }

    /// Whether experts are read from disk at this moment.
    pub(in crate::engine) fn reads_experts(&self) -> bool {
        self.model.hierarchy().is_reading_disk()
    }

    /// Counters of uploading experts from memory to GPUs; `None` where no GPU has experts.
    pub fn link_counters(&self) -> Option<Counters> {
        self.model.hierarchy().link_counters()
    }

    /// Numbers of the GPU's graphs; `None` without a GPU. Waits for a pass that is under way.
    pub fn graph_counts(&self) -> Option<GraphCounts> {
        self.compute.graph_counts()
    }

    /// Appends where each of a layer's routed experts is; nothing if the layer has none. The layer
    /// loop waits for it some microseconds at most.
    pub fn report_experts(&self, layer: usize, out: &mut Vec<PlacedExpert>) {
        self.model.hierarchy().report(self.model.hyper().tier_layer(layer), out);
    }

    /// The decision of the policy, with its reason; `None` if it has none, or is at work.
    pub fn policy_verdict(&self) -> Option<String> {
        self.model.hierarchy().verdict_if_free()
    }
}

impl Drop for Engine {
    /// Saves what policies have learned for the next run.
    fn drop(&mut self) {
        if let Some(verdict) = self.model.hierarchy().verdict() {
            log::info!("{verdict}");
        }
        // While the tiers are whole.
        drop(self.profile.take());
    }
}
