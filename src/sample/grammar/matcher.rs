//! The state of one text in a compiled grammar, whoever computes it.

use super::gbnf;
use crate::{Error, Result};
use llguidance::toktrie::{SimpleVob, TokTrie};

/// Why a mask is empty.
pub const NO_TOKEN: &str = "no token of the model continues the text in its grammar";

/// Why a text ends before its grammar lets it.
pub const TOO_COMPLEX: &str = "the grammar is too complex to be followed any further";

/// Characters of a message.
const MAX_MESSAGE: usize = 200;

pub enum Matcher {
    Llguidance(Box<llguidance::Matcher>),
    Gbnf(gbnf::Matcher),
}

impl Clone for Matcher {
    /// A copy with tables of its own, so that texts do not use up each other's limits.
    fn clone(&self) -> Matcher {
        match self {
            Matcher::Llguidance(matcher) => Matcher::Llguidance(Box::new(matcher.deep_clone())),
            Matcher::Gbnf(matcher) => Matcher::Gbnf(matcher.clone()),
        }
    }
}

impl Matcher {
    /// The tokens that may come next; end tokens are among them if the text may end here. Fails if
    /// there are none.
    pub fn mask(&mut self, trie: &TokTrie) -> Result<SimpleVob> {
        let mask = match self {
            Matcher::Llguidance(matcher) => matcher.compute_mask_or_eos().map_err(failed)?,
            Matcher::Gbnf(matcher) => matcher.mask(trie)?,
        };
        if mask.is_zero() {
            return Err(Error::invalid(NO_TOKEN));
        }
        Ok(mask)
    }

    /// Hears of a token that is now part of the text.
    pub fn accept(&mut self, id: u32, trie: &TokTrie) -> Result<()> {
        match self {
            Matcher::Llguidance(matcher) => matcher.consume_token(id).map_err(failed),
            Matcher::Gbnf(matcher) => match matcher.accept(trie.token(id))? {
                true => Ok(()),
                false => Err(Error::invalid(format!("token {id} does not fit the grammar"))),
            },
        }
    }

    /// Hears of bytes that are now part of the text; false if they do not fit, and the state is of
    /// no use then.
    pub fn accept_bytes(&mut self, bytes: &[u8], trie: &TokTrie) -> Result<bool> {
        match self {
            Matcher::Llguidance(matcher) => {
                let tokens = trie.greedy_tokenize(bytes);
                let is_whole = trie.decode_raw(&tokens) == bytes;
                Ok(is_whole && matcher.try_consume_tokens(&tokens).map_err(failed)? == tokens.len())
            }
            Matcher::Gbnf(matcher) => matcher.accept(bytes),
        }
    }

    /// The bytes that must come next; empty where there is a choice, or the text may end.
    pub fn forced(&mut self) -> Result<Vec<u8>> {
        match self {
            // It keeps them as a part of its text, which would change the masks.
            Matcher::Llguidance(matcher) => Ok(matcher.deep_clone().compute_ff_bytes()),
            Matcher::Gbnf(matcher) => matcher.forced(),
        }
    }

    /// Whether the text is complete here.
    pub fn can_end(&mut self) -> Result<bool> {
        match self {
            Matcher::Llguidance(matcher) if matcher.is_stopped() => Ok(true),
            Matcher::Llguidance(matcher) => matcher.is_accepting().map_err(failed),
            Matcher::Gbnf(matcher) => Ok(matcher.can_end()),
        }
    }

    /// Whether the text is complete and nothing can follow.
    pub fn must_end(&self) -> bool {
        match self {
            Matcher::Llguidance(matcher) => matcher.is_stopped() && !matcher.is_error(),
            Matcher::Gbnf(matcher) => matcher.must_end(),
        }
    }
}

fn failed(error: impl std::fmt::Display) -> Error {
    let message = error.to_string();
    let limits = ["panic:", "lexer error:", "parser error:"];
    if message.starts_with("NoExtension") {
        Error::invalid(NO_TOKEN)
    } else if limits.iter().any(|limit| message.starts_with(limit)) {
        Error::invalid(TOO_COMPLEX)
    } else {
        Error::invalid(format!("the grammar cannot be followed: {}", sentence(&message)))
    }
}

/// A message of llguidance without the lines that describe its state, cut to a readable length.
pub fn sentence(message: &str) -> String {
    let mut lines = message.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or("no reason is known");
    if first.starts_with("panic:") {
        return "it is too complex".into();
    }
    // Regular expressions are shown, and the reason stands below.
    let reason = lines.find_map(|line| line.strip_prefix("error: "));
    let mut text = match reason {
        Some(reason) if first.ends_with(':') => format!("{first} {reason}"),
        _ => first.trim_end_matches('.').to_owned(),
    };
    if let Some((end, _)) = text.char_indices().nth(MAX_MESSAGE) {
        text.truncate(end);
        text.push('…');
    }
    text
}
