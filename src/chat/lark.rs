//! Parts of grammars in the Lark dialect of llguidance.

use regex::escape;
use serde_json::Value;

use crate::tokenizer::{TokenType, Tokenizer};

/// A string; `None` for an empty one.
pub fn quoted(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| Value::from(text).to_string())
}

/// A regular expression between slashes.
pub fn slashed(pattern: &str) -> String {
    let (mut out, mut is_escaped) = (String::with_capacity(pattern.len() + 2), false);
    out.push('/');
    for c in pattern.chars() {
        if c == '/' && !is_escaped {
            out.push('\\');
        }
        is_escaped = c == '\\' && !is_escaped;
        out.push(c);
    }
    out.push('/');
    out
}

/// A text as it is written, with control tokens as such. Empty for an empty text.
pub fn literal(text: &str, tokenizer: &Tokenizer) -> String {
    let is_control = |id: &u32| matches!(tokenizer.token_type(*id), Ok(TokenType::Control));
    let (mut parts, mut plain, mut at) = (Vec::new(), String::new(), 0);
    while let Some(c) = text[at..].chars().next() {
        let ends = (at + 1..=text.len()).rev().filter(|end| text.is_char_boundary(*end));
        let mut names = ends.map(|end| (end, &text[at..end]));
        let token = names
            .find_map(|(end, name)| Some((end, tokenizer.special_id(name).filter(is_control)?)));
        let Some((end, id)) = token else {
            plain.push(c);
            at += c.len_utf8();
            continue;
        };
        parts.extend(quoted(&std::mem::take(&mut plain)));
        parts.push(format!("<[{id}]>"));
        at = end;
    }
    parts.extend(quoted(&plain));
    parts.join(" ")
}

/// The rule of this name: any text up to the marker, the marker too.
pub fn text_rule(name: &str, marker: &str, tokenizer: &Tokenizer) -> String {
    let literal = literal(marker, tokenizer);
    // A control token ends the text, which takes the marker's characters before it along.
    if let Some(at) = literal.find("<[").filter(|_| Some(&literal) != quoted(marker).as_ref()) {
        let before = serde_json::from_str::<String>(literal[..at].trim()).unwrap_or_default();
        let pattern = slashed(&format!("(?s:.*){}", escape(&before)));
        return format!("{name}: {pattern} {}", &literal[at..]);
    }
    match until(marker) {
        Some(pattern) => format!("{name}: {}", slashed(&pattern)),
        None => format!("{name}[suffix={literal}]: /(?s:.*)/"),
    }
}

/// Texts that end with the marker and have it nowhere else. llguidance knows most tokens of such a
/// text without a look at them, which it does not where the end of a lexeme is lazy. `None` if the
/// marker's first character comes again in it.
fn until(marker: &str) -> Option<String> {
    let mut chars = marker.chars();
    let first = chars.next()?;
    let rest = chars.as_str();
    let last = rest.chars().next_back()?;
    if rest.contains(first) {
        return None;
    }
    let begin = escape(first.encode_utf8(&mut [0; 4]));
    let escaped = |c: char| escape(c.encode_utf8(&mut [0; 4]));
    let before_last = &rest[..rest.len() - last.len_utf8()];
    // What follows the first character and leads away from the marker, or back to that character.
    let mut away = format!("[^{begin}{}]", escaped(last));
    let mut again = begin.clone();
    for c in before_last.chars().rev().map(escaped) {
        away = format!("(?:[^{begin}{c}]|{c}{away})");
        again = format!("(?:{begin}|{c}{again})");
    }
    Some(format!("(?:[^{begin}]|{begin}{again}*{away})*{begin}{again}*{}", escape(rest)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use regex::Regex;

    #[test]
    fn some_markers_have_none() {
        for marker in ["", "<", "<|end|><", "\n</a>\n"] {
            assert_eq!(until(marker), None, "{marker:?}");
        }
        assert_eq!(until("<>").as_deref(), Some("(?:[^<]|<<*[^<>])*<<*>"));
    }

    proptest! {
        #[test]
        fn the_marker_is_at_the_end_and_nowhere_else(
            parts in prop::collection::vec("<|</|</a|</a-b|</a-b>|[<>/ab\n-]", 0..8),
        ) {
            let (marker, text) = ("</a-b>", parts.concat());
            let pattern = Regex::new(&format!("^{}$", until(marker).unwrap())).unwrap();
            let is_first = text.find(marker).is_some_and(|at| at + marker.len() == text.len());
            prop_assert_eq!(pattern.is_match(&text), is_first, "{:?}", text);
        }
    }
}
