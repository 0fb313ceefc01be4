//! The cost of a token: multiply-adds of its products, bytes of the cache that attention
//! reads. Work on single elements (norms, activations, the softmax) is left out: products have some
//! thousand multiply-adds for each of those.

use super::Model;
use super::kv::{CacheType, LayerShape};
use super::weights::{
    FfnWeights, Gate, GatedConnection, InputPart, Linear, Mixer, MixerWeights, Streams,
};
use crate::backend::ops::ExpertShape;

impl Model {
    /// Multiply-adds of a token with `position` tokens before it, in all layers; without the head.
    pub fn token_macs(&self, position: usize) -> u64 {
        let shapes = self.hyper.cache_shapes();
        let of_layers = self.weights.layers.iter().enumerate().map(|(l, layer)| {
            let (n_head, shape) = (self.hyper.heads_of(l)[0], shapes[self.hyper.keys_of(l)]);
            let attention =
                self.macs_a_position(n_head, shape) * seen(&layer.mixer, position) as u64;
            let ngrams = layer.ngrams.as_ref().map_or(0, |w| macs(&w.key) + macs(&w.value));
            mixer_macs(&layer.mixer)
                + attention
                + ngrams
                + layer.streams.iter().map(streams_macs).sum::<u64>()
                + layer.ffn.as_ref().map_or(0, |ffn| self.ffn_macs(ffn))
                + layer.input.as_ref().map_or(0, input_macs)
        });
        let inputs = self.weights.layer_inputs.as_ref().map_or(0, |w| macs(&w.projection));
        of_layers.sum::<u64>() + inputs
    }

    /// Multiplications of a token in the last layer behind its mixer.
    pub fn last_ffn_macs(&self) -> u64 {
        let Some(layer) = self.weights.layers.last() else { return 0 };
        let input = layer.input.as_ref().map_or(0, input_macs);
        layer.ffn.as_ref().map_or(0, |ffn| self.ffn_macs(ffn)) + input
    }

    /// Multiply-adds of one token's logits.
    pub fn head_macs(&self) -> u64 {
        macs(&self.weights.output)
    }

    /// Bytes of keys and values, or of states, that a token with `position` tokens before it reads.
    pub fn cache_bytes_read(&self, position: usize, k: CacheType, v: CacheType) -> u64 {
        let shapes = self.hyper.cache_shapes();
        let layers = self.weights.layers.iter().enumerate();
        let bytes = layers.map(|(l, layer)| {
            shapes[self.hyper.keys_of(l)].n_bytes(seen(&layer.mixer, position), k, v) as u64
        });
        bytes.sum()
    }

    /// Multiply-adds of all heads with one position's key and value.
    fn macs_a_position(&self, n_head: usize, shape: LayerShape) -> u64 {
        let (key, value) = match shape {
            LayerShape::Heads { k_dim, v_dim, .. } => (k_dim, v_dim),
            // The last part of the row belongs to the key only.
            LayerShape::Latent { dim, .. } => (dim, self.hyper.kv_rank),
            LayerShape::State(_) => (0, 0),
        };
        (n_head * (key + value)) as u64
    }

    fn ffn_macs(&self, ffn: &FfnWeights) -> u64 {
        let routing = &self.hyper.routing;
        let routed = match &ffn.gate {
            Gate::Dense(_) => expert_macs(&ffn.expert),
            Gate::Router(router) => {
                let n_used = routing.k.min(routing.n_experts) as u64;
                macs(&router.logits) + n_used * expert_macs(&ffn.expert)
            }
        };
        let shared = ffn.shared.as_ref().map_or(0, |shared| {
            expert_macs(&shared.shape) + shared.gate.as_ref().map_or(0, |gate| gate.macs() as u64)
        });
        routed + shared + ffn.branch.as_ref().map_or(0, |branch| expert_macs(&branch.shape))
    }
}

fn input_macs(part: &InputPart) -> u64 {
    macs(&part.gate) + macs(&part.output)
}

/// Positions that a token sees, its own among them.
fn seen(mixer: &Mixer, position: usize) -> usize {
    let window = mixer.weights().and_then(MixerWeights::n_seen);
    (position + 1).min(window.unwrap_or(usize::MAX))
}

/// Multiply-adds that do not depend on the position.
fn mixer_macs(mixer: &Mixer) -> u64 {
    mixer.weights().map_or(0, |mixer| {
        mixer.linears().into_iter().map(macs).sum::<u64>() + mixer.other_macs() as u64
    })
}

/// Multiplications that join and feed residual streams.
fn streams_macs(streams: &Streams) -> u64 {
    match streams {
        Streams::One | Streams::Averaged { .. } | Streams::Weighed { .. } => 0,
        Streams::Mean | Streams::Lagging | Streams::Kept(_) => 0,
        Streams::Hyper(connection) => macs(&connection.mixes),
        Streams::Gated(connection) => {
            let GatedConnection { down, up, inject, .. } = &**connection;
            macs(down) + macs(up) + inject.as_ref().map_or(0, macs)
        }
    }
}

fn expert_macs(shape: &ExpertShape) -> u64 {
    let n_matrices = 2 + usize::from(shape.gate.is_some());
    (n_matrices * shape.n_ff * shape.n_embd) as u64
}

fn macs(linear: &Linear) -> u64 {
    linear.weight.macs() as u64
}
