//! Weights on a device: the structures that `model::weights` binds, with places in the device's
//! buffer instead of those in the file.

use crate::backend::ops::{DeltaShape, RopeShape, ScanShape};
use crate::forward::gpu::weights::{GpuConv, GpuHeads, GpuLinear, GpuMatrix, GpuVector, Packer};
use crate::model::descriptor::{self, ValueGate};
use crate::model::heads::LatentShape;
use crate::model::ngrams::NgramParams;
use crate::model::recurrent::{Mamba2Shape, MambaShape};
use crate::model::streams::StreamParams;
use crate::model::weights::{
    AttentionWeights, BlockIndexer, Connection, ConvWeights, GatedConnection, HeadMatrices,
    InputPart, Latent, Linear, Matrix, Mixer, NgramConv, NgramWeights, Norm, Residence, Router,
    Streams, map_mixer,
};

/// In the buffer of a device.
#[derive(Clone, Debug)]
pub struct OnDevice;

impl Residence for OnDevice {
    type Matrix = GpuMatrix;
    type Linear = GpuLinear;
    type Heads = GpuHeads;
    type Vector = GpuVector;
    type Ids = GpuVector;
    type Conv = GpuConv;
    type Attention = GpuAttention;
}

/// Weights that get a place on a device.
pub trait Pack<'a> {
    type Packed;

    fn pack(&'a self, packer: &mut Packer<'a>) -> Self::Packed;
}

/// Structures all of whose fields get their places, or are copied.
macro_rules! pack {
    ($($weights:ident { $($field:ident),* $(,)? })*) => {$(
        impl<'a> Pack<'a> for $weights {
            type Packed = $weights<OnDevice>;

            fn pack(&'a self, packer: &mut Packer<'a>) -> Self::Packed {
                $weights { $($field: Pack::pack(&self.$field, packer)),* }
            }
        }
    )*};
}
pub(super) use pack;

/// Values that a device's weights have as the host's do.
macro_rules! copied {
    ($($value:ty),*) => {$(
        impl Pack<'_> for $value {
            type Packed = $value;

            fn pack(&self, _: &mut Packer<'_>) -> $value {
                self.clone()
            }
        }
    )*};
}

copied!(bool, usize, f32, RopeShape, descriptor::Norm);
copied!(LatentShape, DeltaShape, MambaShape, Mamba2Shape, ScanShape, StreamParams, NgramParams);

impl<'a> Pack<'a> for Matrix {
    type Packed = GpuMatrix;

    fn pack(&'a self, packer: &mut Packer<'a>) -> GpuMatrix {
        packer.matrix(self)
    }
}

impl<'a> Pack<'a> for Linear {
    type Packed = GpuLinear;

    fn pack(&'a self, packer: &mut Packer<'a>) -> GpuLinear {
        let bias = self.bias.pack(packer);
        GpuLinear { weight: self.weight.pack(packer), bias, scale: self.scale }
    }
}

impl<'a> Pack<'a> for HeadMatrices {
    type Packed = GpuHeads;

    fn pack(&'a self, packer: &mut Packer<'a>) -> GpuHeads {
        let HeadMatrices { n_heads, rows, first, step, .. } = *self;
        GpuHeads { all: self.all.pack(packer), n_heads, rows, first, step }
    }
}

impl<'a> Pack<'a> for Vec<f32> {
    type Packed = GpuVector;

    fn pack(&'a self, packer: &mut Packer<'a>) -> GpuVector {
        packer.vector(self)
    }
}

impl<'a> Pack<'a> for Vec<u32> {
    type Packed = GpuVector;

    fn pack(&'a self, packer: &mut Packer<'a>) -> GpuVector {
        let bytes = || self.iter().flat_map(|id| id.to_le_bytes()).collect();
        GpuVector(packer.made(4 * self.len(), bytes))
    }
}

impl<'a> Pack<'a> for ConvWeights {
    type Packed = GpuConv;

    fn pack(&'a self, packer: &mut Packer<'a>) -> GpuConv {
        let (weight, bias) = (self.weight.pack(packer), self.bias.pack(packer));
        GpuConv { shape: self.shape, weight, bias, silu: self.silu }
    }
}

impl<'a, T: Pack<'a>> Pack<'a> for Box<T> {
    type Packed = Box<T::Packed>;

    fn pack(&'a self, packer: &mut Packer<'a>) -> Box<T::Packed> {
        Box::new(T::pack(self, packer))
    }
}

impl<'a, T: Pack<'a>, const N: usize> Pack<'a> for [T; N] {
    type Packed = [T::Packed; N];

    fn pack(&'a self, packer: &mut Packer<'a>) -> [T::Packed; N] {
        self.each_ref().map(|part| part.pack(packer))
    }
}

impl<'a, T: Pack<'a>> Pack<'a> for Option<T> {
    type Packed = Option<T::Packed>;

    fn pack(&'a self, packer: &mut Packer<'a>) -> Option<T::Packed> {
        self.as_ref().map(|part| part.pack(packer))
    }
}

/// See `AttentionWeights`.
#[derive(Clone, Debug)]
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
    pub index: Option<Box<BlockIndexer<OnDevice>>>,
}

impl<'a> Pack<'a> for AttentionWeights {
    type Packed = GpuAttention;

    fn pack(&'a self, packer: &mut Packer<'a>) -> GpuAttention {
        let is_own = self.shared_with.is_none();
        // Values that are the keys are read there, unless all heads together are normalised there.
        let is_k = self.v.weight.is(&self.k.weight)
            && self.k_norm.as_ref().is_none_or(|norm| norm.len() == self.head_dim);
        let q = (!self.gated).then_some(&self.q);
        let own = [(is_own, &self.k), (is_own && !is_k, &self.v)];
        let own = own.into_iter().filter_map(|(is_there, linear)| is_there.then_some(linear));
        let linears: Vec<&Linear> = q.into_iter().chain(own).collect();
        let k_first = q.map_or(0, |q| q.weight.rows);
        GpuAttention {
            gated: self.gated.then(|| self.q.pack(packer)),
            width: linears.iter().map(|linear| linear.weight.rows).sum(),
            products: packer.stack(&linears),
            k_first,
            v_first: if is_k { k_first } else { k_first + self.k.weight.rows },
            n_head: self.n_head,
            n_head_kv: self.n_head_kv,
            head_dim: self.head_dim,
            head_dim_v: self.head_dim_v,
            shared_with: self.shared_with,
            gate: self.gate.as_ref().map(|(gate, function)| (gate.pack(packer), *function)),
            rotates: self.rotates,
            slides: self.slides,
            tempers: self.tempers,
            q_norm: self.q_norm.pack(packer),
            k_norm: self.k_norm.pack(packer),
            v_norm: self.v_norm.pack(packer),
            sinks: self.sinks.pack(packer),
            slopes: self.bias.as_ref().map(|bias| packer.vector(bias.slopes())),
            output: self.output.pack(packer),
            window: self.window,
            chunk: self.chunk,
            index: if packer.chooses { self.index.pack(packer) } else { None },
        }
    }
}

impl<'a> Pack<'a> for Mixer {
    type Packed = Mixer<OnDevice>;

    fn pack(&'a self, packer: &mut Packer<'a>) -> Mixer<OnDevice> {
        map_mixer!(self, w => w.pack(packer))
    }
}

impl<'a> Pack<'a> for Streams {
    type Packed = Streams<OnDevice>;

    fn pack(&'a self, packer: &mut Packer<'a>) -> Streams<OnDevice> {
        match self {
            Streams::One => Streams::One,
            Streams::Averaged { stream, part } => {
                Streams::Averaged { stream: *stream, part: *part }
            }
            Streams::Mean => Streams::Mean,
            Streams::Lagging => Streams::Lagging,
            Streams::Weighed { stream, part } => {
                Streams::Weighed { stream: stream.pack(packer), part: part.pack(packer) }
            }
            Streams::Kept(score) => Streams::Kept(score.pack(packer)),
            Streams::Hyper(w) => Streams::Hyper(w.pack(packer)),
            Streams::Gated(w) => Streams::Gated(w.pack(packer)),
        }
    }
}

pack! {
    Norm { kind, weight, bias, eps }
    Router { logits, choice_bias, norm, fixed, scales }
    Latent { down, input_norm, norm, up }
    InputPart { gate, output, norm }
    Connection { mixes, scales, bases, params }
    GatedConnection { n, norm, down, up, inject }
    NgramWeights { params, key, value, key_norm, query_norm, conv }
    NgramConv { norm, form }
}
