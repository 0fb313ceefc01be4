//! A model on a GPU: dense weights, KV cache and the layer loop there, experts in VRAM or on the
//! CPU, layers that have no room on the CPU altogether.

mod acts;
mod attention;
mod cache;
mod decode_pipeline;
mod encoder;
mod expert_parallel;
mod experts;
mod front;
mod gated_delta;
mod hybrid_moe;
mod layer;
mod layers;
mod moe;
mod ops;
mod pass;
pub mod placement;
mod upload;
mod weights;
mod workspace;

pub use cache::GpuCache;

use crate::Result;
use crate::backend::gpu::{Device, DeviceBuffer, Stream};
use crate::cancel::Cancel;
use crate::experts::LayerExperts;
use crate::experts::vram::{Dealt, GranuleLayout, Own, Owners, VramOptions, VramTier, VramTiers};
use crate::forward::gpu::decode_pipeline::DecodePipeline;
use crate::forward::gpu::expert_parallel::Peer;
use crate::forward::gpu::hybrid_moe::Hybrid;
use crate::forward::gpu::upload::Staging;
use crate::forward::gpu::workspace::{Workspace, WorkspaceLayout};
use crate::model::kv::CacheType;
use crate::model::{Bound, Model};
use crate::policy::{PolicySpec, Profile};
use layers::{GpuEncoder, GpuLayer, GpuNorm, GpuOnly};
use ops::Ops;
use std::ops::Range;
use std::sync::Arc;
use weights::{GpuLinear, GpuWeights, Packer};

/// What of a model a device takes.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// The layers whose dense weights and KV cache are on the device; the last ones of the model,
    /// if not all.
    pub layers: Range<usize>,
    /// Whether the output head is.
    pub head: bool,
    /// By layer: whether its routed experts may be on the device.
    pub experts: Vec<bool>,
    /// Bytes of VRAM for them, of each device.
    pub expert_budgets: Vec<u64>,
    pub policy: PolicySpec,
    pub profile: Profile,
    /// See `StreamOptions`.
    pub lockstep: bool,
    /// Tokens computed at once, a whole text of a model with an encoder; and tokens of context.
    pub n_ubatch: usize,
    pub n_ctx: usize,
    /// The part of a layer's experts that the CPU computes, for tests; by what things take if not
    /// given.
    pub cpu_share: Option<f32>,
}

/// What a pass reads and nothing changes.
pub struct DeviceModel {
    stream: Stream,
    ops: Ops,
    layout: WorkspaceLayout,
    workspace: Workspace,
    weights: GpuWeights,
    /// Addresses of the granules of experts that every token goes to.
    tables: DeviceBuffer,
    /// One for each of the model's layers.
    layers: Vec<Option<GpuLayer>>,
    encoder: Option<GpuEncoder>,
    head: Option<(GpuNorm, GpuLinear)>,
    /// How granules of routed experts lie.
    layouts: Vec<Option<GranuleLayout>>,
    tiers: Option<Arc<VramTiers>>,
}

/// What devices have of a model, and what a pass works with there: all but experts is on the first
/// one. Passes follow one another.
pub struct GpuModel {
    /// Before what they work with on the first device.
    peers: Vec<Peer>,
    dev: DeviceModel,
    staging: Staging,
    hybrid: Hybrid,
    pipeline: DecodePipeline,
    on_device: Range<usize>,
}

/// What goes up between two waits, unless one piece is larger.
const STAGING_BYTES: usize = 4 << 20;

impl Bound {
    /// What buffers of micro-batches of `n` tokens take in contexts of `n_ctx`, on a first device
    /// beside so many peers; those of the CPU are the same, but for products of gate and up, which
    /// only threads have there.
    pub fn buffer_bytes(&self, n: usize, n_ctx: usize, n_peers: usize) -> usize {
        WorkspaceLayout::new(&self.hyper, &self.weights, n, n_ctx, n_peers).n_bytes()
    }
}

impl Model {
    /// Takes devices' memory and uploads what is to be there.
    pub fn onto(&mut self, gpus: &[Device], options: &GpuOptions) -> Result<GpuModel> {
        let model = self.load(gpus, options)?;
        self.tiers.clone_from(&model.dev.tiers);
        Ok(model)
    }

    fn load(&self, gpus: &[Device], options: &GpuOptions) -> Result<GpuModel> {
        assert_eq!(gpus.len(), options.expert_budgets.len());
        let (gpu, n) = (&gpus[0], options.n_ubatch);
        let (stream, ops) = (Stream::urgent(gpu)?, Ops::load(gpu)?);
        let mut packer = Packer::new(self, n);
        let on_device = options.layers.clone();
        let layer = |l| on_device.contains(&l).then(|| packer.layer(l));
        let layers: Vec<_> = (0..self.hyper.n_layers).map(layer).collect();
        let encoder = self.weights.encoder.as_ref().map(|encoder| packer.encoder(encoder));
        let head = options
            .head
            .then(|| (packer.norm(&self.weights.output_norm), packer.linear(&self.weights.output)));
        let tables = DeviceBuffer::of(gpu, packer.table_bytes().max(256), "tables", "-ub, -ngl")?;
        let weights = packer.upload(gpu)?;
        for only in layers.iter().flatten().flat_map(GpuLayer::only_experts) {
            fill_table(&stream, &tables, &weights, only, n)?;
        }
        let n_peers = gpus.len() - 1;
        let layout = WorkspaceLayout::new(&self.hyper, &self.weights, n, options.n_ctx, n_peers);
        let workspace = Workspace::new(gpu, &stream, &layout, n)?;
        let experts_on_device = |l: usize| options.experts[l] && on_device.contains(&l);
        let experts_on_device: Vec<bool> = (0..layers.len()).map(experts_on_device).collect();
        let tiers = self.new_tiers(gpus, options, &experts_on_device)?;
        let peers = self.new_peers(gpus, tiers.as_ref(), n)?;
        let layouts = self.weights.routed.iter().map(|l| l.as_ref().map(GranuleLayout::new));
        let row = 4 * self.hyper.n_embd;
        let down = n * (2 * row + 4 * (self.hyper.routing.n_experts + 2 * self.hyper.routing.k))
            + 4 * self.n_vocab() * crate::forward::logits::LOGITS_ROWS.min(n)
            + (4 << 10);
        // The stream of a micro-batch, turns, the tables of its experts: whichever is largest.
        let largest = (n * row).max(layout.ffn.experts.granules.len()).max(layout.turns.len());
        let staging = Staging::new(gpu, STAGING_BYTES.max(largest), down)?;
        let hybrid = Hybrid::new(options.cpu_share, gpus.len());
        let layouts = layouts.collect();
        let dev = DeviceModel {
            stream,
            ops,
            layout,
            workspace,
            weights,
            tables,
            layers,
            encoder,
            head,
            layouts,
            tiers,
        };
        Ok(GpuModel {
            peers,
            dev,
            staging,
            hybrid,
            pipeline: DecodePipeline::new(gpu, self)?,
            on_device,
        })
    }

    /// `None` where no experts are on devices.
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
        if let [budget] = budgets[..] {
            let vram = self.new_vram(&gpus[0], &layers, options, budget, None)?;
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
            let vram = self.new_vram(gpu, &layers, options, budgets[device], Some(own.clone()))?;
            Ok(Some(Arc::new(vram)))
        };
        let of_device = gpus.iter().enumerate().map(tier).collect::<Result<_>>()?;
        Ok(Some(Arc::new(VramTiers::several(of_device, owners.clone()))))
    }

    fn new_vram(
        &self,
        gpu: &Device,
        layers: &[Option<LayerExperts>],
        options: &GpuOptions,
        budget: u64,
        own: Option<Own>,
    ) -> Result<VramTier> {
        let k = self.hyper.routing.k.max(1);
        let options = VramOptions {
            profile: options.profile.clone(),
            lockstep: options.lockstep,
            own,
            ..VramOptions::new(budget, options.policy, k)
        };
        VramTier::new(gpu, layers, self.routed.clone(), &options)
    }

    /// Those that have experts.
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
                peers.push(Peer::new(self, (&gpus[0], gpu), device, &has, n)?);
            }
        }
        Ok(peers)
    }
}

/// u64 [tokens, granules]: the same granules for each token.
fn fill_table(
    stream: &Stream,
    tables: &DeviceBuffer,
    weights: &GpuWeights,
    only: &GpuOnly,
    n: usize,
) -> Result<()> {
    let addresses = only.granules.iter().map(|place| weights.slice(place.clone()).address());
    let row: Vec<u8> = addresses.flat_map(u64::to_le_bytes).collect();
    stream.upload_now(tables.slice(only.table.clone()), &row.repeat(n))
}

impl GpuModel {
    /// Waits for experts end once `cancel` is set, from the next pass on.
    pub(crate) fn set_cancel(&mut self, cancel: &Cancel) {
        self.hybrid.set_cancel(cancel);
    }

    /// The first, with the dense weights and the cache.
    pub fn device(&self) -> &Device {
        self.dev.stream.gpu()
    }

    /// Room for one session's text.
    pub fn new_cache(
        &self,
        model: &Model,
        n_ctx: usize,
        types: (CacheType, CacheType),
    ) -> Result<GpuCache> {
        let (gpu, hyper) = (self.dev.stream.gpu(), &model.hyper);
        let on_device = |slot: usize| self.on_device.contains(&hyper.layer_of_slot(slot));
        GpuCache::new(gpu, &hyper.cache_shapes(), &on_device, n_ctx, types)
    }
}
