//! A file's tensors bound to the roles of the layer loop: names resolved and shapes checked once,
//! at load. Matrices stay in the mapped file; vectors (norms, biases) are copied as f32.

mod attention;
mod binder;
mod classifier;
mod compressed;
mod delta;
pub mod encoder;
mod experts;
mod ffn;
mod layer_inputs;
mod matrix;
mod mixer;
mod next_token;
mod ngrams;
mod recurrent;
mod residence;
mod start;
mod streams;
mod values;

use super::descriptor::{self, Descriptor};
use super::hyper::HyperParams;
use super::rope::{RopeFactors, RopeScaling};
use crate::Result;
use crate::experts::LayerExperts;
use crate::gguf::{Gguf, TensorType};
use crate::model::weights::encoder::EncoderWeights;

pub use attention::{
    AttentionWeights, BlockIndexer, Indexer, KeyPool, LatentRow, LatentWeights, Query, Sees,
};
pub(super) use binder::Binder;
pub use classifier::Classifier;
pub use compressed::{Chooser, CompressedWeights, Compressor, RowKeys};
pub use delta::{DeltaWeights, Gates};
use ffn::Experts;
pub use ffn::{Adjugate, DenseBranch, FfnWeights, Gate, Latent, OnlyScales, Router, SharedExpert};
pub use layer_inputs::{InputPart, LayerInputs};
pub use matrix::{HeadMatrices, Linear, Matrix};
pub use mixer::{Mixer, MixerWeights};
pub(crate) use mixer::{any_mixer, map_mixer};
pub use next_token::NextTokenWeights;
pub use ngrams::{NgramConv, NgramWeights};
pub use recurrent::{
    ConvWeights, KdaWeights, LightningWeights, Mamba2Weights, MambaWeights, Projection,
    ShortConvWeights,
};
pub use residence::{Host, Residence};
pub use start::StreamStart;
pub use streams::{Connection, GatedConnection, Streams, SubLayer};
pub use values::ValueExperts;

/// A normalisation of the stream.
#[derive(Clone, Debug)]
pub struct Norm<R: Residence = Host> {
    pub kind: descriptor::Norm,
    pub weight: R::Vector,
    /// Zeros where the kind has none.
    pub bias: R::Vector,
    pub eps: f32,
}

impl Layer {
    /// Whether devices have kernels for all parts of it; the CPU computes a layer without.
    pub fn has_kernels(&self) -> bool {
        let has_ffn = self.ffn.as_ref().is_none_or(FfnWeights::has_kernels);
        let has_streams = self.streams.iter().all(Streams::has_kernels);
        let has_mixer = self.mixer.weights().is_none_or(|mixer| mixer.has_kernels());
        has_mixer && has_ffn && has_streams
    }
}

#[derive(Clone, Debug)]
pub struct Layer {
    pub norm: Norm,
    pub mixer: Mixer,
    /// Normalises the output of attention.
    pub post_norm: Option<Norm>,
    /// `None` in a layer that mixes positions only.
    pub ffn: Option<FfnWeights>,
    /// Adds what it makes of the layer's own input.
    pub input: Option<InputPart>,
    /// Factor on the stream behind the layer.
    pub scale: f32,
    /// How the mixer and the feed-forward part read and feed the residual streams.
    pub streams: [Streams; 2],
    /// Embeddings of the last tokens together, which join the streams before the layer.
    pub ngrams: Option<Box<NgramWeights>>,
}

impl Layer {
    /// The norm of a part's result, and the factor on it, before it joins the stream.
    pub fn post(&self, part: SubLayer) -> (Option<&Norm>, f32) {
        match (part, &self.ffn) {
            (SubLayer::FeedForward, Some(ffn)) => (ffn.post_norm.as_ref(), ffn.scale),
            _ => (self.post_norm.as_ref(), 1.0),
        }
    }
}

impl Layer {
    /// The norm of a part's result, in an architecture all of whose parts have one.
    pub fn norm_behind(&self, part: SubLayer) -> &Norm {
        self.post(part).0.expect("a norm behind each part")
    }
}

pub struct Weights {
    pub token_embd: Matrix,
    /// Present where embeddings are normalised.
    pub start: Option<StreamStart>,
    /// Make inputs of each layer's own.
    pub layer_inputs: Option<LayerInputs>,
    pub output_norm: Norm,
    pub output: Linear,
    pub logit_divisor: f32,
    /// How the output norm reads the residual streams.
    pub last_streams: Streams,
    pub rope_factors: RopeFactors,
    /// Embeddings of the last tokens together: a row a hash. They are read from the file, one by
    /// one, and are never all in memory.
    pub ngram_table: Option<Matrix>,
    pub layers: Vec<Layer>,
    /// Weights besides the layers', in a model with an encoder.
    pub encoder: Option<EncoderWeights>,
    /// Present in a model that ranks.
    pub classifier: Option<Classifier>,
    /// A layer's routed experts are in the first list, its dense branch, as the only expert of its
    /// own, in the second, shared experts in the third.
    pub routed: Vec<Option<LayerExperts>>,
    pub dense: Vec<Option<LayerExperts>>,
    pub shared: Vec<Option<LayerExperts>>,
}

impl Weights {
    /// A layer's experts behind a gate: the routed ones, or the dense one.
    pub fn experts_of(&self, l: usize, gate: &Gate) -> Option<&LayerExperts> {
        match gate {
            Gate::Router(_) => self.routed[l].as_ref(),
            Gate::Dense(_) => self.dense[l].as_ref(),
        }
    }

    /// The experts that make a layer's values, if it has them.
    pub fn values_of(&self, l: usize) -> Option<&ValueExperts> {
        match &self.layers[l].mixer {
            Mixer::Attention(attention) => attention.values.as_deref(),
            _ => None,
        }
    }

    /// The experts of a number in the tiers: [`HyperParams::tier_layer`].
    pub fn in_tier(&self, hyper: &HyperParams, number: usize) -> Option<&LayerExperts> {
        match hyper.layer_in_tier(number) {
            (l, false) => self.routed[l].as_ref(),
            (l, true) => self.values_of(l).map(|values| &values.experts),
        }
    }

    /// The experts of all numbers in the tiers.
    pub fn all_in_tier(&self, hyper: &HyperParams) -> Vec<Option<LayerExperts>> {
        let n = self.routed.len();
        let n = if hyper.routing.values.is_some() { 2 * n } else { n };
        (0..n).map(|number| self.in_tier(hyper, number).copied()).collect()
    }

    pub fn bind(gguf: &Gguf, descriptor: &Descriptor, hyper: &HyperParams) -> Result<Weights> {
        let b = Binder::new(gguf, descriptor, hyper)?;
        let embd = b.require("token_embd", 0)?;
        let n_vocab = b.tensor(embd).dims.get(1).copied().unwrap_or(0) as usize;
        let token_embd = b.matrix(embd, n_vocab, hyper.n_embd)?;
        let output = b.find("output", 0)?.map(|t| b.matrix(t, n_vocab, hyper.n_embd));
        let output = output.transpose()?;
        // llama.cpp before 0.8.0 multiplies by the factor of an output of NVFP4 only.
        let is_scaled =
            |output: &Matrix| [TensorType::NVFP4, TensorType::F8_E4M3].contains(&output.ty);
        let scale =
            if output.as_ref().is_some_and(is_scaled) { b.scales("output", 0, 1)? } else { None };
        let is_tied = output.is_none() && descriptor.parts.scale_tied_output;
        let tied_divisor = if is_tied { (hyper.n_embd as f32).sqrt() } else { 1.0 };
        let output = output.unwrap_or_else(|| token_embd.clone());
        if matches!(hyper.rope.scaling, RopeScaling::Long(_)) {
            b.require("rope_factors_short", 0)?;
            b.require("rope_factors_long", 0)?;
        }
        let n_pairs = hyper.rope.n_rot / 2;
        // One list for layers that turn more pairs or fewer.
        let most_pairs = n_pairs.max(hyper.sliding_rope.n_rot / 2);
        let mut weights = Weights {
            token_embd,
            start: StreamStart::bind(&b)?,
            layer_inputs: b.layer_inputs(n_vocab)?,
            output_norm: b.norm("output_norm", hyper.n_layers - 1)?,
            output: Linear::scaled(
                output,
                b.optional_vector("output_bias", 0, n_vocab)?,
                scale.map_or(1.0, |scale| scale[0]),
            ),
            logit_divisor: hyper.logit_divisor.unwrap_or(tied_divisor),
            last_streams: b.last_streams()?,
            rope_factors: RopeFactors {
                all: b.optional_vector("rope_freqs", 0, most_pairs)?,
                short: b.optional_vector("rope_factors_short", 0, n_pairs)?,
                long: b.optional_vector("rope_factors_long", 0, n_pairs)?,
            },
            ngram_table: b.ngram_table()?,
            layers: Vec::new(),
            encoder: EncoderWeights::bind(&b)?,
            classifier: Classifier::bind(&b)?,
            routed: Vec::new(),
            dense: Vec::new(),
            shared: Vec::new(),
        };
        for l in 0..hyper.n_layers {
            let (ffn, experts) = match hyper.has_ffn(l) {
                true => b.ffn(l).map(|(ffn, experts)| (Some(ffn), experts))?,
                false => (None, Experts::default()),
            };
            weights.layers.push(Layer {
                norm: b.norm("attn_norm", l)?,
                mixer: b.mixer(l)?,
                post_norm: b.post_norm("attn_post_norm", l)?,
                ffn,
                input: b.input_part(l)?,
                scale: b.optional_vector("layer_scale", l, 1)?.map_or(1.0, |scale| scale[0]),
                streams: b.streams(l)?,
                ngrams: b.ngrams(l)?,
            });
            weights.routed.push(experts.routed);
            weights.dense.push(experts.dense);
            weights.shared.push(experts.shared);
        }
        b.check_layers()?;
        b.warn_of_unused();
        Ok(weights)
    }

    /// Whether tokens' ids say where some routers send them.
    pub fn routes_by_id(&self) -> bool {
        let mut ffns = self.layers.iter().filter_map(|layer| layer.ffn.as_ref());
        ffns.any(|ffn| matches!(&ffn.gate, Gate::Router(router) if router.fixed.is_some()))
    }

    /// The tensor that is the table of n-grams.
    pub fn ngram_tensor(&self) -> Option<usize> {
        self.ngram_table.as_ref().and_then(Matrix::place).map(|(tensor, _)| tensor)
    }

    /// Bytes of all routed experts, and of everything else in the file's tensors.
    pub fn expert_and_dense_bytes(&self, gguf: &Gguf) -> (u64, u64) {
        let of_layer = |l: &LayerExperts| l.n_experts as u64 * l.expert_bytes() as u64;
        let values = (0..self.layers.len()).filter_map(|l| self.values_of(l)).map(|v| &v.experts);
        let all = || self.routed.iter().flatten().chain(values.clone());
        let experts = all().map(of_layer).sum();
        let routed = all().flat_map(LayerExperts::tensors);
        let routed: u64 = routed.map(|tensor| gguf.tensors()[tensor].n_bytes).sum();
        let all: u64 = gguf.tensors().iter().map(|t| t.n_bytes).sum();
        (experts, all - routed)
    }
}
