//! Compilation within bounds.

use super::matcher::{Matcher, NO_TOKEN, sentence};
use super::sandbox::lower_priority;
use super::{Grammar, gbnf};
use crate::meter::{self, Bounds};
use crate::{Error, Result};
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::SimpleVob;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The subject of messages.
pub const WHAT: &str = "compiling the grammar";

/// The bounds of a compilation. Its time is bounded where it is tried out. Rules that name each
/// other in a chain are compiled by recursion, which takes stack.
pub const BOUNDS: Bounds =
    Bounds { bytes: 128 << 20, time: Duration::from_secs(3600), stack_bytes: 256 << 20 };

/// Bytes of all grammars that texts follow or that are kept for the next request.
const MAX_LIVE_BYTES: usize = 256 << 20;

/// Bytes of all compiled grammars and of the copies that texts have.
static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// A share of [`LIVE_BYTES`], given back at its end.
#[derive(Debug)]
pub struct Held(usize);

impl Held {
    /// Fails where others hold too much.
    pub fn new(n_bytes: usize) -> Result<Held> {
        let held = Held::at_once(n_bytes);
        match LIVE_BYTES.load(Ordering::Relaxed) <= MAX_LIVE_BYTES {
            true => Ok(held),
            false => Err(Error::Busy("grammars take all memory that they have: try again".into())),
        }
    }

    fn at_once(n_bytes: usize) -> Held {
        LIVE_BYTES.fetch_add(n_bytes, Ordering::Relaxed);
        Held(n_bytes)
    }

    pub fn bytes(&self) -> usize {
        self.0
    }
}

impl Clone for Held {
    fn clone(&self) -> Held {
        Held::at_once(self.0)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        LIVE_BYTES.fetch_sub(self.0, Ordering::Relaxed);
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
    /// Bytes, where the program's allocator counts them.
    pub held: Held,
}

impl Compiled {
    pub fn new(factory: &ParserFactory, grammar: &Grammar) -> Result<Compiled> {
        let before = meter::held();
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
        let held = Held::new(meter::held().saturating_sub(before))?;
        Ok(Compiled { matcher, first, held })
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

/// Compiles a grammar that was tried out, in a thread of its own.
pub fn compile(factory: Arc<ParserFactory>, grammar: &Grammar) -> Result<Compiled> {
    let grammar = grammar.clone();
    meter::run(WHAT, BOUNDS, move || {
        lower_priority();
        Compiled::new(&factory, &grammar)
    })
}
