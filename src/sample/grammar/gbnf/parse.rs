//! The text of a GBNF grammar to its rules.

use super::rules::{Class, Rules, Sequence, Symbol};
use crate::{Error, Result};
use std::collections::HashMap;

/// Groups within each other.
const MAX_DEPTH: usize = 64;

/// How often a repetition with numbers may repeat.
const MAX_REPETITIONS: usize = 2000;

/// Rules with `root` as number 0.
pub fn parse(text: &str) -> Result<Rules> {
    let mut parser = Parser { text, at: 0, rules: Rules::default(), names: Names::default() };
    parser.rule_named("root");
    parser.space(true);
    while parser.at < text.len() {
        parser.rule()?;
    }
    parser.finish()
}

/// A rule that was defined or referred to.
struct Named {
    name: String,
    rule: usize,
    /// The position of its first mention.
    at: usize,
    is_defined: bool,
}

#[derive(Default)]
struct Names {
    all: Vec<Named>,
    by_name: HashMap<String, usize>,
}

struct Parser<'a> {
    text: &'a str,
    /// In bytes, on the boundary of a character.
    at: usize,
    rules: Rules,
    names: Names,
}

impl<'a> Parser<'a> {
    fn finish(self) -> Result<Rules> {
        let undefined = self.names.all.iter().find(|named| !named.is_defined);
        if let Some(Named { name, at, .. }) = undefined {
            return Err(match name.as_str() {
                "root" => Error::invalid("the GBNF grammar has no rule named root"),
                _ => self.error_at(*at, &format!("the rule {name} is not defined")),
            });
        }
        if let Some(rule) = self.rules.left_recursive() {
            let named = self.names.all.iter().find(|named| named.rule == rule);
            return Err(match named {
                Some(Named { name, at, .. }) => {
                    self.error_at(*at, &format!("the rule {name} begins with itself"))
                }
                None => Error::invalid("the GBNF grammar repeats a part that can be empty"),
            });
        }
        Ok(self.rules)
    }

    fn error_at(&self, at: usize, what: &str) -> Error {
        let line = self.text[..at].matches('\n').count() + 1;
        Error::invalid(format!("line {line} of the GBNF grammar: {what}"))
    }

    fn error<T>(&self, what: &str) -> Result<T> {
        Err(self.error_at(self.at, what))
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn take(&mut self) -> Result<char> {
        match self.peek() {
            Some(c) => {
                self.at += c.len_utf8();
                Ok(c)
            }
            None => self.error("the text ends within a rule"),
        }
    }

    fn take_if(&mut self, text: &str) -> bool {
        let is_next = self.rest().starts_with(text);
        self.at += if is_next { text.len() } else { 0 };
        is_next
    }

    /// Passes spaces and comments, and line breaks if they may be here.
    fn space(&mut self, with_lines: bool) {
        loop {
            let is_space =
                |c: char| c == ' ' || c == '\t' || with_lines && matches!(c, '\r' | '\n');
            let rest = self.rest().trim_start_matches(is_space);
            self.at = self.text.len() - rest.len();
            if !rest.starts_with('#') {
                return;
            }
            self.at += rest.find(['\r', '\n']).unwrap_or(rest.len());
        }
    }

    fn name(&mut self) -> Result<&'a str> {
        let rest = self.rest();
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        let n = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        if n == 0 {
            return match self.peek() {
                Some(c) => self.error(&format!("expected a rule's name, got {c:?}")),
                None => self.error("expected a rule's name, got the end of the text"),
            };
        }
        self.at += n;
        Ok(&rest[..n])
    }

    fn rule_named(&mut self, name: &str) -> usize {
        if let Some(&index) = self.names.by_name.get(name) {
            return index;
        }
        let (rule, index) = (self.rules.add(), self.names.all.len());
        let named = Named { name: name.into(), rule, at: self.at, is_defined: false };
        self.names.all.push(named);
        self.names.by_name.insert(name.into(), index);
        index
    }

    /// `name ::= alternatives`, to the end of the line.
    fn rule(&mut self) -> Result<()> {
        let name = self.name()?;
        let index = self.rule_named(name);
        self.space(false);
        if !self.take_if("::=") {
            return self.error(&format!("expected ::= after the name {name}"));
        }
        if self.names.all[index].is_defined {
            return self.error(&format!("the rule {name} is defined twice"));
        }
        self.names.all[index].is_defined = true;
        self.space(true);
        let alternatives = self.alternatives(0)?;
        self.rules.set(self.names.all[index].rule, alternatives)?;
        match self.peek() {
            None | Some('\r' | '\n') => {
                self.space(true);
                Ok(())
            }
            Some(c) => self.error(&format!("expected the end of the rule {name}, got {c:?}")),
        }
    }

    fn alternatives(&mut self, depth: usize) -> Result<Vec<Sequence>> {
        let mut out = vec![self.sequence(depth)?];
        while self.take_if("|") {
            self.space(true);
            out.push(self.sequence(depth)?);
        }
        Ok(out)
    }

    fn sequence(&mut self, depth: usize) -> Result<Sequence> {
        let mut out = Vec::new();
        while let Some(part) = self.part(depth)? {
            self.space(depth > 0);
            out.extend(self.repeated(part, depth)?);
        }
        Ok(out)
    }

    /// A literal, a class, a group or a rule; `None` where the sequence ends.
    fn part(&mut self, depth: usize) -> Result<Option<Sequence>> {
        Ok(Some(match self.peek() {
            Some('"') => self.literal()?,
            Some('[') => vec![Symbol::Chars(self.class()?)],
            Some('.') => {
                self.take()?;
                vec![Symbol::Chars(Class::any())]
            }
            Some('(') if depth == MAX_DEPTH => {
                return self.error(&format!("groups are nested more than {MAX_DEPTH} levels deep"));
            }
            Some('(') => {
                self.take()?;
                self.space(true);
                let alternatives = self.alternatives(depth + 1)?;
                if !self.take_if(")") {
                    return self.error("expected ) at the end of a group");
                }
                let rule = self.rules.add();
                self.rules.set(rule, alternatives)?;
                vec![Symbol::Rule(rule)]
            }
            Some('<' | '!') => return self.error("grammars of tokens are not supported"),
            Some('*' | '+' | '?' | '{') => return self.error("there is nothing to repeat"),
            None | Some('|' | ')' | '\r' | '\n') => return Ok(None),
            Some(_) => {
                let name = self.name()?;
                let index = self.rule_named(name);
                vec![Symbol::Rule(self.names.all[index].rule)]
            }
        }))
    }

    fn literal(&mut self) -> Result<Sequence> {
        self.take()?;
        let mut out = Vec::new();
        while !self.take_if("\"") {
            let code = self.character()?;
            match char::from_u32(code) {
                Some(c) => out.push(Symbol::Chars(Class::one(c))),
                None => return self.error(&format!("U+{code:04X} is no character")),
            }
        }
        Ok(out)
    }

    fn class(&mut self) -> Result<Class> {
        self.take()?;
        let is_negated = self.take_if("^");
        let mut ranges = Vec::new();
        while !self.take_if("]") {
            let low = self.character()?;
            let is_range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let high = match is_range {
                true => {
                    self.take()?;
                    self.character()?
                }
                false => low,
            };
            if high < low {
                return self.error("a range ends before it begins");
            }
            ranges.push((low, high));
        }
        Ok(if is_negated { Class::except(&ranges) } else { Class::of(&ranges) })
    }

    /// A character of a literal or a class, by itself or escaped.
    fn character(&mut self) -> Result<u32> {
        let c = self.take()?;
        if c != '\\' {
            return Ok(c as u32);
        }
        let escaped = self.take()?;
        let n_digits = match escaped {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            't' => return Ok('\t' as u32),
            'r' => return Ok('\r' as u32),
            'n' => return Ok('\n' as u32),
            '\\' | '"' | '[' | ']' => return Ok(escaped as u32),
            _ => return self.error(&format!("there is no escape \\{escaped}")),
        };
        let digits = self.rest().get(..n_digits).unwrap_or_default();
        let is_hex = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        match u32::from_str_radix(digits, 16) {
            Ok(code) if is_hex => {
                self.at += n_digits;
                Ok(code)
            }
            _ => self.error(&format!("expected {n_digits} hexadecimal digits after \\{escaped}")),
        }
    }

    /// A part with the repetitions that follow it.
    fn repeated(&mut self, mut part: Sequence, depth: usize) -> Result<Sequence> {
        loop {
            let (least, most) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.numbers()?,
                _ => return Ok(part),
            };
            self.take()?;
            self.space(depth > 0);
            part = self.rules.repeat(part, least, most)?;
        }
    }

    /// `{m}`, `{m,}` or `{m,n}` up to its last brace.
    fn numbers(&mut self) -> Result<(usize, Option<usize>)> {
        self.take()?;
        self.space(true);
        let least = self.number()?;
        self.space(true);
        let mut most = Some(least);
        if self.take_if(",") {
            self.space(true);
            most = if self.peek() == Some('}') { None } else { Some(self.number()?) };
            self.space(true);
        }
        if self.peek() != Some('}') {
            return self.error("expected } after the numbers of a repetition");
        }
        if most.is_some_and(|most| most < least) {
            return self.error("a repetition's second number is less than its first");
        }
        Ok((least, most))
    }

    fn number(&mut self) -> Result<usize> {
        let rest = self.rest();
        let n = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        match rest[..n].parse() {
            Ok(number) if number <= MAX_REPETITIONS => {
                self.at += n;
                Ok(number)
            }
            _ => self.error(&format!("expected a number up to {MAX_REPETITIONS}")),
        }
    }
}
