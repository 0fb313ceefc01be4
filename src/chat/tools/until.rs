//! The regular expression for texts up to a marker.

use regex::escape;

/// Texts that end with the marker and have it nowhere else. llguidance knows most tokens of such a
/// text without a look at them, which it does not where the end of a lexeme is lazy. `None` if the
/// marker's first character comes again in it.
pub fn until(marker: &str) -> Option<String> {
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
