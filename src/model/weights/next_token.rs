//! The weights of a layer behind the last, which predicts the token after the next
//! (DeepSeek-V3, section 2.2).

use super::binder::Binder;
use super::{Layer, Linear, Mixer, Norm, Streams, Weights};
use crate::Result;
use crate::gguf::Gguf;
use crate::model::descriptor::Descriptor;
use crate::model::hyper::HyperParams;

/// A layer that predicts the token after the next, as a model of one layer whose input is made of
/// the next token's embedding and of what the other model computed for this one.
pub struct NextTokenWeights {
    pub hyper: HyperParams,
    /// The layer, with embedding, output norm and output of its own or of the other model.
    pub weights: Weights,
    pub embedding_norm: Norm,
    pub hidden_norm: Norm,
    /// [n_embd, 2 · n_embd], from both norms' results to the layer's input
    pub input: Linear,
}

impl NextTokenWeights {
    /// `None` if the file has no such layer, or says that it has one and lacks its tensors, as many
    /// do. Of several layers this is the first.
    pub fn bind(
        gguf: &Gguf,
        descriptor: &Descriptor,
        of_model: &HyperParams,
        shared: &Weights,
    ) -> Result<Option<NextTokenWeights>> {
        let n_further = gguf.u32(&descriptor.key("nextn_predict_layers"))?.unwrap_or(0);
        if !descriptor.parts.predicts_next || n_further == 0 {
            return Ok(None);
        }
        let hyper = of_model.with_next_layer();
        let b = Binder::new(gguf, descriptor, &hyper)?;
        let (l, n_embd, n_vocab) = (of_model.n_layers, hyper.n_embd, shared.token_embd.rows);
        if b.find("nextn_eh_proj", l)?.is_none() {
            let prefix = format!("blk.{l}.");
            let n = gguf.tensors().iter().filter(|t| t.name.starts_with(&prefix)).count();
            if n > 0 {
                log::warn!(
                    "{}: {n} tensors of layer {l}, which predicts further tokens, are not used: \
                     {prefix}nextn.eh_proj.weight is missing",
                    gguf.path().display()
                );
            }
            return Ok(None);
        }
        let own = |role: &str| {
            b.find(role, l)?.map(|tensor| b.matrix(tensor, n_vocab, n_embd)).transpose()
        };
        let output = own("nextn_shared_head_head")?.map(Linear::plain);
        let output_norm = b.optional_norm("nextn_shared_head_norm", l)?;
        let (ffn, experts) = b.ffn(l)?;
        let layer = Layer {
            input: None,
            norm: b.norm("attn_norm", l)?,
            mixer: alone(b.mixer(l)?),
            post_norm: b.optional_norm("attn_post_norm", l)?,
            ffn: Some(ffn),
            scale: 1.0,
            streams: [Streams::One, Streams::One],
            ngrams: None,
        };
        let weights = Weights {
            layer_inputs: None,
            start: None,
            token_embd: own("nextn_embed_tokens")?.unwrap_or_else(|| shared.token_embd.clone()),
            output_norm: output_norm.unwrap_or_else(|| shared.output_norm.clone()),
            output: output.unwrap_or_else(|| shared.output.clone()),
            logit_divisor: shared.logit_divisor,
            last_streams: Streams::One,
            rope_factors: shared.rope_factors.clone(),
            ngram_table: None,
            layers: vec![layer],
            encoder: None,
            classifier: None,
            routed: vec![experts.routed],
            dense: vec![experts.dense],
            shared: vec![experts.shared],
        };
        Ok(Some(NextTokenWeights {
            embedding_norm: b.norm("nextn_enorm", l)?,
            hidden_norm: b.norm("nextn_hnorm", l)?,
            input: b.linear("nextn_eh_proj", l, n_embd, 2 * n_embd)?,
            hyper: hyper.of_last_layer(),
            weights,
        }))
    }
}

/// The mixer of a layer that is alone in its cache.
fn alone(mut mixer: Mixer) -> Mixer {
    if let Mixer::Latent(latent) = &mut mixer {
        latent.source = 0;
    }
    mixer
}
