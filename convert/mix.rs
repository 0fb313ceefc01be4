//! Which tensor gets which type: the output types that a user names and the rules behind them.
//!
//! The rules are those of llama.cpp's quantiser, so that a file called Q4_K_M means the same here
//! and there: vectors, norms and routers stay F32; `output` (or the embedding that stands in for
//! it) gets Q6_K; value projections, `ffn_down` and attention outputs get more bits, in most mixes
//! in the layers where it was found to matter most; models of eight experts get Q8_0 keys and
//! values; MXFP4_MOE is Q8_0 but for the experts. A row that is no multiple of 256 cannot hold a
//! K-quant and takes the next wider format of blocks of 32, or F16 where those do not fit either.

use crate::gguf::TensorType;

/// An output type as users name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2K,
    Q2KS,
    Q3KS,
    Q3KM,
    Q3KL,
    Q4KS,
    Q4KM,
    Q5KS,
    Q5KM,
    Q6K,
    Iq1S,
    Iq1M,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq2M,
    Iq3Xxs,
    Iq3Xs,
    Iq3S,
    Iq3M,
    Iq4Nl,
    Iq4Xs,
    Q1_0,
    Q2_0,
    Tq1_0,
    Tq2_0,
    Mxfp4Moe,
}

/// (mix, name, the number of `general.file_type`, the type of an ordinary matrix)
const TABLE: &[(Mix, &str, u32, TensorType)] = &[
    (Mix::F32, "f32", 0, TensorType::F32),
    (Mix::F16, "f16", 1, TensorType::F16),
    (Mix::Bf16, "bf16", 32, TensorType::BF16),
    (Mix::Q8_0, "q8_0", 7, TensorType::Q8_0),
    (Mix::Q4_0, "q4_0", 2, TensorType::Q4_0),
    (Mix::Q4_1, "q4_1", 3, TensorType::Q4_1),
    (Mix::Q5_0, "q5_0", 8, TensorType::Q5_0),
    (Mix::Q5_1, "q5_1", 9, TensorType::Q5_1),
    (Mix::Q2K, "q2_k", 10, TensorType::Q2_K),
    (Mix::Q2KS, "q2_k_s", 21, TensorType::Q2_K),
    (Mix::Q3KS, "q3_k_s", 11, TensorType::Q3_K),
    (Mix::Q3KM, "q3_k_m", 12, TensorType::Q3_K),
    (Mix::Q3KL, "q3_k_l", 13, TensorType::Q3_K),
    (Mix::Q4KS, "q4_k_s", 14, TensorType::Q4_K),
    (Mix::Q4KM, "q4_k_m", 15, TensorType::Q4_K),
    (Mix::Q5KS, "q5_k_s", 16, TensorType::Q5_K),
    (Mix::Q5KM, "q5_k_m", 17, TensorType::Q5_K),
    (Mix::Q6K, "q6_k", 18, TensorType::Q6_K),
    (Mix::Iq1S, "iq1_s", 24, TensorType::IQ1_S),
    (Mix::Iq1M, "iq1_m", 31, TensorType::IQ1_M),
    (Mix::Iq2Xxs, "iq2_xxs", 19, TensorType::IQ2_XXS),
    (Mix::Iq2Xs, "iq2_xs", 20, TensorType::IQ2_XS),
    (Mix::Iq2S, "iq2_s", 28, TensorType::IQ2_XS),
    (Mix::Iq2M, "iq2_m", 29, TensorType::IQ2_S),
    (Mix::Iq3Xxs, "iq3_xxs", 23, TensorType::IQ3_XXS),
    (Mix::Iq3Xs, "iq3_xs", 22, TensorType::IQ3_S),
    (Mix::Iq3S, "iq3_s", 26, TensorType::IQ3_S),
    (Mix::Iq3M, "iq3_m", 27, TensorType::IQ3_S),
    (Mix::Iq4Nl, "iq4_nl", 25, TensorType::IQ4_NL),
    (Mix::Iq4Xs, "iq4_xs", 30, TensorType::IQ4_XS),
    (Mix::Q1_0, "q1_0", 40, TensorType::Q1_0),
    (Mix::Q2_0, "q2_0", 41, TensorType::Q2_0),
    (Mix::Tq1_0, "tq1_0", 36, TensorType::TQ1_0),
    (Mix::Tq2_0, "tq2_0", 37, TensorType::TQ2_0),
    (Mix::Mxfp4Moe, "mxfp4_moe", 38, TensorType::MXFP4),
];

/// Other names for some of them, as llama.cpp has them.
const ALIASES: [(&str, Mix); 3] = [("q3_k", Mix::Q3KM), ("q4_k", Mix::Q4KM), ("q5_k", Mix::Q5KM)];

/// Kinds of files of llama.cpp's that are no mix, with their numbers of `general.file_type`.
pub const READ_ONLY: [(&str, u32); 2] = [("nvfp4", 39), ("f8_e4m3", 42)];

/// The name of a number of `general.file_type`, as models are called by it.
pub fn file_type_name(number: u32) -> Option<String> {
    let made = TABLE.iter().map(|row| (row.2, row.1));
    let all = made.chain(READ_ONLY.map(|(name, number)| (number, name)));
    all.into_iter().find(|(n, _)| *n == number).map(|(_, name)| name.to_uppercase())
}

/// `general.quantization_version`: the generation of block layouts, unchanged since 2023.
pub const QUANTIZATION_VERSION: u32 = 2;

impl Mix {
    fn row(self) -> &'static (Mix, &'static str, u32, TensorType) {
        TABLE.iter().find(|row| row.0 == self).expect("every variant is in the table")
    }

    /// By name or alias, in either case.
    pub fn from_name(name: &str) -> Option<Mix> {
        let named = TABLE.iter().map(|row| (row.1, row.0)).chain(ALIASES);
        named.into_iter().find(|row| row.0.eq_ignore_ascii_case(name)).map(|row| row.1)
    }

    /// The mix whose every matrix is of this type, if it keeps the floats of a checkpoint.
    pub fn of_float(ty: TensorType) -> Option<Mix> {
        [Mix::F32, Mix::F16, Mix::Bf16].into_iter().find(|mix| mix.base() == ty)
    }

    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// The name of each, for messages and help.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|row| row.1)
    }

    /// The other names that `from_name` takes.
    pub fn aliases() -> impl Iterator<Item = &'static str> {
        ALIASES.iter().map(|row| row.0)
    }

    pub fn file_type(self) -> u32 {
        self.row().2
    }

    pub fn base(self) -> TensorType {
        self.row().3
    }

    /// Whether it is one of about two bits a weight, which have rules of their own.
    fn is_of_two_bits(self) -> bool {
        use Mix::{Iq1M, Iq1S, Iq2M, Iq2S, Iq2Xs, Iq2Xxs};
        matches!(self, Iq1S | Iq1M | Iq2Xxs | Iq2Xs | Iq2S | Iq2M)
    }

    pub fn is_float(self) -> bool {
        self.base().block_len() == 1
    }
}

/// The facts about a model and a run that the rules use.
#[derive(Clone, Debug, Default)]
pub struct ModelFacts {
    pub n_layers: u64,
    pub n_experts: u64,
    /// Heads of the first layer, if layers differ.
    pub n_heads: u64,
    pub n_heads_kv: u64,
    /// Whether an importance matrix is at hand.
    pub has_imatrix: bool,
    /// Whether there is an `output.weight`, or `token_embd.weight` serves as both.
    pub has_output: bool,
    /// The value projections in the order of their layers: some rules count them and not layers,
    /// as not every layer need have one.
    pub values: Vec<String>,
    /// The down projections, in the same order.
    pub downs: Vec<String>,
}

impl ModelFacts {
    /// Adds what the names of the model's tensors tell.
    pub fn with_tensors<'a>(mut self, names: impl Iterator<Item = &'a str>) -> ModelFacts {
        for name in names {
            match kind(name) {
                Kind::Output => self.has_output = true,
                Kind::Value => self.values.push(name.to_owned()),
                Kind::Down if name.ends_with(".weight") => self.downs.push(name.to_owned()),
                _ => {}
            }
        }
        for names in [&mut self.values, &mut self.downs] {
            names.sort_by(|a, b| (layer_of(a), a).cmp(&(layer_of(b), b)));
        }
        self
    }

    /// llama.cpp gives the value projections of Llama 70B and Qwen 72B (80 layers, shared among 8
    /// query heads) more bits, as each is an eighth of the size that it would be.
    fn is_70b(&self) -> bool {
        self.n_layers == 80 && self.n_heads != self.n_heads_kv
    }

    /// Whether four query heads or more share a value head.
    fn shares_values(&self) -> bool {
        self.n_heads_kv > 0 && self.n_heads / self.n_heads_kv >= 4
    }

    fn has_eight_experts(&self) -> bool {
        self.n_experts == 8
    }
}

/// The type of a tensor in the output. `dims[0]` is the row length.
pub fn tensor_type(mix: Mix, model: &ModelFacts, name: &str, dims: &[u64]) -> TensorType {
    if !is_matrix(name, dims) {
        return TensorType::F32;
    }
    let wanted = if mix.is_float() { mix.base() } else { wanted_type(mix, model, name, dims) };
    fitting(wanted, dims[0])
}

/// Whether the mix decides: everything else stays F32.
pub fn is_matrix(name: &str, dims: &[u64]) -> bool {
    const SMALL: [&str; 6] = [
        "_norm.weight",
        "ffn_gate_inp",
        "ssm_conv1d",
        "shortconv.conv.weight",
        // Relative positions.
        "attn_rel_b.weight",
        "position_embd",
    ];
    dims.iter().skip(1).any(|n| *n > 1)
        && name.ends_with(".weight")
        && !SMALL.iter().any(|part| name.contains(part))
}

/// Whether a mix needs an importance matrix for some of its matrices.
pub fn needs_imatrix(mix: Mix) -> bool {
    mix.is_of_two_bits() || matches!(mix, Mix::Iq3Xxs | Mix::Iq3Xs)
}

/// Whether llama.cpp refuses to make this tensor so small without an importance matrix.
pub fn needs_importance(mix: Mix, name: &str, ty: TensorType) -> bool {
    use TensorType::{IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_XXS, Q2_K};
    let exempt = matches!(kind(name), Kind::Output | Kind::Embedding);
    let is_tiny = match ty {
        IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS => true,
        Q2_K => mix == Mix::Q2KS,
        _ => false,
    };
    is_tiny && !exempt
}

/// The type, or the nearest one that rows of `n` elements can have.
pub fn fitting(ty: TensorType, n: u64) -> TensorType {
    use TensorType::*;
    let narrow = match ty {
        Q1_0 | Q2_0 | Q2_K | Q3_K | TQ1_0 | TQ2_0 => Q4_0,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_XS => IQ4_NL,
        other => other,
    };
    let fits = |ty: &TensorType| n.is_multiple_of(ty.block_len() as u64);
    [ty, narrow].into_iter().find(fits).unwrap_or(F16)
}

fn wanted_type(mix: Mix, model: &ModelFacts, name: &str, dims: &[u64]) -> TensorType {
    use TensorType::{MXFP4, Q8_0};
    match kind(name) {
        Kind::Output => output_type(mix, dims[0]),
        Kind::Embedding if !model.has_output => output_type(mix, dims[0]),
        _ if mix == Mix::Mxfp4Moe && dims.get(2).is_some_and(|n| *n > 1) => MXFP4,
        _ if mix == Mix::Mxfp4Moe => Q8_0,
        Kind::Embedding => embedding_type(mix),
        _ if mix.is_of_two_bits() => two_bit_type(mix, model, name),
        Kind::Value | Kind::Key if model.has_eight_experts() => Q8_0,
        Kind::Value => value_type(mix, model, name),
        Kind::Down => down_type(mix, model, name),
        Kind::AttentionOutput => attention_output_type(mix, model),
        kind => other_type(mix, model, name, kind),
    }
}

fn output_type(mix: Mix, row_len: u64) -> TensorType {
    let base_fits = row_len.is_multiple_of(mix.base().block_len() as u64);
    match mix {
        Mix::Q8_0 | Mix::Mxfp4Moe => TensorType::Q8_0,
        Mix::Iq3Xxs if base_fits => TensorType::Q5_K,
        _ if base_fits && mix.is_of_two_bits() => TensorType::Q5_K,
        _ if base_fits => TensorType::Q6_K,
        _ => TensorType::Q8_0,
    }
}

/// The type of an embedding that is not the output, too.
fn embedding_type(mix: Mix) -> TensorType {
    match mix {
        Mix::Q2_0 | Mix::Tq1_0 | Mix::Tq2_0 => TensorType::Q4_K,
        Mix::Iq1S | Mix::Iq1M | Mix::Iq2Xxs | Mix::Iq2Xs => TensorType::Q2_K,
        Mix::Iq2S | Mix::Iq2M | Mix::Iq3Xxs => TensorType::IQ3_S,
        _ => mix.base(),
    }
}

/// The rules of the smallest mixes.
fn two_bit_type(mix: Mix, model: &ModelFacts, name: &str) -> TensorType {
    use TensorType::{IQ2_XXS, IQ3_S, Q2_K, Q4_K, Q5_K};
    let is_larger = matches!(mix, Mix::Iq2S | Mix::Iq2M);
    let more = if is_larger { IQ3_S } else { Q2_K };
    // llama.cpp counts the tensors here, and not the layers.
    let is_early = || {
        let i = model.downs.iter().position(|down| down == name).unwrap_or(0) as u64;
        i < model.n_layers / 8
    };
    match kind(name) {
        Kind::Value if model.shares_values() || model.n_experts >= 4 => Q4_K,
        Kind::Value => more,
        Kind::Key if model.has_eight_experts() => Q4_K,
        Kind::Down if is_early() => more,
        Kind::AttentionOutput if model.has_eight_experts() => Q5_K,
        Kind::AttentionOutput if matches!(mix, Mix::Iq1S | Mix::Iq1M) => IQ2_XXS,
        Kind::AttentionOutput if is_larger => IQ3_S,
        _ => mix.base(),
    }
}

/// The types of queries, keys, gates and ups.
fn other_type(mix: Mix, model: &ModelFacts, name: &str, kind: Kind) -> TensorType {
    use TensorType::{IQ2_S, IQ3_XXS};
    let n = model.n_layers;
    let is_between = |layer: u64| layer >= n / 8 && layer < 7 * n / 8;
    match (mix, kind) {
        (Mix::Iq3Xxs, Kind::Query | Kind::Key) => IQ2_S,
        (Mix::Iq3Xs, Kind::Query | Kind::Key) => IQ3_XXS,
        (Mix::Iq3Xs, Kind::GateOrUp) if layer_of(name).is_some_and(is_between) => IQ3_XXS,
        _ => mix.base(),
    }
}

fn value_type(mix: Mix, model: &ModelFacts, name: &str) -> TensorType {
    use TensorType::{IQ3_S, Q3_K, Q4_K, Q5_K, Q6_K};
    let i = model.values.iter().position(|value| value == name).unwrap_or(0) as u64;
    let more = needs_more_bits(i, model.values.len() as u64);
    let ty = match mix {
        Mix::Q2K | Mix::Q2KS if model.shares_values() => Q4_K,
        Mix::Q2K => Q3_K,
        Mix::Iq3Xxs | Mix::Iq3Xs | Mix::Iq3S if model.shares_values() => Q4_K,
        Mix::Iq3Xxs if !model.has_imatrix => IQ3_S,
        Mix::Iq3M => Q4_K,
        Mix::Q3KM if i < 2 => Q5_K,
        Mix::Q3KM => Q4_K,
        Mix::Q3KL => Q5_K,
        Mix::Q4KS if i < 4 => Q5_K,
        Mix::Q4KM | Mix::Q5KM if more => Q6_K,
        Mix::Iq4Nl | Mix::Iq4Xs if model.shares_values() => Q5_K,
        _ => mix.base(),
    };
    if model.is_70b() && matches!(ty, Q3_K | Q4_K) { Q5_K } else { ty }
}

fn down_type(mix: Mix, model: &ModelFacts, name: &str) -> TensorType {
    use TensorType::{Q3_K, Q4_1, Q4_K, Q5_1, Q5_K, Q6_K};
    let Some(layer) = layer_of(name) else { return mix.base() };
    let n = model.n_layers;
    let first = layer < n / 8;
    match mix {
        Mix::Q2K => Q3_K,
        Mix::Q2KS if first => Q4_K,
        Mix::Iq3Xxs if !model.has_imatrix => {
            if first {
                Q4_K
            } else {
                Q3_K
            }
        }
        Mix::Iq3M if first => Q4_K,
        Mix::Iq3M if model.has_eight_experts() && needs_more_bits(layer, n) => Q4_K,
        Mix::Q3KM if layer < n / 16 => Q5_K,
        Mix::Q3KM => Q4_K,
        Mix::Q3KL => Q5_K,
        Mix::Q4KS if first => Q5_K,
        Mix::Q4KM | Mix::Q5KM if needs_more_bits(layer, n) => Q6_K,
        Mix::Iq4Nl | Mix::Iq4Xs if first && !model.has_imatrix => Q5_K,
        Mix::Q4_0 if first && model.has_imatrix => Q4_1,
        Mix::Q5_0 if first && model.has_imatrix => Q5_1,
        _ => mix.base(),
    }
}

fn attention_output_type(mix: Mix, model: &ModelFacts) -> TensorType {
    use Mix::{Iq3M, Iq3S, Iq3Xs, Iq3Xxs, Iq4Nl, Iq4Xs, Q2K, Q3KL, Q3KM, Q3KS, Q4KM, Q4KS};
    match (mix, model.has_eight_experts()) {
        (Q2K | Q3KS | Q3KM | Q4KS | Q4KM | Iq4Nl | Iq4Xs, true) => TensorType::Q5_K,
        (Iq3Xxs | Iq3Xs | Iq3S | Iq3M, true) => TensorType::Q5_K,
        (Q2K, false) => TensorType::Q3_K,
        (Iq3Xxs, false) => TensorType::IQ3_S,
        (Q3KM | Iq3M, false) => TensorType::Q4_K,
        (Q3KL, false) => TensorType::Q5_K,
        _ => mix.base(),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Output,
    Embedding,
    /// Value projections, alone, joined with queries and keys, and MLA's joint up-projection of
    /// keys and values.
    Value,
    Query,
    Key,
    AttentionOutput,
    GateOrUp,
    Down,
    Other,
}

fn kind(name: &str) -> Kind {
    let is_one_of = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
    match name {
        "output.weight" => Kind::Output,
        "token_embd.weight" => Kind::Embedding,
        _ if is_one_of(&["attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"]) => Kind::Value,
        _ if is_one_of(&["attn_q.weight"]) => Kind::Query,
        _ if is_one_of(&["attn_k.weight"]) => Kind::Key,
        _ if is_one_of(&["attn_output.weight"]) => Kind::AttentionOutput,
        _ if name.contains("ffn_down") => Kind::Down,
        _ if name.contains("ffn_gate") || name.contains("ffn_up") => Kind::GateOrUp,
        _ => Kind::Other,
    }
}

/// The first and last eighth of n, and every third one between.
fn needs_more_bits(i: u64, n: u64) -> bool {
    let eighth = n / 8;
    i < eighth || i >= 7 * n / 8 || (i - eighth) % 3 == 2
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
        let values: Vec<String> =
            (0..n_layers).map(|layer| format!("blk.{layer}.attn_v.weight")).collect();
        let names = values.iter().rev().map(String::as_str).chain(["output.weight"]);
        let (n_heads, n_heads_kv) = (8, 2);
        ModelFacts { n_layers, n_experts, n_heads, n_heads_kv, ..Default::default() }
            .with_tensors(names)
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
        assert_eq!(at("blk.0.attn_gate.weight", &[256, 1]), F32);
        assert_eq!(at("blk.0.ffn_up_exps.weight", &[256, 64, 4]), Q4_K);
        assert_eq!(at("blk.0.ffn_up.weight", &[96, 64]), Q5_0);
        assert_eq!(at("blk.3.ffn_down.weight", &[96, 64]), Q8_0);
        assert_eq!(at("blk.0.ffn_up.weight", &[100, 64]), F16);
        assert_eq!(tensor_type(Mix::F32, &m, "blk.0.ffn_up.weight", &[100, 64]), F32);
    }

    #[test]
    fn names_and_file_types() {
        assert_eq!(Mix::from_name("Q4_K_M"), Some(Mix::Q4KM));
        assert_eq!(Mix::from_name("q4_k"), Some(Mix::Q4KM));
        assert_eq!(Mix::from_name("q9_k"), None);
        assert_eq!(Mix::of_float(BF16), Some(Mix::Bf16));
        assert_eq!(Mix::of_float(Q8_0), None);
        assert_eq!(Mix::Q5KM.file_type(), 17);
        assert_eq!(file_type_name(15).as_deref(), Some("Q4_K_M"));
        assert_eq!(file_type_name(26).as_deref(), Some("IQ3_S"));
        assert_eq!(file_type_name(39).as_deref(), Some("NVFP4"));
        assert_eq!(file_type_name(41).as_deref(), Some("Q2_0"));
        assert_eq!(file_type_name(42).as_deref(), Some("F8_E4M3"));
        assert_eq!(file_type_name(4), None);
    }
}
