//! The tools that a request offers.

use crate::{Error, Result};
use serde_json::{Map, Value, json};

/// One tool.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    /// The JSON schema of the arguments, always of an object.
    pub parameters: Value,
    /// The schema's place in the request.
    pub path: String,
    /// Arguments have to match all of the schema.
    pub is_strict: bool,
    /// A tool that takes a text. It is offered as a function whose one argument is `input`.
    pub custom: Option<Custom>,
}

/// The texts that a tool with one text as its argument takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Custom {
    Text,
    Lark(String),
    Regex(String),
}

/// The key of a custom tool's text.
pub const INPUT: &str = "input";

/// The longest name of a tool.
const MAX_NAME: usize = 128;

/// All tools of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools {
    list: Vec<Tool>,
    declared: Vec<Value>,
}

impl Tools {
    /// The `tools` of a chat request: functions and custom tools, their fields in an object of
    /// their own or, as in the Responses API, beside `type`. One without a type is a function;
    /// those of other types, which servers run, are left out. `null` is no tools.
    pub fn parse(tools: &Value) -> Result<Self> {
        if tools.is_null() {
            return Ok(Self::default());
        }
        let items = tools.as_array().ok_or_else(|| Error::invalid("tools: expected an array"))?;
        let mut out = Self::default();
        for (at, item) in items.iter().enumerate() {
            let fault = |text: &str| Error::Invalid(format!("tools[{at}]{text}"));
            let custom = match &item["type"] {
                Value::String(kind) if kind == "function" => None,
                Value::Null if item.is_object() => None,
                Value::String(kind) if kind == "custom" => Some(()),
                Value::String(kind) => {
                    log::warn!("tools[{at}]: a tool of the type {kind:?} is left out");
                    continue;
                }
                _ => return Err(fault(".type: expected `function` or `custom`")),
            };
            let kind = if custom.is_some() { "custom" } else { "function" };
            let fields = item.get(kind).unwrap_or(item);
            let name = fields["name"].as_str().unwrap_or_default();
            if !is_name(name) {
                let rule = "letters, digits, `_`, `-`, `.`, `:` and `/`";
                return Err(fault(&format!(
                    ".name: expected 1 to {MAX_NAME} characters of {rule}, got `{name}`"
                )));
            }
            if out.get(name).is_some() {
                return Err(fault(&format!(".name: `{name}` occurs twice")));
            }
            let custom = custom.map(|()| format(&fields["format"], &fault)).transpose()?;
            let parameters = match &custom {
                Some(_) => input_schema(),
                None => object_schema(&fields["parameters"])
                    .ok_or_else(|| fault(".parameters: expected the schema of an object"))?,
            };
            let is_strict = fields["strict"].as_bool().unwrap_or(false);
            out.declared.push(declaration(fields, &parameters, custom.is_some()));
            let inner = if item.get(kind).is_some() { format!(".{kind}") } else { String::new() };
            let path = format!("tools[{at}]{inner}.parameters");
            out.list.push(Tool { name: name.into(), parameters, path, is_strict, custom });
        }
        Ok(out)
    }

    pub fn get(&self, name: &str) -> Option<&Tool> {
        self.list.iter().find(|tool| tool.name == name)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Tool> {
        self.list.iter()
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The tools with the places that their schemas have in the request.
    pub fn at(mut self, paths: impl IntoIterator<Item = String>) -> Self {
        self.list.iter_mut().zip(paths).for_each(|(tool, path)| tool.path = path);
        self
    }

    /// The tools with other schemas for their grammar. Custom tools keep theirs.
    pub fn with_schemas(&self, mut schema: impl FnMut(&Tool) -> Result<Value>) -> Result<Self> {
        let mut out = self.clone();
        for tool in out.list.iter_mut().filter(|tool| tool.custom.is_none()) {
            tool.parameters = schema(tool)?;
        }
        Ok(out)
    }

    /// The tools as templates expect them; `None` without any.
    pub fn declared(&self) -> Option<Value> {
        (!self.is_empty()).then(|| Value::Array(self.declared.clone()))
    }

    /// The tools of these names.
    pub fn only(&self, names: &[String]) -> Self {
        let kept = |tool: &&Tool| names.contains(&tool.name);
        let pairs = self.list.iter().zip(&self.declared).filter(|(tool, _)| kept(tool));
        let (list, declared) = pairs.map(|(tool, json)| (tool.clone(), json.clone())).unzip();
        Self { list, declared }
    }
}

/// Whether a function may have this name: it stands between markers and in grammars.
pub(super) fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.:/".contains(c);
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(fits)
}

fn format(format: &Value, fault: &impl Fn(&str) -> Error) -> Result<Custom> {
    // Chat requests have the grammar in an object of its own, others beside `type`.
    let grammar = format.get("grammar").unwrap_or(format);
    let definition = || {
        let text = grammar["definition"].as_str();
        text.map(str::to_owned).ok_or_else(|| fault(".format.definition: expected a string"))
    };
    match (format["type"].as_str(), grammar["syntax"].as_str()) {
        (None | Some("text"), _) => Ok(Custom::Text),
        (Some("grammar"), Some("lark")) => Ok(Custom::Lark(definition()?)),
        (Some("grammar"), Some("regex")) => Ok(Custom::Regex(definition()?)),
        (Some("grammar"), _) => Err(fault(".format.syntax: expected `lark` or `regex`")),
        _ => Err(fault(".format.type: expected `text` or `grammar`")),
    }
}

fn input_schema() -> Value {
    let input = Map::from_iter([(INPUT.to_owned(), json!({ "type": "string" }))]);
    json!({ "type": "object", "properties": input, "required": [INPUT],
        "additionalProperties": false })
}

/// The schema of a function's arguments, which are an object even where the client does not say so.
fn object_schema(given: &Value) -> Option<Value> {
    let mut fields = match given {
        Value::Null => Map::new(),
        Value::Object(fields) => fields.clone(),
        _ => return None,
    };
    match fields.get("type") {
        None | Some(Value::Null) => fields.insert("type".into(), "object".into()),
        Some(Value::String(name)) if name == "object" => None,
        Some(_) => return None,
    };
    if !fields.get("properties").is_some_and(Value::is_object) {
        fields.insert("properties".into(), json!({}));
    }
    Some(Value::Object(fields))
}

/// The tool as templates get it: nothing that they read is missing, all else is the client's.
fn declaration(fields: &Value, parameters: &Value, is_custom: bool) -> Value {
    let mut function = Map::new();
    function.insert("name".into(), fields["name"].clone());
    let description = fields["description"].as_str().unwrap_or_default();
    function.insert("description".into(), description.into());
    function.insert("parameters".into(), parameters.clone());
    if !is_custom && let Some(given) = fields.as_object() {
        let others = given.iter().filter(|(key, _)| *key != "type" && *key != "strict");
        for (key, value) in others {
            function.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    json!({ "type": "function", "function": function })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_and_custom_tools_are_read() {
        let tools = Tools::parse(&json!([
            { "type": "function", "function": { "name": "a", "parameters": { "properties": {} } } },
            { "type": "function", "name": "b", "description": "B", "strict": true },
            { "type": "custom", "name": "c", "format":
                { "type": "grammar", "syntax": "lark", "definition": "start: \"x\"" } },
            { "type": "custom", "custom": { "name": "d", "format":
                { "type": "grammar", "grammar": { "syntax": "regex", "definition": "x" } } } },
            { "type": "web_search" },
            { "function": { "name": "e" } },
            { "type": null, "name": "f" },
        ]))
        .unwrap();
        assert_eq!(tools.iter().count(), 6);
        let empty = json!({ "type": "object", "properties": {} });
        assert_eq!(tools.get("b").unwrap().parameters, empty);
        assert!(tools.get("b").unwrap().is_strict && !tools.get("a").unwrap().is_strict);
        let custom = |name| tools.get(name).unwrap().custom.clone();
        assert_eq!(custom("c"), Some(Custom::Lark("start: \"x\"".into())));
        assert_eq!(custom("d"), Some(Custom::Regex("x".into())));
        let declared = tools.declared().unwrap();
        assert_eq!(declared[1]["function"]["description"], "B");
        assert_eq!(declared[0]["function"]["description"], "");
        assert_eq!(declared[2]["function"]["parameters"]["required"], json!(["input"]));
        let only = tools.only(&["b".into()]);
        assert_eq!(only.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>(), ["b"]);
        assert_eq!(Tools::parse(&Value::Null).unwrap().declared(), None);
    }

    #[test]
    fn faults_name_their_place() {
        for (tools, expected) in [
            (json!({}), "tools: expected an array"),
            (json!([{ "type": 5 }]), "tools[0].type"),
            (json!([5]), "tools[0].type"),
            (json!([{}]), "tools[0].name"),
            (json!([{ "type": "mcp" }, { "type": "function" }]), "tools[1].name"),
            (json!([{ "type": "function", "name": "a b" }]), "tools[0].name"),
            (json!([{ "type": "function", "name": "" }]), "tools[0].name"),
            (
                json!([{ "type": "function", "name": "a" }, { "type": "function", "name": "a" }]),
                "tools[1].name: `a` occurs twice",
            ),
            (
                json!([{ "type": "function", "name": "a", "parameters": { "type": "string" } }]),
                "tools[0].parameters",
            ),
            (
                json!([{ "type": "custom", "name": "a", "format": { "type": "grammar" } }]),
                "tools[0].format.syntax",
            ),
        ] {
            let error = Tools::parse(&tools).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
