//! Flags that give answers a form: a grammar or a JSON schema.

use super::prompt::read_text;
use crate::chat::reasoning::AnswerStart;
use crate::sample::grammar::schema::{Client, fit};
use crate::sample::grammar::{Constraint, Grammar, Grammars};
use crate::tokenizer::{EncodeOptions, Tokenizer};
use crate::{Error, Result};
use serde_json::Value;
use std::path::PathBuf;

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Generation")]
pub struct GrammarArgs {
    /// Give answers the form that this GBNF grammar describes
    #[arg(long, value_name = "GBNF", allow_hyphen_values = true)]
    #[arg(overrides_with_all = ["grammar_file", "json_schema", "json_schema_file"])]
    grammar: Option<String>,
    /// A file that holds the grammar
    #[arg(long, value_name = "FILE")]
    #[arg(overrides_with_all = ["json_schema", "json_schema_file"])]
    grammar_file: Option<PathBuf>,
    /// Make answers JSON values that this schema describes; {} describes all
    #[arg(short, long, value_name = "SCHEMA", allow_hyphen_values = true)]
    #[arg(overrides_with = "json_schema_file")]
    json_schema: Option<String>,
    /// A file that holds the schema (or -jf FILE)
    #[arg(long, value_name = "FILE")]
    json_schema_file: Option<PathBuf>,
}

impl GrammarArgs {
    /// The form of answers, checked; `None` for free ones.
    pub fn grammar(&self) -> Result<Option<Grammar>> {
        let read = |path: &Option<PathBuf>| path.as_deref().map(read_text).transpose();
        let gbnf = self.grammar.clone().or(read(&self.grammar_file)?);
        let schema = self.json_schema.clone().or(read(&self.json_schema_file)?);
        let grammar = match (gbnf, schema) {
            (Some(text), _) if !text.is_empty() => Some(Grammar::Gbnf(text)),
            (_, Some(text)) if !text.is_empty() => return json_schema(&text).map(Some),
            _ => None,
        };
        grammar.as_ref().map_or(Ok(()), Grammar::check)?;
        Ok(grammar)
    }
}

/// The schema, as far as it can be enforced.
fn json_schema(text: &str) -> Result<Grammar> {
    let why = |e| Error::invalid(format!("the JSON schema is not valid JSON: {e}"));
    let schema: Value = serde_json::from_str(text).map_err(why)?;
    let client = Client { schema: &schema, path: "", tool: None, is_strict: false };
    let grammars = Grammars::of_bytes()?;
    let check = |schema: &Value| grammars.check(&Grammar::JsonSchema(schema.clone()));
    fit(&client, |schema| check(&schema).map(|()| Grammar::JsonSchema(schema)), check)
}

/// A constraint that leaves what stands before an answer free.
pub fn of_answer(
    constraint: Constraint,
    start: Option<AnswerStart>,
    tokenizer: &Tokenizer,
) -> Constraint {
    let Some(AnswerStart { marker, open }) = start else { return constraint };
    let marker = marker.as_bytes().to_vec();
    let options = EncodeOptions { add_special: false, parse_special: true };
    match open {
        Some(open) => constraint.or_after(tokenizer.encode(open, options), marker),
        None => constraint.after([marker]),
    }
}
