//! Strings that end a repetition for DRY, as the tokens that they may be in.

use crate::tokenizer::{EncodeOptions, Tokenizer};
use std::collections::HashMap;

/// Longer breakers end a repetition after this many tokens.
const MAX_TAIL: usize = 20;

/// A breaker begins within a token, and goes on in the tokens after it, if in any.
#[derive(Debug, Default)]
pub struct Breakers {
    tails: HashMap<u32, Vec<Vec<u32>>>,
}

impl Breakers {
    pub fn new(tokenizer: &Tokenizer, strings: &[String]) -> Self {
        let mut out = Self::default();
        for id in 0..tokenizer.n_vocab() as u32 {
            let piece = tokenizer.piece(id).unwrap_or_default();
            for string in strings.iter().filter(|s| !s.is_empty()) {
                out.find(tokenizer, id, piece, string);
            }
        }
        out
    }

    /// How `string` may begin in a token.
    fn find(&mut self, tokenizer: &Tokenizer, id: u32, piece: &[u8], string: &str) {
        let bytes = string.as_bytes();
        if piece.windows(bytes.len()).any(|part| part == bytes) {
            return self.add(id, Vec::new());
        }
        for at in (0..piece.len()).filter(|at| piece[*at] == bytes[0]) {
            let begun = piece.len() - at;
            // Text goes on at a character; a rest that begins within one has no tokens.
            if bytes.starts_with(&piece[at..]) && string.is_char_boundary(begun) {
                let mut tail = tokenizer.encode(&string[begun..], EncodeOptions::TEXT);
                tail.truncate(MAX_TAIL);
                self.add(id, tail);
            }
        }
    }

    fn add(&mut self, id: u32, tail: Vec<u32>) {
        let tails = self.tails.entry(id).or_default();
        if !tails.contains(&tail) {
            tails.push(tail);
        }
    }

    /// Whether the token holds a whole breaker.
    pub fn is_one(&self, id: u32) -> bool {
        self.tails.get(&id).is_some_and(|tails| tails.iter().any(Vec::is_empty))
    }

    /// How many tokens there are since the last breaker, or in all; `text` has the newest first.
    pub fn limit(&self, text: &[u32]) -> usize {
        let ends = |at: usize| {
            let tails = self.tails.get(&text[at])?;
            let goes_on = |tail: &&Vec<u32>| {
                tail.len() <= at && tail.iter().rev().eq(&text[at - tail.len()..at])
            };
            Some(at - tails.iter().filter(goes_on).map(Vec::len).max()?)
        };
        (0..text.len()).find_map(ends).unwrap_or(text.len())
    }

    /// Breakers of one token each.
    #[cfg(test)]
    pub fn tokens(ids: &[u32]) -> Self {
        let mut out = Self::default();
        ids.iter().for_each(|&id| out.add(id, Vec::new()));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{Vocab, VocabModel};

    /// A vocabulary of GPT-2's kind: letters, and words made of them.
    fn tokenizer(words: &[&str]) -> Tokenizer {
        let letters = ('a'..='z').map(String::from);
        let tokens = letters.chain(words.iter().map(|w| w.to_string()));
        let tokens: Vec<Vec<u8>> = tokens.map(String::into_bytes).collect();
        Tokenizer::new(Vocab::new(VocabModel::Bpe, tokens)).unwrap()
    }

    #[test]
    fn a_breaker_is_found_in_and_across_tokens() {
        let tokenizer = tokenizer(&["xab", "xa", "bx", "aba"]);
        let (xab, xa, bx, aba) = (26, 27, 28, 29);
        let breakers = Breakers::new(&tokenizer, &["ab".into()]);
        let (a, b) = (0, 1);
        for (id, expected) in [(xab, true), (aba, true), (xa, false), (bx, false), (a, false)] {
            assert_eq!(breakers.is_one(id), expected, "{id}");
        }
        // The newest token first.
        assert_eq!(breakers.limit(&[7, 8, xab, 9]), 2);
        assert_eq!(breakers.limit(&[7, b, xa, 9]), 1, "xa, b");
        assert_eq!(breakers.limit(&[b, a, 9]), 0, "a, b");
        assert_eq!(breakers.limit(&[7, 8, xa, 9]), 4, "xa, i");
        assert_eq!(breakers.limit(&[a]), 1);
        assert_eq!(breakers.limit(&[]), 0);
    }
}
