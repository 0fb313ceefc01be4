//! Several residual streams, from GGUF metadata.

use super::descriptor::Residual;
use super::hyper::Keys;
use crate::Result;

/// See `backend::ops::Mixing`.
#[derive(Clone, Copy, Debug)]
pub struct StreamParams {
    pub n: usize,
    pub eps: f32,
    pub magnitude: f32,
    pub rounds: usize,
    /// Whether parts mix the streams.
    pub mixes: bool,
    /// Whether a part reads by the weights that the part before it has made.
    pub lags: bool,
    /// Elements that the gates of the streams' elements are made of; 0 if streams have none.
    pub gate_rank: usize,
}

impl Keys<'_> {
    /// `None` in a model of one stream.
    pub(super) fn streams(&self) -> Result<Option<StreamParams>> {
        let mixes = match self.descriptor.parts.residual {
            Residual::Hyper => false,
            Residual::HyperMixed | Residual::HyperLagging => true,
            Residual::HyperGated => return self.gated_streams().map(Some),
            _ => return Ok(None),
        };
        let (eps, magnitude) = ("hyper_connection.epsilon", "hyper_connection.magnitude");
        Ok(Some(StreamParams {
            n: self.require("hyper_connection.count")?,
            eps: self.some(eps, self.positive(eps)?)?,
            magnitude: match mixes {
                true => 2.0,
                false => self.some(magnitude, self.positive(magnitude)?)?,
            },
            rounds: match mixes {
                true => self.require("hyper_connection.sinkhorn_iterations")?,
                false => 0,
            },
            mixes,
            lags: self.descriptor.parts.residual == Residual::HyperLagging,
            gate_rank: 0,
        }))
    }

    fn gated_streams(&self) -> Result<StreamParams> {
        let count = "hyper_connection.count";
        let gate_rank = self.require("hyper_connection.low_rank")?;
        match self.require(count)? {
            1 => Err(self.bad(count, "2 or more".into(), 1)),
            n => Ok(StreamParams {
                n,
                eps: 0.0,
                magnitude: 2.0,
                rounds: 0,
                mixes: false,
                lags: false,
                gate_rank,
            }),
        }
    }

    /// Layers from one that leaves a stream behind to the next; 0 if none does.
    pub(super) fn kept_every(&self) -> Result<usize> {
        let key = "attn_res.block_size";
        match self.descriptor.parts.residual {
            Residual::Kept if self.have_tensor("attn_res_score", &[true]) => self.require(key),
            Residual::Kept => self.number(key),
            _ => Ok(0),
        }
    }
}
