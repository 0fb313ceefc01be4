//! Bodies of requests as JSON, and of responses.

use std::convert::Infallible;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use serde_json::Value;

/// A whole text, or a stream.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The body that is this text.
pub fn whole(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).boxed_unsync()
}

/// The byte order mark that some clients put in front.
pub const MARK: &[u8] = b"\xef\xbb\xbf";

/// The JSON of a request's body. As the most lenient clients' own parsers do, it takes a byte order
/// mark, and halves of surrogate pairs, which become replacement characters.
pub fn json(bytes: &[u8]) -> serde_json::Result<Value> {
    let bytes = bytes.strip_prefix(MARK).unwrap_or(bytes);
    serde_json::from_slice(bytes).or_else(|why| match mended(bytes) {
        Some(bytes) => serde_json::from_slice(&bytes),
        None => Err(why),
    })
}

/// The JSON with its escapes of lone surrogates as U+FFFD; `None` if there are none.
fn mended(bytes: &[u8]) -> Option<Vec<u8>> {
    /// The code unit of the escape that begins at `at`.
    fn unit(bytes: &[u8], at: usize) -> Option<u16> {
        let digits = bytes.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    }
    let (high, low) = (0xd800..0xdc00, 0xdc00..0xe000);
    let mut out = bytes.to_vec();
    let (mut at, mut is_changed) = (0, false);
    while let Some(found) = bytes[at..].iter().position(|byte| *byte == b'\\') {
        at += found;
        at += match unit(bytes, at) {
            Some(first) if high.contains(&first) => {
                let second = unit(bytes, at + 6);
                if second.is_some_and(|second| low.contains(&second)) {
                    12
                } else {
                    out[at + 2..at + 6].copy_from_slice(b"fffd");
                    is_changed = true;
                    6
                }
            }
            Some(unit) if low.contains(&unit) => {
                out[at + 2..at + 6].copy_from_slice(b"fffd");
                is_changed = true;
                6
            }
            Some(_) => 6,
            // A backslash may stand behind this one.
            None => 2,
        };
        at = at.min(bytes.len());
    }
    is_changed.then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_and_halves_of_pairs_are_taken() {
        for (text, expected) in [
            ("\u{feff}\"a\"", "a"),
            (r#""\ud83d\ude00""#, "\u{1f600}"),
            (r#""a\ud83d""#, "a\u{fffd}"),
            (r#""\ude00b""#, "\u{fffd}b"),
            (r#""\ud83d\ud83d\ude00""#, "\u{fffd}\u{1f600}"),
            (r#""\\\ud83dx\\ud83d""#, "\\\u{fffd}x\\ud83d"),
            (r#""\uD83D\n""#, "\u{fffd}\n"),
        ] {
            assert_eq!(json(text.as_bytes()).ok(), Some(expected.into()), "{text}");
        }
        for bad in ["", "\u{feff}", "{", r#""\ud83d"#, r#""\ud8"#, "\"\\", r#""\uzzzz""#] {
            assert!(json(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
