//! The arguments of a call.

use super::value::Value;
use super::{Fault, Result};
use std::sync::Arc;

#[derive(Clone, Default)]
pub struct Arguments {
    pub positional: Vec<Value>,
    pub named: Vec<(Arc<str>, Value)>,
}

/// Arguments by the order of a function's parameters.
pub struct Bound {
    function: String,
    names: &'static [&'static str],
    values: Vec<Option<Value>>,
}

impl Arguments {
    pub fn of(positional: Vec<Value>) -> Self {
        Self { positional, named: Vec::new() }
    }

    /// Binds the arguments to parameters of these names, of which the first `n_needed` must be
    /// given; an empty name is given by position alone.
    pub fn bind(
        &self,
        function: &str,
        names: &'static [&'static str],
        n_needed: usize,
    ) -> Result<Bound> {
        if self.positional.len() > names.len() {
            let (most, got) = (names.len(), self.positional.len());
            let message = format!("`{function}` takes at most {most} arguments, got {got}");
            return Err(Fault::new(message));
        }
        let mut values: Vec<_> = self.positional.iter().cloned().map(Some).collect();
        values.resize(names.len(), None);
        for (name, value) in &self.named {
            match names.iter().position(|other| !other.is_empty() && **other == **name) {
                Some(at) if values[at].is_none() => values[at] = Some(value.clone()),
                Some(_) => {
                    let message = format!("`{function}` got the argument `{name}` twice");
                    return Err(Fault::new(message));
                }
                None => {
                    let message = format!("`{function}` has no argument `{name}`");
                    return Err(Fault::new(message));
                }
            }
        }
        if values[..n_needed].iter().any(Option::is_none) {
            let message = format!("`{function}` expects {n_needed} arguments at least");
            return Err(Fault::new(message));
        }
        Ok(Bound { function: function.into(), names, values })
    }

    /// Fails if there are any.
    pub fn none(&self, function: &str) -> Result<()> {
        self.bind(function, &[], 0).map(drop)
    }
}

impl Bound {
    pub fn get(&self, at: usize) -> Option<&Value> {
        self.values.get(at).and_then(Option::as_ref)
    }

    /// The argument, unless it is absent or `none`.
    pub fn some(&self, at: usize) -> Option<&Value> {
        self.get(at).filter(|value| !value.is_none())
    }

    pub fn value(&self, at: usize) -> Value {
        self.get(at).cloned().unwrap_or(Value::None)
    }

    fn expected<T>(&self, at: usize, expected: &str, got: &Value) -> Result<T> {
        if let Value::Undefined(what) = got {
            return Err(Fault::undefined(what));
        }
        let name = match self.names.get(at) {
            Some(name) if !name.is_empty() => format!("`{name}`"),
            _ => format!("argument {}", at + 1),
        };
        let (function, kind) = (&self.function, got.kind());
        Err(Fault::new(format!("{name} of `{function}`: expected {expected}, got a {kind}")))
    }

    pub fn text(&self, at: usize) -> Result<&str> {
        let value = self.get(at).unwrap_or(&Value::None);
        match value.as_str() {
            Some(text) => Ok(text),
            None => self.expected(at, "a text", value),
        }
    }

    pub fn int(&self, at: usize, default: i128) -> Result<i128> {
        match self.get(at).map(|value| (value, value.as_int())) {
            None => Ok(default),
            Some((_, Some(n))) => Ok(n),
            Some((value, None)) => self.expected(at, "an integer", value),
        }
    }

    pub fn is_true(&self, at: usize) -> bool {
        self.get(at).is_some_and(Value::is_true)
    }
}
