//! The data that is uploaded to the first device when a model is loaded. Passes read it and never
//! change it.

use crate::Result;
use crate::backend::gpu::{Device, DeviceBuffer, Stream};
use crate::experts::vram::{GranuleLayout, VramTiers};
use crate::forward::gpu::expander::Expander;
use crate::forward::gpu::layers::{GpuEncoder, GpuLayer};
use crate::forward::gpu::ops::{Ops, types_of};
use crate::forward::gpu::pack::{OnDevice, Pack};
use crate::forward::gpu::weights::{GpuLinear, GpuWeights, Packer};
use crate::forward::gpu::workspace::{Workspace, WorkspaceLayout};
use crate::model::Model;
use crate::model::weights::{Norm, Streams};
use std::ops::Range;
use std::sync::Arc;

pub struct DeviceModel {
    /// The stream of the layers.
    pub stream: Stream,
    pub ops: Ops,
    /// For layers with latent attention.
    pub expander: Option<Expander>,
    pub layout: WorkspaceLayout,
    pub workspace: Workspace,
    pub weights: GpuWeights,
    /// The addresses of the granules of experts that every token goes to, for each token, and of
    /// those behind the routed ones.
    pub tables: DeviceBuffer,
    /// By layer of the model; none for layers on the CPU.
    pub layers: Vec<Option<GpuLayer>>,
    /// The parts of a model with an encoder besides its layers.
    pub encoder: Option<GpuEncoder>,
    pub head: Option<(Norm<OnDevice>, GpuLinear)>,
    /// How the output norm reads the residual streams, if the last layer is on the device.
    pub last_streams: Streams<OnDevice>,
    /// By layer: how the granules of its routed experts are laid out.
    pub layouts: Vec<Option<GranuleLayout>>,
    /// The VRAM tiers of all devices; none if no device holds experts.
    pub tiers: Option<Arc<VramTiers>>,
    /// See `GpuOptions`.
    pub is_exact: bool,
    pub by_layer: bool,
}

/// The dense part of a model that a device takes.
pub struct DenseOptions {
    /// See `GpuOptions`.
    pub layers: Range<usize>,
    pub head: bool,
    pub n_ubatch: usize,
    pub n_ctx: usize,
    /// The number of devices beside the first.
    pub n_peers: usize,
}

impl DeviceModel {
    /// Uploads the dense part of a model.
    pub fn upload(model: &Model, gpu: &Device, options: &DenseOptions) -> Result<DeviceModel> {
        let n = options.n_ubatch;
        let (stream, ops) = (Stream::urgent(gpu)?, Ops::load(gpu, &types_of(model))?);
        let mut packer = Packer::new(model, n, options.n_ctx);
        let on = |l: usize| model.is_on_device(l, &options.layers, options.n_ctx);
        let layer = |l| on(l).then(|| packer.layer(l));
        let layers: Vec<_> = (0..model.hyper.n_layers).map(layer).collect();
        let expander = Expander::load(gpu, &layers)?;
        let encoder = model.weights.encoder.as_ref().map(|encoder| packer.encoder(encoder));
        let weights = &model.weights;
        let last_streams = match layers.last() {
            Some(Some(_)) => weights.last_streams.pack(&mut packer),
            _ => Streams::One,
        };
        let head = (options.head)
            .then(|| (weights.output_norm.pack(&mut packer), weights.output.pack(&mut packer)));
        let tables = DeviceBuffer::of(gpu, packer.table_bytes().max(256), "tables", "-ub, -ngl")?;
        let weights = packer.upload(gpu)?;
        let fill = |granules: &[Range<usize>], table: &Range<usize>, n: usize| {
            let addresses = granules.iter().map(|range| weights.slice(range.clone()).address());
            let row: Vec<u8> = addresses.flat_map(u64::to_le_bytes).collect();
            stream.upload_now(tables.slice(table.clone()), &row.repeat(n))
        };
        for layer in layers.iter().flatten() {
            layer.only_experts().try_for_each(|only| fill(&only.granules, &only.table, n))?;
            let adjugate = layer.ffn.iter().filter_map(|ffn| ffn.adjugate.as_ref());
            adjugate.into_iter().try_for_each(|a| fill(&a.granules, &a.table, 1))?;
        }
        let (hyper, n_ctx) = (&model.hyper, options.n_ctx);
        let layout = WorkspaceLayout::new(hyper, &model.weights, n, n_ctx, options.n_peers);
        let workspace = Workspace::new(gpu, &stream, &layout)?;
        let layouts = model.weights.routed.iter().map(|l| l.as_ref().map(GranuleLayout::new));
        Ok(DeviceModel {
            layouts: layouts.collect(),
            tiers: None,
            is_exact: false,
            by_layer: false,
            stream,
            ops,
            expander,
            layout,
            workspace,
            weights,
            tables,
            layers,
            encoder,
            head,
            last_streams,
        })
    }
}
