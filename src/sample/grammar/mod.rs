//! Texts that must match a JSON schema, a regular expression or a grammar.
//!
//! [`Grammars`] belongs to a tokenizer. It compiles a [`Grammar`] and answers with a
//! [`Constraint`], which says for one text which tokens may come next. JSON schemas, regular
//! expressions and Lark grammars are llguidance's work; GBNF is ours (`gbnf`), because it has no
//! lexer and llguidance always has one.

mod checks;
mod compile;
mod constraint;
mod gbnf;
mod matcher;
pub mod schema;
mod trigger;
mod vocabulary;

pub use compile::WHITE_SPACE;
pub use constraint::{Constraint, TokenMask};
pub use matcher::TOO_COMPLEX;

use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use compile::{Compiled, compile};
use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// A form that a text must have.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// A JSON value that this schema describes.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// A regular expression that matches the whole text, in the syntax of the regex crate.
    Regex(String),
    /// A Lark grammar with llguidance's extensions.
    Lark(String),
    /// A grammar in llama.cpp's format, whose first symbol is `root`.
    Gbnf(String),
}

impl Grammar {
    /// The grammar's name in messages.
    fn kind(&self) -> &'static str {
        match self {
            Grammar::JsonSchema(_) | Grammar::JsonObject => "JSON schema",
            Grammar::Regex(_) => "regular expression",
            Grammar::Lark(_) => "Lark grammar",
            Grammar::Gbnf(_) => "GBNF grammar",
        }
    }

    /// Compiles the grammar without a model, to find its faults before one is loaded.
    pub fn check(&self) -> Result<()> {
        checks::check(self)?;
        let env = ApproximateTokEnv::single_byte_env();
        compile(Arc::new(factory(&env)?), self).map(drop)
    }

    fn key(&self) -> Key {
        let (tag, text) = match self {
            Grammar::JsonSchema(schema) => ("schema", schema.to_string()),
            Grammar::JsonObject => ("object", String::new()),
            Grammar::Regex(text) => ("regex", text.clone()),
            Grammar::Lark(text) => ("lark", text.clone()),
            Grammar::Gbnf(text) => ("gbnf", text.clone()),
        };
        Sha256::new().chain_update(tag).chain_update([0]).chain_update(text).finalize().into()
    }
}

/// Whether a grammar was not compiled because of what it says, and not because of its size.
pub fn is_refusal(error: &Error) -> bool {
    let Error::Invalid(sentence) = error else { return false };
    sentence.contains(" cannot be used: ") || sentence.contains(" describes no text ")
}

type Key = [u8; 32];

/// Compiled grammars that are kept for the next request.
const N_CACHED: usize = 64;

/// Lexer states of one grammar: 1 to 2 KiB each.
const MAX_LEXER_STATES: usize = 25_000;

/// Compiles grammars for one tokenizer, and keeps the latest.
pub struct Grammars {
    factory: Arc<ParserFactory>,
    /// The most recently used last.
    cache: Mutex<VecDeque<(Key, Arc<Compiled>)>>,
}

impl Grammars {
    /// Builds the tables that masks are computed with: it takes a part of a second for a large
    /// vocabulary.
    pub fn new(tokenizer: &Tokenizer) -> Result<Grammars> {
        let trie = vocabulary::trie(tokenizer)?;
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        Ok(Grammars { factory: Arc::new(factory(&env)?), cache: Mutex::default() })
    }

    /// A constraint at the beginning of a text. The grammar is compiled unless it is one of the
    /// latest, within two seconds and in a thread of its own. The first mask is computed too: a
    /// grammar that no text can match fails here.
    pub fn constraint(&self, grammar: &Grammar) -> Result<Constraint> {
        checks::check(grammar)?;
        let key = grammar.key();
        let compiled = match self.cached(&key) {
            Some(compiled) => compiled,
            None => {
                let compiled = Arc::new(compile(self.factory.clone(), grammar)?);
                self.keep(key, compiled.clone());
                compiled
            }
        };
        Ok(Constraint::new(self.factory.tok_env().clone(), compiled))
    }

    /// Compiles a grammar and keeps nothing of it.
    pub fn check(&self, grammar: &Grammar) -> Result<()> {
        checks::check(grammar)?;
        compile(self.factory.clone(), grammar).map(drop)
    }

    fn cached(&self, key: &Key) -> Option<Arc<Compiled>> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let at = cache.iter().position(|(known, _)| known == key)?;
        let entry = cache.remove(at)?;
        let compiled = entry.1.clone();
        cache.push_back(entry);
        Some(compiled)
    }

    fn keep(&self, key: Key, compiled: Arc<Compiled>) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|(known, _)| *known != key);
        cache.push_back((key, compiled));
        while cache.len() > N_CACHED {
            cache.pop_front();
        }
    }
}

/// Tokens of texts between tags: where a text may go on with all of them, none is looked at.
const TEXT_SLICE: &str = "[^<]+";

fn factory(env: &TokEnv) -> Result<ParserFactory> {
    let mut slices = SlicedBiasComputer::general_slices();
    slices.push(TEXT_SLICE.into());
    let factory = ParserFactory::new(env, InferenceCapabilities::default(), &slices);
    let mut factory = factory
        .map_err(|e| Error::invalid(format!("the vocabulary cannot be used with grammars: {e}")))?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.max_lexer_states = MAX_LEXER_STATES;
    limits.verbose_errors = false;
    Ok(factory)
}

#[cfg(test)]
mod tests;
