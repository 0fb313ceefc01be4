//! Messages of a request as the model's template expects them.

use super::choose::ToolSupport;
use super::ids::{kimi_name, nine};
use super::table::Ids;
use super::write::{ToWrite, spaced};
use super::{Tools, ids};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, VecDeque};

/// Prepares messages in the style of OpenAI's chat API: roles of today, calls with ids and
/// arguments in the form that the template reads, at most as many calls in a message as it renders.
/// If the template knows nothing of tools, they become part of the texts.
pub fn prepare_messages(messages: &mut Vec<Value>, tools: &Tools, support: &ToolSupport) {
    let mut names = HashMap::new();
    let mut n_calls = 0;
    for message in messages.iter_mut().filter(|message| message.is_object()) {
        modernise(message);
        match message["role"].as_str() {
            Some("assistant") => prepare_calls(message, support, &mut names, &mut n_calls),
            Some("tool") => prepare_result(message, &names),
            _ => {}
        }
    }
    if !support.is_native {
        *messages = as_texts(std::mem::take(messages), support);
        if !tools.is_empty() {
            add_note(messages, tools, support.has_system);
        }
    } else if !support.is_parallel {
        *messages = one_by_one(std::mem::take(messages));
    }
}

/// Roles and calls of older days as those of today.
fn modernise(message: &mut Value) {
    match message["role"].as_str() {
        Some("developer") => message["role"] = "system".into(),
        Some("function") => {
            message["role"] = "tool".into();
            let name = message["name"].clone();
            let fields =
                message.as_object_mut().filter(|fields| !fields.contains_key("tool_call_id"));
            if let Some(fields) = fields {
                fields.insert("tool_call_id".into(), name);
            }
        }
        _ => {}
    }
    let Some(fields) = message.as_object_mut() else { return };
    if let Some(call) = fields.remove("function_call").filter(Value::is_object) {
        let call = json!([{ "id": call["name"], "type": "function", "function": call }]);
        fields.entry("tool_calls").or_insert(call);
    }
    let has_calls =
        fields.get("tool_calls").and_then(Value::as_array).is_some_and(|c| !c.is_empty());
    if !has_calls {
        // Templates ask whether the key is there.
        fields.shift_remove("tool_calls");
    }
}

/// The new id and the name of each call, by the client's id.
type Names = HashMap<String, (String, String)>;

fn prepare_calls(message: &mut Value, support: &ToolSupport, names: &mut Names, n: &mut usize) {
    let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) else {
        if message.get("content").is_none_or(Value::is_null) {
            message["content"] = "".into();
        }
        return;
    };
    for call in calls.iter_mut().filter(|call| call.is_object()) {
        unfold_custom(call);
        let old = call["id"].as_str().unwrap_or_default().to_owned();
        let name = call["function"]["name"].as_str().unwrap_or_default().to_owned();
        let new = match support.format.ids {
            Ids::Kimi if kimi_name(&old).is_none() => ids::call_id(Ids::Kimi, 0, *n, &name),
            Ids::Nine => nine(&old),
            Ids::Kimi | Ids::Long => old.clone(),
        };
        *n += 1;
        names.insert(old, (new.clone(), name));
        call["id"] = new.into();
        if call.get("type").is_none() {
            call["type"] = "function".into();
        }
        if call["function"].is_object() {
            let given = call["function"]["arguments"].take();
            call["function"]["arguments"] = arguments(given, support.shape.text_arguments);
        }
    }
    let is_empty = match message.get("content") {
        None | Some(Value::Null) => true,
        Some(content) => content.as_str() == Some(""),
    };
    if is_empty {
        message["content"] = if support.shape.null_content { Value::Null } else { "".into() };
    }
}

/// A custom tool's call as the function that it is offered as.
fn unfold_custom(call: &mut Value) {
    let Some(custom) = call.as_object_mut().and_then(|fields| fields.remove("custom")) else {
        return;
    };
    let input = Map::from_iter([(super::INPUT.to_owned(), custom["input"].clone())]);
    call["type"] = "function".into();
    call["function"] = json!({ "name": custom["name"], "arguments": input });
}

/// Arguments as an object, or as its JSON. Text that is no object, as of a call that was cut off,
/// is an argument of that name.
fn arguments(given: Value, as_text: bool) -> Value {
    let object = match &given {
        Value::String(text) if text.trim().is_empty() => json!({}),
        Value::String(text) => match serde_json::from_str(text) {
            Ok(Value::Object(fields)) => Value::Object(fields),
            _ => json!({ "arguments": text }),
        },
        Value::Null => json!({}),
        _ => given.clone(),
    };
    match given {
        // The client's own text: what the model wrote is found in the cache again.
        Value::String(text) if as_text && !text.trim().is_empty() => text.into(),
        _ if as_text => spaced(&object).into(),
        _ => object,
    }
}

fn prepare_result(message: &mut Value, names: &Names) {
    let id = message["tool_call_id"].as_str().unwrap_or_default();
    let Some((new, name)) = names.get(id).cloned() else { return };
    message["tool_call_id"] = new.into();
    if message.get("name").is_none_or(Value::is_null) {
        message["name"] = name.into();
    }
    if message.get("content").is_none_or(Value::is_null) {
        message["content"] = "".into();
    }
}

/// Each call in a message of its own, followed by its result.
fn one_by_one(messages: Vec<Value>) -> Vec<Value> {
    let mut out = Vec::with_capacity(messages.len());
    let mut messages = VecDeque::from(messages);
    while let Some(mut message) = messages.pop_front() {
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        if calls.len() < 2 {
            out.push(message);
            continue;
        }
        let is_result = |message: &Value| message["role"] == "tool";
        let n = messages.iter().take_while(|message| is_result(message)).count();
        let mut results: Vec<Value> = messages.drain(..n).collect();
        for call in calls {
            let id = call["id"].clone();
            message["tool_calls"] = json!([call]);
            out.push(message.clone());
            // What the model said and thought comes before the first call only.
            message = json!({ "role": "assistant", "content": empty_like(&message["content"]) });
            let is_its = |result: &Value| result["tool_call_id"] == id;
            if let Some(at) = results.iter().position(is_its) {
                out.push(results.remove(at));
            }
        }
        out.extend(results);
    }
    out
}

fn empty_like(content: &Value) -> Value {
    if content.is_null() { Value::Null } else { "".into() }
}

/// Calls and results as texts, results that follow each other in one message.
fn as_texts(messages: Vec<Value>, support: &ToolSupport) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    let mut follows_result = false;
    for mut message in messages {
        let is_result = message["role"] == "tool";
        if let Some(calls) = message.as_object_mut().and_then(|m| m.remove("tool_calls")) {
            let calls = written(&calls, support);
            let said = text(&message["content"]);
            message["content"] = [said, calls]
                .into_iter()
                .filter(|t| !t.is_empty())
                .collect::<Vec<_>>()
                .join("\n")
                .into();
        }
        if is_result {
            let result =
                format!("<tool_response>\n{}\n</tool_response>", text(&message["content"]));
            match out.last_mut().filter(|_| follows_result) {
                Some(last) => {
                    let before = last["content"].as_str().unwrap_or_default();
                    last["content"] = format!("{before}\n{result}").into();
                }
                None => out.push(json!({ "role": "user", "content": result })),
            }
        } else {
            out.push(message);
        }
        follows_result = is_result;
    }
    out
}

/// The calls as the model would write them.
fn written(calls: &Value, support: &ToolSupport) -> String {
    let empty = Map::new();
    let calls = calls.as_array().map_or(&[][..], Vec::as_slice).iter().enumerate();
    let calls = calls.map(|(index, call)| ToWrite {
        index,
        name: call["function"]["name"].as_str().unwrap_or_default(),
        arguments: call["function"]["arguments"].as_object().unwrap_or(&empty),
    });
    support.format.write(&calls.collect::<Vec<_>>())
}

/// The text of a message's content, of its parts if it has some.
fn text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts = parts.iter().filter_map(|part| part["text"].as_str());
            texts.collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

/// Tells the model of its tools: in the system's message, or else in the first one.
fn add_note(messages: &mut Vec<Value>, tools: &Tools, has_system: bool) {
    let declared = tools.declared().unwrap_or_default();
    let lines = declared.as_array().into_iter().flatten().map(|tool| spaced(&tool["function"]));
    let lines: Vec<String> = lines.collect();
    let note = format!(
        "You can call functions. Their signatures are here, one a line:\n<tools>\n{}\n</tools>\n\n\
         To call a function, answer with a JSON object that has its name and its arguments, \
         between these tags:\n<tool_call>\n{{\"name\": \"the function's name\", \"arguments\": \
         {{\"key\": \"value\"}}}}\n</tool_call>\n\nEach call has tags of its own. The results \
         follow between <tool_response> and </tool_response>.",
        lines.join("\n")
    );
    let role = if has_system { "system" } else { "user" };
    match messages.first_mut().filter(|message| message["role"] == role) {
        Some(first) if has_system => {
            first["content"] = format!("{}\n\n{note}", text(&first["content"])).into();
        }
        Some(first) => first["content"] = format!("{note}\n\n{}", text(&first["content"])).into(),
        None => messages.insert(0, json!({ "role": role, "content": note })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ChatTemplate;
    use serde_json::Map;

    fn support(name: &str, is_native: bool, is_parallel: bool) -> ToolSupport {
        let template = ChatTemplate::new(crate::chat::CHATML, "", "").unwrap();
        let support = template.tool_support_as(name).unwrap();
        ToolSupport { is_native, is_parallel, ..support }
    }

    fn prepared(messages: Value, support: &ToolSupport) -> Value {
        let mut messages = messages.as_array().unwrap().clone();
        prepare_messages(&mut messages, &Tools::default(), support);
        Value::Array(messages)
    }

    fn call(id: &str, arguments: impl Into<Value>) -> Value {
        let function = json!({ "name": "f", "arguments": arguments.into() });
        json!({ "id": id, "type": "function", "function": function })
    }

    #[test]
    fn roles_and_calls_of_older_days_are_renewed() {
        let messages = json!([
            { "role": "developer", "content": "a" },
            { "role": "user", "content": "b" },
            { "role": "system", "content": "c" },
            { "role": "assistant", "content": null,
              "function_call": { "name": "f", "arguments": "{\"n\": 1}" } },
            { "role": "function", "name": "f", "content": "d" },
            { "role": "assistant", "content": null, "tool_calls": [] },
        ]);
        let expected = json!([
            { "role": "system", "content": "a" },
            { "role": "user", "content": "b" },
            { "role": "system", "content": "c" },
            { "role": "assistant", "content": "", "tool_calls": [call("f", json!({ "n": 1 }))] },
            { "role": "tool", "name": "f", "content": "d", "tool_call_id": "f" },
            { "role": "assistant", "content": "" },
        ]);
        assert_eq!(prepared(messages, &support("hermes", true, true)), expected);
    }

    #[test]
    fn arguments_have_the_form_that_the_template_reads() {
        let mut support = support("hermes", true, true);
        for (given, object, text) in [
            (json!("{\"n\":1}"), json!({ "n": 1 }), "{\"n\":1}"),
            (json!({ "n": [1, 2] }), json!({ "n": [1, 2] }), "{\"n\": [1, 2]}"),
            (json!(""), json!({}), "{}"),
            (Value::Null, json!({}), "{}"),
            (json!("{\"n\":"), json!({ "arguments": "{\"n\":" }), "{\"n\":"),
        ] {
            for (as_text, expected) in [(false, object), (true, text.into())] {
                support.shape.text_arguments = as_text;
                let messages =
                    json!([{ "role": "assistant", "tool_calls": [call("x", given.clone())] }]);
                let prepared = prepared(messages, &support);
                assert_eq!(prepared[0]["tool_calls"][0]["function"]["arguments"], expected);
            }
        }
    }

    #[test]
    fn ids_are_renewed_where_the_template_wants_others() {
        let messages = json!([
            { "role": "assistant",
              "tool_calls": [call("call_1", "{}"), call("functions.f:7", "{}")] },
            { "role": "tool", "tool_call_id": "call_1", "content": "a" },
        ]);
        let kimi = prepared(messages.clone(), &support("kimi-k2", true, true));
        assert_eq!(kimi[0]["tool_calls"][0]["id"], "functions.f:0");
        assert_eq!(kimi[0]["tool_calls"][1]["id"], "functions.f:7");
        assert_eq!(kimi[1]["tool_call_id"], "functions.f:0");
        assert_eq!(kimi[1]["name"], "f");
        let mistral = prepared(messages, &support("mistral", true, true));
        assert_eq!(mistral[0]["tool_calls"][0]["id"], nine("call_1"));
        assert_eq!(mistral[1]["tool_call_id"], nine("call_1"));
    }

    #[test]
    fn calls_stand_alone_where_the_template_renders_one() {
        let messages = json!([
            { "role": "assistant", "content": "So:", "reasoning_content": "hm",
              "tool_calls": [call("a", "{}"), call("b", "{}")] },
            { "role": "tool", "tool_call_id": "b", "content": "B" },
            { "role": "tool", "tool_call_id": "a", "content": "A" },
            { "role": "user", "content": "x" },
        ]);
        let expected = json!([
            { "role": "assistant", "content": "So:", "reasoning_content": "hm",
              "tool_calls": [call("a", json!({}))] },
            { "role": "tool", "tool_call_id": "a", "content": "A", "name": "f" },
            { "role": "assistant", "content": "", "tool_calls": [call("b", json!({}))] },
            { "role": "tool", "tool_call_id": "b", "content": "B", "name": "f" },
            { "role": "user", "content": "x" },
        ]);
        assert_eq!(prepared(messages, &support("bare-json", true, false)), expected);
    }

    #[test]
    fn custom_calls_are_functions_with_one_argument() {
        let custom =
            json!({ "id": "x", "type": "custom", "custom": { "name": "f", "input": "a" } });
        let messages = json!([{ "role": "assistant", "content": "", "tool_calls": [custom] }]);
        let prepared = prepared(messages, &support("hermes", true, true));
        assert_eq!(prepared[0]["tool_calls"], json!([call("x", json!({ "input": "a" }))]));
    }

    /// The template knows nothing of tools: all of it is in the texts.
    #[test]
    fn tools_calls_and_results_are_texts_for_other_templates() {
        let tools = Tools::parse(&json!([{ "type": "function", "name": "f" }])).unwrap();
        let given = vec![
            json!({ "role": "user", "content": "a" }),
            json!({ "role": "assistant", "content": "b", "tool_calls":
                [call("x", "{\"n\": 1}"), call("y", "{}")] }),
            json!({ "role": "tool", "tool_call_id": "x",
                "content": [{ "type": "text", "text": "c" }] }),
            json!({ "role": "tool", "tool_call_id": "y", "content": "d" }),
        ];
        let generic = support("generic", false, true);
        let mut messages = given.clone();
        prepare_messages(&mut messages, &tools, &generic);
        let note = messages[0]["content"].as_str().unwrap();
        assert!(messages[0]["role"] == "system" && note.contains("{\"name\": \"f\""), "{note}");
        let calls = "b\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>\n\
            <tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
        assert_eq!(messages[2], json!({ "role": "assistant", "content": calls }));
        let results = "<tool_response>\nc\n</tool_response>\n<tool_response>\nd\n</tool_response>";
        assert_eq!(messages[3], json!({ "role": "user", "content": results }));
        let mut without_system = given;
        prepare_messages(
            &mut without_system,
            &tools,
            &ToolSupport { has_system: false, ..generic },
        );
        let first = without_system[0]["content"].as_str().unwrap();
        assert!(first.starts_with("You can call") && first.ends_with("\n\na"), "{first}");
        let template = ChatTemplate::new(crate::chat::CHATML, "", "").unwrap();
        let messages = Value::Array(messages);
        assert!(
            template
                .render(&messages, generic.declared(&tools).as_ref(), true, &Map::new())
                .is_ok()
        );
    }
}
