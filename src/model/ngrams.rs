//! Embeddings of the last tokens together, which hashes look up in a table (Qwen3.8,
//! DeepSeek-V4.1), from GGUF metadata.

use super::descriptor::Ngrams;
use super::hyper::{HyperParams, Keys};
use super::kv::LayerShape;
use super::recurrent::Recurrent;
use super::streams::StreamParams;
use crate::Result;
use crate::backend::ops::{ConvShape, StateSize};
use std::sync::Arc;

/// The n-grams of one layer.
#[derive(Clone, Debug)]
pub struct NgramParams {
    /// The layer before which they join the streams.
    pub layer: usize,
    pub numbers: TokenNumbers,
    /// Factors of the last tokens, the present one first. There are hashes of the last two of them,
    /// of the last three and so on.
    pub factors: Vec<u64>,
    /// The parts of the table that one hash after the other looks in: as many for two tokens as for
    /// three and so on.
    pub parts: Vec<TablePart>,
    /// Elements of the table's rows.
    pub dim: usize,
    /// Taps of the convolution, each as many positions before the next as there are factors; 0
    /// where there is none.
    pub n_taps: usize,
    /// The streams' elements.
    pub channels: usize,
}

/// The numbers of tokens that hashes are of.
#[derive(Clone, Debug)]
pub enum TokenNumbers {
    /// Ids. This one ends a text: hashes of tokens behind it do not see it or what is before, but
    /// this id instead.
    Ids { end: u32 },
    /// One for each token that has one. Hashes see no token without, nor what is before it, but
    /// this number instead.
    Listed { of: Arc<[Option<u32>]>, instead: u32 },
}

/// Rows of the table.
#[derive(Clone, Copy, Debug)]
pub struct TablePart {
    pub first: u64,
    pub n: u64,
}

const LAYERS: &str = "ple.layers";
pub const END: &str = "ple.eos_token_id";
const SIZES: &str = "ple.head_vocab_sizes";
/// The most tokens of a hash, taps of a convolution and rows of a table.
const MOST_TOKENS: usize = 8;
const MOST_TAPS: usize = 64;
const MOST_ROWS: u64 = i32::MAX as u64;

impl NgramParams {
    /// By layer; none if the architecture has none, or the file.
    pub(super) fn read(
        keys: &Keys,
        n_layers: usize,
        n_embd: usize,
        streams: Option<&StreamParams>,
        recurrent: Option<&Recurrent>,
    ) -> Result<Vec<NgramParams>> {
        let kind = keys.descriptor.parts.ngrams;
        let Some(streams) = streams.filter(|_| kind != Ngrams::None) else { return Ok(Vec::new()) };
        let layers = keys.gguf.u32s(&keys.descriptor.key(LAYERS))?.unwrap_or_default();
        if layers.is_empty() {
            let has_table = keys.have_tensor("ngram_table", &[true]);
            return if has_table { keys.some(LAYERS, None) } else { Ok(Vec::new()) };
        }
        let recurs = |l: u32| recurrent.is_some_and(|r| r.layers.get(l as usize) == Some(&true));
        let (is_right, expected) = match kind {
            Ngrams::Convolved => (
                layers.len() == 1 && layers.iter().all(|l| recurs(*l)),
                "one layer, of those with a recurrence".into(),
            ),
            _ => (
                layers.is_sorted_by(|a, b| a < b)
                    && layers.iter().all(|l| (*l as usize) < n_layers),
                format!("layers below {n_layers} in ascending order"),
            ),
        };
        if !is_right {
            return Err(keys.bad(LAYERS, expected, format!("{layers:?}")));
        }
        let n = keys.require("ple.ngram_size")?;
        if !(2..=MOST_TOKENS).contains(&n) {
            return Err(keys.bad("ple.ngram_size", format!("2 to {MOST_TOKENS}"), n));
        }
        let n_parts = (n - 1) * keys.require("ple.heads_per_ngram")?;
        let dim = keys.require("embedding_length_per_layer_input")?;
        if kind == Ngrams::Convolved && n_parts * dim != n_embd {
            let expected = format!("embedding_length = {n_embd} divided by {n_parts} hashes");
            return Err(keys.bad("embedding_length_per_layer_input", expected, dim));
        }
        let factors = first_of(keys, "ple.layer_multipliers", layers.len() * n)?;
        let parts = parts(keys, layers.len() * n_parts)?;
        let (numbers, n_taps) = match kind {
            Ngrams::Convolved => (TokenNumbers::ids(keys)?, taps(keys)?),
            _ => (TokenNumbers::listed(keys)?, 0),
        };
        let own = layers.iter().zip(factors.chunks_exact(n)).zip(parts.chunks_exact(n_parts));
        let params = own.map(|((layer, factors), parts)| NgramParams {
            layer: *layer as usize,
            numbers: numbers.clone(),
            factors: factors.to_vec(),
            parts: parts.to_vec(),
            dim,
            n_taps,
            channels: streams.n * n_embd,
        });
        Ok(params.collect())
    }

    /// Elements that a token's hashes look up.
    pub fn width(&self) -> usize {
        self.parts.len() * self.dim
    }

    /// The convolution, whose kernel is 0 between the taps.
    pub fn conv(&self) -> ConvShape {
        let kernel = self.n_taps.saturating_sub(1) * self.factors.len() + 1;
        ConvShape { channels: self.channels, kernel }
    }

    /// Tokens before the present one that hashes are of.
    pub fn n_before(&self) -> usize {
        self.factors.len() - 1
    }

    /// The convolution's inputs that it remembers, then the tokens of the text before the next, the
    /// last one last: an id plus 1 each, 0 before the text's beginning.
    pub fn state_size(&self) -> StateSize {
        StateSize { n_past: self.conv().n_past() + self.n_before(), n_state: 0 }
    }

    /// The least rows that the table has.
    pub fn n_rows(&self) -> u64 {
        self.parts.iter().map(|part| part.first + part.n).max().unwrap_or(0)
    }

    /// The table's rows of a token, `before` which there are these: the next one last, and `None`
    /// before the text's beginning.
    pub fn rows(&self, token: u32, before: &[Option<u32>], rows: &mut Vec<usize>) {
        let per_size = self.parts.len() / self.n_before();
        let (own, instead) = match &self.numbers {
            TokenNumbers::Ids { end } => (Some(token), *end),
            TokenNumbers::Listed { instead, .. } => (self.numbers.of(token), *instead),
        };
        let mut hash = u64::from(own.unwrap_or(instead)).wrapping_mul(self.factors[0]);
        let mut ended = own.is_none();
        let known = before.iter().rev().zip(&self.factors[1..]);
        for ((id, factor), parts) in known.zip(self.parts.chunks_exact(per_size)) {
            // Behind the end of a text nothing before it is seen.
            let number = id.and_then(|id| self.numbers.of(id));
            ended |= number.is_none();
            let number = number.filter(|_| !ended).unwrap_or(instead);
            hash ^= u64::from(number).wrapping_mul(*factor);
            rows.extend(parts.iter().map(|part| (part.first + hash % part.n) as usize));
        }
    }
}

impl TokenNumbers {
    /// The number of a token before another, if the hash of that one sees it.
    fn of(&self, id: u32) -> Option<u32> {
        match self {
            TokenNumbers::Ids { end } => Some(id).filter(|id| id != end),
            TokenNumbers::Listed { of, .. } => of.get(id as usize).copied().flatten(),
        }
    }

    fn ids(keys: &Keys) -> Result<TokenNumbers> {
        Ok(TokenNumbers::Ids { end: keys.some(END, keys.gguf.u32(&keys.descriptor.key(END))?)? })
    }

    /// A list of -1 for tokens without a number, and the token whose number stands for them.
    fn listed(keys: &Keys) -> Result<TokenNumbers> {
        let (list, pad) = ("engram.token_map", "engram.pad_token_id");
        let numbers = keys.some(list, keys.gguf.i32s(&keys.descriptor.key(list))?)?;
        if let Some(number) = numbers.iter().find(|number| **number < -1) {
            return Err(keys.bad(list, "numbers from -1 on".into(), number));
        }
        let of: Arc<[_]> = numbers.iter().map(|number| u32::try_from(*number).ok()).collect();
        let token = keys.some(pad, keys.gguf.u32(&keys.descriptor.key(pad))?)?;
        match of.get(token as usize).copied().flatten() {
            Some(instead) => Ok(TokenNumbers::Listed { of, instead }),
            None => Err(keys.bad(pad, format!("a token with a number in {list}"), token)),
        }
    }
}

impl HyperParams {
    /// The index in `cache_shapes` of what a layer's part of the last tokens remembers: behind all
    /// others, where layers with compressed rows have three each.
    pub fn ngram_slot(&self, layer: usize) -> usize {
        let n_before = if self.compressed.is_some() { 3 } else { 1 };
        n_before * self.n_layers + layer
    }

    pub fn ngrams_of(&self, layer: usize) -> Option<&NgramParams> {
        self.ngrams.iter().find(|params| params.layer == layer)
    }

    /// The cache of a layer's n-grams: what they remember, if the layer has any.
    pub fn ngram_state(&self, layer: usize) -> LayerShape {
        let own = self.ngrams_of(layer).map(|params| LayerShape::State(params.state_size()));
        own.unwrap_or(LayerShape::ELSEWHERE)
    }
}

fn taps(keys: &Keys) -> Result<usize> {
    match keys.require("ple.conv_kernel")? {
        n if n <= MOST_TAPS => Ok(n),
        n => Err(keys.bad("ple.conv_kernel", format!("1 to {MOST_TAPS}"), n)),
    }
}

/// The first `n` numbers of a list, which a file may pad.
fn first_of(keys: &Keys, key: &str, n: usize) -> Result<Vec<u64>> {
    let list = keys.some(key, keys.gguf.u64s(&keys.descriptor.key(key))?)?;
    match list.get(..n) {
        Some(list) => Ok(list.to_vec()),
        None => Err(keys.bad(key, format!("{n} numbers"), list.len())),
    }
}

fn parts(keys: &Keys, n: usize) -> Result<Vec<TablePart>> {
    let firsts = first_of(keys, "ple.head_offsets", n)?;
    let sizes = first_of(keys, SIZES, n)?;
    let parts = firsts.into_iter().zip(sizes).map(|(first, n)| {
        let is_right = n > 0 && first.checked_add(n).is_some_and(|end| end <= MOST_ROWS);
        let expected = || format!("1 to {MOST_ROWS} rows from row {first} on");
        if is_right { Ok(TablePart { first, n }) } else { Err(keys.bad(SIZES, expected(), n)) }
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> NgramParams {
        let part = |first| TablePart { first, n: 100 };
        NgramParams {
            layer: 0,
            numbers: TokenNumbers::Ids { end: 9 },
            factors: vec![1, 3, 1 << 62],
            parts: vec![part(0), part(100), part(200), part(300)],
            dim: 4,
            n_taps: 4,
            channels: 32,
        }
    }

    fn rows(token: u32, before: [Option<u32>; 2]) -> Vec<usize> {
        let mut rows = Vec::new();
        params().rows(token, &before, &mut rows);
        rows
    }

    #[test]
    fn hashes_are_of_the_last_two_and_of_the_last_three() {
        let two = 5 ^ (7 * 3);
        let three = (two ^ 6u64.wrapping_mul(1 << 62)) % 100;
        let (two, three) = (two as usize, three as usize);
        assert_eq!(rows(5, [Some(6), Some(7)]), [two, 100 + two, 200 + three, 300 + three]);
    }

    #[test]
    fn nothing_is_seen_before_an_end_or_the_beginning() {
        let ended = rows(5, [Some(9), Some(9)]);
        for before in [[Some(6), Some(9)], [Some(6), None], [None, None]] {
            assert_eq!(rows(5, before), ended);
        }
        // The end itself sees what is before it.
        assert_ne!(rows(9, [Some(6), Some(7)]), rows(9, [Some(6), Some(8)]));
        assert_eq!(rows(5, [None, Some(7)]), rows(5, [Some(9), Some(7)]));
    }

    #[test]
    fn nothing_is_seen_before_a_token_without_a_number() {
        let of = [Some(4), Some(2), None, Some(7)].into();
        let listed =
            NgramParams { numbers: TokenNumbers::Listed { of, instead: 2 }, n_taps: 0, ..params() };
        let rows = |token, before: [Option<u32>; 2]| {
            let mut rows = Vec::new();
            listed.rows(token, &before, &mut rows);
            rows
        };
        let two = 7 ^ (4 * 3);
        let three = (two ^ 2u64.wrapping_mul(1 << 62)) % 100;
        let (two, three) = (two as usize, three as usize);
        let expected = [two, 100 + two, 200 + three, 300 + three];
        // Token 2, one behind the list and the text's beginning are alike.
        for before in [Some(1), Some(2), Some(9), None] {
            assert_eq!(rows(3, [before, Some(0)]), expected);
        }
        assert_eq!(rows(2, [Some(0), Some(3)]), rows(1, [None, None]));
        assert_eq!(listed.state_size().n_past, 2);
    }

    #[test]
    fn taps_are_as_far_apart_as_hashes_see() {
        let params = params();
        assert_eq!(params.conv().kernel, 10);
        assert_eq!(params.state_size().n_past, 9 * 32 + 2);
        assert_eq!(params.n_rows(), 400);
    }
}
