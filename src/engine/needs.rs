//! What a model takes in VRAM, part by part: what `fit` plans with.

use super::EngineOptions;
use super::fit::{DeviceNeeds, LayerBytes};
use super::tensor_place::{LayerNames, Names};
use crate::experts::{LayerExperts, LayerNeeds};
use crate::gguf::TensorInfo;
use crate::model::Bound;
use crate::model::forward::LOGITS_TOKENS;
use crate::model::shares::Share;

/// Where a tensor, and so a granule's slot, begins in VRAM: a multiple of this.
const TENSOR_ALIGN: u64 = 256;

/// Where the parts of a granule begin in its slot.
const PART_ALIGN: usize = 16;

/// Experts of a prompt stream through two buffers, each of which holds this much, or an expert if
/// that is more: enough for the link to run at its full rate.
const STREAM_BYTES: usize = 64 << 20;

/// Keys are split over this many blocks at most when a token attends to them.
const ATTENTION_SPLITS: usize = 64;

impl DeviceNeeds {
    /// Of a context of `n_ctx` tokens.
    pub fn of(model: &Bound, options: &EngineOptions, n_ctx: usize) -> DeviceNeeds {
        let shares = model.shares();
        let sum = |wanted: Share| -> u64 {
            let tensors = model.gguf().tensors().iter().zip(&shares);
            tensors.filter(|(_, share)| **share == wanted).map(|(t, _)| device_bytes(t)).sum()
        };
        let layer = |l: usize| LayerBytes {
            dense_bytes: sum(Share::Dense(l)) + model.unpacked_bytes(l),
            kv_bytes: kv_bytes(model, options, l, n_ctx),
            experts: model.routed()[l].as_ref().map(|layer| layer_needs(layer, model.k())),
        };
        let embedding = sum(Share::Embedding);
        let (of_head, embedding_bytes) =
            if model.is_tied() { (embedding, 0) } else { (0, embedding) };
        let layers: Vec<LayerBytes> = (0..model.hyper().n_layers).map(layer).collect();
        DeviceNeeds {
            head_bytes: sum(Share::Head) + of_head,
            embedding_bytes,
            activation_bytes: activation_bytes(model, options.n_ubatch.min(n_ctx)),
            work_bytes: work_bytes(&layers),
            expert_bytes: model.expert_and_dense_bytes().0,
            layers,
        }
    }
}

/// A tensor as it is on a device. Vectors and biases are f32 there.
fn device_bytes(tensor: &TensorInfo) -> u64 {
    let n: u64 = tensor.dims.iter().product();
    let is_vector = n == tensor.dims[0] || tensor.name.ends_with(".bias");
    let bytes = if is_vector { tensor.n_bytes.max(4 * n) } else { tensor.n_bytes };
    bytes.next_multiple_of(TENSOR_ALIGN)
}

/// What a layer keeps of `n_ctx` positions; a decoder's layer also of what its encoder has read.
fn kv_bytes(model: &Bound, options: &EngineOptions, l: usize, n_ctx: usize) -> u64 {
    let hyper = model.hyper();
    let (shapes, n_encoder) = (hyper.cache_shapes(), hyper.n_encoder_layers());
    let own = match (n_encoder, l.checked_sub(n_encoder)) {
        (0, _) => vec![shapes[l]],
        (_, None) => Vec::new(),
        (_, Some(l)) => vec![shapes[l], shapes[shapes.len() / 2 + l]],
    };
    let (k, v) = (options.cache_type_k, options.cache_type_v);
    own.iter().map(|shape| shape.n_bytes(n_ctx, k, v) as u64).sum()
}

fn layer_needs(layer: &LayerExperts, k: usize) -> LayerNeeds {
    LayerNeeds {
        n_experts: layer.n_experts,
        n_granules: layer.geometry.n_granules(),
        k: k.min(layer.n_experts),
        slot_bytes: slot_bytes(layer),
        staging_bytes: 0,
    }
}

/// Room in VRAM for any granule of a layer: rows of gate, rows of up, columns of down, each without
/// gaps and from its own multiple of [`PART_ALIGN`] on.
pub fn slot_bytes(layer: &LayerExperts) -> usize {
    let rows = layer.geometry.rows(0);
    let down = layer.down.rows * layer.down.columns(&rows).len();
    let parts = [rows.len() * layer.gate.row_bytes, rows.len() * layer.up.row_bytes, down];
    let bytes: usize = parts.iter().map(|bytes| bytes.next_multiple_of(PART_ALIGN)).sum();
    bytes.next_multiple_of(TENSOR_ALIGN as usize)
}

/// Buffers of a micro-batch of `n` tokens, all f32, none used twice: an upper bound, as records of
/// quantised activations are smaller.
fn activation_bytes(model: &Bound, n: usize) -> u64 {
    let h = model.hyper();
    let stream = 6 * h.n_embd;
    let heads = 2 * h.n_head * (h.head_dim + h.head_dim_v)
        + h.n_head_kv * (h.head_dim + h.head_dim_v)
        + if h.kv_rank > 0 { (2 * h.n_head + 1) * (h.kv_rank + h.rope.n_rot) } else { 0 };
    let delta = h.delta.as_ref().map_or(0, |(_, d)| 2 * d.channels() + 4 * d.value_width());
    let widest = |layers: &[Option<LayerExperts>]| {
        layers.iter().flatten().map(|layer| layer.geometry.n_ff).max().unwrap_or(0)
    };
    let pairs = model.k() * (2 * widest(model.routed()) + h.n_embd) + h.routing.n_experts;
    let dense = 2 * model.dense_experts().map(widest).into_iter().max().unwrap_or(0) + h.n_embd;
    let a_token = stream + heads + delta + pairs + dense;
    let splits = h.n_head * (h.head_dim_v.max(h.kv_rank) + 2) * ATTENTION_SPLITS;
    4 * (n * a_token + splits + LOGITS_TOKENS * model.n_vocab()) as u64
}

/// An address a granule, and the buffers of streaming.
fn work_bytes(layers: &[LayerBytes]) -> u64 {
    let experts = || layers.iter().filter_map(|layer| layer.experts.as_ref());
    let addresses: usize = experts().map(|e| 8 * e.n_experts * e.n_granules).sum();
    let streamed = |e: &LayerNeeds| {
        let expert = e.n_granules * e.slot_bytes;
        (e.n_experts * expert).min(expert.max(STREAM_BYTES))
    };
    (addresses + 2 * experts().map(streamed).max().unwrap_or(0)) as u64
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
