//! A model's tensors by what is moved as a whole: between memory and a device, and by `-ot`.

use super::Bound;
use super::granules;
use crate::experts::LayerExperts;

/// The part of the model that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// A layer, but for its routed experts; with the last one, how the head reads several streams.
    Dense(usize),
    /// A layer's routed experts.
    Experts(usize),
    /// Everything after the last layer.
    Head,
    Embedding,
    /// Read once at load or never: frequencies, layers that are not computed.
    Other,
}

impl Bound {
    /// A share for each of the file's tensors.
    pub fn shares(&self) -> Vec<Share> {
        let names = self.gguf.tensors().iter().map(|tensor| tensor.name.as_str());
        let mut shares: Vec<Share> = names.map(|name| self.share_by_name(name)).collect();
        for (l, experts) in self.weights.routed.iter().enumerate() {
            let values = self.weights.values_of(l).map(|values| &values.experts);
            for tensor in experts.iter().chain(values).flat_map(LayerExperts::tensors) {
                shares[tensor] = Share::Experts(l);
            }
        }
        shares
    }

    /// Whether the output matrix is the embedding.
    pub fn is_tied(&self) -> bool {
        let names = self.gguf.tensors().iter().map(|tensor| tensor.name.as_str());
        names.into_iter().all(|name| name.trim_start_matches("dec.") != "output.weight")
    }

    /// Bytes that a layer's weights have beside the file's.
    pub fn unpacked_bytes(&self, layer: usize) -> u64 {
        let mixer = self.weights.layers[layer].mixer.weights();
        mixer.map_or(0, |mixer| mixer.unpacked_bytes() as u64)
    }

    /// Bytes on a device of what an encoder has besides its layers: its output norm, and what is
    /// added to scores.
    pub fn encoder_bytes(&self) -> u64 {
        let Some(encoder) = &self.weights.encoder else { return 0 };
        let bias = [&encoder.encoder_bias, &encoder.decoder_bias].into_iter().flatten();
        let bias: usize = bias.map(|bias| bias.values().len()).sum();
        let norm = &encoder.output_norm;
        // Each begins at a multiple of 256 bytes.
        4 * (bias + norm.weight.len() + norm.bias.len()) as u64 + 4 * 256
    }

    /// Names that rules know a layer's experts by: those of a standard file.
    pub fn expert_names(&self, layer: usize, name: &str) -> Vec<String> {
        match granules::layer_of(name) {
            Some(_) => granules::stacked_names(layer).to_vec(),
            None => vec![name.to_owned()],
        }
    }

    /// By a name as of llama.cpp's files: `blk.3.attn_q.weight`, `dec.blk.3.cross_attn_q.weight`.
    fn share_by_name(&self, name: &str) -> Share {
        let n_encoder = self.hyper.n_encoder_layers();
        let (first, rest) = match (name.strip_prefix("enc."), name.strip_prefix("dec.")) {
            (Some(rest), _) => (0, rest),
            (_, Some(rest)) => (n_encoder, rest),
            _ => (0, name),
        };
        let number = rest.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
        match number.and_then(|number| number.parse::<usize>().ok()) {
            Some(l) if first + l < self.hyper.n_layers => Share::Dense(first + l),
            Some(_) => Share::Other,
            None if name.starts_with("enc.") => Share::Other,
            // How the output norm reads the residual streams: the last layer's end.
            None if rest.starts_with("output_hc_") || rest.starts_with("output_res_") => {
                Share::Dense(self.hyper.n_layers - 1)
            }
            None if rest.starts_with("output") => Share::Head,
            None if rest == "token_embd.weight" => Share::Embedding,
            None => Share::Other,
        }
    }
}
