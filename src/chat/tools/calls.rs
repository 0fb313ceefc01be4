//! Finds the calls in a model's content while it comes. The row of the table says which texts are
//! looked for; what may be the beginning of one is held back until it is clear.

use super::declared::is_name;
use super::json::{self, Extent, Found};
use super::table::{Arguments, CALL_ID, Call, Ids, Tags, ToolFormat, Value};
use super::{Calls, Event, ids, tagged};
use crate::chat::reasoning::{is_marker, undecided};
use std::cmp::Reverse;

/// Longer texts are no names of functions or arguments.
const MAX_NAME: usize = 512;

#[derive(Clone, Debug)]
enum State {
    /// Outside of calls.
    Text,
    /// In a section, in front of a call, or behind one.
    Between,
    /// In front of the name.
    Name,
    /// In an object with a name and arguments, in front of a key.
    Key,
    /// Behind that key.
    Member(String),
    /// In the arguments.
    Json(Extent),
    /// In arguments that are no JSON: all up to the end of the call.
    Broken,
    Tagged(tagged::State),
    /// In a message that is a call.
    Message,
}

/// The scanner of what is not reasoning.
#[derive(Clone, Debug)]
pub struct CallScanner {
    /// `None`: all is content.
    pub(super) calls: Option<Calls>,
    state: State,
    pub(super) held: String,
    /// The beginning of a call whose name is not known yet.
    raw: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    pub(super) n_calls: usize,
    /// The current call's function.
    name: String,
    /// The current call's arguments have begun.
    pub(super) has_arguments: bool,
    has_content: bool,
    /// A marker or a call came after the last content: more of it is a line of its own.
    pub(super) is_apart: bool,
    /// White space behind a call is dropped.
    skips_space: bool,
    pub(super) ready: Vec<Event>,
}

impl CallScanner {
    pub fn new(calls: Option<Calls>) -> Self {
        Self {
            calls,
            state: State::Text,
            held: String::new(),
            raw: None,
            early: None,
            n_calls: 0,
            name: String::new(),
            has_arguments: false,
            has_content: false,
            is_apart: false,
            skips_space: false,
            ready: Vec::new(),
        }
    }

    pub fn push(&mut self, text: &str) {
        self.held.push_str(text);
        while self.step(false) {}
    }

    /// Ends the text: what was held back is clear now, a call that goes on is cut off.
    pub fn finish(&mut self) {
        while self.step(true) {}
        let held = std::mem::take(&mut self.held);
        if let Some(raw) = self.raw.take() {
            self.content(&(raw + &held));
        } else if !matches!(self.state, State::Text | State::Between) {
            self.ready.push(Event::CallEnd { index: self.index() });
        }
        self.state = State::Text;
    }

    /// Ends a text that was cut: the beginning of a marker, or of a call without a name, is
    /// dropped.
    pub fn cut(&mut self) {
        let Some(calls) = &self.calls else { return self.finish() };
        let format = calls.format;
        let markers = match (&self.state, &format.call) {
            (State::Text, Call::Header { .. }) => Vec::new(),
            (State::Tagged(_), Call::Named { arguments: Arguments::Tagged(tags), .. }) => {
                [format.closers(), vec![tags.value_end.trim()]].concat()
            }
            (State::Text | State::Between | State::Broken, _) => {
                [format.openers(), format.closers()].concat()
            }
            _ => Vec::new(),
        };
        let n = undecided(&self.held, &markers);
        let begin = self.held.len() - n;
        if n > 0 && is_marker(&self.held[begin..]) {
            self.held.truncate(self.held[..begin].trim_end().len());
        }
        // An object without a marker may be an answer.
        let is_object = |raw: &String| format.is_bare() && raw.trim_start().starts_with('{');
        if self.raw.as_ref().is_some_and(|raw| calls.is_required || !is_object(raw)) {
            (self.raw, self.state) = (None, State::Text);
            self.held.clear();
        }
        self.finish();
    }

    /// A marker of another kind stands here.
    pub fn set_apart(&mut self) {
        if matches!(self.state, State::Text) {
            let held = std::mem::take(&mut self.held);
            self.content(&held);
        }
        self.is_apart = true;
    }

    /// Decides on some of what is held; false if that takes more text. `last`: none follows.
    fn step(&mut self, last: bool) -> bool {
        let Some(format) = self.calls.as_ref().map(|calls| calls.format) else {
            let text = std::mem::take(&mut self.held);
            self.content(&text);
            return false;
        };
        match (&self.state, &format.call) {
            (State::Text, _) => self.text(format, last),
            (State::Between, _) => self.between(format, last),
            (State::Name, Call::Named { name_end, arguments, ends, .. }) => {
                self.name(name_end.trim(), arguments, ends)
            }
            (State::Key, _) => self.key(),
            (State::Member(key), _) => self.member(&key.clone(), format.is_bare()),
            (State::Json(extent), _) => self.json(extent.clone()),
            (State::Broken, _) => self.broken(format, last),
            (State::Tagged(state), Call::Named { arguments: Arguments::Tagged(tags), .. }) => {
                self.tagged(state.clone(), tags, &format.closers(), last)
            }
            // A message's text does not pass here, and the table has no other pairs.
            _ => false,
        }
    }

    fn text(&mut self, format: &'static ToolFormat, last: bool) -> bool {
        if self.held.is_empty() {
            return false;
        }
        if format.is_bare() && !self.has_content {
            let space = self.held.len() - self.held.trim_start().len();
            match self.held[space..].chars().next() {
                None if !last => return false,
                Some('{') => {
                    self.raw = Some(self.held.drain(..=space).collect());
                    self.state = State::Key;
                    return true;
                }
                _ => {}
            }
        }
        let openers = match &format.call {
            Call::Header { .. } => Vec::new(),
            _ => format.openers(),
        };
        let mut markers = openers.clone();
        if self.n_calls > 0 {
            // DeepSeek's fence may be content.
            markers.extend(format.closers().iter().filter(|marker| marker.starts_with('<')));
        }
        let Some((at, marker)) = earliest(&self.held, &markers) else {
            let clear = match last {
                true => self.held.len(),
                false => {
                    self.held[..self.held.len() - undecided(&self.held, &markers)].trim_end().len()
                }
            };
            let text: String = self.held.drain(..clear).collect();
            self.content(&text);
            return false;
        };
        // White space before a call is the call's.
        let text: String = self.held.drain(..self.held[..at].trim_end().len()).collect();
        self.content(&text);
        if !openers.contains(&marker) {
            self.held.drain(..at - text.len() + marker.len());
            return true;
        }
        self.raw = Some(self.held.drain(..at - text.len() + marker.len()).collect());
        let is_section = marker == format.section.begin.trim();
        self.state = if is_section { State::Between } else { State::Name };
        true
    }

    fn between(&mut self, format: &'static ToolFormat, last: bool) -> bool {
        let is_object = matches!(format.call, Call::Object { .. });
        let skipped = |c: char| c.is_whitespace() || is_object && "[],;}".contains(c);
        let n = self.held.len() - self.held.trim_start_matches(skipped).len();
        self.read(n);
        if self.held.is_empty() {
            return false;
        }
        if is_object && self.held.starts_with('{') {
            self.raw.get_or_insert_default();
            self.read(1);
            self.state = State::Key;
            return true;
        }
        let mut markers = format.openers();
        markers.extend(format.closers());
        if let Some(marker) = markers.iter().find(|marker| self.held.starts_with(**marker)) {
            match &format.call {
                Call::Named { begin, .. } if begin.trim() == *marker => {
                    self.raw.get_or_insert_default();
                    self.state = State::Name;
                }
                _ if format.section.end.trim() == *marker && self.raw.is_none() => {
                    self.state = State::Text;
                }
                _ => {}
            }
            self.read(marker.len());
            return true;
        }
        if !last && markers.iter().any(|marker| marker.starts_with(&self.held)) {
            return false;
        }
        self.fail();
        true
    }

    fn name(&mut self, name_end: &str, arguments: &'static Arguments, ends: &[&str]) -> bool {
        let markers: Vec<&str> = match (name_end, arguments) {
            ("", Arguments::Tagged(tags)) => [tags.key_begin].iter().chain(ends).copied().collect(),
            _ => vec![name_end],
        };
        let found = earliest(&self.held, &markers).filter(|(at, _)| *at <= MAX_NAME);
        let Some((at, _)) = found else {
            let is_long = self.held.len() > MAX_NAME + 64;
            if is_long {
                self.fail();
            }
            return is_long;
        };
        let head = self.held[..at].trim().to_owned();
        let style = self.calls.as_ref().map_or(Ids::Long, |calls| calls.format.ids);
        let (name, id) = match style {
            Ids::Kimi => (ids::kimi_name(&head), Some(head.as_str())),
            Ids::Nine => match head.split_once(CALL_ID) {
                Some((name, id)) => (Some(name), Some(id).filter(|id| ids::is_nine(id))),
                None => (Some(head.as_str()), None),
            },
            Ids::Long => (Some(head.as_str()), None),
        };
        match name.filter(|name| is_name(name)) {
            Some(name) => {
                let (name, id) = (name.to_owned(), id.map(str::to_owned));
                self.held.drain(..at + name_end.len());
                self.begin(&name, id);
                self.state = match arguments {
                    Arguments::Json => State::Json(Extent::default()),
                    Arguments::Tagged(_) => State::Tagged(tagged::State::NextKey),
                };
            }
            None => self.fail(),
        }
        true
    }

    fn key(&mut self) -> bool {
        let n = self.held.len()
            - self.held.trim_start_matches(|c: char| c.is_whitespace() || c == ',').len();
        self.read(n);
        match self.held.chars().next() {
            None => false,
            Some('}') => {
                self.read(1);
                self.end_object();
                true
            }
            Some('"') => {
                let Some(n) = json::string_length(&self.held) else { return false };
                let rest = self.held[n..].trim_start();
                let Some(c) = rest.chars().next() else { return false };
                let whole = self.held.len() - rest.len() + 1;
                match serde_json::from_str::<String>(&self.held[..n]) {
                    Ok(key) if c == ':' => {
                        self.read(whole);
                        self.state = State::Member(key);
                    }
                    _ => self.end_object(),
                }
                true
            }
            Some(_) => {
                self.end_object();
                true
            }
        }
    }

    fn member(&mut self, key: &str, is_bare: bool) -> bool {
        let n = self.held.len() - self.held.trim_start().len();
        self.read(n);
        if self.held.is_empty() {
            return false;
        }
        let is_arguments = key == "arguments" || key == "parameters";
        if is_arguments && self.raw.is_none() && !self.has_arguments {
            self.state = State::Json(Extent::default());
            return true;
        }
        let n = match Extent::default().read(&self.held) {
            Found::End(n) => n,
            Found::More => return false,
            Found::Broken(_) => {
                self.end_object();
                return true;
            }
        };
        let value = self.held[..n].to_owned();
        self.read(n);
        self.state = State::Key;
        if is_arguments {
            self.early = Some(value);
        } else if key == "name" && self.raw.is_some() {
            let name = serde_json::from_str::<String>(&value).unwrap_or_default();
            let is_known = self.calls.as_ref().is_some_and(|c| c.tools.get(&name).is_some());
            if !is_name(&name) || is_bare && !is_known {
                self.fail();
            } else {
                self.begin(&name, None);
                if let Some(arguments) = self.early.take() {
                    self.whole_arguments(&arguments);
                }
            }
        }
        true
    }

    /// Passes on the arguments as they come.
    fn json(&mut self, mut extent: Extent) -> bool {
        if !self.has_arguments {
            let n = self.held.len() - self.held.trim_start().len();
            self.held.drain(..n);
            match self.held.chars().next() {
                None => return false,
                Some('{' | '[') => self.has_arguments = true,
                // A string, a number, `null`: known when it is whole.
                Some(_) => {
                    match Extent::default().read(&self.held) {
                        Found::More => return false,
                        Found::End(n) => {
                            let value: String = self.held.drain(..n).collect();
                            self.whole_arguments(&value);
                        }
                        Found::Broken(_) => {}
                    }
                    self.end_arguments();
                    return true;
                }
            }
        }
        match extent.read(&self.held) {
            Found::More => {
                let text = std::mem::take(&mut self.held);
                self.arguments(text);
                self.state = State::Json(extent);
                false
            }
            Found::End(n) => {
                let text = self.held.drain(..n).collect();
                self.arguments(text);
                self.end_arguments();
                true
            }
            Found::Broken(n) => {
                let text = self.held.drain(..n).collect();
                self.arguments(text);
                self.state = State::Broken;
                true
            }
        }
    }

    fn broken(&mut self, format: &'static ToolFormat, last: bool) -> bool {
        let mut markers = format.openers();
        markers.extend(format.closers());
        let found = earliest(&self.held, &markers);
        let clear = match found {
            Some((at, _)) => at,
            None if last => self.held.len(),
            None => self.held.len() - undecided(&self.held, &markers),
        };
        let text = self.held.drain(..clear).collect();
        self.arguments(text);
        if found.is_some() {
            self.end();
        }
        found.is_some()
    }

    /// Takes `n` bytes of what is held.
    fn read(&mut self, n: usize) {
        let text = self.held.drain(..n);
        if let Some(raw) = &mut self.raw {
            raw.extend(text);
        }
    }

    /// Ends a call that was none: the text that was read of it is content.
    fn fail(&mut self) {
        self.state = State::Text;
        self.early = None;
        if let Some(raw) = self.raw.take() {
            self.content(&raw);
        }
    }

    /// An object's end, or a character that is in none.
    fn end_object(&mut self) {
        match self.raw.is_some() {
            true => self.fail(),
            false => self.end(),
        }
    }

    fn end_arguments(&mut self) {
        let is_object =
            self.calls.as_ref().is_some_and(|c| matches!(c.format.call, Call::Object { .. }));
        match is_object {
            true => self.state = State::Key,
            false => self.end(),
        }
    }

    pub(super) fn index(&self) -> usize {
        self.n_calls.saturating_sub(1)
    }

    fn begin(&mut self, name: &str, id: Option<String>) {
        let index = self.n_calls;
        let Some(calls) = &self.calls else { return };
        let id = id.unwrap_or_else(|| ids::call_id(calls.format.ids, calls.seed, index, name));
        self.ready.push(Event::CallBegin { index, id, name: name.into() });
        self.n_calls += 1;
        self.name = name.into();
        self.raw = None;
        self.has_arguments = false;
    }

    pub(super) fn arguments(&mut self, text: String) {
        if !text.is_empty() {
            self.ready.push(Event::Arguments { index: self.index(), text });
        }
    }

    /// Arguments that are one JSON value. Some models write them as a string with JSON in it.
    fn whole_arguments(&mut self, value: &str) {
        let text = match serde_json::from_str::<serde_json::Value>(value) {
            Ok(serde_json::Value::String(inner)) if inner.trim_start().starts_with('{') => inner,
            Ok(serde_json::Value::Null) => return,
            _ => value.to_owned(),
        };
        self.has_arguments = true;
        self.arguments(text);
    }

    pub(super) fn end(&mut self) {
        if !std::mem::replace(&mut self.has_arguments, true) {
            self.arguments("{}".into());
        }
        self.ready.push(Event::CallEnd { index: self.index() });
        (self.is_apart, self.skips_space) = (true, true);
        self.state = State::Between;
    }

    fn content(&mut self, text: &str) {
        let text = if self.skips_space { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        self.skips_space = false;
        let line = std::mem::take(&mut self.is_apart) && self.has_content;
        self.has_content = true;
        self.ready.push(Event::Content(if line { format!("\n{text}") } else { text.into() }));
    }

    fn tagged(
        &mut self,
        state: tagged::State,
        tags: &'static Tags,
        ends: &[&str],
        last: bool,
    ) -> bool {
        match tagged::step(self, state, tags, ends, last) {
            tagged::Step::Wait(state) => {
                self.state = State::Tagged(state);
                false
            }
            tagged::Step::On(state) => {
                self.state = State::Tagged(state);
                true
            }
            tagged::Step::End => {
                let end = if self.has_arguments { "}" } else { "{}" };
                self.has_arguments = true;
                self.arguments(end.into());
                self.end();
                true
            }
        }
    }

    /// The kinds that a value of the current call may have.
    pub(super) fn kinds(&self, key: &str, value: Value) -> json::Kinds {
        let tool = self.calls.as_ref().and_then(|calls| calls.tools.get(&self.name));
        let schema = tool.and_then(|tool| tool.parameters["properties"].get(key));
        match (value, schema, tool) {
            (Value::Text, ..) => json::STRING,
            (Value::Json, ..) => json::ANY & !json::STRING,
            (Value::BySchema, Some(schema), Some(tool)) => json::kinds(schema, &tool.parameters),
            (Value::BySchema, ..) => json::ANY,
        }
    }

    /// A message whose header names a function has begun.
    pub fn begin_message(&mut self, name: &str) {
        self.begin(name, None);
        self.state = State::Message;
    }

    pub fn is_message(&self) -> bool {
        matches!(self.state, State::Message)
    }

    /// More of that message.
    pub fn message(&mut self, text: &str) {
        let text = if self.has_arguments { text } else { text.trim_start() };
        self.has_arguments |= !text.is_empty();
        self.arguments(text.into());
    }

    /// The message's end.
    pub fn end_message(&mut self) {
        self.end();
        self.state = State::Text;
    }
}

/// The first of the markers in `text`, the longest of those that begin there.
pub(super) fn earliest<'a>(text: &str, markers: &[&'a str]) -> Option<(usize, &'a str)> {
    let found = markers.iter().filter_map(|marker| text.find(marker).map(|at| (at, *marker)));
    found.min_by_key(|(at, marker)| (*at, Reverse(marker.len())))
}
