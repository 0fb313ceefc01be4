//! Templates that llama.cpp has names for, for files that bring none or a broken one. Each is a
//! table of texts around the messages of a role, from which its Jinja source is made.

use std::fmt::Write;

/// Texts around what a role says.
type Around = (&'static str, &'static str);

struct Builtin {
    name: &'static str,
    begin: &'static str,
    system: Around,
    user: Around,
    assistant: Around,
    /// Begins an answer.
    answer: &'static str,
    /// Contents are without white space at their ends.
    trims: bool,
    /// The user's words behind the system's message are in one turn with it.
    joins: bool,
}

const PLAIN: Builtin = Builtin {
    name: "",
    begin: "",
    system: ("", ""),
    user: ("", ""),
    assistant: ("", ""),
    answer: "",
    trims: false,
    joins: false,
};

const fn row(
    name: &'static str,
    system: Around,
    user: Around,
    assistant: Around,
    answer: &'static str,
) -> Builtin {
    Builtin { name, system, user, assistant, answer, ..PLAIN }
}

const fn trimmed(builtin: Builtin) -> Builtin {
    Builtin { trims: true, ..builtin }
}

/// The user's turn begins with the system's message, if there is one.
const fn joined(builtin: Builtin) -> Builtin {
    Builtin { joins: true, ..builtin }
}

const fn from(begin: &'static str, builtin: Builtin) -> Builtin {
    Builtin { begin, ..builtin }
}

const fn llama2(name: &'static str, system: Around, user: &'static str) -> Builtin {
    joined(row(name, system, (user, " [/INST]"), ("", "</s>"), ""))
}

const LLAMA2_SYSTEM: Around = ("[INST] <<SYS>>\n", "\n<</SYS>>\n\n");

const fn exaone(name: &'static str) -> Builtin {
    const END: &str = "[|endofturn|]\n";
    trimmed(row(
        name,
        ("[|system|]", END),
        ("[|user|]", "\n"),
        ("[|assistant|]", END),
        "[|assistant|]",
    ))
}

const fn granite(name: &'static str) -> Builtin {
    const END: &str = "<|end_of_text|>\n";
    const ASSISTANT: &str = "<|start_of_role|>assistant<|end_of_role|>";
    row(
        name,
        ("<|start_of_role|>system<|end_of_role|>", END),
        ("<|start_of_role|>user<|end_of_role|>", END),
        (ASSISTANT, END),
        ASSISTANT,
    )
}

const fn bailing(name: &'static str, answer: &'static str) -> Builtin {
    row(
        name,
        ("<role>SYSTEM</role>", ""),
        ("<role>HUMAN</role>", ""),
        ("<role>ASSISTANT</role>", ""),
        answer,
    )
}

const BUILTINS: &[Builtin] = &[
    llama2("llama2", ("[INST] ", "\n"), "[INST] "),
    llama2("llama2-sys", LLAMA2_SYSTEM, "[INST] "),
    llama2("llama2-sys-bos", ("<s>[INST] <<SYS>>\n", "\n<</SYS>>\n\n"), "<s>[INST] "),
    trimmed(llama2("llama2-sys-strip", LLAMA2_SYSTEM, "[INST] ")),
    joined(row("mistral-v1", (" [INST] ", "\n\n"), (" [INST] ", " [/INST]"), (" ", "</s>"), "")),
    joined(row("mistral-v3", ("[INST] ", "\n\n"), ("[INST] ", "[/INST]"), (" ", "</s>"), "")),
    joined(row("mistral-v3-tekken", ("[INST]", "\n\n"), ("[INST]", "[/INST]"), ("", "</s>"), "")),
    row(
        "mistral-v7",
        ("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"),
        ("[INST] ", "[/INST]"),
        (" ", "</s>"),
        "",
    ),
    row(
        "mistral-v7-tekken",
        ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        ("[INST]", "[/INST]"),
        ("", "</s>"),
        "",
    ),
    row(
        "phi3",
        ("<|system|>\n", "<|end|>\n"),
        ("<|user|>\n", "<|end|>\n"),
        ("<|assistant|>\n", "<|end|>\n"),
        "<|assistant|>\n",
    ),
    row(
        "phi4",
        ("<|im_start|>system<|im_sep|>", "<|im_end|>"),
        ("<|im_start|>user<|im_sep|>", "<|im_end|>"),
        ("<|im_start|>assistant<|im_sep|>", "<|im_end|>"),
        "<|im_start|>assistant<|im_sep|>",
    ),
    row(
        "falcon3",
        ("<|system|>\n", "\n"),
        ("<|user|>\n", "\n"),
        ("<|assistant|>\n", "\n"),
        "<|assistant|>\n",
    ),
    row(
        "zephyr",
        ("<|system|>\n", "<|endoftext|>\n"),
        ("<|user|>\n", "<|endoftext|>\n"),
        ("<|assistant|>\n", "<|endoftext|>\n"),
        "<|assistant|>\n",
    ),
    row(
        "monarch",
        ("<s>system\n", "</s>\n"),
        ("<s>user\n", "</s>\n"),
        ("<s>assistant\n", "</s>\n"),
        "<s>assistant\n",
    ),
    joined(trimmed(row(
        "gemma",
        ("<start_of_turn>user\n", "\n\n"),
        ("<start_of_turn>user\n", "<end_of_turn>\n"),
        ("<start_of_turn>model\n", "<end_of_turn>\n"),
        "<start_of_turn>model\n",
    ))),
    joined(row("orion", ("Human: ", "\n\n"), ("Human: ", "\n\nAssistant: </s>"), ("", "</s>"), "")),
    row(
        "openchat",
        ("", "<|end_of_turn|>"),
        ("GPT4 Correct User: ", "<|end_of_turn|>"),
        ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        "GPT4 Correct Assistant:",
    ),
    row("vicuna", ("", "\n\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:"),
    row(
        "vicuna-orca",
        ("SYSTEM: ", "\n"),
        ("USER: ", "\n"),
        ("ASSISTANT: ", "</s>\n"),
        "ASSISTANT:",
    ),
    row(
        "deepseek",
        ("", ""),
        ("### Instruction:\n", "\n"),
        ("### Response:\n", "\n<|EOT|>\n"),
        "### Response:\n",
    ),
    row(
        "deepseek2",
        ("", "\n\n"),
        ("User: ", "\n\n"),
        ("Assistant: ", "<｜end▁of▁sentence｜>"),
        "Assistant:",
    ),
    row(
        "deepseek3",
        ("", "\n\n"),
        ("<｜User｜>", ""),
        ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        "<｜Assistant｜>",
    ),
    trimmed(row(
        "command-r",
        ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    )),
    trimmed(row(
        "llama3",
        ("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    )),
    from(
        "[gMASK]sop",
        row(
            "chatglm3",
            ("<|system|>\n ", ""),
            ("<|user|>\n ", ""),
            ("<|assistant|>\n ", ""),
            "<|assistant|>",
        ),
    ),
    from(
        "[gMASK]<sop>",
        row(
            "chatglm4",
            ("<|system|>\n", ""),
            ("<|user|>\n", ""),
            ("<|assistant|>\n", ""),
            "<|assistant|>\n",
        ),
    ),
    row(
        "glmedge",
        ("<|system|>\n", ""),
        ("<|user|>\n", ""),
        ("<|assistant|>\n", ""),
        "<|assistant|>",
    ),
    trimmed(row("minicpm", ("", ""), ("<用户>", "<AI>"), ("", ""), "")),
    exaone("exaone3"),
    exaone("exaone4"),
    trimmed(row(
        "exaone-moe",
        ("<|system|>\n", "<|endofturn|>\n"),
        ("<|user|>\n", "<|endofturn|>\n"),
        ("<|assistant|>\n", "<|endofturn|>\n"),
        "<|assistant|>\n",
    )),
    trimmed(row(
        "rwkv-world",
        ("System: ", "\n\n"),
        ("User: ", "\n\n"),
        ("Assistant: ", "\n\n"),
        "Assistant:",
    )),
    granite("granite"),
    granite("granite-4.0"),
    granite("granite-4.1"),
    from(
        "<s>",
        row(
            "gigachat",
            ("", "<|message_sep|>"),
            ("user<|role_sep|>", "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>"),
            ("assistant<|role_sep|>", "<|message_sep|>"),
            "assistant<|role_sep|>",
        ),
    ),
    row(
        "megrez",
        ("<|role_start|>system<|role_end|>", "<|turn_end|>"),
        ("<|role_start|>user<|role_end|>", "<|turn_end|>"),
        ("<|role_start|>assistant<|role_end|>", "<|turn_end|>"),
        "<|role_start|>assistant<|role_end|>",
    ),
    from(
        "<s>",
        row(
            "yandex",
            ("", "\n\n"),
            (" Пользователь: ", "\n\n"),
            (" Ассистент: ", "\n\n"),
            " Ассистент:[SEP]",
        ),
    ),
    bailing("bailing", "<role>ASSISTANT</role>"),
    bailing("bailing-think", "<role>ASSISTANT</role><think>"),
    trimmed(row(
        "llama4",
        ("<|header_start|>system<|header_end|>\n\n", "<|eot|>"),
        ("<|header_start|>user<|header_end|>\n\n", "<|eot|>"),
        ("<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"),
        "<|header_start|>assistant<|header_end|>\n\n",
    )),
    from(
        "<|im_start|>",
        row(
            "smolvlm",
            ("", "\n\n"),
            ("User: ", "<end_of_utterance>\n"),
            ("Assistant: ", "<end_of_utterance>\n"),
            "Assistant:",
        ),
    ),
    row(
        "hunyuan-moe",
        ("<|startoftext|>", "<|extra_4|>"),
        ("<|startoftext|>", "<|extra_0|>"),
        ("", "<|eos|>"),
        "",
    ),
    row(
        "hunyuan-dense",
        ("", "<｜hy_place▁holder▁no▁3｜>"),
        ("<｜hy_User｜>", ""),
        ("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁2｜>"),
        "<｜hy_Assistant｜>",
    ),
    row(
        "gpt-oss",
        ("<|start|>system<|message|>", "<|end|>"),
        ("<|start|>user<|message|>", "<|end|>"),
        ("<|start|>assistant<|message|>", "<|return|>"),
        "<|start|>assistant",
    ),
    row(
        "seed_oss",
        ("<seed:bos>system\n", "<seed:eos>"),
        ("<seed:bos>user\n", "<seed:eos>"),
        ("<seed:bos>assistant\n", "<seed:eos>"),
        "<seed:bos>assistant\n",
    ),
    trimmed(row(
        "grok-2",
        ("System: ", "<|separator|>\n\n"),
        ("Human: ", "<|separator|>\n\n"),
        ("Assistant: ", "<|separator|>\n\n"),
        "Assistant:",
    )),
    row(
        "solar-open",
        ("<|begin|>system<|content|>", "<|end|>"),
        ("<|begin|>user<|content|>", "<|end|>"),
        ("<|begin|>assistant<|content|>", "<|end|>"),
        "<|begin|>assistant",
    ),
    row("deepseek-ocr", ("", ""), ("", ""), ("", ""), ""),
    row(
        "kimi-k2",
        ("<|im_system|>system<|im_middle|>", "<|im_end|>"),
        ("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        "<|im_assistant|>assistant<|im_middle|>",
    ),
];

/// The names of llama.cpp's templates, but for `chatml`.
pub fn names() -> impl Iterator<Item = &'static str> {
    BUILTINS.iter().map(|builtin| builtin.name)
}

/// The source of the template of this name.
pub fn source(name: &str) -> Option<String> {
    let builtin = BUILTINS.iter().find(|builtin| builtin.name == name)?;
    let content = if builtin.trims { "(m.content | trim)" } else { "m.content" };
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let around = |(before, behind): Around| {
        format!("{{{{- {} + {content} + {} -}}}}", quoted(before), quoted(behind))
    };
    let mut out = format!("{{{{- {} -}}}}", quoted(builtin.begin));
    out.push_str("{%- for m in messages -%}{%- if m.role == 'system' -%}");
    let _ = write!(
        out,
        "{}{{%- elif m.role == 'assistant' -%}}{}",
        around(builtin.system),
        around(builtin.assistant)
    );
    if builtin.joins {
        let behind_system =
            "{%- elif loop.index0 > 0 and messages[loop.index0 - 1].role == 'system' -%}";
        let _ = write!(out, "{behind_system}{}", around(("", builtin.user.1)));
    }
    let _ = write!(out, "{{%- else -%}}{}{{%- endif -%}}{{%- endfor -%}}", around(builtin.user));
    let answer = quoted(builtin.answer);
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
