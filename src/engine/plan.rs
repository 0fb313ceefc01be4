//! What a model takes in memory and where it is put: what `--dry-run` prints.

use super::EngineOptions;
use super::budget::{self, Place, Sizes};
use crate::Result;
use crate::experts::LayerExperts;
use crate::experts::link::IoKind;
use crate::gguf::Gguf;
use crate::model::Bound;
use crate::policy::PolicySpec;

#[derive(Clone, Debug)]
pub struct MemoryPlan {
    pub sizes: Sizes,
    pub place: Place,
    pub io: IoKind,
    pub policy: PolicySpec,
    /// Tokens of context that the KV cache is for.
    pub n_ctx: usize,
    /// Layers with routed experts, experts of each and how many of them a token uses.
    pub n_moe_layers: usize,
    pub n_experts: usize,
    pub k: usize,
    /// What the computation of one token reads.
    pub expert_bytes_per_token: u64,
    pub dense_bytes_per_token: u64,
}

impl MemoryPlan {
    pub(super) fn new(
        model: &Bound,
        options: &EngineOptions,
        n_ctx: usize,
        kv_bytes: u64,
        available: Option<u64>,
    ) -> Result<MemoryPlan> {
        let hyper = model.hyper();
        let routed = || model.routed().iter().flatten();
        let (expert_bytes, dense_bytes) = model.expert_and_dense_bytes();
        let needs = model.needs();
        let sizes = Sizes {
            expert_bytes,
            slot_bytes: needs.all_bytes(),
            dense_bytes,
            kv_bytes,
            minimum_bytes: needs.minimum_bytes(),
            available,
        };
        let of_token = |layer: &LayerExperts| layer.n_experts.min(model.k()) * layer.expert_bytes();
        Ok(MemoryPlan {
            sizes,
            place: budget::plan(options.ram, options.io, &sizes)?,
            io: options.io,
            policy: options.policy,
            n_ctx,
            n_moe_layers: routed().count(),
            n_experts: hyper.routing.n_experts,
            k: hyper.routing.k,
            expert_bytes_per_token: routed().map(of_token).sum::<usize>() as u64,
            dense_bytes_per_token: dense_bytes - unread_bytes(model.gguf()).min(dense_bytes),
        })
    }

    /// The part of all experts that the slots hold; 1 in place.
    pub fn resident_share(&self) -> f64 {
        match self.place {
            Place::InPlace => 1.0,
            Place::Streamed { budget } => {
                (budget as f64 / self.sizes.slot_bytes.max(1) as f64).min(1.0)
            }
        }
    }
}

/// Of the token embedding a token reads one row, unless the same tensor serves as the output.
fn unread_bytes(file: &Gguf) -> u64 {
    match file.tensor("output.weight") {
        Some(_) => file.tensor("token_embd.weight").map_or(0, |t| t.n_bytes),
        None => 0,
    }
}
