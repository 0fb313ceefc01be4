//! Grammars of texts as grammars of those texts inside JSON strings, where quotes, backslashes and
//! control characters are escaped.

use super::json::escaped;
use crate::chat::lark::slashed;
use regex::Regex;
use serde_json::Value;

/// Characters that JSON escapes, those without a letter of their own left out.
const SPECIAL: &[char] = &['"', '\\', '\n', '\r', '\t', '\u{8}', '\u{c}'];

/// All characters that JSON writes as they are.
const PLAIN: &str = r#"[^"\\\x00-\x1f]"#;

/// Terminals of Lark's library.
const COMMON: &[(&str, &str)] = &[
    ("LF", r"\n"),
    ("CR", r"\r"),
    ("NEWLINE", r"(\r?\n)+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("WS_INLINE", r"[ \t]+"),
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[0-9a-fA-F]"),
    ("INT", "[0-9]+"),
    ("SIGNED_INT", "[+-]?[0-9]+"),
    ("LETTER", "[A-Za-z]"),
    ("WORD", "[A-Za-z]+"),
    ("CNAME", "[A-Za-z_][A-Za-z0-9_]*"),
];

/// The Lark grammar for texts of the grammar `definition` inside JSON strings; `None` if it has
/// something that cannot be carried over. Terminals become rules: a lexer that takes the longest
/// match could not tell an escape that goes on with a terminal from one that begins the next.
pub fn lark_in_json(definition: &str) -> Option<String> {
    let (mut out, mut rest) = (String::with_capacity(definition.len() * 2), definition);
    while let Some(c) = rest.chars().next() {
        let n = match c {
            '#' => line(rest),
            '/' if rest.starts_with("//") => line(rest),
            '"' => {
                let n = delimited(rest, '"')?;
                let text: String = serde_json::from_str(&rest[..n]).ok()?;
                let inner = escaped(&text);
                if rest[n..].starts_with('i') && inner.contains('\\') {
                    return None;
                }
                out.push_str(&Value::from(inner).to_string());
                n
            }
            '/' => {
                let n = delimited(rest, '/')?;
                let flags = rest[n..].chars().take_while(char::is_ascii_alphabetic).count();
                let pattern = rest[1..n - 1].replace("\\/", "/");
                out.push_str(&regex_in_json(&pattern, &rest[n..n + flags])?);
                n + flags
            }
            '%' => {
                let n = line(rest);
                let name = rest[..n].trim().strip_prefix("%import common.")?.trim();
                let (_, pattern) = COMMON.iter().find(|(known, _)| *known == name)?;
                out.push_str(&format!("{}: {}", rule_name(name), regex_in_json(pattern, "")?));
                n
            }
            c if c.is_ascii_alphabetic() || c == '_' => {
                let is_name = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
                let n = rest.len() - rest.trim_start_matches(is_name).len();
                // An arrow gives a name to an alternative, for those who want the tree.
                let n = if rest[..n].ends_with('-') { n - 1 } else { n };
                out.push_str(&rule_name(&rest[..n]));
                n
            }
            // Operators on terminals, tokens, other grammars, the lexer's options.
            '~' | '&' | '<' | '@' | '[' => return None,
            _ => {
                out.push(c);
                c.len_utf8()
            }
        };
        rest = &rest[n..];
    }
    Some(out)
}

/// The rule's name for a rule or a terminal.
fn rule_name(name: &str) -> String {
    match name.trim_start_matches('_').starts_with(|c: char| c.is_ascii_uppercase()) {
        true => format!("t_{}", name.to_ascii_lowercase()),
        false => name.to_owned(),
    }
}

/// The length of the line.
fn line(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

/// The length of what stands between two such characters, with both.
fn delimited(text: &str, end: char) -> Option<usize> {
    let mut is_escaped = false;
    let inner = text.char_indices().skip(1);
    for (at, c) in inner {
        match c {
            '\n' => return None,
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == end => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// The expression for texts that the regular expression matches, inside JSON strings.
fn regex_in_json(pattern: &str, flags: &str) -> Option<String> {
    let mut groups = vec![Group { any_line: flags == "s", has_class: false }];
    if !["", "s"].contains(&flags) {
        return None;
    }
    let (mut out, mut rest) = (String::from("("), pattern);
    while let Some(c) = rest.chars().next() {
        let n = match c {
            '(' => {
                let outer = groups.last()?.any_line;
                let (n, any_line) = match rest {
                    _ if rest.starts_with("(?:") => (3, outer),
                    _ if rest.starts_with("(?s:") => (4, true),
                    _ if rest.starts_with("(?") => return None,
                    _ => (1, outer),
                };
                groups.push(Group { any_line, has_class: false });
                out.push_str(" (");
                n
            }
            ')' | '|' if out.ends_with(['(', '|']) => return None,
            ')' => {
                let inner = groups.pop()?;
                // A class again and again, one character at a time, is too slow.
                if inner.has_class && rest[1..].starts_with(['*', '+', '{']) {
                    return None;
                }
                groups.last_mut()?.has_class |= inner.has_class;
                out.push(c);
                1
            }
            '|' | '*' | '+' | '?' => {
                out.push(c);
                1
            }
            '{' => {
                let n = rest.find('}')? + 1;
                out.push_str(&rest[..n]);
                n
            }
            '^' | '$' => return None,
            _ => {
                let (n, atom) = atom(rest, groups.last()?.any_line)?;
                match atom {
                    Atom::Character(c) => out.push_str(&format!(" {}", character(c))),
                    Atom::Class(class) => {
                        groups.last_mut()?.has_class = true;
                        out.push_str(&class_in_json(&class, &rest[n..])?);
                    }
                }
                n
            }
        };
        rest = &rest[n..];
    }
    out.push(')');
    (groups.len() == 1 && !out.ends_with("()") && !out.ends_with("|)")).then_some(out)
}

struct Group {
    /// A dot matches a line break too.
    any_line: bool,
    has_class: bool,
}

enum Atom {
    Character(char),
    /// A class as a regular expression.
    Class(String),
}

/// The length of the character or class that `text` begins with, and itself.
fn atom(text: &str, any_line: bool) -> Option<(usize, Atom)> {
    let c = text.chars().next()?;
    Some(match c {
        '.' if any_line => (1, Atom::Class("[\\s\\S]".into())),
        '.' => (1, Atom::Class("[^\\n]".into())),
        '[' => {
            let n = class_length(text)?;
            (n, Atom::Class(text[..n].into()))
        }
        '\\' => match escape(text)? {
            (n, Some(c)) => (n, Atom::Character(c)),
            (n, None) => (n, Atom::Class(format!("[{}]", &text[..n]))),
        },
        c => (c.len_utf8(), Atom::Character(c)),
    })
}

/// One character as JSON writes it.
fn character(c: char) -> String {
    Value::from(escaped(&c.to_string())).to_string()
}

/// The characters of a class. Those that JSON writes as they are come in runs if the class is
/// repeated; then nothing of the expression may follow that a run could take.
fn class_in_json(class: &str, behind: &str) -> Option<String> {
    let matcher = Regex::new(&format!("^{class}$")).ok()?;
    let is_match = |c: &char| matcher.is_match(c.encode_utf8(&mut [0; 4]));
    let is_repeated = behind.starts_with(['*', '+']);
    if is_repeated && !behind[1..].trim_matches(')').is_empty() {
        return None;
    }
    let has_plain = (' '..=char::MAX).filter(|c| !SPECIAL.contains(c)).any(|c| is_match(&c));
    let run = if is_repeated { "+" } else { "" };
    let plain = has_plain.then(|| slashed(&format!("[{class}&&{PLAIN}]{run}")));
    let others = SPECIAL.iter().filter(|c| is_match(c)).map(|c| character(*c));
    let all: Vec<String> = plain.into_iter().chain(others).collect();
    (!all.is_empty()).then(|| format!(" ({})", all.join(" | ")))
}

/// The length of the class that `text` begins with.
fn class_length(text: &str) -> Option<usize> {
    let (mut depth, mut is_escaped, mut is_first) = (0, false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '[' => {
                depth += 1;
                is_first = true;
                continue;
            }
            '^' if is_first => continue,
            ']' if !is_first => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
        is_first = false;
    }
    None
}

/// The length of an escape, and the character that it stands for if it is one.
fn escape(text: &str) -> Option<(usize, Option<char>)> {
    let c = text[1..].chars().next()?;
    Some(match c {
        'd' | 'D' | 's' | 'S' | 'w' | 'W' => (2, None),
        'n' => (2, Some('\n')),
        'r' => (2, Some('\r')),
        't' => (2, Some('\t')),
        'f' => (2, Some('\u{c}')),
        c if c.is_ascii_alphanumeric() => return None,
        c => (1 + c.len_utf8(), Some(c)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_carried_over() {
        let lark = "start: \"a\\n\" line+ // comment\nline: /[x\"\\/]+/ LF -> b\n%import common.LF";
        let expected = "start: \"a\\\\n\" line+ \nline: ( (/[[x\"\\/]&&[^\"\\\\\\x00-\\x1f]]+/ | \
                        \"\\\\\\\"\")+) t_lf -> b\nt_lf: ( \"\\\\n\")";
        assert_eq!(lark_in_json(lark).as_deref(), Some(expected));
        for lark in ["start: <|x|>", "%ignore /a/", "start: A & B", "start: \"a", "%import x.Y"] {
            assert_eq!(lark_in_json(lark), None, "{lark}");
        }
    }

    #[test]
    fn some_expressions_are_not_carried_over() {
        for pattern in
            ["^a", "a$", "\\bword", "(?i)a", "(a", "[a", "a)", "(.|\\n)*", ".*a", "a|", "()"]
        {
            assert_eq!(regex_in_json(pattern, ""), None, "{pattern}");
        }
        assert_eq!(regex_in_json("a", "i"), None);
    }
}
