//! Texts that end the free part of an answer.

/// Looks for any of some texts in bytes that come in pieces.
#[derive(Clone, Debug)]
pub struct Trigger {
    /// None is empty.
    texts: Vec<Vec<u8>>,
    /// The last bytes of what came, fewer than the longest text has.
    tail: Vec<u8>,
}

impl Trigger {
    /// `None` without a text that is not empty: there is nothing to wait for.
    pub fn new(texts: impl IntoIterator<Item = Vec<u8>>) -> Option<Trigger> {
        let texts: Vec<_> = texts.into_iter().filter(|text| !text.is_empty()).collect();
        (!texts.is_empty()).then_some(Trigger { texts, tail: Vec::new() })
    }

    /// The part of `piece` that follows the first text to end in it.
    pub fn push<'a>(&mut self, piece: &'a [u8]) -> Option<&'a [u8]> {
        let n_before = self.tail.len();
        self.tail.extend_from_slice(piece);
        let end_of = |text: &Vec<u8>| {
            let start = self.tail.windows(text.len()).position(|window| window == text)?;
            Some(start + text.len())
        };
        if let Some(end) = self.texts.iter().filter_map(end_of).min() {
            self.tail.clear();
            return Some(&piece[end - n_before..]);
        }
        let longest = self.texts.iter().map(Vec::len).max().unwrap_or(1);
        let surplus = (self.tail.len() + 1).saturating_sub(longest);
        self.tail.drain(..surplus);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_found_across_pieces_and_what_follows_is_told() {
        let texts = ["<call>", "[go]"].map(|text| text.as_bytes().to_vec());
        let mut trigger = Trigger::new(texts).unwrap();
        for piece in ["a<", "cal", "<call"] {
            assert_eq!(trigger.push(piece.as_bytes()), None, "{piece}");
        }
        assert_eq!(trigger.push(b">{"), Some(&b"{"[..]));
        assert_eq!(trigger.push(b"l>"), None);
        assert_eq!(trigger.push(b"x[go][go]"), Some(&b"[go]"[..]));
        assert!(Trigger::new([Vec::new()]).is_none());
    }
}
