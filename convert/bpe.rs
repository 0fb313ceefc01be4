//! `tokenizer.json` with a byte-level BPE model: vocabulary, merges, and which of the known
//! pre-tokenizers splits the text.

use serde_json::Value;

use super::json::{Json, shown};
use super::vocab::{AddedToken, TokenType, Vocab};
use crate::{Error, Result};

/// The splitting patterns of released tokenizers and the names that GGUF gives them. A pattern is
/// data: one character more is another tokenizer.
const PATTERNS: &[(&str, &str)] = &[
    (
        "qwen2",
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    (
        "llama-bpe",
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    ("gpt-2", GPT2),
];

/// What the `ByteLevel` pre-tokenizer splits by unless told not to.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Reads the file; `pre` is the user's `--pre`, which overrides the table.
pub fn read(tokenizer: &Json, pre: Option<&str>, added: &[AddedToken]) -> Result<Vocab> {
    check_kind(tokenizer)?;
    let pre = match pre {
        Some(name) => name.to_owned(),
        None => pre_name(tokenizer)?.to_owned(),
    };
    let mut vocab = Vocab::new("gpt2", pre);
    vocab.merges = Some(merges(tokenizer)?);
    for (token, id) in tokenizer.entries("model.vocab")? {
        let id = token_id(id).ok_or_else(|| {
            let field = format!("model.vocab: {token:?}");
            tokenizer.fail(&field, format!("an id below {MAX_TOKENS}"), shown(id))
        })?;
        vocab.put(id, token, TokenType::Normal, 0.0);
    }
    if vocab.tokens.is_empty() {
        return Err(tokenizer.fail("model.vocab", "at least one token", "none"));
    }
    vocab.put_added(added);
    Ok(vocab)
}

/// No embedding has as many rows; a larger id would only allocate.
pub const MAX_TOKENS: usize = 1 << 22;

/// A token's id, if it is one.
pub fn token_id(value: &Value) -> Option<usize> {
    let id = usize::try_from(value.as_u64()?).ok()?;
    (id < MAX_TOKENS).then_some(id)
}

fn check_kind(tokenizer: &Json) -> Result<()> {
    let kind = tokenizer.str("model.type")?.unwrap_or("BPE");
    if kind != "BPE" {
        return Err(tokenizer.fail("model.type", "BPE", kind));
    }
    if tokenizer.bool("model.byte_fallback")?.unwrap_or(false) {
        let got = "byte fallback (such a tokenizer is converted from its tokenizer.model)";
        return Err(tokenizer.fail("model", "byte-level BPE", got));
    }
    Ok(())
}

/// Merges as "a b". Newer files have ["a", "b"], which a token with a space in it needs; the
/// byte-level alphabet has no space, so nothing is lost by joining.
fn merges(tokenizer: &Json) -> Result<Vec<String>> {
    let all = tokenizer.elements("model.merges")?;
    let mut merges = Vec::with_capacity(all.len());
    for (i, merge) in all.iter().enumerate() {
        let joined = match merge {
            Value::String(text) => Some(text.clone()),
            Value::Array(pair) => match &pair[..] {
                [Value::String(a), Value::String(b)] => Some(format!("{a} {b}")),
                _ => None,
            },
            _ => None,
        };
        let joined = joined.filter(|text| text.split(' ').filter(|s| !s.is_empty()).count() == 2);
        merges.push(joined.ok_or_else(|| {
            tokenizer.fail(&format!("model.merges[{i}]"), "two tokens", shown(merge))
        })?);
    }
    Ok(merges)
}

/// The name of the pre-tokenizer, by its pattern.
fn pre_name(tokenizer: &Json) -> Result<&'static str> {
    let mut patterns = Vec::new();
    if let Some(pre) = tokenizer.at("pre_tokenizer") {
        collect_patterns(pre, &mut patterns);
    }
    let known = match &patterns[..] {
        [one] => PATTERNS.iter().find(|(_, pattern)| pattern == one),
        _ => None,
    };
    known.map(|(name, _)| *name).ok_or_else(|| unknown_pattern(tokenizer, &patterns))
}

fn unknown_pattern(tokenizer: &Json, patterns: &[String]) -> Error {
    let names: Vec<_> = PATTERNS.iter().map(|(name, _)| *name).collect();
    let expected = format!(
        "the pattern of {} (say `--pre NAME` if it splits text as one of them does)",
        names.join(", ")
    );
    let got = match patterns {
        [] => "none".to_owned(),
        [one] => shown(&Value::from(one.as_str())),
        more => format!("{} patterns in a row", more.len()),
    };
    tokenizer.fail("pre_tokenizer", expected, got)
}

/// Every pattern that splits, in order. A kind that splits in a way of its own counts as one
/// pattern that no table has.
fn collect_patterns(pre: &Value, out: &mut Vec<String>) {
    let kind = pre.get("type").and_then(Value::as_str).unwrap_or("");
    match kind {
        "Sequence" => {
            let parts = pre.get("pretokenizers").and_then(Value::as_array);
            parts.into_iter().flatten().for_each(|part| collect_patterns(part, out));
        }
        "Split" => {
            let regex = pre.get("pattern").and_then(|p| p.get("Regex")).and_then(Value::as_str);
            let isolated = pre.get("behavior").and_then(Value::as_str) == Some("Isolated");
            let inverted = pre.get("invert").and_then(Value::as_bool) == Some(true);
            let pattern = regex.filter(|_| isolated && !inverted);
            out.push(pattern.map_or_else(|| shown(pre), str::to_owned));
        }
        // transformers' default for `use_regex` is true.
        "ByteLevel" if pre.get("use_regex").and_then(Value::as_bool) != Some(false) => {
            out.push(GPT2.to_owned());
        }
        "ByteLevel" => {}
        other => out.push(other.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn patterns(pre: Value) -> Vec<String> {
        let mut out = Vec::new();
        collect_patterns(&pre, &mut out);
        out
    }

    #[test]
    fn the_pattern_is_found_wherever_it_stands() {
        assert_eq!(patterns(json!({"type": "ByteLevel"})), [GPT2]);
        let split = json!({"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated"});
        let level = json!({"type": "ByteLevel", "use_regex": false});
        let both = json!({"type": "Sequence", "pretokenizers": [split, level]});
        assert_eq!(patterns(both), ["x"]);
        let digits = json!({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, split]});
        assert_eq!(patterns(digits), ["Digits", "x"]);
        let removed = json!({"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Removed"});
        assert_ne!(patterns(removed), ["x"]);
    }
}
