//! `run` on a model made here: what goes to stdout, how generations end, what hostile flags and
//! prompts lead to.

use common::cli::{Model, N_CTX_TRAIN, Tiny, failed, moeba, on, stderr, stdout, succeeded, tiny};
use nix::sys::signal::{SigHandler, Signal, signal};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

fn plain() -> Model {
    tiny(Tiny::default())
}

fn chat() -> Model {
    tiny(Tiny { chat: true, ..Tiny::default() })
}

/// `run` with what is written to its stdin.
fn with_stdin(model: &Model, args: &[&str], input: &[u8]) -> Output {
    let mut command = moeba();
    command.arg("run").arg(&model.path).args(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A run that refuses its flags does not read what it is given.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

const GREEDY: [&str; 5] = ["--temp", "0", "-n", "8", "--ignore-eos"];

fn greedy(model: &Model, args: &[&str]) -> String {
    succeeded(&on(model, "run", &[&GREEDY[..], args].concat())).to_owned()
}

#[test]
fn plain_text_is_continued_and_the_prompt_repeated_unless_told_not_to() {
    let model = plain();
    let with_prompt = greedy(&model, &["-p", "Hello"]);
    let without = greedy(&model, &["-p", "Hello", "--no-display-prompt"]);
    assert_eq!(with_prompt, format!("Hello{without}"));
    assert!(without.len() > 1 && without.ends_with('\n'), "{without:?}");
    let file = model.file("prompt");
    std::fs::write(&file, "Hello\n").unwrap();
    assert_eq!(greedy(&model, &["-f", file.to_str().unwrap()]), with_prompt);
    for args in [&GREEDY[..], &[&GREEDY[..], &["-f", "-"]].concat()] {
        assert_eq!(succeeded(&with_stdin(&model, args, b"Hello\n")), with_prompt);
    }
}

#[test]
fn stdout_carries_the_text_and_stderr_the_report() {
    let model = plain();
    let run = |args: &[&str]| on(&model, "run", &[&GREEDY[..], &["-p", "Hi"], args].concat());
    let out = run(&["-v"]);
    let report = stderr(&out);
    let loaded = ["tiny.gguf: 2 layers", "loaded in "];
    for word in loaded.iter().chain(&["prompt: 2 tokens", "decode: 7 tokens", "peak memory"]) {
        assert!(report.contains(word), "no {word:?} in {report}");
    }
    assert!(!report.contains('\r') && !report.contains('\u{1b}'), "a bar without a terminal");
    // Otherwise it is a line, and nothing with -q.
    let short = run(&[]);
    let (line, stdout_of) = (stderr(&short), stdout(&short));
    assert!(line.starts_with("8 tokens, ") && line.contains("; prompt 2 tokens in "), "{line}");
    assert_eq!((line.lines().count(), stdout_of), (1, stdout(&out)), "{line}");
    let quiet = run(&["-q"]);
    assert_eq!((stdout(&quiet), stderr(&quiet)), (stdout(&out), ""));
    // The file has all of it whatever stderr shows.
    let log = model.file("log");
    let told = run(&["-q", "--log-file", log.to_str().unwrap()]);
    assert_eq!(stderr(&told), "");
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("prompt: 2 tokens") && !log.contains("kernels: "), "{log}");
    assert!(stderr(&run(&["-vv"])).contains("[moeba::simd] kernels: "));
}

#[test]
fn a_message_to_a_chat_model_is_answered_once() {
    let model = chat();
    let answer = greedy(&model, &["-p", "Hi"]);
    assert!(!answer.contains("Hi") && !answer.contains("im_start"), "{answer}");
    let rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    let by_hand = greedy(&model, &["-no-cnv", "-p", rendered, "--no-display-prompt"]);
    assert_eq!(answer, by_hand);
    let system = "<|im_start|>system\nBe brief<|im_end|>\n".to_owned() + rendered;
    let by_hand = greedy(&model, &["-no-cnv", "-p", &system, "--no-display-prompt"]);
    assert_eq!(greedy(&model, &["-sys", "Be brief", "-p", "Hi"]), by_hand);
    let raw = greedy(&model, &["--raw", "-p", "Hi"]);
    assert!(raw.starts_with("Hi"), "{raw}");
    // A model that brings no template gets ChatML when it is asked to chat.
    assert_eq!(greedy(&plain(), &["-cnv", "-p", "Hi"]), answer);
}

#[test]
fn a_seed_repeats_a_run_and_is_told() {
    let model = plain();
    let args = ["-p", "Hello", "-n", "20", "--temp", "1.5", "--ignore-eos", "-v"];
    let run = |seed: &str| on(&model, "run", &[&args[..], &["--seed", seed]].concat());
    let first = run("7");
    assert!(stderr(&first).contains("seed 7\n"), "{}", stderr(&first));
    assert_eq!(first.stdout, run("7").stdout);
    assert_ne!(first.stdout, run("8").stdout);
    let drawn = on(&model, "run", &args);
    let told = stderr(&drawn).lines().find_map(|l| l.strip_prefix("seed ")).unwrap().to_owned();
    assert_eq!(drawn.stdout, run(&told).stdout);
}

#[test]
fn negatives_mean_what_they_mean_in_llama_cpp() {
    let model = plain();
    let text = |args: &[&str]| {
        let fixed = ["-p", "Hello", "-n", "12", "--ignore-eos", "--seed", "3"];
        succeeded(&on(&model, "run", &[&fixed[..], args].concat())).to_owned()
    };
    assert_eq!(text(&["--temp", "-1"]), text(&["--temp", "0"]));
    let hot = ["--temp", "3", "--top-p", "1", "--min-p", "0"];
    let all = text(&[&hot[..], &["--top-k", "0"]].concat());
    assert_eq!(text(&[&hot[..], &["--top-k", "-1"]].concat()), all);
    assert_ne!(text(&[&hot[..], &["--top-k", "2"]].concat()), all);
}

#[test]
fn the_file_recommends_how_to_sample() {
    let model = plain();
    let with = |pairs: &str, args: &[&str]| {
        let fixed = ["-v", "-p", "a", "-n", "1", "--override-kv", pairs];
        let out = on(&model, "run", &[&fixed[..], args].concat());
        succeeded(&out);
        stderr(&out).to_owned()
    };
    let pairs = "general.sampling.temp=float:0.25,general.sampling.top_k=int:7";
    let told = with(pairs, &[]);
    assert!(told.contains("temp 0.25") && told.contains("top-k 7"), "{told}");
    let told = with(pairs, &["--top-k", "9"]);
    assert!(told.contains("temp 0.25") && told.contains("top-k 9"), "{told}");
    let wrong = "general.sampling.top_p=str:most,general.sampling.min_p=float:1.5";
    let told = with(wrong, &[]);
    for warning in [
        "general.sampling.top_p: expected a number from 0 to 1, got string \"most\"; 0.95 is used",
        "general.sampling.min_p: expected a number from 0 to 1, got f64 1.5; 0.05 is used",
    ] {
        assert!(told.contains(warning), "{told}");
    }
    assert!(!with(wrong, &["--top-p", "1", "--min-p", "0"]).contains("expected"));
}

#[test]
fn every_sampler_of_llama_cpp_has_its_flags() {
    let model = plain();
    let run = |args: &[&str]| {
        let fixed = ["-v", "-p", "Hello", "-n", "40", "--ignore-eos", "--seed", "3"];
        let out = on(&model, "run", &[&fixed[..], args].concat());
        let text = succeeded(&out).to_owned();
        let told = stderr(&out).lines().find_map(|line| line.split("sampling: ").nth(1));
        (text.trim_end().to_owned(), told.unwrap_or_else(|| panic!("{args:?}")).to_owned())
    };
    let (usual, _) = run(&[]);
    let cases: &[(&[&str], &str)] = &[
        (&["--typical", "0.5"], "typical 0.5"),
        (&["--typical-p", "0.5"], "typical 0.5"),
        (&["--top-nsigma", "0.5"], "top-nsigma 0.5"),
        (&["--top-n-sigma", "0.5"], "top-nsigma 0.5"),
        (&["--xtc-probability", "1", "--xtc-threshold", "0.001"], "xtc-probability 1"),
        (&["--dynatemp-range", "0.7", "--dynatemp-exp", "1.5"], "dynatemp-exp 1.5"),
        (&["--dry-multiplier", "9", "--dry-base", "2", "--dry-allowed-length", "0"], "dry-base 2"),
        (&["--mirostat", "1", "--mirostat-lr", "0.2"], "mirostat 1, mirostat-lr 0.2"),
        (&["--mirostat", "2", "--mirostat-ent", "3"], "mirostat-ent 3"),
        (&["--samplers", "temperature;top-k", "--top-k", "7"], "exp 1; top-k 7"),
        (&["--sampler-seq", "kt", "--samplers", "min_p"], "min-p 0.05"),
        (&["--samplers", "min_p", "--sampling-seq", "m", "--temp", "9"], "min-p 0.05"),
        (&["--samplers", "adaptive_p", "--adaptive-target", "0.02"], "adaptive-decay 0.9"),
        (&["-l", "101-inf", "--logit-bias", "102+2.5"], "2 logit biases; "),
    ];
    for (args, told) in cases {
        let (text, sampling) = run(args);
        assert!(sampling.contains(told), "{args:?}: {sampling}");
        assert_ne!(text, usual, "{args:?}");
        assert_eq!(run(args).0, text, "{args:?} with the same seed");
    }
    let out = on(&model, "run", &["-p", "x", "-l", "15043+1"]);
    failed(&out, 1, &["logit-bias: token id 15043 is out of range: the model has 259 tokens"]);
    // Whatever else is in force: one token is left.
    let one = "--temp=0 --mirostat=2 -l 65+900000".split(' ').collect::<Vec<_>>();
    assert!(run(&one).0.ends_with(&"A".repeat(40)));
}

#[test]
fn dry_ends_loops_but_at_its_breakers() {
    let model = plain();
    let text = |args: &[&str]| {
        let fixed = ["-p", "Hello", "-n", "80", "--ignore-eos", "--temp", "0", "-l", "65+30"];
        succeeded(&on(&model, "run", &[&fixed[..], args].concat())).trim_end().to_owned()
    };
    let dry = ["--dry-multiplier", "20", "--dry-penalty-last-n", "-1"];
    let all_of_a = text(&[]);
    assert!(all_of_a.ends_with("AAAAAAAA"), "{all_of_a}");
    assert!(!text(&dry).ends_with("AAAAAAAA"));
    let breaker = [&dry[..], &["--dry-sequence-breaker", "A"]].concat();
    assert_eq!(text(&breaker), all_of_a, "a breaker is never penalised");
    let none = [&breaker[..], &["--dry-sequence-breaker", "none"]].concat();
    assert!(!text(&none).ends_with("AAAAAAAA"));
}

#[test]
fn a_generation_ends_where_it_is_told() {
    let model = plain();
    let stats = model.file("stats.json");
    let run = |args: &[&str]| {
        let fixed = ["--temp", "0", "--ignore-eos", "-p", "Hello", "--no-display-prompt"];
        let told = ["--stats", stats.to_str().unwrap()];
        let out = on(&model, "run", &[&fixed[..], &told, args].concat());
        let text = succeeded(&out).to_owned();
        let json: Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
        (text, json, stderr(&out).to_owned())
    };
    let (text, json, _) = run(&["-n", "30"]);
    assert_eq!((&json["generated_tokens"], &json["finish_reason"]), (&30.into(), &"length".into()));
    let (nothing, json, _) = run(&["-n", "0"]);
    assert_eq!((nothing.as_str(), &json["generated_tokens"]), ("\n", &0.into()));
    // A stop string that occurs in the text ends it there.
    let stop: String = text.chars().skip(3).take(2).collect();
    let at = text.find(&stop).unwrap();
    let (stopped, json, _) = run(&["-n", "30", "-r", &stop]);
    assert_eq!((stopped, &json["finish_reason"]), (format!("{}\n", &text[..at]), &"stop".into()));
    assert_eq!(run(&["-n", "30", "--stop", &stop]).0, format!("{}\n", &text[..at]));
    // -1 goes on until the context is full, and says so.
    let (_, json, messages) = run(&["-c", "20"]);
    assert_eq!(json["finish_reason"], "context_full");
    assert_eq!(json["generated_tokens"], 20 - 5 + 1);
    assert!(messages.contains("the context of 20 tokens is full"), "{messages}");
    // Or beyond it, without its older half.
    let (text, json, messages) = run(&["-c", "20", "-n", "50", "--context-shift", "--keep", "2"]);
    assert_eq!((&json["generated_tokens"], &json["finish_reason"]), (&50.into(), &"length".into()));
    assert!(text.len() > 20 && !messages.contains("is full"), "{messages}");
}

#[test]
fn stats_are_flat_and_measured() {
    let model = plain();
    let stats = model.file("stats.json");
    let args = ["-p", "Hello", "--stats", stats.to_str().unwrap()];
    greedy(&model, &args);
    let json: Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
    let positive = [
        "ttft_ms",
        "tpot_ms",
        "prompt_tokens_per_second",
        "decode_tokens_per_second",
        "peak_rss_bytes",
        "resident_expert_bytes_max",
        "load_ms",
        "kv_bytes",
    ];
    for key in positive {
        assert!(json[key].as_f64().is_some_and(|v| v > 0.0), "{key}: {json}");
    }
    assert_eq!((&json["prompt_tokens"], &json["generated_tokens"]), (&5.into(), &8.into()));
    // In place nothing is counted of experts, but the keys are there.
    for key in ["hit_rate", "demand_bytes", "stall_ms_per_token", "prompt_read_bytes"] {
        assert!(json.get(key).is_some_and(Value::is_null), "{key}: {json}");
    }
    let nested = |(key, v): (&String, &Value)| {
        v.is_object() || v.is_array() && key != "demand_wait_histogram"
    };
    assert!(!json.as_object().unwrap().iter().any(nested), "{json}");
}

#[test]
fn a_dry_run_prints_the_plan() {
    let out = on(&plain(), "run", &["--dry-run", "-c", "64"]);
    let plan = succeeded(&out);
    let at_once = "64 tokens of a prompt at once";
    for word in ["experts", "dense weights", "KV cache", "64 tokens", "KiB", at_once, " t/s "] {
        assert!(plan.contains(word), "no {word:?} in {plan}");
    }
}

#[test]
fn a_dry_run_with_a_budget_tells_what_streams() {
    let model = plain();
    let plan = |args: &[&str]| {
        let out = on(&model, "run", &[&["--dry-run", "-c", "64"], args].concat());
        succeeded(&out).to_owned()
    };
    let half = plan(&["--ram", "50%", "--policy", "on-demand", "--io", "pread"]);
    let words = [
        "streamed from disk",
        "pread",
        "expert slots",
        "on-demand",
        "at 0.0 % hits",
        "least budget",
    ];
    for word in words {
        assert!(half.contains(word), "no {word:?} in {half}");
    }
    let sizes = || half.lines().filter(|line| !line.contains(" t/s "));
    let notes: Vec<usize> = sizes().filter_map(|l| l.find("KiB  ")).collect();
    assert!(notes.len() == sizes().count() && notes.iter().all(|n| *n == notes[0]), "{half}");
    for args in [&["--ram", "100%"][..], &["--ram", "1G"], &["--io", "mmap"], &["--ram", "auto"]] {
        assert!(plan(args).contains("in place on the mapped file"), "{args:?}");
    }
    assert!(plan(&["--ram", "1G", "--io", "pread"]).contains("100.0 %"));
    // The environment gives what flags do not.
    let with_env = |flags: &[&str]| {
        let mut command = moeba();
        command.arg("run").arg(&model.path).args(["--dry-run"]).args(flags);
        let out = command.env("MOEBA_RAM", "50%").env("MOEBA_POLICY", "eviction=lfu").output();
        succeeded(&out.unwrap()).to_owned()
    };
    assert!(with_env(&[]).contains("eviction=lfu"));
    assert!(with_env(&["--ram", "100%"]).contains("in place"));
}

#[test]
fn weights_in_memory_of_their_own_give_the_same_text() {
    let model = plain();
    let with = |args: &[&str]| on(&model, "run", args);
    let plan = with(&["--dry-run", "--no-mmap"]);
    assert!(succeeded(&plan).contains("read from the file into memory"));
    let text = |more: &[&str]| {
        let answer = with(&[&["-p", "a b c", "-n", "8", "--temp", "0"], more].concat());
        succeeded(&answer).to_owned()
    };
    assert_eq!(text(&["--no-mmap"]), text(&[]));
    failed(&with(&["--dry-run", "--no-mmap", "--io", "mmap"]), 2, &["--io mmap", "--no-mmap"]);
}

#[test]
fn budgets_that_cannot_be_kept_are_refused() {
    let model = plain();
    let with = |args: &[&str]| on(&model, "run", &[&["--dry-run"], args].concat());
    failed(&with(&["--ram", "1K"]), 1, &["--ram gives the experts 1.0 KiB", "raise it"]);
    failed(&with(&["--ram", "50%", "--io", "mmap"]), 2, &["--io mmap", "--ram"]);
}

#[test]
fn flags_out_of_range_are_wrong_usage() {
    let model = plain();
    let cases: &[(&[&str], &str)] = &[
        (&["--temp", "NaN"], "--temp"),
        (&["--temp", "inf"], "--temp"),
        (&["--top-p", "1.5"], "--top-p"),
        (&["--top-p", "nan"], "--top-p"),
        (&["--min-p", "-0.1"], "--min-p"),
        (&["--top-k", "1.5"], "--top-k"),
        (&["--repeat-penalty", "0"], "--repeat-penalty"),
        (&["--repeat-last-n", "-2"], "--repeat-last-n"),
        (&["--presence-penalty", "NaN"], "--presence-penalty"),
        (&["--frequency-penalty", "1e30"], "--frequency-penalty"),
        (&["--seed", "4294967296"], "--seed"),
        (
            &["--samplers", "top_k;best"],
            "there is no sampler \"best\"; the samplers are penalties, dry",
        ),
        (&["--sampler-seq", "kz"], "there is no sampler 'z'; the samplers are e (penalties)"),
        (&["--mirostat", "3"], "expected a whole number from 0 to 2"),
        (&["--typical", "1.5"], "--typical"),
        (&["--dry-base", "0.5"], "--dry-base"),
        (&["-l", "15043"], "as in 15043+1"),
        (&["-n", "-3"], "--predict"),
        (&["-n", "1e9"], "--predict"),
        (&["-c", "99999999999"], "--ctx-size"),
        (&["-c", "-1"], "--ctx-size"),
        (&["-t", "0"], "--threads"),
        (&["-t", "100000"], "--threads"),
        (&["-b", "0"], "--batch-size"),
        (&["-ub", "-1"], "--ubatch-size"),
        (&["-ctv", "int"], "q5_0 or q5_1"),
        (&["-r", ""], "--reverse-prompt"),
        (&["-f", ""], "--file"),
        (&["--chat-template", ""], "--chat-template"),
        (&["-no-cnv", "-sys", "x"], "--system-prompt"),
        (&["--tmep", "1"], "--temp"),
        (&["-ngl", "many"], "--gpu-layers"),
    ];
    for (args, word) in cases {
        let out = on(&model, "run", &[&["-p", "x"], *args].concat());
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", stderr(&out));
        assert!(stderr(&out).contains(word) && out.stdout.is_empty(), "{args:?}: {}", stderr(&out));
    }
}

#[test]
fn prompts_that_do_not_fit_or_are_none_are_told_apart() {
    let model = plain();
    let long = "x".repeat(N_CTX_TRAIN as usize + 1);
    failed(&on(&model, "run", &["-p", &long]), 1, &["257 tokens", "256"]);
    failed(&with_stdin(&model, &[], &vec![b'y'; 1 << 20]), 1, &["1048576 tokens"]);
    failed(&with_stdin(&model, &[], b"ab\xff\xfe"), 1, &["stdin", "byte 2", "UTF-8"]);
    for args in [&["-p", ""][..], &[], &["--raw"], &["-f", "/dev/null"], &["-f", "-", "-p", ""]] {
        failed(&on(&model, "run", args), 2, &["prompt is empty", "-p", "stdin"]);
    }
    failed(&on(&model, "run", &["-f", "/nonexistent"]), 1, &["/nonexistent"]);
    failed(&on(&model, "run", &["-f", "/"]), 1, &["/"]);
    let template = model.file("template");
    std::fs::write(&template, "{{ raise_exception('no') }}").unwrap();
    let args = ["-p", "x", "--chat-template", template.to_str().unwrap()];
    failed(&on(&model, "run", &args), 1, &["no"]);
    let args = ["-p", "x", "--chat-template", "no-such"];
    failed(&on(&model, "run", &args), 2, &["no-such"]);
}

#[test]
fn weights_that_are_no_numbers_are_an_error() {
    let model = tiny(Tiny { broken: true, ..Tiny::default() });
    let out = on(&model, "run", &["-p", "x", "-n", "4"]);
    failed(&out, 1, &["logit"]);
}

/// A question may stand behind the model, and a name of another program's library is told apart.
#[test]
fn a_question_may_stand_behind_the_model() {
    let model = plain();
    assert_eq!(greedy(&model, &["Say a"]), greedy(&model, &["-p", "Say a"]));
    failed(&on(&model, "run", &["Say a", "-p", "Say b"]), 2, &["cannot be used with"]);
    let out = moeba().args(["run", "qwen3:30b", "why?"]).output().unwrap();
    failed(&out, 1, &["qwen3:30b: no such file", "moeba run -hf unsloth/Qwen3-30B-A3B-GGUF"]);
}

#[test]
fn prompts_may_look_like_flags() {
    let model = plain();
    for prompt in ["-ub", "--help", "-m", "- a list"] {
        assert!(greedy(&model, &["-p", prompt]).starts_with(prompt), "{prompt}");
    }
}

#[test]
fn escapes_are_read_in_flags_and_left_in_files() {
    let model = plain();
    assert!(greedy(&model, &["-p", r"a\nb\x41"]).starts_with("a\nbA"));
    assert!(greedy(&model, &["--no-escape", "-e", "-p", r"a\nb"]).starts_with("a\nb"));
    assert!(greedy(&model, &["-e", "--no-escape", "-p", r"a\nb"]).starts_with(r"a\nb"));
    let file = model.file("prompt");
    std::fs::write(&file, r"a\nb").unwrap();
    assert!(greedy(&model, &["-f", file.to_str().unwrap()]).starts_with(r"a\nb"));
    // A stop string, too: the prompt's own line end is the model's business.
    let text = greedy(&model, &["-p", "Hello", "--no-display-prompt", "-n", "30"]);
    let stop: String = text.chars().skip(3).take(1).collect();
    let escaped: String = stop.bytes().map(|b| format!(r"\x{b:02x}")).collect();
    let args = ["-p", "Hello", "--no-display-prompt", "-n", "30", "-r", &escaped];
    assert_eq!(greedy(&model, &args), format!("{}\n", &text[..text.find(&stop).unwrap()]));
}

#[test]
fn a_prompt_and_text_on_stdin_are_both_read() {
    let model = plain();
    let both = greedy(&model, &["-p", "Sum up:\n\none\ntwo"]);
    let args = [&GREEDY[..], &["-p", "Sum up:"]].concat();
    assert_eq!(succeeded(&with_stdin(&model, &args, b"one\ntwo\n")), both);
    // Two that are one after the other, and the same by name.
    let file = model.file("text");
    std::fs::write(&file, "one\ntwo\n").unwrap();
    assert_eq!(greedy(&model, &["-p", "Sum up:", "-f", file.to_str().unwrap()]), both);
    let named = [&args[..], &["-f", "-"]].concat();
    assert_eq!(succeeded(&with_stdin(&model, &named, b"one\ntwo\n")), both);
    // An empty stdin adds nothing, nor does an empty flag.
    let alone = greedy(&model, &["-p", "Sum up:"]);
    assert_eq!(succeeded(&with_stdin(&model, &args, b"")), alone);
    let empty = [&GREEDY[..], &["-p", ""]].concat();
    assert_eq!(succeeded(&with_stdin(&model, &empty, b"Sum up:")), alone);
}

/// A pipe that whoever started the program leaves open, as many programs do.
#[test]
fn a_silent_pipe_holds_nothing_up() {
    let model = plain();
    let mut command = moeba();
    command.arg("run").arg(&model.path).args(GREEDY).args(["-p", "Hello"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let open = child.stdin.take();
    let out = child.wait_with_output().unwrap();
    assert_eq!(succeeded(&out), greedy(&model, &["-p", "Hello"]));
    assert!(stderr(&out).contains("stdin is open"), "{}", stderr(&out));
    drop(open);
}

/// In a pipeline the text may take as long as it takes.
#[test]
fn a_slow_neighbour_in_a_pipeline_is_waited_for() {
    let model = plain();
    let script = "(sleep 3; echo later) | \"$0\" run \"$1\" -p Now: --temp 0 -n 8 --ignore-eos";
    let mut command = Command::new("bash");
    command.args(["-c", script, env!("CARGO_BIN_EXE_moeba")]).arg(&model.path);
    let out = command.output().unwrap();
    assert_eq!(succeeded(&out), greedy(&model, &["-p", "Now:\n\nlater"]));
    assert!(stderr(&out).contains("waiting for text on stdin"), "{}", stderr(&out));
}

#[test]
fn the_last_of_a_repeated_flag_counts() {
    let model = plain();
    let args = ["-n", "3", "-n", "8", "--temp", "1", "--temp", "0", "-p", "x", "-p", "Hello"];
    let out = on(&model, "run", &[&args[..], &["--ignore-eos"]].concat());
    assert_eq!(succeeded(&out), greedy(&model, &["-p", "Hello"]));
    let chat = chat();
    let raw = greedy(&chat, &["-cnv", "-no-cnv", "-p", "Hi"]);
    assert_eq!(raw, greedy(&chat, &["--raw", "-p", "Hi"]));
    assert_eq!(greedy(&chat, &["--raw", "-cnv", "-p", "Hi"]), greedy(&chat, &["-p", "Hi"]));
    // Lists grow: both strings end the text.
    let text = greedy(&model, &["-p", "Hello", "--no-display-prompt", "-n", "30"]);
    let stop: String = text.chars().skip(3).take(2).collect();
    let args = ["-p", "Hello", "--no-display-prompt", "-n", "30", "-r", &stop, "-r", "\u{1}"];
    assert_eq!(greedy(&model, &args), format!("{}\n", &text[..text.find(&stop).unwrap()]));
}

#[test]
fn a_system_prompt_may_be_a_file() {
    let model = chat();
    let file = model.file("system");
    std::fs::write(&file, "Be brief\n").unwrap();
    let file = file.to_str().unwrap();
    let told = greedy(&model, &["-sys", "Be brief", "-p", "Hi"]);
    assert_eq!(greedy(&model, &["-sysf", file, "-p", "Hi"]), told);
    assert_eq!(greedy(&model, &["-sys", "Go on", "-sysf", file, "-p", "Hi"]), told);
    assert_eq!(
        greedy(&model, &["-sysf", file, "-sys", "Go on", "-p", "Hi"]),
        greedy(&model, &["-sys", "Go on", "-p", "Hi"])
    );
}

#[test]
fn flags_that_change_nothing_are_told_with_v() {
    let model = plain();
    let flags =
        ["-fa", "on", "--jinja", "--no-warmup", "--mlock", "-co", "-tb", "4", "--prio", "2"];
    let args = [&GREEDY[..], &["-p", "Hello"], &flags].concat();
    let out = on(&model, "run", &args);
    assert_eq!(succeeded(&out), greedy(&model, &["-p", "Hello"]));
    let told = on(&model, "run", &[&args[..], &["-v"]].concat());
    for flag in ["-fa", "--jinja", "--no-warmup", "--mlock", "-co", "-tb", "--prio"] {
        assert!(stderr(&told).contains(&format!("{flag} changes nothing: ")), "{}", stderr(&told));
    }
    let early = ["-p", "x", "--lora-init-without-apply"];
    failed(&on(&model, "run", &early), 2, &["--lora-init-without-apply: ", "from the start"]);
    // One of ours that has no effect is worth a warning.
    let out = on(&model, "run", &[&GREEDY[..], &["-p", "Hello", "-hff", "x.gguf"]].concat());
    assert_eq!(succeeded(&out), greedy(&model, &["-p", "Hello"]));
    assert!(stderr(&out).contains("--hf-file x.gguf has no effect"), "{}", stderr(&out));
}

/// A run that goes on until it is stopped, and the first bytes of its output, waited for.
/// It heeds SIGHUP, also where the tests were started with nohup.
fn endless(model: &Model, args: &[&str]) -> (std::process::Child, Vec<u8>) {
    let mut command = moeba();
    command.arg("run").arg(&model.path).args(["-p", "x", "-c", "1000000", "--ignore-eos"]);
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    let heed = || {
        // SAFETY: the default action replaces a handler, so that no code of ours runs at a signal.
        unsafe { signal(Signal::SIGHUP, SigHandler::SigDfl)? };
        Ok(())
    };
    // SAFETY: signal(2) may be called between fork and exec.
    unsafe { command.pre_exec(heed) };
    let mut child = command.spawn().unwrap();
    let mut some = vec![0; 4];
    child.stdout.as_mut().unwrap().read_exact(&mut some).unwrap();
    (child, some)
}

fn interrupt(child: &std::process::Child) {
    send(child, "-INT");
}

fn send(child: &std::process::Child, signal: &str) {
    let status = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

#[test]
fn ctrl_c_ends_the_generation_with_a_report() {
    let model = plain();
    let stats = model.file("stats.json");
    let (mut child, mut text) = endless(&model, &["-v", "--stats", stats.to_str().unwrap()]);
    interrupt(&child);
    child.stdout.take().unwrap().read_to_end(&mut text).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130), "{}", stderr(&out));
    assert!(std::str::from_utf8(&text).is_ok() && text.ends_with(b"\n"));
    assert!(stderr(&out).contains("decode: ") && stderr(&out).contains("interrupted"));
    let json: Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
    assert_eq!(json["finish_reason"], "interrupted");
}

/// As `docker stop` and a closed terminal send them, once: the answer ends with its report, and the
/// exit code names the signal.
#[test]
fn other_signals_end_the_generation_with_codes_of_their_own() {
    let model = plain();
    for (signal, code) in [("-TERM", 143), ("-HUP", 129)] {
        let stats = model.file("stats.json");
        let (mut child, mut text) = endless(&model, &["--stats", stats.to_str().unwrap()]);
        send(&child, signal);
        child.stdout.take().unwrap().read_to_end(&mut text).unwrap();
        let out = child.wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(code), "{signal}: {}", stderr(&out));
        let json: Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
        assert_eq!(json["finish_reason"], "interrupted");
    }
}

/// Work that hears nothing of it, as it waits for someone who types, ends a little later.
#[test]
fn a_signal_ends_what_waits_for_input() {
    let model = plain();
    let mut command = moeba();
    command.arg("run").arg(&model.path).stdin(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    // Its handler is there once it reads.
    std::thread::sleep(std::time::Duration::from_millis(500));
    send(&child, "-TERM");
    // Its stdin stays open.
    let input = child.stdin.take();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    drop(input);
}

/// nohup ignores SIGHUP, and so does what it starts.
#[test]
fn a_signal_that_is_ignored_stays_ignored() {
    let model = plain();
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP && exec \"$0\" \"$@\""]).arg(moeba().get_program());
    command.arg("run").arg(&model.path).args(["-p", "x", "-c", "1000000", "--ignore-eos"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut some = vec![0; 4];
    child.stdout.as_mut().unwrap().read_exact(&mut some).unwrap();
    send(&child, "-HUP");
    let mut more = vec![0; 4000];
    child.stdout.as_mut().unwrap().read_exact(&mut more).unwrap();
    send(&child, "-TERM");
    child.stdout.take().unwrap().read_to_end(&mut more).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

/// They are as good as the machine's cores, and one more is not.
#[test]
fn more_threads_than_cores_are_warned_of() {
    let model = plain();
    let n = std::thread::available_parallelism().unwrap().get();
    let said = |n: usize| {
        let threads = n.to_string();
        let out = on(&model, "run", &[&GREEDY[..], &["-p", "Hi", "-t", &threads]].concat());
        succeeded(&out);
        stderr(&out).to_owned()
    };
    assert!(!said(n).contains("warning"), "{}", said(n));
    let said = said(n + 1);
    assert!(said.contains(&format!("-t {}: this machine has {n} core", n + 1)), "{said}");
}

#[test]
fn ctrl_c_leaves_no_unfinished_array() {
    let model = plain();
    let out = model.file("x.npy");
    let tokens = vec!["1"; 20_000].join(",");
    let mut command = moeba();
    command.arg("logits").arg(&model.path).args(["-v", "--tokens", &tokens, "-ub", "16", "-o"]);
    let mut child = command.arg(&out).stderr(Stdio::piped()).spawn().unwrap();
    // The start-up report says that work begins.
    let mut some = [0; 64];
    child.stderr.as_mut().unwrap().read_exact(&mut some).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(100));
    interrupt(&child);
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{}", stderr(&ended));
    let names: Vec<_> = std::fs::read_dir(model.dir.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
}

#[test]
fn a_reader_that_leaves_ends_the_run_quietly() {
    let model = plain();
    let (mut child, _) = endless(&model, &[]);
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
    assert!(!stderr(&out).contains("error") && stdout(&out).is_empty());
}

/// A template that the flags of thinking move, and which opens the reasoning itself.
const THINKS: &str = "{% if enable_thinking is defined and not enable_thinking %}OFF{% endif %}\
    {{ x }}{{ messages[-1].content }}<think>";

/// The prompt's tokens, one for a byte, and what was said on stderr.
fn prompt_tokens(model: &Model, template: &str, args: &[&str]) -> (u64, String) {
    let (file, stats) = (model.file("template"), model.file("stats.json"));
    std::fs::write(&file, template).unwrap();
    let fixed = ["-p", "Hi", "-n", "1", "--chat-template", file.to_str().unwrap(), "--stats"];
    let args = [&fixed[..], &[stats.to_str().unwrap()], args].concat();
    let out = on(model, "run", &args);
    succeeded(&out);
    let stats: Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
    (stats["prompt_tokens"].as_u64().unwrap(), stderr(&out).to_owned())
}

#[test]
fn flags_of_thinking_reach_the_template() {
    let model = chat();
    let n = |args: &[&str]| prompt_tokens(&model, THINKS, args).0;
    let plain = n(&[]);
    for off in ["--think", "--reasoning", "-rea"] {
        assert_eq!(n(&[off, "off"]), plain + 3, "{off}");
        assert_eq!(n(&[off, "on"]), plain, "{off}");
    }
    assert_eq!(n(&["--reasoning-budget", "0"]), plain + 3);
    let kwargs = r#"{"enable_thinking": false, "x": "1234"}"#;
    assert_eq!(n(&["--chat-template-kwargs", kwargs]), plain + 7);
    assert_eq!(n(&["--chat-template-kwargs", kwargs, "--think", "on"]), plain + 7);
    let (_, said) = prompt_tokens(&model, THINKS, &["--think", "high"]);
    assert!(said.contains("knows thinking only as on and off"), "{said}");
}

#[test]
fn a_template_that_cannot_follow_a_flag_is_told_of() {
    let model = chat();
    let template = "{{ messages[0].content }}";
    for (args, expected) in [
        (["--think", "on"], "no switch for thinking"),
        (["--think", "off"], "no switch that turns thinking off"),
        (["--reasoning-budget", "5"], "--reasoning-budget has no effect"),
    ] {
        let (_, said) = prompt_tokens(&model, template, &args);
        assert!(said.contains(expected), "{said}");
    }
    let out = on(&model, "run", &["--raw", "-p", "x", "-n", "1", "--think", "on"]);
    assert!(succeeded(&out).starts_with('x') && stderr(&out).contains("plain text"));
    for (args, expected) in [
        (["--think", "much"], "low, medium, high or auto"),
        (["--reasoning-budget", "-2"], "from -1"),
        (["--reasoning-format", "x"], "deepseek-legacy"),
        (["--chat-template-kwargs", "[1]"], "expected a JSON object"),
    ] {
        failed(&on(&model, "run", &[&["-p", "x"], &args[..]].concat()), 2, &[expected]);
    }
}

/// The model never ends its reasoning; the budget does.
#[test]
fn a_budget_ends_the_reasoning_and_a_pipe_gets_the_answer_alone() {
    let model = chat();
    let file = model.file("template");
    std::fs::write(&file, THINKS).unwrap();
    let run = |args: &[&str]| {
        let fixed = ["-p", "Hi", "-n", "60", "--temp", "0", "--ignore-eos", "--think", "on"];
        let template = ["--chat-template", file.to_str().unwrap()];
        on(&model, "run", &[&fixed[..], &template, args].concat())
    };
    let endless = run(&[]);
    assert_eq!(succeeded(&endless), "\n");
    assert!(stderr(&endless).contains("before the answer began"), "{}", stderr(&endless));
    let budget = ["--reasoning-budget", "4", "--reasoning-budget-message", " Enough."];
    let raw = run(&[&budget[..], &["--reasoning-format", "none"]].concat());
    let (reasoning, answer) =
        succeeded(&raw).split_once(" Enough.\n</think>\n\n").expect("an end of the reasoning");
    assert!(reasoning.chars().count() <= 10, "{reasoning:?}");
    for format in ["auto", "deepseek"] {
        let apart = run(&[&budget[..], &["--reasoning-format", format]].concat());
        assert_eq!(succeeded(&apart), answer.trim_start(), "{format}");
    }
    let legacy = run(&[&budget[..], &["--reasoning-format", "deepseek-legacy"]].concat());
    assert_eq!(succeeded(&legacy), succeeded(&raw));
    let none = run(&["--reasoning-budget", "0", "--reasoning-format", "none"]);
    assert!(succeeded(&none).starts_with("\n</think>\n\n"), "{}", stdout(&none));
}

#[test]
fn render_takes_variables_from_a_flag() {
    let model = chat();
    let (messages, template) = (model.file("messages.json"), model.file("template"));
    std::fs::write(&messages, r#"{"messages": [], "x": 1, "y": 2}"#).unwrap();
    std::fs::write(&template, "{{ x }} {{ y }} {{ z }}").unwrap();
    let args = [messages.to_str().unwrap(), "--chat-template", template.to_str().unwrap()];
    let kwargs = ["--chat-template-kwargs", r#"{"y": 3, "z": true}"#];
    let out = on(&model, "render", &[&args[..], &kwargs].concat());
    assert_eq!(succeeded(&out), "1 3 True");
}
