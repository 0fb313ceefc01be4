//! Calls as a model writes them.

use super::ids::call_id;
use super::json;
use super::table::{Arguments, Call, Ids, Tags, ToolFormat, Value as Kind};
use serde::Serialize;
use serde_json::ser::Formatter;
use serde_json::{Map, Value};
use std::io;

/// JSON on one line with spaces behind commas and colons, as Python writes it.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        w.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        w.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }
}

/// The value's JSON with spaces behind commas and colons.
pub fn spaced(value: &Value) -> String {
    let mut out = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, Spaced);
    value.serialize(&mut serializer).expect("a value is JSON, and memory takes it");
    String::from_utf8(out).expect("JSON is UTF-8")
}

/// A call to write: number `index` of a conversation.
pub struct ToWrite<'a> {
    pub index: usize,
    pub name: &'a str,
    pub arguments: &'a Map<String, Value>,
}

impl ToolFormat {
    /// The calls as a model of this family writes them.
    pub fn write(&self, calls: &[ToWrite]) -> String {
        let list = matches!(self.call, Call::Object { list: true, .. });
        let mut out = if self.is_bare() { String::new() } else { self.section.begin.to_owned() };
        out.push_str(if list { "[" } else { "" });
        for (n, call) in calls.iter().enumerate() {
            out.push_str(if n > 0 { self.between } else { "" });
            self.write_call(call, &mut out);
        }
        out.push_str(if list { "]" } else { "" });
        out.push_str(self.section.end);
        out
    }

    fn write_call(&self, call: &ToWrite, out: &mut String) {
        let json = || spaced(&Value::Object(call.arguments.clone()));
        match &self.call {
            Call::Object { arguments, .. } => {
                let (name, json) = (json::escaped(call.name), json());
                out.push_str(&format!("{{\"name\": \"{name}\", \"{arguments}\": {json}}}"));
            }
            Call::Named { begin, name_end, arguments, ends } => {
                let name = match self.ids {
                    Ids::Kimi => call_id(Ids::Kimi, 0, call.index, call.name),
                    Ids::Long | Ids::Nine => call.name.to_owned(),
                };
                out.extend([begin, name.as_str(), name_end]);
                match arguments {
                    Arguments::Json => out.push_str(&json()),
                    Arguments::Tagged(tags) => tags.write(call.arguments, out),
                }
                out.extend(ends.iter().copied());
            }
            Call::Header { to, message } => {
                let name = call.name;
                let json = json();
                out.push_str(&format!(
                    "<|channel|>commentary {to}{name} <|constrain|>json{message}{json}"
                ));
            }
        }
    }
}

impl Tags {
    fn write(&self, arguments: &Map<String, Value>, out: &mut String) {
        for (key, value) in arguments {
            let (kind, text) = match value {
                Value::String(text) => (Kind::Text, text.clone()),
                other => (Kind::Json, spaced(other)),
            };
            let fits = |end: &&(&str, Kind)| end.1 == kind || end.1 == Kind::BySchema;
            let key_end = self.key_ends.iter().find(fits).map_or("", |(end, _)| end);
            out.extend([self.key_begin, key, key_end, self.value_begin, &text, self.value_end]);
        }
    }
}
