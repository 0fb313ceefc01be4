//! Peers: devices beside the first that hold and compute experts and nothing else. The first one
//! has everything else and the layer loop; what its router saw and chose goes to the peers that
//! have something to compute, and their sums come back, pair by pair, to be added up there in the
//! one order that there is.

pub mod share;
mod staged_copy;
mod token;
mod workspace;

pub use crate::forward::gpu::expert_parallel::staged_copy::StagedCopy;

use super::acts::GpuActs;
use super::experts::{Biases, ExpertContext};
use super::layers::GpuBiases;
use super::ops::Ops;
use super::weights::{GpuWeights, Packer};
use crate::Result;
use crate::backend::gpu::{Device, DeviceSlice, Stream};
use crate::forward::gpu::expert_parallel::share::DeviceShare;
use crate::forward::gpu::expert_parallel::workspace::{PeerLayout, PeerWorkspace};
use crate::model::weights::FfnWeights;
use crate::model::{Bound, Model};
use token::TableUpload;

pub struct Peer {
    /// Its number among the model's devices, from 1 on.
    device: usize,
    ops: Ops,
    /// Biases of experts, which are not in slots.
    weights: GpuWeights,
    biases: Vec<Option<GpuBiases>>,
    /// In step with the layers of a pass, and beside them for what a token's layer lacked
    /// (`decode`).
    pass: PeerWorkspace,
    miss: PeerWorkspace,
    tables: [TableUpload; 2],
}

/// What a layer's router on the first device saw and chose, and the stream that it is there after.
#[derive(Clone, Copy)]
pub struct Routed<'a> {
    pub stream: &'a Stream,
    /// f32 [tokens, n_embd]
    pub h: DeviceSlice<'a>,
    /// u32 [tokens, k]
    pub chosen: DeviceSlice<'a>,
}

impl Bound {
    /// Of a peer's memory, what is not for slots, with micro-batches of `n` tokens.
    pub fn gpu_peer_bytes(&self, n: usize) -> usize {
        let layers = self.weights.layers.iter().zip(&self.weights.routed);
        let biases = layers.filter(|(_, routed)| routed.is_some());
        let biases = biases.filter_map(|(layer, _)| layer.ffn.biases.as_ref());
        // Those of gate and up lie there twice, as on the first device.
        let values = biases.map(|b| 2 * (b.gate.len() + b.up.len()) + b.down.len());
        let layout = [n, 1].map(|n| PeerLayout::new(&self.hyper, &self.weights, n).n_bytes());
        4 * values.sum::<usize>() + layout.iter().sum::<usize>()
    }
}

impl Peer {
    /// Takes memory of `gpu`, which is device `device`; `experts`: the layers of which it has some.
    pub fn new(
        model: &Model,
        (first, gpu): (&Device, &Device),
        device: usize,
        experts: &dyn Fn(usize) -> bool,
        n: usize,
    ) -> Result<Peer> {
        let mut packer = Packer::new(model, n);
        let layers = 0..model.hyper.n_layers;
        let biases = layers.map(|l| if experts(l) { packer.routed_biases(l) } else { None });
        let biases = biases.collect();
        let workspace = |n| {
            let layout = PeerLayout::new(&model.hyper, &model.weights, n);
            PeerWorkspace::new((first, gpu), &model.hyper, layout)
        };
        Ok(Peer {
            device,
            ops: Ops::load(gpu)?,
            weights: packer.upload(gpu)?,
            biases,
            pass: workspace(n)?,
            miss: workspace(1)?,
            tables: [TableUpload::new(gpu, model)?, TableUpload::new(gpu, model)?],
        })
    }

    pub fn device(&self) -> usize {
        self.device
    }

    /// Waits for all that it has queued. An error is that of a device that is lost: what came from
    /// it since the last wait is worth nothing.
    pub fn wait(&mut self) -> Result<()> {
        let Peer { pass, miss, .. } = self;
        pass.staging.wait(&pass.stream)?;
        miss.staging.wait(&miss.stream)
    }

    /// Its place in layer l's call for `n` tokens, once it has what the router saw.
    pub fn share(
        &mut self,
        is_miss: bool,
        routed: Routed,
        (l, w): (usize, &FfnWeights),
        n: usize,
    ) -> Result<DeviceShare<'_>> {
        let Peer { device, ops, weights, biases, pass, miss, .. } = self;
        let workspace = if is_miss { miss } else { pass };
        if is_miss {
            // Free again: what came late to the layer before is over when this one is heard of.
            workspace.staging.wait(&workspace.stream)?;
        }
        let (shape, inputs) = ((n, w.expert.n_embd), w.expert.inputs());
        workspace.begin(ops, routed, inputs, shape)?;
        let PeerWorkspace { stream, workspace, layout, staging, to_first, .. } = workspace;
        let chosen = workspace.slice(&layout.chosen).slice(0..routed.chosen.len());
        let acts = GpuActs::at(w.expert.inputs(), shape, workspace.slice(&layout.acts));
        let biases = biases[l].as_ref().map(|b| Biases::new(weights, b));
        let context = ExpertContext { ops, stream, workspace, layout: &layout.experts };
        Ok(DeviceShare {
            device: *device,
            context,
            acts,
            chosen,
            biases,
            staging,
            to_first: Some(to_first),
        })
    }
}
