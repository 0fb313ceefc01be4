//! Every row of the table: chosen by a template of its family, and read back from what it writes,
//! however the text is cut.

use super::table::{Arguments, Call, ToolFormat, formats, generic};
use super::write::ToWrite;
use super::*;
use crate::chat::ChatTemplate;
use crate::chat::reasoning::Format;
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

const HARMONY_TEMPLATE: &str = "{# <|channel|>analysis<|message|> #}\
    {% for m in messages %}{% if m.tool_calls %}\
    <|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary \
    json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>\
    {% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}";

/// A template that renders calls so, each `c` in the loop `for t in m.tool_calls`.
fn family(first: &str, call: &str, last: &str) -> String {
    format!(
        "{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ m.content or '' }}}}\
         {{%- for t in m.tool_calls or [] %}}{{% set c = t.function %}}\
         {{%- if loop.first %}}{{{{ '{first}' }}}}{{% endif %}}{call}\
         {{%- if loop.last %}}{{{{ '{last}' }}}}{{% endif %}}{{% endfor %}}<|end|>{{% endfor %}}"
    )
}

/// The loop over arguments of formats with tags: text as it is, anything else as JSON.
fn tagged(begin: &str, item: &str, end: &str) -> String {
    format!(
        "{{{{ '{begin}' }}}}{{% for k, v in c.arguments.items() %}}\
         {{%- set x = v if v is string else v | tojson %}}{item}{{% endfor %}}{{{{ '{end}' }}}}"
    )
}

fn dsml(section: &str) -> String {
    let item = "{{ '<｜DSML｜parameter name=\"' ~ k ~ '\" string=\"' ~ \
                ('true' if v is string else 'false') ~ '\">' ~ x ~ '</｜DSML｜parameter>\\n' }}";
    let call = tagged("<｜DSML｜invoke name=\"is_odd\">\\n", item, "</｜DSML｜invoke>");
    let call = format!("{{{{ '\\n' if not loop.first }}}}{call}");
    family(&format!("<｜DSML｜{section}>\\n"), &call, &format!("\\n</｜DSML｜{section}>"))
}

fn glm(newline: &str) -> String {
    let item = format!(
        "{{{{ '<arg_key>' ~ k ~ '</arg_key>{newline}<arg_value>' ~ x ~ '</arg_value>{newline}' }}}}"
    );
    let call = tagged(&format!("<tool_call>is_odd{newline}"), &item, "</tool_call>");
    family("", &format!("{{{{ '{newline}' if not loop.first }}}}{call}"), "")
}

/// A template of each family with the name of its row, and whether it takes several calls.
fn families() -> Vec<(String, &'static str, bool)> {
    let kimi = "{{ '<|tool_call_begin|>' ~ t.id ~ '<|tool_call_argument_begin|>' ~ \
                c.arguments | tojson ~ '<|tool_call_end|>' }}";
    let v3 = "{{ '<｜tool▁call▁begin｜>' ~ t.type ~ '<｜tool▁sep｜>' ~ c.name ~ '\\n```json\\n' ~ \
              c.arguments + '\\n```<｜tool▁call▁end｜>' ~ ('\\n' if not loop.last else '') }}";
    let minimax = tagged(
        "<invoke name=\"is_odd\">\\n",
        "{{ '<parameter name=\"' ~ k ~ '\">' ~ x ~ '</parameter>\\n' }}",
        "</invoke>\\n",
    );
    let qwen = tagged(
        "<tool_call>\\n<function=is_odd>\\n",
        "{{ '<parameter=' ~ k ~ '>\\n' ~ x ~ '\\n</parameter>\\n' }}",
        "</function>\\n</tool_call>\\n",
    );
    vec![
        (HARMONY_TEMPLATE.into(), "harmony", false),
        (dsml("function_calls"), "deepseek-v3.2", true),
        (dsml("tool_calls"), "deepseek-v4", true),
        (family("<｜tool▁calls▁begin｜>", v3, "<｜tool▁calls▁end｜>"), "deepseek-v3", true),
        (
            family("<|tool_calls_section_begin|>", kimi, "<|tool_calls_section_end|>"),
            "kimi-k2",
            true,
        ),
        (family("<minimax:tool_call>\\n", &minimax, "</minimax:tool_call>"), "minimax-m2", true),
        (
            family("", "{{ '[TOOL_CALLS]' ~ c.name ~ '[ARGS]' ~ c.arguments | tojson }}", ""),
            "mistral",
            true,
        ),
        (family("", &qwen, ""), "qwen-xml", true),
        (glm("\\n"), "glm", true),
        (glm(""), "glm-compact", true),
        (
            family("<|tool_call|>[", "{{ c | tojson ~ (', ' if not loop.last else '') }}", "]"),
            "granite-list",
            true,
        ),
        (crate::chat::CHATML.into(), "generic", true),
    ]
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "<s>", "</s>").unwrap()
}

#[test]
fn templates_choose_their_row() {
    for (source, name, is_parallel) in families() {
        let support = template(&source).tool_support();
        assert_eq!(support.format.name, name, "{source}");
        assert_eq!((support.is_native, support.is_parallel), (name != "generic", is_parallel));
    }
}

/// DeepSeek's own template adds arguments to a text: an object would make it fail.
#[test]
fn the_form_of_arguments_is_found_out() {
    let all = families();
    let shape = |name: &str| {
        let (source, ..) = all.iter().find(|family| family.1 == name).unwrap();
        template(source).tool_support().shape
    };
    assert!(shape("deepseek-v3").text_arguments && !shape("granite-list").text_arguments);
    // Python would print `None`.
    let source = "{# <tool_call> #}{% for m in messages %}{{ m.content }}{% for t in m.tool_calls \
        or [] %}<tool_call>{{ t.function | tojson }}</tool_call>{% endfor %}{% endfor %}";
    assert!(!template(source).tool_support().shape.null_content);
    let source = source.replace(
        "{{ m.content }}",
        "{% if m.content is not none %}|{{ m.content \
        }}|{% endif %}",
    );
    assert!(template(&source).tool_support().shape.null_content);
}

#[test]
fn a_format_that_the_template_does_not_render_is_not_taken() {
    let source = "{# <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}";
    assert_eq!(template(source).tool_support().format.name, "generic");
    let source = "{# <tool_call> #}{% for m in messages %}{{ m.content }}{% for t in m.tool_calls \
        or [] %}<tool_call>{{ t.function.name }}</tool_call>{% endfor %}{% endfor %}";
    assert_eq!(template(source).tool_support().format.name, "generic");
    assert_eq!(template(source).tool_support_as("qwen-xml").unwrap().format.name, "qwen-xml");
    assert!(template(source).tool_support_as("x").is_none());
}

fn tools() -> Arc<Tools> {
    let schema = json!({ "type": "object", "properties": { "text": { "type": "string" },
        "n": { "type": "integer" }, "list": { "type": "array" }, "maybe": {} } });
    let tool = |name: &str| json!({ "type": "function", "name": name, "parameters": schema });
    Arc::new(Tools::parse(&json!([tool("edit"), tool("run.x-1")])).unwrap())
}

fn all_formats() -> impl Iterator<Item = &'static ToolFormat> {
    formats().iter().chain([generic()])
}

fn format(name: &str) -> &'static ToolFormat {
    all_formats().find(|format| format.name == name).unwrap()
}

fn reasoning(is_harmony: bool) -> &'static Format {
    static FORMATS: LazyLock<[&Format; 2]> = LazyLock::new(|| {
        let think = "{# <think></think> #}{{ messages[0].content }}";
        [think, HARMONY_TEMPLATE].map(|source| template(source).reasoning().unwrap())
    });
    FORMATS[usize::from(is_harmony)]
}

/// Pieces of a kind that follow each other put together.
fn joined(events: Vec<Event>) -> Vec<Event> {
    let mut out: Vec<Event> = Vec::new();
    for event in events {
        match (out.last_mut(), event) {
            (Some(Event::Content(a)), Event::Content(b))
            | (Some(Event::Reasoning(a)), Event::Reasoning(b)) => a.push_str(&b),
            (
                Some(Event::Arguments { index: i, text: a }),
                Event::Arguments { index: j, text: b },
            ) if *i == j => a.push_str(&b),
            (_, event) => out.push(event),
        }
    }
    out
}

fn scan<'a>(
    format: &'static ToolFormat,
    thinks: bool,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Vec<Event> {
    let is_harmony = matches!(format.call, Call::Header { .. });
    let reasoning = (thinks || is_harmony).then(|| reasoning(is_harmony));
    let calls = Calls { format, tools: tools(), seed: 7, is_required: false };
    let prompt = if is_harmony { "<|start|>assistant" } else { "" };
    let mut scanner = Scanner::new(reasoning, Some(calls), prompt);
    let mut events: Vec<Event> = pieces.into_iter().flat_map(|piece| scanner.push(piece)).collect();
    events.extend(scanner.finish());
    joined(events)
}

#[derive(Debug, Default, PartialEq)]
struct Read {
    reasoning: String,
    content: String,
    calls: Vec<(String, String)>,
    n_ended: usize,
}

fn read(events: &[Event]) -> Read {
    let mut out = Read::default();
    for event in events {
        match event {
            Event::Reasoning(text) => out.reasoning.push_str(text),
            Event::Content(text) => out.content.push_str(text),
            Event::CallBegin { index, name, .. } => {
                assert_eq!(*index, out.calls.len());
                out.calls.push((name.clone(), String::new()));
            }
            Event::Arguments { index, text } => out.calls[*index].1.push_str(text),
            Event::CallEnd { index } => {
                assert_eq!(*index, out.n_ended);
                out.n_ended += 1;
            }
        }
    }
    out
}

/// Scans a text in one piece, in characters, and cut in two at each place: the events are equal.
fn scan_all_ways(format: &'static ToolFormat, thinks: bool, text: &str) -> Vec<Event> {
    let whole = scan(format, thinks, [text]);
    let mut ends: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    ends.push(text.len());
    let chars = ends.windows(2).map(|w| &text[w[0]..w[1]]);
    assert_eq!(scan(format, thinks, chars), whole, "{} {text:?}", format.name);
    for &at in &ends {
        let cut = scan(format, thinks, [&text[..at], &text[at..]]);
        assert_eq!(cut, whole, "{} {text:?} at {at}", format.name);
    }
    whole
}

fn sample_calls() -> Vec<(&'static str, Value)> {
    let hard = "fn a() {\n\t\"<b>\\ é🙂 {x}\";\n}\n";
    vec![
        ("edit", json!({ "text": hard, "n": -3, "list": [1, { "a": "]}" }, null] })),
        ("run.x-1", json!({ "maybe": true, "text": "" })),
        ("edit", json!({})),
    ]
}

#[test]
fn each_row_reads_what_it_writes() {
    for format in all_formats() {
        let calls = sample_calls();
        let n = if matches!(format.call, Call::Header { .. }) { 1 } else { calls.len() };
        let calls = &calls[..n];
        let to_write = calls.iter().enumerate().map(|(index, (name, arguments))| ToWrite {
            index,
            name,
            arguments: arguments.as_object().unwrap(),
        });
        let text = format.write(&to_write.collect::<Vec<_>>());
        let read = read(&scan_all_ways(format, false, &text));
        assert_eq!((read.content.as_str(), read.n_ended), ("", n), "{} {text}", format.name);
        let found: Vec<(&str, Value)> = read
            .calls
            .iter()
            .map(|(name, text)| (name.as_str(), serde_json::from_str(text).unwrap()))
            .collect();
        assert_eq!(found, calls, "{} {text}", format.name);
    }
}

#[test]
fn reasoning_and_content_stand_before_calls() {
    for format in all_formats().filter(|f| !f.is_bare() && f.name != "harmony") {
        let arguments = Map::from_iter([("n".into(), json!(1))]);
        let call = ToWrite { index: 0, name: "edit", arguments: &arguments };
        let text = format!("<think>\nhm\n</think>\n\nSo: \n\n{}\n", format.write(&[call]));
        let read = read(&scan_all_ways(format, true, &text));
        assert_eq!((read.reasoning.as_str(), read.content.as_str()), ("hm", "So:"), "{text}");
        assert_eq!(read.calls, [("edit".into(), "{\"n\": 1}".into())], "{text}");
    }
}

#[track_caller]
fn check(name: &str, text: &str, content: &str, calls: &[(&str, &str)], n_ended: usize) {
    let got = read(&scan_all_ways(format(name), false, text));
    let calls = calls.iter().map(|(name, json)| (name.to_string(), json.to_string())).collect();
    let expected = Read { reasoning: String::new(), content: content.into(), calls, n_ended };
    assert_eq!(got, expected, "{name}: {text}");
}

#[test]
fn what_is_no_call_is_content() {
    for text in [
        "Use <tool_call> and </tool_call>.",
        "<tool_c",
        "a <tool_call>\n{\"nam",
        "<tool_call>{\"name\": \"a b\", \"arguments\": {}}</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\n{\"arguments\": {\"n\": 1}",
        "```\n{}\n```\n",
    ] {
        check("hermes", text, text, &[], 0);
    }
    check(
        "bare-json",
        "{\"name\": \"Ann\", \"age\": 3}",
        "{\"name\": \"Ann\", \"age\": 3}",
        &[],
        0,
    );
    check("bare-json", "See {\"name\": \"edit\"}", "See {\"name\": \"edit\"}", &[], 0);
    check("mistral", "[TOOL_CALLS] are markers", "[TOOL_CALLS] are markers", &[], 0);
    let xml = "<function=edit";
    check("qwen-xml", xml, xml, &[], 0);
}

#[test]
fn calls_that_are_cut_off_are_calls_once_they_have_a_name() {
    let call = "<tool_call>\n{\"name\": \"edit\", \"arguments\": {\"text\": \"a b";
    check("hermes", call, "", &[("edit", "{\"text\": \"a b")], 1);
    check("hermes", "<tool_call>\n{\"name\": \"edit\"", "", &[("edit", "")], 1);
    let xml = "<tool_call>\n<function=edit>\n<parameter=text>\na \"b\"\n";
    check(
        "qwen-xml",
        xml,
        "",
        &[("edit", "{\"text\": \"a \\\"b\\\"\n".replace('\n', "\\n").as_str())],
        1,
    );
    let xml = "<tool_call>\n<function=edit>\n<parameter=n>\n12";
    check("qwen-xml", xml, "", &[("edit", "")], 1);
    let kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0";
    check("kimi-k2", kimi, kimi, &[], 0);
}

/// Wherever a text is cut, no marker and no part of a name is shown; what stands before stays.
#[test]
fn a_cut_text_shows_no_markers() {
    let calls = sample_calls();
    for format in all_formats() {
        let n = if matches!(format.call, Call::Header { .. }) { 1 } else { calls.len() };
        let to_write = calls[..n].iter().enumerate().map(|(index, (name, arguments))| ToWrite {
            index,
            name,
            arguments: arguments.as_object().unwrap(),
        });
        let written = format.write(&to_write.collect::<Vec<_>>());
        let before = if format.is_bare() || n == 1 { "" } else { "See [this] first." };
        let text = format!("{before}{written}");
        let is_harmony = matches!(format.call, Call::Header { .. });
        let whole = read(&scan(format, false, [text.as_str()]));
        for (at, _) in text.char_indices() {
            let calls = Calls { format, tools: tools(), seed: 7, is_required: true };
            let prompt = if is_harmony { "<|start|>assistant" } else { "" };
            let format = is_harmony.then(|| reasoning(true));
            let mut scanner = Scanner::new(format, Some(calls), prompt);
            let mut events = scanner.push(&text[..at]);
            events.extend(scanner.cut());
            let cut = read(&joined(events));
            let name = format!("{} at {at}: {:?}", whole.calls.len(), &text[..at]);
            assert!(before.starts_with(&cut.content), "{name}: {:?}", cut.content);
            assert!(at < before.len() || cut.content == before, "{name}: {:?}", cut.content);
            for ((called, arguments), expected) in cut.calls.iter().zip(&whole.calls) {
                assert_eq!(*called, expected.0, "{name}");
                let all = arguments.trim_end_matches("\\n");
                assert!(expected.1.starts_with(all), "{name}: {arguments:?}");
            }
        }
    }
}

#[test]
fn small_faults_of_models_are_read() {
    let edit = &[("edit", "{\"n\": 1}")];
    for text in [
        "<tool_call>{\"name\": \"edit\", \"arguments\": {\"n\": 1}}",
        "<tool_call>{\"name\": \"edit\", \"arguments\": {\"n\": 1}</tool_call>",
        "<tool_call>\n{\"name\": \"edit\", \"arguments\": {\"n\": 1}}}\n</tool_call>",
        "<tool_call>{\"arguments\": {\"n\": 1}, \"name\": \"edit\"}</tool_call>",
        "<tool_call>{\"name\": \"edit\", \"parameters\": {\"n\": 1}, \"id\": 3}</tool_call>",
        "<tool_call>{\"name\": \"edit\", \"arguments\": \"{\\\"n\\\": 1}\"}</tool_call>",
    ] {
        check("hermes", text, "", edit, 1);
    }
    check("hermes", "<tool_call>{\"name\": \"edit\"}</tool_call>", "", &[("edit", "{}")], 1);
    let broken = "<tool_call>{\"name\": \"edit\", \"arguments\": {\"n\": <1>}}</tool_call>";
    check("hermes", broken, "", &[("edit", "{\"n\": <1>}}")], 1);
    check("qwen-xml", "<function=edit>\n<parameter=n>\n1\n</parameter>\n</function>", "", edit, 1);
    let xml = "<tool_call>\n<function=edit>\n<parameter=maybe>\nTrue\n</parameter>\n</function>";
    check("qwen-xml", xml, "", &[("edit", "{\"maybe\": true}")], 1);
    let v11 = "[TOOL_CALLS]edit[CALL_ID]abcDEF123[ARGS]{\"n\": 1}";
    check("mistral", v11, "", edit, 1);
    let text = "<tool_call>{\"name\": \"edit\", \"arguments\": {\"n\": 1}}</tool_call>\n\nDone.";
    check("hermes", text, "Done.", edit, 1);
    check("hermes", &format!("So:\n{text}"), "So:\nDone.", edit, 1);
}

#[test]
fn ids_are_of_the_familys_style() {
    let id = |name: &str, text: &str| match &scan(format(name), false, [text])[0] {
        Event::CallBegin { id, .. } => id.clone(),
        other => panic!("{other:?}"),
    };
    let hermes = id("hermes", "<tool_call>{\"name\": \"edit\"}");
    assert!(hermes.starts_with("call_") && hermes.len() == 29);
    let kimi = "<|tool_call_begin|>functions.edit:4<|tool_call_argument_begin|>{}";
    assert_eq!(id("kimi-k2", kimi), "functions.edit:4");
    assert_eq!(id("mistral", "[TOOL_CALLS]edit[CALL_ID]abcDEF123[ARGS]{}"), "abcDEF123");
    assert_eq!(id("mistral", "[TOOL_CALLS]edit[ARGS]{}").len(), 9);
}

#[test]
fn channels_with_calls_are_read() {
    let text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary\
        <|message|>I edit.<|end|><|start|>assistant<|channel|>commentary to=functions.edit \
        <|constrain|>json<|message|>{\"n\": 1}";
    let got = read(&scan_all_ways(format("harmony"), true, text));
    let calls = vec![("edit".to_owned(), "{\"n\": 1}".to_owned())];
    let expected = Read { reasoning: "hm".into(), content: "I edit.".into(), calls, n_ended: 1 };
    assert_eq!(got, expected);
    let python = "<|channel|>analysis to=functions.edit code<|message|>{}<|call|>";
    check("harmony", python, "", &[("edit", "{}")], 1);
    check(
        "harmony",
        " to=functions.edit<|channel|>commentary json<|message|><|call|>",
        "",
        &[("edit", "{}")],
        1,
    );
}

/// A control token that begins a call ends reasoning that was left open.
#[test]
fn a_call_ends_reasoning_that_is_open() {
    let text = "<think>hm <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>{\"n\": 1}\
        <｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let got = read(&scan_all_ways(format("deepseek-v3.1"), true, text));
    assert_eq!((got.reasoning.as_str(), got.calls.len(), got.n_ended), ("hm", 1, 1));
    // A model may think about plain texts.
    let got =
        read(&scan_all_ways(format("hermes"), true, "<think>hm <tool_call>{\"name\": \"edit\"}"));
    assert_eq!(got.calls.len(), 0);
}

#[test]
fn without_tools_all_is_content() {
    let mut scanner = Scanner::new(None, None, "");
    let text = "<tool_call>{\"name\": \"edit\"}</tool_call> ";
    let mut events = scanner.push(text);
    events.extend(scanner.finish());
    assert_eq!(joined(events), [Event::Content(text.into())]);
}

/// Texts of markers, their parts, JSON and other characters, in an order that a seed gives.
fn noise(format: &ToolFormat, mut seed: u64) -> String {
    let mut next = move |n: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) as usize % n
    };
    let (mut markers, mut out) = (format.markers(), String::new());
    markers.extend(["<think>", "</think>"]);
    if format.name == "harmony" {
        markers.extend(["<|start|>assistant", "<|channel|>commentary ", "<|message|>", "<|end|>"]);
    }
    let json = [
        "{",
        "}",
        "\"",
        "[",
        "]",
        ",",
        "\"name\": \"edit\", ",
        "\"arguments\": ",
        "{\"n\": 1}",
        "{\"text\": \"a\\\"",
        "null",
        "12",
        ":",
    ];
    let other =
        ["\n", " ", "edit", "functions.edit:0", "text", "n", "é漢", "🙂 b", "<", "[", "\n\n"];
    for _ in 0..next(20) {
        let marker = markers[next(markers.len())];
        match next(8) {
            0..=3 => out.push_str(marker),
            4 => out.extend(marker.chars().take(next(marker.chars().count()))),
            5..=6 => out.push_str(json[next(json.len())]),
            _ => out.push_str(other[next(other.len())]),
        }
    }
    out
}

#[test]
fn pieces_do_not_matter() {
    for format in all_formats() {
        for seed in 0..100 {
            scan_all_ways(format, seed % 2 == 0, &noise(format, seed));
        }
    }
}

/// The scanner decides by the first marker that it sees: none may begin within another's end.
#[test]
fn markers_do_not_overlap() {
    for format in all_formats() {
        let mut markers = format.openers();
        markers.extend(format.closers());
        markers.retain(|marker| *marker != "```");
        if let Call::Named { arguments: Arguments::Tagged(tags), .. } = &format.call {
            markers.push(tags.key_begin);
        }
        for a in &markers {
            for b in &markers {
                let begins = |n: &usize| a.is_char_boundary(*n) && b.starts_with(&a[*n..]);
                assert!(!(1..a.len()).any(|n| begins(&n)), "{}: {a} {b}", format.name);
            }
        }
    }
}
