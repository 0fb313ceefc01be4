//! Byte-level BPE: words from the pre-tokenizer, each from single bytes upwards by the ranked
//! merges. Merges work on symbol numbers: a token's id, or a number past the vocabulary for a merge
//! result that is no token (such a symbol ends as its bytes).

use super::byte_map::char_of;
use super::heap::Merger;
use super::pretokenize::PreTokenizer;
use super::vocab::{TokenType, Vocab, byte_level, split_merge};
use crate::Result;
use std::collections::HashMap;

pub struct Bpe {
    pre: PreTokenizer,
    n_vocab: u32,
    /// (left, right) → (rank, result).
    merges: HashMap<(u32, u32), (u32, u32)>,
    byte_symbols: [u32; 256],
    /// The bytes of symbols past the vocabulary.
    extra: Vec<Vec<u8>>,
    /// Whole words by their bytes; filled only for vocabularies that ignore merges.
    words: HashMap<Vec<u8>, u32>,
}

/// Symbols by their spelling, while the tables are built.
struct Interner<'v> {
    by_text: HashMap<&'v [u8], u32>,
    n_vocab: u32,
    extra: Vec<&'v [u8]>,
}

impl<'v> Interner<'v> {
    fn symbol(&mut self, text: &'v [u8]) -> u32 {
        let next = self.n_vocab + self.extra.len() as u32;
        *self.by_text.entry(text).or_insert_with(|| {
            self.extra.push(text);
            next
        })
    }
}

impl Bpe {
    pub fn new(vocab: &Vocab) -> Result<Self> {
        let pre = PreTokenizer::named(vocab.pre.as_deref(), vocab.nfc, &vocab.path)?;
        let n_vocab = vocab.tokens.len() as u32;
        // Of tokens spelt alike the last one counts, as in llama.cpp.
        let by_text: HashMap<&[u8], u32> =
            vocab.tokens.iter().enumerate().map(|(id, t)| (t.as_slice(), id as u32)).collect();
        if by_text.len() < vocab.tokens.len() {
            let n = vocab.tokens.len() - by_text.len();
            log::warn!("{n} tokens have the same text as another token: the last of each is used");
        }
        let bytes: Vec<String> = (0..=255u8).map(|b| char_of(b).to_string()).collect();
        let joined: Vec<Vec<u8>> = vocab.merges.iter().map(|m| joined(m)).collect();
        let mut interner = Interner { by_text, n_vocab, extra: Vec::new() };
        let mut byte_symbols = [0; 256];
        for (slot, text) in byte_symbols.iter_mut().zip(&bytes) {
            *slot = interner.symbol(text.as_bytes());
        }
        let mut merges = HashMap::with_capacity(vocab.merges.len());
        for (rank, (merge, joined)) in vocab.merges.iter().zip(&joined).enumerate() {
            let Some((left, right)) = split_merge(merge) else { continue };
            let pair = (interner.symbol(left), interner.symbol(right));
            let result = interner.symbol(joined);
            // A merge listed twice has its first rank.
            merges.entry(pair).or_insert((rank as u32, result));
        }
        let extra: Vec<Vec<u8>> =
            interner.extra.iter().map(|t| byte_level(t).unwrap_or_default()).collect();
        let missing = byte_symbols.iter().filter(|&&s| s >= n_vocab).count();
        if missing > 0 {
            log::warn!("the vocabulary lacks {missing} of the 256 bytes: they are dropped");
        }
        let words = if pre.ignore_merges { whole_words(vocab) } else { HashMap::new() };
        Ok(Self { pre, n_vocab, merges, byte_symbols, extra, words })
    }

    pub fn adds_bos(&self) -> bool {
        self.pre.add_bos
    }

    pub fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let mut merger = Merger::new();
        self.pre.words(text, |word| {
            if let Some(&id) = self.words.get(word.as_bytes()) {
                return out.push(id);
            }
            merger.run(
                word.bytes().map(|b| self.byte_symbols[b as usize]),
                |left, right| self.merges.get(&(left, right)).copied(),
                |symbol| self.push(symbol, out),
            );
        });
    }

    fn push(&self, symbol: u32, out: &mut Vec<u32>) {
        if symbol < self.n_vocab {
            return out.push(symbol);
        }
        let bytes = &self.extra[(symbol - self.n_vocab) as usize];
        let ids = bytes.iter().map(|&b| self.byte_symbols[b as usize]);
        out.extend(ids.filter(|&id| id < self.n_vocab));
    }
}

fn joined(merge: &[u8]) -> Vec<u8> {
    split_merge(merge).map(|(left, right)| [left, right].concat()).unwrap_or_default()
}

fn whole_words(vocab: &Vocab) -> HashMap<Vec<u8>, u32> {
    let normal = |id: &usize| vocab.types[*id] == TokenType::Normal;
    (0..vocab.tokens.len())
        .filter(normal)
        .filter_map(|id| Some((byte_level(&vocab.tokens[id])?, id as u32)))
        .filter(|(bytes, _)| !bytes.is_empty())
        .collect()
}
