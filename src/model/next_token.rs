//! The layer that predicts the token after the next, as a model of its own whose experts are always
//! in memory. It shares the file with the model that it belongs to.

use std::sync::Arc;

use super::Model;
use super::descriptor::Descriptor;
use super::kv::{CacheType, KvCache};
use super::weights::{Linear, NextTokenWeights, Norm};
use crate::experts::{Hierarchy, Resident};
use crate::gguf::Gguf;

pub struct NextTokenHead {
    pub(crate) model: Model,
    pub(crate) embedding_norm: Norm,
    pub(crate) hidden_norm: Norm,
    /// [n_embd, 2 · n_embd]
    pub(crate) input: Linear,
}

impl NextTokenHead {
    pub(super) fn new(
        gguf: &Arc<Gguf>,
        descriptor: &Descriptor,
        bound: NextTokenWeights,
    ) -> NextTokenHead {
        let NextTokenWeights { hyper, weights, embedding_norm, hidden_norm, input } = bound;
        let routed = Resident::new(gguf.clone(), weights.all_in_tier(&hyper));
        let hierarchy = Hierarchy::in_place(routed);
        let model = Model::new(gguf.clone(), descriptor.clone(), hyper, weights, hierarchy);
        NextTokenHead { model, embedding_norm, hidden_norm, input }
    }

    pub fn n_embd(&self) -> usize {
        self.model.hyper.n_embd
    }

    /// An empty cache of this many positions.
    pub fn new_cache(&self, n: usize, [k, v]: [CacheType; 2]) -> KvCache {
        KvCache::new(&self.model.hyper.cache_shapes(), n, k, v)
    }
}
