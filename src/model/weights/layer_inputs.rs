//! Inputs of each layer's own (Gemma 4): a row of a second embedding and a projection of the first.

use super::binder::Binder;
use super::residence::{Host, Residence};
use super::{Linear, Matrix, Norm};
use crate::Result;

/// Makes the inputs of all layers.
pub struct LayerInputs {
    /// A row a token: [n_vocab, n_layers · layer_input].
    pub token_embd: Matrix,
    /// Reads the embedding and divides by √n_embd: [n_layers · layer_input, n_embd].
    pub projection: Linear,
    /// RMSNorm of each layer's part of the projection.
    pub norm: Vec<f32>,
}

/// A layer's part: x += norm(output · (gelu(gate · x) ⊙ input)).
#[derive(Clone, Debug)]
pub struct InputPart<R: Residence = Host> {
    /// [layer_input, n_embd]
    pub gate: R::Linear,
    /// [n_embd, layer_input]
    pub output: R::Linear,
    pub norm: Norm<R>,
}

impl Binder<'_> {
    /// `None` in a model whose layers read the stream alone.
    pub fn layer_inputs(&self, n_vocab: usize) -> Result<Option<LayerInputs>> {
        let (n, n_embd) = (self.hyper.layer_input, self.hyper.n_embd);
        let embd = self.find("layer_token_embd", 0)?;
        if let Some(embd) = embd {
            self.require_key("embedding_length_per_layer_input", embd)?;
        }
        if n == 0 {
            return Ok(None);
        }
        let all = self.hyper.n_layers * n;
        let embd = self.require("layer_token_embd", 0)?;
        let mut projection = self.linear("layer_projection", 0, all, n_embd)?;
        projection.scale /= (n_embd as f32).sqrt();
        Ok(Some(LayerInputs {
            token_embd: self.matrix(embd, n_vocab, all)?,
            projection,
            norm: self.vector(self.require("layer_projection_norm", 0)?, n)?,
        }))
    }

    pub fn input_part(&self, l: usize) -> Result<Option<InputPart>> {
        let (n, n_embd) = (self.hyper.layer_input, self.hyper.n_embd);
        if n == 0 {
            return Ok(None);
        }
        Ok(Some(InputPart {
            gate: self.linear("layer_input_gate", l, n, n_embd)?,
            output: self.linear("layer_input_output", l, n_embd, n)?,
            norm: self.norm("layer_input_norm", l)?,
        }))
    }
}
