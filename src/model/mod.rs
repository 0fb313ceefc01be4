//! A model: descriptor, hyper-parameters, weights, KV cache.

mod cost;
pub mod descriptor;
pub(crate) mod encoder;
pub mod granules;
pub(crate) mod hyper;
pub mod kv;
mod relative;
pub mod rope;
pub mod shares;
pub(crate) mod weights;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use crate::Result;
use crate::backend::ops::Frequencies;
use crate::experts::disk::IoKind;
use crate::experts::vram::VramTiers;
use crate::experts::{self, Counters, ExpertStore, LayerExperts, RamTier, Resident, StreamOptions};
use crate::gguf::Gguf;
use crate::policy::{Event, Profile};
use descriptor::Descriptor;
pub use hyper::HyperParams;
use weights::{Gate, Weights};

/// A model file whose parts are understood, with no memory committed yet: what a plan needs.
pub struct Bound {
    pub(crate) gguf: Gguf,
    pub(crate) descriptor: Descriptor,
    pub(crate) hyper: HyperParams,
    pub(crate) weights: Weights,
}

impl Bound {
    pub fn new(gguf: Gguf) -> Result<Bound> {
        let name = gguf.require_str("general.architecture")?;
        let descriptor = Descriptor::for_architecture(name, gguf.path())?;
        let hyper = HyperParams::read(&gguf, &descriptor)?;
        let weights = Weights::bind(&gguf, &descriptor, &hyper)?;
        Ok(Bound { gguf, descriptor, hyper, weights })
    }

    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    pub fn into_gguf(self) -> Gguf {
        self.gguf
    }

    pub fn hyper(&self) -> &HyperParams {
        &self.hyper
    }

    pub fn n_vocab(&self) -> usize {
        self.weights.output.weight.rows
    }

    /// The layers with routed experts.
    pub fn routed(&self) -> &[Option<LayerExperts>] {
        &self.weights.routed
    }

    /// Per layer: the dense FFN and the shared expert, each described as a one-expert layer.
    pub fn dense_experts(&self) -> [&[Option<LayerExperts>]; 2] {
        [&self.weights.dense, &self.weights.shared]
    }

    /// Experts that a token uses in a layer.
    pub fn k(&self) -> usize {
        self.hyper.routing.k.max(1)
    }

    /// The requirements of streaming, per layer.
    pub fn needs(&self) -> experts::Needs {
        experts::needs(&self.gguf, &self.weights.routed, self.k())
    }

    /// Slots and reads of streamed experts, for a budget of at least the minimum of `needs`.
    pub fn tier(&self, budget: u64) -> (experts::TierPlan, Box<dyn experts::Layout>) {
        experts::tier_of(&self.gguf, &self.weights.routed, self.k(), budget)
    }

    /// Bytes of all routed experts, and of everything else in the file's tensors.
    pub fn expert_and_dense_bytes(&self) -> (u64, u64) {
        self.weights.expert_and_dense_bytes(&self.gguf)
    }

    /// Everything is computed where it lies in the mapped file.
    pub fn in_place(self) -> Model {
        let gguf = Arc::new(self.gguf);
        let routed = Arc::new(Resident::new(gguf.clone(), self.weights.routed.clone()));
        Model::new(gguf, self.descriptor, self.hyper, self.weights, routed)
    }

    /// Everything is read to memory now; the file is mapped no longer.
    pub fn in_memory(mut self, progress: &mut dyn FnMut(u64)) -> Result<Model> {
        self.gguf = self.gguf.detached(|_| true, progress)?;
        Ok(self.in_place())
    }

    /// Routed experts come from disk as they are needed, everything else is read to memory now;
    /// the file is mapped no longer, so whatever happens to it can only fail a load.
    pub fn streamed(self, options: &StreamOptions, progress: &mut dyn FnMut(u64)) -> Result<Model> {
        let Bound { gguf, descriptor, hyper, weights } = self;
        let tensors: HashSet<usize> =
            weights.routed.iter().flatten().flat_map(LayerExperts::tensors).collect();
        let gguf = gguf.detached(|tensor| !tensors.contains(&tensor), progress)?;
        let routed = Arc::new(RamTier::new(&gguf, &weights.routed, options)?);
        Ok(Model::new(Arc::new(gguf), descriptor, hyper, weights, routed))
    }
}

/// A loaded model. Immutable, but for what its expert store holds.
pub struct Model {
    pub(crate) gguf: Arc<Gguf>,
    pub(crate) descriptor: Descriptor,
    pub(crate) hyper: HyperParams,
    pub(crate) weights: Weights,
    /// For short contexts and, where it differs, for long ones.
    pub(crate) frequencies: [Frequencies; 2],
    /// Routed experts, in memory.
    pub(crate) routed: Arc<dyn ExpertStore>,
    /// Those of them that devices hold.
    pub(crate) tiers: Option<Arc<VramTiers>>,
    /// Dense layers, each the only expert of its own.
    pub(crate) dense: Resident,
    pub(crate) shared: Resident,
}

impl Model {
    fn new(
        gguf: Arc<Gguf>,
        descriptor: Descriptor,
        hyper: HyperParams,
        weights: Weights,
        routed: Arc<dyn ExpertStore>,
    ) -> Model {
        let frequencies =
            [1, usize::MAX].map(|n_ctx| hyper.rope.frequencies(&weights.rope_factors, n_ctx));
        let dense = Resident::new(gguf.clone(), weights.dense.clone());
        let shared = Resident::new(gguf.clone(), weights.shared.clone());
        Model { gguf, descriptor, hyper, weights, frequencies, routed, tiers: None, dense, shared }
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
        self.weights.output.weight.rows
    }

    /// How far pairs turn in sessions of `n_ctx` positions.
    pub(crate) fn frequencies(&self, n_ctx: usize) -> &Frequencies {
        &self.frequencies[usize::from(self.hyper.rope.is_long(n_ctx))]
    }

    /// A layer's routed experts, where it has any.
    pub fn routed_experts(&self, layer: usize) -> Option<&LayerExperts> {
        self.weights.routed[layer].as_ref()
    }

    /// Bytes of all routed experts, and of everything else in the file's tensors.
    pub fn expert_and_dense_bytes(&self) -> (u64, u64) {
        self.weights.expert_and_dense_bytes(&self.gguf)
    }

    /// Counters of the moves from disk to memory so far; `None` if experts are in place.
    pub fn disk_counters(&self) -> Option<Counters> {
        self.routed.counters()
    }

    /// The same from memory to devices; `None` where there are no experts on any.
    pub fn link_counters(&self) -> Option<Counters> {
        self.tiers.as_ref().map(|tiers| tiers.counters())
    }

    /// How experts are read from disk; `None` where they are in place.
    pub fn io(&self) -> Option<IoKind> {
        self.routed.io()
    }

    /// Panics if the expert store breaks an invariant; answers whether it is at rest.
    pub fn check_experts(&self) -> bool {
        self.routed.check_integrity() && self.tiers.as_ref().is_none_or(|t| t.check_integrity())
    }

    /// Tells the policy, if there is one, what happened to a timeline.
    pub fn publish(&self, event: &Event) {
        self.routed.observe(event);
        if let Some(tiers) = &self.tiers {
            tiers.observe(event);
        }
    }

    /// The state that the policy has learned.
    pub fn learned(&self) -> Profile {
        let mut profile = Profile::default();
        self.routed.save(&mut profile);
        if let Some(tiers) = &self.tiers {
            tiers.save(&mut profile);
        }
        profile
    }

    /// The policy's decision and its reason.
    pub fn verdict(&self) -> Option<String> {
        self.tiers.as_ref().and_then(|tiers| tiers.verdict()).or_else(|| self.routed.verdict())
    }

    /// The store of a layer's routed experts, or of the dense layer.
    pub(crate) fn experts_of(&self, gate: &Gate) -> &dyn ExpertStore {
        match gate {
            Gate::Dense => &self.dense,
            Gate::Router(_) => &*self.routed,
        }
    }
}
