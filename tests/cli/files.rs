//! Messages about files: models that are damaged, models without a vocabulary, token ids, messages
//! and chat templates.

use common::cli::{Model, Tiny, failed, moeba, on, stderr, stdout, succeeded, tiny};
use common::convert_golden;
use common::edits::{File, Tensor};
use moeba::gguf::{OwnedValue, TensorType};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;

/// A file like this one but for a change.
fn changed(source: &Path, name: &str, change: impl FnOnce(&mut File)) -> PathBuf {
    let mut file = File::read(source);
    change(&mut file);
    let path = source.with_file_name(format!("{name}.gguf"));
    file.write(&path);
    path
}

fn command(name: &str, model: &Path, args: &[&str]) -> Output {
    moeba().arg(name).arg(model).args(args).output().unwrap()
}

fn run(model: &Path) -> Output {
    command("run", model, &["-p", "a b", "-n", "1", "-c", "32"])
}

fn check(model: &Path) -> Output {
    command("inspect", model, &["--check"])
}

/// The one sentence that a command fails with.
#[track_caller]
fn sentence(out: &Output) -> String {
    failed(out, 1, &[]);
    stderr(out).lines().find(|line| line.starts_with("error: ")).unwrap().to_owned()
}

type Change = Box<dyn Fn(&mut File)>;

fn set(key: &'static str, value: impl Into<OwnedValue>) -> Change {
    let value = value.into();
    Box::new(move |file| file.set(key, value.clone()))
}

fn drop_key(key: &'static str) -> Change {
    Box::new(move |file| file.drop_key(key))
}

fn cut(name: &'static str) -> Change {
    Box::new(move |file| {
        let shorter = file.take(name).cut().unwrap();
        file.tensors.push(shorter);
    })
}

/// Damage, and words of the sentence that tells of it.
fn damages() -> Vec<(Change, &'static str)> {
    let tokens = |n: usize| (0..n).map(|i| format!("<{i}>")).collect::<Vec<_>>();
    let up = "blk.1.ffn_up_exps.weight";
    vec![
        (set("qwen3moe.expert_feed_forward_length", 31u32), "expected 32, as in blk.0.ffn_gate"),
        (set("qwen3moe.expert_feed_forward_length", vec![32u32, 31]), "expected 32, as in blk.1"),
        (set("qwen3moe.expert_used_count", 9u32), "at most expert_count = 8"),
        (set("qwen3moe.expert_used_count", 0u32), "expert_used_count"),
        (set("qwen3moe.embedding_length", 31u32), "token_embd.weight"),
        (set("qwen3moe.block_count", 3u32), "blk.2."),
        (set("qwen3moe.attention.layer_norm_rms_epsilon", 0.0f32), "layer_norm_rms_epsilon"),
        (drop_key("qwen3moe.attention.head_count"), "attention.head_count"),
        (drop_key("general.architecture"), "general.architecture"),
        (set("general.architecture", "mamba9"), "mamba9"),
        (Box::new(move |file| drop(file.take(up))), up),
        (cut(up), up),
        (cut("blk.0.attn_k.weight"), "blk.0.attn_k.weight"),
        (
            Box::new(|file| {
                let tensor = Tensor { ty: TensorType::I32, ..file.take("blk.0.attn_q.weight") };
                file.tensors.push(tensor);
            }),
            "got I32",
        ),
        (set("tokenizer.ggml.model", "bert"), "tokenizer.ggml.model"),
        (set("tokenizer.ggml.pre", "nonesuch"), "tokenizer.ggml.pre"),
        (drop_key("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"),
        (set("tokenizer.ggml.tokens", vec![1u32; 259]), "an array of strings"),
        (set("tokenizer.ggml.tokens", tokens(260)), "tokenizer.ggml."),
        (set("tokenizer.ggml.token_type", vec![1i32; 258]), "259 types, one a token, got 258"),
        (set("tokenizer.ggml.token_type", vec![1i32; 260]), "259 types, one a token, got 260"),
        (set("tokenizer.ggml.token_type", vec![1.0f32; 259]), "tokenizer.ggml.token_type"),
        (set("tokenizer.ggml.scores", vec![0.0f32; 7]), "259 scores, one a token, got 7"),
        (set("tokenizer.ggml.scores", vec![0i32; 259]), "tokenizer.ggml.scores"),
        (set("tokenizer.ggml.merges", vec![7u32]), "tokenizer.ggml.merges"),
        (set("tokenizer.ggml.merges", vec!["nospace"]), "two parts with a space"),
        (drop_key("tokenizer.ggml.merges"), "tokenizer.ggml.merges"),
        (set("tokenizer.ggml.eos_token_id", 259u32), "a token id below 259"),
        (set("tokenizer.ggml.padding_token_id", 99_999u32), "padding_token_id"),
        (set("tokenizer.ggml.add_bos_token", 1u32), "tokenizer.ggml.add_bos_token"),
        (set("tokenizer.chat_template", 7u32), "tokenizer.chat_template"),
        (set("tokenizer.chat_template", "{% if %}"), "chat template"),
    ]
}

/// The other way round: what `check` accepts runs.
#[test]
fn check_refuses_what_run_refuses_with_the_same_sentence() {
    let model = tiny(Tiny { chat: true, ..Tiny::default() });
    succeeded(&run(&model.path));
    succeeded(&check(&model.path));
    for (i, (change, words)) in damages().into_iter().enumerate() {
        let damaged = changed(&model.path, &format!("damaged{i}"), change);
        let (of_run, of_check) = (sentence(&run(&damaged)), sentence(&check(&damaged)));
        assert_eq!(of_run, of_check);
        assert!(of_run.contains(words), "no {words:?} in {of_run}");
        assert!(of_run.contains(&format!("damaged{i}.gguf")), "{of_run}");
        // Without --check the file is shown as it is.
        succeeded(&command("inspect", &damaged, &["--json"]));
    }
    std::fs::write(&model.path, &std::fs::read(&model.path).unwrap()[..4000]).unwrap();
    let (of_run, of_check) = (sentence(&run(&model.path)), sentence(&check(&model.path)));
    assert_eq!(of_run, of_check);
    assert!(of_run.contains("the file ends within its header: download it again"), "{of_run}");
}

#[test]
fn sound_models_of_each_kind_pass_the_check() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["arctic", "deepseek_v3", "gpt_oss", "mixtral", "phimoe", "qwen3", "qwen35moe"] {
        let out = check(&convert_golden(name, "q8_0", dir.path()));
        let text = succeeded(&out);
        let last = text.lines().last().unwrap();
        assert!(last.starts_with("OK: ") && last.ends_with("run accepts the file"), "{last}");
        assert!(text.lines().count() < 15, "no tables: {text}");
        assert!(stderr(&out).is_empty(), "{name}: {}", stderr(&out));
    }
}

#[test]
fn inspect_leads_with_what_people_ask() {
    let model = tiny(Tiny { chat: true, ..Tiny::default() });
    let file = changed(&model.path, "licensed", |file| {
        file.set("general.license", "apache-2.0");
        file.set("general.name", "A tiny one");
        file.set("general.file_type", 15u32);
    });
    let out = command("inspect", &file, &[]);
    let lines: Vec<&str> = succeeded(&out).lines().skip(1).take(10).collect();
    let words: Vec<Vec<&str>> = lines.iter().map(|l| l.split_whitespace().collect()).collect();
    let line = |i: usize| words[i].join(" ");
    assert_eq!(line(0), "architecture qwen3moe");
    assert_eq!(line(1), "name A tiny one");
    // Two layers of eight experts of 3 × 32 × 32, of which a token uses two.
    let (all, unused) = (72_576.0, 2.0 * 6.0 * 3.0 * 1024.0);
    let k = |n: f64| format!("{:.1} K", n / 1e3);
    assert_eq!(line(2), format!("parameters {}, {} active per token", k(all), k(all - unused)));
    assert_eq!(line(3), "context 256 tokens");
    assert!(line(4).starts_with("file type Q4_K_M, "), "{}", line(4));
    // Two layers, two heads of 8 for keys and values, in two bytes.
    assert_eq!(line(5), "KV cache 128 B per token (f16)");
    assert_eq!(line(6), "experts 8 per layer, 2 used per token");
    assert_eq!(line(7), "vocabulary 259 tokens (gpt2)");
    assert_eq!(line(8), "chat template yes");
    assert_eq!(line(9), "license apache-2.0");
    let out = command("inspect", &file, &["--json"]);
    let json: Value = serde_json::from_str(succeeded(&out)).unwrap();
    assert_eq!(json["summary"]["n_params"], all as u64);
    assert_eq!(json["summary"]["n_active_params"], (all - unused) as u64);
    assert_eq!(json["summary"]["kv_bytes_per_token"], 128);
    assert_eq!(json["summary"]["file_type"], "Q4_K_M");
    let absurd = changed(&model.path, "absurd", |file| {
        for key in ["block_count", "attention.head_count", "attention.head_count_kv"] {
            file.set(&format!("qwen3moe.{key}"), 1u32 << 24);
        }
        for key in ["attention.key_length", "attention.value_length", "expert_used_count"] {
            file.set(&format!("qwen3moe.{key}"), 1u32 << 24);
        }
    });
    succeeded(&command("inspect", &absurd, &[]));
    // Of a file that is no model it says what there is.
    let other = changed(&model.path, "other", |file| file.keys.clear());
    let out = command("inspect", &other, &[]);
    assert!(succeeded(&out).contains("mostly F32"), "{}", stdout(&out));
}

#[test]
fn a_file_without_vocabulary_serves_what_needs_no_text() {
    let model = tiny(Tiny { chat: true, ..Tiny::default() });
    let tokens = ["--tokens", "1,2,3", "-o"];
    let npy = model.file("a.npy");
    let logits = |file: &Path| {
        let args = [&tokens[..], &[npy.to_str().unwrap()]].concat();
        succeeded(&command("logits", file, &args));
        std::fs::read(&npy).unwrap()
    };
    let text = model.file("text");
    std::fs::write(&text, "words ".repeat(200)).unwrap();
    let text = text.to_str().unwrap();
    let messages = model.file("messages.json");
    std::fs::write(&messages, r#"[{"role": "user", "content": "hi"}]"#).unwrap();
    let expected = logits(&model.path);
    for name in [Some("none"), Some("no_vocab"), Some("test"), None] {
        let file = changed(&model.path, "mute", |file| {
            file.keys.retain(|(key, _)| !key.starts_with("tokenizer."));
            if let Some(name) = name {
                // As llama.cpp saves them.
                file.set("tokenizer.ggml.model", name);
                file.set("tokenizer.ggml.tokens", vec![""; 259]);
                file.set("tokenizer.ggml.token_type", vec![0i32; 259]);
                file.set("tokenizer.ggml.merges", Vec::<String>::new());
            }
        });
        assert!(logits(&file) == expected, "{name:?}");
        let bench = ["-p", "4", "-n", "2", "-r", "1", "--no-machine"];
        succeeded(&command("bench", &file, &bench));
        let out = check(&file);
        assert!(
            succeeded(&out).contains("only logits, bench and inspect work"),
            "{}",
            stdout(&out)
        );
        let trace = model.file("trace");
        let trace = ["-f", text, "-o", trace.to_str().unwrap()];
        let refused: [(&str, &[&str]); 6] = [
            ("run", &["-p", "hi"]),
            ("tokenize", &["hi"]),
            ("detokenize", &["1"]),
            ("perplexity", &["-f", text, "-c", "16"]),
            ("render", &[messages.to_str().unwrap()]),
            ("record", &trace),
        ];
        for (command, args) in refused {
            let mut program = moeba();
            if command == "record" {
                program.arg("trace");
            }
            let out = program.arg(command).arg(&file).args(args).output().unwrap();
            let got = name.map_or("nothing".into(), |name| format!("`{name}`"));
            let words = format!("got {got}: the file has no vocabulary");
            failed(&out, 1, &[&words, "mute.gguf", "logits, bench and inspect work"]);
        }
    }
}

/// A file saved by llama.cpp may hold factors that other architectures have.
#[test]
fn tensors_that_are_not_used_are_told() {
    let model = tiny(Tiny::default());
    let file = changed(&model.path, "more", |file| {
        file.tensors.push(Tensor::of("blk.0.attn_rot.weight", &[1], &[0.5]));
    });
    let out = run(&file);
    succeeded(&out);
    assert!(stderr(&out).contains("blk.0.attn_rot.weight"), "{}", stderr(&out));
    // A factor of an input changes nothing.
    let file = changed(&model.path, "input", |file| {
        file.tensors.push(Tensor::of("blk.0.attn_q.input_scale", &[1], &[0.5]));
    });
    assert!(!stderr(&run(&file)).contains("not used"));
    assert!(stderr(&run(&model.path)).lines().all(|line| !line.contains("not used")));
}

#[test]
fn token_ids_and_texts_are_told_from_flags() {
    let model = tiny(Tiny::default());
    let wrong = |name: &str, args: &[&str], words: &[&str]| {
        let out = command(name, &model.path, args);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", stderr(&out));
        for word in words {
            assert!(stderr(&out).contains(word), "no {word:?} in {}", stderr(&out));
        }
    };
    wrong("tokenize", &["-x"], &["-x"]);
    for ids in [&["1,,2"][..], &["1,", ",2"], &[",1"], &["1", "x"], &["1.5"], &["--", "-1"]] {
        wrong("detokenize", ids, &["token ids: expected numbers like 1,2,3, got "]);
    }
    let ids = |args: &[&str]| succeeded(&command("tokenize", &model.path, args)).to_owned();
    assert_eq!(ids(&["--", "-x"]), "45,120\n");
    let text = |args: &[&str]| succeeded(&command("detokenize", &model.path, args)).to_owned();
    for args in [&["97,98,99"][..], &["97", "98", "99"], &["97,98", "99"], &["[97, 98, 99]"]] {
        assert_eq!(text(args), "abc", "{args:?}");
    }
}

fn render(model: &Model, messages: &str, args: &[&str]) -> Output {
    let file = model.file("messages.json");
    std::fs::write(&file, messages).unwrap();
    on(model, "render", &[&[file.to_str().unwrap()], args].concat())
}

#[test]
fn errors_of_messages_name_the_file_and_the_place() {
    let model = tiny(Tiny { chat: true, ..Tiny::default() });
    let cases = [
        ("[{", "line 1 column 2: expected JSON, got EOF while parsing an object"),
        ("7", "the file: expected a list or an object"),
        ("{}", "messages: expected a list of messages"),
        (r#"{"messages": 7}"#, "messages: expected a list of messages, got a number"),
        (r#"["hi"]"#, "messages[0]: expected an object, got a text"),
        (r#"[{"content": "a"}]"#, "messages[0].role: expected a text, got nothing"),
        (r#"[{"role": "user"}]"#, "messages[0].content: expected a text or a list of parts, got"),
        (r#"[{"role": "user", "content": null}]"#, "messages[0].content: expected a text or"),
        (r#"[{"role": "user", "content": [{"type": "text"}]}]"#, "messages[0].content[0].text"),
    ];
    for (messages, words) in cases {
        let out = render(&model, messages, &[]);
        failed(&out, 1, &[&format!("messages.json: {words}")]);
        assert!(stderr(&out).matches("line 1").count() < 2, "{}", stderr(&out));
    }
}

#[test]
fn parts_of_text_reach_templates_that_read_text_alone() {
    let model = tiny(Tiny { chat: true, ..Tiny::default() });
    let parts = r#"[{"role": "user", "content": [{"type": "text", "text": "one"},
                    {"type": "text", "text": "two"}]}]"#;
    let plain = r#"[{"role": "user", "content": "one\ntwo"}]"#;
    let expected = succeeded(&render(&model, plain, &[])).to_owned();
    assert!(expected.contains("one\ntwo"), "{expected}");
    assert_eq!(succeeded(&render(&model, parts, &[])), expected);
    // One that concatenates, and one that takes lists and gets them.
    let own = |source: &str| {
        let path = model.file("own.jinja");
        std::fs::write(&path, source).unwrap();
        let out = render(&model, parts, &["--chat-template", path.to_str().unwrap()]);
        succeeded(&out).to_owned()
    };
    assert_eq!(own("{% for m in messages %}{{ '>' + m.content }}{% endfor %}"), ">one\ntwo");
    let list =
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}";
    assert_eq!(own(list), "one|two|");
}

#[test]
fn errors_of_templates_name_the_file() {
    let model = tiny(Tiny { chat: true, ..Tiny::default() });
    let hi = r#"[{"role": "user", "content": "hi"}]"#;
    let path = model.file("own.jinja");
    let file = path.to_str().unwrap();
    for source in ["{% if %}", "{{ messages + 7 }}", "{{ raise_exception('no') }}"] {
        std::fs::write(&path, source).unwrap();
        let words = "own.jinja: the chat template";
        failed(&render(&model, hi, &["--chat-template", file]), 1, &[words]);
        let out = on(&model, "run", &["-p", "hi", "-n", "1", "--chat-template-file", file]);
        failed(&out, 1, &[words]);
    }
    let broken = changed(&model.path, "broken", |f| f.set("tokenizer.chat_template", "{{ 1 + "));
    failed(&run(&broken), 1, &["broken.gguf: the chat template"]);
}
