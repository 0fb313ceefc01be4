//! Languages of a translation model: control tokens like `fra_Latn`, of which the source text's
//! stands first in what the encoder reads (`fra_Latn … </s>`) and the target's is the first that
//! the decoder must say (after `</s>`, with which it starts). Codes are those of FLORES-200: ISO
//! 639-3, then ISO 15924.

use super::{TokenType, Tokenizer};
use crate::{Error, Result};

impl Tokenizer {
    /// The token of a language by its code.
    pub fn language(&self, code: &str) -> Result<u32> {
        if is_code(code.as_bytes())
            && let Some(id) = self.special_id(code)
        {
            return Ok(id);
        }
        let known: Vec<&str> = self.languages().map(|(code, _)| code).collect();
        Err(Error::Invalid(match known.is_empty() {
            true => format!("`{code}` cannot be chosen: the model's vocabulary has no languages"),
            false => format!("the model has no language `{code}`, only {}", known.join(", ")),
        }))
    }

    /// All languages, by id.
    pub fn languages(&self) -> impl Iterator<Item = (&str, u32)> {
        (0..self.n_vocab() as u32).filter_map(|id| {
            let text = self.text(id).ok().filter(|text| is_code(text))?;
            let control = self.token_type(id).is_ok_and(|kind| kind == TokenType::Control);
            Some((std::str::from_utf8(text).ok().filter(|_| control)?, id))
        })
    }

    /// The language that a source text is in unless the user says otherwise; none where the model
    /// does not translate.
    pub fn source_language(&self) -> Option<u32> {
        self.source_language
    }
}

/// Whether a token is spelt as a language's code.
pub fn is_language(token: &str) -> bool {
    is_code(token.as_bytes())
}

/// `abc_Abcd`
fn is_code(text: &[u8]) -> bool {
    match text {
        [a, b, c, b'_', script, rest @ ..] => {
            [a, b, c].into_iter().chain(rest).all(u8::is_ascii_lowercase)
                && script.is_ascii_uppercase()
                && rest.len() == 3
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::is_code;

    #[test]
    fn codes() {
        assert!(is_code(b"eng_Latn") && is_code(b"zho_Hans"));
        for bad in ["eng", "eng_latn", "eng_Lat", "eng_Latin", "en_Latn", "ENG_Latn", "eng-Latn"] {
            assert!(!is_code(bad.as_bytes()), "{bad}");
        }
    }
}
