//! The sequence mixer of a layer: its kinds, and the properties that the model asks of each.

use super::binder::Binder;
use super::{
    CompressedWeights, DeltaWeights, Host, KdaWeights, LatentWeights, LightningWeights, Linear,
    Mamba2Weights, MambaWeights, Residence, ShortConvWeights,
};
use crate::Result;
use crate::model::descriptor;
use crate::model::recurrent::Recurrence;

#[derive(Clone, Debug)]
pub enum Mixer<R: Residence = Host> {
    /// The layer has a feed-forward part only.
    None,
    Attention(R::Attention),
    Latent(LatentWeights<R>),
    Compressed(Box<CompressedWeights<R>>),
    Delta(DeltaWeights<R>),
    Kda(Box<KdaWeights<R>>),
    ShortConv(ShortConvWeights<R>),
    Mamba(Box<MambaWeights<R>>),
    Mamba2(Mamba2Weights<R>),
    Lightning(LightningWeights<R>),
}

/// Matches a mixer whose kinds have a trait in common: `Some` of its weights in that trait, `None`
/// for [`Mixer::None`].
macro_rules! any_mixer {
    ($mixer:expr) => {
        match $mixer {
            Mixer::None => None,
            Mixer::Attention(w) => Some(w),
            Mixer::Latent(w) => Some(w),
            Mixer::Compressed(w) => Some(&**w),
            Mixer::Delta(w) => Some(w),
            Mixer::Kda(w) => Some(&**w),
            Mixer::ShortConv(w) => Some(w),
            Mixer::Mamba(w) => Some(&**w),
            Mixer::Mamba2(w) => Some(w),
            Mixer::Lightning(w) => Some(w),
        }
    };
}

/// Makes a mixer of another residence: `$new` of the weights `$w` of its kind.
macro_rules! map_mixer {
    ($mixer:expr, $w:ident => $new:expr) => {
        match $mixer {
            Mixer::None => Mixer::None,
            Mixer::Attention($w) => Mixer::Attention($new),
            Mixer::Latent($w) => Mixer::Latent($new),
            Mixer::Compressed($w) => Mixer::Compressed($new),
            Mixer::Delta($w) => Mixer::Delta($new),
            Mixer::Kda($w) => Mixer::Kda($new),
            Mixer::ShortConv($w) => Mixer::ShortConv($new),
            Mixer::Mamba($w) => Mixer::Mamba($new),
            Mixer::Mamba2($w) => Mixer::Mamba2($new),
            Mixer::Lightning($w) => Mixer::Lightning($new),
        }
    };
}

pub(crate) use {any_mixer, map_mixer};

/// The properties of a mixer that its weights tell.
pub trait MixerWeights {
    /// The matrices that tokens are multiplied by, but for those of single heads.
    fn linears(&self) -> Vec<&Linear>;

    /// Multiply-adds of a token besides those of `linears`, at any position.
    fn other_macs(&self) -> usize {
        0
    }

    /// Positions that a token sees, its own among them, if it does not see all.
    fn n_seen(&self) -> Option<usize> {
        None
    }

    /// Whether adapters may change `linears`.
    fn takes_adapters(&self) -> bool {
        false
    }

    /// Whether devices have kernels for it.
    fn has_kernels(&self) -> bool {
        true
    }

    /// Bytes of its vectors on a device that the file does not have.
    fn unpacked_bytes(&self) -> usize {
        0
    }
}

impl Mixer {
    /// `None` for a layer that has a feed-forward part only.
    pub fn weights(&self) -> Option<&dyn MixerWeights> {
        any_mixer!(self)
    }
}

/// Bytes of a vector of `n` f32 on a device, where vectors begin at multiples of 256 bytes.
pub(super) fn vector_bytes(n: usize) -> usize {
    4 * n.next_multiple_of(64)
}

impl Binder<'_> {
    pub fn mixer(&self, l: usize) -> Result<Mixer> {
        if !self.hyper.mixes(l) {
            return Ok(Mixer::None);
        }
        Ok(match self.hyper.recurrence_of(l) {
            Some(Recurrence::Delta(shape)) => Mixer::Delta(self.delta(l, shape)?),
            Some(Recurrence::Kda(shape)) => Mixer::Kda(Box::new(self.kda(l, shape)?)),
            Some(Recurrence::ShortConv(shape)) => Mixer::ShortConv(self.short_conv(l, shape)?),
            Some(Recurrence::Mamba(shape)) => Mixer::Mamba(Box::new(self.mamba(l, shape)?)),
            Some(Recurrence::Mamba2(shape)) => Mixer::Mamba2(self.mamba2(l, shape)?),
            Some(Recurrence::Lightning(shape)) => Mixer::Lightning(self.lightning(l, shape)?),
            None => match self.descriptor.parts.mixer {
                descriptor::Mixer::Attention => Mixer::Attention(self.attention("attn", l)?),
                descriptor::Mixer::Latent => Mixer::Latent(self.latent(l)?),
                descriptor::Mixer::Compressed => Mixer::Compressed(Box::new(self.compressed(l)?)),
            },
        })
    }
}
