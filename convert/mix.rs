//! Which tensor gets which type: the output types that a user names and the rules behind them.
//!
//! The rules are those of llama.cpp's quantiser, so that a file called Q4_K_M means the same here
//! and there: vectors, norms and routers stay F32; `output` (or the embedding that stands in for
//! it) gets Q6_K; Q4_K_M and Q5_K_M give the value projection and `ffn_down` Q6_K in the layers
//! where it was found to matter most; models of eight experts get Q8_0 keys and values.
//!
//! One difference: a row that is no multiple of 256 cannot hold a K-quant. llama.cpp then takes
//! Q5_0 for Q4_K, Q5_1 for Q5_K and Q8_0 for Q6_K; we take Q8_0 for all three, as Q5_0 and Q5_1
//! are not among the types that we compute with. A row that is no multiple of 32 gets F16.

use crate::gguf::TensorType;

/// An output type as users name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4KM,
    Q5KM,
    Q6K,
}

/// (mix, name, the number of `general.file_type`, the type of an ordinary matrix)
const TABLE: &[(Mix, &str, u32, TensorType)] = &[
    (Mix::F32, "f32", 0, TensorType::F32),
    (Mix::F16, "f16", 1, TensorType::F16),
    (Mix::Bf16, "bf16", 32, TensorType::BF16),
    (Mix::Q8_0, "q8_0", 7, TensorType::Q8_0),
    (Mix::Q4_0, "q4_0", 2, TensorType::Q4_0),
    (Mix::Q4KM, "q4_k_m", 15, TensorType::Q4_K),
    (Mix::Q5KM, "q5_k_m", 17, TensorType::Q5_K),
    (Mix::Q6K, "q6_k", 18, TensorType::Q6_K),
];

/// `general.quantization_version`: the generation of block layouts, unchanged since 2023.
pub const QUANTIZATION_VERSION: u32 = 2;

impl Mix {
    fn row(self) -> &'static (Mix, &'static str, u32, TensorType) {
        TABLE.iter().find(|row| row.0 == self).expect("every variant is in the table")
    }

    /// By name, in either case.
    pub fn from_name(name: &str) -> Option<Mix> {
        TABLE.iter().find(|row| row.1.eq_ignore_ascii_case(name)).map(|row| row.0)
    }

    /// The mix whose every matrix is of this type, if it keeps the floats of a checkpoint.
    pub fn of_float(ty: TensorType) -> Option<Mix> {
        [Mix::F32, Mix::F16, Mix::Bf16].into_iter().find(|mix| mix.base() == ty)
    }

    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// All names, for messages and help.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|row| row.1)
    }

    pub fn file_type(self) -> u32 {
        self.row().2
    }

    fn base(self) -> TensorType {
        self.row().3
    }

    fn is_float(self) -> bool {
        self.base().block_len() == 1
    }
}

/// What the rules ask about a model.
#[derive(Clone, Debug, Default)]
pub struct ModelFacts {
    pub architecture: String,
    pub n_layers: u64,
    pub n_experts: u64,
    pub n_heads: u64,
    pub n_heads_kv: u64,
    /// Whether there is an `output.weight`, or `token_embd.weight` serves as both.
    pub has_output: bool,
}

impl ModelFacts {
    /// llama.cpp gives the value projection of Llama 70B (80 layers, shared among 8 query heads)
    /// more bits, as it is an eighth of the size it would be.
    fn is_llama_70b(&self) -> bool {
        self.architecture == "llama" && self.n_layers == 80 && self.n_heads != self.n_heads_kv
    }
}

/// The type of a tensor in the output. `dims[0]` is the row length.
pub fn tensor_type(mix: Mix, model: &ModelFacts, name: &str, dims: &[u64]) -> TensorType {
    if !is_matrix(name, dims) {
        return TensorType::F32;
    }
    let wanted = if mix.is_float() { mix.base() } else { wanted_type(mix, model, name) };
    fitting(wanted, dims[0])
}

/// Whether the mix decides: everything else stays F32.
pub fn is_matrix(name: &str, dims: &[u64]) -> bool {
    dims.len() >= 2
        && name.ends_with(".weight")
        && !name.ends_with("_norm.weight")
        && !name.contains("ffn_gate_inp")
        && !name.ends_with("ssm_conv1d.weight")
}

/// The type, or the nearest one that rows of `n` elements can have.
pub fn fitting(ty: TensorType, n: u64) -> TensorType {
    let fits = |ty: TensorType| n.is_multiple_of(ty.block_len() as u64);
    [ty, TensorType::Q8_0].into_iter().find(|ty| fits(*ty)).unwrap_or(TensorType::F16)
}

fn wanted_type(mix: Mix, model: &ModelFacts, name: &str) -> TensorType {
    use TensorType::{Q5_K, Q6_K, Q8_0};
    let eight_experts = model.n_experts == 8;
    let more = matches!(mix, Mix::Q4KM | Mix::Q5KM) && needs_more_bits(model, name);
    match kind(name) {
        Kind::Output => output_type(mix),
        Kind::Embedding if !model.has_output => output_type(mix),
        Kind::Value | Kind::Key if eight_experts => Q8_0,
        Kind::Value if more => Q6_K,
        Kind::Value if mix == Mix::Q4KM && model.is_llama_70b() => Q5_K,
        Kind::Down if more => Q6_K,
        Kind::AttentionOutput if eight_experts && mix == Mix::Q4KM => Q5_K,
        _ => mix.base(),
    }
}

fn output_type(mix: Mix) -> TensorType {
    if mix == Mix::Q8_0 { TensorType::Q8_0 } else { TensorType::Q6_K }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Output,
    Embedding,
    /// Value projections, and MLA's joint up-projection of keys and values.
    Value,
    Key,
    AttentionOutput,
    Down,
    Other,
}

fn kind(name: &str) -> Kind {
    match name {
        "output.weight" => Kind::Output,
        "token_embd.weight" => Kind::Embedding,
        _ if name.ends_with("attn_v.weight") => Kind::Value,
        _ if name.ends_with("attn_kv_b.weight") => Kind::Value,
        _ if name.ends_with("attn_k.weight") => Kind::Key,
        _ if name.ends_with("attn_output.weight") => Kind::AttentionOutput,
        _ if name.contains("ffn_down") => Kind::Down,
        _ => Kind::Other,
    }
}

/// The first and last eighth of the layers, and every third one between.
fn needs_more_bits(model: &ModelFacts, name: &str) -> bool {
    let Some(layer) = layer_of(name) else { return false };
    let n = model.n_layers;
    let eighth = n / 8;
    layer < eighth || layer >= 7 * n / 8 || (layer - eighth) % 3 == 2
}

/// `blk.7.` → 7
pub fn layer_of(name: &str) -> Option<u64> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use TensorType::*;

    fn model(n_layers: u64, n_experts: u64) -> ModelFacts {
        let architecture = "llama".to_owned();
        ModelFacts {
            architecture,
            n_layers,
            n_experts,
            n_heads: 8,
            n_heads_kv: 2,
            has_output: true,
        }
    }

    fn types(mix: Mix, model: &ModelFacts, part: &str) -> Vec<TensorType> {
        let name = |layer| format!("blk.{layer}.{part}.weight");
        let dims = if part.ends_with("_exps") { vec![256, 256, 4] } else { vec![256, 256] };
        (0..model.n_layers).map(|layer| tensor_type(mix, model, &name(layer), &dims)).collect()
    }

    #[test]
    fn more_bits_go_to_the_ends_and_to_every_third_layer_between() {
        let m = model(16, 0);
        let k = |layer| if [0, 1, 4, 7, 10, 13, 14, 15].contains(&layer) { Q6_K } else { Q4_K };
        let expected: Vec<_> = (0..16).map(k).collect();
        for part in ["attn_v", "ffn_down", "ffn_down_exps", "ffn_down_shexp"] {
            assert_eq!(types(Mix::Q4KM, &m, part), expected, "{part}");
        }
        assert!(types(Mix::Q4KM, &m, "ffn_up").iter().all(|t| *t == Q4_K));
        assert!(types(Mix::Q6K, &m, "attn_v").iter().all(|t| *t == Q6_K));
    }

    #[test]
    fn eight_experts_keep_keys_and_values_in_q8_0() {
        let m = model(4, 8);
        for mix in [Mix::Q4_0, Mix::Q4KM, Mix::Q5KM, Mix::Q6K] {
            assert_eq!(types(mix, &m, "attn_v"), [Q8_0; 4]);
            assert_eq!(types(mix, &m, "attn_k"), [Q8_0; 4]);
        }
        assert_eq!(types(Mix::Q4KM, &m, "attn_output"), [Q5_K; 4]);
        assert_eq!(types(Mix::Q5KM, &m, "attn_output"), [Q5_K; 4]);
        assert_eq!(types(Mix::Q4KM, &model(4, 16), "attn_output"), [Q4_K; 4]);
    }

    #[test]
    fn the_output_gets_more_bits_and_so_does_an_embedding_that_stands_in_for_it() {
        let mut m = model(4, 0);
        let at = |m: &ModelFacts, mix, name| tensor_type(mix, m, name, &[256, 99]);
        assert_eq!(at(&m, Mix::Q4KM, "output.weight"), Q6_K);
        assert_eq!(at(&m, Mix::Q4_0, "output.weight"), Q6_K);
        assert_eq!(at(&m, Mix::Q8_0, "output.weight"), Q8_0);
        assert_eq!(at(&m, Mix::F16, "output.weight"), F16);
        assert_eq!(at(&m, Mix::Q4KM, "token_embd.weight"), Q4_K);
        m.has_output = false;
        assert_eq!(at(&m, Mix::Q4KM, "token_embd.weight"), Q6_K);
    }

    #[test]
    fn vectors_norms_and_routers_stay_f32_and_odd_rows_fall_back() {
        let m = model(4, 4);
        let at = |name, dims: &[u64]| tensor_type(Mix::Q4KM, &m, name, dims);
        assert_eq!(at("blk.0.attn_norm.weight", &[256]), F32);
        assert_eq!(at("blk.0.attn_q.bias", &[256]), F32);
        assert_eq!(at("blk.0.ffn_gate_inp.weight", &[256, 4]), F32);
        assert_eq!(at("blk.0.ffn_gate_inp_shexp.weight", &[256]), F32);
        assert_eq!(at("blk.0.ffn_up_exps.weight", &[256, 64, 4]), Q4_K);
        assert_eq!(at("blk.0.ffn_up.weight", &[96, 64]), Q8_0);
        assert_eq!(at("blk.0.ffn_up.weight", &[100, 64]), F16);
        assert_eq!(tensor_type(Mix::F32, &m, "blk.0.ffn_up.weight", &[100, 64]), F32);
    }

    #[test]
    fn names_and_file_types() {
        assert_eq!(Mix::from_name("Q4_K_M"), Some(Mix::Q4KM));
        assert_eq!(Mix::from_name("q4_k"), None);
        assert_eq!(Mix::of_float(BF16), Some(Mix::Bf16));
        assert_eq!(Mix::of_float(Q8_0), None);
        assert_eq!(Mix::Q5KM.file_type(), 17);
    }
}
