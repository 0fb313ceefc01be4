//! Embeddings of the last tokens together, which join the residual streams (Qwen3.8,
//! DeepSeek-V4.1).

use super::Matrix;
use super::binder::Binder;
use super::recurrent::ConvWeights;
use super::residence::{Host, Residence};
use crate::model::ngrams::{END, NgramParams, TokenNumbers};
use crate::{Error, Result};

/// With e the table's rows of a token, and norms of each stream by itself: a stream gets v = value
/// · e times a gate that norm(key · e) and norm(stream) make, and a convolution of norm(gate · v),
/// if there is one.
#[derive(Clone, Debug)]
pub struct NgramWeights<R: Residence = Host> {
    pub params: NgramParams,
    /// [n · n_embd, width] and [n_embd, width].
    pub key: R::Linear,
    pub value: R::Linear,
    /// [n, n_embd] each.
    pub key_norm: R::Vector,
    pub query_norm: R::Vector,
    pub conv: Option<NgramConv<R>>,
}

#[derive(Clone, Debug)]
pub struct NgramConv<R: Residence = Host> {
    /// [n, n_embd]
    pub norm: R::Vector,
    pub form: R::Conv,
}

impl Binder<'_> {
    /// `None` for a layer without.
    pub fn ngrams(&self, l: usize) -> Result<Option<Box<NgramWeights>>> {
        let Some(params) = self.hyper.ngrams_of(l) else { return Ok(None) };
        let (n_embd, width, channels) = (self.hyper.n_embd, params.width(), params.channels);
        let both = ["ngram_key", "ngram_value"];
        let [key, value] = self.pair("ngram_key_value", both, l, [channels, n_embd], width)?;
        // Of weights of the product alone, one side has ones.
        let query_norm = match self.name("ngram_query_norm", l) {
            Some(_) => self.stream_norm("ngram_query_norm", l)?,
            None => vec![1.0; channels],
        };
        let conv = match params.n_taps {
            0 => None,
            _ => Some(NgramConv {
                norm: self.stream_norm("ngram_conv_norm", l)?,
                form: self.ngram_conv(params, l)?,
            }),
        };
        Ok(Some(Box::new(NgramWeights {
            params: params.clone(),
            key,
            value,
            key_norm: self.stream_norm("ngram_key_norm", l)?,
            query_norm,
            conv,
        })))
    }

    /// The table, which may have more rows than hashes name; `None` in a model without. States
    /// keep ids as f32.
    pub fn ngram_table(&self) -> Result<Option<Matrix>> {
        let all = &self.hyper.ngrams;
        let Some(params) = all.first() else { return Ok(None) };
        const MOST_IDS: u64 = 1 << f32::MANTISSA_DIGITS;
        let embedding = self.require("token_embd", 0)?;
        let n_vocab = self.tensor(embedding).dims.get(1).copied().unwrap_or(0);
        if n_vocab >= MOST_IDS {
            let expected = format!("fewer than {MOST_IDS} rows");
            return Err(self.wrong(embedding, expected, n_vocab.to_string()));
        }
        if let TokenNumbers::Ids { end } = params.numbers
            && u64::from(end) >= n_vocab
        {
            let (key, expected) = (self.descriptor.key(END), format!("an id below {n_vocab}"));
            return Err(Error::format(self.gguf.path(), key, expected, end.to_string()));
        }
        let index = self.require("ngram_table", 0)?;
        let given = self.tensor(index).dims.get(1).copied().unwrap_or(1);
        let n_rows = all.iter().map(NgramParams::n_rows).max().unwrap_or(0);
        if given < n_rows {
            let expected = format!("{n_rows} rows, as of ple.head_vocab_sizes");
            return Err(self.wrong(index, expected, given.to_string()));
        }
        self.matrix(index, given as usize, params.dim).map(Some)
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
