//! `tokenizer.ggml.pre` of a `tokenizer.json`: which row of the tokenizer's table has its patterns
//! and its normaliser. A pattern is data: one character more is another tokenizer.

use serde_json::Value;

use super::json::{Json, shown};
use crate::tokenizer::pre;
use crate::{Error, Result};

/// The name for the file's pre-tokenizer.
pub fn name(tokenizer: &Json) -> Result<&'static str> {
    let nfc = normalises(tokenizer)?;
    let mut patterns = Vec::new();
    if let Some(pre) = tokenizer.at("pre_tokenizer") {
        collect(pre, &mut patterns);
    }
    let ignore_merges = tokenizer.bool("model.ignore_merges")?.unwrap_or(false);
    let added = tokenizer.elements("added_tokens")?;
    let has =
        |token: &str| added.iter().any(|t| t.get("content").and_then(Value::as_str) == Some(token));
    pre::name_of(&patterns, nfc, ignore_merges, has)
        .ok_or_else(|| unknown(tokenizer, &patterns, nfc))
}

/// Whether the normaliser is NFC; without one, texts stay as they are.
fn normalises(tokenizer: &Json) -> Result<bool> {
    let mut parts = Vec::new();
    if let Some(normalizer) = tokenizer.at("normalizer") {
        flatten(normalizer, "normalizers", &mut parts);
    }
    match parts.iter().map(|part| kind(part)).collect::<Vec<_>>()[..] {
        [] => Ok(false),
        ["NFC"] => Ok(true),
        _ => {
            let expected = "none or NFC (`--pre NAME` ignores it)";
            Err(tokenizer.fail("normalizer", expected, shown(&Value::from(parts.len()))))
        }
    }
}

/// The parts of a `Sequence`, or the one thing that is none.
pub fn flatten<'a>(value: &'a Value, parts: &str, out: &mut Vec<&'a Value>) {
    match kind(value) {
        "Sequence" => {
            let list = value.get(parts).and_then(Value::as_array);
            list.into_iter().flatten().for_each(|part| flatten(part, parts, out));
        }
        _ => out.push(value),
    }
}

pub fn kind(value: &Value) -> &str {
    value.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// Every pattern that splits, in order, as the table writes them. A kind that splits in a way of
/// its own counts as one pattern that no table has.
fn collect(pre: &Value, out: &mut Vec<String>) {
    let mut parts = Vec::new();
    flatten(pre, "pretokenizers", &mut parts);
    for part in parts {
        let flag = |name: &str| part.get(name).and_then(Value::as_bool);
        match kind(part) {
            "Split" => out.push(split(part).unwrap_or_else(|| shown(part))),
            "Digits" if flag("individual_digits") == Some(true) => out.push(r"\p{N}".into()),
            "Digits" => out.push(r"\p{N}+".into()),
            // transformers' default for `use_regex` is true.
            "ByteLevel" if flag("use_regex") != Some(false) => out.push(pre::GPT2.into()),
            "ByteLevel" => {}
            other => out.push(other.to_owned()),
        }
    }
}

/// The regular expression of a `Split` that makes each match a part. (The table's patterns match
/// all of a text, so to remove what is not matched is the same.)
fn split(part: &Value) -> Option<String> {
    let regex = part.get("pattern")?.get("Regex")?.as_str()?;
    let inverted = part.get("invert").and_then(Value::as_bool).unwrap_or(false);
    let behaviour = part.get("behavior").and_then(Value::as_str)?;
    let each_match = matches!((behaviour, inverted), ("Isolated", false) | ("Removed", true));
    // Some files have the characters themselves in a class, some their escapes.
    each_match.then(|| regex.replace('\r', r"\r").replace('\n', r"\n"))
}

fn unknown(tokenizer: &Json, patterns: &[String], nfc: bool) -> Error {
    let names: Vec<_> = pre::known_names().collect();
    let expected = format!(
        "the pattern of {} (say `--pre NAME` if it splits text as one of them does)",
        names.join(", ")
    );
    let got = match patterns {
        [] => "none".to_owned(),
        [one] => shown(&Value::from(one.as_str())),
        more => format!("{} patterns in a row", more.len()),
    };
    let after = if nfc { " after NFC" } else { "" };
    tokenizer.fail("pre_tokenizer", expected, got + after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn patterns(pre: Value) -> Vec<String> {
        let mut out = Vec::new();
        collect(&pre, &mut out);
        out
    }

    #[test]
    fn the_pattern_is_found_wherever_it_stands() {
        assert_eq!(patterns(json!({"type": "ByteLevel"})), [pre::GPT2]);
        let split = json!({"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated"});
        let level = json!({"type": "ByteLevel", "use_regex": false});
        let both = json!({"type": "Sequence", "pretokenizers": [split, level]});
        assert_eq!(patterns(both), ["x"]);
        let digits = json!({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, split]});
        assert_eq!(patterns(digits), [r"\p{N}+", "x"]);
        let removed = json!({"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Removed"});
        assert_ne!(patterns(removed), ["x"]);
        let inverted = json!({
            "type": "Split", "pattern": {"Regex": "[\r\n]"}, "behavior": "Removed", "invert": true,
        });
        assert_eq!(patterns(inverted), [r"[\r\n]"]);
    }
}
