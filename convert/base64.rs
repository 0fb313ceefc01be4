//! Base64 (RFC 4648, section 4), in which tokenizer files write bytes.

/// None if `text` is no base64; padding may be missing.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let text = text.trim_end_matches('=').as_bytes();
    let mut out = Vec::with_capacity(text.len() * 3 / 4);
    for four in text.chunks(4) {
        let mut bits = 0u32;
        for &c in four {
            bits = bits << 6 | u32::from(digit(c)?);
        }
        let n = match four.len() {
            4 => 3,
            3 => 2,
            2 => 1,
            _ => return None,
        };
        bits <<= 6 * (4 - four.len());
        out.extend(&bits.to_be_bytes()[1..=n]);
    }
    Some(out)
}

fn digit(c: u8) -> Option<u8> {
    Some(match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::decode;

    /// The examples of RFC 4648, section 10.
    #[test]
    fn examples() {
        for (text, bytes) in [
            ("", ""),
            ("Zg==", "f"),
            ("Zm8=", "fo"),
            ("Zm9v", "foo"),
            ("Zm9vYg==", "foob"),
            ("Zm9vYmE=", "fooba"),
            ("Zm9vYmFy", "foobar"),
            ("Zm9vYmE", "fooba"),
        ] {
            assert_eq!(decode(text).as_deref(), Some(bytes.as_bytes()), "{text}");
        }
        assert_eq!(decode("+/8="), Some(vec![0xFB, 0xFF]));
        for bad in ["Z", "Zg=x", "Zm9v!", "Zm 9"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }
}
