//! Residual streams other than one that all parts add to.

use super::Linear;
use super::binder::Binder;
use crate::Result;
use crate::backend::ops::{DEVICE_STREAMS_MAX, Mixing};
use crate::model::descriptor::Residual;
use crate::model::streams::StreamParams;

/// The part of a layer that reads and feeds the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubLayer {
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
    /// Several, of which it reads the mean of what gates leave, and which it feeds by weights.
    Gated(Box<GatedConnection>),
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

/// Weights of a hyper-connection with a gate for each element of the streams: with z their norms,
/// one behind the other, gates are σ(up · silu(down · z / n)), and what is added to a stream has
/// the weight 2 · σ(inject · z / n).
#[derive(Clone, Debug)]
pub struct GatedConnection {
    pub n: usize,
    /// One of each stream: [n, n_embd].
    pub norm: Vec<f32>,
    /// [rank, n · n_embd] and back.
    pub down: Linear,
    pub up: Linear,
    /// [n, n · n_embd]; the head adds nothing.
    pub inject: Option<Linear>,
}

impl Streams {
    /// Whether devices have kernels for it.
    pub fn has_kernels(&self) -> bool {
        match self {
            Streams::One | Streams::Mean | Streams::Kept(_) => true,
            Streams::Hyper(connection) => connection.params.n <= DEVICE_STREAMS_MAX,
            Streams::Gated(connection) => connection.n <= DEVICE_STREAMS_MAX,
        }
    }
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
            Residual::HyperGated => self.gated_connection(&format!("hc_{part}"), l),
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
            Residual::HyperGated => self.gated_connection("hc_head", 0),
            Residual::Kept if self.hyper.kept_every > 0 => {
                let score = self.require("output_res_score", 0)?;
                Ok(Streams::Kept(self.vector(score, self.hyper.n_embd)?))
            }
            _ => Ok(Streams::One),
        }
    }

    fn gated_connection(&self, role: &str, l: usize) -> Result<Streams> {
        let Some(params) = self.hyper.streams else { return Ok(Streams::One) };
        let (n, n_embd, rank) = (params.n, self.hyper.n_embd, params.gate_rank);
        let of = |part: &str| format!("{role}_{part}");
        let feeds = self.name(&of("inject"), l).is_some();
        Ok(Streams::Gated(Box::new(GatedConnection {
            n,
            norm: self.stream_norm(&of("norm"), l)?,
            down: self.linear(&of("down"), l, rank, n * n_embd)?,
            up: self.linear(&of("up"), l, n * n_embd, rank)?,
            inject: feeds.then(|| self.linear(&of("inject"), l, n, n * n_embd)).transpose()?,
        })))
    }

    /// A norm with weights of each stream's own, [n, n_embd], which files may have in one row.
    pub fn stream_norm(&self, role: &str, l: usize) -> Result<Vec<f32>> {
        let n = self.hyper.streams.map_or(1, |streams| streams.n);
        let index = self.require(role, l)?;
        match self.tensor(index).dims.len() {
            1 => self.vector(index, n * self.hyper.n_embd),
            _ => self.values(index, &[self.hyper.n_embd, n]),
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
