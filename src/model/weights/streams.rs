//! Residual streams other than one that all parts add to.

use super::Linear;
use super::binder::Binder;
use crate::Result;
use crate::backend::ops::Mixing;
use crate::model::descriptor::Residual;
use crate::model::streams::StreamParams;

/// The part of a layer that reads and feeds the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Mixer,
    FeedForward,
}

/// How a part reads the streams of a token and feeds them.
#[derive(Clone, Debug)]
pub enum Streams {
    /// There is one, to which it adds.
    One,
    /// Several, which it reads and feeds by weights that the streams themselves make.
    Hyper(Box<Connection>),
    /// Several, whose mean the output norm reads.
    Mean,
    /// The present one and some that layers have left behind, scored by this vector; it adds to the
    /// present one.
    Kept(Vec<f32>),
}

/// Weights of a hyper-connection.
#[derive(Clone, Debug)]
pub struct Connection {
    /// From the normalised streams, one behind the other, to mixes.
    pub mixes: Linear,
    pub scales: Vec<f32>,
    pub bases: Vec<f32>,
    /// Ones, the weight of the streams' norm.
    pub ones: Vec<f32>,
    pub params: StreamParams,
}

impl Connection {
    pub fn mixing(&self) -> Mixing<'_> {
        let StreamParams { n, eps, magnitude, rounds, .. } = self.params;
        Mixing { n, scales: &self.scales, bases: &self.bases, eps, magnitude, rounds }
    }
}

impl Binder<'_> {
    /// How the parts of a layer read and feed the streams.
    pub fn streams(&self, l: usize) -> Result<[Streams; 2]> {
        let of = |part: &str| match self.descriptor.parts.residual {
            Residual::Hyper | Residual::HyperMixed => self.connection(&format!("hc_{part}"), l),
            Residual::Kept if self.hyper.kept_every > 0 => {
                let role = format!("{part}_res_score");
                let score = self.vector(self.require(&role, l)?, self.hyper.n_embd)?;
                Ok(Streams::Kept(score))
            }
            _ => Ok(Streams::One),
        };
        Ok([of("attn")?, of("ffn")?])
    }

    /// How the output norm reads the streams.
    pub fn last_streams(&self) -> Result<Streams> {
        match self.descriptor.parts.residual {
            Residual::Hyper | Residual::HyperMixed
                if !self.descriptor.tensors.contains_key("hc_head_fn") =>
            {
                Ok(Streams::Mean)
            }
            Residual::Hyper | Residual::HyperMixed => self.connection("hc_head", 0),
            Residual::Kept if self.hyper.kept_every > 0 => {
                let score = self.require("output_res_score", 0)?;
                Ok(Streams::Kept(self.vector(score, self.hyper.n_embd)?))
            }
            _ => Ok(Streams::One),
        }
    }

    /// The head's has weights of inputs alone.
    fn connection(&self, role: &str, l: usize) -> Result<Streams> {
        let Some(params) = self.hyper.streams else { return Ok(Streams::One) };
        let (n, width) = (params.n, params.n * self.hyper.n_embd);
        let (n_scales, n_mixes) = match (role, params.mixes) {
            ("hc_head", _) => (1, n),
            (_, false) => (2, 2 * n),
            (_, true) => (3, 2 * n + n * n),
        };
        let vector = |part: &str, n| self.vector(self.require(&format!("{role}_{part}"), l)?, n);
        Ok(Streams::Hyper(Box::new(Connection {
            mixes: self.linear(&format!("{role}_fn"), l, n_mixes, width)?,
            scales: vector("factor", n_scales)?,
            bases: vector("base", n_mixes)?,
            ones: vec![1.0; width],
            params,
        })))
    }
}
