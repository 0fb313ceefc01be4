//! Functions of a Rust source and their parameters.

use regex::Regex;

#[derive(Debug, PartialEq)]
pub struct Signature {
    pub name: String,
    /// Counted from 1.
    pub line: usize,
    /// Without `self`.
    pub parameters: Vec<String>,
}

impl Signature {
    /// Parameters whose pattern or type is a tuple, or a reference to one.
    pub fn tuples(&self) -> impl Iterator<Item = &str> {
        self.parameters.iter().map(String::as_str).filter(|parameter| {
            let (pattern, ty) = split_type(parameter);
            is_tuple(pattern) || is_tuple(ty)
        })
    }
}

/// All functions of `code`, a text without comments and strings.
pub fn signatures(code: &str) -> Vec<Signature> {
    let head = Regex::new(r"\bfn\s+(\w+)").unwrap();
    let mut out = Vec::new();
    for found in head.captures_iter(code) {
        let after_name = &code[found.get(0).unwrap().end()..];
        let Some(parameters) = parameters(after_name) else { continue };
        let line = code[..found.get(0).unwrap().start()].matches('\n').count() + 1;
        out.push(Signature { name: found[1].to_owned(), line, parameters });
    }
    out
}

/// Reads `<generics>(parameters)` from the beginning of `text`.
fn parameters(text: &str) -> Option<Vec<String>> {
    let mut text = text.trim_start();
    if text.starts_with('<') {
        text = text[closing(text)? + 1..].trim_start();
    }
    if !text.starts_with('(') {
        return None;
    }
    let items = split_items(&text[1..closing(text)?]);
    Some(items.into_iter().filter(|item| !is_self(item)).collect())
}

/// The position of the bracket that closes the one at the beginning of `text`.
fn closing(text: &str) -> Option<usize> {
    let (mut depth, mut before) = (0, ' ');
    for (at, c) in text.char_indices() {
        depth += step(c, before);
        if depth == 0 {
            return Some(at);
        }
        before = c;
    }
    None
}

/// How a character changes the depth of brackets. The `>` of an arrow is none.
fn step(c: char, before: char) -> i32 {
    match c {
        '(' | '[' | '{' | '<' => 1,
        '>' if matches!(before, '-' | '=') => 0,
        ')' | ']' | '}' | '>' => -1,
        _ => 0,
    }
}

/// The items between commas outside of brackets, without attributes and line breaks.
fn split_items(text: &str) -> Vec<String> {
    let (mut items, mut item, mut depth, mut before) = (Vec::new(), String::new(), 0, ' ');
    for c in text.chars() {
        depth += step(c, before);
        before = c;
        if c == ',' && depth == 0 {
            items.push(std::mem::take(&mut item));
        } else {
            item.push(c);
        }
    }
    items.push(item);
    let tidied = items.iter().map(|item| {
        let mut item = item.trim();
        while let Some(rest) = item.strip_prefix('#') {
            item = closing(rest).map_or("", |end| rest[end + 1..].trim_start());
        }
        item.split_whitespace().collect::<Vec<_>>().join(" ")
    });
    tidied.filter(|item| !item.is_empty()).collect()
}

/// Without references, lifetimes and `mut`.
fn bare(mut text: &str) -> &str {
    loop {
        text = text.trim();
        let lifetime = text.starts_with('\'').then(|| text.find(' ')).flatten();
        text = match text.strip_prefix('&').or(text.strip_prefix("mut ")) {
            Some(rest) => rest,
            None if lifetime.is_some() => &text[lifetime.unwrap()..],
            None => return text,
        };
    }
}

fn is_self(item: &str) -> bool {
    bare(item).strip_prefix("self").is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
}

/// Pattern and type of a parameter.
fn split_type(parameter: &str) -> (&str, &str) {
    let (mut depth, mut before) = (0, ' ');
    for (at, c) in parameter.char_indices() {
        depth += step(c, before);
        before = c;
        if c == ':' && depth == 0 {
            return (&parameter[..at], &parameter[at + 1..]);
        }
    }
    ("", parameter)
}

/// `(a, b)`, `&(a, b)`, `&'a mut (a, b)`; not `()`, `(dyn A + B)` or `[(a, b)]`.
fn is_tuple(text: &str) -> bool {
    let text = bare(text);
    let whole = text.starts_with('(') && closing(text) == Some(text.len() - 1);
    let has_comma = || {
        let (mut depth, mut before) = (0, ' ');
        text.chars().any(|c| {
            depth += step(c, before);
            before = c;
            c == ',' && depth == 1
        })
    };
    whole && has_comma()
}

#[test]
fn signatures_are_read_right() {
    let code = r#"
impl X {
    pub(crate) async fn a<'a, F: Fn(u8) -> (u8, u8), const N: usize>(
        &'a mut self,
        (x, y): (u8, Vec<(u8, u8)>),
        #[cfg(unix)] f: &F,
        g: fn(u8, u8) -> u8,
    ) -> (u8, u8) {}
}
fn b() {}
unsafe extern "C" fn c(self: Box<Self>, t: &'a mut (u8, u8), n: [u8; 2], u: (), d: &(dyn A + B));
fn d(mut self, s: &[(u8, u8)], o: Option<(u8, u8)>, q: impl Fn((u8, u8)))
"#;
    let found = signatures(code);
    let brief: Vec<_> = found.iter().map(|s| (&*s.name, s.line, s.parameters.len())).collect();
    assert_eq!(brief, [("a", 3, 3), ("b", 10, 0), ("c", 11, 4), ("d", 12, 3)]);
    let tuples: Vec<_> = found.iter().flat_map(Signature::tuples).collect();
    assert_eq!(tuples, ["(x, y): (u8, Vec<(u8, u8)>)", "t: &'a mut (u8, u8)"]);
}
