//! Texts from flags, files and stdin.

use crate::{Error, Result};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// More than any context holds; a wrong file (a model, a disk) is noticed before it fills memory.
const MAX_TEXT_BYTES: u64 = 1 << 30;

/// A text file, or stdin for `-`.
pub fn read_text(path: &Path) -> Result<String> {
    if path.as_os_str() == "-" {
        return read_all(io::stdin().lock(), Path::new("stdin"));
    }
    read_all(File::open(path).map_err(|e| Error::io(path, e))?, path)
}

fn read_all(source: impl Read, path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let mut limited = source.take(MAX_TEXT_BYTES + 1);
    limited.read_to_end(&mut bytes).map_err(|e| Error::io(path, e))?;
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        let expected = format!("at most {MAX_TEXT_BYTES} bytes of text");
        return Err(Error::format(path, "file", expected, "more"));
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::format(path, format!("byte {at}"), "UTF-8 text", "something else")
    })
}

/// A prompt's text: without the line end that editors and `echo` put at the end of a file.
pub fn read_prompt(path: &Path) -> Result<String> {
    let mut text = read_text(path)?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// C's escapes of characters and bytes; any other backslash stays. Bytes that are no UTF-8 become
/// U+FFFD.
pub fn unescape(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let (byte, tail) = escape(rest).unwrap_or((*first, tail));
        out.push(byte);
        rest = tail;
    }
    String::from_utf8(out).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
}

/// The byte that an escape at the start of the text stands for, and what follows it.
fn escape(text: &[u8]) -> Option<(u8, &[u8])> {
    let (name, tail) = text.strip_prefix(b"\\")?.split_first()?;
    let byte = match name {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'\\' | b'"' | b'\'' => *name,
        b'x' => {
            let (digits, tail) = tail.split_at_checked(2)?;
            let digit = |at: usize| char::from(digits[at]).to_digit(16);
            return Some(((digit(0)? * 16 + digit(1)?) as u8, tail));
        }
        _ => return None,
    };
    Some((byte, tail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_cs() {
        assert_eq!(unescape(r#"a\n\t\\n\"\'\r"#), "a\n\t\\n\"'\r");
        assert_eq!(unescape(r"\alpha\"), r"\alpha\");
        assert_eq!(unescape(r"\x41é\xc3\xa9\x4\xg1\\x41"), r"Aéé\x4\xg1\x41");
        assert_eq!(unescape(r"\xff"), "\u{fffd}");
    }

    #[test]
    fn what_is_no_text_is_named() {
        let e = read_all(&b"ab\xff"[..], Path::new("f")).unwrap_err().to_string();
        assert!(e.contains("f: byte 2") && e.contains("UTF-8"), "{e}");
    }
}
