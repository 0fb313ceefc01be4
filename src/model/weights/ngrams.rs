//! Embeddings of the last tokens together, which join the residual streams (Qwen3.8).

use super::binder::Binder;
use super::recurrent::ConvWeights;
use super::{Linear, Matrix};
use crate::model::ngrams::{END, NgramParams};
use crate::{Error, Result};

/// With e the table's rows of a token, and norms of each stream by itself: a stream gets v = value
/// · e times a gate that norm(key · e) and norm(stream) make, and a convolution of norm(gate · v).
#[derive(Clone, Debug)]
pub struct NgramWeights {
    pub params: NgramParams,
    pub table: Matrix,
    /// [n · n_embd, n_embd] and [n_embd, n_embd].
    pub key: Linear,
    pub value: Linear,
    /// [n, n_embd] each.
    pub key_norm: Vec<f32>,
    pub query_norm: Vec<f32>,
    pub conv_norm: Vec<f32>,
    pub conv: ConvWeights,
}

impl Binder<'_> {
    /// `None` for a layer without.
    pub fn ngrams(&self, l: usize) -> Result<Option<Box<NgramWeights>>> {
        let Some(params) = self.hyper.ngrams.as_ref().filter(|params| params.layer == l) else {
            return Ok(None);
        };
        let (n_embd, channels) = (self.hyper.n_embd, params.channels);
        Ok(Some(Box::new(NgramWeights {
            params: params.clone(),
            table: self.ngram_table(params)?,
            key: self.linear("ngram_key", l, channels, n_embd)?,
            value: self.linear("ngram_value", l, n_embd, n_embd)?,
            key_norm: self.stream_norm("ngram_key_norm", l)?,
            query_norm: self.stream_norm("ngram_query_norm", l)?,
            conv_norm: self.stream_norm("ngram_conv_norm", l)?,
            conv: self.ngram_conv(params, l)?,
        })))
    }

    /// The table, which may have more rows than hashes name. States keep ids as f32.
    fn ngram_table(&self, params: &NgramParams) -> Result<Matrix> {
        const MOST_IDS: u64 = 1 << f32::MANTISSA_DIGITS;
        let embedding = self.require("token_embd", 0)?;
        let n_vocab = self.tensor(embedding).dims.get(1).copied().unwrap_or(0);
        if n_vocab >= MOST_IDS {
            let expected = format!("fewer than {MOST_IDS} rows");
            return Err(self.wrong(embedding, expected, n_vocab.to_string()));
        }
        if u64::from(params.end) >= n_vocab {
            let (key, expected) = (self.descriptor.key(END), format!("an id below {n_vocab}"));
            return Err(Error::format(self.gguf.path(), key, expected, params.end.to_string()));
        }
        let index = self.require("ngram_table", 0)?;
        let given = self.tensor(index).dims.get(1).copied().unwrap_or(1);
        if given < params.n_rows() {
            let expected = format!("{} rows, as of ple.head_vocab_sizes", params.n_rows());
            return Err(self.wrong(index, expected, given.to_string()));
        }
        self.matrix(index, given as usize, params.dim)
    }

    /// The taps with zeros between them.
    fn ngram_conv(&self, params: &NgramParams, l: usize) -> Result<ConvWeights> {
        let index = self.require("ngram_conv", l)?;
        let taps = self.values(index, &[params.n_taps, params.channels])?;
        let (shape, step) = (params.conv(), params.factors.len());
        let mut weight = vec![0.0; shape.kernel * shape.channels];
        let channels = weight.chunks_exact_mut(shape.kernel).zip(taps.chunks_exact(params.n_taps));
        for (weight, taps) in channels {
            weight.iter_mut().step_by(step).zip(taps).for_each(|(weight, tap)| *weight = *tap);
        }
        Ok(ConvWeights { shape, weight, bias: None, silu: true })
    }
}
