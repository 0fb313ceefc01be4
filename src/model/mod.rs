//! A model: descriptor, hyper-parameters, weights, KV cache.

pub mod adapters;
pub(crate) mod adjugate;
pub(crate) mod compressed;
mod cost;
pub mod descriptor;
pub(crate) mod encoder;
pub mod granules;
pub(crate) mod heads;
pub(crate) mod hyper;
pub(crate) mod indexer;
pub mod input_sums;
pub mod kv;
mod layers;
pub(crate) mod next_token;
pub(crate) mod ngrams;
pub mod recurrent;
mod relative;
pub mod rope;
pub mod shares;
pub(crate) mod streams;
mod unread;
pub(crate) mod values;
pub(crate) mod weights;

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::Result;
use crate::backend::ops::DEVICE_SOURCES_MAX;
use crate::backend::ops::Frequencies;
use crate::experts::peers::Peers;
use crate::experts::{
    self, ExpertStore, Hierarchy, LayerExperts, RamTier, Resident, StreamOptions,
};
use crate::gguf::{Gguf, TensorInfo};
use adapters::Adapters;
use descriptor::Descriptor;
pub use hyper::HyperParams;
use input_sums::InputSums;
use next_token::NextTokenHead;
use rope::RopeFactors;
use weights::{Gate, NextTokenWeights, Weights};

/// A model file whose parts are understood, with no memory committed yet: what a plan needs.
pub struct Bound {
    pub(crate) gguf: Gguf,
    pub(crate) descriptor: Descriptor,
    pub(crate) hyper: HyperParams,
    pub(crate) weights: Weights,
    pub(crate) next: Option<NextTokenWeights>,
    /// Nothing but routed experts is computed.
    pub(crate) only_experts: bool,
}

impl Bound {
    pub fn new(gguf: Gguf) -> Result<Bound> {
        let name = gguf.require_str("general.architecture")?;
        let descriptor = Descriptor::for_architecture(name, gguf.path())?;
        unread::refuse_rotations(&gguf)?;
        let hyper = HyperParams::read(&gguf, &descriptor)?;
        let weights = Weights::bind(&gguf, &descriptor, &hyper)?;
        let next = NextTokenWeights::bind(&gguf, &descriptor, &hyper, &weights)?;
        unread::warn(&gguf, &descriptor);
        Ok(Bound { gguf, descriptor, hyper, weights, next, only_experts: false })
    }

    /// Keys of the architecture that nothing has read and that may change what it computes.
    pub fn unread_keys(&self) -> Vec<&str> {
        unread::keys(&self.gguf, &self.descriptor)
    }

    /// Whether a layer predicts the token after the next.
    pub fn predicts_next(&self) -> bool {
        self.next.is_some()
    }

    /// Whether the architecture may have such a layer and the file has none.
    pub fn lacks_next(&self) -> bool {
        self.descriptor.parts.predicts_next && self.next.is_none()
    }

    /// Leaves out the layer that predicts the token after the next.
    pub fn drop_next(&mut self) {
        self.next = None;
    }

    /// Leaves out everything but routed experts.
    pub fn drop_dense(&mut self) {
        self.only_experts = true;
        self.drop_next();
    }

    /// Whether a tensor stays in the file: it is of a layer that predicts further tokens, which
    /// nothing reads, or the table of n-grams, rows of which are read as hashes name them.
    pub(crate) fn stays_in_file(&self, tensor: usize) -> bool {
        if self.weights.ngram_tensor() == Some(tensor) {
            return true;
        }
        let number = self.gguf.tensors()[tensor].name.strip_prefix("blk.");
        let layer = number.and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        let n_read = self.hyper.n_layers + usize::from(self.next.is_some());
        self.hyper.encoder.is_none() && layer.is_some_and(|layer| layer >= n_read)
    }

    fn left_bytes(&self) -> u64 {
        let tensors = self.gguf.tensors().iter().enumerate();
        tensors.filter(|(i, _)| self.stays_in_file(*i)).map(|(_, tensor)| tensor.n_bytes).sum()
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

    /// All experts that tiers hold, by their numbers there: [`HyperParams::tier_layer`].
    pub fn in_tier(&self) -> Vec<Option<LayerExperts>> {
        let mut all = self.weights.all_in_tier(&self.hyper);
        if self.only_experts {
            // Of values this machine is not asked.
            let is_of_values = |number: usize| self.hyper.layer_in_tier(number).1;
            let values = all.iter_mut().enumerate().filter(|(number, _)| is_of_values(*number));
            values.for_each(|(_, experts)| *experts = None);
        }
        all
    }

    /// Per layer: the dense FFN and the shared expert, each described as a one-expert layer.
    pub fn dense_experts(&self) -> [&[Option<LayerExperts>]; 2] {
        [&self.weights.dense, &self.weights.shared]
    }

    /// `has_kernels` of a layer of this model.
    pub fn has_kernels(&self, layer: usize, n_ctx: usize) -> bool {
        has_kernels(&self.hyper, &self.weights, layer, n_ctx)
    }

    /// Experts that a token uses in a layer, at most.
    pub fn k(&self) -> usize {
        let values = self.hyper.routing.values.map_or(0, |values| values.k);
        self.hyper.routing.k.max(values).max(1)
    }

    /// The experts that tiers hold, layer by layer, and how many of them a token uses.
    pub fn used(&self) -> impl Iterator<Item = (&LayerExperts, usize)> {
        let routed = self.weights.routed.iter().flatten();
        let routed = routed.map(|layer| (layer, layer.n_experts.min(self.hyper.routing.k.max(1))));
        let values = (0..self.hyper.n_layers).filter_map(|l| self.weights.values_of(l));
        routed.chain(values.map(|values| (&values.experts, values.k)))
    }

    /// The requirements of streaming, per layer.
    pub fn needs(&self) -> experts::Needs {
        experts::needs(&self.gguf, &self.in_tier(), self.k())
    }

    /// Slots and reads of streamed experts, for a budget of at least the minimum of `needs`: of
    /// layers as traces have them, without the experts that make values.
    pub fn tier(&self, budget: u64) -> (experts::TierPlan, Box<dyn experts::Layout>) {
        experts::tier_of(&self.gguf, &self.weights.routed, self.k(), budget)
    }

    /// Bytes of all routed experts, and of everything else that is read to memory.
    pub fn expert_and_dense_bytes(&self) -> (u64, u64) {
        let (experts, dense) = self.weights.expert_and_dense_bytes(&self.gguf);
        (experts, if self.only_experts { 0 } else { dense - self.left_bytes() })
    }

    /// Everything is computed where it lies in the mapped file.
    pub fn in_place(self) -> Model {
        let gguf = Arc::new(self.gguf);
        let routed = Resident::new(gguf.clone(), self.weights.all_in_tier(&self.hyper));
        let hierarchy = Hierarchy::in_place(routed);
        let next = self.next.map(|next| NextTokenHead::new(&gguf, &self.descriptor, next));
        Model::new(gguf, self.descriptor, self.hyper, self.weights, hierarchy).with(next)
    }

    /// Everything is read to memory now; the file is mapped no longer. `progress` is told the bytes
    /// that are read so far, and of how many.
    pub fn in_memory(mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<Model> {
        let n = self.gguf.tensors().len();
        let keep: Vec<bool> = (0..n).map(|tensor| !self.stays_in_file(tensor)).collect();
        self.gguf = self.gguf.detached(|tensor| keep[tensor], progress)?;
        Ok(self.in_place())
    }

    /// Routed experts come from disk as they are needed, everything else is read to memory now;
    /// the file is mapped no longer, so whatever happens to it can only fail a load.
    pub fn streamed(
        self,
        options: &StreamOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Model> {
        let in_tier = self.in_tier();
        let routed = self.weights.all_in_tier(&self.hyper);
        let routed = routed.iter().flatten().flat_map(LayerExperts::tensors);
        let unread = (0..self.gguf.tensors().len()).filter(|tensor| self.stays_in_file(*tensor));
        let left: HashSet<usize> = routed.chain(unread).collect();
        let Bound { gguf, descriptor, hyper, weights, next, only_experts } = self;
        let keeps = |tensor| !only_experts && !left.contains(&tensor);
        let gguf = gguf.detached(keeps, progress)?;
        let hierarchy = Hierarchy::streamed(RamTier::new(&gguf, &in_tier, options)?);
        let gguf = Arc::new(gguf);
        let next = next.map(|next| NextTokenHead::new(&gguf, &descriptor, next));
        Ok(Model::new(gguf, descriptor, hyper, weights, hierarchy).with(next))
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
    /// For sliding layers, where they differ.
    pub(crate) sliding_frequencies: Option<Frequencies>,
    /// The tiers that hold the routed experts.
    pub(crate) hierarchy: Arc<Hierarchy>,
    /// Dense layers, each the only expert of its own.
    pub(crate) dense: Resident,
    pub(crate) shared: Resident,
    /// The layer that predicts the token after the next.
    pub(crate) next: Option<Box<NextTokenHead>>,
    /// Adapters that sessions take parts of; the CPU computes them.
    pub(crate) adapters: Option<Adapters>,
    /// Present where the inputs of matrices are summed; the CPU computes them.
    pub(crate) input_sums: Option<InputSums>,
}

impl Model {
    fn new(
        gguf: Arc<Gguf>,
        descriptor: Descriptor,
        hyper: HyperParams,
        weights: Weights,
        hierarchy: Hierarchy,
    ) -> Model {
        let frequencies =
            [1, usize::MAX].map(|n_ctx| hyper.rope.frequencies(&weights.rope_factors, n_ctx));
        // The file's factors are a scaling of the other layers'.
        let none = RopeFactors::default();
        let is_scaled = !descriptor.parts.sliding_rope_is_unscaled;
        let factors = if is_scaled { &weights.rope_factors } else { &none };
        let sliding =
            (hyper.sliding_rope != hyper.rope).then(|| hyper.sliding_rope.frequencies(factors, 1));
        let dense = Resident::new(gguf.clone(), weights.dense.clone());
        let shared = Resident::new(gguf.clone(), weights.shared.clone());
        let hierarchy = Arc::new(hierarchy);
        Model {
            gguf,
            descriptor,
            hyper,
            weights,
            frequencies,
            sliding_frequencies: sliding,
            hierarchy,
            dense,
            shared,
            next: None,
            adapters: None,
            input_sums: None,
        }
    }

    /// Lets other machines compute some of the experts. Called while nothing else has the tiers.
    pub fn with_peers(mut self, peers: Option<Arc<Peers>>) -> Model {
        let hierarchy = Arc::get_mut(&mut self.hierarchy);
        hierarchy.expect("a model that is being loaded").set_peers(peers);
        self
    }

    fn with(self, next: Option<NextTokenHead>) -> Model {
        Model { next: next.map(Box::new), ..self }
    }

    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// The table whose rows are read from the file as tokens ask for them.
    pub(crate) fn row_table(&self) -> Option<&TensorInfo> {
        self.weights.ngram_tensor().map(|tensor| &self.gguf.tensors()[tensor])
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

    /// Whether devices have kernels for all parts of a layer, in contexts of `n_ctx`; the CPU
    /// computes one without.
    pub(crate) fn has_kernels(&self, layer: usize, n_ctx: usize) -> bool {
        has_kernels(&self.hyper, &self.weights, layer, n_ctx)
    }

    /// Whether a device that takes these layers computes a layer: not without its keys or what it
    /// sees of them.
    pub(crate) fn is_on_device(&self, layer: usize, layers: &Range<usize>, n_ctx: usize) -> bool {
        let has_leader = layers.contains(&self.hyper.leaders(n_ctx)[layer]);
        layers.contains(&layer) && has_leader && self.has_kernels(layer, n_ctx)
    }

    /// A layer's routed experts, where it has any.
    pub fn routed_experts(&self, layer: usize) -> Option<&LayerExperts> {
        self.weights.routed[layer].as_ref()
    }

    /// The tiers that hold the routed experts.
    pub fn hierarchy(&self) -> &Arc<Hierarchy> {
        &self.hierarchy
    }

    /// The store of a layer's routed experts, or of the dense layer.
    pub(crate) fn experts_of(&self, gate: &Gate) -> &dyn ExpertStore {
        match gate {
            Gate::Dense(_) => &self.dense,
            Gate::Router(_) => &**self.hierarchy.host(),
        }
    }
}

/// Whether devices have kernels for all parts of a layer, in contexts of `n_ctx`, and of the layers
/// with which it shares keys and values or what an indexer has chosen.
fn has_kernels(hyper: &HyperParams, weights: &Weights, layer: usize, n_ctx: usize) -> bool {
    let leaders = hyper.leaders(n_ctx);
    let mut alike = (0..hyper.n_layers).filter(|l| leaders[*l] == leaders[layer]);
    // Streams that layers leave behind, and the present one.
    let n_streams = hyper.n_layers.checked_div(hyper.kept_every).unwrap_or(0) + 2;
    let has_streams = n_streams <= DEVICE_SOURCES_MAX;
    alike.all(|l| weights.layers[l].has_kernels()) && has_streams
}
