//! The parts that a model can be made of. A descriptor names them in `[parts]` and `[router]`;
//! what differs from file to file of one architecture is a GGUF key and read by `hyper`.

use crate::backend::ops::{Activation, RopePairing, Score};
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
    /// In files with `rope.dimension_sections` the halves of a head do.
    #[serde(default)]
    pub halves_with_sections: bool,
    /// Which elements of a head rotate, if not all of them do.
    #[serde(default)]
    pub rope_rows: RopeRows,
    /// The range of pairs over which YaRN blends is rounded to whole pairs.
    #[serde(default = "yes")]
    pub yarn_rounds: bool,
    /// YaRN's `rope.scaling.yarn_log_multiplier` is no factor of latent attention's scores.
    #[serde(default)]
    pub yarn_leaves_scores: bool,
    /// That range is from 32 turns to 1, whatever `rope.scaling.yarn_beta_fast` and `…_slow` say.
    #[serde(default)]
    pub yarn_betas_are_fixed: bool,
    /// Which layers rotate queries and keys.
    #[serde(default)]
    pub rope_layers: RopeLayers,
    /// The scaling of RoPE is for layers that see everything: sliding layers have none.
    #[serde(default)]
    pub sliding_rope_is_unscaled: bool,
    /// Sliding layers turn as the others, whatever `rope.freq_base_swa` says.
    #[serde(default)]
    pub sliding_rope_is_models: bool,
    /// QK-norm comes after RoPE.
    #[serde(default)]
    pub norm_after_rope: bool,
    /// QK-norm is over each head, with weights of its own.
    #[serde(default)]
    pub qk_norm_by_head: bool,
    #[serde(default)]
    pub mixer: Mixer,
    /// Logarithms of decays are above `kda.gate_lower_bound`.
    #[serde(default)]
    pub bounded_decays: bool,
    /// The factors of such decays are stored negative, as those of others are.
    #[serde(default)]
    pub decay_factors_are_negative: bool,
    /// Latent attention sees the positions that an indexer chooses, whose heads rotate so.
    #[serde(default)]
    pub indexer: Option<RopePairing>,
    /// Which elements of an indexer's heads rotate.
    #[serde(default)]
    pub indexer_rope_rows: RopeRows,
    /// An indexer's queries are made of the layer's input by a LayerNorm, which as that of its keys
    /// has the ε `attention.layer_norm_epsilon`.
    #[serde(default)]
    pub indexer_reads_input: bool,
    /// The norm of an indexer's keys has the model's ε.
    #[serde(default)]
    pub indexer_eps_is_models: bool,
    /// A key of it is of `attention.indexer.kpool` positions, which are chosen together.
    #[serde(default)]
    pub indexer_pools: bool,
    /// Attention sees the blocks of `attention.compress_ratios` positions that an indexer chooses
    /// for all heads together, by the mean of each block's keys.
    #[serde(default)]
    pub indexer_means: bool,
    /// Layers may see what the indexer before them has chosen: `attention.indexer.types`.
    #[serde(default)]
    pub shares_indexers: bool,
    /// Compressed rows are of `attention.kv_source_layers`, and `attention.indexer.source_layers`
    /// choose among them by keys that are made of these rows. The others see those of the last
    /// such layer.
    #[serde(default)]
    pub shares_compressed: bool,
    /// q's matrix makes a gate as well, [q, gate] a head: attention's output is multiplied by the
    /// gate's sigmoid.
    #[serde(default)]
    pub gated_attention: bool,
    /// A layer behind the last that has the tensors for it predicts the token after the next.
    #[serde(default)]
    pub predicts_next: bool,
    /// Some layers have this instead of attention: those without heads of keys, where the file
    /// lists heads, or those of `attention.recurrent_layers`.
    #[serde(default)]
    pub recurrence: Option<RecurrenceKind>,
    /// A delta rule's output is multiplied by its gate's sigmoid; that of others is by its SiLU.
    #[serde(default)]
    pub sigmoid_delta_gate: bool,
    /// Rows of a table that hashes of the last tokens name join the streams before the layers of
    /// `ple.layers`, if the file has any.
    #[serde(default)]
    pub ngrams: Ngrams,
    /// The function of the gate that attention's output is multiplied by, if it has a matrix.
    #[serde(default)]
    pub value_gate: ValueGate,
    /// Layers that see everything rotate half of `rope.dimension_count`, those that slide
    /// `rope.dimension_count_swa`.
    #[serde(default)]
    pub half_of_full_rope: bool,
    /// Which layers see `attention.sliding_window` positions only.
    #[serde(default)]
    pub window: Window,
    /// Layers of a period of `window = "pattern"`, of which one sees everything, and whether that
    /// is the first. The key `attention.sliding_window_pattern` has another period, or a list.
    #[serde(default)]
    pub window_period: usize,
    #[serde(default)]
    pub window_full_first: bool,
    /// Sliding layers see their own chunk of `attention.sliding_window` positions, or of this many
    /// if the file does not say; 0 where they slide.
    #[serde(default)]
    pub chunk: usize,
    /// A file without `attention.sliding_window` has no layers that slide, and all rotate.
    #[serde(default)]
    pub window_is_optional: bool,
    /// Factors on queries that grow with the position.
    #[serde(default)]
    pub tempering: Tempering,
    /// Queries and keys that rotate are divided by the root of their mean square, unless the model
    /// has this many experts.
    #[serde(default)]
    pub plain_qk_norm_unless_experts: Option<usize>,
    /// Every token sees the whole text: the model fills in masked tokens (diffusion), or embeds.
    #[serde(default)]
    pub sees_all: bool,
    /// The model embeds texts: it has no output matrix.
    #[serde(default)]
    pub embeds: bool,
    /// Embeddings are divided by the root of their mean square.
    #[serde(default)]
    pub normed_embeddings: bool,
    /// Heads' results are divided by the root of their mean square.
    #[serde(default)]
    pub normed_heads: bool,
    /// Scores are not divided by √head_dim.
    #[serde(default)]
    pub unscaled_scores: bool,
    /// Layers that slide have heads of `attention.key_length_swa` elements.
    #[serde(default)]
    pub sliding_heads_differ: bool,
    /// Values are divided by the root of their mean square.
    #[serde(default)]
    pub normed_values: bool,
    /// Which layers see keys and values of layers before them.
    #[serde(default)]
    pub shares_keys: KeySharing,
    /// Layers have inputs of their own, of `embedding_length_per_layer_input` elements.
    #[serde(default)]
    pub layer_inputs: bool,
    /// The key of the soft cap of logits is the model's, those of others are not.
    #[serde(default)]
    pub caps_logits: bool,
    /// The keys of soft caps are the model's: llama.cpp saves them for every model.
    #[serde(default)]
    pub soft_caps: bool,
    /// Shared experts have the limit of routed ones, unless the file says another.
    #[serde(default)]
    pub shared_limit_is_routed: bool,
    /// The router's weights multiply the experts' input, not their output.
    #[serde(default)]
    pub weights_before_experts: bool,
    /// A layer mixes positions or has a feed-forward part, not both; those with a part have a
    /// width in `feed_forward_length`.
    #[serde(default)]
    pub one_part_a_layer: bool,
    pub activation: Activation,
    #[serde(default)]
    pub residual: Residual,
    /// Embeddings are multiplied by √n_embd, unless `embedding_scale` says another factor.
    #[serde(default)]
    pub scale_embedding: bool,
    /// Logits are multiplied by `logit_scale`, not divided.
    #[serde(default)]
    pub multiply_logits: bool,
    /// The factor on the sum of routed and shared experts.
    #[serde(default)]
    pub shared_sum: SharedSum,
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
    /// Scores fall with the distance, by a slope a head (arXiv 2108.12409).
    Alibi,
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
    /// `Rms` of each of `attention.group_norm_groups` parts of x.
    GroupedRms,
    /// x · weight / √(mean (x · weight)² + ε)
    ScaledRms,
    /// (x − mean) / √(variance + ε) · weight + bias
    Layer,
    /// x: parts read several streams, which are normalised before they join.
    None,
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
    /// Attention to a window and to compressed rows of what is before it:
    /// `attention.compress_ratios` (DeepSeek-V4).
    Compressed,
    /// Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one compressed row
    /// a position, and the up-projections of keys and values are absorbed by query and output.
    Latent,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum RecurrenceKind {
    /// A gated delta rule (arXiv 2412.06464). Value heads of a key head are adjacent.
    DeltaGrouped,
    /// A gated delta rule, where value head h has the key head h mod the number of those.
    DeltaTiled,
    /// A gated delta rule with a decay for each element of a key (arXiv 2510.26692).
    Kda,
    /// A gated convolution of a few positions, without a state (LFM2).
    ShortConv,
    /// A selective scan (arXiv 2312.00752), whose steps, inputs and outputs are normalised.
    Mamba,
    /// A scan with one decay a head (arXiv 2405.21060).
    Mamba2,
    /// Linear attention with a fixed decay a head and layer (arXiv 2501.08313).
    Lightning,
}

/// How rows of a table of n-grams join the streams.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Ngrams {
    /// There are none.
    #[default]
    None,
    /// In one layer, by a gate and a convolution; texts end at `ple.eos_token_id` (Qwen3.8).
    Convolved,
    /// In layers with hashes of their own, by a gate; hashes are of the numbers that
    /// `engram.token_map` gives to tokens (DeepSeek-V4.1).
    Gated,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Window {
    /// Every layer sees everything.
    #[default]
    None,
    /// Every layer slides.
    All,
    /// By period or list: `Parts::window_period`.
    Pattern,
    /// Layers without compressed rows, which see the window alone.
    Uncompressed,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum RopeLayers {
    #[default]
    All,
    /// Layers that slide; the others attend without positions.
    Sliding,
    /// Layers that slide, and leading ones with a dense FFN.
    SlidingOrDense,
    /// All but every fourth: 3, 7, 11 …
    ThreeOfFour,
    None,
    /// All, unless `rope.scaling.finetuned` is false.
    IfFinetuned,
    /// The layers of `attention.rope_pattern`; all in a file without the list. Rows of latent
    /// attention have no rotated part in the others.
    Listed,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum KeySharing {
    #[default]
    None,
    /// The last `attention.shared_kv_layers`.
    Last,
    /// By `attention.kv_source_map`, which has the number of a layer for each.
    Listed,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum ValueGate {
    #[default]
    Sigmoid,
    /// ln(1 + e^x)
    Softplus,
    /// log₂(1 + 2^x)
    BinarySoftplus,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub enum Tempering {
    /// By the keys `attention.temperature_scale` and `attention.temperature_length`: 1 + scale ·
    /// ln(1 + ⌊position / length⌋). None without them.
    #[default]
    ByKeys,
    /// In layers that do not rotate, 1 + scale · ln(1 + ⌊(position + first) / length⌋).
    Unrotated { scale: f32, length: usize, first: usize },
    /// log(position) / log(length) beyond `attention.temperature_length`, if there is one.
    Logarithm,
    /// In layers that do not rotate, (1 + (position + 1) / length)^scale, which the keys
    /// `attention.temperature_scale` and `attention.temperature_length` override.
    Power { scale: f32, length: usize },
    /// A head's own: scale · ln(position + 1) + bias, by tensors (SSMax).
    Heads,
}

/// The sum of a layer's two kinds of experts.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum SharedSum {
    #[default]
    Sum,
    /// Half of the sum.
    Mean,
    /// The sum divided by √2.
    OverRoot,
}

impl SharedSum {
    pub fn factor(self) -> f32 {
        match self {
            SharedSum::Sum => 1.0,
            SharedSum::Mean => 0.5,
            SharedSum::OverRoot => std::f32::consts::FRAC_1_SQRT_2,
        }
    }
}

/// The input of a router.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum RouterInput {
    /// The normalised input of the experts.
    #[default]
    Ffn,
    /// The stream before attention, as it is.
    Stream,
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
    /// x += attention(norm(x)); x += norm(norm(dense(norm(x))) + norm(moe(norm(x)))), five norms
    /// for the five, and the router with a norm of its own.
    NormedBranches,
    /// h = norm(x), x = residual_scale · h + attention(h); the same with the experts.
    Normed,
    /// x = norm(x + attention(x)); x = norm(x + ffn(x))
    Post,
    /// Several streams, which each part reads and feeds by weights that they make themselves.
    Hyper,
    /// Streams like `Hyper`'s, which each part mixes, too.
    HyperMixed,
    /// Streams like `HyperMixed`'s; the weights that a part makes for reading are the next part's.
    /// The first part reads the first stream, the output norm what the last part's weights say.
    HyperLagging,
    /// Several streams: each part reads the mean of their norms, whose elements have gates that all
    /// streams make through `hyper_connection.low_rank` elements, and adds to each by a weight.
    HyperGated,
    /// x = √((i − 1) / i) · x + part(norm(x)) / √i for the i-th part, the embedding being the
    /// first: the stream stays as long as one part.
    Averaged,
    /// x = a · x + b · norm(part(norm(x))), by vectors of each part's own. The norms behind parts
    /// have the ε of `post_norm_epsilon`; attention's has no weights, and the weights of the
    /// experts' come before it.
    Weighed,
    /// Each part reads a mean of the stream and of what it was at every `attn_res.block_size`th
    /// layer, where it begins again.
    Kept,
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
    /// Published models lack the bias, or some do.
    #[serde(default)]
    pub bias_is_optional: bool,
    /// The bias is added to the logits, not to the probabilities.
    #[serde(default)]
    pub bias_on_logits: bool,
    /// `normalize` holds whatever the key `expert_weights_norm` says: the architecture has none.
    #[serde(default)]
    pub normalize_has_no_key: bool,
    #[serde(default)]
    pub input: RouterInput,
}

fn yes() -> bool {
    true
}
