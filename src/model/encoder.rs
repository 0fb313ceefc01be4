//! The numbers that a model with an encoder has besides a decoder's.

use crate::model::descriptor::{Form, Positions};
use crate::model::hyper::Keys;
use crate::{Error, Result};

#[derive(Clone, Debug)]
pub struct EncoderParams {
    /// Layers of the encoder.
    pub n_layers: usize,
    pub n_decoder_layers: usize,
    /// The token that the decoder starts with.
    pub start: u32,
    pub positions: PositionParams,
}

/// How both stacks know of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionParams {
    Relative {
        n_buckets: usize,
        max_distance: usize,
    },
    /// Token t gets the embedding of position `first + t`.
    Sinusoidal {
        first: usize,
    },
}

/// T5's.
const MAX_DISTANCE: usize = 128;

impl EncoderParams {
    /// `None` of a decoder.
    pub(super) fn read(keys: &Keys) -> Result<Option<EncoderParams>> {
        let parts = &keys.descriptor.parts;
        let n_layers = match parts.form {
            Form::Decoder => return Ok(None),
            Form::EncoderDecoder => keys.require("block_count")?,
        };
        let n_decoder_layers = keys.count("decoder_block_count")?.unwrap_or(n_layers);
        let start = keys.gguf.u32(&keys.descriptor.key("decoder_start_token_id"))?;
        let positions = match parts.positions {
            Positions::RelativeBias => relative(keys)?,
            Positions::Sinusoidal => sinusoidal(keys)?,
            Positions::Rope | Positions::Alibi => {
                panic!("{}: no such positions here", keys.descriptor.architecture)
            }
        };
        let start = keys.some("decoder_start_token_id", start)?;
        Ok(Some(EncoderParams { n_layers, n_decoder_layers, start, positions }))
    }
}

fn relative(keys: &Keys) -> Result<PositionParams> {
    const BUCKETS: &str = "attention.relative_buckets_count";
    let n_buckets = keys.require(BUCKETS)?;
    if n_buckets < 4 || n_buckets % 4 != 0 {
        return Err(keys.bad(BUCKETS, "a multiple of 4".into(), n_buckets));
    }
    let max_distance = keys.count("attention.relative_max_distance")?.unwrap_or(MAX_DISTANCE);
    // The decoder has a row for each of so many distances; the others share the rest.
    if max_distance <= n_buckets / 2 {
        let expected = format!("more than half of {BUCKETS} = {n_buckets}");
        return Err(keys.bad("attention.relative_max_distance", expected, max_distance));
    }
    Ok(PositionParams::Relative { n_buckets, max_distance })
}

fn sinusoidal(keys: &Keys) -> Result<PositionParams> {
    const PAD: &str = "tokenizer.ggml.padding_token_id";
    let pad = keys.gguf.u32(PAD)?;
    let pad = pad.ok_or_else(|| Error::format(keys.gguf.path(), PAD, "a token id", "nothing"))?;
    let n_embd = keys.require("embedding_length")?;
    if n_embd < 4 || n_embd % 2 != 0 {
        return Err(keys.bad("embedding_length", "an even number from 4 on".into(), n_embd));
    }
    Ok(PositionParams::Sinusoidal { first: pad as usize + 1 })
}
