//! Templates that llama.cpp has names for, for files that bring none or a broken one. Each is a row
//! of `models/chat/templates.toml`, from which its Jinja source is made.

use std::fmt::Write;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::chat::data::table;

/// Texts around what a role says.
type Around = (String, String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Builtin {
    name: String,
    #[serde(default)]
    begin: String,
    system: Around,
    user: Around,
    assistant: Around,
    answer: String,
    #[serde(default)]
    trims: bool,
    #[serde(default)]
    joins: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    template: Vec<Builtin>,
}

static TABLE: LazyLock<Table> =
    LazyLock::new(|| table(include_str!("../../models/chat/templates.toml")));

/// The names of llama.cpp's templates, but for `chatml`.
pub fn names() -> impl Iterator<Item = &'static str> {
    TABLE.template.iter().map(|builtin| builtin.name.as_str())
}

/// The source of the template of this name.
pub fn source(name: &str) -> Option<String> {
    let builtin = TABLE.template.iter().find(|builtin| builtin.name == name)?;
    let content = if builtin.trims { "(m.content | trim)" } else { "m.content" };
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let around = |before: &str, behind: &str| {
        format!("{{{{- {} + {content} + {} -}}}}", quoted(before), quoted(behind))
    };
    let mut out = format!("{{{{- {} -}}}}", quoted(&builtin.begin));
    out.push_str("{%- for m in messages -%}{%- if m.role == 'system' -%}");
    let _ = write!(
        out,
        "{}{{%- elif m.role == 'assistant' -%}}{}",
        around(&builtin.system.0, &builtin.system.1),
        around(&builtin.assistant.0, &builtin.assistant.1)
    );
    if builtin.joins {
        let behind_system =
            "{%- elif loop.index0 > 0 and messages[loop.index0 - 1].role == 'system' -%}";
        let _ = write!(out, "{behind_system}{}", around("", &builtin.user.1));
    }
    let _ = write!(
        out,
        "{{%- else -%}}{}{{%- endif -%}}{{%- endfor -%}}",
        around(&builtin.user.0, &builtin.user.1)
    );
    let answer = quoted(&builtin.answer);
    let _ = write!(out, "{{%- if add_generation_prompt -%}}{{{{- {answer} -}}}}{{%- endif -%}}");
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ChatTemplate;
    use serde_json::{Map, Value, json};

    fn prompt(name: &str, messages: &Value) -> String {
        let template = ChatTemplate::new(&source(name).unwrap(), "<s>", "</s>").unwrap();
        template.render(messages, None, true, &Map::new()).unwrap()
    }

    #[test]
    fn prompts_are_those_of_llama_cpp() {
        let say = |role: &str, text: &str| json!({ "role": role, "content": text });
        let messages = json!([
            say("system", "You are a \"test\"."),
            say("user", " Hi "),
            say("assistant", "Yo"),
            say("user", "And?"),
        ]);
        for (name, expected) in [
            (
                "command-r",
                "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>You are a \"test\".<|END_OF_TURN_TOKEN|>\
                 <|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>\
                 <|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Yo<|END_OF_TURN_TOKEN|>\
                 <|START_OF_TURN_TOKEN|><|USER_TOKEN|>And?<|END_OF_TURN_TOKEN|>\
                 <|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            ),
            (
                "llama2-sys",
                "[INST] <<SYS>>\nYou are a \"test\".\n<</SYS>>\n\n Hi  [/INST]Yo</s>\
                 [INST] And? [/INST]",
            ),
            (
                "mistral-v1",
                " [INST] You are a \"test\".\n\n Hi  [/INST] Yo</s> [INST] And? [/INST]",
            ),
            (
                "gemma",
                "<start_of_turn>user\nYou are a \"test\".\n\nHi<end_of_turn>\n\
                 <start_of_turn>model\nYo<end_of_turn>\n<start_of_turn>user\nAnd?<end_of_turn>\n\
                 <start_of_turn>model\n",
            ),
            (
                "deepseek3",
                "You are a \"test\".\n\n<｜User｜> Hi <｜Assistant｜>Yo<｜end▁of▁sentence｜>\
                 <｜User｜>And?<｜Assistant｜>",
            ),
        ] {
            assert_eq!(prompt(name, &messages), expected, "{name}");
        }
    }

    #[test]
    fn each_template_renders_and_takes_no_tools() {
        let messages = json!([{ "role": "user", "content": "Hi" }]);
        for name in names() {
            let text = prompt(name, &messages);
            assert!(text.contains("Hi") && !text.contains("m.content"), "{name}: {text}");
            let template = ChatTemplate::new(&source(name).unwrap(), "", "").unwrap();
            assert!(!template.tool_support().is_native, "{name}");
        }
        assert_eq!(source("chatml"), None);
    }
}
