//! `run` with a grammar or a JSON schema: what the answer is, and what a bad form leads to.

use common::cli::{Model, Tiny, failed, moeba, on, succeeded, tiny};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

/// An answer of the demo model, with `args` behind the prompt.
fn demo(args: &[&str]) -> Output {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/moeba-demo.gguf");
    let fixed = ["-p", "Describe the package.", "-n", "64", "-s", "1", "-c", "128"];
    moeba().arg("run").arg(path).args(fixed).args(args).output().unwrap()
}

fn chat() -> Model {
    tiny(Tiny { chat: true, ..Tiny::default() })
}

/// An answer of a model that knows nothing.
fn answer(model: &Model, args: &[&str]) -> String {
    let fixed = ["-p", "Hi", "-n", "100", "-s", "3"];
    succeeded(&on(model, "run", &[&fixed[..], args].concat())).to_owned()
}

#[test]
fn an_answer_with_a_schema_parses() {
    let schema = json!({ "type": "object", "additionalProperties": false, "properties": {
        "section": { "enum": ["net", "libs", "doc"] }, "free": { "type": "boolean" } },
        "required": ["section", "free"] });
    let out = demo(&["-j", &schema.to_string()]);
    let value: Value = serde_json::from_str(succeeded(&out)).unwrap();
    assert!(value["section"].is_string() && value["free"].is_boolean(), "{value}");
    assert_eq!(demo(&["--json-schema", &schema.to_string()]).stdout, out.stdout);
}

#[test]
fn schemas_and_grammars_come_from_flags_and_files() {
    let model = chat();
    let (schema, grammar) =
        (r#"{"enum": ["left", "right"]}"#, "root ::= \"le\" [f] \"t\" | \"u\" \"p\"");
    let (schema_file, grammar_file) = (model.file("schema"), model.file("grammar"));
    std::fs::write(&schema_file, schema).unwrap();
    std::fs::write(&grammar_file, grammar).unwrap();
    let [schema_file, grammar_file] = [&schema_file, &grammar_file].map(|f| f.to_str().unwrap());
    for args in [["-j", schema], ["-jf", schema_file], ["--json-schema-file", schema_file]] {
        let text = answer(&model, &args);
        assert!(["\"left\"\n", "\"right\"\n"].contains(&text.as_str()), "{args:?}: {text}");
    }
    for args in [["--grammar", grammar], ["--grammar-file", grammar_file]] {
        let text = answer(&model, &args);
        assert!(["left\n", "up\n"].contains(&text.as_str()), "{args:?}: {text}");
    }
    // The last flag counts; an empty one leaves answers free.
    let text = answer(&model, &["-j", "{\"const\": 1}", "--grammar", "root ::= \"x\""]);
    assert_eq!(text, "x\n");
    assert_eq!(answer(&model, &["-j", schema, "--grammar", ""]), answer(&model, &[]));
    // The continuation of plain text has the form, not the prompt.
    let text = answer(&model, &["--raw", "-j", "{\"const\": \"a\\n\"}", "--ignore-eos"]);
    assert_eq!(text, "Hi\"a\\n\"\n");
}

#[test]
fn reasoning_is_free_and_the_answer_after_it_has_the_form() {
    let model = chat();
    let template =
        |end: &str| format!("{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{end}");
    let schema = r#"{"enum": ["left", "right"]}"#;
    // The prompt opens the reasoning, or the model may, or neither.
    for (name, end) in [("open", "<think>"), ("may", "{# <think> #}"), ("none", "")] {
        let file = model.file(name);
        std::fs::write(&file, template(end)).unwrap();
        let file = file.to_str().unwrap();
        let free = ["--chat-template", file, "--reasoning-budget", "5", "-j", schema];
        let text = answer(&model, &free);
        assert!(["\"left\"\n", "\"right\"\n"].contains(&text.as_str()), "{name}: {text:?}");
    }
}

#[test]
fn a_bad_form_is_refused_before_the_model_is_opened() {
    for (args, expected) in [
        (["-j", "{"], "the JSON schema is not valid JSON"),
        (["-j", r#"{"type": "strng"}"#], "type: there is no type \"strng\""),
        (["-j", "[]"], "a JSON schema is an object, true or false"),
        (["--grammar", "root ::= item"], "line 1 of the GBNF grammar: the rule item"),
        (["--grammar-file", "missing.gbnf"], "missing.gbnf: No such file or directory"),
    ] {
        let out = moeba().args(["run", "missing.gguf", "-p", "Hi"]).args(args).output().unwrap();
        failed(&out, 1, &[expected]);
    }
}
