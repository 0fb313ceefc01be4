//! A peer: a device beside the first that holds and computes experts.

use crate::Result;
use crate::backend::gpu::expert::{Chosen, ExpertShape as DeviceShape};
use crate::backend::gpu::matvec::MAX_TOKENS;
use crate::backend::gpu::slots::Lookup;
use crate::backend::gpu::{Device, DeviceSlice, Stream};
use crate::experts::vram::VramTier;
use crate::forward::gpu::acts::GpuActs;
use crate::forward::gpu::expert_parallel::share::DeviceShare;
use crate::forward::gpu::expert_parallel::table_upload::{PeerTable, TableUpload};
use crate::forward::gpu::expert_parallel::workspace::{PeerLayout, PeerWorkspace, RoutedLayer};
use crate::forward::gpu::experts::{DecodePairs, ExpertContext, device_form};
use crate::forward::gpu::layers::GpuForm;
use crate::forward::gpu::ops::{Ops, types_of};
use crate::forward::gpu::weights::{GpuWeights, Packer};
use crate::model::{Bound, Model};

pub struct Peer {
    /// The device's number in the model, from 1 on.
    device: usize,
    ops: Ops,
    /// Biases and factors of experts, which slots do not hold.
    weights: GpuWeights,
    forms: Vec<GpuForm>,
    /// For the experts of each layer, in step with the pass.
    pass: PeerWorkspace,
    /// For the experts that a look-up of the decode pipeline missed, beside the pass.
    miss: PeerWorkspace,
    /// By layer.
    tables: Vec<PeerTable>,
    uploads: [TableUpload; 2],
}

impl Bound {
    /// Bytes of a peer's memory that are not for slots, with micro-batches of `n` tokens.
    pub fn gpu_peer_bytes(&self, n: usize) -> usize {
        let layers = self.weights.layers.iter().zip(&self.weights.routed);
        let ffns = layers.filter(|(_, routed)| routed.is_some());
        let ffns = ffns.filter_map(|(layer, _)| layer.ffn.as_ref());
        // Factors of each matrix begin at a multiple of 256 bytes.
        let values = ffns.map(|ffn| {
            let biases = ffn.biases.as_ref();
            let biases = biases.map_or(0, |b| b.gate.len() + b.up.len() + b.down.len());
            let scales = ffn.scales.iter().flat_map(|s| [s.gate.len(), s.up.len()]);
            biases + scales.map(|n| n.next_multiple_of(64)).sum::<usize>()
        });
        let layouts = [n, n.min(MAX_TOKENS)]
            .map(|n| PeerLayout::new(&self.hyper, &self.weights, n).n_bytes());
        4 * values.sum::<usize>() + layouts.iter().sum::<usize>()
    }
}

impl Peer {
    /// Allocates memory of `gpu`, which is device `device`. `has_experts` says of which layers it
    /// holds some. Micro-batches have at most `n` tokens.
    pub fn new(
        model: &Model,
        first: &Device,
        gpu: &Device,
        device: usize,
        has_experts: &dyn Fn(usize) -> bool,
        n: usize,
    ) -> Result<Peer> {
        let mut packer = Packer::new(model, n, 0);
        let forms = (0..model.hyper.n_layers).map(|l| match has_experts(l) {
            true => packer.routed_form(l).unwrap_or_default(),
            false => GpuForm::default(),
        });
        let forms = forms.collect();
        let workspace = |n| {
            let layout = PeerLayout::new(&model.hyper, &model.weights, n);
            PeerWorkspace::new(first, gpu, &model.hyper, layout)
        };
        Ok(Peer {
            device,
            ops: Ops::load(gpu, &types_of(model))?,
            weights: packer.upload(gpu)?,
            forms,
            pass: workspace(n)?,
            miss: workspace(n.min(MAX_TOKENS))?,
            tables: vec![PeerTable::default(); model.hyper.n_layers],
            uploads: [TableUpload::new(gpu, model)?, TableUpload::new(gpu, model)?],
        })
    }

    pub fn device(&self) -> usize {
        self.device
    }

    pub fn ops(&self) -> &Ops {
        &self.ops
    }

    /// Waits for all that the peer has queued. If it fails the device is lost, and so are all
    /// results since the last wait.
    pub fn wait(&mut self) -> Result<()> {
        let Peer { pass, miss, .. } = self;
        pass.staging.wait(&pass.stream)?;
        miss.staging.wait(&miss.stream)
    }

    /// The peer's share of a routed layer. `is_miss`: of the experts that a look-up missed.
    pub fn share(&mut self, is_miss: bool, routed: RoutedLayer) -> Result<DeviceShare<'_>> {
        let Peer { device, ops, weights, forms, pass, miss, .. } = self;
        let peer = if is_miss { miss } else { pass };
        if is_miss {
            // The misses of the layer before were finished before this layer's are handled.
            peer.staging.wait(&peer.stream)?;
        }
        peer.begin(ops, routed)?;
        let PeerWorkspace { stream, workspace, layout, staging, to_first, .. } = peer;
        let chosen = workspace.slice(&layout.chosen).slice(0..routed.chosen.len());
        let memory = workspace.slice(&layout.acts);
        let h = workspace.slice(&layout.h);
        let acts = GpuActs::at(routed.w.expert.inputs(), routed.shape(), h, memory).halves_at(
            ops,
            routed.halves,
            h,
            memory,
        );
        let form = device_form(weights, &forms[routed.l]);
        let context = ExpertContext { ops, stream, workspace, layout: &layout.experts };
        let (device, to_first) = (*device, Some(to_first));
        Ok(DeviceShare { device, context, acts, chosen, form, staging, to_first })
    }

    /// Pins the peer's experts of layer `l`. Returns whether their slot table is another.
    pub fn pin_layer(&mut self, vram: Option<&VramTier>, l: usize) -> bool {
        vram.filter(|vram| vram.has(l)).is_some_and(|vram| self.tables[l].pin_layer(vram, l))
    }

    /// u64 [experts, granules]: the addresses of the peer's slots, or 0; empty if it has no experts
    /// of the layer
    pub fn slot_table(&self, l: usize) -> &[u64] {
        &self.tables[l].table.addresses
    }

    /// Queues a look-up of the rows' experts and the computation of those that are pinned here.
    /// Returns false if none are.
    pub fn compute(
        &mut self,
        slot: usize,
        routed: RoutedLayer,
        shape: &DeviceShape,
    ) -> Result<bool> {
        let Peer { ops, weights, forms, pass: peer, tables, uploads, .. } = self;
        let n_layers = tables.len();
        let own = &mut tables[routed.l];
        if !own.has_any {
            return Ok(false);
        }
        let (n_pairs, n_granules) = (routed.n_tokens * shape.k, shape.n_granules());
        let (n_addresses, all) = (own.table.addresses.len(), &peer.layout.lookup.tables);
        let start = all.len() / n_layers * routed.l;
        let table_bytes = start..start + 8 * n_addresses;
        let table = peer.workspace.slice(all).slice(table_bytes.clone());
        uploads[slot].upload(&peer.stream, own, table)?;
        peer.begin(ops, routed)?;
        let PeerWorkspace { stream, workspace, layout, .. } = peer;
        let chosen = workspace.words(&layout.chosen, n_pairs);
        let granules = workspace.slice(&layout.experts.granules).slice(0..8 * n_pairs * n_granules);
        let lookup = Lookup {
            chosen,
            table: workspace.slice(&layout.lookup.tables).slice(table_bytes),
            n_experts: n_addresses / n_granules,
            n_granules,
            granules,
            homes: None,
            missing: workspace.slice(&layout.lookup.missing),
            pass: workspace.slice(&layout.lookup.pass),
            go: workspace.slice(&layout.lookup.go),
        };
        // SAFETY: the router chooses among the layer's experts.
        unsafe { ops.resolve.launch(stream, &lookup, None)? };
        let memory = workspace.slice(&layout.acts);
        let h = workspace.slice(&layout.h);
        let acts = GpuActs::at(routed.w.expert.inputs(), routed.shape(), h, memory);
        let form = device_form(weights, &forms[routed.l]);
        let context = ExpertContext { ops, stream, workspace, layout: &layout.experts };
        let chosen = Chosen { n_pairs, granules, apart: None, experts: chosen };
        // SAFETY: the table holds 0 or the addresses of granules of this layer, which are pinned.
        unsafe { context.compute_pairs(&DecodePairs { shape, chosen }, form, &acts)? };
        Ok(true)
    }

    /// Queues a copy of a step's sums to `rows` of the first device, f32 [pairs, n_embd]. Rows of
    /// experts that are not here hold no result.
    pub fn return_sums(&mut self, first: &Stream, rows: DeviceSlice) -> Result<()> {
        let PeerWorkspace { stream, workspace, layout, to_first, .. } = &mut self.pass;
        let partial = workspace.slice(&layout.experts.partial).slice(0..rows.len());
        to_first.copy(stream, first, &[(partial, rows)])
    }
}
