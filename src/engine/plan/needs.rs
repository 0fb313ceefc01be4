//! The VRAM that each part of a model takes: the input of `vram::plan`.

use crate::engine::EngineOptions;
use crate::engine::plan::tensor_override::{LayerNames, Names};
use crate::engine::plan::vram::{DeviceNeeds, LayerBytes};
use crate::experts::LayerExperts;
use crate::experts::vram::slots;
use crate::gguf::TensorInfo;
use crate::model::shares::Share;
use crate::model::{Bound, HyperParams};

/// Tensors begin in VRAM at multiples of this.
const TENSOR_ALIGN: u64 = 256;

impl DeviceNeeds {
    /// With `n_ctx` tokens of context, `n_ubatch` of them computed at once, on so many devices.
    pub fn of(
        model: &Bound,
        options: &EngineOptions,
        n_ctx: usize,
        (n_ubatch, n_devices): (usize, usize),
    ) -> DeviceNeeds {
        let shares = model.shares();
        let sum = |wanted: Share| -> u64 {
            let tensors = model.gguf().tensors().iter().zip(&shares);
            tensors.filter(|(_, share)| **share == wanted).map(|(t, _)| device_bytes(t)).sum()
        };
        let leaders = model.hyper().leaders(n_ctx);
        let layer = |l: usize| LayerBytes {
            is_cpu_only: !model.has_kernels(l, n_ctx),
            leader: Some(leaders[l]).filter(|other| *other != l),
            dense_bytes: sum(Share::Dense(l)) + model.unpacked_bytes(l) + padding(model, l),
            kv_bytes: kv_bytes(model, options, l, n_ctx) * options.n_sessions.max(1) as u64,
            experts: model.routed()[l].as_ref().map(|layer| slots(layer, model.k())),
        };
        let of_head = if model.is_tied() { sum(Share::Embedding) } else { 0 };
        let n = tokens_at_once(model.hyper(), n_ubatch, n_ctx);
        DeviceNeeds {
            head_bytes: sum(Share::Head) + of_head,
            n_tokens: n,
            activation_bytes: model.buffer_bytes(n, n_ctx, n_devices - 1) as u64,
            work_bytes: work_bytes(model, n),
            peer_bytes: model.gpu_peer_bytes(n) as u64,
            expert_bytes: model.expert_and_dense_bytes().0,
            layers: (0..model.hyper().n_layers).map(layer).collect(),
        }
    }
}

/// The largest pass: a micro-batch, or a whole text of a model whose tokens see all of it.
pub fn tokens_at_once(hyper: &HyperParams, n_ubatch: usize, n_ctx: usize) -> usize {
    match hyper.encoder.is_some() || hyper.sees_all {
        false => n_ubatch.min(n_ctx),
        true => n_ctx,
    }
}

/// A tensor as it is on a device. Vectors, biases and what is added to scores by place are f32
/// there, and norms have biases, zeros where the file has none.
fn device_bytes(tensor: &TensorInfo) -> u64 {
    let n: u64 = tensor.dims.iter().product();
    let name = &tensor.name;
    let is_vector = n == tensor.dims[0] || name.ends_with(".bias") || name.ends_with("_ape.weight");
    let bytes = if is_vector { tensor.n_bytes.max(4 * n) } else { tensor.n_bytes };
    let parts = if name.ends_with("norm.weight") { 2 } else { 1 };
    parts * bytes.next_multiple_of(TENSOR_ALIGN)
}

/// Bytes of a layer's KV cache for `n_ctx` positions; a decoder's layer also caches the encoder's
/// output.
fn kv_bytes(model: &Bound, options: &EngineOptions, l: usize, n_ctx: usize) -> u64 {
    let hyper = model.hyper();
    let (k, v) = (options.cache_type_k, options.cache_type_v);
    let shapes = hyper.device_cache_shapes(n_ctx).into_iter().enumerate();
    let own = shapes.filter(|(slot, _)| hyper.layer_of_slot(*slot) == l);
    own.map(|(_, shape)| shape.n_bytes(n_ctx, k, v) as u64).sum()
}

/// Pieces of memory that are taken, each rounded up: weights, tables, activations, the cache, and
/// slots of as many sizes as layers have.
const BUFFERS: u64 = 16;

/// Tables of where granules lie, an address each: of routed experts, of those behind them, and once
/// a token of those that every token goes to. Besides, what an encoder has beside its layers.
fn work_bytes(model: &Bound, n: usize) -> u64 {
    let n_granules = |l: &LayerExperts| l.geometry.n_granules();
    let routed = model.routed().iter().flatten().map(|l| l.n_experts * n_granules(l));
    let only = model.dense_experts().into_iter().flatten().flatten();
    let only = only.map(|l| n.max(l.n_experts) * n_granules(l) + TENSOR_ALIGN as usize / 8);
    let granules = 8 * routed.chain(only).sum::<usize>() as u64;
    granules + model.encoder_bytes() + BUFFERS * TENSOR_ALIGN
}

/// Bytes that a layer's dense part, shared expert and experts behind the routed ones take beyond
/// their tensors because they lie in slots of granules.
fn padding(model: &Bound, l: usize) -> u64 {
    let of = |layer: &LayerExperts| {
        let slots = slots(layer, 1);
        let bytes = (slots.n_granules * slots.slot_bytes).saturating_sub(layer.expert_bytes());
        (layer.n_experts * bytes) as u64
    };
    model.dense_experts().iter().filter_map(|layers| layers[l].as_ref()).map(of).sum()
}

/// The tensors' names, for rules.
pub fn names(model: &Bound) -> Names {
    let n_layers = model.hyper().n_layers;
    let mut names = Names { layers: vec![LayerNames::default(); n_layers], ..Names::default() };
    for (tensor, share) in model.gguf().tensors().iter().zip(model.shares()) {
        let name = tensor.name.clone();
        match share {
            Share::Dense(l) => names.layers[l].dense.push(name),
            Share::Experts(l) => names.layers[l].experts.extend(model.expert_names(l, &name)),
            Share::Head => names.head.push(name),
            Share::Embedding => names.embedding.push(name),
            Share::Other => {}
        }
    }
    names
}
