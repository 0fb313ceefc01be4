//! What a model computes: descriptor, hyper-parameters, weight binding, KV cache, layer loop.

pub mod descriptor;
pub mod forward;
mod hyper;
pub mod kv;
mod weights;

use std::path::Path;
use std::sync::Arc;

use crate::Result;
use crate::backend::cpu::rope::{Frequencies, Pairing};
use crate::gguf::Gguf;
use descriptor::{Descriptor, Rope};
pub use hyper::HyperParams;
use weights::Weights;

/// A loaded model: the mapped file and what its parts mean. Immutable.
pub struct Model {
    gguf: Arc<Gguf>,
    descriptor: Descriptor,
    hyper: HyperParams,
    weights: Weights,
    frequencies: Frequencies,
}

impl Model {
    pub fn load(gguf: Arc<Gguf>) -> Result<Model> {
        let name = gguf.require_str("general.architecture")?;
        let descriptor = Descriptor::for_architecture(name, gguf.path())?;
        let hyper = HyperParams::read(&gguf, &descriptor)?;
        let weights = Weights::bind(&gguf, &descriptor, &hyper)?;
        let frequencies = Frequencies::new(
            hyper.n_rot,
            hyper.rope_base,
            hyper.rope_scale,
            weights.rope_factors.as_deref(),
        );
        Ok(Model { gguf, descriptor, hyper, weights, frequencies })
    }

    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    pub fn path(&self) -> &Path {
        self.gguf.path()
    }

    pub fn hyper(&self) -> &HyperParams {
        &self.hyper
    }

    pub fn n_vocab(&self) -> usize {
        self.weights.output.rows
    }

    fn pairing(&self) -> Pairing {
        match self.descriptor.parts.rope {
            Rope::Norm => Pairing::Adjacent,
            Rope::Neox => Pairing::Halves,
        }
    }

    /// Bytes of all routed experts' tensors, and of everything else.
    pub fn expert_and_dense_bytes(&self) -> (u64, u64) {
        let routed = |name: &str| name.contains("_exps.");
        let total = |want: bool| {
            let all = self.gguf.tensors().iter().filter(|t| routed(&t.name) == want);
            all.map(|t| t.n_bytes).sum()
        };
        (total(true), total(false))
    }
}
