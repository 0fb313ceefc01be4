//! Compilation with a deadline.

use super::matcher::{Matcher, first_line};
use super::{Grammar, gbnf};
use crate::{Error, Result};
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::SimpleVob;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// How long a compilation may take. Code that is not optimised is many times slower.
pub const DEADLINE: Duration = Duration::from_secs(if cfg!(debug_assertions) { 30 } else { 2 });

/// Rules that name each other in a chain are compiled by recursion.
const STACK_BYTES: usize = 256 << 20;

/// Compilations at a time, those included that were given up.
const MAX_RUNNING: usize = 16;

static N_RUNNING: AtomicUsize = AtomicUsize::new(0);

/// The white space between two parts of a JSON text.
const WHITE_SPACE: &str = r"[ \t]{1,2}|(\r?\n){1,2}[ \t]{0,40}";

/// A grammar that is ready for any number of texts.
pub struct Compiled {
    /// At the beginning of a text.
    pub matcher: Matcher,
    /// The tokens that a text may begin with.
    pub first: SimpleVob,
}

impl Compiled {
    pub fn new(factory: &ParserFactory, grammar: &Grammar) -> Result<Compiled> {
        let mut matcher = match grammar {
            Grammar::Gbnf(text) => Matcher::Gbnf(gbnf::Matcher::new(text)?),
            other => Matcher::Llguidance(Box::new(llguidance_matcher(factory, other)?)),
        };
        let first = matcher.mask(factory.tok_env().tok_trie())?;
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
        return Err(Error::invalid(format!("the {kind} cannot be used: {}", first_line(&why))));
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

/// Runs `work` in a thread that is given up after `deadline`: it cannot be stopped, so it runs on,
/// and its result is dropped.
pub fn within_deadline<T: Send + 'static>(
    deadline: Duration,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let running = Running::new()?;
    let (sender, receiver) = mpsc::sync_channel(1);
    let thread = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
    let spawned = thread.spawn(move || {
        let result = work();
        drop(running);
        // Fails if the deadline has passed.
        let _ = sender.send(result);
    });
    spawned.map_err(|e| Error::invalid(format!("no thread to compile the grammar: {e}")))?;
    match receiver.recv_timeout(deadline) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => Err(Error::invalid(format!(
            "the grammar takes more than {} seconds to compile: simplify it",
            deadline.as_secs()
        ))),
        Err(RecvTimeoutError::Disconnected) => {
            Err(Error::invalid("the grammar is too complex to compile: simplify it"))
        }
    }
}

/// One of the compilations that run.
struct Running;

impl Running {
    fn new() -> Result<Running> {
        let one_more = |n| (n < MAX_RUNNING).then_some(n + 1);
        match N_RUNNING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more) {
            Ok(_) => Ok(Running),
            Err(n) => Err(Error::invalid(format!("{n} grammars are being compiled: try again"))),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        N_RUNNING.fetch_sub(1, Ordering::SeqCst);
    }
}
