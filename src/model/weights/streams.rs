//! Residual streams other than one that all parts add to.

use super::binder::Binder;
use super::residence::{Host, Residence};
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
pub enum Streams<R: Residence = Host> {
    /// There is one, to which it adds.
    One,
    /// There is one, to which it adds with a factor on each.
    Averaged { stream: f32, part: f32 },
    /// There is one, to which it adds with a factor on each element of both.
    Weighed { stream: R::Vector, part: R::Vector },
    /// Several, which it reads and feeds by weights that the streams themselves make.
    Hyper(Box<Connection<R>>),
    /// Several, of which it reads the mean of what gates leave, and which it feeds by weights.
    Gated(Box<GatedConnection<R>>),
    /// Several, whose mean the output norm reads.
    Mean,
    /// Several, which the output norm reads by weights that the last part has made.
    Lagging,
    /// The present one and some that layers have left behind, scored by this vector; it adds to the
    /// present one.
    Kept(R::Vector),
}

/// Weights of a hyper-connection.
#[derive(Clone, Debug)]
pub struct Connection<R: Residence = Host> {
    /// From the normalised streams, one behind the other, to mixes.
    pub mixes: R::Linear,
    pub scales: R::Vector,
    pub bases: R::Vector,
    pub params: StreamParams,
}

/// Weights of a hyper-connection with a gate for each element of the streams: with z their norms,
/// one behind the other, gates are σ(up · silu(down · z / n)), and what is added to a stream has
/// the weight 2 · σ(inject · z / n).
#[derive(Clone, Debug)]
pub struct GatedConnection<R: Residence = Host> {
    pub n: usize,
    /// One of each stream: [n, n_embd].
    pub norm: R::Vector,
    /// [rank, n · n_embd] and back.
    pub down: R::Linear,
    pub up: R::Linear,
    /// [n, n · n_embd]; the head adds nothing.
    pub inject: Option<R::Linear>,
}

impl Streams {
    /// Whether devices have kernels for it.
    pub fn has_kernels(&self) -> bool {
        match self {
            Streams::One | Streams::Averaged { .. } | Streams::Mean | Streams::Kept(_) => true,
            Streams::Weighed { .. } | Streams::Lagging => false,
            Streams::Hyper(connection) => {
                connection.params.n <= DEVICE_STREAMS_MAX && !connection.params.lags
            }
            Streams::Gated(connection) => connection.n <= DEVICE_STREAMS_MAX,
        }
    }
}

impl Streams {
    /// The factors of the part with this number, the embedding being number 1.
    fn averaged(i: usize) -> Streams {
        let i = i as f64;
        let (stream, part) = (((i - 1.0) / i).sqrt() as f32, (1.0 / i.sqrt()) as f32);
        Streams::Averaged { stream, part }
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
            Residual::Weighed => {
                let vector = |which: &str| {
                    let index = self.require(&format!("{part}_resid_{which}"), l)?;
                    self.vector(index, self.hyper.n_embd)
                };
                Ok(Streams::Weighed { stream: vector("alpha")?, part: vector("beta")? })
            }
            Residual::Averaged => Ok(Streams::averaged(2 * (l + 1) + usize::from(part == "ffn"))),
            Residual::Hyper | Residual::HyperMixed | Residual::HyperLagging => {
                self.connection(&format!("hc_{part}"), l)
            }
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
            Residual::HyperLagging => Ok(Streams::Lagging),
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
        let (down, inject) = (of("down"), of("inject"));
        let (down, inject) = match self.name(&inject, l) {
            None => (self.linear(&down, l, rank, n * n_embd)?, None),
            Some(_) => {
                let (both, roles) = (of("down_inject"), [&*down, &*inject]);
                let [down, inject] = self.pair(&both, roles, l, [rank, n], n * n_embd)?;
                (down, Some(inject))
            }
        };
        Ok(Streams::Gated(Box::new(GatedConnection {
            n,
            norm: self.stream_norm(&of("norm"), l)?,
            down,
            up: self.linear(&of("up"), l, n * n_embd, rank)?,
            inject,
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
            params,
        })))
    }
}
