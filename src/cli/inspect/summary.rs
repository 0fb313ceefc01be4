//! The facts that people want first. They are read from metadata and tensors without checks, so
//! that damaged files have a summary too.

use crate::convert::file_type_name;
use crate::gguf::{Gguf, TensorInfo, TensorType};
use crate::model::descriptor::Descriptor;
use crate::model::kv::{self, CacheType, LayerShape};
use crate::model::{HyperParams, granules};
use crate::units::size;
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;

pub struct Summary {
    architecture: Option<String>,
    name: Option<String>,
    /// Weights in all, and those that one token is computed with.
    n_params: u64,
    n_active_params: u64,
    n_ctx_train: Option<u32>,
    file_type: String,
    n_bytes: u64,
    /// KV cache bytes of one position, in f16.
    kv_bytes_per_token: Option<u64>,
    /// Routed experts a layer, and those that a token uses.
    experts: Option<(u32, u32)>,
    /// Rows of the embedding, and the kind of vocabulary.
    n_vocab: Option<u64>,
    vocabulary: Option<String>,
    has_chat_template: bool,
    license: Option<String>,
}

impl Summary {
    pub fn of(gguf: &Gguf) -> Summary {
        let text = |key: &str| gguf.str(key).ok().flatten().map(str::to_owned);
        let architecture = text("general.architecture");
        let number = |key: &str| {
            let key = format!("{}.{key}", architecture.as_deref()?);
            gguf.u32(&key).ok().flatten()
        };
        let experts = number("expert_count").filter(|n| *n > 0);
        let experts = experts.and_then(|n| Some((n, number("expert_used_count")?)));
        let values = number("attention.value_expert_count").filter(|n| *n > 0);
        let values = values.zip(number("attention.value_expert_used_count"));
        let further = number("nextn_predict_layers").unwrap_or(0);
        let n_layers = number("block_count").map(|n| n.saturating_sub(further));
        let (n_params, n_active_params) = params(gguf, [experts, values], n_layers);
        let named = gguf.u32("general.file_type").ok().flatten().and_then(file_type_name);
        let mostly = || type_totals(gguf).first().map(|(ty, _)| format!("mostly {}", ty.name()));
        Summary {
            n_params,
            n_active_params,
            n_ctx_train: number("context_length"),
            file_type: named.or_else(mostly).unwrap_or_else(|| "no tensors".into()),
            n_bytes: gguf.n_bytes(),
            kv_bytes_per_token: kv_bytes_per_token(gguf, architecture.as_deref()),
            experts,
            n_vocab: gguf.tensor("token_embd.weight").map(TensorInfo::n_rows),
            vocabulary: text("tokenizer.ggml.model"),
            has_chat_template: gguf.get("tokenizer.chat_template").is_some(),
            license: text("general.license"),
            name: text("general.name"),
            architecture,
        }
    }

    pub fn json(&self) -> Json {
        json!({
            "architecture": self.architecture,
            "name": self.name,
            "n_params": self.n_params,
            "n_active_params": self.n_active_params,
            "n_ctx_train": self.n_ctx_train,
            "file_type": self.file_type,
            "n_bytes": self.n_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "n_experts": self.experts.map(|(n, _)| n),
            "n_experts_used": self.experts.map(|(_, used)| used),
            "n_vocab": self.n_vocab,
            "vocabulary": self.vocabulary,
            "has_chat_template": self.has_chat_template,
            "license": self.license,
        })
    }

    pub fn write(&self, out: &mut String) {
        let mut line = |what: &str, value: Option<String>| {
            if let Some(value) = value {
                // Writing to a String cannot fail.
                let _ = writeln!(out, "  {what:14}  {}", harmless(&value));
            }
        };
        line("architecture", self.architecture.clone());
        line("name", self.name.clone());
        let active = match self.n_active_params == self.n_params {
            true => String::new(),
            false => format!(", {} active per token", short(self.n_active_params)),
        };
        line("parameters", Some(format!("{}{active}", short(self.n_params))));
        line("context", self.n_ctx_train.map(|n| counted(n as usize, "token")));
        line("file type", Some(format!("{}, {}", self.file_type, size(self.n_bytes))));
        let kv = self.kv_bytes_per_token;
        line("KV cache", kv.map(|n| format!("{} per token (f16)", size(n))));
        let experts = |(n, used)| format!("{n} per layer, {used} used per token");
        line("experts", self.experts.map(experts));
        let kind = self.vocabulary.as_deref().unwrap_or("none");
        line(
            "vocabulary",
            self.n_vocab.map(|n| format!("{} ({kind})", counted(n as usize, "token"))),
        );
        line("chat template", Some(if self.has_chat_template { "yes" } else { "no" }.into()));
        line("license", self.license.clone());
    }
}

/// Weights in all, and those that a token is computed with: of routed experts, and of those that
/// make values, those that it uses, of layers that predict further tokens none.
fn params(
    gguf: &Gguf,
    [experts, values]: [Option<(u32, u32)>; 2],
    n_layers: Option<u32>,
) -> (u64, u64) {
    let granules = granules::GranuleKeys::read(gguf).ok().flatten();
    let granule_weights = |layer: usize| {
        let typed = granules.as_ref()?.layer_as_written(gguf, layer).ok()??;
        let (n_ff, n) = (typed.experts.geometry.n_ff as u64, typed.experts.n_experts as u64);
        Some(3 * typed.n_embd as u64 * n_ff * n)
    };
    let (mut all, mut active) = (0u64, 0u64);
    for tensor in gguf.tensors() {
        let granule = granules::layer_of(&tensor.name).and_then(granule_weights);
        let n = granule.unwrap_or_else(|| tensor.n_elements());
        let is_routed = granule.is_some() || tensor.name.contains("_exps.");
        let layer = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
        let layer = layer.and_then(|layer| layer.parse::<u32>().ok());
        let is_further = layer.zip(n_layers).is_some_and(|(layer, n_layers)| layer >= n_layers);
        all = all.saturating_add(n);
        let used = match if tensor.name.contains(".attn_v_exps.") { values } else { experts } {
            _ if is_further => 0,
            Some((all, used)) if is_routed => n / u64::from(all) * u64::from(used.min(all)),
            _ => n,
        };
        active = active.saturating_add(used);
    }
    (all, active)
}

/// Wider heads than any model has: a file may say anything.
const MAX_WIDTH: usize = 1 << 16;

/// KV cache bytes of one position; `None` for unknown architectures.
fn kv_bytes_per_token(gguf: &Gguf, architecture: Option<&str>) -> Option<u64> {
    let descriptor = Descriptor::for_architecture(architecture?, gguf.path()).ok()?;
    let hyper = HyperParams::read(gguf, &descriptor).ok()?;
    let widths = [hyper.n_head_kv, hyper.head_dim, hyper.head_dim_v, hyper.kv_rank];
    if hyper.n_layers > gguf.tensors().len() || widths.iter().any(|width| *width > MAX_WIDTH) {
        return None;
    }
    let mut shapes = hyper.cache_shapes();
    // These keep the same whatever the context.
    shapes.retain(|shape| !matches!(shape, LayerShape::State(_)));
    Some(kv::n_bytes(&shapes, 1, CacheType::F16, CacheType::F16))
}

/// `30.53 B`, `38.4 M`: numbers as models are named by them.
fn short(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1} K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        1_000_000_000..1_000_000_000_000 => format!("{:.2} B", n as f64 / 1e9),
        _ => format!("{:.3} T", n as f64 / 1e12),
    }
}

pub struct TypeTotal {
    pub n_tensors: u64,
    pub n_elements: u64,
    pub n_bytes: u64,
}

/// Totals by type, most bytes first.
pub fn type_totals(gguf: &Gguf) -> Vec<(TensorType, TypeTotal)> {
    let mut totals: BTreeMap<TensorType, TypeTotal> = BTreeMap::new();
    for t in gguf.tensors() {
        let total =
            totals.entry(t.ty).or_insert(TypeTotal { n_tensors: 0, n_elements: 0, n_bytes: 0 });
        total.n_tensors += 1;
        total.n_elements += t.n_elements();
        total.n_bytes += t.n_bytes;
    }
    let mut totals: Vec<_> = totals.into_iter().collect();
    totals.sort_by_key(|(_, total)| std::cmp::Reverse(total.n_bytes));
    totals
}

/// `1 file`, `2 files`.
pub fn counted(n: usize, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

/// No control character of a file's text reaches the terminal.
pub fn harmless(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn numbers_are_short() {
        let cases = [
            (999, "999"),
            (1_500, "1.5 K"),
            (38_370_304, "38.4 M"),
            (30_532_122_624, "30.53 B"),
            (1_026_408_232_448, "1.026 T"),
        ];
        for (n, text) in cases {
            assert_eq!(short(n), text);
        }
    }
}
