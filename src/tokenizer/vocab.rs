//! A vocabulary as GGUF metadata states it, before any table is built.
//! Keys and numbers: the GGUF specification, `tokenizer.ggml.*`.

use super::byte_map::Decoder;
use super::special::SpecialIds;
use crate::{Error, Result};
use std::path::PathBuf;
use std::sync::OnceLock;

/// `tokenizer.ggml.model`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VocabModel {
    /// `gpt2`: byte-level BPE with ranked merges.
    Bpe,
    /// `llama`: SentencePiece BPE with scores and byte fallback.
    Spm,
    /// `gemma4`: the same with ranked merges. Also `whitespace`, and `gpt2` with a pre-tokenizer
    /// whose merges join characters.
    SpmMerges,
    /// `t5`: SentencePiece unigram, scores being log probabilities.
    Ugm,
}

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    /// Numbers that are not in the specification are read as `Unused`, as llama.cpp's
    /// "undefined": such a token is neither recognised in text nor printed.
    pub fn from_number(number: i32) -> Self {
        match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            6 => Self::Byte,
            _ => Self::Unused,
        }
    }

    pub fn is_special(self) -> bool {
        matches!(self, Self::Unknown | Self::Control | Self::UserDefined)
    }
}

/// The metadata of one tokenizer. `None` means that the file does not say.
#[derive(Clone, Debug)]
pub struct Vocab {
    /// Which file this comes from, for error messages.
    pub path: PathBuf,
    pub model: VocabModel,
    /// `tokenizer.ggml.pre`, for ranked merges.
    pub pre: Option<String>,
    pub tokens: Vec<Vec<u8>>,
    /// Empty, or one a token.
    pub scores: Vec<f32>,
    /// Empty, or one a token.
    pub types: Vec<TokenType>,
    /// `"left right"`, best first.
    pub merges: Vec<Vec<u8>>,
    pub ids: SpecialIds,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.metaspace.prepend_scheme` is `first`: a text with ranked merges starts with
    /// U+2581, its other parts do not.
    pub prepends_first: bool,
    /// `tokenizer.ggml.normalizer.nfc`.
    pub nfc: Option<bool>,
    /// `tokenizer.ggml.normalizer.lowercase`, for `whitespace`.
    pub lowercase: bool,
    /// For SentencePiece; surplus spaces stay where the file does not say.
    pub remove_extra_whitespaces: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`; empty for none.
    pub charsmap: Vec<u8>,
    /// `tokenizer.ggml.source_language_token_id`, our own key for translation models: the language
    /// of the text to translate unless the user says otherwise. Where there is one, a source text
    /// starts with its language's token.
    pub source_language: Option<u32>,
    /// `tokenizer.ggml.eog_token_ids`, our own key: ids that end a generation, where the ids and
    /// names that other readers know are not all.
    pub ends: Vec<u32>,
    /// `tokenizer.ggml.suppress_tokens`: ids that no generation takes.
    pub suppressed: Vec<u32>,
    /// `tokenizer.ggml.lstrip_token_ids` and `rstrip_token_ids`, our own keys: special tokens that
    /// take the whitespace before or after them along (`<|user|>` and its line break).
    pub lstrip: Vec<u32>,
    pub rstrip: Vec<u32>,
}

/// SentencePiece writes a space as U+2581.
pub const SPM_SPACE: &str = "\u{2581}";

impl Vocab {
    pub fn new(model: VocabModel, tokens: Vec<Vec<u8>>) -> Self {
        Self {
            path: PathBuf::new(),
            model,
            pre: None,
            tokens,
            scores: Vec::new(),
            types: Vec::new(),
            merges: Vec::new(),
            ids: SpecialIds::default(),
            add_bos: None,
            add_eos: None,
            add_space_prefix: None,
            prepends_first: false,
            nfc: None,
            lowercase: false,
            remove_extra_whitespaces: None,
            charsmap: Vec::new(),
            source_language: None,
            ends: Vec::new(),
            suppressed: Vec::new(),
            lstrip: Vec::new(),
            rstrip: Vec::new(),
        }
    }

    pub(super) fn error(&self, field: &str, expected: &str, got: impl Into<String>) -> Error {
        Error::format(&self.path, format!("tokenizer.ggml.{field}"), expected, got)
    }

    /// Checks what the algorithms rely on, and fills in types and scores that the file leaves out.
    pub(super) fn validate(&mut self) -> Result<()> {
        let n = self.tokens.len();
        if n == 0 {
            return Err(self.error("tokens", "at least one token", "none"));
        }
        if u32::try_from(n).is_err() {
            return Err(self.error("tokens", "fewer than 2^32 tokens", n.to_string()));
        }
        self.suppressed.retain(|id| (*id as usize) < n);
        self.fill_types(n)?;
        if self.scores.is_empty() {
            self.scores = vec![0.0; n];
        }
        if self.scores.len() != n {
            let got = self.scores.len().to_string();
            return Err(self.error("scores", &format!("{n} scores, one a token"), got));
        }
        match self.model {
            VocabModel::Bpe | VocabModel::SpmMerges => self.check_merges(),
            VocabModel::Spm | VocabModel::Ugm => self.check_scores(),
        }
    }

    fn fill_types(&mut self, n: usize) -> Result<()> {
        if self.types.is_empty() {
            self.types = vec![TokenType::Normal; n];
        }
        if self.types.len() != n {
            let got = self.types.len().to_string();
            return Err(self.error("token_type", &format!("{n} types, one a token"), got));
        }
        for (id, token) in self.tokens.iter().enumerate() {
            if self.types[id] == TokenType::Byte && byte_of(token).is_none() {
                let got = String::from_utf8_lossy(token).into_owned();
                return Err(self.error("tokens", "byte tokens like <0x0A>", got));
            }
        }
        Ok(())
    }

    fn check_scores(&self) -> Result<()> {
        match self.scores.iter().position(|s| s.is_nan()) {
            Some(id) => Err(self.error("scores", "numbers", format!("NaN for token {id}"))),
            None => Ok(()),
        }
    }

    fn check_merges(&self) -> Result<()> {
        for (i, merge) in self.merges.iter().enumerate() {
            if split_merge(merge).is_none() {
                let got = format!("{:?} as number {i}", String::from_utf8_lossy(merge));
                return Err(self.error("merges", "two parts with a space between them", got));
            }
        }
        Ok(())
    }

    /// The bytes that token `id` stands for.
    pub(super) fn piece(&self, id: usize) -> Vec<u8> {
        let token = &self.tokens[id];
        match self.types[id] {
            TokenType::Unused => Vec::new(),
            TokenType::Byte => byte_of(token).map(|b| vec![b]).unwrap_or_default(),
            TokenType::Normal => match self.model {
                VocabModel::Spm | VocabModel::SpmMerges | VocabModel::Ugm => unescape_spm(token),
                VocabModel::Bpe => byte_level(token).unwrap_or_else(|| token.clone()),
            },
            _ => token.clone(),
        }
    }
}

/// The bytes of a token in GPT-2's byte characters; `None` if it is not written in them.
pub(super) fn byte_level(token: &[u8]) -> Option<Vec<u8>> {
    static DECODER: OnceLock<Decoder> = OnceLock::new();
    DECODER.get_or_init(Decoder::new).bytes(std::str::from_utf8(token).ok()?)
}

/// 0x0A for `<0x0A>`.
pub(super) fn byte_of(token: &[u8]) -> Option<u8> {
    let hex = token.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    match hex {
        [high @ (b'0'..=b'9' | b'A'..=b'F'), low @ (b'0'..=b'9' | b'A'..=b'F')] => {
            let digit = |c: u8| if c.is_ascii_digit() { c - b'0' } else { c - b'A' + 10 };
            Some(digit(*high) * 16 + digit(*low))
        }
        _ => None,
    }
}

/// The two halves of a merge. The first part may itself start with a space (never so in
/// byte-level vocabularies, which write a space as `Ġ`), hence the search from the second byte.
pub(super) fn split_merge(merge: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = 1 + merge.get(1..)?.iter().position(|&b| b == b' ')?;
    let (left, right) = (&merge[..space], &merge[space + 1..]);
    (!right.is_empty()).then_some((left, right))
}

fn unescape_spm(token: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(token.len());
    let mut rest = token;
    while let Some(&first) = rest.first() {
        match rest.strip_prefix(SPM_SPACE.as_bytes()) {
            Some(after) => {
                out.push(b' ');
                rest = after;
            }
            None => {
                out.push(first);
                rest = &rest[1..];
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_split_at_the_first_inner_space() {
        assert_eq!(split_merge(b"a b"), Some((&b"a"[..], &b"b"[..])));
        assert_eq!(split_merge(b"  b"), Some((&b" "[..], &b"b"[..])));
        for bad in [&b""[..], b"a", b"ab", b"a ", b" ", b" b"] {
            assert_eq!(split_merge(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn byte_tokens() {
        assert_eq!(byte_of(b"<0x0A>"), Some(10));
        assert_eq!(byte_of(b"<0xFF>"), Some(255));
        for bad in [&b"<0x0a>"[..], b"<0x>", b"<0x0A", b"0x0A", b"<0x100>"] {
            assert_eq!(byte_of(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn spm_spaces() {
        assert_eq!(unescape_spm("▁a▁▁b".as_bytes()), b" a  b");
    }
}
