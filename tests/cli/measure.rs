//! `logits`, `perplexity` and `bench` on a model made here: shapes, keys, agreement with each
//! other, and what they say about bad input.

use common::Npy;
use common::cli::{Model, N_EXPERTS, N_EXPERTS_USED, N_LAYERS, N_VOCAB, Tiny};
use common::cli::{failed, moeba, on, succeeded, tiny};
use serde_json::Value;
use std::process::Output;

/// Three matrices of 32 by 32 floats.
const EXPERT_BYTES: u64 = 3 * 32 * 32 * 4;

const TEXT: &str = "A branch is a name for a line of work. Naming is cheap, so make many of them.";

fn logits(model: &Model, tokens: &[u32], args: &[&str]) -> Npy {
    let out = model.file("logits.npy");
    let list = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let args = [&["--tokens", &list, "-o", out.to_str().unwrap()], args].concat();
    assert_eq!(succeeded(&on(model, "logits", &args)), "");
    Npy::read(&out)
}

#[test]
fn logits_are_an_array_of_tokens_by_vocabulary() {
    let model = tiny(Tiny::default());
    let experts = model.file("experts.npy");
    let array = logits(&model, &[1, 2, 258], &["--experts", experts.to_str().unwrap()]);
    assert_eq!(array.shape, [3, N_VOCAB as usize]);
    assert!(array.f32s().iter().all(|l| l.is_finite()));
    let experts = Npy::read(&experts);
    assert_eq!(experts.shape, [N_LAYERS as usize, 3, N_EXPERTS_USED as usize]);
    let ids = experts.i32s();
    assert!(ids.iter().all(|id| (0..N_EXPERTS as i32).contains(id)), "{ids:?}");
    assert!(ids.chunks(2).all(|pair| pair[0] != pair[1]), "{ids:?}");
}

#[test]
fn logits_do_not_depend_on_threads_or_batches() {
    let model = tiny(Tiny::default());
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 256).collect();
    let bits = |args: &[&str]| {
        let values = logits(&model, &tokens, args).f32s();
        values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let reference = bits(&["-t", "1", "-ub", "64"]);
    for args in [&["-t", "2", "-ub", "64"][..], &["-t", "1", "-ub", "1"], &["-b", "7", "-t", "3"]] {
        assert!(bits(args) == reference, "{args:?}");
    }
}

#[test]
fn logits_refuse_what_makes_no_sense() {
    let model = tiny(Tiny::default());
    let out = model.file("x.npy");
    let out = out.to_str().unwrap();
    let with = |tokens: &str, more: &[&str]| {
        on(&model, "logits", &[&["--tokens", tokens, "-o", out], more].concat())
    };
    failed(&with("1,259", &[]), 1, &["259", "259 tokens"]);
    failed(&with("1,4294967295", &[]), 1, &["4294967295"]);
    for tokens in ["", "1,,2", "-1", "1;2", "4294967296", "0x10", "1 2"] {
        failed(&with(tokens, &[]), 2, &["--tokens"]);
    }
    failed(&with("1", &["--experts", out]), 2, &["same file"]);
    failed(&with("1", &["-t", "0"]), 2, &["--threads"]);
    failed(&with("1", &["-ub", "0"]), 2, &["--ubatch-size"]);
    failed(&with("1", &["-ctk", "q6_k"]), 2, &["f32, f16, bf16, q8_0", "q5_0 or q5_1"]);
    for ty in ["q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"] {
        let names = [&*format!("--cache-type-v {ty}"), "multiple of 32", "got 8"];
        failed(&with("1", &["-ctv", ty]), 1, &names);
    }
    failed(&on(&model, "logits", &["--tokens", "1", "-o", ""]), 2, &["--output"]);
    failed(&on(&model, "logits", &["--tokens", "1", "-o", "/dev/null"]), 1, &["/dev/null"]);
    let nowhere = model.file("no/such/x.npy");
    let nowhere = nowhere.to_str().unwrap();
    failed(&on(&model, "logits", &["--tokens", "1", "-o", nowhere]), 1, &[nowhere]);
    assert!(!model.file("x.npy").exists(), "a failed run left its file");
    let left = std::fs::read_dir(model.dir.path()).unwrap().count();
    assert_eq!(left, 1, "a failed run left a temporary file");
}

#[test]
fn models_that_are_none_are_named_in_one_sentence() {
    let model = tiny(Tiny::default());
    let whole = std::fs::read(&model.path).unwrap();
    let bad = model.file("bad.gguf");
    let bad_name = bad.to_str().unwrap();
    let run = |path: &str| moeba().args(["perplexity", path, "-f", path]).output().unwrap();
    let cases: &[(&[u8], &str)] = &[
        (b"", "bad.gguf"),
        (b"<!DOCTYPE html><html>", "bad.gguf"),
        (&whole[..100], "bad.gguf"),
        (&whole[..whole.len() - 1], "bad.gguf"),
    ];
    for (bytes, word) in cases {
        std::fs::write(&bad, bytes).unwrap();
        // The text is read first, so that it must be one.
        let out = moeba().args(["bench", bad_name, "-p", "1", "-n", "1"]).output().unwrap();
        failed(&out, 1, &[word]);
        assert!(out.stdout.is_empty());
    }
    failed(&run("/nonexistent.gguf"), 1, &["/nonexistent.gguf"]);
    failed(&run(model.dir.path().to_str().unwrap()), 1, &["irectory"]);
    failed(&run(""), 2, &["MODEL"]);
    failed(&moeba().args(["bench"]).output().unwrap(), 2, &["MODEL"]);
}

#[test]
fn the_model_may_be_a_flag_or_an_environment_variable() {
    let model = tiny(Tiny::default());
    let args = ["bench", "-p", "2", "-n", "0", "-r", "1", "-o", "jsonl"];
    let flag = moeba().args(args).arg("-m").arg(&model.path).output().unwrap();
    assert!(succeeded(&flag).contains("\"n_prompt\":2"));
    let variable = moeba().args(args).env("MOEBA_MODEL", &model.path).output().unwrap();
    assert!(succeeded(&variable).contains("\"n_prompt\":2"));
}

/// Perplexity from `logits`, by the definition, over all whole windows of the text's bytes.
fn perplexity_by_logits(model: &Model, n_ctx: usize) -> f64 {
    let (mut nll, mut n) = (0.0, 0);
    for window in TEXT.as_bytes().chunks_exact(n_ctx) {
        let tokens = tokens_of(window);
        let array = logits(model, &tokens, &[]).f32s();
        for at in n_ctx / 2..n_ctx - 1 {
            let row = &array[at * N_VOCAB as usize..][..N_VOCAB as usize];
            let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
            nll += sum.ln() - f64::from(row[tokens[at + 1] as usize]);
            n += 1;
        }
    }
    (nll / f64::from(n)).exp()
}

/// The tiny model's vocabulary is the bytes in order.
fn tokens_of(text: &[u8]) -> Vec<u32> {
    text.iter().map(|&b| b.into()).collect()
}

#[test]
fn perplexity_is_what_the_logits_say() {
    let model = tiny(Tiny::default());
    let file = model.file("text");
    std::fs::write(&file, TEXT).unwrap();
    let stats = model.file("stats.json");
    let run = |args: &[&str]| {
        let fixed = ["-f", file.to_str().unwrap(), "--stats", stats.to_str().unwrap()];
        let out = on(&model, "perplexity", &[&fixed[..], args].concat());
        let text = succeeded(&out).to_owned();
        let json: Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
        (text, json["perplexity"].as_f64().unwrap(), json)
    };
    let (text, ppl, json) = run(&["-c", "16"]);
    assert!(text.starts_with("[1]") && text.contains("Final estimate: PPL = "), "{text}");
    assert!(text.contains(" +/- ") && text.contains("bits per byte"), "{text}");
    let expected = perplexity_by_logits(&model, 16);
    assert!((ppl / expected - 1.0).abs() < 1e-5, "{ppl} {expected}");
    // Every token is a byte here.
    assert_eq!(json["scored_tokens"], 4 * 7);
    let bits = json["bits_per_byte"].as_f64().unwrap();
    assert!((bits - ppl.log2()).abs() < 1e-9, "{bits} {ppl}");
    // Token by token it is the same computation.
    let (text, one_by_one, json) = run(&["-c", "16", "-b", "1"]);
    assert_eq!(one_by_one.to_bits(), ppl.to_bits());
    assert!(text.contains("evaluated one by one"), "{text}");
    assert_eq!(json["decode_tokens_per_second"], json["tokens_per_second"]);
    for key in ["hit_rate", "read_bytes", "stall_ms_per_token", "demand_wait_histogram"] {
        assert!(json.get(key).is_some_and(Value::is_null), "{key}: {json}");
    }
    assert_eq!(json["resident_expert_bytes_max"], EXPERT_BYTES * N_EXPERTS * N_LAYERS);
    let (text, _, json) = run(&["-c", "16", "--chunks", "1"]);
    assert!(json.get("decode_tokens_per_second").is_none(), "{json}");
    assert!(json["scored_tokens"] == 7 && !text.contains("[2]"), "{text}");
}

#[test]
fn perplexity_says_why_it_cannot() {
    let model = tiny(Tiny::default());
    let file = model.file("text");
    let name = file.to_str().unwrap();
    std::fs::write(&file, TEXT).unwrap();
    failed(&on(&model, "perplexity", &["-f", name]), 1, &["text", "77 tokens", "512"]);
    failed(&on(&model, "perplexity", &["-f", name, "-c", "2"]), 1, &["at least 4"]);
    failed(&on(&model, "perplexity", &["-f", name, "-c", "-5"]), 2, &["--ctx-size"]);
    failed(&on(&model, "perplexity", &["-f", name, "--chunks", "0"]), 2, &["--chunks"]);
    failed(&on(&model, "perplexity", &[]), 2, &["--file"]);
    std::fs::write(&file, b"abc\xff").unwrap();
    failed(&on(&model, "perplexity", &["-f", name]), 1, &["byte 3", "UTF-8"]);
    std::fs::write(&file, b"").unwrap();
    failed(&on(&model, "perplexity", &["-f", name]), 1, &["0 tokens"]);
}

fn bench(model: &Model, args: &[&str]) -> String {
    succeeded(&on(model, "bench", args)).to_owned()
}

#[test]
fn bench_has_the_keys_of_llama_bench_and_ours() {
    let model = tiny(Tiny::default());
    let args = ["-p", "4,8", "-n", "3", "-pg", "4,2", "-r", "2", "-t", "1,2", "-o", "json"];
    let args = [&args[..], &["--no-machine"]].concat();
    let rows: Vec<Value> = serde_json::from_str(&bench(&model, &args)).unwrap();
    let tests = |row: &Value| (row["n_prompt"].as_u64().unwrap(), row["n_gen"].as_u64().unwrap());
    let expected = [(4, 0), (8, 0), (0, 3), (4, 2)];
    assert_eq!(rows[..4].iter().map(tests).collect::<Vec<_>>(), expected);
    assert_eq!(rows.len(), 8);
    assert!(rows[3]["n_threads"] == 1 && rows[4]["n_threads"] == 2);
    for row in &rows {
        for key in ["avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "model_size", "n_batch"] {
            assert!(row[key].is_number(), "{key}: {row}");
        }
        for key in ["model_filename", "model_type", "type_k", "type_v", "test_time", "cpu_info"] {
            assert!(row[key].is_string(), "{key}: {row}");
        }
        assert!(row["samples_ns"].as_array().unwrap().len() == 2);
        assert!(row["samples_ts"].as_array().unwrap().len() == 2);
    }
    for key in ["expert_budget_bytes", "policy", "hit_rate", "disk_gb_per_second"] {
        assert!(rows[0].get(key).is_some_and(Value::is_null), "{key}: {}", rows[0]);
    }
    // A decoded token touches its experts in every layer.
    let expert = EXPERT_BYTES * N_EXPERTS_USED * N_LAYERS;
    assert_eq!(rows[2]["expert_bytes_per_token"].as_f64(), Some(expert as f64));
    assert!(rows[2]["read_gb_per_second"].as_f64().unwrap() > 0.0);
    assert!(rows[0]["read_gb_per_second"].is_null());
}

/// Texts of a pass share experts, so each token of theirs touches fewer bytes.
#[test]
fn bench_decodes_several_texts_at_once() {
    let model = tiny(Tiny::default());
    let args = ["-p", "4", "-n", "3", "-r", "1", "--parallel", "1,5", "-o", "json"];
    let args = [&args[..], &["--no-machine"]].concat();
    let rows: Vec<Value> = serde_json::from_str(&bench(&model, &args)).unwrap();
    let n_texts: Vec<u64> = rows.iter().map(|row| row["n_parallel"].as_u64().unwrap()).collect();
    assert_eq!(n_texts, [1, 1, 5, 5]);
    let bytes = |row: &Value| row["expert_bytes_per_token"].as_f64().unwrap();
    assert!(bytes(&rows[3]) < bytes(&rows[1]), "{rows:?}");
    let weights = |row: &Value| row["weight_bytes_per_decoded_token"].as_f64().unwrap();
    assert!(weights(&rows[3]) < weights(&rows[1]), "{rows:?}");
}

#[test]
fn bench_says_how_many_tokens_it_computes_at_once() {
    let model = tiny(Tiny::default());
    let cases: [(&[&str], u64); 6] = [
        (&["--device", "cpu"], 2048),
        (&["--device", "cpu", "-b", "1500"], 1500),
        (&["--device", "cpu", "-b", "100"], 100),
        (&["--device", "cpu", "-ub", "3"], 3),
        (&["--device", "cpu", "-ub", "5000"], 2048),
        (&["--device", "emulated"], 512),
    ];
    for (flags, expected) in cases {
        let args = ["-p", "4", "-n", "0", "-r", "1", "--no-machine", "-o", "jsonl"];
        let row: Value = serde_json::from_str(&bench(&model, &[&args, flags].concat())).unwrap();
        assert_eq!(row["n_ubatch"], expected, "{flags:?}");
    }
}

#[test]
fn bench_writes_tables_and_lines() {
    let model = tiny(Tiny::default());
    let args = |format| ["-p", "4", "-n", "2", "-r", "1", "-d", "3", "--no-machine", "-o", format];
    let table = bench(&model, &args("md"));
    let rows = table.lines().filter(|line| line.starts_with('|'));
    let widths: Vec<usize> = rows.map(|l| l.chars().count()).collect();
    assert!(widths.len() == 4 && widths.iter().all(|w| *w == widths[0]), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 120), "{table}");
    assert!(table.lines().last().unwrap().starts_with("build: "), "{table}");
    assert!(table.contains("| pp4 @ d3 |") && table.contains("| tg2 @ d3 |"), "{table}");
    let csv = bench(&model, &args("csv"));
    let columns: Vec<usize> = csv.lines().map(|l| l.split(',').count()).collect();
    assert_eq!(csv.lines().count(), 3);
    assert!(csv.starts_with("build_commit,") && columns[0] > 20, "{csv}");
    let lines = bench(&model, &args("jsonl"));
    let rows: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert!(rows.len() == 2 && rows[1]["n_gen"] == 2 && rows[1]["n_depth"] == 3);
    assert_eq!(bench(&model, &["-p", "0", "-n", "0", "-o", "json"]).trim(), "[]");
}

/// Messages about the model and the machine come once, before and after the table.
#[test]
fn a_table_is_not_interrupted() {
    let model = tiny(Tiny::default());
    let args = ["-v", "-p", "2,3", "-n", "1", "-r", "1", "-t", "1,2", "--ram", "50%"];
    let mut command = moeba();
    let file = std::fs::File::create(model.file("both")).unwrap();
    command.arg("bench").arg(&model.path).args(args);
    command.stdout(file.try_clone().unwrap()).stderr(file);
    assert!(command.status().unwrap().success());
    let text = std::fs::read_to_string(model.file("both")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let is_row = |line: &&str| line.starts_with('|');
    let first = lines.iter().position(is_row).unwrap();
    let last = lines.iter().rposition(is_row).unwrap();
    assert_eq!(last - first, 1 + 6, "{text}");
    assert!(lines[first..=last].iter().all(is_row), "{text}");
    let count = |start: &str| lines.iter().filter(|line| line.starts_with(start)).count();
    assert_eq!((count("machine, "), count("build: ")), (2, 1), "{text}");
    assert_eq!(lines.iter().filter(|line| line.contains("tiny.gguf: 2 layers")).count(), 1);
}

#[test]
fn bench_refuses_what_makes_no_sense() {
    let model = tiny(Tiny::default());
    for args in [
        &["-p", "x"][..],
        &["-p", "-1"],
        &["-p", "99999999999"],
        &["-n", "1,"],
        &["-r", "0"],
        &["-t", "0"],
        &["-t", "1,x"],
        &["-pg", "1"],
        &["-o", "xml"],
        &["-b", "0"],
        &["--parallel", "0"],
        &["--parallel", "257"],
    ] {
        failed(&on(&model, "bench", args), 2, &[]);
    }
}

#[test]
fn routers_are_compared_on_recorded_routing() {
    let trace = common::repo().join("bench/traces/sibling.mtrace");
    let replay = |n: &str| {
        let args = ["--budget", "50", "-o", "csv", "--replicas", n];
        moeba().args(["trace", "replay"]).arg(&trace).args(args).output().unwrap()
    };
    let hits = |out: Output| -> Vec<f64> {
        let lines = succeeded(&out).lines().filter(|line| line.contains(",50,")).take(5);
        lines.map(|line| line.rsplit(',').next().unwrap().parse().unwrap()).collect()
    };
    // One machine computes all, whatever the rule.
    let (one, three) = (hits(replay("1")), hits(replay("3")));
    assert!(one.len() == 5 && one.iter().all(|rate| *rate == one[0]), "{one:?}");
    assert!(three.iter().all(|rate| (0.2..1.0).contains(rate)), "{three:?}");
    assert!(three.iter().any(|rate| *rate != three[0]), "{three:?}");
    failed(&replay("500"), 2, &["--replicas 500", "the trace has 21 requests"]);
}
