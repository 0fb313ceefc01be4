//! The model as clients see it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::digest::hex;
use super::identity::identity;
use super::{Loaded, random};
use crate::Result;
use crate::engine::{self, Engine, EngineOptions};
use crate::gguf::{Gguf, Value as Metadata};

/// Facts of a model's file.
#[derive(Clone, Debug)]
pub struct Facts {
    pub architecture: String,
    /// Bytes of the file.
    pub n_bytes: u64,
    pub n_params: u64,
    pub n_embd: u64,
    /// The context that the model was trained for.
    pub n_ctx_train: u64,
    /// The type that most bytes of the file are in.
    pub weight_type: &'static str,
    /// Tells the model from others, in hexadecimal digits.
    pub digest: String,
    /// The source of the chat template.
    pub chat_template: String,
    /// Whether the file says how its outputs are pooled: it is for embeddings.
    pub embeds: bool,
    /// Whether chats may have reasoning, as far as that is known before the model is loaded.
    pub thinks: bool,
    meta: Value,
}

impl Facts {
    pub fn new(gguf: &Gguf) -> Facts {
        let architecture = gguf.str("general.architecture").ok().flatten().unwrap_or_default();
        let number = |key: &str| gguf.u64(&format!("{architecture}.{key}")).ok().flatten();
        let template = gguf.str("tokenizer.chat_template").ok().flatten();
        let n_params = gguf.tensors().iter().map(|t| t.dims.iter().product::<u64>()).sum();
        let n_vocab = gguf.get("tokenizer.ggml.tokens").and_then(|value| match value {
            Metadata::Array(list) => Some(list.len()),
            _ => None,
        });
        let (n_ctx_train, n_embd) = (number("context_length"), number("embedding_length"));
        let meta = json!({
            "vocab_type": vocab_type(gguf),
            "n_vocab": n_vocab,
            "n_ctx_train": n_ctx_train,
            "n_embd": n_embd,
            "n_params": n_params,
            "size": gguf.n_bytes(),
        });
        Facts {
            architecture: architecture.to_owned(),
            n_bytes: gguf.n_bytes(),
            n_params,
            n_embd: n_embd.unwrap_or(0),
            n_ctx_train: n_ctx_train.unwrap_or(0),
            weight_type: weight_type(gguf),
            digest: hex(&model_key(gguf)),
            chat_template: template.unwrap_or(crate::chat::CHATML).to_owned(),
            embeds: gguf.get(&format!("{architecture}.pooling_type")).is_some(),
            thinks: false,
            meta,
        }
    }
}

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
    pub facts: Facts,
    pub n_ctx: usize,
    pub n_parallel: usize,
    /// Bytes of the longest token.
    pub longest_piece: usize,
    /// Facts that the bytes of answers follow from, beside a request.
    pub identity: Value,
}

impl ModelInfo {
    /// Facts of a loaded model. It is served under `names`, or its file's name if there are none.
    pub fn new(model: &Loaded, names: Vec<String>) -> Result<ModelInfo> {
        let Loaded { engine, options, template, .. } = model;
        let gguf = engine.gguf();
        let path = gguf.path().to_owned();
        let own = || path.file_stem().map_or("model".into(), |s| s.to_string_lossy().into_owned());
        let names = if names.is_empty() { vec![own()] } else { names };
        let mut info = ModelInfo {
            names,
            created: random::now(),
            fingerprint: fingerprint(engine, options),
            facts: Facts { thinks: template.reasoning().is_some(), ..Facts::new(gguf) },
            n_ctx: engine.n_ctx(),
            n_parallel: options.n_sessions,
            longest_piece: super::prompt::longest_piece(engine.tokenizer()),
            identity: Value::Null,
            path,
        };
        info.identity = identity(model, &info)?;
        Ok(info)
    }

    /// The name that answers have.
    pub fn name(&self) -> &str {
        self.names.first().map_or("model", String::as_str)
    }

    /// An entry of the list of models.
    pub fn entry(&self, name: &str) -> Value {
        let mut entry = entry(name, self.created, Some(&self.facts));
        for key in ["max_model_len", "context_length", "loaded_context_length"] {
            entry[key] = self.n_ctx.into();
        }
        entry["status"] = json!({ "value": "loaded" });
        entry
    }
}

/// An entry of the list of models; without facts it is short.
pub fn entry(name: &str, created: u64, facts: Option<&Facts>) -> Value {
    let mut entry = json!({
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": created,
        "owned_by": "moeba",
    });
    let Some(facts) = facts else { return entry };
    entry["meta"] = facts.meta.clone();
    entry["architecture"] = json!({
        "name": facts.architecture,
        "input_modalities": ["text"],
        "output_modalities": ["text"],
    });
    entry["capabilities"] = json!(["completion", "tools"]);
    entry
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
    hash.update(model_key(engine.gguf()));
    let on_device = engine.plan().device.is_some();
    let types = (options.cache_type_k, options.cache_type_v, on_device, engine.is_exact());
    hash.update(format!("{types:?}"));
    let hash = hash.finalize();
    format!("b{}", hex(&hash[..4]))
}

/// Tells the model from others by its metadata and the layout of its tensors.
fn model_key(gguf: &Gguf) -> [u8; 32] {
    let mut hash = Sha256::new();
    for (key, value) in gguf.keys().filter(|(key, _)| key.starts_with("general.")) {
        hash.update(format!("{key}={value:?};"));
    }
    for tensor in gguf.tensors() {
        hash.update(format!("{} {:?} {};", tensor.name, tensor.dims, tensor.n_bytes));
    }
    hash.finalize().into()
}
