//! Keys of a file that nothing reads: one that changes what its model computes must not be passed
//! over in silence.

use super::descriptor::{Descriptor, Mixer};
use crate::gguf::{Array, Gguf, Value};
use crate::{Error, Result};

/// Keys, `{arch}.` left out, that change nothing where no code reads them.
const HARMLESS: &[&str] = &[
    // Told by the tensors.
    "vocab_size",
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_shared_count",
    "leading_dense_block_count",
    "interleave_moe_layer_step",
    "moe_every_n_layers",
    "attention.indexer.types",
    "token_type_count",
    "full_attention_interval",
    // Positions in images and videos: a text's are alike in all sections.
    "rope.dimension_sections",
    "n_deepstack_layers",
    // Read where texts are embedded.
    "pooling_type",
    // How the file came about.
    "tensor_data_layout",
    "rope.scaling.finetuned",
];

/// Keys that follow from others in latent attention.
const LATENT: &[&str] = &["attention.key_length_swa", "attention.value_length_swa"];

/// Flags that the architecture implies: `None` of others.
fn implied(key: &str, descriptor: &Descriptor) -> Option<bool> {
    match key {
        "attention.causal" => Some(!descriptor.parts.sees_all),
        "kda.safe_gate" => Some(descriptor.parts.bounded_decays),
        _ => None,
    }
}

/// Keys of the architecture that nothing has read by now and that may change what it computes. Of a
/// value of 0 nothing is said: llama.cpp saves all keys, and 0 means that the model has none.
pub(super) fn keys<'a>(gguf: &'a Gguf, descriptor: &Descriptor) -> Vec<&'a str> {
    let prefix = descriptor.key("");
    let is_latent = descriptor.parts.mixer == Mixer::Latent;
    let is_harmless = |key: &str| HARMLESS.contains(&key) || is_latent && LATENT.contains(&key);
    let unread = gguf.unread(&prefix).into_iter().filter(|(key, value)| {
        let key = &key[prefix.len()..];
        match implied(key, descriptor) {
            Some(flag) => value.as_bool() != Some(flag),
            None => !is_harmless(key) && !is_nothing(value),
        }
    });
    unread.map(|(key, _)| key).collect()
}

fn is_nothing(value: &Value<'_>) -> bool {
    match value {
        Value::Array(array) => all_nothing(array),
        Value::String(text) => text.is_empty(),
        Value::Bool(is) => !is,
        number => number.as_i64() == Some(0) || number.as_f32() == Some(0.0),
    }
}

fn all_nothing(array: &Array<'_>) -> bool {
    (0..array.len()).all(|i| array.get(i).is_some_and(|value| is_nothing(&value)))
}

pub(super) fn warn(gguf: &Gguf, descriptor: &Descriptor) {
    let keys = keys(gguf, descriptor);
    if !keys.is_empty() {
        log::warn!(
            "{}: these keys are not used: {}; programs that compute with them give other answers",
            gguf.path().display(),
            keys.join(", ")
        );
    }
}

/// Refuses weights that are to be multiplied by inputs with other signs, after a Walsh–Hadamard
/// transform.
pub(super) fn refuse_rotations(gguf: &Gguf) -> Result<()> {
    match gguf.keys().find(|(key, _)| key.starts_with("prism.hadamard.")) {
        None => Ok(()),
        Some((key, value)) => {
            let expected = "no such key, as moeba cannot rotate the inputs of weights (Hadamard)";
            Err(Error::format(gguf.path(), key, expected, value.to_string()))
        }
    }
}
