//! What a model takes in VRAM, part by part: what `fit` plans with.

use super::EngineOptions;
use super::fit::{DeviceNeeds, LayerBytes};
use super::tensor_place::{LayerNames, Names};
use crate::backend::gpu::attention::Attention;
use crate::experts::LayerExperts;
use crate::gguf::TensorInfo;
use crate::model::Bound;
use crate::model::forward::LOGITS_TOKENS;
use crate::model::gpu::vram::slots;
use crate::model::shares::Share;

/// Tensors begin in VRAM at multiples of this.
const TENSOR_ALIGN: u64 = 256;

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
            experts: model.routed()[l].as_ref().map(|layer| slots(layer, model.k())),
        };
        let embedding = sum(Share::Embedding);
        let (of_head, embedding_bytes) =
            if model.is_tied() { (embedding, 0) } else { (0, embedding) };
        let layers: Vec<LayerBytes> = (0..model.hyper().n_layers).map(layer).collect();
        DeviceNeeds {
            head_bytes: sum(Share::Head) + of_head,
            embedding_bytes,
            activation_bytes: activation_bytes(model, options.n_ubatch.min(n_ctx), n_ctx),
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

/// Buffers of a micro-batch of `n` tokens, all f32, none used twice: an upper bound, as records of
/// quantised activations are smaller. Attention's room grows with the context.
fn activation_bytes(model: &Bound, n: usize, n_ctx: usize) -> u64 {
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
    let value_dim = if h.kv_rank > 0 { h.kv_rank } else { h.head_dim_v };
    let attention = Attention::work_bytes(h.n_head, value_dim, n_ctx, n);
    (4 * (n * a_token + LOGITS_TOKENS * model.n_vocab()) + attention) as u64
}

/// Tables of where granules lie: an address each.
fn work_bytes(layers: &[LayerBytes]) -> u64 {
    let experts = layers.iter().filter_map(|layer| layer.experts.as_ref());
    experts.map(|e| 8 * e.n_experts as u64 * e.n_granules as u64).sum()
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
