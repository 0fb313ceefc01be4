//! Tools of a request as the functions that the model is offered, and the way back.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::Error;
use crate::chat::tools::{Tool, ToolChoice, Tools};
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::Fields;
use crate::server::limits::{MAX_TOOLS, MAX_TOOLS_BYTES};

/// The function that stands for a shell of the client's.
const SHELL: &str = "shell";
/// Its name where the client has a function `shell`.
const LOCAL_SHELL: &str = "local_shell";

/// The client's tool behind a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Function { namespace: Option<String>, name: String },
    Custom { namespace: Option<String>, name: String },
    LocalShell,
}

/// The tools of a request.
#[derive(Debug, Default)]
pub struct Offered {
    pub tools: Tools,
    /// By the names of functions.
    origins: HashMap<String, Origin>,
}

/// The name of a function that stands in a namespace.
pub fn flat(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        None | Some("") => name.to_owned(),
        Some(namespace) if namespace.ends_with("__") => format!("{namespace}{name}"),
        Some(namespace) => format!("{namespace}__{name}"),
    }
}

impl Offered {
    /// The client's tool that the model calls by this name.
    pub fn origin(&self, name: &str) -> Origin {
        let other = || Origin::Function { namespace: None, name: name.to_owned() };
        self.origins.get(name).cloned().unwrap_or_else(other)
    }

    /// The function that stands for the client's shell.
    pub fn shell(&self) -> &str {
        let found = self.origins.iter().find(|(_, origin)| **origin == Origin::LocalShell);
        found.map_or(SHELL, |(name, _)| name)
    }

    /// The tools of a body. Tools that a server would run are left out.
    pub fn read(fields: &Fields<'_>) -> ApiResult<Offered> {
        let Some(list) = fields.array("tools")? else { return Ok(Offered::default()) };
        let mut flat = Flat::default();
        for (i, tool) in list.iter().enumerate() {
            flat.add(tool, format!("tools[{i}]"), None)?;
        }
        flat.add_shell();
        let Flat { list, paths, origins, .. } = flat;
        let list = Value::Array(list);
        if paths.len() > MAX_TOOLS || list.to_string().len() > MAX_TOOLS_BYTES {
            let message = format!(
                "tools: expected at most {MAX_TOOLS} tools of {MAX_TOOLS_BYTES} bytes together"
            );
            return Err(ApiError::invalid("tools", message));
        }
        let tools = Tools::parse(&list).map_err(|e| at_its_path(&e, &paths))?;
        let place = |(tool, path): (&Tool, &String)| {
            let inner = tool.path.split_once(']').map_or("", |(_, inner)| inner);
            format!("{path}{inner}")
        };
        let places: Vec<String> = tools.iter().zip(&paths).map(place).collect();
        let tools = tools.at(places);
        Ok(Offered { tools, origins })
    }

    /// The choice among them.
    pub fn choice(&self, choice: Option<&Value>) -> ApiResult<ToolChoice> {
        let choice = choice.map_or(Value::Null, |choice| self.renamed(choice));
        ToolChoice::parse(&choice, &self.tools)
            .map_err(|e| ApiError::invalid("tool_choice", e.to_string()))
    }

    /// A choice by the names of functions.
    fn renamed(&self, choice: &Value) -> Value {
        if choice["type"] == "allowed_tools" {
            let mut choice = choice.clone();
            if let Some(tools) = choice["tools"].as_array_mut() {
                tools.iter_mut().for_each(|tool| *tool = self.renamed(tool));
                // Of the tools that a server would run there is none to choose.
                tools.retain(|tool| tool["name"].is_string());
            }
            return choice;
        }
        if choice["type"] == "local_shell" {
            return json!({ "type": "function", "name": self.shell() });
        }
        match (choice["namespace"].as_str(), choice["name"].as_str()) {
            (Some(namespace), Some(name)) => {
                json!({ "type": choice["type"], "name": flat(Some(namespace), name) })
            }
            _ => choice.clone(),
        }
    }
}

/// Tools of namespaces among the others.
#[derive(Default)]
struct Flat {
    list: Vec<Value>,
    /// The place in the body of each of the list.
    paths: Vec<String>,
    origins: HashMap<String, Origin>,
    /// The place of a shell of the client's.
    shell: Option<String>,
}

/// A namespace that tools stand in.
#[derive(Clone, Copy)]
struct Namespace<'a> {
    name: &'a str,
    description: &'a str,
}

impl Flat {
    fn add(&mut self, tool: &Value, path: String, outer: Option<Namespace<'_>>) -> ApiResult<()> {
        let fields = Fields::of(tool, &path)?;
        match (fields.string("type")?, outer) {
            (Some("function"), _) => self.push(tool, path, outer, false),
            (None, _) if tool.get("name").or(tool.get("function")).is_some() => {
                let mut tool = tool.clone();
                tool["type"] = "function".into();
                self.push(&tool, path, outer, false);
            }
            (Some("custom"), _) => self.push(tool, path, outer, true),
            (Some("local_shell"), None) => self.shell = Some(path),
            (Some("namespace"), None) => {
                let name = fields.string("name")?.unwrap_or_default();
                let description = fields.string("description")?.unwrap_or_default();
                let outer = Namespace { name, description };
                for (i, tool) in fields.array("tools")?.into_iter().flatten().enumerate() {
                    self.add(tool, format!("{path}.tools[{i}]"), Some(outer))?;
                }
            }
            (Some(other), _) => log::debug!("{path}: the tool {other} is left out"),
            (None, _) => return Err(fields.missing("type")),
        }
        Ok(())
    }

    fn push(&mut self, tool: &Value, path: String, outer: Option<Namespace<'_>>, is_custom: bool) {
        let mut tool = tool.clone();
        let kind = if is_custom { "custom" } else { "function" };
        // Chat requests have the fields in an object of their own.
        let nested = tool.get(kind).is_some_and(Value::is_object);
        let fields = if nested { &mut tool[kind] } else { &mut tool };
        let name = fields["name"].as_str().unwrap_or_default().to_owned();
        if let Some(outer) = outer {
            fields["name"] = flat(Some(outer.name), &name).into();
            let own = fields["description"].as_str().unwrap_or_default();
            let both: Vec<&str> =
                [outer.description, own].into_iter().filter(|text| !text.is_empty()).collect();
            fields["description"] = both.join("\n\n").into();
        }
        let offered = fields["name"].as_str().unwrap_or_default().to_owned();
        let namespace = outer.map(|outer| outer.name.to_owned());
        let origin = match is_custom {
            true => Origin::Custom { namespace, name },
            false => Origin::Function { namespace, name },
        };
        self.origins.insert(offered, origin);
        self.list.push(tool);
        self.paths.push(path);
    }

    fn add_shell(&mut self) {
        let Some(path) = self.shell.take() else { return };
        let name = if self.origins.contains_key(SHELL) { LOCAL_SHELL } else { SHELL };
        self.origins.insert(name.to_owned(), Origin::LocalShell);
        self.paths.push(path);
        self.list.push(json!({
            "type": "function",
            "name": name,
            "description": "Runs a command on the user's machine and returns its output.",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {
                        "type": "array",
                        "items": { "type": "string" },
                        "description": "The program and its arguments.",
                    },
                    "workdir": {
                        "type": "string",
                        "description": "The folder in which the command runs.",
                    },
                    "timeout_ms": {
                        "type": "integer",
                        "description": "Milliseconds that the command may take.",
                    },
                },
                "required": ["command"],
                "additionalProperties": false,
            },
        }));
    }
}

/// An error with the place of the tool in the body.
fn at_its_path(error: &Error, paths: &[String]) -> ApiError {
    let message = error.to_string();
    let place = message.strip_prefix("tools[").and_then(|rest| {
        let (at, rest) = rest.split_once(']')?;
        Some((paths.get(at.parse::<usize>().ok()?)?, rest))
    });
    let message = match place {
        Some((path, rest)) => format!("{path}{rest}"),
        None => message,
    };
    let path = message.split(": ").next().unwrap_or("tools").to_owned();
    ApiError::invalid(path, message)
}

/// The action of a shell's call with these arguments.
pub fn shell_action(arguments: &str) -> Value {
    let given: Value = serde_json::from_str(arguments).unwrap_or_default();
    let command = match &given["command"] {
        Value::Array(list) => list.clone(),
        Value::String(text) => vec![text.as_str().into()],
        _ => Vec::new(),
    };
    let mut action = json!({ "type": "exec", "command": command, "env": {} });
    for (from, to) in [("workdir", "working_directory"), ("timeout_ms", "timeout_ms")] {
        if !given[from].is_null() {
            action[to] = given[from].clone();
        }
    }
    action
}

/// The arguments of a shell's call with this action.
pub fn shell_arguments(action: &Value) -> String {
    let mut arguments = json!({ "command": action["command"] });
    for (from, to) in [("working_directory", "workdir"), ("timeout_ms", "timeout_ms")] {
        if !action[from].is_null() {
            arguments[to] = action[from].clone();
        }
    }
    arguments.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &Value) -> ApiResult<Offered> {
        Offered::read(&Fields::of(body, "").unwrap())
    }

    fn body() -> Value {
        json!({ "tools": [
            { "type": "web_search" },
            { "type": "function", "name": "look", "parameters": { "type": "object" } },
            { "type": "custom", "name": "patch", "format":
                { "type": "grammar", "syntax": "lark", "definition": "start: \"x\"" } },
            { "type": "namespace", "name": "mail", "description": "Letters.", "tools": [
                { "type": "function", "name": "send", "description": "Sends." },
                { "type": "mcp" },
                { "type": "custom", "name": "draft" },
            ] },
            { "type": "local_shell" },
        ] })
    }

    #[test]
    fn tools_are_offered_as_functions() {
        let offered = read(&body()).unwrap();
        let names: Vec<&str> = offered.tools.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(names, ["look", "patch", "mail__send", "mail__draft", "shell"]);
        let declared = offered.tools.declared().unwrap();
        assert_eq!(declared[2]["function"]["description"], "Letters.\n\nSends.");
        let (namespace, name) = (Some("mail".into()), "send".into());
        assert_eq!(offered.origin("mail__send"), Origin::Function { namespace, name });
        let (namespace, name) = (Some("mail".into()), "draft".into());
        assert_eq!(offered.origin("mail__draft"), Origin::Custom { namespace, name });
        assert_eq!(offered.origin("shell"), Origin::LocalShell);
        let unknown = Origin::Function { namespace: None, name: "x".into() };
        assert_eq!(offered.origin("x"), unknown);
        assert_eq!(flat(Some("mcp__a__"), "b"), "mcp__a__b");
        let twice = json!({ "tools": [
            { "type": "function", "name": "shell" }, { "type": "local_shell" },
        ] });
        assert_eq!(read(&twice).unwrap().shell(), "local_shell");
    }

    #[test]
    fn choices_are_by_the_names_of_functions() {
        let offered = read(&body()).unwrap();
        let only = |choice: Value| offered.choice(Some(&choice)).unwrap().only.unwrap();
        assert_eq!(only(json!({ "type": "custom", "name": "patch" })), ["patch"]);
        assert_eq!(only(json!({ "type": "local_shell" })), ["shell"]);
        let send = json!({ "type": "function", "namespace": "mail", "name": "send" });
        assert_eq!(only(send.clone()), ["mail__send"]);
        let allowed = json!({ "type": "allowed_tools", "mode": "auto", "tools":
            [{ "type": "web_search" }, send, { "type": "function", "name": "look" }] });
        assert_eq!(only(allowed), ["mail__send", "look"]);
        assert_eq!(offered.choice(Some(&json!("any"))).unwrap().only, None);
        for bad in [json!("some"), json!({ "type": "web_search" }), json!(3)] {
            let error = offered.choice(Some(&bad)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("tool_choice"), "{bad}");
        }
    }

    #[test]
    fn wrong_tools_are_named_by_their_place() {
        for (tools, path) in [
            (json!(5), "tools"),
            (json!([5]), "tools[0]"),
            (json!([{}]), "tools[0].type"),
            (json!([{ "type": "mcp" }, { "type": "function", "name": "a b" }]), "tools[1].name"),
            (
                json!([{ "type": "namespace", "name": "n", "tools":
                    [{ "type": "function", "name": "a", "parameters": 1 }] }]),
                "tools[0].tools[0].parameters",
            ),
        ] {
            let error = read(&json!({ "tools": tools })).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(path), "{tools}");
        }
    }

    #[test]
    fn shells_calls_go_back_and_forth() {
        let arguments = r#"{"command":["ls","-l"],"workdir":"/tmp","timeout_ms":5}"#;
        let action = shell_action(arguments);
        let expected = json!({ "type": "exec", "command": ["ls", "-l"], "env": {},
            "working_directory": "/tmp", "timeout_ms": 5 });
        assert_eq!(action, expected);
        assert_eq!(shell_arguments(&action), arguments);
        assert_eq!(shell_action("{\"comm")["command"], json!([]));
    }
}
