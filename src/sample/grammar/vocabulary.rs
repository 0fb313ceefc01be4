//! A tokenizer's vocabulary as the prefix tree that masks are computed on.

use crate::tokenizer::{TokenType, Tokenizer};
use crate::{Error, Result};
use llguidance::toktrie::{INVALID_TOKEN, TokRxInfo, TokTrie};

/// A longer token has no place in the tree: no grammar allows it.
const MAX_TOKEN_BYTES: usize = 1000;

/// Nodes and tokens that the tree has room for.
const MAX_NODES: usize = 1 << 22;
const MAX_TOKENS: usize = (1 << 24) - 2;

/// The tree of all tokens. Control tokens begin with a marker that no text has, so that only a
/// grammar which names them allows them; tokens that end a generation are known as such.
pub fn trie(tokenizer: &Tokenizer) -> Result<TokTrie> {
    let n_vocab = tokenizer.n_vocab();
    let ids = 0..u32::try_from(n_vocab).unwrap_or(u32::MAX);
    let words = ids.map(|id| word(tokenizer, id)).collect::<Result<Vec<_>>>()?;
    if n_vocab > MAX_TOKENS || n_nodes(&words) >= MAX_NODES {
        return Err(Error::invalid("the vocabulary is too large for grammars"));
    }
    Ok(tree(&words, &tokenizer.eog_ids().collect::<Vec<u32>>()))
}

/// The tree of these words, by their ids; `ends` are the tokens that end a generation.
pub fn tree(words: &[Vec<u8>], ends: &[u32]) -> TokTrie {
    let end = ends.first().copied().unwrap_or(INVALID_TOKEN);
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), words);
    if ends.is_empty() { trie } else { trie.with_eos_tokens(ends) }
}

/// The bytes that a token adds to a text, with the marker if it is a control token.
fn word(tokenizer: &Tokenizer, id: u32) -> Result<Vec<u8>> {
    let (piece, kind) = (tokenizer.piece(id)?, tokenizer.token_type(id)?);
    let is_control = matches!(kind, TokenType::Control | TokenType::Unknown);
    if piece.is_empty() || piece.len() > MAX_TOKEN_BYTES {
        return Ok(Vec::new());
    }
    Ok(match is_control || tokenizer.is_eog(id) {
        true => [&[TokTrie::SPECIAL_TOKEN_MARKER], piece].concat(),
        false => piece.to_vec(),
    })
}

/// The bytes of a token without the marker.
pub fn piece(trie: &TokTrie, id: u32) -> &[u8] {
    match trie.token(id) {
        [TokTrie::SPECIAL_TOKEN_MARKER, name @ ..] if !name.is_empty() => name,
        bytes => bytes,
    }
}

/// One for each distinct prefix, and one for each token that is there twice.
fn n_nodes(words: &[Vec<u8>]) -> usize {
    let mut sorted: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
    sorted.sort_unstable();
    let mut before: &[u8] = &[];
    let mut n = 1;
    for word in sorted {
        let common = word.iter().zip(before).take_while(|(a, b)| a == b).count();
        n += (word.len() - common).max(1);
        before = word;
    }
    n
}
