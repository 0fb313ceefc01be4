//! SentencePiece unigram (`t5`): of all ways to write a text in pieces the one with the largest sum
//! of scores, which are log probabilities. One pass over the text's positions finds it (Viterbi;
//! Kudo, "Subword Regularization", 2018, section 3.1).

use super::normalize::Normalizer;
use super::partition::Trie;
use super::vocab::{TokenType, Vocab, byte_of};
use crate::Result;

/// A character that is no piece costs as much as the worst piece and this much more
/// (SentencePiece's constant).
const UNKNOWN_PENALTY: f32 = 10.0;

pub struct Ugm {
    normalizer: Normalizer,
    pieces: Trie,
    scores: Vec<f32>,
    unknown_score: f32,
    unk: Option<u32>,
    /// By which an unknown character is written, if the vocabulary has all of them.
    bytes: Option<Box<[u32; 256]>>,
}

/// The best way to a position: its score, and the last piece and where that starts.
#[derive(Clone, Copy)]
struct Best {
    score: f32,
    start: usize,
    /// None is an unknown character.
    piece: Option<u32>,
}

impl Ugm {
    pub fn new(vocab: &Vocab, unk: Option<u32>) -> Result<Self> {
        let (mut pieces, mut bytes) = (Trie::new(), [None; 256]);
        let mut scores = vocab.scores.clone();
        let normal = |id: &usize| vocab.types[*id] == TokenType::Normal;
        let normal_scores = || (0..vocab.tokens.len()).filter(normal).map(|id| vocab.scores[id]);
        let (min, max) = normal_scores()
            .fold((f32::MAX, f32::MIN), |(min, max), score| (min.min(score), max.max(score)));
        for (id, (token, kind)) in vocab.tokens.iter().zip(&vocab.types).enumerate() {
            match kind {
                TokenType::Normal if !token.is_empty() => pieces.insert(token, id as u32),
                TokenType::UserDefined if !token.is_empty() => {
                    // Better than any way to write it otherwise.
                    scores[id] = token.len() as f32 * max - 0.1;
                    pieces.insert(token, id as u32);
                }
                TokenType::Byte => {
                    if let Some(byte) = byte_of(token) {
                        bytes[byte as usize] = Some(id as u32);
                    }
                }
                _ => {}
            }
        }
        let all: Option<Vec<u32>> = bytes.into_iter().collect();
        Ok(Self {
            normalizer: Normalizer::new(vocab)?,
            pieces,
            scores,
            unknown_score: min - UNKNOWN_PENALTY,
            unk,
            bytes: all.and_then(|all| <[u32; 256]>::try_from(all).ok()).map(Box::new),
        })
    }

    pub fn encode(&self, text: &str, prefix_space: bool, out: &mut Vec<u32>) {
        let text = self.normalizer.apply(text, prefix_space);
        let best = self.best_ways(&text);
        let mut ways = Vec::new();
        let mut end = text.len();
        while end > 0 {
            let way = best[end];
            ways.push((way.piece, &text[way.start..end]));
            end = way.start;
        }
        let mut unknown_before = false;
        for (piece, spelling) in ways.into_iter().rev() {
            match (piece, &self.bytes) {
                (Some(id), _) => out.push(id),
                (None, Some(bytes)) => out.extend(spelling.bytes().map(|b| bytes[b as usize])),
                // Neighbouring unknown characters are one token.
                (None, None) if unknown_before => {}
                (None, None) => out.extend(self.unk),
            }
            unknown_before = piece.is_none();
        }
    }

    /// By position in bytes; what no way leads to (the inside of a character) stays as it was.
    fn best_ways(&self, text: &str) -> Vec<Best> {
        let nothing = Best { score: f32::NEG_INFINITY, start: 0, piece: None };
        let mut best = vec![nothing; text.len() + 1];
        best[0].score = 0.0;
        for (start, c) in text.char_indices() {
            let here = best[start].score;
            let mut is_piece = false;
            let mut offer = |len: usize, piece: Option<u32>, score: f32| {
                let (way, score) = (&mut best[start + len], here + score);
                if score > way.score {
                    *way = Best { score, start, piece };
                }
            };
            self.pieces.prefixes(&text.as_bytes()[start..], |len, id| {
                // A vocabulary may hold pieces that end within a character.
                if text.is_char_boundary(start + len) {
                    is_piece |= len == c.len_utf8();
                    offer(len, Some(id), self.scores[id as usize]);
                }
            });
            if !is_piece {
                offer(c.len_utf8(), None, self.unknown_score);
            }
        }
        best
    }
}
