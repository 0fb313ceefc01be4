//! The facts that the bytes of answers follow from, beside a request. Servers that give one
//! client's answers together have them in common.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Loaded;
use super::digest::hex;
use super::model::ModelInfo;
use crate::Result;
use crate::engine::{tensor_types, version};

/// The members are compared one by one, so that a difference has a name.
pub fn identity(model: &Loaded, info: &ModelInfo) -> Result<Value> {
    let gguf = model.engine.gguf();
    let options = &model.options;
    Ok(json!({
        "version": version(),
        "model": hex(&gguf.identity()?),
        "tensor_types": tensor_types(gguf),
        "n_ctx": info.n_ctx,
        "cache_type_k": options.cache_type_k.to_string(),
        "cache_type_v": options.cache_type_v.to_string(),
        "device": if model.engine.plan().device.is_some() { "gpu" } else { "cpu" },
        "fingerprint": info.fingerprint,
        "settings": settings(model, info),
    }))
}

/// A digest of the defaults of requests: sampling, limits and the chat template.
fn settings(model: &Loaded, info: &ModelInfo) -> String {
    let defaults = &model.defaults;
    let limits = (defaults.n_predict, defaults.context_shift, defaults.reasoning_budget);
    let content = (defaults.keeps_reasoning_in_content, model.trusts_content, defaults.pooling);
    let mut hash = Sha256::new();
    hash.update(format!("{:?};{limits:?};{content:?};", defaults.sampling));
    hash.update(format!("{:?};{:?}", info.facts.chat_template, model.variables));
    hash.update(format!("{:?}", model.template.source()));
    hex(&hash.finalize()[..8])
}
