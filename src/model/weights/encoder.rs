//! Weights of an encoder–decoder besides its layers.

use super::super::Model;
use super::super::weights::{AttentionWeights, Binder, Norm};
use crate::Result;
use crate::backend::ops::DistanceBias;
use crate::model::encoder::PositionParams;
use crate::model::relative::Buckets;

pub struct EncoderWeights {
    pub output_norm: Norm,
    /// Cross-attention of each decoder layer.
    pub cross: Vec<CrossAttention>,
    /// Relative position bias of self-attention, in the encoder and in the decoder.
    pub encoder_bias: Option<DistanceBias>,
    pub decoder_bias: Option<DistanceBias>,
}

pub struct CrossAttention {
    pub norm: Norm,
    /// Queries are of the decoder's tokens, keys and values of the encoder's.
    pub attention: AttentionWeights,
}

impl Model {
    /// Cross-attention of layer `l`, if it is a decoder layer of an encoder–decoder.
    pub(crate) fn cross_attention_of(&self, l: usize) -> Option<&CrossAttention> {
        let encoder = self.weights.encoder.as_ref()?;
        l.checked_sub(self.hyper.n_encoder_layers()).map(|l| &encoder.cross[l])
    }
}

impl EncoderWeights {
    /// `None` in a decoder-only model.
    pub(crate) fn bind(b: &Binder) -> Result<Option<EncoderWeights>> {
        let Some(params) = &b.hyper.encoder else { return Ok(None) };
        let (first, end) = (params.n_layers, params.n_layers + params.n_decoder_layers);
        let cross = |l| {
            let attention = b.attention("cross_attn", l)?;
            Ok(CrossAttention { norm: b.norm("cross_attn_norm", l)?, attention })
        };
        let bias = |l: usize| match params.positions {
            PositionParams::Sinusoidal { .. } => Ok(None),
            PositionParams::Relative { n_buckets, max_distance } => {
                let index = b.require("attn_rel_b", l)?;
                let table = b.values(index, &[b.hyper.n_head, n_buckets])?;
                let buckets = Buckets { n: n_buckets, max_distance };
                Ok(Some(buckets.bias(&table, l < first)))
            }
        };
        Ok(Some(EncoderWeights {
            output_norm: b.norm("output_norm", 0)?,
            cross: (first..end).map(cross).collect::<Result<_>>()?,
            encoder_bias: bias(0)?,
            decoder_bias: bias(first)?,
        }))
    }
}
