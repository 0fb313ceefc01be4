//! The layers of a model on the device: the weights that `model::weights` binds, uploaded.

use crate::backend::gpu::conv::Units;
use crate::backend::gpu::delta::NormGate;
use crate::backend::ops::{DeltaShape, DistanceBias, ExpertBiases, ExpertForm, ExpertShape};
use crate::experts::Resident;
use crate::experts::vram::{GranuleLayout, GranulePart};
use crate::forward::encoder_decoder::EncoderWeights;
use crate::forward::gpu::compressed_layers::GpuCompressed;
use crate::forward::gpu::index_layers::{GpuBlockIndexer, GpuSees};
use crate::forward::gpu::recurrent_layers::{GpuLightning, GpuMamba, GpuMamba2, GpuShortConv};
use crate::forward::gpu::weights::{GpuConv, GpuHeads, GpuLinear, GpuMatrix, GpuVector, Packer};
use crate::model::descriptor::{self, ValueGate};
use crate::model::heads::LatentShape;
use crate::model::hyper::HyperParams;
use crate::model::streams::StreamParams;
use crate::model::weights::{
    AttentionWeights, DeltaWeights, FfnWeights, Gate, Gates, KdaWeights, LatentWeights,
    LightningWeights, Linear, Mamba2Weights, MambaWeights, Mixer, NgramWeights, Norm, OnlyScales,
    Projection, Query, ShortConvWeights, Streams,
};
use std::ops::Range;

pub struct GpuNorm {
    pub kind: descriptor::Norm,
    pub weight: GpuVector,
    pub bias: GpuVector,
}

pub struct GpuAttention {
    pub n_head: usize,
    pub n_head_kv: usize,
    pub head_dim: usize,
    pub head_dim_v: usize,
    /// Queries and their gates, if each head has [q, gate].
    pub gated: Option<GpuLinear>,
    /// Queries, if they have no gates there, and the layer's own keys and values: runs of rows that
    /// are one matrix each.
    pub products: Vec<GpuLinear>,
    /// Numbers of a token's products.
    pub width: usize,
    /// The columns of the products at which keys and values begin.
    pub k_first: usize,
    pub v_first: usize,
    /// The layer whose keys and values it sees, if they are not its own.
    pub shared_with: Option<usize>,
    pub gate: Option<(GpuLinear, ValueGate)>,
    pub rotates: bool,
    pub slides: bool,
    pub tempers: bool,
    pub q_norm: Option<GpuVector>,
    pub k_norm: Option<GpuVector>,
    pub v_norm: Option<GpuVector>,
    pub sinks: Option<GpuVector>,
    /// Factors of heads on the distance of a key from the query, which scores are added.
    pub slopes: Option<GpuVector>,
    pub output: GpuLinear,
    pub window: Option<usize>,
    pub chunk: Option<usize>,
    /// `None` in contexts where no indexer chooses.
    pub index: Option<Box<GpuBlockIndexer>>,
}

pub enum GpuQuery {
    Direct(GpuLinear),
    Compressed { a: GpuLinear, norm: GpuVector, b: GpuLinear },
}

/// See `LatentWeights`.
pub struct GpuLatent {
    pub shape: LatentShape,
    pub scale: f32,
    pub query: GpuQuery,
    pub kv_a: GpuLinear,
    pub kv_a_norm: GpuVector,
    pub k_norm: Option<GpuVector>,
    pub k_b: GpuHeads,
    pub v_b: GpuHeads,
    pub gate: Option<GpuLinear>,
    pub rotates: bool,
    pub slides: bool,
    pub sinks: Option<GpuVector>,
    pub window: Option<usize>,
    pub sees: GpuSees,
    pub output: GpuLinear,
}

pub enum GpuGates {
    Mixed(GpuLinear),
    Apart { beta: GpuLinear, alpha: GpuLinear },
}

pub struct GpuDelta {
    pub shape: DeltaShape,
    pub qkv: GpuLinear,
    pub z: GpuLinear,
    pub gates: GpuGates,
    pub conv: GpuConv,
    pub a: GpuVector,
    pub dt: GpuVector,
    pub norm: GpuVector,
    pub norm_gate: NormGate,
    pub output: GpuLinear,
}

/// See `Projection`.
pub struct GpuProjection {
    pub first: GpuLinear,
    pub second: Option<GpuLinear>,
}

/// See `KdaWeights`.
pub struct GpuKda {
    pub shape: DeltaShape,
    pub qkv: [GpuLinear; 3],
    pub conv: GpuConv,
    pub decay: GpuProjection,
    pub beta: GpuLinear,
    pub a: GpuVector,
    pub dt: GpuVector,
    pub bound: Option<f32>,
    pub gate: GpuProjection,
    pub norm: GpuVector,
    pub output: GpuLinear,
}

pub enum GpuMixer {
    None,
    Attention(GpuAttention),
    Latent(GpuLatent),
    Delta(GpuDelta),
    Kda(Box<GpuKda>),
    ShortConv(GpuShortConv),
    Mamba(Box<GpuMamba>),
    Mamba2(GpuMamba2),
    Lightning(GpuLightning),
    Compressed(Box<GpuCompressed>),
}

impl GpuMixer {
    /// The place of the cache with its state of a text, if it is layer `l` and has one.
    fn state_slot(&self, hyper: &HyperParams, l: usize) -> Option<usize> {
        let has_second = match self {
            GpuMixer::Attention(w) => w.index.as_ref().is_some_and(|index| index.means),
            GpuMixer::Compressed(w) => !w.compressors.is_empty(),
            _ => return self.has_state().then_some(l),
        };
        has_second.then(|| hyper.second_slot(l))
    }

    /// The projection that comes last.
    pub fn output(&self) -> Option<&GpuLinear> {
        match self {
            // Whose last projection comes in two parts.
            GpuMixer::None | GpuMixer::Compressed(_) => None,
            GpuMixer::Attention(w) => Some(&w.output),
            GpuMixer::Latent(w) => Some(&w.output),
            GpuMixer::Delta(w) => Some(&w.output),
            GpuMixer::Kda(w) => Some(&w.output),
            GpuMixer::ShortConv(w) => Some(&w.output),
            GpuMixer::Mamba(w) => Some(&w.output),
            GpuMixer::Mamba2(w) => Some(&w.output),
            GpuMixer::Lightning(w) => Some(&w.output),
        }
    }

    /// Whether it keeps a state of a text in its layer's own place.
    fn has_state(&self) -> bool {
        match self {
            GpuMixer::None | GpuMixer::Attention(_) | GpuMixer::Compressed(_) => false,
            GpuMixer::Latent(w) => {
                matches!(&w.sees, GpuSees::Chosen(indexer) if indexer.pool.is_some())
            }
            GpuMixer::Delta(_) | GpuMixer::Kda(_) | GpuMixer::ShortConv(_) => true,
            GpuMixer::Mamba(_) | GpuMixer::Mamba2(_) | GpuMixer::Lightning(_) => true,
        }
    }
}

pub struct GpuRouter {
    pub logits: GpuLinear,
    pub choice_bias: Option<GpuVector>,
    pub norm: Option<GpuNorm>,
    /// u32 [vocabulary, k]
    pub fixed: Option<GpuVector>,
    pub scales: Option<GpuVector>,
}

/// f32 [experts, rows of the matrix]
pub struct GpuBiases {
    pub gate: Option<GpuVector>,
    pub up: GpuVector,
    pub down: GpuVector,
}

/// See `ExpertScales`.
pub struct GpuScales {
    pub gate: Option<GpuVector>,
    pub up: GpuVector,
}

/// Biases and factors of a layer's experts, beside their matrices.
#[derive(Default)]
pub struct GpuForm {
    pub biases: Option<GpuBiases>,
    pub scales: Option<GpuScales>,
}

/// An expert that every token goes to. Its granules are always on the device.
pub struct GpuOnly {
    pub shape: ExpertShape,
    pub form: GpuForm,
    /// Factor on its result.
    pub weight: f32,
    pub layout: GranuleLayout,
    pub granules: Vec<Range<usize>>,
    /// The range of `DeviceModel::tables` with their addresses, u64 [tokens, granules].
    pub table: Range<usize>,
}

/// See `Adjugate`. Its granules are always on the device.
pub struct GpuAdjugate {
    pub layout: GranuleLayout,
    /// All experts' granules, one expert after the other.
    pub granules: Vec<Range<usize>>,
    /// The range of `DeviceModel::tables` with their addresses, u64 [experts, granules].
    pub table: Range<usize>,
}

pub struct GpuShared {
    pub expert: GpuOnly,
    pub gate: Option<GpuMatrix>,
}

pub struct GpuFfn {
    pub norm: GpuNorm,
    pub router: Option<GpuRouter>,
    /// The only expert of a dense layer.
    pub dense: Option<GpuOnly>,
    /// Biases and factors of the routed experts.
    pub form: GpuForm,
    pub latent: Option<GpuLatentExperts>,
    pub adjugate: Option<GpuAdjugate>,
    pub shared: Option<GpuShared>,
    pub branch: Option<GpuBranch>,
    pub sees_before: bool,
    pub post_norm: Option<GpuNorm>,
    pub experts_norm: Option<GpuNorm>,
    pub scale: f32,
    pub routes_stream: bool,
    pub weights_input: bool,
}

/// See `Latent`.
pub struct GpuLatentExperts {
    pub down: GpuLinear,
    pub norm: Option<GpuVector>,
    pub up: GpuLinear,
}

/// A dense branch beside the routed experts.
pub struct GpuBranch {
    pub norm: GpuNorm,
    pub expert: GpuOnly,
    pub post_norm: Option<GpuNorm>,
}

/// See `InputPart`.
pub struct GpuInput {
    pub gate: GpuLinear,
    pub output: GpuLinear,
    pub norm: GpuNorm,
}

/// Attention to the source text.
pub struct GpuCross {
    pub norm: GpuNorm,
    pub q: GpuLinear,
    pub k: GpuLinear,
    pub v: GpuLinear,
    pub output: GpuLinear,
}

pub struct GpuLayer {
    pub norm: GpuNorm,
    pub mixer: GpuMixer,
    pub post_norm: Option<GpuNorm>,
    /// For layers of a decoder with an encoder.
    pub cross: Option<GpuCross>,
    /// `None` in a layer that mixes positions only.
    pub ffn: Option<GpuFfn>,
    pub input: Option<GpuInput>,
    pub scale: f32,
    /// See `Layer`.
    pub streams: [GpuStreams; 2],
    pub ngrams: Option<GpuNgrams>,
}

/// See `Streams`.
pub enum GpuStreams {
    One,
    Hyper(Box<GpuConnection>),
    Gated(Box<GpuGatedConnection>),
    Mean,
    Kept(GpuVector),
}

/// See `Connection`.
pub struct GpuConnection {
    pub mixes: GpuLinear,
    pub scales: GpuVector,
    pub bases: GpuVector,
    pub params: StreamParams,
}

/// See `GatedConnection`.
pub struct GpuGatedConnection {
    pub n: usize,
    pub norm: GpuVector,
    pub down: GpuLinear,
    pub up: GpuLinear,
    pub inject: Option<GpuLinear>,
}

/// See `NgramWeights`.
pub struct GpuNgrams {
    /// Streams of a token.
    pub n: usize,
    pub key: GpuLinear,
    pub value: GpuLinear,
    pub key_norm: GpuVector,
    pub query_norm: GpuVector,
    pub conv_norm: GpuVector,
    pub conv: GpuConv,
    /// Values that the convolution remembers, and ids behind them.
    pub n_past: usize,
    pub n_before: usize,
}

/// A `DistanceBias`, uploaded.
pub struct GpuBias {
    pub reach: usize,
    pub values: GpuVector,
}

/// The parts of a model with an encoder besides its layers.
pub struct GpuEncoder {
    pub output_norm: GpuNorm,
    pub encoder_bias: Option<GpuBias>,
    pub decoder_bias: Option<GpuBias>,
}

impl GpuLayer {
    /// Places of the cache with states of layer `l`, in the order in which they are computed.
    pub fn state_slots(&self, hyper: &HyperParams, l: usize) -> impl Iterator<Item = usize> {
        let of_ngrams = self.ngrams.is_some().then(|| hyper.second_slot(l));
        of_ngrams.into_iter().chain(self.mixer.state_slot(hyper, l))
    }

    /// The layer's experts that every token goes to.
    pub fn only_experts(&self) -> impl Iterator<Item = &GpuOnly> {
        self.ffn.iter().flat_map(|ffn| {
            let branch = ffn.branch.iter().map(|branch| &branch.expert);
            ffn.dense.iter().chain(ffn.shared.iter().map(|shared| &shared.expert)).chain(branch)
        })
    }
}

impl<'a> Packer<'a> {
    pub fn norm(&mut self, norm: &'a Norm) -> GpuNorm {
        let (weight, bias) = (self.vector(&norm.weight), self.vector(&norm.bias));
        GpuNorm { kind: norm.kind, weight, bias }
    }

    pub fn layer(&mut self, l: usize) -> GpuLayer {
        let layer = &self.model.weights.layers[l];
        let mixer = match &layer.mixer {
            Mixer::Attention(w) => GpuMixer::Attention(self.attention(w)),
            Mixer::Latent(w) => GpuMixer::Latent(self.latent(w)),
            Mixer::None => GpuMixer::None,
            Mixer::Delta(w) => GpuMixer::Delta(self.delta(w)),
            Mixer::Kda(w) => GpuMixer::Kda(Box::new(self.kda(w))),
            Mixer::ShortConv(w) => GpuMixer::ShortConv(self.short_conv(w)),
            Mixer::Mamba(w) => GpuMixer::Mamba(Box::new(self.mamba(w))),
            Mixer::Mamba2(w) => GpuMixer::Mamba2(self.mamba2(w)),
            Mixer::Lightning(w) => GpuMixer::Lightning(self.lightning(w)),
            Mixer::Compressed(w) => GpuMixer::Compressed(Box::new(self.compressed(w))),
        };
        let cross = self.model.cross_attention_of(l).map(|cross| GpuCross {
            norm: self.norm(&cross.norm),
            q: self.linear(&cross.attention.q),
            k: self.linear(&cross.attention.k),
            v: self.linear(&cross.attention.v),
            output: self.linear(&cross.attention.output),
        });
        GpuLayer {
            norm: self.norm(&layer.norm),
            mixer,
            post_norm: layer.post_norm.as_ref().map(|norm| self.norm(norm)),
            cross,
            ffn: layer.ffn.as_ref().map(|ffn| self.ffn(l, ffn)),
            input: layer.input.as_ref().map(|input| GpuInput {
                gate: self.linear(&input.gate),
                output: self.linear(&input.output),
                norm: self.norm(&input.norm),
            }),
            scale: layer.scale,
            streams: layer.streams.each_ref().map(|streams| self.streams(streams)),
            ngrams: layer.ngrams.as_ref().map(|ngrams| self.ngrams(ngrams)),
        }
    }

    pub fn encoder(&mut self, w: &'a EncoderWeights) -> GpuEncoder {
        let mut bias = |bias: &'a Option<DistanceBias>| {
            let bias = bias.as_ref()?;
            Some(GpuBias { reach: bias.reach(), values: self.vector(bias.values()) })
        };
        let (encoder_bias, decoder_bias) = (bias(&w.encoder_bias), bias(&w.decoder_bias));
        GpuEncoder { output_norm: self.norm(&w.output_norm), encoder_bias, decoder_bias }
    }

    pub fn streams(&mut self, streams: &'a Streams) -> GpuStreams {
        match streams {
            Streams::One => GpuStreams::One,
            Streams::Mean => GpuStreams::Mean,
            Streams::Kept(score) => GpuStreams::Kept(self.vector(score)),
            Streams::Hyper(w) => GpuStreams::Hyper(Box::new(GpuConnection {
                mixes: self.linear(&w.mixes),
                scales: self.vector(&w.scales),
                bases: self.vector(&w.bases),
                params: w.params,
            })),
            Streams::Gated(w) => GpuStreams::Gated(Box::new(GpuGatedConnection {
                n: w.n,
                norm: self.vector(&w.norm),
                down: self.linear(&w.down),
                up: self.linear(&w.up),
                inject: w.inject.as_ref().map(|inject| self.linear(inject)),
            })),
        }
    }

    fn ngrams(&mut self, w: &'a NgramWeights) -> GpuNgrams {
        GpuNgrams {
            n: w.key.weight.rows / w.value.weight.rows,
            key: self.linear(&w.key),
            value: self.linear(&w.value),
            key_norm: self.vector(&w.key_norm),
            query_norm: self.vector(&w.query_norm),
            conv_norm: self.vector(&w.conv_norm),
            conv: self.conv(w.conv.form(), None),
            n_past: w.params.conv().n_past(),
            n_before: w.params.n_before(),
        }
    }

    fn optional(&mut self, values: &'a Option<Vec<f32>>) -> Option<GpuVector> {
        values.as_ref().map(|values| self.vector(values))
    }

    fn attention(&mut self, w: &'a AttentionWeights) -> GpuAttention {
        let is_own = w.shared_with.is_none();
        // Values that are the keys are read there, unless all heads together are normalised there.
        let is_k = w.v.weight.is(&w.k.weight)
            && w.k_norm.as_ref().is_none_or(|norm| norm.len() == w.head_dim);
        let q = (!w.gated).then_some(&w.q);
        let own = [(is_own, &w.k), (is_own && !is_k, &w.v)];
        let own = own.into_iter().filter_map(|(is_there, linear)| is_there.then_some(linear));
        let linears: Vec<&Linear> = q.into_iter().chain(own).collect();
        let k_first = q.map_or(0, |q| q.weight.rows);
        GpuAttention {
            gated: w.gated.then(|| self.linear(&w.q)),
            width: linears.iter().map(|linear| linear.weight.rows).sum(),
            products: self.stack(&linears),
            k_first,
            v_first: if is_k { k_first } else { k_first + w.k.weight.rows },
            n_head: w.n_head,
            n_head_kv: w.n_head_kv,
            head_dim: w.head_dim,
            head_dim_v: w.head_dim_v,
            shared_with: w.shared_with,
            gate: w.gate.as_ref().map(|(gate, function)| (self.linear(gate), *function)),
            rotates: w.rotates,
            slides: w.slides,
            tempers: w.tempers,
            q_norm: self.optional(&w.q_norm),
            k_norm: self.optional(&w.k_norm),
            v_norm: self.optional(&w.v_norm),
            sinks: self.optional(&w.sinks),
            slopes: w.bias.as_ref().map(|bias| self.vector(bias.slopes())),
            output: self.linear(&w.output),
            window: w.window,
            chunk: w.chunk,
            index: w.index.as_ref().and_then(|index| self.block_indexer(index)),
        }
    }

    fn latent(&mut self, w: &'a LatentWeights) -> GpuLatent {
        let query = match &w.query {
            Query::Direct(q) => GpuQuery::Direct(self.linear(q)),
            Query::Compressed { a, norm, b } => GpuQuery::Compressed {
                a: self.linear(a),
                norm: self.vector(norm),
                b: self.linear(b),
            },
        };
        GpuLatent {
            shape: w.shape,
            scale: w.scale,
            query,
            kv_a: self.linear(&w.kv_a),
            kv_a_norm: self.vector(&w.kv_a_norm),
            k_norm: self.optional(&w.k_norm),
            k_b: self.heads(&w.k_b),
            v_b: self.heads(&w.v_b),
            gate: w.gate.as_ref().map(|gate| self.linear(gate)),
            rotates: w.rotates,
            slides: w.slides,
            sinks: self.optional(&w.sinks),
            window: w.window,
            sees: self.sees(&w.sees),
            output: self.linear(&w.output),
        }
    }

    fn delta(&mut self, w: &'a DeltaWeights) -> GpuDelta {
        let gates = match &w.gates {
            Gates::Mixed(both) => GpuGates::Mixed(self.linear(both)),
            Gates::Apart { beta, alpha } => {
                GpuGates::Apart { beta: self.linear(beta), alpha: self.linear(alpha) }
            }
        };
        GpuDelta {
            shape: w.shape,
            qkv: self.linear(&w.qkv),
            z: self.linear(&w.z),
            gates,
            conv: self.conv(w.conv_form(), Some(Units::of(w.shape))),
            a: self.vector(&w.a),
            dt: self.vector(&w.dt),
            norm: self.vector(&w.norm),
            norm_gate: if w.sigmoid_gate { NormGate::Sigmoid } else { NormGate::Silu },
            output: self.linear(&w.output),
        }
    }

    fn kda(&mut self, w: &'a KdaWeights) -> GpuKda {
        let mut projection = |part: &'a Projection| GpuProjection {
            first: self.linear(&part.first),
            second: part.second.as_ref().map(|second| self.linear(second)),
        };
        let (decay, gate) = (projection(&w.decay), projection(&w.gate));
        GpuKda {
            shape: w.shape,
            qkv: w.qkv.each_ref().map(|linear| self.linear(linear)),
            conv: self.conv(w.conv.form(), Some(Units::of(w.shape))),
            decay,
            beta: self.linear(&w.beta),
            a: self.vector(&w.a),
            dt: self.vector(&w.dt),
            bound: w.bound,
            gate,
            norm: self.vector(&w.norm),
            output: self.linear(&w.output),
        }
    }

    fn short_conv(&mut self, w: &'a ShortConvWeights) -> GpuShortConv {
        GpuShortConv {
            input: self.linear(&w.input),
            conv: self.conv(w.conv.form(), None),
            output: self.linear(&w.output),
        }
    }

    fn mamba(&mut self, w: &'a MambaWeights) -> GpuMamba {
        GpuMamba {
            shape: w.shape,
            input: self.linear(&w.input),
            conv: self.conv(w.conv.form(), None),
            scan: self.linear(&w.scan),
            norms: w.norms.each_ref().map(|norm| self.vector(norm)),
            steps: self.linear(&w.steps),
            log_decay: self.vector(&w.log_decay),
            skip: self.vector(&w.skip),
            output: self.linear(&w.output),
        }
    }

    fn mamba2(&mut self, w: &'a Mamba2Weights) -> GpuMamba2 {
        GpuMamba2 {
            shape: w.shape,
            input: self.linear(&w.input),
            conv: self.conv(w.conv.form(), None),
            step_bias: self.vector(&w.step_bias),
            log_decay: self.vector(&w.log_decay),
            skip: self.vector(&w.skip),
            norm: self.vector(&w.norm),
            output: self.linear(&w.output),
        }
    }

    fn lightning(&mut self, w: &'a LightningWeights) -> GpuLightning {
        GpuLightning {
            shape: w.shape,
            qkv: self.linear(&w.qkv),
            log_decay: self.vector(&w.log_decay),
            norm: self.vector(&w.norm),
            gate: self.linear(&w.gate),
            output: self.linear(&w.output),
        }
    }

    /// Biases and factors of a layer's routed experts, if it has some.
    pub fn routed_form(&mut self, l: usize) -> Option<GpuForm> {
        self.model.weights.routed[l].as_ref()?;
        self.model.weights.layers[l].ffn.as_ref().map(|w| self.form(w.form()))
    }

    fn form(&mut self, form: ExpertForm<'a>) -> GpuForm {
        let biases = form.biases.map(|b| self.biases(b));
        let scales = form.scales.map(|scales| GpuScales {
            gate: (!scales.gate.is_empty()).then(|| self.vector(&scales.gate)),
            up: self.vector(&scales.up),
        });
        GpuForm { biases, scales }
    }

    fn ffn(&mut self, l: usize, w: &'a FfnWeights) -> GpuFfn {
        let model = self.model;
        let router = match &w.gate {
            Gate::Dense(_) => None,
            Gate::Router(router) => Some(GpuRouter {
                logits: self.linear(&router.logits),
                choice_bias: self.optional(&router.choice_bias),
                norm: router.norm.as_ref().map(|norm| self.norm(norm)),
                fixed: router.fixed.as_ref().map(|experts| {
                    let bytes = || experts.iter().flat_map(|e| e.to_le_bytes()).collect();
                    GpuVector(self.made(4 * experts.len(), bytes))
                }),
                scales: self.optional(&router.scales),
            }),
        };
        let dense = match w.gate {
            Gate::Dense(weight) => Some(self.only(&model.dense, l, w.expert, w.form(), weight)),
            Gate::Router(_) => None,
        };
        GpuFfn {
            norm: self.norm(&w.norm),
            router,
            dense,
            form: self.routed_form(l).unwrap_or_default(),
            latent: w.latent.as_ref().map(|latent| GpuLatentExperts {
                down: self.linear(&latent.down),
                norm: self.optional(&latent.norm),
                up: self.linear(&latent.up),
            }),
            adjugate: w.adjugate.as_ref().map(|_| self.adjugate(l)),
            shared: w.shared.as_ref().map(|shared| GpuShared {
                expert: self.scaled(&model.shared, l, shared.shape, &shared.scales),
                gate: shared.gate.as_ref().map(|gate| self.matrix(gate)),
            }),
            branch: w.branch.as_ref().map(|b| GpuBranch {
                norm: self.norm(&b.norm),
                expert: self.scaled(&model.dense, l, b.shape, &b.scales),
                post_norm: b.post_norm.as_ref().map(|norm| self.norm(norm)),
            }),
            sees_before: w.sees_before,
            post_norm: w.post_norm.as_ref().map(|norm| self.norm(norm)),
            experts_norm: w.experts_norm.as_ref().map(|norm| self.norm(norm)),
            scale: w.scale,
            routes_stream: w.routes_stream,
            weights_input: w.weights_input,
        }
    }

    fn biases(&mut self, b: &'a ExpertBiases) -> GpuBiases {
        GpuBiases {
            gate: (!b.gate.is_empty()).then(|| self.vector(&b.gate)),
            up: self.vector(&b.up),
            down: self.vector(&b.down),
        }
    }

    /// The only expert of layer `l` in `store`, with these factors.
    fn scaled(
        &mut self,
        store: &'a Resident,
        l: usize,
        shape: ExpertShape,
        scales: &'a OnlyScales,
    ) -> GpuOnly {
        let form = ExpertForm { scales: scales.inner.as_ref(), ..shape.form() };
        self.only(store, l, shape, form, scales.outer)
    }

    /// The only expert of layer `l` in `store`.
    fn only(
        &mut self,
        store: &'a Resident,
        l: usize,
        shape: ExpertShape,
        form: ExpertForm<'a>,
        weight: f32,
    ) -> GpuOnly {
        let experts = store.layer(l).expect("bound with the layer");
        let layout = GranuleLayout::new(&experts);
        let granules = self.granules(store, l, 0);
        let form = self.form(form);
        let table = self.table(self.n_tokens() * layout.n_granules);
        GpuOnly { shape, form, weight, layout, granules, table }
    }

    /// The experts behind the routed ones of layer `l`.
    fn adjugate(&mut self, l: usize) -> GpuAdjugate {
        let store = &self.model.dense;
        let experts = store.layer(l).expect("bound with the layer");
        let layout = GranuleLayout::new(&experts);
        let granules = (0..experts.n_experts).flat_map(|e| self.granules(store, l, e)).collect();
        let table = self.table(experts.n_experts * layout.n_granules);
        GpuAdjugate { layout, granules, table }
    }

    /// An expert's granules, as in slots of a device.
    fn granules(&mut self, store: &'a Resident, l: usize, expert: usize) -> Vec<Range<usize>> {
        let experts = store.layer(l).expect("bound with the layer");
        let layout = GranuleLayout::new(&experts);
        let granule = |g: usize| {
            self.made(layout.slot_bytes, move || {
                let mut slot = vec![0; layout.slot_bytes];
                for part in GranulePart::of(&experts, &layout, &store.granule(l, expert as u32, g))
                {
                    part.pack(&mut slot[part.range()]);
                }
                slot
            })
        };
        (0..layout.n_granules).map(granule).collect()
    }
}
