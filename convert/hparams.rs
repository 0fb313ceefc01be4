//! config.json → the model's GGUF keys, and the sizes that its tensors must have.

use serde_json::Value;

use super::json::{Json, shown};
use crate::gguf::OwnedValue;
use crate::model::descriptor::{Activation, Descriptor, MetadataRow, MetadataType};
use crate::{Error, Result};

/// Model keys in the order of the descriptor's rows.
#[derive(Debug)]
pub struct Hparams {
    pub keys: Vec<(String, OwnedValue)>,
}

impl Hparams {
    /// Reads every row of the descriptor from the config.
    pub fn read(config: &Json, descriptor: &Descriptor) -> Result<Hparams> {
        check_known(config, descriptor)?;
        let mut keys = Vec::new();
        for row in &descriptor.convert.metadata {
            if let Some(value) = read_row(config, row)? {
                let key = row.key.replace("{arch}", &descriptor.architecture);
                keys.push((key, value));
            }
        }
        Ok(Hparams { keys })
    }

    fn get(&self, descriptor: &Descriptor, rest: &str) -> Option<u64> {
        let key = descriptor.key(rest);
        self.keys.iter().find(|(k, _)| *k == key).and_then(|(_, value)| match value {
            OwnedValue::U32(n) => Some((*n).into()),
            _ => None,
        })
    }
}

fn read_row(config: &Json, row: &MetadataRow) -> Result<Option<OwnedValue>> {
    let Some((field, value)) = config.first(&row.from) else {
        if row.optional {
            return Ok(None);
        }
        return Err(config.fail(&row.from.join(" or "), "a value", "nothing"));
    };
    let found = match row.ty {
        MetadataType::U32 => value.as_u64().and_then(|n| u32::try_from(n).ok()).map(Into::into),
        MetadataType::F32 => value.as_f64().map(|x| OwnedValue::F32(x as f32)),
        MetadataType::Bool => value.as_bool().map(Into::into),
    };
    let expected = match row.ty {
        MetadataType::U32 => "an integer from 0 to 2^32 - 1",
        MetadataType::F32 => "a number",
        MetadataType::Bool => "true or false",
    };
    found.map(Some).ok_or_else(|| config.fail(field, expected, shown(value)))
}

/// Fields that change what the model computes and that no GGUF key carries.
fn check_known(config: &Json, descriptor: &Descriptor) -> Result<()> {
    if let Some(value) = config.at("quantization_config") {
        let method = value.get("quant_method").and_then(Value::as_str).unwrap_or("quantised");
        let expected = "weights in F32, F16 or BF16";
        return Err(config.fail("quantization_config", expected, format!("{method} weights")));
    }
    if let Some(act) = config.str("hidden_act")? {
        let known = match descriptor.parts.activation {
            Activation::Silu | Activation::SiluClamped => ["silu", "swish"],
        };
        if !known.contains(&act) {
            return Err(config.fail("hidden_act", known[0], act));
        }
    }
    match config.number("partial_rotary_factor")? {
        Some(part) if part != 1.0 => {
            return Err(config.fail("partial_rotary_factor", "1", part.to_string()));
        }
        _ => {}
    }
    let window = config.count("sliding_window")?;
    if let (Some(n), true) = (window, config.bool("use_sliding_window")? != Some(false)) {
        log::warn!("sliding_window {n} is not converted: the engine attends to all positions");
    }
    Ok(())
}

/// The sizes that tensor shapes are made of.
#[derive(Clone, Debug)]
pub struct Sizes {
    pub n_layers: u64,
    pub embd: u64,
    pub vocab: u64,
    pub heads: u64,
    pub heads_kv: u64,
    pub head_dim: u64,
    pub ff: u64,
    pub experts: u64,
    pub ff_expert: u64,
    pub ff_shared: u64,
}

/// No model is near these; a config that says more is broken, and memory is spent by them.
const MAX_LAYERS: u64 = 10_000;
const MAX_EXPERTS: u64 = 65_536;

impl Sizes {
    pub fn read(config: &Json, descriptor: &Descriptor, hparams: &Hparams) -> Result<Sizes> {
        let get = |rest: &str| hparams.get(descriptor, rest);
        let require = |rest: &str| {
            get(rest).ok_or_else(|| config.fail(&descriptor.key(rest), "a value", "nothing"))
        };
        let (embd, heads) = (require("embedding_length")?, require("attention.head_count")?);
        let ff = require("feed_forward_length")?;
        let sizes = Sizes {
            n_layers: require("block_count")?,
            embd,
            vocab: config.require_count("vocab_size")?,
            heads,
            heads_kv: get("attention.head_count_kv").unwrap_or(heads),
            head_dim: match get("attention.key_length") {
                Some(n) => n,
                None => embd.checked_div(heads).unwrap_or(0),
            },
            ff,
            experts: get("expert_count").unwrap_or(0),
            ff_expert: get("expert_feed_forward_length").unwrap_or(ff),
            ff_shared: get("expert_shared_feed_forward_length").unwrap_or(0),
        };
        sizes.check(config)?;
        Ok(sizes)
    }

    fn check(&self, config: &Json) -> Result<()> {
        let range = |field: &str, n: u64, most: u64| match n {
            1.. if n <= most => Ok(()),
            _ => Err(config.fail(field, format!("1 to {most}"), n.to_string())),
        };
        range("num_hidden_layers", self.n_layers, MAX_LAYERS)?;
        range("vocab_size", self.vocab, 1 << 24)?;
        range("num_attention_heads", self.heads, 1 << 16)?;
        range("num_key_value_heads", self.heads_kv, self.heads)?;
        range("head_dim", self.head_dim, 1 << 16)?;
        if self.experts > MAX_EXPERTS {
            let expected = format!("at most {MAX_EXPERTS}");
            return Err(config.fail("number of experts", expected, self.experts.to_string()));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(config.fail("head_dim", "an even number", self.head_dim.to_string()));
        }
        Ok(())
    }

    /// The shape that a tensor of this role must have in the checkpoint, row length last; `None`
    /// for a role whose tensors no checkpoint has.
    pub fn shape(&self, role: &str) -> Option<Vec<u64>> {
        let (q, kv) = (self.heads * self.head_dim, self.heads_kv * self.head_dim);
        Some(match role {
            "token_embd" | "output" => vec![self.vocab, self.embd],
            "output_norm" | "attn_norm" | "ffn_norm" | "ffn_gate_inp_shexp" => vec![self.embd],
            "attn_q" => vec![q, self.embd],
            "attn_k" | "attn_v" => vec![kv, self.embd],
            "attn_q_bias" => vec![q],
            "attn_k_bias" | "attn_v_bias" => vec![kv],
            "attn_q_norm" | "attn_k_norm" => vec![self.head_dim],
            "attn_output" => vec![self.embd, q],
            "ffn_gate" | "ffn_up" => vec![self.ff, self.embd],
            "ffn_down" => vec![self.embd, self.ff],
            "ffn_gate_inp" => vec![self.experts, self.embd],
            "ffn_gate_exps" | "ffn_up_exps" => vec![self.experts, self.ff_expert, self.embd],
            "ffn_down_exps" => vec![self.experts, self.embd, self.ff_expert],
            "ffn_gate_shexp" | "ffn_up_shexp" => vec![self.ff_shared, self.embd],
            "ffn_down_shexp" => vec![self.embd, self.ff_shared],
            _ => return None,
        })
    }
}

/// `architectures[0]`.
pub fn hf_class(config: &Json) -> Result<String> {
    let first = config.at("architectures").and_then(|v| v.get(0)).and_then(Value::as_str);
    let fail = || -> Error {
        let got = config.at("architectures").map_or("nothing".into(), shown);
        config.fail("architectures", "a list of one class name", got)
    };
    first.map(str::to_owned).ok_or_else(fail)
}
