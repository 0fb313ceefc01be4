//! Compilation within bounds.

use super::matcher::{Matcher, NO_TOKEN, sentence};
use super::{Grammar, gbnf};
use crate::guard::{self, Budget};
use crate::{Error, Result};
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::SimpleVob;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Compilations at a time.
const MAX_RUNNING: usize = 16;

/// Compilations that began and have not ended; some of them never will.
static N_RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Compilations that sleep for ever, with the memory that they had.
static N_LOST: AtomicUsize = AtomicUsize::new(0);

/// Bytes that a compilation may hold.
const BYTES: i64 = 128 << 20;

/// With each so many that are lost the next ones may hold half as much, down to a sixteenth: all
/// that are lost hold a gigabyte, and who sends such grammars does not keep others from theirs.
const LOST_PER_HALF: usize = 4;
const MAX_HALVES: usize = 4;

/// From here on, with another gigabyte lost, nothing is compiled.
const MAX_LOST: usize = LOST_PER_HALF * MAX_HALVES + 128;

/// Rules that name each other in a chain are compiled by recursion, which takes stack. Code that is
/// not optimised is many times slower.
fn budget(n_lost: usize) -> Budget {
    Budget {
        bytes: BYTES >> (n_lost / LOST_PER_HALF).min(MAX_HALVES),
        time: Duration::from_secs(if cfg!(debug_assertions) { 30 } else { 2 }),
        end: Duration::from_secs(30),
        stack_bytes: 256 << 20,
        n_lost: &N_LOST,
    }
}

/// The white space between two parts of a JSON text: a small model may write it for ever.
pub const WHITE_SPACE: &str = r"[ \t]|(\r?\n){1,2}[ \t]{0,20}";

/// A grammar that is ready for any number of texts.
pub struct Compiled {
    /// At the beginning of a text.
    pub matcher: Matcher,
    /// The tokens that a text may begin with.
    pub first: SimpleVob,
}

impl Compiled {
    fn new(factory: &ParserFactory, grammar: &Grammar) -> Result<Compiled> {
        let mut matcher = match grammar {
            Grammar::Gbnf(text) => Matcher::Gbnf(gbnf::Matcher::new(text)?),
            other => Matcher::Llguidance(Box::new(llguidance_matcher(factory, other)?)),
        };
        let first = matcher.mask(factory.tok_env().tok_trie()).map_err(|why| match why {
            Error::Invalid(why) if why == NO_TOKEN => Error::invalid(format!(
                "the {} describes no text that the model can write",
                grammar.kind()
            )),
            other => other,
        })?;
        Ok(Compiled { matcher, first })
    }
}

fn llguidance_matcher(factory: &ParserFactory, grammar: &Grammar) -> Result<llguidance::Matcher> {
    let source = match grammar {
        Grammar::JsonSchema(schema) => json_schema(schema.clone()),
        Grammar::JsonObject => json_schema(json!({ "type": "object" })),
        Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
        Grammar::Lark(text) | Grammar::Gbnf(text) => TopLevelGrammar::from_lark(text.clone()),
    };
    let mut matcher = llguidance::Matcher::new(factory.create_parser(source));
    if let Some(why) = matcher.get_error() {
        let kind = grammar.kind();
        return Err(Error::invalid(format!("the {kind} cannot be used: {}", sentence(&why))));
    }
    for warning in matcher.grammar_warnings() {
        log::debug!("{}: {warning}", grammar.kind());
    }
    Ok(matcher)
}

/// With white space of a bounded length, unless the schema brings options of its own: a small model
/// may write spaces for ever.
fn json_schema(mut schema: Value) -> TopLevelGrammar {
    if let Value::Object(fields) = &mut schema {
        let options = || json!({ "whitespace_pattern": WHITE_SPACE });
        fields.entry("x-guidance").or_insert_with(options);
    }
    TopLevelGrammar::from_json_schema(schema)
}

/// Compiles in a guarded thread.
pub fn compile(factory: Arc<ParserFactory>, grammar: &Grammar) -> Result<Compiled> {
    let what = format!("compiling the {}", grammar.kind());
    let (running, grammar) = (Running::new()?, grammar.clone());
    guard::run(&what, budget(N_LOST.load(Ordering::SeqCst)), move || {
        let compiled = Compiled::new(&factory, &grammar);
        drop(running);
        compiled
    })
}

/// One of the compilations that run. Whatever its caller waits for, its thread drops it when it
/// ends; those that never end are counted in [`N_LOST`], too.
struct Running;

impl Running {
    fn new() -> Result<Running> {
        let n_lost = N_LOST.load(Ordering::SeqCst);
        if n_lost >= MAX_LOST {
            let why = format!("{n_lost} grammars took all memory for grammars: start again");
            return Err(Error::invalid(why));
        }
        let one_more = |n| (n < MAX_RUNNING + n_lost).then_some(n + 1);
        match N_RUNNING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more) {
            Ok(_) => Ok(Running),
            Err(n) => {
                let n = n.saturating_sub(n_lost);
                Err(Error::invalid(format!("{n} grammars are being compiled: try again")))
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        N_RUNNING.fetch_sub(1, Ordering::SeqCst);
    }
}
