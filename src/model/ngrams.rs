//! Embeddings of the last tokens together, which hashes look up in a table (Qwen3.8), from GGUF
//! metadata.

use super::hyper::Keys;
use super::recurrent::Recurrent;
use super::streams::StreamParams;
use crate::Result;
use crate::backend::ops::{ConvShape, StateSize};

#[derive(Clone, Debug)]
pub struct NgramParams {
    /// The layer before which they join the streams.
    pub layer: usize,
    /// The id that ends a text: hashes of tokens behind it do not see it or what is before.
    pub end: u32,
    /// Factors of the last tokens, the present one first. There are hashes of the last two of them,
    /// of the last three and so on.
    pub factors: Vec<u64>,
    /// The parts of the table that one hash after the other looks in: as many for two tokens as for
    /// three and so on.
    pub parts: Vec<TablePart>,
    /// Elements of the table's rows.
    pub dim: usize,
    /// Taps of the convolution, each as many positions before the next as there are factors.
    pub n_taps: usize,
    /// The streams' elements.
    pub channels: usize,
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
    /// `None` if the architecture has none, or the file.
    pub(super) fn read(
        keys: &Keys,
        n_embd: usize,
        streams: Option<&StreamParams>,
        recurrent: Option<&Recurrent>,
    ) -> Result<Option<NgramParams>> {
        let (true, Some(streams), Some(recurrent)) =
            (keys.descriptor.parts.ngrams, streams, recurrent)
        else {
            return Ok(None);
        };
        let layers = keys.gguf.u32s(&keys.descriptor.key(LAYERS))?.unwrap_or_default();
        if layers.is_empty() {
            let has_table = keys.have_tensor("ngram_table", &[true]);
            return if has_table { keys.some(LAYERS, None) } else { Ok(None) };
        }
        let layer = match layers[..] {
            [l] if recurrent.layers.get(l as usize) == Some(&true) => l as usize,
            _ => {
                let expected = "one layer, of those with a recurrence".into();
                return Err(keys.bad(LAYERS, expected, format!("{layers:?}")));
            }
        };
        let n = keys.require("ple.ngram_size")?;
        if !(2..=MOST_TOKENS).contains(&n) {
            return Err(keys.bad("ple.ngram_size", format!("2 to {MOST_TOKENS}"), n));
        }
        let parts = parts(keys, (n - 1) * keys.require("ple.heads_per_ngram")?)?;
        let dim = keys.require("embedding_length_per_layer_input")?;
        if parts.len() * dim != n_embd {
            let expected = format!("embedding_length = {n_embd} divided by {} hashes", parts.len());
            return Err(keys.bad("embedding_length_per_layer_input", expected, dim));
        }
        let n_taps = keys.require("ple.conv_kernel")?;
        if n_taps > MOST_TAPS {
            return Err(keys.bad("ple.conv_kernel", format!("1 to {MOST_TAPS}"), n_taps));
        }
        Ok(Some(NgramParams {
            layer,
            end: keys.some(END, keys.gguf.u32(&keys.descriptor.key(END))?)?,
            factors: first_of(keys, "ple.layer_multipliers", n)?,
            parts,
            dim,
            n_taps,
            channels: streams.n * n_embd,
        }))
    }

    /// The convolution, whose kernel is 0 between the taps.
    pub fn conv(&self) -> ConvShape {
        let kernel = (self.n_taps - 1) * self.factors.len() + 1;
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
        let mut hash = u64::from(token).wrapping_mul(self.factors[0]);
        let mut ended = false;
        let known = before.iter().rev().zip(&self.factors[1..]);
        for ((id, factor), parts) in known.zip(self.parts.chunks_exact(per_size)) {
            // Behind the end of a text nothing before it is seen.
            ended |= id.is_none_or(|id| id == self.end);
            let id = id.filter(|_| !ended).unwrap_or(self.end);
            hash ^= u64::from(id).wrapping_mul(*factor);
            rows.extend(parts.iter().map(|part| (part.first + hash % part.n) as usize));
        }
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
            end: 9,
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
    fn taps_are_as_far_apart_as_hashes_see() {
        let params = params();
        assert_eq!(params.conv().kernel, 10);
        assert_eq!(params.state_size().n_past, 9 * 32 + 2);
        assert_eq!(params.n_rows(), 400);
    }
}
