//! Arguments as keys and values between markers, passed on as JSON.

use super::calls::{CallScanner, earliest};
use super::json::{self, Kinds};
use super::table::{Tags, Value};
use crate::chat::reasoning::undecided;

/// Longer texts are no keys.
const MAX_KEY: usize = 512;

#[derive(Clone, Debug)]
pub enum State {
    NextKey,
    Key,
    /// Behind the key, where a marker begins the value.
    ValueBegin {
        key: String,
        kinds: Kinds,
    },
    Value {
        key: String,
        kinds: Kinds,
    },
    /// In a string of which the opening quote was passed on.
    Text,
}

pub enum Step {
    /// The scanner needs more text to go on.
    Wait(State),
    On(State),
    /// The call's end is what is held now.
    End,
}

use Step::{On, Wait};

impl Tags {
    /// Whether a line break stands before each value.
    fn opens_line(&self) -> bool {
        match self.value_begin {
            "" => self.key_ends.iter().all(|(end, _)| end.ends_with('\n')),
            begin => begin.ends_with('\n'),
        }
    }
}

/// One step in the arguments of a call that one of `ends` ends.
pub fn step(
    scanner: &mut CallScanner,
    state: State,
    tags: &'static Tags,
    ends: &[&str],
    last: bool,
) -> Step {
    match state {
        State::NextKey => next_key(scanner, tags, ends),
        State::Key => key(scanner, tags),
        State::ValueBegin { key, kinds } => {
            let begin = tags.value_begin.trim();
            let n = scanner.held.len() - scanner.held.trim_start().len();
            scanner.held.drain(..n);
            if scanner.held.starts_with(begin) {
                scanner.held.drain(..begin.len());
                On(State::Value { key, kinds })
            } else if begin.starts_with(&scanner.held) {
                Wait(State::ValueBegin { key, kinds })
            } else {
                On(State::NextKey)
            }
        }
        State::Value { key, kinds } => value(scanner, tags, key, kinds),
        State::Text => text(scanner, tags, last),
    }
}

/// Drops the text between values, which is no part of the arguments.
fn next_key(scanner: &mut CallScanner, tags: &Tags, ends: &[&str]) -> Step {
    let markers: Vec<&str> = ends.iter().chain([&tags.key_begin]).map(|m| m.trim()).collect();
    match earliest(&scanner.held, &markers) {
        Some((at, marker)) if marker == tags.key_begin => {
            scanner.held.drain(..at + marker.len());
            On(State::Key)
        }
        Some((at, _)) => {
            scanner.held.drain(..at);
            Step::End
        }
        None => {
            let clear = scanner.held.len() - undecided(&scanner.held, &markers);
            scanner.held.drain(..clear);
            Wait(State::NextKey)
        }
    }
}

fn key(scanner: &mut CallScanner, tags: &Tags) -> Step {
    let markers: Vec<&str> = tags.key_ends.iter().map(|(end, _)| end.trim()).collect();
    let found = earliest(&scanner.held, &markers).filter(|(at, _)| *at <= MAX_KEY);
    let Some((at, marker)) = found else {
        let is_long = scanner.held.len() > MAX_KEY + 64;
        return if is_long { On(State::NextKey) } else { Wait(State::Key) };
    };
    let value = tags.key_ends.iter().find(|(end, _)| end.trim() == marker);
    let key = scanner.held[..at].trim().to_owned();
    scanner.held.drain(..at + marker.len());
    let kinds = scanner.kinds(&key, value.map_or(Value::BySchema, |(_, value)| *value));
    On(match tags.value_begin {
        "" => State::Value { key, kinds },
        _ => State::ValueBegin { key, kinds },
    })
}

/// In front of a value: a string goes on as it comes, anything else when it is whole.
fn value(scanner: &mut CallScanner, tags: &Tags, key: String, kinds: Kinds) -> Step {
    let found = scanner.held.find(tags.value_end.trim());
    if kinds != json::STRING && found.is_none() || scanner.held.is_empty() {
        return Wait(State::Value { key, kinds });
    }
    let open = if scanner.has_arguments { ", " } else { "{" };
    let name = serde_json::Value::from(key);
    scanner.has_arguments = true;
    if let Some(at) = found.filter(|_| kinds != json::STRING) {
        let value = inner(&scanner.held[..at], tags).to_owned();
        scanner.held.drain(..at + tags.value_end.trim().len());
        scanner.arguments(format!("{open}{name}: {}", json::of_text(&value, kinds)));
        return On(State::NextKey);
    }
    if tags.opens_line() && scanner.held.starts_with('\n') {
        scanner.held.drain(..1);
    }
    scanner.arguments(format!("{open}{name}: \""));
    On(State::Text)
}

/// A value without the line breaks of its markers.
fn inner<'a>(value: &'a str, tags: &Tags) -> &'a str {
    let value = match tags.opens_line() {
        true => value.strip_prefix('\n').unwrap_or(value),
        false => value,
    };
    before_end(value, tags)
}

fn before_end<'a>(value: &'a str, tags: &Tags) -> &'a str {
    match tags.value_end.starts_with('\n') {
        true => value.strip_suffix('\n').unwrap_or(value),
        false => value,
    }
}

fn text(scanner: &mut CallScanner, tags: &Tags, last: bool) -> Step {
    let end = tags.value_end.trim();
    let found = scanner.held.find(end);
    let clear = match found {
        Some(at) => before_end(&scanner.held[..at], tags).len(),
        None if last => scanner.held.len(),
        None => {
            let clear = scanner.held.len() - undecided(&scanner.held, &[end]);
            before_end(&scanner.held[..clear], tags).len()
        }
    };
    let text: String = scanner.held.drain(..clear).collect();
    scanner.arguments(json::escaped(&text));
    match found {
        Some(at) => {
            scanner.held.drain(..at - clear + end.len());
            scanner.arguments("\"".into());
            On(State::NextKey)
        }
        None => Wait(State::Text),
    }
}
