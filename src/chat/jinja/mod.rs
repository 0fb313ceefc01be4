//! Jinja as transformers renders chat templates with it: Jinja 3.1's grammar, its immutable
//! sandbox, and Python's values, which are what templates print.
//!
//! A template renders to the text that transformers renders, or it is refused with a sentence that
//! names what is not supported. Attributes that begin with an underscore are out of reach, and
//! lists and dictionaries never change, so that no value holds itself.

mod arguments;
mod ast;
mod checks;
mod eval;
mod filters;
mod format;
mod globals;
mod json;
mod lexer;
mod lists;
mod methods;
mod numbers;
mod ops;
mod parser;
mod percent;
mod sequences;
mod text;
mod value;
mod walk;
mod wrap;

use super::clock::Clock;
use crate::meter;
use arguments::Arguments;
use serde_json::{Map, Value as Json};
use std::collections::HashSet;

/// Why a template does not render.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub message: String,
    /// From 1; 0: not known.
    pub line: usize,
    /// The template says so itself.
    pub is_raised: bool,
}

type Result<T> = std::result::Result<T, Fault>;

/// Fails once the thread holds too much or runs too long.
fn within_bounds() -> Result<()> {
    match meter::excess() {
        Some(excess) => Err(Fault::new(format!("rendering took {excess}"))),
        None => Ok(()),
    }
}

impl Fault {
    fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), line: 0, is_raised: false }
    }

    fn undefined(what: &str) -> Self {
        Self::new(format!("{what} is undefined"))
    }

    /// The fault with its line, if it has none yet.
    fn at(self, line: usize) -> Self {
        Self { line: if self.line == 0 { line } else { self.line }, ..self }
    }
}

/// The limits of a rendering.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Statements, expressions, and items of lists.
    pub steps: u64,
    /// Macros and loops that call each other.
    pub depth: usize,
    pub output_bytes: usize,
}

/// A parsed template.
#[derive(Debug)]
pub struct Template {
    body: Vec<ast::Statement>,
}

impl Template {
    /// Fails where the source is no template, and where it names a filter or a test that there is
    /// none of.
    pub fn new(source: &str) -> Result<Self> {
        let body = parser::parse(source)?;
        if let Some(unknown) = walk::unknown(&body) {
            return Err(Fault::new(unknown));
        }
        Ok(Self { body })
    }

    /// The names that the template reads and has not made before.
    pub fn free(&self) -> HashSet<String> {
        walk::free(&self.body)
    }

    /// The text of the template with these names in scope.
    pub fn render(
        &self,
        context: Map<String, Json>,
        clock: Clock,
        limits: Limits,
    ) -> Result<String> {
        eval::Interpreter::new(context, clock, limits).render(&self.body)
    }
}
