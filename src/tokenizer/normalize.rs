//! SentencePiece's normalisation of a text: to NFC where the file says so, characters are replaced
//! by the charsmap, surplus spaces removed, spaces written as U+2581, one of them put first.

use super::charsmap::Charsmap;
use super::vocab::{SPM_SPACE, Vocab};
use crate::Result;
use std::borrow::Cow;
use unicode_normalization::{UnicodeNormalization, is_nfc};

pub struct Normalizer {
    nfc: bool,
    charsmap: Option<Charsmap>,
    /// Spaces at both ends go, runs of them become one.
    remove_extra_whitespaces: bool,
}

impl Normalizer {
    pub fn new(vocab: &Vocab) -> Result<Self> {
        Ok(Self {
            nfc: vocab.nfc.unwrap_or(false),
            charsmap: Charsmap::parse(&vocab.charsmap, &vocab.path)?,
            remove_extra_whitespaces: vocab.remove_extra_whitespaces.unwrap_or(false),
        })
    }

    /// `text` as pieces are spelt. Empty stays empty, also with `prefix_space`.
    pub fn apply(&self, text: &str, prefix_space: bool) -> String {
        let mut whole = Cow::Borrowed(text);
        if self.nfc && !is_nfc(text) {
            whole = text.nfc().collect();
        }
        let mut text = &*whole;
        let mut out = String::with_capacity(text.len() + text.len() / 2 + SPM_SPACE.len());
        if prefix_space && !text.is_empty() {
            out.push_str(SPM_SPACE);
        }
        let mut after_space = true;
        while let Some((mut part, len)) = self.next(text) {
            text = &text[len..];
            if self.remove_extra_whitespaces && after_space {
                part = part.trim_start_matches(' ');
            }
            // What becomes nothing leaves the spaces around it neighbours.
            if part.is_empty() {
                continue;
            }
            after_space = part.ends_with(' ');
            part.chars().for_each(|c| match c {
                ' ' => out.push_str(SPM_SPACE),
                c => out.push(c),
            });
        }
        if self.remove_extra_whitespaces {
            out.truncate(out.trim_end_matches(SPM_SPACE).len());
        }
        out
    }

    /// The first character of `text`, or more where the charsmap has a longer key, as it is to
    /// stand in the result, and its length before.
    fn next<'a>(&'a self, text: &'a str) -> Option<(&'a str, usize)> {
        if let Some((len, replacement)) = self.charsmap.as_ref().and_then(|map| map.longest(text)) {
            return Some((replacement, len));
        }
        let len = text.chars().next()?.len_utf8();
        Some((&text[..len], len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::VocabModel;

    #[test]
    fn spaces() {
        let mut vocab = Vocab::new(VocabModel::Ugm, Vec::new());
        let all = Normalizer::new(&vocab).unwrap();
        assert_eq!(all.apply(" a  b ", true), "▁▁a▁▁b▁");
        assert_eq!(all.apply("", true), "");
        vocab.remove_extra_whitespaces = Some(true);
        let few = Normalizer::new(&vocab).unwrap();
        assert_eq!(few.apply(" a  b ", true), "▁a▁b");
        assert_eq!(few.apply(" a  b ", false), "a▁b");
        assert_eq!(few.apply("   ", true), "");
    }

    #[test]
    fn nfc_where_the_file_says_so() {
        let mut vocab = Vocab::new(VocabModel::Ugm, Vec::new());
        assert_eq!(Normalizer::new(&vocab).unwrap().apply("e\u{301}", false), "e\u{301}");
        vocab.nfc = Some(true);
        assert_eq!(Normalizer::new(&vocab).unwrap().apply("e\u{301} x", true), "▁é▁x");
    }
}
