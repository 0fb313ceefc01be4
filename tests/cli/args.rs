//! The command line before any model is opened: help, usage errors, generated texts, exit codes.

use assert_cmd::Command;
use std::process::Output;

fn moeba(args: &[&str]) -> Output {
    moeba_with(&[], args)
}

/// With these variables.
fn moeba_with(vars: &[(&str, &str)], args: &[&str]) -> Output {
    let mut command = Command::cargo_bin("moeba").unwrap();
    // The machine's own settings must not decide a test.
    for (name, _) in std::env::vars_os() {
        let known = ["MOEBA_", "LLAMA_ARG_", "HF_", "RUST_LOG"];
        if name.to_str().is_some_and(|n| known.iter().any(|k| n.starts_with(k))) {
            command.env_remove(name);
        }
    }
    command.envs(vars.iter().copied()).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn help_and_version_go_to_stdout() {
    for args in [&["--help"][..], &["-h"], &["--version"], &["man", "--help"]] {
        let out = moeba(args);
        assert_eq!(out.status.code(), Some(0), "{args:?}");
        assert!(text(&out.stdout).contains("moeba") && out.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn wrong_usage_exits_2_with_nothing_on_stdout() {
    let cases: &[&[&str]] = &[
        &[],
        &["frobnicate"],
        &["--frobnicate"],
        &["completions"],
        &["completions", "tcsh"],
        &["man", "frobnicate"],
        &["man", "--log-file", ""],
        &["man", "-q", "-v"],
    ];
    for args in cases {
        let out = moeba(args);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        assert!(out.stdout.is_empty() && !out.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn budgets_policies_and_io_that_are_none_are_told_what_there_is() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--ram", "12Q"], &["12Q", "--ram", "1.5G", "50%"]),
        (&["--ram", "0"], &["--ram"]),
        (&["--ram=-1"], &["--ram"]),
        (&["--ram", "0%"], &["--ram"]),
        (&["--ram", ""], &["--ram"]),
        (&["--policy", "clever"], &["clever", "on-demand", "mixtral-offloading", "lru|lfu|lcp"]),
        (&["--policy", "eviction=lru,eviction=lfu"], &["--policy"]),
        (&["--io", "dma"], &["dma", "--io", "uring, pread or mmap"]),
    ];
    let commands: &[&[&str]] = &[
        &["run", "m.gguf"],
        &["bench", "m.gguf"],
        &["perplexity", "m.gguf", "-f", "x"],
        &["diffuse", "m.gguf", "-p", "x"],
        &["logits", "m.gguf", "--tokens", "1", "-o", "x"],
    ];
    for command in commands {
        for (flags, words) in cases {
            let out = moeba(&[command, *flags].concat());
            let message = text(&out.stderr);
            assert_eq!(out.status.code(), Some(2), "{command:?} {flags:?}: {message}");
            let errors = message.lines().filter(|line| line.starts_with("error: ")).count();
            assert!(errors == 1 && out.stdout.is_empty(), "{message}");
            for word in *words {
                assert!(message.contains(word), "no {word:?} in {message}");
            }
        }
    }
}

#[test]
fn overrides_and_repositories_are_read_before_anything_is_opened() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--override-kv", "a"], &["--override-kv", "KEY=TYPE:VALUE"]),
        (&["--override-kv", "a=int:1,b=float:x"], &["b: expected a finite number"]),
        (&["--override-kv", ""], &["--override-kv"]),
    ];
    let commands: &[&[&str]] = &[
        &["run", "m.gguf"],
        &["inspect", "m.gguf"],
        &["tokenize", "m.gguf"],
        &["trace", "record", "m.gguf", "-f", "x", "-o", "y"],
    ];
    for command in commands {
        for (flags, words) in cases {
            let out = moeba(&[command, *flags].concat());
            let message = text(&out.stderr);
            assert_eq!(out.status.code(), Some(2), "{command:?} {flags:?}: {message}");
            words.iter().for_each(|word| assert!(message.contains(word), "no {word:?}: {message}"));
        }
    }
    let wrong: &[&[&str]] = &[
        &["inspect", "a.gguf", "-m", "b.gguf"],
        &["inspect", "-m", "a.gguf", "-hf", "a/b"],
        &["inspect", "-hf", "model"],
        &["inspect", "-hf"],
        &["inspect", "-hf", "a/b:"],
        &["inspect", "hf:../b"],
        &["inspect", "-hf", "a/b", "-hff", "../../x.gguf"],
        &["pull"],
        &["pull", "a/b/c"],
        &["rm", ".."],
        &["inspect"],
    ];
    for args in wrong {
        let out = moeba(args);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", text(&out.stderr));
        assert!(out.stdout.is_empty());
    }
}

#[test]
fn llama_cpps_variables_count_last_and_are_checked_alike() {
    // What a value is refused by says which one was read.
    let refused = |vars: &[(&str, &str)], flags: &[&str]| {
        let out = moeba_with(vars, &[&["run", "m.gguf", "-p", "x"], flags].concat());
        (out.status.code() == Some(2)).then(|| text(&out.stderr).to_owned())
    };
    let names = [
        ("LLAMA_ARG_THREADS", "--threads"),
        ("LLAMA_ARG_CTX_SIZE", "--ctx-size"),
        ("LLAMA_ARG_BATCH", "--batch-size"),
        ("LLAMA_ARG_UBATCH", "--ubatch-size"),
        ("LLAMA_ARG_CACHE_TYPE_K", "--cache-type-k"),
        ("LLAMA_ARG_CACHE_TYPE_V", "--cache-type-v"),
        ("LLAMA_ARG_N_PREDICT", "--predict"),
        ("LLAMA_ARG_TEMPERATURE", "--temp"),
        ("LLAMA_ARG_TOP_K", "--top-k"),
        ("LLAMA_ARG_TOP_P", "--top-p"),
        ("LLAMA_ARG_MIN_P", "--min-p"),
        ("LLAMA_ARG_REPEAT_PENALTY", "--repeat-penalty"),
        ("LLAMA_ARG_PRESENCE_PENALTY", "--presence-penalty"),
        ("LLAMA_ARG_FREQUENCY_PENALTY", "--frequency-penalty"),
        ("LLAMA_ARG_OFFLINE", "--offline"),
    ];
    for (name, flag) in names {
        let message =
            refused(&[(name, "wrong")], &[]).unwrap_or_else(|| panic!("{name} is unread"));
        let named = message.starts_with(&format!("error: {name}: expected "));
        assert!(named && message.contains("\"wrong\""), "{flag}: {message}");
        // An empty variable is none.
        assert_eq!(refused(&[(name, "")], &[]), None, "{name}");
        assert!(text(&moeba(&["run", "--help"]).stdout).contains(flag));
    }
    let theirs = ("LLAMA_ARG_THREADS", "theirs");
    let message = refused(&[theirs, ("MOEBA_THREADS", "ours")], &[]).unwrap();
    assert!(message.starts_with("error: MOEBA_THREADS: ") && message.contains("ours"), "{message}");
    let message = refused(&[theirs], &["-t", "0"]).unwrap();
    assert!(message.contains("--threads") && !message.contains("LLAMA"), "{message}");
    for switch in ["on", "enabled", "true", "1", "off", "disabled", "false", "0"] {
        assert_eq!(refused(&[("LLAMA_ARG_CPU_MOE", switch)], &[]), None, "{switch}");
    }
    assert_eq!(refused(&[theirs, ("MOEBA_THREADS", "1")], &[]), None);
    assert_eq!(refused(&[theirs], &["-t", "1"]), None);
    for words in [&["run", "--help"][..], &["man", "run"]] {
        let help = moeba(words);
        let help = text(&help.stdout).replace(['\n', '\\'], " ");
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(help.contains("[env: MOEBA_THREADS, LLAMA_ARG_THREADS]"), "{help}");
    }
}

#[test]
fn a_misspelt_name_gets_a_suggestion() {
    let out = moeba(&["completion", "bash"]);
    assert!(text(&out.stderr).contains("`moeba completions`"), "{}", text(&out.stderr));
}

#[test]
fn command_lines_lead_where_they_should() {
    let helps = |args: &[&str], of: &[&str]| {
        let (out, help) = (moeba(args), moeba(of));
        assert_eq!((out.status.code(), &out.stdout), (Some(0), &help.stdout), "{args:?}");
    };
    helps(&["help"], &["--help"]);
    helps(&["help", "run"], &["run", "--help"]);
    helps(&["help", "trace", "record"], &["trace", "record", "--help"]);
    helps(&["run", "--usage"], &["run", "--help"]);
    helps(&["bench", "--version"], &["--version"]);
    // All of these are runs of a model that is not there.
    let runs: &[&[&str]] =
        &[&["m.gguf"], &["-m", "m.gguf", "-p", "hi"], &["--temp", "0", "-m", "m.gguf"]];
    for args in runs {
        let out = moeba(&[args, &["-p", "x"][..]].concat());
        assert_eq!(out.status.code(), Some(1), "{args:?}: {}", text(&out.stderr));
        assert!(text(&out.stderr).contains("m.gguf: "), "{}", text(&out.stderr));
    }
    let unknown: &[(&[&str], &str)] = &[
        (&["frobnicate"], "frobnicate is neither a command nor a model file"),
        (&["isnpect", "m"], "did you mean `moeba inspect`?"),
        (&["chat"], "did you mean `moeba run`?"),
        (&["help", "frobnicate"], "frobnicate"),
        (&["run", "m", "-xyz"], "unknown flag -xyz"),
        (&["run", "m", "--jinga"], "did you mean --jinja?"),
        (&["-hf"], "-hf needs a value"),
        (&["-p", "x", "-hf", "https://example.org/a/b"], "expected USER/REPO"),
    ];
    for (args, words) in unknown {
        let out = moeba(&[args, &["-q"][..]].concat());
        let message = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.starts_with("error: ") && message.contains(words), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn every_shell_gets_a_script_and_every_command_a_page() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let out = moeba(&["completions", shell]);
        assert!(out.status.success() && text(&out.stdout).contains("moeba"), "{shell}");
    }
    assert!(text(&moeba(&["man"]).stdout).contains(".TH moeba 1"));
    let page = moeba(&["man", "completions"]);
    assert!(text(&page.stdout).contains("SHELL"), "{}", text(&page.stdout));
}

#[test]
fn short_help_has_the_common_flags_and_long_help_all() {
    let help = |args: &[&str]| text(&moeba(args).stdout).to_owned();
    let (short, long) = (help(&["run", "-h"]), help(&["run", "--help"]));
    assert!(short.lines().count() < 100, "{short}");
    assert!(short.contains("`moeba run --help` shows") && short.contains("--ram"), "{short}");
    assert!(short.contains("-c, --ctx-size <N>"), "{short}");
    assert!(!short.contains("--presence-penalty") && !short.contains("MOEBA_"), "{short}");
    assert!(long.contains("--presence-penalty"), "{long}");
    assert!(long.contains("Examples:\n") && long.contains("moeba run model.gguf"), "{long}");
    let root = help(&["--help"]);
    for word in ["MOEBA_HISTORY", "MOEBA_SIMD", "130", "Examples:"] {
        assert!(root.contains(word), "{root}");
    }
}

#[test]
fn manual_pages_can_be_installed() {
    let folder = tempfile::tempdir().unwrap();
    let out = moeba(&["man", "--dir", folder.path().to_str().unwrap()]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let page = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    let run = page("moeba-run.1");
    for word in [".TH moeba-run 1", "EXAMPLES", "ENVIRONMENT", "MOEBA_HISTORY", "[OPTIONS]"] {
        assert!(run.contains(word), "no {word} in {run}");
    }
    assert!(!run.contains("EXTRA") && page("moeba.1").contains("moeba\\-run(1)"), "{run}");
    let record = page("moeba-trace-record.1");
    assert_eq!(record, text(&moeba(&["man", "trace", "record"]).stdout));
    assert!(record.contains("OUT.mtrace"), "{record}");
}

#[test]
fn a_script_goes_into_a_folder_and_replaces_its_like_only() {
    let folder = tempfile::tempdir().unwrap();
    let (file, dir) = (folder.path().join("moeba.bash"), folder.path().to_str().unwrap());
    for _ in 0..2 {
        assert!(moeba(&["completions", "bash", "--dir", dir]).status.success());
        assert_eq!(std::fs::read(&file).unwrap(), moeba(&["completions", "bash"]).stdout);
    }
    std::fs::write(&file, "another program's").unwrap();
    let out = moeba(&["completions", "bash", "--dir", dir]);
    let said = text(&out.stderr);
    assert!(out.status.code() == Some(1) && said.contains("which stays"), "{said}");
}

#[test]
fn shells_know_the_values_of_flags() {
    let bash = moeba(&["completions", "bash"]);
    let bash = text(&bash.stdout);
    for list in ["auto uring pread mmap", "on-demand deepspeed", "standard granule"] {
        assert!(bash.contains(&format!("compgen -W \"{list}")), "{list}");
    }
    let zsh = moeba(&["completions", "zsh"]);
    assert!(text(&zsh.stdout).contains("(auto uring pread mmap)"));
}

#[test]
fn a_log_file_that_cannot_be_made_is_named() {
    let out = moeba(&["man", "--log-file", "/nonexistent/dir/log"]);
    assert_eq!(out.status.code(), Some(1));
    let message = text(&out.stderr);
    assert!(message.starts_with("error: /nonexistent/dir/log: "), "{message}");
    assert_eq!(message.lines().count(), 1);
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let program = env!("CARGO_BIN_EXE_moeba");
    let script = format!("'{program}' completions zsh | head -c 1; echo ${{PIPESTATUS[0]}}");
    let out = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
    assert!(text(&out.stdout).ends_with("0\n"), "{out:?}");
    assert!(out.stderr.is_empty(), "{out:?}");
}
