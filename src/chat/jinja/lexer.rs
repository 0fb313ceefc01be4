//! From source to tokens, with Jinja's rules for white space: `trim_blocks`, `lstrip_blocks`, and
//! the signs `-` and `+` in tags.

use super::Fault;
use super::text::is_space;
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq)]
pub enum Token {
    Data(Arc<str>),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(Arc<str>),
    Str(String),
    Int(i128),
    Float(f64),
    Operator(&'static str),
    End,
}

/// The longer ones first.
const OPERATORS: &[&str] = &[
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";",
];

pub struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: usize,
    /// Whether what stands before `at` is a line's beginning.
    line_starting: bool,
    pub tokens: Vec<(Token, usize)>,
}

/// The source with `\n` for each line's end, and without the last one.
fn with_plain_newlines(source: &str) -> String {
    let mut text = source.replace("\r\n", "\n").replace('\r', "\n");
    if text.ends_with('\n') {
        text.pop();
    }
    text
}

/// The tokens with their lines.
pub fn tokens(source: &str) -> Result<Vec<(Token, usize)>, Fault> {
    let source = with_plain_newlines(source);
    let mut lexer =
        Lexer { source: &source, at: 0, line: 1, line_starting: true, tokens: Vec::new() };
    while lexer.at < source.len() {
        lexer.outside()?;
    }
    lexer.push(Token::End);
    Ok(lexer.tokens)
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    fn push(&mut self, token: Token) {
        self.tokens.push((token, self.line));
    }

    fn data(&mut self, text: &str) {
        if !text.is_empty() {
            self.push(Token::Data(text.into()));
        }
    }

    fn skip(&mut self, n: usize) {
        let passed = &self.source[self.at..self.at + n];
        self.line += passed.matches('\n').count();
        if !passed.is_empty() {
            self.line_starting = passed.ends_with('\n');
        }
        self.at += n;
    }

    fn skip_spaces(&mut self) {
        let rest = self.rest();
        self.skip(rest.len() - rest.trim_start_matches(is_space).len());
    }

    fn fault<T>(&self, message: impl Into<String>) -> Result<T, Fault> {
        Err(Fault::new(message).at(self.line))
    }

    /// The text up to the next tag, and that tag.
    fn outside(&mut self) -> Result<(), Fault> {
        let rest = self.rest();
        let tag = rest
            .match_indices('{')
            .map(|(at, _)| at)
            .find(|at| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')));
        let Some(tag) = tag else {
            self.data(rest);
            self.skip(rest.len());
            return Ok(());
        };
        let kind = rest.as_bytes()[tag + 1];
        let sign = rest.as_bytes().get(tag + 2).copied().filter(|sign| b"-+".contains(sign));
        let text = self.stripped(&rest[..tag], sign, kind == b'{');
        self.data(text);
        self.skip(tag + 2 + usize::from(sign.is_some()));
        match kind {
            b'#' => self.comment(),
            b'{' => {
                self.push(Token::VariableBegin);
                self.inside("}}", false)?;
                self.push(Token::VariableEnd);
                Ok(())
            }
            _ => match self.raw_begin() {
                true => self.raw(),
                false => {
                    self.push(Token::BlockBegin);
                    self.inside("%}", true)?;
                    self.push(Token::BlockEnd);
                    Ok(())
                }
            },
        }
    }

    /// The text before a tag without the white space that the tag takes away.
    fn stripped<'t>(&self, text: &'t str, sign: Option<u8>, is_variable: bool) -> &'t str {
        match sign {
            Some(b'-') => text.trim_end_matches(is_space),
            Some(_) => text,
            None if is_variable => text,
            None => {
                let line = text.rfind('\n').map_or(0, |at| at + 1);
                let is_blank = text[line..].chars().all(is_space);
                let starts = line > 0 || self.line_starting;
                if starts && is_blank { &text[..line] } else { text }
            }
        }
    }

    fn comment(&mut self) -> Result<(), Fault> {
        let Some(end) = self.rest().find("#}") else {
            return self.fault("a comment without an end");
        };
        let sign = self.rest().as_bytes()[..end].last().copied();
        self.skip(end + 2);
        self.after_tag(sign, true);
        Ok(())
    }

    /// The white space that goes away behind a tag's end.
    fn after_tag(&mut self, sign: Option<u8>, trims: bool) {
        match sign {
            Some(b'-') => self.skip_spaces(),
            Some(b'+') => {}
            _ if trims && self.rest().starts_with('\n') => self.skip(1),
            _ => {}
        }
    }

    /// Passes ` raw %}`, if it is there.
    fn raw_begin(&mut self) -> bool {
        let Some(rest) = self.rest().trim_start_matches(is_space).strip_prefix("raw") else {
            return false;
        };
        let rest = rest.trim_start_matches(is_space);
        let (is_stripped, rest) = match (rest.strip_prefix("-%}"), rest.strip_prefix("%}")) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => return false,
        };
        self.skip(self.rest().len() - rest.len());
        if is_stripped {
            self.skip_spaces();
        }
        true
    }

    fn raw(&mut self) -> Result<(), Fault> {
        let rest = self.rest();
        for (at, _) in rest.match_indices("{%") {
            let tag = &rest[at + 2..];
            let sign = tag.bytes().next().filter(|sign| b"-+".contains(sign));
            let tag = tag[usize::from(sign.is_some())..].trim_start_matches(is_space);
            let Some(tag) = tag.strip_prefix("endraw") else { continue };
            let tag = tag.trim_start_matches(is_space);
            let close = tag.bytes().next().filter(|sign| b"-+".contains(sign));
            let Some(tag) = tag[usize::from(close.is_some())..].strip_prefix("%}") else {
                continue;
            };
            let text = self.stripped(&rest[..at], sign, false);
            self.data(text);
            self.skip(rest.len() - tag.len());
            self.after_tag(close, true);
            return Ok(());
        }
        self.fault("a raw block without an end")
    }

    /// The tokens of a tag, and its end.
    fn inside(&mut self, end: &str, trims: bool) -> Result<(), Fault> {
        let mut brackets: Vec<&str> = Vec::new();
        loop {
            self.skip_spaces();
            let rest = self.rest();
            let Some(first) = rest.chars().next() else {
                return self.fault(format!("a tag without its `{end}`"));
            };
            if brackets.is_empty() {
                let sign = rest.bytes().next().filter(|&b| b == b'-' || b == b'+' && trims);
                if rest[usize::from(sign.is_some())..].starts_with(end) {
                    self.skip(usize::from(sign.is_some()) + end.len());
                    self.after_tag(sign, trims);
                    return Ok(());
                }
            }
            if first.is_ascii_digit() {
                self.number()?;
            } else if first == '_' || first.is_alphanumeric() {
                let n = rest.find(|c: char| c != '_' && !c.is_alphanumeric());
                let name = &rest[..n.unwrap_or(rest.len())];
                if !first.is_alphabetic() && first != '_' {
                    return self.fault(format!("`{name}` is no name"));
                }
                self.push(Token::Name(name.into()));
                self.skip(name.len());
            } else if first == '"' || first == '\'' {
                self.string(first)?;
            } else {
                let operator = OPERATORS.iter().find(|operator| rest.starts_with(**operator));
                let Some(&operator) = operator else {
                    return self.fault(format!("an unexpected character `{first}`"));
                };
                match operator {
                    "(" => brackets.push(")"),
                    "[" => brackets.push("]"),
                    "{" => brackets.push("}"),
                    ")" | "]" | "}" if brackets.pop() != Some(operator) => {
                        return self.fault(format!("an unexpected `{operator}`"));
                    }
                    _ => {}
                }
                self.push(Token::Operator(operator));
                self.skip(operator.len());
            }
        }
    }

    /// How many bytes at `from` are digits, with single underscores between them.
    fn n_digits(&self, from: usize, is_digit: impl Fn(u8) -> bool) -> usize {
        let bytes = &self.source.as_bytes()[from..];
        let mut n = 0;
        while let Some(byte) = bytes.get(n) {
            let is_underscore =
                *byte == b'_' && n > 0 && bytes.get(n + 1).is_some_and(|b| is_digit(*b));
            if !is_digit(*byte) && !is_underscore {
                break;
            }
            n += 1;
        }
        n
    }

    fn number(&mut self) -> Result<(), Fault> {
        let bytes = self.source.as_bytes();
        let decimal = |from| self.n_digits(from, |b| b.is_ascii_digit());
        let whole = decimal(self.at);
        let mut end = self.at + whole;
        let mut is_float = false;
        // Behind a dot a number is an index.
        if self.at == 0 || bytes[self.at - 1] != b'.' {
            if bytes.get(end) == Some(&b'.') && decimal(end + 1) > 0 {
                end += 1 + decimal(end + 1);
                is_float = true;
            }
            if matches!(bytes.get(end), Some(b'e' | b'E')) {
                let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
                let digits = decimal(end + 1 + sign);
                if digits > 0 {
                    end += 1 + sign + digits;
                    is_float = true;
                }
            }
        }
        if is_float {
            let text = self.source[self.at..end].replace('_', "");
            let number = text.parse().map_err(|_| Fault::new(format!("`{text}` is no number")))?;
            self.push(Token::Float(number));
            self.skip(end - self.at);
            return Ok(());
        }
        let radix = match bytes.get(self.at + 1) {
            Some(b'x' | b'X') => 16,
            Some(b'o' | b'O') => 8,
            Some(b'b' | b'B') => 2,
            _ => 10,
        };
        let prefix = if radix == 10 || bytes[self.at] != b'0' { 0 } else { 2 };
        let radix = if prefix == 0 { 10 } else { radix };
        let mut from = self.at + prefix;
        if prefix > 0 && bytes.get(from) == Some(&b'_') {
            from += 1;
        }
        let mut n = self.n_digits(from, |b| char::from(b).is_digit(radix));
        // `01` is two numbers.
        if radix == 10 && bytes[from] == b'0' {
            n = self.n_digits(from, |b| b == b'0');
        }
        let digits = self.source[from..from + n].replace('_', "");
        let Ok(number) = i128::from_str_radix(&digits, radix) else {
            return self.fault(format!("the number `{digits}` has more than 127 bits"));
        };
        self.push(Token::Int(number));
        self.skip(from + n - self.at);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<(), Fault> {
        let rest = self.rest();
        let mut text = String::new();
        let mut chars = rest.char_indices().skip(1).peekable();
        while let Some((at, c)) = chars.next() {
            match c {
                c if c == quote => {
                    self.push(Token::Str(text));
                    self.skip(at + 1);
                    return Ok(());
                }
                '\\' => {
                    let Some((from, escaped)) = chars.next() else { break };
                    let mut digits = |n: usize, radix: u32, first: Option<char>| {
                        let mut found = String::from_iter(first);
                        while found.len() < n && chars.peek().is_some_and(|c| c.1.is_digit(radix)) {
                            found.extend(chars.next().map(|c| c.1));
                        }
                        found
                    };
                    let n = match escaped {
                        'x' => 2,
                        'u' => 4,
                        'U' => 8,
                        _ => 0,
                    };
                    let code = match escaped {
                        '0'..='7' => Some((digits(3, 8, Some(escaped)), 8)),
                        'x' | 'u' | 'U' => Some((digits(n, 16, None), 16)),
                        _ => None,
                    };
                    if let Some((code, radix)) = code {
                        let c = u32::from_str_radix(&code, radix).ok().and_then(char::from_u32);
                        let Some(c) = c.filter(|_| radix == 8 || code.len() == n) else {
                            let escape = &rest[from..from + escaped.len_utf8() + code.len()];
                            return self.fault(format!("the escape `\\{escape}` is no character"));
                        };
                        text.push(c);
                        continue;
                    }
                    match escaped {
                        'n' => text.push('\n'),
                        't' => text.push('\t'),
                        'r' => text.push('\r'),
                        'a' => text.push('\u{7}'),
                        'b' => text.push('\u{8}'),
                        'f' => text.push('\u{c}'),
                        'v' => text.push('\u{b}'),
                        '\n' => {}
                        '\\' | '\'' | '"' => text.push(escaped),
                        'N' => return self.fault("escapes by name (`\\N`) are not supported"),
                        // Python keeps the backslash of an unknown one.
                        other if other.is_ascii() => text.extend(['\\', other]),
                        other => {
                            return self.fault(format!("the escape `\\{other}` is not supported"));
                        }
                    }
                }
                c => text.push(c),
            }
        }
        self.fault("a string without an end")
    }
}
