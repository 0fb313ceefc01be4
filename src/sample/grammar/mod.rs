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
pub mod sandbox;
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
use sandbox::Sandbox;
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
        Grammars::of_bytes()?.check(self)
    }

    /// A letter for the kind, and the text.
    fn source(&self) -> (u8, String) {
        match self {
            Grammar::JsonSchema(schema) => (b's', schema.to_string()),
            Grammar::JsonObject => (b'o', String::new()),
            Grammar::Regex(text) => (b'r', text.clone()),
            Grammar::Lark(text) => (b'l', text.clone()),
            Grammar::Gbnf(text) => (b'g', text.clone()),
        }
    }

    /// The grammar of a [`Grammar::source`].
    fn of_source(kind: u8, text: &str) -> Result<Grammar> {
        Ok(match kind {
            b's' => Grammar::JsonSchema(
                serde_json::from_str(text).map_err(|e| Error::invalid(e.to_string()))?,
            ),
            b'o' => Grammar::JsonObject,
            b'r' => Grammar::Regex(text.to_owned()),
            b'l' => Grammar::Lark(text.to_owned()),
            b'g' => Grammar::Gbnf(text.to_owned()),
            _ => return Err(Error::invalid(format!("there is no kind {kind} of grammar"))),
        })
    }

    fn key(&self) -> Key {
        let (kind, text) = self.source();
        Sha256::new().chain_update([kind]).chain_update(text).finalize().into()
    }
}

/// Whether a grammar was not compiled because of what it says, and not because of its size.
pub fn is_refusal(error: &Error) -> bool {
    let Error::Invalid(sentence) = error else { return false };
    sentence.contains(" cannot be used: ") || sentence.contains(" describes no text ")
}

type Key = [u8; 32];

/// Compiled grammars that are kept for the next request: how many, and their bytes together.
const N_CACHED: usize = 64;
const MAX_CACHED_BYTES: usize = 32 << 20;

/// Lexer states of one grammar: 1 to 2 KiB each.
const MAX_LEXER_STATES: usize = 25_000;

/// Compiles grammars for one tokenizer, and keeps the latest.
pub struct Grammars {
    factory: Arc<ParserFactory>,
    sandbox: Sandbox,
    /// The most recently used last.
    cache: Mutex<VecDeque<(Key, Arc<Compiled>)>>,
}

impl Grammars {
    /// Builds the tables that masks are computed with: it takes a part of a second for a large
    /// vocabulary.
    pub fn new(tokenizer: &Tokenizer) -> Result<Grammars> {
        let trie = vocabulary::trie(tokenizer)?;
        Grammars::of_env(Arc::new(ApproximateTokEnv::new(trie)))
    }

    /// For a vocabulary of single bytes: checks grammars before there is a model.
    pub fn of_bytes() -> Result<Grammars> {
        Grammars::of_env(ApproximateTokEnv::single_byte_env())
    }

    fn of_env(env: TokEnv) -> Result<Grammars> {
        let (factory, sandbox) = (Arc::new(factory(&env)?), Sandbox::new());
        Ok(Grammars { factory, sandbox, cache: Mutex::default() })
    }

    /// A constraint at the beginning of a text. The grammar is compiled unless it is one of the
    /// latest, after a process of its own has tried it out. The first mask is computed too: a
    /// grammar that no text can match fails here. [`Error::Busy`] where too many grammars are being
    /// compiled, or texts hold too much of them.
    pub fn constraint(&self, grammar: &Grammar) -> Result<Constraint> {
        let compiled = self.compiled(grammar)?;
        Constraint::new(self.factory.tok_env().clone(), compiled)
    }

    fn compiled(&self, grammar: &Grammar) -> Result<Arc<Compiled>> {
        checks::check(grammar)?;
        let key = grammar.key();
        if let Some(compiled) = self.cached(&key) {
            return Ok(compiled);
        }
        self.sandbox.try_out(self.factory.tok_env().tok_trie(), grammar)?;
        let compiled = Arc::new(compile(self.factory.clone(), grammar)?);
        self.keep(key, compiled.clone());
        Ok(compiled)
    }

    /// Fails for a grammar that cannot be compiled, and keeps nothing of it.
    pub fn check(&self, grammar: &Grammar) -> Result<()> {
        checks::check(grammar)?;
        match self.sandbox.try_out(self.factory.tok_env().tok_trie(), grammar)? {
            true => Ok(()),
            false => compile(self.factory.clone(), grammar).map(drop),
        }
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
        let bytes = |(_, compiled): &(Key, Arc<Compiled>)| compiled.held.bytes();
        while cache.len() > N_CACHED || cache.iter().map(bytes).sum::<usize>() > MAX_CACHED_BYTES {
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
