//! Tools as Anthropic declares them, in the form of chats.

use serde_json::{Map, Value, json};

use crate::chat::tools::{ToolChoice, Tools};
use crate::server::api::chat;
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::Fields;

/// The tools of a body. Those that the service itself would run are left out.
pub fn tools(fields: &Fields<'_>) -> ApiResult<Tools> {
    let Some(list) = fields.array("tools")? else { return Ok(Tools::default()) };
    let (mut out, mut paths, mut skipped) = (Vec::new(), Vec::new(), Vec::new());
    for (i, value) in list.iter().enumerate() {
        let tool = Fields::of(value, &format!("tools[{i}]"))?;
        let kind = tool.string("type")?.unwrap_or("custom");
        match tool.object("input_schema")? {
            Some(schema) => {
                out.push(function(&tool, schema)?);
                paths.push(tool.path("input_schema"));
            }
            None if kind == "custom" => {
                let path = tool.path("input_schema");
                return Err(ApiError::invalid(path.clone(), format!("{path}: expected a schema")));
            }
            None => skipped.push(kind.chars().take(40).collect::<String>()),
        }
    }
    if !skipped.is_empty() {
        let skipped = skipped.join(", ");
        log::warn!("tools that a server runs are left out of a prompt: {skipped}");
    }
    chat::tools(out).map(|tools| tools.at(paths)).map_err(|e| {
        let renamed = |text: String| text.replace(".parameters", ".input_schema");
        ApiError { param: e.param.map(renamed), message: renamed(e.message), ..e }
    })
}

/// A tool in the form of a chat's `tools`.
fn function(tool: &Fields<'_>, schema: &Map<String, Value>) -> ApiResult<Value> {
    let mut function = Map::new();
    function.insert("name".into(), tool.required("name")?.into());
    if let Some(text) = tool.string("description")? {
        function.insert("description".into(), text.into());
    }
    function.insert("parameters".into(), Value::Object(schema.clone()));
    if tool.flag("strict")? {
        function.insert("strict".into(), true.into());
    }
    Ok(json!({ "type": "function", "function": function }))
}

/// Which tools may be called, and whether an answer may call several.
pub fn choice(fields: &Fields<'_>, tools: &Tools) -> ApiResult<(ToolChoice, bool)> {
    let Some(value) = fields.get("tool_choice") else { return Ok((ToolChoice::default(), true)) };
    let choice = Fields::of(value, "tool_choice")?;
    let wanted = match choice.string("type")? {
        Some("auto") => json!("auto"),
        Some("any") => json!("required"),
        Some("none") => json!("none"),
        Some("tool") => json!({ "type": "function", "name": choice.required("name")? }),
        _ => return Err(choice.wrong("type", "auto, any, tool or none")),
    };
    let is_single = choice.flag("disable_parallel_tool_use")?;
    let parsed = ToolChoice::parse(&wanted, tools);
    let parsed = parsed.map_err(|e| ApiError::invalid("tool_choice", e.to_string()))?;
    Ok((parsed, !is_single))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::tools::Mode;

    fn read(body: &Value) -> ApiResult<(Tools, ToolChoice, bool)> {
        let fields = Fields::of(body, "").unwrap();
        let tools = tools(&fields)?;
        let (choice, is_parallel) = choice(&fields, &tools)?;
        Ok((tools, choice, is_parallel))
    }

    fn list() -> Value {
        json!([
            { "type": "web_search_20250305", "name": "web_search", "max_uses": 3 },
            { "name": "f", "description": "F", "input_schema":
                { "type": "object", "properties": { "n": { "type": "integer" } } },
              "cache_control": { "type": "ephemeral" } },
            { "type": "custom", "name": "g", "strict": true, "input_schema": {} },
        ])
    }

    #[test]
    fn tools_of_the_client_are_functions() {
        let (tools, choice, is_parallel) = read(&json!({ "tools": list() })).unwrap();
        assert_eq!(tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>(), ["f", "g"]);
        assert!(tools.get("g").unwrap().is_strict && !tools.get("f").unwrap().is_strict);
        let declared = tools.declared().unwrap();
        assert_eq!(declared[0]["function"]["parameters"]["properties"]["n"]["type"], "integer");
        assert!(declared[0]["function"].get("cache_control").is_none());
        assert_eq!((choice, is_parallel), (ToolChoice::default(), true));
    }

    #[test]
    fn choices_are_read() {
        for (choice, mode, only, is_parallel) in [
            (json!({ "type": "auto", "disable_parallel_tool_use": true }), Mode::Auto, None, false),
            (json!({ "type": "any" }), Mode::Required, None, true),
            (json!({ "type": "tool", "name": "g" }), Mode::Required, Some(vec!["g".into()]), true),
            (json!({ "type": "none" }), Mode::None, None, true),
        ] {
            let body = json!({ "tools": list(), "tool_choice": choice });
            let (_, read, parallel) = read(&body).unwrap();
            assert_eq!((read, parallel), (ToolChoice { mode, only }, is_parallel), "{choice}");
        }
    }

    #[test]
    fn faults_name_their_place() {
        for (body, path) in [
            (json!({ "tools": {} }), "tools"),
            (json!({ "tools": [{ "name": "f" }] }), "tools[0].input_schema"),
            (json!({ "tools": [{ "input_schema": {} }] }), "tools[0].name"),
            (
                json!({ "tools": [{ "name": "f", "input_schema": { "type": "string" } }] }),
                "tools[0].input_schema",
            ),
            (json!({ "tool_choice": "auto" }), "tool_choice"),
            (json!({ "tool_choice": { "type": "any" } }), "tool_choice"),
            (json!({ "tool_choice": { "type": "some" } }), "tool_choice.type"),
            (json!({ "tool_choice": { "type": "tool" } }), "tool_choice.name"),
            (
                json!({ "tools": list(), "tool_choice": { "type": "tool", "name": "web_search" } }),
                "tool_choice",
            ),
        ] {
            assert_eq!(read(&body).unwrap_err().param.as_deref(), Some(path), "{body}");
        }
    }
}
