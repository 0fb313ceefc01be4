//! The model as clients see it.

use std::path::PathBuf;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::random;
use crate::engine::{Engine, EngineOptions};
use crate::gguf::Gguf;

/// Changes when the same model, prompt and seed lead to other bits.
const ARITHMETIC: u32 = 1;

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
    pub n_ctx: usize,
    pub n_parallel: usize,
    /// Bytes of the longest token.
    pub longest_piece: usize,
    /// The source of the chat template.
    pub chat_template: String,
    meta: Value,
}

impl ModelInfo {
    /// Facts of a loaded model. It is served under `names`, or its file's name if there are none.
    pub fn new(engine: &Engine, options: &EngineOptions, names: Vec<String>) -> ModelInfo {
        let gguf = engine.gguf();
        let path = gguf.path().to_owned();
        let own = || path.file_stem().map_or("model".into(), |s| s.to_string_lossy().into_owned());
        let names = if names.is_empty() { vec![own()] } else { names };
        let n_params: u64 = gguf.tensors().iter().map(|t| t.dims.iter().product::<u64>()).sum();
        let meta = json!({
            "vocab_type": vocab_type(gguf),
            "n_vocab": engine.n_vocab(),
            "n_ctx_train": engine.model().hyper().n_ctx_train,
            "n_embd": engine.model().hyper().n_embd,
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
            n_ctx: engine.n_ctx(),
            n_parallel: options.n_sessions,
            longest_piece: super::prompt::longest_piece(engine.tokenizer()),
            chat_template: template.unwrap_or(crate::chat::CHATML).to_owned(),
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

    /// The entry as Ollama has it.
    pub fn ollama_entry(&self, name: &str) -> Value {
        json!({
            "name": name,
            "model": name,
            "modified_at": "",
            "size": self.n_bytes.to_string(),
            "digest": "",
            "type": "model",
            "description": "",
            "tags": [""],
            "capabilities": ["completion"],
            "parameters": "",
            "details": {
                "parent_model": "",
                "format": "gguf",
                "family": self.architecture,
                "families": [self.architecture],
                "parameter_size": "",
                "quantization_level": "",
            },
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

fn fingerprint(engine: &Engine, options: &EngineOptions) -> String {
    let mut hash = Sha256::new();
    hash.update(ARITHMETIC.to_le_bytes());
    hash.update(model_key(engine));
    let on_device = engine.plan().device.is_some();
    let types = (options.cache_type_k, options.cache_type_v, on_device, engine.is_exact());
    hash.update(format!("{types:?}"));
    let hash = hash.finalize();
    let digits: String = hash[..4].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("b{digits}")
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
