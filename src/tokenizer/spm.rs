//! SentencePiece BPE: characters merge into ever longer pieces of the vocabulary, best score first;
//! a character that is no piece becomes its bytes (`<0x0A>`), or `unk` where the vocabulary has no
//! such bytes. Most files of this kind (Llama) do not normalise the text beyond writing spaces as
//! U+2581; NLLB's bring a charsmap.

use super::heap::Merger;
use super::normalize::Normalizer;
use super::vocab::{TokenType, Vocab, byte_of};
use crate::Result;
use std::cmp::Ordering;
use std::collections::HashMap;

pub struct Spm {
    normalizer: Normalizer,
    ids: HashMap<Vec<u8>, u32>,
    scores: Vec<f32>,
    /// Length in bytes of the longest piece: no pair longer than that is looked up.
    longest: usize,
    bytes: [Option<u32>; 256],
    unk: Option<u32>,
}

/// A score as a merge key: the highest first. Validation refused NaN, so the order is total; −0
/// and 0 are equal (the first piece that SentencePiece learns has the score −0).
struct ByScore(f32);

impl Ord for ByScore {
    fn cmp(&self, other: &Self) -> Ordering {
        other.0.partial_cmp(&self.0).unwrap_or(Ordering::Equal)
    }
}

impl PartialOrd for ByScore {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for ByScore {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for ByScore {}

impl Spm {
    pub fn new(vocab: &Vocab, unk: Option<u32>) -> Result<Self> {
        let mut ids = HashMap::with_capacity(vocab.tokens.len());
        let mut bytes = [None; 256];
        for (id, (token, kind)) in vocab.tokens.iter().zip(&vocab.types).enumerate() {
            let id = id as u32;
            match kind {
                // Text that merely spells `<s>` or `<0x41>` is text, as in SentencePiece.
                TokenType::Control | TokenType::Unknown => {}
                TokenType::Byte => {
                    if let Some(byte) = byte_of(token) {
                        bytes[byte as usize] = Some(id);
                    }
                }
                _ => _ = ids.insert(token.clone(), id),
            }
        }
        let longest = ids.keys().map(Vec::len).max().unwrap_or(0);
        let normalizer = Normalizer::new(vocab)?;
        Ok(Self { normalizer, ids, scores: vocab.scores.clone(), longest, bytes, unk })
    }

    pub fn encode(&self, text: &str, prefix_space: bool, out: &mut Vec<u32>) {
        self.merge(&self.normalizer.apply(text, prefix_space), out);
    }

    fn merge(&self, text: &str, out: &mut Vec<u32>) {
        // A symbol is where its text starts: its end is known through `ends`, because the merger
        // keeps symbols apart by number only and a merge leaves the start where it was.
        let starts: Vec<u32> = text.char_indices().map(|(i, _)| i as u32).collect();
        let mut spans = Spans::new(text, &starts);
        let mut merger = Merger::new();
        let mut pieces = Vec::new();
        merger.run(
            0..starts.len() as u32,
            |left, right| {
                let (start, end) = (spans.start(left), spans.end(right));
                if end - start > self.longest {
                    return None;
                }
                let id = *self.ids.get(&text.as_bytes()[start..end])?;
                Some((ByScore(self.scores[id as usize]), spans.add(start, end)))
            },
            |symbol| pieces.push(symbol),
        );
        let mut unknown_before = false;
        for symbol in pieces {
            let piece = &text[spans.start(symbol)..spans.end(symbol)];
            let unknown = !self.push_piece(piece, unknown_before, out);
            unknown_before = unknown;
        }
    }

    /// Appends the ids of a piece; false if it was unknown. Neighbouring unknown characters are
    /// one `unk`.
    fn push_piece(&self, piece: &str, unknown_before: bool, out: &mut Vec<u32>) -> bool {
        if let Some(&id) = self.ids.get(piece.as_bytes()) {
            out.push(id);
            return true;
        }
        if piece.bytes().all(|b| self.bytes[b as usize].is_some()) {
            out.extend(piece.bytes().filter_map(|b| self.bytes[b as usize]));
            return true;
        }
        if !unknown_before {
            out.extend(self.unk);
        }
        false
    }
}

/// Stretches of the text by symbol number: the characters first, merge results after them.
struct Spans {
    spans: Vec<(u32, u32)>,
}

impl Spans {
    fn new(text: &str, starts: &[u32]) -> Self {
        let ends = starts.iter().skip(1).copied().chain([text.len() as u32]);
        Self { spans: starts.iter().copied().zip(ends).collect() }
    }

    fn start(&self, symbol: u32) -> usize {
        self.spans[symbol as usize].0 as usize
    }

    fn end(&self, symbol: u32) -> usize {
        self.spans[symbol as usize].1 as usize
    }

    fn add(&mut self, start: usize, end: usize) -> u32 {
        self.spans.push((start as u32, end as u32));
        self.spans.len() as u32 - 1
    }
}
