//! The model as clients see it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::digest::hex;
use super::random;
use crate::engine::{self, Engine, EngineOptions};
use crate::gguf::Gguf;

/// Facts of the model that do not change while it is served.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// The names that it is served under; the first is the one that answers have.
    pub names: Vec<String>,
    pub path: PathBuf,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// A name for what the bits of answers depend on.
    pub fingerprint: String,
    pub architecture: String,
    /// Bytes of the file.
    pub n_bytes: u64,
    pub n_params: u64,
    pub n_embd: usize,
    /// The context that the model was trained for.
    pub n_ctx_train: usize,
    /// When the file was written, in seconds since 1970.
    pub modified: u64,
    /// The type that most bytes of the file are in.
    pub weight_type: &'static str,
    /// Tells the model from others, in hexadecimal digits.
    pub digest: String,
    pub n_ctx: usize,
    pub n_parallel: usize,
    /// Bytes of the longest token.
    pub longest_piece: usize,
    /// The source of the chat template.
    pub chat_template: String,
    /// Facts that the bytes of answers follow from, beside a request.
    pub identity: Value,
    meta: Value,
}

impl ModelInfo {
    /// Facts of a loaded model. It is served under `names`, or its file's name if there are none.
    pub fn new(engine: &Engine, options: &EngineOptions, names: Vec<String>) -> ModelInfo {
        let gguf = engine.gguf();
        let path = gguf.path().to_owned();
        let own = || path.file_stem().map_or("model".into(), |s| s.to_string_lossy().into_owned());
        let names = if names.is_empty() { vec![own()] } else { names };
        let hyper = engine.model().hyper();
        let n_params: u64 = gguf.tensors().iter().map(|t| t.dims.iter().product::<u64>()).sum();
        let meta = json!({
            "vocab_type": vocab_type(gguf),
            "n_vocab": engine.n_vocab(),
            "n_ctx_train": hyper.n_ctx_train,
            "n_embd": hyper.n_embd,
            "n_params": n_params,
            "size": gguf.n_bytes(),
        });
        let architecture = gguf.str("general.architecture").ok().flatten().unwrap_or_default();
        let template = gguf.str("tokenizer.chat_template").ok().flatten();
        ModelInfo {
            names,
            created: random::now(),
            fingerprint: fingerprint(engine, options),
            architecture: architecture.to_owned(),
            n_bytes: gguf.n_bytes(),
            n_params,
            n_embd: hyper.n_embd,
            n_ctx_train: hyper.n_ctx_train,
            modified: modified(&path),
            weight_type: weight_type(gguf),
            digest: hex(&model_key(engine)),
            n_ctx: engine.n_ctx(),
            n_parallel: options.n_sessions,
            longest_piece: super::prompt::longest_piece(engine.tokenizer()),
            chat_template: template.unwrap_or(crate::chat::CHATML).to_owned(),
            identity: Value::Null,
            meta,
            path,
        }
    }

    /// The name that answers have.
    pub fn name(&self) -> &str {
        self.names.first().map_or("model", String::as_str)
    }

    /// An entry of the list of models.
    pub fn entry(&self, name: &str) -> Value {
        json!({
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": self.created,
            "owned_by": "moeba",
            "meta": self.meta,
            "max_model_len": self.n_ctx,
            "context_length": self.n_ctx,
            "loaded_context_length": self.n_ctx,
            "architecture": {
                "name": self.architecture,
                "input_modalities": ["text"],
                "output_modalities": ["text"],
            },
            "capabilities": ["completion", "tools"],
            "status": { "value": "loaded" },
        })
    }
}

/// llama.cpp's number of the kind of vocabulary.
fn vocab_type(gguf: &Gguf) -> u32 {
    match gguf.str("tokenizer.ggml.model").ok().flatten() {
        Some("gpt2") => 2,
        Some("bert") => 3,
        Some("t5") => 4,
        // SentencePiece
        Some(_) => 1,
        None => 0,
    }
}

/// When a file was written; 0 where that is not known.
fn modified(path: &Path) -> u64 {
    let time = path.metadata().and_then(|data| data.modified()).ok();
    let since = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |time| time.as_secs())
}

fn weight_type(gguf: &Gguf) -> &'static str {
    let mut bytes = BTreeMap::new();
    for tensor in gguf.tensors() {
        *bytes.entry(tensor.ty.name()).or_insert(0) += tensor.n_bytes;
    }
    bytes.into_iter().max_by_key(|(_, n)| *n).map_or("", |(name, _)| name)
}

fn fingerprint(engine: &Engine, options: &EngineOptions) -> String {
    let mut hash = Sha256::new();
    hash.update(engine::ARITHMETIC.to_le_bytes());
    hash.update(model_key(engine));
    let on_device = engine.plan().device.is_some();
    let types = (options.cache_type_k, options.cache_type_v, on_device, engine.is_exact());
    hash.update(format!("{types:?}"));
    let hash = hash.finalize();
    format!("b{}", hex(&hash[..4]))
}

/// Tells the model from others by its metadata and the layout of its tensors.
fn model_key(engine: &Engine) -> [u8; 32] {
    let mut hash = Sha256::new();
    for (key, value) in engine.gguf().keys().filter(|(key, _)| key.starts_with("general.")) {
        hash.update(format!("{key}={value:?};"));
    }
    for tensor in engine.gguf().tensors() {
        hash.update(format!("{} {:?} {};", tensor.name, tensor.dims, tensor.n_bytes));
    }
    hash.finalize().into()
}
