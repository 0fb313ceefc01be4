//! A peer's part of a token's layer that looks up its experts by itself (`decode`): queued with the
//! layer, so that nobody stops where all is there.

use super::super::acts::GpuActs;
use super::super::experts::{Biases, DecodePairs, ExpertContext};
use super::{Peer, Routed};
use crate::Result;
use crate::backend::gpu::expert::{Chosen, ExpertShape as DeviceShape};
use crate::backend::gpu::slots::Lookup;
use crate::backend::gpu::{Device, DeviceSlice, Event, Pinned, PinnedKind, Stream};
use crate::experts::vram::{GranuleLayout, VramTier};
use crate::forward::gpu::expert_parallel::workspace::PeerWorkspace;
use crate::model::Model;
use crate::model::weights::FfnWeights;

/// A layer's table on its way up; those of two layers in turn.
pub struct TableUpload {
    up: Pinned,
    /// The last one that was here has gone.
    copied: Event,
    /// u64 [experts, granules]: what the peer may rely on
    addresses: Vec<u64>,
    /// Whether that is anything.
    has_any: bool,
}

impl TableUpload {
    pub fn new(gpu: &Device, model: &Model) -> Result<TableUpload> {
        let layouts = model.weights.routed.iter().flatten().map(GranuleLayout::new);
        let n_granules = layouts.map(|layout| layout.n_granules).max().unwrap_or(0);
        let bytes = 8 * n_granules * model.hyper.routing.n_experts;
        let up = Pinned::of(gpu, bytes, PinnedKind::Cached, "a token's routing")?;
        let copied = Event::new(gpu)?;
        Ok(TableUpload { up, copied, addresses: Vec::new(), has_any: false })
    }

    /// Queues the upload of the table.
    fn upload(&self, stream: &Stream, to: DeviceSlice) -> Result<()> {
        // The layer before the last: all that it waited for has been heard of.
        self.copied.synchronize()?;
        // SAFETY: what was copied from here has been, as was just waited for; nothing writes here
        // before that has been waited for again.
        unsafe {
            let table = self.up.bytes_mut(0..8 * self.addresses.len());
            for (bytes, address) in table.chunks_exact_mut(8).zip(&self.addresses) {
                bytes.copy_from_slice(&address.to_le_bytes());
            }
            stream.upload(to, table)?;
        }
        stream.record(&self.copied)
    }
}

impl Peer {
    /// Pins its experts of a layer, if it has some, and puts its number in the place of their
    /// granules into the first device's table.
    pub fn pin_layer(
        &mut self,
        vram: Option<&VramTier>,
        l: usize,
        upload: usize,
        table: &mut [u64],
    ) {
        let upload = &mut self.tables[upload];
        upload.has_any = false;
        let Some(vram) = vram.filter(|vram| vram.has(l)) else { return };
        upload.addresses.resize(table.len(), 0);
        vram.pin_layer(l, &mut upload.addresses);
        for (home, _) in table.iter_mut().zip(&upload.addresses).filter(|(_, at)| **at != 0) {
            *home = self.device as u64;
            upload.has_any = true;
        }
    }

    /// Queues its experts of what a token's router chose; false: it has none that are whole.
    pub fn compute(
        &mut self,
        upload: usize,
        routed: Routed,
        (l, w): (usize, &FfnWeights),
        shape: &DeviceShape,
    ) -> Result<bool> {
        let Peer { ops, weights, biases, pass, tables, .. } = self;
        let upload = &tables[upload];
        if !upload.has_any {
            return Ok(false);
        }
        let (k, n_granules) = (shape.k, shape.n_granules());
        let table = 0..8 * upload.addresses.len();
        let tables = pass.workspace.slice(&pass.layout.lookup.tables);
        upload.upload(&pass.stream, tables.slice(table.clone()))?;
        pass.begin(ops, routed, w.expert.inputs(), (1, w.expert.n_embd))?;
        let PeerWorkspace { stream, workspace, layout, .. } = pass;
        let table = workspace.slice(&layout.lookup.tables).slice(table);
        let chosen = workspace.words(&layout.chosen, k);
        let granules = workspace.slice(&layout.experts.granules).slice(0..8 * k * n_granules);
        let [missing, pass, go] = [&layout.lookup.missing, &layout.lookup.pass, &layout.lookup.go]
            .map(|word| workspace.slice(word));
        let n_experts = upload.addresses.len() / n_granules;
        let homes = None;
        let lookup =
            Lookup { chosen, table, n_experts, n_granules, granules, homes, missing, pass, go };
        // SAFETY: the router chooses among the layer's experts.
        unsafe { ops.resolve.launch(stream, &lookup)? };
        let acts =
            GpuActs::at(w.expert.inputs(), (1, w.expert.n_embd), workspace.slice(&layout.acts));
        let biases = biases[l].as_ref().map(|b| Biases::new(weights, b));
        let context = ExpertContext { ops, stream, workspace, layout: &layout.experts };
        let decode_pairs =
            DecodePairs { shape, chosen: Chosen { n_pairs: k, granules, experts: chosen } };
        // SAFETY: the table has 0 or places of granules of this layer, which are pinned.
        unsafe { context.decode_pairs(&decode_pairs, biases.as_ref(), &acts)? };
        Ok(true)
    }

    /// The token's sums go to `rows` of the first device, f32 [k, n_embd]; those of other devices'
    /// experts mean nothing.
    pub fn return_sums(&mut self, first: &Stream, rows: DeviceSlice) -> Result<()> {
        let PeerWorkspace { stream, workspace, layout, to_first, .. } = &mut self.pass;
        let partial = workspace.slice(&layout.experts.partial).slice(0..rows.len());
        to_first.carry(stream, first, &[(partial, rows)])
    }
}
