//! What the stages of a pass share: the tokens, the buffers, and operations on them.

use super::DeviceModel;
use super::acts::GpuActs;
use super::cache::GpuCache;
use super::layers::GpuNorm;
use super::weights::{GpuHeads, GpuLinear};
use crate::Result;
use crate::backend::gpu::heads::DeviceHeadMats;
use crate::backend::gpu::{DeviceSlice, Stream};
use crate::experts::vram::VramTiers;
use crate::forward::Batch;
use crate::forward::gpu::workspace::{ByteRange, WorkspaceLayout};
use crate::gguf::TensorType;
use crate::model::Model;
use crate::model::descriptor;
use crate::model::hyper::HyperParams;
use crate::model::weights::FfnWeights;

/// What the tokens of a pass are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Text {
    /// The only text of a model without an encoder.
    Only,
    /// What the encoder reads.
    Source,
    /// What the decoder says to a source text of so many tokens.
    Answer { n_source: usize },
}

/// A micro-batch on its way through the layers of one device.
pub struct Pass<'a> {
    pub model: &'a Model,
    pub dev: &'a DeviceModel,
    pub cache: &'a GpuCache,
    pub batch: &'a Batch,
    /// Tokens.
    pub n: usize,
    /// Position of the first.
    pub past: usize,
    /// Whether they are of a prompt, whatever it is cut into.
    pub is_prompt: bool,
    /// Positions that they see, or more.
    pub max_seen: usize,
    pub text: Text,
}

impl<'a> Pass<'a> {
    pub fn hyper(&self) -> &'a HyperParams {
        &self.model.hyper
    }

    pub fn stream(&self) -> &'a Stream {
        &self.dev.stream
    }

    pub fn layout(&self) -> &'a WorkspaceLayout {
        &self.dev.layout
    }

    pub fn slice(&self, place: &ByteRange) -> DeviceSlice<'a> {
        self.dev.workspace.slice(place)
    }

    pub fn words(&self, place: &ByteRange, n: usize) -> DeviceSlice<'a> {
        self.dev.workspace.words(place, n)
    }

    fn rows(&self, place: &ByteRange) -> DeviceSlice<'a> {
        self.words(place, self.n * self.hyper().n_embd)
    }

    /// f32 [tokens, n_embd], as the next three.
    pub fn x(&self) -> DeviceSlice<'a> {
        self.rows(&self.layout().x)
    }

    pub fn before(&self) -> DeviceSlice<'a> {
        self.rows(&self.layout().before)
    }

    pub fn h(&self) -> DeviceSlice<'a> {
        self.rows(&self.layout().h)
    }

    pub fn y(&self) -> DeviceSlice<'a> {
        self.rows(&self.layout().y)
    }

    pub fn norm(&self, norm: &GpuNorm, x: DeviceSlice, out: DeviceSlice) -> Result<()> {
        let (ops, eps) = (&self.dev.ops.norm, self.hyper().norm_eps);
        let weight = self.dev.weights.vector(&norm.weight);
        match norm.kind {
            descriptor::Norm::Rms => ops.rms_norm_rows(self.stream(), x, weight, eps, out),
            descriptor::Norm::Layer => {
                let bias = self.dev.weights.vector(&norm.bias);
                ops.layer_norm_rows(self.stream(), x, (weight, bias), eps, out)
            }
        }
    }

    /// What the layer's feed-forward part is made of, as the file has it.
    pub fn weights(&self, l: usize) -> &'a FfnWeights {
        &self.model.weights.layers[l].ffn
    }

    /// Where the layer's experts are on devices, if they may be.
    pub fn tiers(&self, l: usize) -> Option<&'a VramTiers> {
        self.dev.tiers.as_deref().filter(|tiers| tiers.has(l))
    }

    /// x += scale · y
    pub fn add_residual(&self) -> Result<()> {
        let (norm, scale) = (&self.dev.ops.norm, self.hyper().residual_scale);
        norm.add_scaled(self.stream(), self.x(), scale, self.y())
    }

    /// The normalised input in the forms that `types` read.
    pub fn acts_of_h(&self, types: impl IntoIterator<Item = TensorType>) -> Result<GpuActs<'a>> {
        let shape = (self.n, self.hyper().n_embd);
        let memory = self.slice(&self.layout().acts);
        GpuActs::fill(&self.dev.ops, self.stream(), types, shape, self.h(), memory)
    }

    /// The input of a layer's feed-forward part, where `ffn_input` has put it.
    pub fn acts_at(&self, l: usize) -> GpuActs<'a> {
        let (types, memory) = (self.weights(l).inputs(), self.slice(&self.layout().acts));
        GpuActs::at(types, (self.n, self.hyper().n_embd), memory)
    }

    /// Another input, [rows, cols], of the part that mixes positions.
    pub fn mixer_acts(
        &self,
        types: impl IntoIterator<Item = TensorType>,
        shape: (usize, usize),
        x: DeviceSlice,
    ) -> Result<GpuActs<'a>> {
        let memory = self.slice(&self.layout().mixer.acts);
        GpuActs::fill(&self.dev.ops, self.stream(), types, shape, x, memory)
    }

    /// `out` [tokens, rows] = weight · acts + bias
    pub fn linear(&self, linear: &GpuLinear, acts: &GpuActs, out: DeviceSlice) -> Result<()> {
        let (mat, bias) = (self.dev.weights.mat(&linear.weight), self.dev.weights.bias(linear));
        let x = acts.view(mat.ty);
        self.dev.ops.products.product(self.stream(), mat, x, bias, out, mat.rows)
    }

    /// A product for each head: `x` [tokens · heads, cols] → `out` [tokens · heads, rows].
    pub fn head_products(
        &self,
        heads: &GpuHeads,
        shape: (usize, usize),
        x: DeviceSlice,
        out: DeviceSlice,
    ) -> Result<()> {
        let all = self.dev.weights.mat(&heads.all);
        let acts = self.mixer_acts([all.ty], shape, x)?.view(all.ty);
        let GpuHeads { n_heads, rows, first, step, .. } = *heads;
        let mats = DeviceHeadMats { all, n_heads, rows, first, step };
        self.dev.ops.heads.launch(self.stream(), mats, acts, out)
    }
}
