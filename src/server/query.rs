//! Queries of targets: `a=1&b=x%20y`.

/// The value of the first parameter of this name.
pub fn value(query: &str, name: &str) -> Option<String> {
    let mut parts = query.split('&').filter_map(|part| part.split_once('='));
    parts.find(|(key, _)| *key == name).map(|(_, value)| unescaped(&value.replace('+', " ")))
}

/// A text with its escapes as what they stand for; those that are none stay.
pub fn unescaped(text: &str) -> String {
    let mut parts = text.split('%');
    let mut out = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let byte = part.get(..2).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        match byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                out.extend_from_slice(&part.as_bytes()[2..]);
            }
            None => {
                out.push(b'%');
                out.extend_from_slice(part.as_bytes());
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_found_and_unescaped() {
        let query = "autoload=false&model=user%2Fmodel%3aQ4+K&model=other&empty=";
        assert_eq!(value(query, "model").as_deref(), Some("user/model:Q4 K"));
        assert_eq!(value(query, "empty").as_deref(), Some(""));
        assert_eq!((value(query, "mode"), value("model", "model")), (None, None));
        for (text, expected) in [("%", "%"), ("%2", "%2"), ("%é1", "%é1"), ("a%+1b%41", "a%+1bA")]
        {
            assert_eq!(unescaped(text), expected);
        }
    }
}
