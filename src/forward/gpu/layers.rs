//! The layers of a model on the device: the weights that `model::weights` binds, uploaded.

use crate::backend::ops::{DistanceBias, ExpertBiases, ExpertForm, ExpertShape};
use crate::experts::Resident;
use crate::experts::vram::{GranuleLayout, GranulePart};
use crate::forward::encoder_decoder::EncoderWeights;
use crate::forward::gpu::pack::{OnDevice, Pack};
use crate::forward::gpu::weights::{GpuLinear, GpuMatrix, GpuVector, Packer};
use crate::model::weights::{
    FfnWeights, Gate, InputPart, Latent, Mixer, NgramWeights, Norm, OnlyScales, Router, Streams,
};
use std::ops::Range;

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
    pub norm: Norm<OnDevice>,
    pub router: Option<Router<OnDevice>>,
    /// The only expert of a dense layer.
    pub dense: Option<GpuOnly>,
    /// Biases and factors of the routed experts.
    pub form: GpuForm,
    pub latent: Option<Latent<OnDevice>>,
    pub adjugate: Option<GpuAdjugate>,
    pub shared: Option<GpuShared>,
    pub branch: Option<GpuBranch>,
    pub sees_before: bool,
    pub post_norm: Option<Norm<OnDevice>>,
    pub experts_norm: Option<Norm<OnDevice>>,
    pub scale: f32,
    pub routes_stream: bool,
    pub weights_input: bool,
}

/// A dense branch beside the routed experts.
pub struct GpuBranch {
    pub norm: Norm<OnDevice>,
    pub expert: GpuOnly,
    pub post_norm: Option<Norm<OnDevice>>,
}

/// Attention to the source text.
pub struct GpuCross {
    pub norm: Norm<OnDevice>,
    pub q: GpuLinear,
    pub k: GpuLinear,
    pub v: GpuLinear,
    pub output: GpuLinear,
}

pub struct GpuLayer {
    pub norm: Norm<OnDevice>,
    pub mixer: Mixer<OnDevice>,
    pub post_norm: Option<Norm<OnDevice>>,
    /// For layers of a decoder with an encoder.
    pub cross: Option<GpuCross>,
    /// `None` in a layer that mixes positions only.
    pub ffn: Option<GpuFfn>,
    pub input: Option<InputPart<OnDevice>>,
    pub scale: f32,
    /// See `Layer`.
    pub streams: [Streams<OnDevice>; 2],
    pub ngrams: Option<Box<NgramWeights<OnDevice>>>,
}

/// A `DistanceBias`, uploaded.
pub struct GpuBias {
    pub reach: usize,
    pub values: GpuVector,
}

/// The parts of a model with an encoder besides its layers.
pub struct GpuEncoder {
    pub output_norm: Norm<OnDevice>,
    pub encoder_bias: Option<GpuBias>,
    pub decoder_bias: Option<GpuBias>,
}

impl GpuLayer {
    /// The layer's experts that every token goes to.
    pub fn only_experts(&self) -> impl Iterator<Item = &GpuOnly> {
        self.ffn.iter().flat_map(|ffn| {
            let branch = ffn.branch.iter().map(|branch| &branch.expert);
            ffn.dense.iter().chain(ffn.shared.iter().map(|shared| &shared.expert)).chain(branch)
        })
    }
}

impl<'a> Packer<'a> {
    pub fn layer(&mut self, l: usize) -> GpuLayer {
        let layer = &self.model.weights.layers[l];
        let cross = self.model.cross_attention_of(l).map(|cross| GpuCross {
            norm: cross.norm.pack(self),
            q: cross.attention.q.pack(self),
            k: cross.attention.k.pack(self),
            v: cross.attention.v.pack(self),
            output: cross.attention.output.pack(self),
        });
        GpuLayer {
            norm: layer.norm.pack(self),
            mixer: layer.mixer.pack(self),
            post_norm: layer.post_norm.pack(self),
            cross,
            ffn: layer.ffn.as_ref().map(|ffn| self.ffn(l, ffn)),
            input: layer.input.pack(self),
            scale: layer.scale,
            streams: layer.streams.pack(self),
            ngrams: layer.ngrams.pack(self),
        }
    }

    pub fn encoder(&mut self, w: &'a EncoderWeights) -> GpuEncoder {
        let mut bias = |bias: &'a Option<DistanceBias>| {
            let bias = bias.as_ref()?;
            Some(GpuBias { reach: bias.reach(), values: self.vector(bias.values()) })
        };
        let (encoder_bias, decoder_bias) = (bias(&w.encoder_bias), bias(&w.decoder_bias));
        GpuEncoder { output_norm: w.output_norm.pack(self), encoder_bias, decoder_bias }
    }

    /// Biases and factors of a layer's routed experts, if it has some.
    pub fn routed_form(&mut self, l: usize) -> Option<GpuForm> {
        self.model.weights.routed[l].as_ref()?;
        self.model.weights.layers[l].ffn.as_ref().map(|w| self.form(w.form()))
    }

    fn form(&mut self, form: ExpertForm<'a>) -> GpuForm {
        let biases = form.biases.map(|b| self.biases(b));
        let scales = form.scales.map(|scales| GpuScales {
            gate: (!scales.gate.is_empty()).then(|| scales.gate.pack(self)),
            up: scales.up.pack(self),
        });
        GpuForm { biases, scales }
    }

    fn ffn(&mut self, l: usize, w: &'a FfnWeights) -> GpuFfn {
        let model = self.model;
        let router = match &w.gate {
            Gate::Dense(_) => None,
            Gate::Router(router) => Some(router.pack(self)),
        };
        let dense = match w.gate {
            Gate::Dense(weight) => Some(self.only(&model.dense, l, w.expert, w.form(), weight)),
            Gate::Router(_) => None,
        };
        GpuFfn {
            norm: w.norm.pack(self),
            router,
            dense,
            form: self.routed_form(l).unwrap_or_default(),
            latent: w.latent.pack(self),
            adjugate: w.adjugate.as_ref().map(|_| self.adjugate(l)),
            shared: w.shared.as_ref().map(|shared| GpuShared {
                expert: self.scaled(&model.shared, l, shared.shape, &shared.scales),
                gate: shared.gate.pack(self),
            }),
            branch: w.branch.as_ref().map(|b| GpuBranch {
                norm: b.norm.pack(self),
                expert: self.scaled(&model.dense, l, b.shape, &b.scales),
                post_norm: b.post_norm.pack(self),
            }),
            sees_before: w.sees_before,
            post_norm: w.post_norm.pack(self),
            experts_norm: w.experts_norm.pack(self),
            scale: w.scale,
            routes_stream: w.routes_stream,
            weights_input: w.weights_input,
        }
    }

    fn biases(&mut self, b: &'a ExpertBiases) -> GpuBiases {
        GpuBiases {
            gate: (!b.gate.is_empty()).then(|| b.gate.pack(self)),
            up: b.up.pack(self),
            down: b.down.pack(self),
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
