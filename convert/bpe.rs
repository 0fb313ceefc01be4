//! `tokenizer.json` with a byte-level BPE model: vocabulary and merges.

use serde_json::Value;

use super::json::{Json, shown};
use super::pre;
use super::vocab::{AddedToken, TokenType, Vocab};
use crate::Result;
use crate::tokenizer::pre::is_known;

/// Reads the file; `pre` is the user's `--pre`, which overrides the table.
pub fn read(tokenizer: &Json, pre: Option<&str>, added: &[AddedToken]) -> Result<Vocab> {
    let pre = match pre {
        Some(name) => {
            if !is_known(name) {
                log::warn!(
                    "moeba has no pre-tokenizer `{name}`: the converted file will not run in moeba"
                );
            }
            name
        }
        None => pre::name(tokenizer)?,
    };
    let mut vocab = Vocab::new("gpt2", pre);
    let pairs = merge_pairs(tokenizer)?;
    vocab.merges = Some(pairs.into_iter().map(|(a, b)| format!("{a} {b}")).collect());
    for (token, id) in entries(tokenizer)? {
        vocab.put(id, token, TokenType::Normal, 0.0);
    }
    if vocab.tokens.is_empty() {
        return Err(tokenizer.fail("model.vocab", "at least one token", "none"));
    }
    vocab.put_added(added);
    Ok(vocab)
}

/// Tokens and their ids.
pub fn entries(tokenizer: &Json) -> Result<Vec<(&str, usize)>> {
    let all = tokenizer.entries("model.vocab")?;
    let mut out = Vec::with_capacity(all.len());
    for (token, id) in all {
        let id = token_id(id).ok_or_else(|| {
            let field = format!("model.vocab: {token:?}");
            tokenizer.fail(&field, format!("an id below {MAX_TOKENS}"), shown(id))
        })?;
        out.push((token, id));
    }
    Ok(out)
}

/// No embedding has as many rows; a larger id would only allocate.
pub const MAX_TOKENS: usize = 1 << 22;

/// A token's id, if it is one.
pub fn token_id(value: &Value) -> Option<usize> {
    let id = usize::try_from(value.as_u64()?).ok()?;
    (id < MAX_TOKENS).then_some(id)
}

/// Merges as pairs.
pub fn merge_pairs(tokenizer: &Json) -> Result<Vec<(&str, &str)>> {
    let all = tokenizer.elements("model.merges")?;
    let mut merges = Vec::with_capacity(all.len());
    for (i, merge) in all.iter().enumerate() {
        merges.push(pair(merge).ok_or_else(|| {
            tokenizer.fail(&format!("model.merges[{i}]"), "two tokens", shown(merge))
        })?);
    }
    Ok(merges)
}

/// Older files have "a b", newer ones ["a", "b"]. GGUF has "a b", so no token may have a space in
/// it: byte-level vocabularies and SentencePiece's write it as another character.
fn pair(merge: &Value) -> Option<(&str, &str)> {
    let (left, right) = match merge {
        Value::String(text) => text.split_once(' ')?,
        Value::Array(pair) => match &pair[..] {
            [left, right] => (left.as_str()?, right.as_str()?),
            _ => return None,
        },
        _ => return None,
    };
    let plain = |part: &str| !part.is_empty() && !part.contains(' ');
    (plain(left) && plain(right)).then_some((left, right))
}
