//! A model on a GPU: the dense weights, the KV cache and the layer loop are on the device, routed
//! experts in VRAM or on the CPU. Layers that do not fit run on the CPU.
//!
//! `GpuModel::forward` builds a `GpuPass`, which has all that one pass reads and changes.
//! `layer_loop` runs it, layer by layer; `layer` is one layer on a page; its stages have a file
//! each.

mod acts;
mod attend;
mod attention;
mod bump;
mod cache;
mod cache_rows;
mod compressed;
mod compressed_layers;
mod cross_attention;
mod decode_pipeline;
mod device_model;
mod device_moe;
mod devices;
mod expanded;
mod expander;
mod expert_parallel;
mod experts;
mod gated_delta;
mod graphs;
mod halves;
mod hybrid_moe;
mod index_layers;
mod indexer;
mod kda;
mod layer;
mod layer_inputs;
mod layer_loop;
mod layers;
mod logits;
mod marks;
mod mixer;
mod mixer_layout;
mod mla;
mod moe;
mod ngrams;
mod observe;
mod ops;
mod pack;
mod pass;
pub mod placement;
mod recurrent;
mod steps;
mod streams;
mod token_graph;
mod upload;
mod weights;
mod workspace;

pub use cache::GpuCache;
pub use devices::{DeviceRests, Devices};
pub use halves::multiplies_halves;
pub use pass::Caches;
pub use placement::InPlace;
pub use steps::GraphCounts;

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::gpu::Device;
use crate::experts::LayerExperts;
use crate::experts::vram::{Dealt, Own, Owners, PinnedTier, VramOptions, VramTier, VramTiers};
use crate::forward::gpu::cache::CacheCopies;
use crate::forward::gpu::decode_pipeline::queue::DecodePipeline;
use crate::forward::gpu::device_model::{DenseOptions, DeviceModel};
use crate::forward::gpu::device_moe::route::RouteDownload;
use crate::forward::gpu::devices::PassState;
use crate::forward::gpu::expert_parallel::peer::Peer;
use crate::forward::gpu::hybrid_moe::division::HybridMoe;
use crate::forward::gpu::pass::{GpuPass, Role};
use crate::forward::gpu::steps::Steps;
use crate::forward::gpu::upload::Staging;
use crate::forward::gpu::workspace::WorkspaceLayout;
use crate::forward::logits::LOGITS_ROWS;
use crate::forward::{Batch, Buffers, Outputs};
use crate::model::kv::CacheType;
use crate::model::{Bound, Model};
use crate::policy::{PolicySpec, Profile};
use std::ops::Range;
use std::sync::Arc;

/// Which parts of a model devices hold.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// The layers whose dense weights and KV cache are on the device: all, or the last ones of the
    /// model.
    pub layers: Range<usize>,
    /// Whether the output head is on the device.
    pub head: bool,
    /// By layer: whether devices may hold its routed experts.
    pub experts: Vec<bool>,
    /// By device: bytes of VRAM for routed experts.
    pub expert_budgets: Vec<u64>,
    pub policy: PolicySpec,
    pub profile: Profile,
    /// See `StreamOptions`.
    pub lockstep: bool,
    /// The largest micro-batch (a whole text of a model with an encoder), and the context length.
    pub n_ubatch: usize,
    pub n_ctx: usize,
    /// Whether attention of prompts has the bits that it has in decode: without tensor cores.
    pub is_exact: bool,
    /// The share of missing experts that the CPU computes, for tests. By default it depends on
    /// measured times.
    pub cpu_share: Option<f32>,
    /// When kernels read missing experts in place.
    pub in_place: InPlace,
    /// Whether a token is queued layer by layer where it could be one graph, for tests.
    pub by_layer: bool,
}

/// A model on its devices. The first device has all but experts, and any device may hold experts.
/// Passes run one after the other.
pub struct GpuModel {
    /// Declared before the device's memory, which it works with, so that it is dropped first.
    state: PassState,
    dev: DeviceModel,
    /// For the caches of all sessions.
    copies: Arc<CacheCopies>,
}

/// Bytes of the staging buffer for uploads, or the largest upload.
const STAGING_BYTES: usize = 4 << 20;

impl Bound {
    /// Bytes of the first device's buffers for micro-batches of `n` tokens in contexts of `n_ctx`,
    /// with `n_peers` further devices. The CPU's buffers have the same size, except for products of
    /// gate and up, which only threads have there.
    pub fn buffer_bytes(&self, n: usize, n_ctx: usize, n_peers: usize) -> usize {
        WorkspaceLayout::new(&self.hyper, &self.weights, n, n_ctx, n_peers).n_bytes()
    }
}

impl Model {
    /// Allocates the devices' memory and uploads what they hold.
    pub fn onto(&mut self, gpus: &[Device], options: &GpuOptions) -> Result<GpuModel> {
        let model = self.load(gpus, options)?;
        let hierarchy = Arc::get_mut(&mut self.hierarchy);
        hierarchy.expect("a model that is being loaded").set_vram(model.dev.tiers.clone());
        Ok(model)
    }

    fn load(&self, gpus: &[Device], options: &GpuOptions) -> Result<GpuModel> {
        assert_eq!(gpus.len(), options.expert_budgets.len());
        let (gpu, n) = (&gpus[0], options.n_ubatch);
        let dense = DenseOptions {
            layers: options.layers.clone(),
            head: options.head,
            n_ubatch: n,
            n_ctx: options.n_ctx,
            n_peers: gpus.len() - 1,
        };
        let mut dev = DeviceModel::upload(self, gpu, &dense)?;
        let has_experts = |l: usize| options.experts[l] && dev.layers[l].is_some();
        let has_experts: Vec<bool> = (0..dev.layers.len()).map(has_experts).collect();
        dev.is_exact = options.is_exact;
        dev.by_layer = options.by_layer || token_graph::is_off();
        dev.tiers = self.new_tiers(gpus, options, &has_experts)?;
        let peers = self.new_peers(gpus, dev.tiers.as_ref(), n)?;
        let row = 4 * self.hyper.n_embd;
        let down = n * (2 * row + 4 * (self.hyper.routing.n_experts + 2 * self.hyper.routing.k))
            + 4 * self.n_vocab() * LOGITS_ROWS.min(n)
            + (4 << 10);
        // The residual stream of a micro-batch, its cosines and sines, its layers' own inputs, or
        // its table of experts.
        let layout = &dev.layout;
        let kept = &layout.kept[0];
        let tables = [&kept.cos_sin, &kept.sliding_cos_sin, &kept.temperature];
        let largest = tables.map(|table| table.len()).into_iter().max().unwrap_or(0);
        let largest = largest.max(kept.inputs.len()).max(n * row);
        let largest = largest.max(layout.ffn.experts.granules.len());
        let staging = Staging::new(gpu, STAGING_BYTES.max(largest), down)?;
        let hybrid = HybridMoe::new(gpu, options.cpu_share, options.in_place, gpus.len())?;
        let pipeline = DecodePipeline::new(gpu, self)?;
        let route = RouteDownload::new(gpu, &self.hyper, n)?;
        let copies = Arc::new(CacheCopies::new(gpu)?);
        let (steps, graph_counts) = (Steps::default(), GraphCounts::default());
        let state = PassState { peers, staging, hybrid, pipeline, route, steps, graph_counts };
        Ok(GpuModel { state, dev, copies })
    }

    /// `None` if no device holds experts.
    fn new_tiers(
        &self,
        gpus: &[Device],
        options: &GpuOptions,
        on_device: &[bool],
    ) -> Result<Option<Arc<VramTiers>>> {
        let routed = self.weights.routed.iter().zip(on_device);
        let layers: Vec<_> = routed.map(|(l, on)| l.filter(|_| *on)).collect();
        let budgets = &options.expert_budgets;
        if budgets.iter().all(|budget| *budget == 0) || layers.iter().all(Option::is_none) {
            return Ok(None);
        }
        let pinned = PinnedTier::start(&gpus[0], self.hierarchy.host()).map(Arc::new);
        let vram = |gpu: &Device, layers: &[Option<LayerExperts>], budget, own| {
            let options = VramOptions {
                profile: options.profile.clone(),
                lockstep: options.lockstep,
                source: pinned.clone(),
                own,
                ..VramOptions::new(budget, options.policy, self.hyper.routing.k.max(1))
            };
            VramTier::new(gpu, layers, self.hierarchy.host().clone(), &options)
        };
        if let [budget] = budgets[..] {
            let vram = vram(&gpus[0], &layers, budget, None)?;
            return Ok(Some(Arc::new(VramTiers::one(vram))));
        }
        let dealt = |l: &LayerExperts| {
            let slots = crate::experts::vram::slots(l, 1);
            let expert_bytes = (slots.n_granules * slots.slot_bytes) as u64;
            Dealt { n_experts: l.n_experts, expert_bytes }
        };
        let dealt: Vec<_> = layers.iter().map(|layer| layer.as_ref().map(dealt)).collect();
        let owners = Arc::new(Owners::new(&dealt, budgets));
        let tier = |(device, gpu): (usize, &Device)| {
            let own = Own { owners: owners.clone(), device };
            let has_some = |l: usize| layers[l].is_some() && own.n_of(l) > 0;
            let layers = layers.iter().enumerate();
            let layers: Vec<_> = layers.map(|(l, of)| of.filter(|_| has_some(l))).collect();
            if layers.iter().all(Option::is_none) {
                return Ok(None);
            }
            let vram = vram(gpu, &layers, budgets[device], Some(own.clone()))?;
            Ok(Some(Arc::new(vram)))
        };
        let of_device = gpus.iter().enumerate().map(tier).collect::<Result<_>>()?;
        Ok(Some(Arc::new(VramTiers::several(of_device, owners.clone()))))
    }

    /// The devices beside the first that hold experts.
    fn new_peers(
        &self,
        gpus: &[Device],
        tiers: Option<&Arc<VramTiers>>,
        n: usize,
    ) -> Result<Vec<Peer>> {
        let Some(tiers) = tiers else { return Ok(Vec::new()) };
        let mut peers = Vec::new();
        for (device, gpu) in gpus.iter().enumerate().skip(1) {
            if let Some(vram) = tiers.get(device) {
                let has = |l: usize| vram.has(l);
                peers.push(Peer::new(self, &gpus[0], gpu, device, &has, n)?);
            }
        }
        Ok(peers)
    }
}

/// The listeners of a pass.
pub struct Observers<'a> {
    pub outputs: &'a mut dyn Outputs,
    pub rests: &'a mut dyn DeviceRests,
}

impl Devices<'_> {
    /// `Model::forward`, where the device computes the layers that it holds.
    pub fn forward<'a>(
        &'a mut self,
        model: &'a Model,
        cpu: &'a Cpu,
        batch: &'a Batch,
        caches: Caches<'a>,
        b: &'a mut Buffers,
        observers: Observers<'a>,
    ) -> Result<()> {
        layer_loop::run(&mut self.pass(model, cpu, batch, caches, b, observers))
    }

    /// `Model::encode`, where the device computes the layers that it holds.
    pub fn encode<'a>(
        &'a mut self,
        model: &'a Model,
        cpu: &'a Cpu,
        batch: &'a Batch,
        caches: Caches<'a>,
        b: &'a mut Buffers,
        observers: Observers<'a>,
    ) -> Result<()> {
        let encoder_caches = model.encoder_caches(batch);
        let pass = self.pass(model, cpu, batch, caches, b, observers);
        layer_loop::run(&mut GpuPass { role: Role::Source, encoder_caches, ..pass })
    }

    /// A pass of the decoder, or of a model without an encoder.
    fn pass<'a>(
        &'a mut self,
        model: &'a Model,
        cpu: &'a Cpu,
        batch: &'a Batch,
        caches: Caches<'a>,
        b: &'a mut Buffers,
        observers: Observers<'a>,
    ) -> GpuPass<'a> {
        let role = match model.hyper.encoder {
            None => Role::Only,
            Some(_) => Role::Answer,
        };
        GpuPass {
            batch,
            role,
            model,
            dev: self.dev,
            cpu,
            caches,
            encoder_caches: Vec::new(),
            b,
            state: self.state,
            outputs: observers.outputs,
            rests: observers.rests,
            on_device: false,
        }
    }
}

impl GpuModel {
    pub fn devices(&mut self) -> Devices<'_> {
        Devices { dev: &self.dev, state: &mut self.state }
    }

    pub fn graph_counts(&self) -> &GraphCounts {
        &self.state.graph_counts
    }

    /// The first device, which has the dense weights and the KV cache.
    pub fn device(&self) -> &Device {
        self.dev.stream.gpu()
    }

    /// A KV cache for one session, with keys and values of these types.
    pub fn new_cache(
        &self,
        model: &Model,
        n_ctx: usize,
        types: [CacheType; 2],
    ) -> Result<GpuCache> {
        let hyper = &model.hyper;
        let on_device = |slot: usize| self.dev.layers[hyper.layer_of_slot(slot)].is_some();
        let shapes = hyper.device_cache_shapes(n_ctx);
        let cache = GpuCache::new(&self.copies, &shapes, &on_device, n_ctx, types)?;
        // Behind the heads of keys are an indexer's, and nothing is behind those of values.
        let by_head = hyper.choosing_indexer(n_ctx).filter(|indexer| indexer.by_head);
        let own = by_head.iter().flat_map(|indexer| indexer.own.iter().enumerate());
        let own = own.filter(|(l, own)| **own && on_device(*l));
        own.map(|(l, _)| l).try_for_each(|l| cache.clear_last_values(l))?;
        Ok(cache)
    }
}
