//! `embed` on a model made here: numbers that lead to the logits, the formats of llama-embedding,
//! and what it says about bad input.

use common::Npy;
use common::cli::{Model, Tiny, failed, moeba, on, succeeded, tiny};
use common::edits::{File, Tensor};
use serde_json::Value;
use std::io::Write;
use std::process::Stdio;

fn embed(model: &Model, args: &[&str]) -> String {
    succeeded(&on(model, "embed", args)).to_owned()
}

fn rows(text: &str) -> Vec<Vec<f32>> {
    let row = |line: &str| line.split(' ').map(|x| x.parse().unwrap()).collect();
    text.lines().map(row).collect()
}

#[test]
fn outputs_lead_to_the_logits() {
    let model = tiny(Tiny::default());
    let raw =
        ["--embd-normalize", "-1", "--embd-output-format", "raw", "-ctk", "f32", "-ctv", "f32"];
    let outputs = rows(&embed(&model, &[&["Hello", "--pooling", "none"], &raw[..]].concat()));
    let ids = "Hello".bytes().map(|b| b.to_string()).collect::<Vec<_>>().join(",");
    let file = model.file("logits.npy");
    let args = ["--tokens", &ids, "-o", file.to_str().unwrap(), "-ctk", "f32", "-ctv", "f32"];
    succeeded(&on(&model, "logits", &args));
    let logits = Npy::read(&file).f32s();
    let tensors = File::read(&model.path);
    let name = ["output.weight", "token_embd.weight"];
    let name = name.iter().find(|name| tensors.tensors.iter().any(|t| t.name == **name)).unwrap();
    let head = tensors.tensor(name).f32s();
    let n_vocab = logits.len() / 5;
    for (output, logits) in outputs.iter().zip(logits.chunks(n_vocab)) {
        for (row, logit) in head.chunks(output.len()).zip(logits) {
            let sum: f32 = row.iter().zip(output).map(|(a, b)| a * b).sum();
            assert!((sum - logit).abs() < 1e-4, "{sum} {logit}");
        }
    }
    // The last one is what a decoder's texts are pooled to.
    let last = rows(&embed(&model, &[&["Hello"], &raw[..]].concat()));
    assert_eq!(last, outputs[4..]);
    let mean = rows(&embed(&model, &[&["Hello", "--pooling", "mean"], &raw[..]].concat()));
    let expected: f32 = outputs.iter().map(|row| row[3]).sum::<f32>() / 5.0;
    assert!((mean[0][3] - expected).abs() < 1e-5);
}

#[test]
fn vectors_do_not_depend_on_batches_or_threads() {
    let model = tiny(Tiny::default());
    let text = "A branch is a name for a line of work.";
    let of = |args: &[&str]| embed(&model, &[&[text, "--pooling", "mean"], args].concat());
    let expected = of(&["-t", "1"]);
    for args in [&["-ub", "1"][..], &["-ub", "7", "-t", "2"], &["--ram", "50%"], &["-c", "100"]] {
        assert_eq!(of(args), expected, "{args:?}");
    }
}

#[test]
fn formats_are_those_of_llama_embedding() {
    let model = tiny(Tiny::default());
    let one = embed(&model, &["Hello"]);
    assert!(one.starts_with("embedding 0: ") && one.lines().count() == 1, "{one}");
    let n = one.split_whitespace().count() - 2;
    let two = embed(&model, &["-p", "Hello\\nworld"]);
    let lines: Vec<&str> = two.lines().collect();
    assert!(lines[1].starts_with("embedding 1: "), "{two}");
    assert_eq!(lines[0].split_whitespace().count() - 2, n.min(16), "{two}");
    assert_eq!(lines[3], "cosine similarity matrix:", "{two}");
    assert!(lines[6].starts_with("  1.00 ") && lines[6].ends_with("Hello"), "{two}");

    let file = model.file("texts");
    std::fs::write(&file, "Hello\nworld\n").unwrap();
    let by_file = ["-f", file.to_str().unwrap()];
    assert_eq!(embed(&model, &by_file), two);
    assert_eq!(embed(&model, &["Hello", "world"]), two);
    assert_eq!(embed(&model, &["-p", "Hello##world", "--embd-separator", "##"]), two);
    let mut command = moeba();
    command.arg("embed").arg(&model.path).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"Hello\nworld\n").unwrap();
    assert_eq!(succeeded(&child.wait_with_output().unwrap()), two);

    let json: Value = {
        let text = embed(&model, &[&by_file[..], &["--embd-output-format", "json+"]].concat());
        serde_json::from_str(&text).unwrap()
    };
    assert_eq!((&json["object"], &json["data"][1]["index"]), (&"list".into(), &1.into()));
    assert_eq!(json["data"][1]["embedding"].as_array().unwrap().len(), n);
    assert_eq!(json["cosineSimilarity"][0][0], 1.0);
    assert_eq!(json["cosineSimilarity"][0][1], json["cosineSimilarity"][1][0]);
    let plain = embed(&model, &[&by_file[..], &["--embd-output-format", "json"]].concat());
    assert!(serde_json::from_str::<Value>(&plain).unwrap()["cosineSimilarity"].is_null());
    let array = embed(&model, &[&by_file[..], &["--embd-output-format", "array"]].concat());
    let array: Vec<Vec<f64>> = serde_json::from_str(&array).unwrap();
    for row in &array {
        let size: f64 = row.iter().map(|x| x * x).sum();
        assert!((size - 1.0).abs() < 1e-5, "{size}");
    }
    let whole = ["--embd-normalize", "0", "--embd-output-format", "raw"];
    let whole = rows(&embed(&model, &[&by_file[..], &whole].concat()));
    assert!(whole[0].iter().any(|x| x.abs() == 32760.0), "{whole:?}");
    let taxicab = ["--embd-normalize", "1", "--embd-output-format", "raw"];
    let sum: f32 =
        rows(&embed(&model, &[&by_file[..], &taxicab].concat()))[0].iter().map(|x| x.abs()).sum();
    assert!((sum - 1.0).abs() < 1e-4, "{sum}");
}

#[test]
fn a_command_line_of_llama_embedding_works() {
    let model = tiny(Tiny::default());
    let args = [
        "embed",
        "-m",
        model.path.to_str().unwrap(),
        "-p",
        "Hello",
        "--pooling",
        "mean",
        "--embd-normalize",
        "2",
        "--embd-output-format",
        "json",
        "-ngl",
        "0",
        "-fa",
        "auto",
        "--attention",
        "causal",
        "-c",
        "64",
        "-b",
        "32",
        "-ub",
        "32",
        "--no-warmup",
    ];
    let json: Value =
        serde_json::from_str(succeeded(&moeba().args(args).output().unwrap())).unwrap();
    assert_eq!(json["data"].as_array().unwrap().len(), 1);
    let refused = on(&model, "embed", &["Hello", "--attention", "non-causal"]);
    failed(&refused, 2, &["--attention", "each token sees"]);
    failed(&on(&model, "run", &["-p", "x", "--embd-normalize", "2"]), 2, &["moeba embed"]);
    failed(&on(&model, "run", &["-p", "x", "--pooling", "mean"]), 2, &["moeba embed"]);
    failed(&on(&model, "run", &["-p", "x", "--embedding"]), 2, &["moeba serve"]);
}

#[test]
fn what_makes_no_sense_is_refused_in_a_sentence() {
    let model = tiny(Tiny::default());
    let fails = |args: &[&str], code: i32, words: &[&str]| {
        failed(&on(&model, "embed", args), code, words);
    };
    fails(&["x", "--pooling", "max"], 2, &["--pooling", "none, mean, cls, last or rank"]);
    fails(&["x", "--embd-normalize", "-2"], 2, &["--embd-normalize"]);
    fails(&["x", "--embd-output-format", "xml"], 2, &["--embd-output-format", "json+"]);
    fails(&["x", "-p", "y"], 2, &["--prompt"]);
    fails(&["-p", "y", "--embd-separator", ""], 2, &["--embd-separator"]);
    fails(&["Hello", "-c", "3"], 1, &["5 tokens", "context of 3"]);
    fails(&["-p", "a\\n\\nb"], 1, &["text 2", "no tokens"]);
    fails(&["-p", ""], 1, &["no tokens"]);
    fails(&["a\tb", "--pooling", "rank"], 1, &["no head that ranks"]);
    fails(&["-f", "/nonexistent"], 1, &["/nonexistent"]);
}

#[test]
fn a_reranker_scores_documents() {
    let model = tiny(Tiny::default());
    let mut file = File::read(&model.path);
    let n = file.tensor("output_norm.weight").dims[0];
    let values: Vec<f32> = (0..2 * n).map(|i| (i % 7) as f32 - 3.0).collect();
    file.tensors.push(Tensor::of("cls.output.weight", &[n, 2], &values));
    file.set("qwen3moe.pooling_type", 4u32);
    let labels = vec!["yes".to_owned(), "no".to_owned()];
    file.set("qwen3moe.classifier.output_labels", labels);
    file.set("tokenizer.chat_template.rerank", "{query}? {document}!");
    file.write(&model.path);
    let out = embed(&model, &["-p", "cat\\tmat\\ncat\\tdog"]);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 4, "{out}");
    assert!(lines[0].starts_with("rerank score 0: ") && lines[0].ends_with(" [yes]"), "{out}");
    assert!(lines[3].starts_with("rerank score 1: ") && lines[3].ends_with(" [no]"), "{out}");
    let score = |line: &str| line.split_whitespace().nth(3).unwrap().parse::<f32>().unwrap();
    assert!((score(lines[0]) + score(lines[1]) - 1.0).abs() < 0.002, "{out}");
    let other = ["cat##mat", "--cls-separator", "##"];
    assert_eq!(embed(&model, &other).lines().next(), Some(lines[0]));
    failed(&on(&model, "embed", &["cat"]), 1, &["cat", "--cls-separator"]);
}
