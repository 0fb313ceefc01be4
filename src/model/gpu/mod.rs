//! A model on a GPU: dense weights, KV cache and the layer loop there, experts in VRAM or on the
//! CPU, layers that have no room on the CPU altogether.

mod acts;
mod cache;
mod decode;
mod delta;
mod experts;
mod ffn;
mod forward;
mod front;
mod hybrid;
mod layers;
mod mixer;
mod ops;
mod pass;
pub mod placement;
mod room;
mod staging;
pub mod vram;
mod weights;

pub use cache::GpuCache;

use super::kv::CacheType;
use super::{Bound, Model};
use crate::Result;
use crate::backend::gpu::{Device, DeviceBuffer, Stream};
use crate::policy::{PolicySpec, Profile};
use decode::Ahead;
use hybrid::Hybrid;
use layers::{GpuLayer, GpuNorm, GpuOnly};
use ops::Ops;
use room::{Places, Room};
use staging::Staging;
use std::ops::Range;
use std::sync::Arc;
use vram::{GranuleLayout, Vram, VramOptions};
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
    /// Bytes of VRAM for them.
    pub expert_budget: u64,
    pub policy: PolicySpec,
    pub profile: Profile,
    /// See `StreamOptions`.
    pub lockstep: bool,
    /// Tokens computed at once, and of context.
    pub n_ubatch: usize,
    pub n_ctx: usize,
    /// The part of a layer's experts that the CPU computes, for tests; by what things take if not
    /// given.
    pub cpu_share: Option<f32>,
}

/// What a pass reads and nothing changes.
pub struct Parts {
    stream: Stream,
    ops: Ops,
    places: Places,
    room: Room,
    weights: GpuWeights,
    /// Addresses of the granules of experts that every token goes to.
    tables: DeviceBuffer,
    /// One for each of the model's layers.
    layers: Vec<Option<GpuLayer>>,
    head: Option<(GpuNorm, GpuLinear)>,
    /// How granules of routed experts lie.
    layouts: Vec<Option<GranuleLayout>>,
    vram: Option<Arc<Vram>>,
}

/// One device's share of a model, and what a pass works with there. Passes follow one another.
pub struct GpuModel {
    parts: Parts,
    staging: Staging,
    hybrid: Hybrid,
    ahead: Ahead,
    on_device: Range<usize>,
}

/// What goes up between two waits, unless one piece is larger.
const STAGING_BYTES: usize = 4 << 20;

impl Bound {
    /// What buffers of micro-batches of `n` tokens take in contexts of `n_ctx`, on a device; those
    /// of the CPU are the same, but for products of gate and up, which only threads have there.
    pub fn buffer_bytes(&self, n: usize, n_ctx: usize) -> usize {
        Places::new(&self.hyper, &self.weights, n, n_ctx).n_bytes()
    }
}

impl Model {
    /// Takes a device's memory and uploads what is to be there.
    pub fn onto(&mut self, gpu: &Device, options: &GpuOptions) -> Result<GpuModel> {
        let model = self.load(gpu, options)?;
        self.vram.clone_from(&model.parts.vram);
        Ok(model)
    }

    fn load(&self, gpu: &Device, options: &GpuOptions) -> Result<GpuModel> {
        let n = options.n_ubatch;
        let (stream, ops) = (Stream::urgent(gpu)?, Ops::load(gpu)?);
        let mut packer = Packer::new(self, n);
        let on_device = options.layers.clone();
        let layer = |l| on_device.contains(&l).then(|| packer.layer(l));
        let layers: Vec<_> = (0..self.hyper.n_layers).map(layer).collect();
        let head = options
            .head
            .then(|| (packer.norm(&self.weights.output_norm), packer.linear(&self.weights.output)));
        let tables = DeviceBuffer::of(gpu, packer.table_bytes().max(256), "tables", "-ub, -ngl")?;
        let weights = packer.upload(gpu)?;
        for only in layers.iter().flatten().flat_map(GpuLayer::only_experts) {
            fill_table(&stream, &tables, &weights, only, n)?;
        }
        let places = Places::new(&self.hyper, &self.weights, n, options.n_ctx);
        let room = Room::new(gpu, &stream, &places, n)?;
        let experts_on_device = |l: usize| options.experts[l] && on_device.contains(&l);
        let experts_on_device: Vec<bool> = (0..layers.len()).map(experts_on_device).collect();
        let vram = self.new_vram(gpu, options, &experts_on_device)?;
        let layouts = self.weights.routed.iter().map(|l| l.as_ref().map(GranuleLayout::new));
        let row = 4 * self.hyper.n_embd;
        let down = n * (2 * row + 4 * (self.hyper.routing.n_experts + 2 * self.hyper.routing.k))
            + 4 * self.n_vocab() * super::forward::LOGITS_TOKENS.min(n)
            + (4 << 10);
        // The stream of a micro-batch, turns, the tables of its experts: whichever is largest.
        let largest = (n * row).max(places.ffn.granules.len()).max(places.turns.len());
        let staging = Staging::new(gpu, STAGING_BYTES.max(largest), down)?;
        let hybrid = Hybrid::new(options.cpu_share);
        let layouts = layouts.collect();
        let parts =
            Parts { stream, ops, places, room, weights, tables, layers, head, layouts, vram };
        Ok(GpuModel { parts, staging, hybrid, ahead: Ahead::new(gpu, self)?, on_device })
    }

    fn new_vram(
        &self,
        gpu: &Device,
        options: &GpuOptions,
        on_device: &[bool],
    ) -> Result<Option<Arc<Vram>>> {
        let routed = self.weights.routed.iter().zip(on_device);
        let layers: Vec<_> = routed.map(|(l, on)| l.filter(|_| *on)).collect();
        if options.expert_budget == 0 || layers.iter().all(Option::is_none) {
            return Ok(None);
        }
        let k = self.hyper.routing.k.max(1);
        let options = VramOptions {
            profile: options.profile.clone(),
            lockstep: options.lockstep,
            ..VramOptions::new(options.expert_budget, options.policy, k)
        };
        Vram::new(gpu, &layers, self.routed.clone(), &options).map(|vram| Some(Arc::new(vram)))
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
    /// Room for one session's text.
    pub fn new_cache(
        &self,
        model: &Model,
        n_ctx: usize,
        types: (CacheType, CacheType),
    ) -> Result<GpuCache> {
        let gpu = self.parts.stream.gpu();
        GpuCache::new(gpu, &model.hyper.cache_shapes(), &self.on_device, n_ctx, types)
    }
}
