//! The parts that a model can be made of. A descriptor names them in `[parts]` and `[router]`;
//! what differs from file to file of one architecture is a GGUF key and read by `hyper`.

use crate::backend::ops::{Activation, HeadOrder, RopePairing, Score};
use serde::Deserialize;

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parts {
    #[serde(default)]
    pub form: Form,
    pub norm: Norm,
    /// Files with `attention.layer_norm_rms_epsilon` have RMSNorm instead.
    #[serde(default)]
    pub rms_by_epsilon: bool,
    #[serde(default)]
    pub positions: Positions,
    /// Which elements of a head rotate together.
    #[serde(default)]
    pub rope: RopePairing,
    /// Which elements of a head rotate, if not all of them do.
    #[serde(default)]
    pub rope_rows: RopeRows,
    /// The range of pairs over which YaRN blends is rounded to whole pairs.
    #[serde(default = "yes")]
    pub yarn_rounds: bool,
    /// Which layers rotate queries and keys.
    #[serde(default)]
    pub rope_layers: RopeLayers,
    /// The scaling of RoPE is for layers that see everything: sliding layers have none.
    #[serde(default)]
    pub sliding_rope_is_unscaled: bool,
    /// QK-norm comes after RoPE.
    #[serde(default)]
    pub norm_after_rope: bool,
    #[serde(default)]
    pub mixer: Mixer,
    /// q's matrix makes a gate as well, [q, gate] a head: attention's output is multiplied by the
    /// gate's sigmoid.
    #[serde(default)]
    pub gated_attention: bool,
    /// Some layers use a gated delta rule (arXiv 2412.06464) instead of attention; its head order.
    #[serde(default)]
    pub delta_rule: Option<HeadOrder>,
    /// Which layers see `attention.sliding_window` positions only.
    #[serde(default)]
    pub window: Window,
    /// Layers of a period of `window = "pattern"`, of which one sees everything, and whether that
    /// is the first. The key `attention.sliding_window_pattern` has another period, or a list.
    #[serde(default)]
    pub window_period: usize,
    #[serde(default)]
    pub window_full_first: bool,
    pub activation: Activation,
    #[serde(default)]
    pub residual: Residual,
    /// Embeddings are multiplied by √n_embd, unless `embedding_scale` says another factor.
    #[serde(default)]
    pub scale_embedding: bool,
    /// Logits are multiplied by `logit_scale`, not divided.
    #[serde(default)]
    pub multiply_logits: bool,
    /// A layer with a shared expert adds the mean of the two kinds of experts.
    #[serde(default)]
    pub mean_with_shared: bool,
    /// Logits of an output that is the embedding itself are divided by √n_embd, unless
    /// `logit_scale` says another divisor.
    #[serde(default)]
    pub scale_tied_output: bool,
}

/// The kind of model.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    #[default]
    Decoder,
    /// An encoder reads a whole text; a decoder answers, each of its layers attending to what it
    /// has said and then to what the encoder made of the text (Vaswani et al. 2017). Roles of
    /// layers begin with `enc_` and `dec_`, the engine's numbers of them with the encoder's.
    EncoderDecoder,
}

/// How attention learns where tokens are.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Positions {
    /// Queries and keys are rotated.
    #[default]
    Rope,
    /// A learned number a head is added to each score, by the distance of key and query (Raffel
    /// et al. 2020, section 2.1); scores are not divided by √head_dim. Encoder–decoder only.
    RelativeBias,
    /// Sines and cosines are added to the embeddings, counted from behind the padding token's id
    /// (fairseq). Encoder–decoder only.
    Sinusoidal,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Norm {
    /// x / √(mean x² + ε) · weight
    Rms,
    /// (x − mean) / √(variance + ε) · weight + bias
    Layer,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum RopeRows {
    /// The first `rope.dimension_count`.
    #[default]
    First,
    /// The last.
    Last,
}

/// The sequence mixer.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Mixer {
    /// Grouped-query attention; biases, QK-norm and sinks where the file has their tensors.
    #[default]
    Attention,
    /// Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one compressed row
    /// a position, and the up-projections of keys and values are absorbed by query and output.
    Latent,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Window {
    /// Every layer sees everything.
    #[default]
    None,
    /// Every layer slides.
    All,
    /// Layers 0, 2, 4 … slide, the others see everything.
    Alternate,
    /// By period or list: `Parts::window_period`.
    Pattern,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum RopeLayers {
    #[default]
    All,
    /// Those that slide; the others attend without positions.
    Sliding,
    /// Those that slide, and leading ones with a dense FFN.
    SlidingOrDense,
    /// All but every fourth: 3, 7, 11 …
    ThreeOfFour,
}

/// How a layer's parts are added up.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Residual {
    /// x += attention(norm(x)); x += ffn(norm(x))
    #[default]
    Sequential,
    /// y = x + attention(norm(x)); x = y + dense(norm(y)) + moe(norm'(x)): the experts see what
    /// attention saw.
    ParallelMoe,
    /// x += attention(norm(x)) + ffn(norm(x)), with one norm for both.
    Parallel,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Router {
    /// The key `{arch}.expert_gating_func` overrides it.
    pub score: Score,
    /// Whether the chosen experts' weights are divided by their sum; the key
    /// `{arch}.expert_weights_norm` overrides it.
    pub normalize: bool,
    /// A bias for the choice is part of the architecture, whatever the score.
    #[serde(default)]
    pub choice_bias: bool,
}

fn yes() -> bool {
    true
}
