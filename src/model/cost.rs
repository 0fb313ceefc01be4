//! The cost of a token: multiply-adds of its products, bytes of the cache that attention
//! reads. Work on single elements (norms, activations, the softmax) is left out: products have some
//! thousand multiply-adds for each of those.

use super::Model;
use super::kv::{CacheType, LayerShape};
use super::weights::{
    FfnWeights, Gate, GatedConnection, HeadMatrices, InputPart, Linear, Matrix, Mixer, Query,
    Streams,
};
use crate::backend::ops::{ConvShape, DeltaShape, ExpertShape};

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
        matrix_macs(&self.weights.output.weight)
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
            expert_macs(&shared.shape) + shared.gate.as_ref().map_or(0, matrix_macs)
        });
        routed + shared + ffn.branch.as_ref().map_or(0, |branch| expert_macs(&branch.shape))
    }
}

fn input_macs(part: &InputPart) -> u64 {
    macs(&part.gate) + macs(&part.output)
}

/// Positions that a token sees, its own among them.
fn seen(mixer: &Mixer, position: usize) -> usize {
    let window = match mixer {
        Mixer::Attention(w) => w.window.or(w.chunk),
        _ => None,
    };
    (position + 1).min(window.unwrap_or(usize::MAX))
}

/// Multiply-adds that do not depend on the position.
fn mixer_macs(mixer: &Mixer) -> u64 {
    match mixer {
        Mixer::None => 0,
        Mixer::Attention(w) => {
            let always = [&w.q, &w.k, &w.v, &w.output];
            let gate = w.gate.as_ref().map(|(gate, _)| gate);
            always.into_iter().chain(gate).map(macs).sum()
        }
        Mixer::Latent(w) => {
            let query = match &w.query {
                Query::Direct(q) => macs(q),
                Query::Compressed { a, b, .. } => macs(a) + macs(b),
            };
            let gate = w.gate.as_ref().map_or(0, macs);
            query + gate + macs(&w.kv_a) + heads_macs(&w.k_b) + heads_macs(&w.v_b) + macs(&w.output)
        }
        Mixer::Compressed(w) => {
            let always = [&w.q_a, &w.q_b, &w.row, &w.output_b].map(macs).iter().sum::<u64>();
            let made = w.compressor.iter().chain(w.indexer.iter().map(|i| &i.compressor));
            let made: u64 = made.map(|c| macs(&c.values) + macs(&c.scores)).sum();
            let index = w.indexer.iter().map(|i| macs(&i.q) + macs(&i.weights)).sum::<u64>();
            always + heads_macs(&w.output_a) + made + index
        }
        Mixer::Delta(w) => {
            let linears: u64 = [&w.qkv, &w.z, &w.output].map(macs).iter().sum();
            let gates: u64 = w.gates.matrices().map(matrix_macs).sum();
            linears + gates + delta_macs(w.shape)
        }
        Mixer::Kda(w) => {
            let linears = w.qkv.iter().chain(w.decay.parts()).chain(w.gate.parts());
            linears.chain([&w.beta, &w.output]).map(macs).sum::<u64>() + delta_macs(w.shape)
        }
        Mixer::ShortConv(w) => macs(&w.input) + macs(&w.output) + conv_macs(w.conv.shape),
        Mixer::Mamba(w) => {
            let linears: u64 = [&w.input, &w.scan, &w.steps, &w.output].map(macs).iter().sum();
            let state = w.shape.n_states * w.shape.conv.channels;
            linears + conv_macs(w.shape.conv) + 2 * state as u64
        }
        Mixer::Mamba2(w) => {
            let state = 2 * w.shape.scan.n_state() as u64;
            macs(&w.input) + macs(&w.output) + conv_macs(w.shape.conv) + state
        }
        Mixer::Lightning(w) => {
            let linears: u64 = [&w.qkv, &w.gate, &w.output].map(macs).iter().sum();
            linears + 2 * w.shape.n_state() as u64
        }
    }
}

/// Multiplications that join and feed residual streams.
fn streams_macs(streams: &Streams) -> u64 {
    match streams {
        Streams::One | Streams::Mean | Streams::Kept(_) => 0,
        Streams::Hyper(connection) => macs(&connection.mixes),
        Streams::Gated(connection) => {
            let GatedConnection { down, up, inject, .. } = &**connection;
            macs(down) + macs(up) + inject.as_ref().map_or(0, macs)
        }
    }
}

/// The convolution; then, for each element of the state, what the key finds in it, what is put
/// there instead, and what the query finds.
fn delta_macs(shape: DeltaShape) -> u64 {
    (shape.channels() * shape.kernel + 3 * shape.n_state()) as u64
}

fn conv_macs(shape: ConvShape) -> u64 {
    (shape.channels * shape.kernel) as u64
}

fn expert_macs(shape: &ExpertShape) -> u64 {
    let n_matrices = 2 + usize::from(shape.gate.is_some());
    (n_matrices * shape.n_ff * shape.n_embd) as u64
}

fn macs(linear: &Linear) -> u64 {
    matrix_macs(&linear.weight)
}

fn matrix_macs(matrix: &Matrix) -> u64 {
    (matrix.rows * matrix.cols) as u64
}

fn heads_macs(heads: &HeadMatrices) -> u64 {
    (heads.n_heads * heads.rows * heads.all.cols) as u64
}
