//! `tiktoken.model`: a token a line, its bytes in base64 and its rank, which is its id. There are
//! no merges: of neighbours that make a token those of lowest rank merge first, so the two parts
//! of a token are what lower ranks make of it.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use super::base64;
use super::bpe::MAX_TOKENS;
use super::vocab::{AddedToken, TokenType, Vocab};
use crate::tokenizer::byte_level_text;
use crate::{Error, Result};

/// The code beside such a file splits texts like this unless told otherwise, and names the ids
/// after the file's so.
const PRE: &str = "kimi-k2";
const N_RESERVED: usize = 256;

/// No such file comes near; a larger one is something else.
const MAX_BYTES: u64 = 1 << 26;

pub fn read(path: &Path, pre: Option<&str>, n_rows: u64, added: &[AddedToken]) -> Result<Vocab> {
    let tokens = parse(path)?;
    let ranks: HashMap<&[u8], usize> =
        tokens.iter().enumerate().map(|(rank, token)| (token.as_slice(), rank)).collect();
    let mut vocab = Vocab::new("gpt2", pre.unwrap_or(PRE));
    let mut merges = Vec::with_capacity(tokens.len());
    for (rank, token) in tokens.iter().enumerate() {
        vocab.put(rank, &byte_level_text(token), TokenType::Normal, 0.0);
        if let [left, right] = parts(token, rank, &ranks)[..] {
            merges.push(format!("{} {}", byte_level_text(left), byte_level_text(right)));
        }
    }
    vocab.merges = Some(merges);
    let end = (tokens.len() + N_RESERVED).min(usize::try_from(n_rows).unwrap_or(usize::MAX));
    for id in tokens.len()..end {
        vocab.put(id, &format!("<|reserved_token_{id}|>"), TokenType::Control, 0.0);
    }
    vocab.put_added(added);
    Ok(vocab)
}

/// Tokens by rank.
fn parse(path: &Path) -> Result<Vec<Vec<u8>>> {
    let n_bytes = fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
    if n_bytes > MAX_BYTES {
        let expected = format!("at most {MAX_BYTES} bytes");
        return Err(Error::format(path, "size", expected, n_bytes.to_string()));
    }
    let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
    let text = String::from_utf8_lossy(&bytes);
    let mut tokens = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let token = line.split_once(' ').and_then(|(token, rank)| {
            let in_order = rank.parse() == Ok(tokens.len()) && tokens.len() < MAX_TOKENS;
            base64::decode(token).filter(|token| in_order && !token.is_empty())
        });
        tokens.push(token.ok_or_else(|| {
            let expected = format!("a token in base64 and its rank, {}", tokens.len());
            let got: String = line.chars().take(40).collect();
            Error::format(path, format!("line {}", i + 1), expected, format!("{got:?}"))
        })?);
    }
    if tokens.is_empty() {
        return Err(Error::format(path, "content", "at least one token", "none"));
    }
    Ok(tokens)
}

/// The parts of `token` after all merges of ranks below `limit`.
fn parts<'a>(token: &'a [u8], limit: usize, ranks: &HashMap<&[u8], usize>) -> Vec<&'a [u8]> {
    // Where the parts start, and the end of the last.
    let mut cuts: Vec<usize> = (0..=token.len()).collect();
    loop {
        let rank = |i: usize| ranks.get(&token[cuts[i]..cuts[i + 2]]).copied();
        let best = (0..cuts.len().saturating_sub(2)).filter_map(|i| Some((rank(i)?, i))).min();
        match best {
            Some((rank, i)) if rank < limit => _ = cuts.remove(i + 1),
            _ => return cuts.windows(2).map(|pair| &token[pair[0]..pair[1]]).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Vocab> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiktoken.model");
        fs::write(&path, text).unwrap();
        let added = AddedToken { special: true, ..AddedToken::plain(6, "[BOS]") };
        read(&path, None, 8, &[added])
    }

    #[test]
    fn merges_are_what_lower_ranks_make() {
        // a, b, " ", ab, "ab "
        let vocab = read_text("YQ== 0\nYg== 1\nIA== 2\nYWI= 3\nYWIg 4\n").unwrap();
        let tokens = ["a", "b", "Ġ", "ab", "abĠ", "<|reserved_token_5|>", "[BOS]"];
        assert_eq!(vocab.tokens[..7], tokens);
        assert_eq!(vocab.tokens[7], "<|reserved_token_7|>");
        assert_eq!(vocab.merges.unwrap(), ["a b", "ab Ġ"]);
        assert_eq!(vocab.pre, "kimi-k2");
        let types = &vocab.types[4..7];
        assert_eq!(types, [TokenType::Normal, TokenType::Control, TokenType::Control]);
    }

    #[test]
    fn broken_files_are_refused() {
        for (text, words) in [
            ("", "content: expected at least one token, got none"),
            ("YQ== 0\nYg== 2\n", "line 2: expected a token in base64 and its rank, 1"),
            ("YQ==", "line 1"),
            ("!! 0\n", "line 1"),
            (" 0\n", "line 1"),
        ] {
            let error = read_text(text).unwrap_err().to_string();
            assert!(error.contains("tiktoken.model: ") && error.contains(words), "{error}");
        }
    }
}
