//! Calls of custom tools, which take a text. The model is offered a function with the text as its
//! one argument; here the text comes out of the arguments again.

use serde_json::Value;

/// The text in the arguments of a whole call.
pub fn input(arguments: &str) -> String {
    let mut reader = InputReader::default();
    let text = reader.push(arguments);
    text + &reader.finish()
}

/// The text in the arguments of a custom tool's call, which come in pieces.
#[derive(Clone, Debug, Default)]
pub struct InputReader {
    held: String,
    state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// In front of the text.
    #[default]
    Head,
    Text,
    /// Behind the text.
    Over,
    /// The arguments are something else: their text is the input.
    Other,
}

impl InputReader {
    /// Takes a piece of the arguments: the text that it completes.
    pub fn push(&mut self, piece: &str) -> String {
        self.held.push_str(piece);
        if self.state == State::Head {
            match behind_head(&self.held) {
                Head::More => return String::new(),
                Head::Other => self.state = State::Other,
                Head::Text(at) => {
                    self.held.drain(..at);
                    self.state = State::Text;
                }
            }
        }
        if self.state == State::Text { self.text() } else { String::new() }
    }

    /// The rest of the text, when no more follows.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Text | State::Over => String::new(),
            State::Head | State::Other => match serde_json::from_str::<Value>(&held) {
                Ok(Value::Object(fields)) if fields.is_empty() => String::new(),
                Ok(value) => match &value["input"] {
                    Value::Null => held,
                    Value::String(text) => text.clone(),
                    other => other.to_string(),
                },
                Err(_) if "{\"input\":\"".starts_with(&unspaced(&held)) => String::new(),
                Err(_) => held,
            },
        }
    }

    fn text(&mut self) -> String {
        let (mut out, mut at) = (String::new(), 0);
        while let Some(c) = self.held[at..].chars().next() {
            match c {
                '"' => {
                    self.state = State::Over;
                    at = self.held.len();
                }
                '\\' => {
                    let Some((n, c)) = unescaped(&self.held[at..]) else { break };
                    out.push(c);
                    at += n;
                }
                c => {
                    out.push(c);
                    at += c.len_utf8();
                }
            }
        }
        self.held.drain(..at);
        out
    }
}

enum Head {
    More,
    Other,
    /// The text begins here.
    Text(usize),
}

/// Looks for what stands in front of the text: `{"input": "`.
fn behind_head(text: &str) -> Head {
    let mut at = 0;
    for part in ["{", "\"input\"", ":", "\""] {
        at = text.len() - text[at..].trim_start().len();
        let rest = &text[at..];
        match rest.strip_prefix(part) {
            Some(_) => at += part.len(),
            None if part.starts_with(rest) => return Head::More,
            None => return Head::Other,
        }
    }
    Head::Text(at)
}

fn unspaced(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace()).collect()
}

/// The length of the escape that `text` begins with, and its character; `None` if it goes on.
fn unescaped(text: &str) -> Option<(usize, char)> {
    let c = text[1..].chars().next()?;
    let c = match c {
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'u' => return unit(text),
        c => c,
    };
    Some((1 + text[1..].chars().next()?.len_utf8(), c))
}

/// An escape in hexadecimal digits, or two of them that are one character.
fn unit(text: &str) -> Option<(usize, char)> {
    let number = |text: &str| u16::from_str_radix(text.get(..4)?, 16).ok();
    let digits = |text: &str| (text.len() >= 4).then(|| number(text));
    let broken = (2, char::REPLACEMENT_CHARACTER);
    let Some(first) = digits(&text[2..])? else { return Some(broken) };
    if !(0xd800..0xdc00).contains(&first) {
        return Some((6, char::from_u32(first.into()).unwrap_or(char::REPLACEMENT_CHARACTER)));
    }
    let rest = &text[6..];
    if !rest.starts_with("\\u") && !"\\u".starts_with(rest) {
        return Some((6, char::REPLACEMENT_CHARACTER));
    }
    let second = digits(rest.get(2..)?)?;
    let both = second.and_then(|second| char::decode_utf16([first, second]).next()?.ok());
    Some(both.map_or((6, char::REPLACEMENT_CHARACTER), |c| (12, c)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn inputs_are_read_however_they_are_cut() {
        let text = "a \"b\"\\\n\té😀/\u{8}\u{1}";
        for (arguments, expected) in [
            (json!({ "input": text }).to_string(), text),
            (" {\n\"input\" : \"a\\u00e9\\ud83d\\ude00\\/\" }".into(), "aé😀/"),
            ("{\"input\": \"a\\ud800b\\udc00c\\uzz\"}".into(), "a\u{fffd}b\u{fffd}c\u{fffd}zz"),
            ("{\"input\": \"cut \\u00".into(), "cut "),
            ("{\"inp".into(), ""),
            ("{}".into(), ""),
            ("{\"input\": 5}".into(), "5"),
            ("{\"other\": \"x\"}".into(), "{\"other\": \"x\"}"),
            ("plain".into(), "plain"),
        ] {
            let ends = (0..=arguments.len()).filter(|at| arguments.is_char_boundary(*at));
            for at in ends {
                let mut reader = InputReader::default();
                let pieces = [reader.push(&arguments[..at]), reader.push(&arguments[at..])];
                let whole = pieces.concat() + &reader.finish();
                assert_eq!(whole, expected, "{arguments} cut at {at}");
            }
        }
    }
}
