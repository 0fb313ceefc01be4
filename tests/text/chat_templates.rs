//! Chat templates against transformers: the templates of `tests/fixtures/chat/`, which produce the
//! formats of Qwen2.5, Qwen3, gpt-oss, Mistral, Llama 3.1 and DeepSeek-V3.1, render as
//! `apply_chat_template` does (`expected.json.gz`, made by `generate.py` there).

use moeba::chat::{CHATML, ChatTemplate, Clock};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(name)
}

fn source(name: &str) -> String {
    std::fs::read_to_string(fixture(&format!("{name}.jinja"))).unwrap()
}

fn template(name: &str, all: &Value) -> ChatTemplate {
    let token = |i: usize| all["tokens"][name][i].as_str().unwrap_or_default();
    let clock = Clock::parse(all["now"].as_str().unwrap()).unwrap();
    ChatTemplate::with_clock(&source(name), token(0), token(1), clock).unwrap()
}

fn check(name: &str, at_least: usize) {
    let all: Value = serde_json::from_slice(&common::gunzip(&fixture("expected.json.gz"))).unwrap();
    let template = template(name, &all);
    let (mut n, mut faults) = (0, String::new());
    for case in all["cases"].as_array().unwrap().iter().filter(|case| case["template"] == name) {
        let conversation = case["conversation"].as_str().unwrap();
        let request = &all["requests"][case["request"].as_u64().unwrap() as usize];
        let got = template.render(
            &all["conversations"][conversation],
            Some(&request["tools"]).filter(|tools| !tools.is_null()),
            request["add_generation_prompt"].as_bool().unwrap(),
            request["kwargs"].as_object().unwrap(),
        );
        n += 1;
        let fine = match (&got, case["text"].as_str(), case["error"].as_str()) {
            (Ok(text), Some(expected), _) => text == expected,
            (Err(e), _, Some(expected)) => e.to_string().ends_with(expected),
            _ => false,
        };
        if !fine {
            let number = &case["request"];
            faults += &format!("{conversation}, request {number}:\n{got:#?}\n{case:#}\n");
        }
    }
    assert!(faults.is_empty(), "{faults}");
    assert!(n >= at_least, "only {n} cases for {name}");
}

#[test]
fn qwen2_5_renders_as_transformers_does() {
    check("qwen2.5", 30);
}

#[test]
fn qwen3_renders_as_transformers_does() {
    check("qwen3", 30);
}

#[test]
fn mistral_renders_as_transformers_does() {
    check("mistral-nemo", 30);
}

#[test]
fn llama_3_1_renders_as_transformers_does() {
    check("llama-3.1", 30);
}

#[test]
fn deepseek_renders_as_transformers_does() {
    check("deepseek-v3.1", 30);
}

#[test]
fn reasoning_is_recognised_by_the_template() {
    for (name, expected) in [
        ("gpt-oss", Some("harmony")),
        ("qwen3", Some("think")),
        ("deepseek-r1", Some("think")),
        ("deepseek-v3.1", Some("think")),
        ("qwen2.5", None),
        ("mistral-nemo", None),
        ("llama-3.1", None),
    ] {
        let template = ChatTemplate::new(&source(name), "", "").unwrap();
        assert_eq!(template.reasoning().map(|format| format.name), expected, "{name}");
    }
}

/// The row of the table, and whether a message may have several calls.
#[test]
fn tool_calls_are_recognised_by_the_template() {
    for (name, expected) in [
        ("qwen2.5", ("hermes", true)),
        ("qwen3", ("hermes", true)),
        ("mistral-nemo", ("mistral-list", true)),
        ("llama-3.1", ("bare-json", false)),
        ("deepseek-v3.1", ("deepseek-v3.1", true)),
        ("deepseek-r1", ("generic", true)),
        ("gpt-oss", ("generic", true)),
    ] {
        let template = ChatTemplate::new(&source(name), "", "").unwrap();
        let support = template.tool_support();
        assert_eq!((support.format.name, support.is_parallel), expected, "{name}");
        assert_eq!(support.is_native, expected.0 != "generic", "{name}");
    }
}

/// The output of a template decides, where its source alone does not.
#[test]
fn a_format_that_the_template_does_not_render_is_not_taken() {
    let name = |source: &str| {
        ChatTemplate::new(source, "", "").unwrap().reasoning().map(|format| format.name)
    };
    let render = |before: &str, after: &str| {
        let message = "{{ m.reasoning_content }}";
        format!(
            "{{# <think></think> <thought></thought> #}}{{% for m in messages %}}\
             {before}{message}{after}{{{{ m.content }}}}<end>{{% endfor %}}"
        )
    };
    assert_eq!(name(&render("<think>\n", "\n</think>\n\n")), Some("think"));
    assert_eq!(name(&render("<thought>", "</thought>")), Some("exaone"));
    assert_eq!(name(&render("<b>", "</b>")), None);
    assert_eq!(name("{# <think></think> #}{{ messages[0].content }}"), Some("think"));
    let mistral = "[THINK]{{ messages[1].thinking }}[/THINK]{{ messages[1].content }}";
    assert_eq!(name(mistral), Some("mistral"));
    let seed =
        "<seed:think>{{ messages[1].reasoning_content }}</seed:think>{{ messages[1].content }}";
    assert_eq!(name(seed), Some("seed"));
    let granite = "{# Here is my thought process: Here is my response: #}";
    assert_eq!(name(granite), Some("granite"));
}

#[test]
fn jinja_and_python_features_render_as_in_transformers() {
    check("features", 3);
}

fn render(source: &str, messages: Value) -> moeba::Result<String> {
    ChatTemplate::new(source, "", "")?.render(&messages, None, true, &Map::new())
}

#[test]
fn chatml_is_built_in() {
    let messages = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u\n"},
    ]);
    let expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu\n<|im_end|>\n\
                    <|im_start|>assistant\n";
    assert_eq!(render(CHATML, messages).unwrap(), expected);
}

#[test]
fn tokens_that_a_model_lacks_are_undefined() {
    let source = "{{ bos_token is defined }} {{ tools is none }} {{ documents is none }}";
    assert_eq!(render(source, json!([])).unwrap(), "False True True");
    let template = ChatTemplate::new("{{ pad_token }}{{ x }}", "", "").unwrap();
    let kwargs = json!({"x": [1]});
    let text = template
        .with_token("pad_token", "<pad>")
        .render(&json!([]), None, false, kwargs.as_object().unwrap())
        .unwrap();
    assert_eq!(text, "<pad>[1]");
}

#[test]
fn reasoning_is_found_under_each_of_its_names() {
    let source = "{% for m in messages %}{{ m.reasoning_content }},{{ m.thinking }};{% endfor %}";
    let messages = json!([{"role": "assistant", "reasoning": "a"}, {"thinking": "b"}, {}]);
    assert_eq!(render(source, messages).unwrap(), "a,a;b,b;,;");
}

#[test]
fn messages_of_another_shape_are_refused() {
    for (messages, expected) in [
        (json!({"role": "user"}), "messages: expected an array, got an object"),
        (json!(["hello"]), "a message: expected an object, got a string"),
        (json!(null), "messages: expected an array, got null"),
    ] {
        assert_eq!(render("", messages).unwrap_err().to_string(), expected);
    }
    let template = ChatTemplate::new("", "", "").unwrap();
    let error = template.render(&json!([]), Some(&json!({})), false, &Map::new()).unwrap_err();
    assert_eq!(error.to_string(), "tools: expected an array, got an object");
}

/// Snippets that transformers renders and that are refused here, by a part of the sentence.
const REFUSED: &[(&str, &str)] = &[
    (r"{{ '\N{BULLET}' }}", "escapes by name"),
    ("{{ 'abc'['a':] }}", "has no such slice"),
    ("{{ 'abc'.encode() }}", "`encode` of a str is not supported"),
    ("{{ ('%s'|safe) % '<' }}", "`%` on escaped text is not supported"),
    ("{{ lipsum(n=1) is string }}", "random text"),
    ("{{ (-8) ** 0.5 }}", "complex numbers are not supported"),
    ("{{ 2 ** 200 }}", "127 bits"),
    ("{{ '٣'|int }}", "other digits"),
    ("{{ self }}", "`self` is not supported"),
    ("{{ namespace }}", "cannot be printed"),
    ("{{ joiner }}", "cannot be printed"),
    ("{% autoescape true %}{{ '<' }}{% endautoescape %}", "`autoescape` other than `false`"),
];

/// Snippets that transformers' sandbox refuses: Kimi's templates change lists in this way.
const MORE: &[&str] = &["{% set ns = namespace(xs=[]) %}{% set _ = ns.xs.append(1) %}{{ ns.xs }}"];

/// Snippets render as in transformers (`snippets.py`), or are refused as the lists above say.
#[test]
fn snippets_render_as_transformers_does_or_are_refused_by_name() {
    let all: Value = serde_json::from_slice(&common::gunzip(&fixture("snippets.json.gz"))).unwrap();
    let context = all["context"].as_object().unwrap();
    let clock = Clock::parse(all["now"].as_str().unwrap()).unwrap();
    let (messages, tools) = (&context["messages"], Some(&context["tools"]));
    let cases = all["cases"].as_array().unwrap();
    assert!(cases.len() > 1400, "only {} cases", cases.len());
    let mut faults = Vec::new();
    for case in cases {
        let (source, expected) = (case[0].as_str().unwrap(), case[1].as_str());
        let got = ChatTemplate::with_clock(source, "<s>", "", clock)
            .and_then(|template| template.render(messages, tools, true, context));
        let refusal = REFUSED.iter().find(|(refused, _)| *refused == source);
        let is_right = match (&got, expected) {
            (Ok(text), Some(expected)) => text == expected && refusal.is_none(),
            (Ok(_), None) => MORE.contains(&source),
            (Err(_), None) => true,
            (Err(e), Some(_)) => refusal.is_some_and(|(_, why)| e.to_string().contains(why)),
        };
        if !is_right {
            faults.push(format!("{source}: expected {expected:?}, got {got:?}"));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// A list in a namespace is changed as in Python.
#[test]
fn lists_of_a_namespace_grow_and_shrink() {
    let source = "{%- set q = namespace(ids=[]) -%}{%- for m in messages -%}\n\
        {%- set id = 'f(' ~ m.content ~ ')' -%}{%- set _ = q.ids.append(id) -%}{%- endfor -%}\n\
        {%- set first = q.ids.pop(0) -%}{{ first }} {{ q.ids | length }} {{ q.ids[0] }}";
    let messages = json!(["a", "b", "c"].map(|text| json!({ "role": "user", "content": text })));
    let template = ChatTemplate::new(source, "", "").unwrap();
    let text = template.render(&messages, None, false, &Map::new()).unwrap();
    assert_eq!(text, "f(a) 2 f(b)");
}
