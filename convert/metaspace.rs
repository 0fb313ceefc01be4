//! `tokenizer.json` of a SentencePiece model: unigram, or BPE that writes spaces as U+2581. What
//! SentencePiece calls its normaliser stands there in pieces, under `normalizer` and
//! `pre_tokenizer`.

use serde_json::Value;

use super::base64;
use super::bpe::{self, MAX_TOKENS, merge_pairs};
use super::json::{Json, shown};
use super::pre::{flatten, kind};
use super::vocab::{ADDED_SCORE, AddedToken, TokenType, Vocab};
use crate::Result;
use std::collections::HashMap;

const SPACE: &str = "\u{2581}";

/// Whether the file's model is one: unigram, or BPE over characters instead of bytes.
pub fn is_sentencepiece(tokenizer: &Json) -> Result<bool> {
    let unigram = tokenizer.str("model.type")? == Some("Unigram");
    let fallback = tokenizer.bool("model.byte_fallback")? == Some(true);
    let spaces = parts(tokenizer).iter().any(|part| matches!(kind(part), "Metaspace" | "Prepend"));
    Ok(unigram || fallback || spaces)
}

/// Whether it is BPE over characters.
pub fn has_merges(tokenizer: &Json) -> Result<bool> {
    Ok(is_sentencepiece(tokenizer)? && tokenizer.str("model.type")? != Some("Unigram"))
}

/// Everything that happens to a text before the model.
fn parts(tokenizer: &Json) -> Vec<&Value> {
    let mut parts = Vec::new();
    for (field, list) in [("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")] {
        if let Some(value) = tokenizer.at(field) {
            flatten(value, list, &mut parts);
        }
    }
    parts
}

pub fn read(tokenizer: &Json, added: &[AddedToken]) -> Result<Vocab> {
    let mut vocab = match tokenizer.str("model.type")? {
        Some("Unigram") => unigram(tokenizer)?,
        _ => merged(tokenizer)?,
    };
    if vocab.tokens.is_empty() {
        return Err(tokenizer.fail("model.vocab", "at least one token", "none"));
    }
    if tokenizer.bool("model.byte_fallback")? == Some(true) {
        for (token, ty) in vocab.tokens.iter().zip(&mut vocab.types) {
            if is_byte(token) {
                *ty = TokenType::Byte;
            }
        }
    }
    normalizer(tokenizer, &mut vocab)?;
    vocab.put_added(added);
    Ok(vocab)
}

/// Merges stay what they are: `gemma4`, whose readers take no scores.
pub fn read_ranked(tokenizer: &Json, added: &[AddedToken]) -> Result<Vocab> {
    let mut vocab = read(tokenizer, added)?;
    let merges = merge_pairs(tokenizer)?;
    vocab.model = "gemma4";
    // Readers know the one pre-tokenizer of this model.
    vocab.pre = String::new();
    vocab.merges = Some(merges.into_iter().map(|(a, b)| format!("{a} {b}")).collect());
    vocab.scores = Some(vec![ADDED_SCORE; vocab.tokens.len()]);
    Ok(vocab)
}

/// `<0x0A>`
fn is_byte(token: &str) -> bool {
    let hex = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).unwrap_or_default();
    hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_digit() || (b'A'..=b'F').contains(&b))
}

/// `vocab` is a list of [piece, score].
fn unigram(tokenizer: &Json) -> Result<Vocab> {
    let mut vocab = Vocab::sentencepiece("t5");
    let pieces = tokenizer.elements("model.vocab")?;
    if pieces.len() > MAX_TOKENS {
        let expected = format!("at most {MAX_TOKENS} pieces");
        return Err(tokenizer.fail("model.vocab", expected, pieces.len().to_string()));
    }
    for (id, piece) in pieces.iter().enumerate() {
        let text = piece.get(0).and_then(Value::as_str);
        let score = piece.get(1).and_then(Value::as_f64);
        let (Some(text), Some(score)) = (text, score) else {
            let field = format!("model.vocab[{id}]");
            return Err(tokenizer.fail(&field, "a piece and its score", shown(piece)));
        };
        vocab.put(id, text, TokenType::Normal, score as f32);
    }
    if let Some(unk) = tokenizer.count("model.unk_id")? {
        let n = vocab.types.len();
        let Some(ty) = vocab.types.get_mut(unk as usize) else {
            let expected = format!("an id below {n}");
            return Err(tokenizer.fail("model.unk_id", expected, unk.to_string()));
        };
        *ty = TokenType::Unknown;
    }
    Ok(vocab)
}

/// Merges instead of scores: the earlier a piece can be made, the better. SentencePiece merges any
/// two neighbours that make a piece, best score first, and the merges list all such pairs.
fn merged(tokenizer: &Json) -> Result<Vocab> {
    let mut vocab = Vocab::sentencepiece("llama");
    let merges = merge_pairs(tokenizer)?;
    let mut ranks = HashMap::with_capacity(merges.len());
    for (rank, (left, right)) in merges.iter().enumerate() {
        ranks.entry([*left, right].concat()).or_insert(rank);
    }
    let unk = tokenizer.str("model.unk_token")?;
    for (token, id) in bpe::entries(tokenizer)? {
        let ty = if Some(token) == unk { TokenType::Unknown } else { TokenType::Normal };
        let rank = ranks.get(token).copied().unwrap_or(merges.len());
        vocab.put(id, token, ty, -(rank as f32));
    }
    Ok(vocab)
}

fn normalizer(tokenizer: &Json, vocab: &mut Vocab) -> Result<()> {
    let text = |part: &Value, field: &str| part.get(field).and_then(Value::as_str) == Some(SPACE);
    let (mut prefix, mut remove, mut replaced) = (false, false, false);
    for part in parts(tokenizer) {
        let pattern = part.get("pattern");
        let of = |kind: &str| pattern.and_then(|p| p.get(kind)).and_then(Value::as_str);
        match kind(part) {
            "Precompiled" => vocab.charsmap = charsmap(tokenizer, part)?,
            "Metaspace" => prefix = has_prefix(part),
            "Prepend" if text(part, "prepend") => prefix = true,
            "Replace" if of("String") == Some(" ") && text(part, "content") => replaced = true,
            "Replace" if of("Regex") == Some(" {2,}") => remove = true,
            "WhitespaceSplit" | "Strip" => remove = true,
            // Behind the replacement no space is left to split at.
            "Split" if of("String") == Some(" ") && replaced => {}
            _ => {
                let expected = "a step that SentencePiece has";
                return Err(tokenizer.fail("normalizer, pre_tokenizer", expected, shown(part)));
            }
        }
    }
    vocab.add_space_prefix = Some(prefix);
    // Where it says nothing, neither do llama.cpp's files.
    vocab.remove_extra_whitespaces = (remove || vocab.model == "t5").then_some(remove);
    Ok(())
}

/// Newer files have a scheme, older ones a flag.
fn has_prefix(metaspace: &Value) -> bool {
    match metaspace.get("prepend_scheme").and_then(Value::as_str) {
        Some(scheme) => scheme != "never",
        None => metaspace.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(true),
    }
}

fn charsmap(tokenizer: &Json, part: &Value) -> Result<Vec<u8>> {
    const FIELD: &str = "precompiled_charsmap";
    let value = part.get(FIELD).unwrap_or(&Value::Null);
    let bytes = value.as_str().and_then(base64::decode);
    bytes.ok_or_else(|| tokenizer.fail(&format!("normalizer: {FIELD}"), "base64", shown(value)))
}
