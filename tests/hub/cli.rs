//! Models of a hub by the program itself: names in place of files, processes that meet or die, and
//! what must never be printed.

use common::cli::{Tiny, failed, moeba, stderr, stdout, succeeded, tiny};
use common::hub::{Cache, Reply, Repo, Request, Server, TOKEN, content, sha256};
use std::fs;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The program with a hub and a cache.
fn with_hub(cache: &Cache, server: &Server) -> Command {
    let mut command = moeba();
    command.env("HF_ENDPOINT", server.url()).env("HF_HUB_CACHE", cache.path());
    command
}

fn ran(cache: &Cache, server: &Server, line: &str) -> Output {
    with_hub(cache, server).args(line.split(' ')).output().unwrap()
}

/// A hub that has a tiny model.
fn hub_with_model() -> Server {
    let bytes = fs::read(tiny(Tiny::default()).path).unwrap();
    let repo = Repo::new(&[("m-F32.gguf", &bytes), ("README.md", b"x")]);
    Server::new(move |request| repo.answer(request))
}

#[test]
fn a_repository_stands_where_a_file_can() {
    let (cache, server) = (Cache::new(), hub_with_model());
    let out = ran(&cache, &server, "inspect -hf user/model --json");
    assert!(succeeded(&out).contains("\"general.architecture\":\"qwen3moe\""));
    // No terminal, no bar.
    assert!(!stderr(&out).contains('\r') && stderr(&out).contains("downloading user/model"));
    for line in [
        "tokenize -hf user/model:f32 hi",
        "tokenize hi --hf-repo=user/model",
        "tokenize hf:user/model hi",
        "tokenize -hf https://huggingface.co/user/model hi",
        "tokenize hf.co/user/model:F32 hi",
        "tokenize https://huggingface.co/user/model/blob/main/m-F32.gguf hi",
    ] {
        assert_eq!(succeeded(&ran(&cache, &server, line)), "104,105\n", "{line}");
    }
    let line = "run -hf user/model -p hi -n 2 --temp 0 -t 1 --offline";
    assert!(succeeded(&ran(&cache, &server, line)).starts_with("hi"));
    assert_eq!(server.resolved().len(), 1);
    failed(
        &ran(&cache, &server, "inspect -hf user/model:Q2_K"),
        1,
        &["user/model:Q2_K", "m-F32.gguf"],
    );
    failed(
        &ran(&cache, &server, "inspect -hf user/model -hff x.gguf"),
        1,
        &["x.gguf", "m-F32.gguf"],
    );
    failed(&ran(&cache, &server, "inspect -hf user/other"), 1, &["user/other", "not found"]);
    failed(
        &ran(&cache, &server, "inspect -hf user/other --offline"),
        1,
        &["user/other", "--offline"],
    );
}

#[test]
fn the_environment_may_name_the_repository() {
    let (cache, server, model) = (Cache::new(), hub_with_model(), tiny(Tiny::default()));
    let path = |vars: &[(&str, &str)], args: &[&str]| {
        let mut command = with_hub(&cache, &server);
        let out = command.envs(vars.iter().copied()).arg("inspect").args(args).output().unwrap();
        let json: serde_json::Value = serde_json::from_str(succeeded(&out)).unwrap();
        json["path"].as_str().unwrap().contains("models--user--model")
    };
    let file = model.path.to_str().unwrap();
    let theirs = ("LLAMA_ARG_HF_REPO", "user/model");
    assert!(path(&[theirs], &["--json"]));
    assert!(path(&[("MOEBA_HF_REPO", "user/model"), ("LLAMA_ARG_HF_REPO", "x")], &["--json"]));
    assert!(!path(&[theirs], &["--json", file]), "a MODEL of the command line counts first");
    assert!(!path(&[theirs, ("LLAMA_ARG_MODEL", file)], &["--json"]));
    assert!(path(&[("MOEBA_MODEL", file)], &["--json", "-hf", "user/model"]));
}

#[test]
fn models_are_pulled_listed_and_removed() {
    let (cache, server) = (Cache::new(), hub_with_model());
    let path = succeeded(&ran(&cache, &server, "pull user/model")).trim_end().to_owned();
    assert!(path.ends_with("m-F32.gguf") && fs::read(&path).unwrap().starts_with(b"GGUF"));
    let list = ran(&cache, &server, "list");
    let line = succeeded(&list);
    assert!(line.starts_with("user/model:F32 ") && line.trim_end().ends_with(&path), "{line}");
    succeeded(&ran(&cache, &server, "rm user/model:F32"));
    assert!(fs::metadata(&path).is_err());
    assert_eq!(succeeded(&ran(&cache, &server, "list")), "");
    failed(&ran(&cache, &server, "rm user/model:F32"), 1, &["user/model:F32"]);
}

#[test]
fn the_token_is_sent_and_never_printed() {
    let (cache, server) = (Cache::new(), hub_with_model());
    let hex: String = TOKEN.bytes().map(|byte| format!("{byte:02x}")).collect();
    let clean = |out: &Output| {
        let all = format!("{}{}", stdout(out), stderr(out));
        let digits: String = all.chars().filter(|c| !c.is_whitespace()).collect();
        assert!(!all.contains(TOKEN) && !digits.to_ascii_lowercase().contains(&hex), "{all}");
    };
    for filter in ["trace", "ureq_proto::util=trace,ureq::util=trace"] {
        let mut command = with_hub(&cache, &server);
        command.env("RUST_LOG", filter).args(["pull", "user/model", "-hft", TOKEN]);
        let out = command.output().unwrap();
        succeeded(&out);
        clean(&out);
    }
    let authorized = format!("Bearer {TOKEN}");
    assert!(server.requests().iter().all(|r| r.header("authorization") == Some(&authorized)));
    let n = server.requests().len();
    let out =
        with_hub(&cache, &server).env("HF_TOKEN", TOKEN).args(["pull", "user/model"]).output();
    succeeded(&out.unwrap());
    assert_eq!(server.requests()[n].header("authorization"), Some(authorized.as_str()));
    // A token that is none, and the help.
    let out = with_hub(&cache, &server)
        .args(["pull", "a/b", "--hf-token", &format!("{TOKEN} x")])
        .output();
    failed(out.as_ref().unwrap(), 2, &["token"]);
    clean(&out.unwrap());
    let out = with_hub(&cache, &server).env("HF_TOKEN", TOKEN).args(["pull", "--help"]).output();
    clean(&out.unwrap());
}

/// A hub whose file takes some seconds, in pieces of a kilobyte.
fn slow(bytes: &[u8]) -> Server {
    let repo = Repo::new(&[("m-Q4_K_M.gguf", bytes)]);
    Server::new(move |request| {
        let delay = Duration::from_millis(if request.is_resolve() { 20 } else { 0 });
        Reply { delay, ..repo.answer(request) }
    })
}

/// Until some of the file has come.
fn wait_for_bytes(cache: &Cache, bytes: &[u8]) {
    let end = Instant::now() + Duration::from_secs(60);
    while fs::metadata(cache.incomplete(bytes)).map_or(0, |meta| meta.len()) < 3_000 {
        assert!(Instant::now() < end, "nothing came");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn two_processes_share_one_download() {
    let bytes = content(60_000, 1);
    let (cache, server) = (Cache::new(), slow(&bytes));
    let pull = || {
        let mut command = with_hub(&cache, &server);
        command.args(["pull", "user/model"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let first = pull();
    wait_for_bytes(&cache, &bytes);
    let outs = [pull(), first].map(|child| child.wait_with_output().unwrap());
    outs.iter().for_each(|out| assert!(out.status.success(), "{}", stderr(out)));
    assert!(stderr(&outs[0]).contains("another process is downloading"), "{}", stderr(&outs[0]));
    assert_eq!(server.resolved().len(), 1);
    assert_eq!(fs::read(cache.blob(&bytes)).unwrap(), bytes);
}

#[test]
fn what_a_killed_or_interrupted_process_left_is_gone_on_with() {
    let bytes = content(80_000, 2);
    let (cache, server) = (Cache::new(), slow(&bytes));
    let mut from = vec![0];
    for signal in ["-KILL", "-INT"] {
        let mut command = with_hub(&cache, &server);
        let mut child = command.args(["pull", "user/model"]).stderr(Stdio::null()).spawn().unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        let left = || fs::metadata(cache.incomplete(&bytes)).map_or(0, |meta| meta.len());
        while left() < from.last().unwrap() + 3_000 {
            assert!(Instant::now() < end, "nothing came");
            std::thread::sleep(Duration::from_millis(10));
        }
        let id = child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
        let status = child.wait().unwrap();
        assert_eq!(status.code(), if signal == "-INT" { Some(130) } else { None });
        from.push(left());
    }
    succeeded(&ran(&cache, &server, "pull user/model"));
    let asked: Vec<u64> = server.resolved().iter().map(|r| Request::from(r) as u64).collect();
    assert_eq!(asked, from);
    assert_eq!(sha256(&fs::read(cache.blob(&bytes)).unwrap()), sha256(&bytes));
}

#[test]
fn metadata_can_be_overridden() {
    let model = tiny(Tiny::default());
    let on = |args: &[&str]| {
        let mut command = moeba();
        command.arg(args[0]).arg(&model.path).args(&args[1..]).output().unwrap()
    };
    let metadata = |args: &[&str]| {
        let out = on(&[&["inspect", "--json"], args].concat());
        let json: serde_json::Value = serde_json::from_str(succeeded(&out)).unwrap();
        json["metadata"].clone()
    };
    let plain = metadata(&[]);
    let changed = metadata(&[
        "--override-kv",
        "qwen3moe.expert_used_count=int:3,\"new.key=str:a,b\"",
        "--override-kv",
        "tokenizer.ggml.add_bos_token=bool:true",
        "--override-kv=qwen3moe.attention.layer_norm_rms_epsilon=float:0.5",
    ]);
    assert_eq!(plain["qwen3moe.expert_used_count"], 2);
    assert_eq!(changed["qwen3moe.expert_used_count"], 3);
    assert_eq!(changed["new.key"], "a,b");
    assert_eq!(changed["tokenizer.ggml.add_bos_token"], true);
    assert_eq!(changed["qwen3moe.attention.layer_norm_rms_epsilon"], 0.5);
    let count = |value: &serde_json::Value| value.as_object().unwrap().len();
    assert_eq!(count(&changed), count(&plain) + 1);
    let table = on(&["inspect", "--override-kv", "qwen3moe.expert_used_count=int:3"]);
    let line = succeeded(&table).lines().find(|l| l.contains("expert_used_count")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[1..], ["u32", "3"], "the file's own type");
    // What runs the model reads it, too; the last of two counts.
    let used = |args: &[&str]| succeeded(&on(&[&["run", "--dry-run"], args].concat())).to_owned();
    assert!(used(&[]).contains("2 of 8 in each of 2 layers"));
    let twice = "qwen3moe.expert_used_count=int:5,qwen3moe.expert_used_count=int:4";
    assert!(used(&["--override-kv", twice]).contains("4 of 8 in each"));
    assert!(used(&["--override-kv", "no.such.key=int:1"]).contains("2 of 8 in each of 2 layers"));
    let wrong = |value: &str, words: &[&str]| {
        let key = "qwen3moe.expert_used_count=";
        failed(&on(&["run", "-p", "x", "--override-kv", &format!("{key}{value}")]), 2, words);
    };
    wrong("str:2", &["expert_used_count", "expected int", "u32 2", "got str"]);
    wrong("int:-1", &["expert_used_count", "fits u32", "int -1"]);
    let tokens = "tokenizer.ggml.tokens=str:x";
    failed(&on(&["inspect", "--override-kv", tokens]), 2, &["arrays cannot be overridden"]);
}

#[test]
fn what_is_no_model_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let inspect = |name: &str| {
        let mut command = moeba();
        command.current_dir(dir.path()).args(["inspect", name]).output().unwrap()
    };
    fs::create_dir_all(dir.path().join("checkpoint")).unwrap();
    fs::write(dir.path().join("checkpoint/config.json"), "{}").unwrap();
    failed(
        &inspect("checkpoint"),
        1,
        &["Hugging Face checkpoint", "`moeba convert checkpoint -o "],
    );
    fs::create_dir_all(dir.path().join("ggufs")).unwrap();
    fs::write(dir.path().join("ggufs/a.gguf"), "").unwrap();
    failed(&inspect("ggufs"), 1, &["a directory", "ggufs/a.gguf"]);
    failed(&inspect("."), 1, &["expected a GGUF file, got a directory"]);
    failed(&inspect("Some/Model-GGUF"), 1, &["no such file", "-hf Some/Model-GGUF"]);
    failed(&inspect("ggufs/b"), 1, &["ggufs/b", "No such file"]);
}

/// A hub whose file is said to have 2 GiB; a kilobyte of it comes, then nothing for a while.
#[cfg(target_os = "linux")]
fn huge() -> Server {
    let repo = Repo::new(&[("m-Q4_K_M.gguf", &content(1000, 7))]);
    Server::new(move |request| {
        let mut tree = repo.tree();
        tree[0]["lfs"]["size"] = serde_json::json!(2u64 << 30);
        match repo.answer(request) {
            _ if request.path.contains("/tree/") => Reply::new(200, tree.to_string()),
            reply if request.is_resolve() => {
                Reply { stall: true, ..reply.with("Content-Length", 2u64 << 30) }
            }
            reply => reply,
        }
    })
}

#[test]
#[cfg(target_os = "linux")]
fn someone_at_a_terminal_is_asked_before_a_large_download() {
    use common::terminal::Terminal;
    let (cache, server) = (Cache::new(), huge());
    let run = |flags: &[&str]| {
        let mut command = with_hub(&cache, &server);
        command.args(["run", "-hf", "user/model", "-p", "hi"]).args(flags);
        command
    };
    let mut terminal = Terminal::open(run(&[]));
    let seen = terminal.see(0, "Download it? [Y/n]");
    for words in ["user/model: 2.00 GiB to download", "the disk has", "memory"] {
        assert!(seen.contains(words), "no {words:?} in {seen}");
    }
    terminal.type_and_see("perhaps\r", "please answer y or n");
    terminal.type_and_see("n\r", "user/model was not downloaded");
    assert_eq!(terminal.code(), Some(1));
    assert!(cache.tree().is_empty(), "{:?}", cache.tree());
    // Ctrl-C is an answer, too.
    let terminal = Terminal::open(run(&[]));
    terminal.see(0, "Download it? [Y/n]");
    let before = terminal.seen.lock().unwrap().len();
    let pid = terminal.child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    terminal.see(before, "interrupted");
    assert_eq!(terminal.code(), Some(130));
    // With -y there is no question.
    let mut terminal = Terminal::open(run(&[]));
    terminal.see(0, "Download it? [Y/n]");
    terminal.type_and_see("\r", "downloading user/model");
    // It holds the file.
    drop(terminal);
    let terminal = Terminal::open(run(&["-y"]));
    let seen = terminal.see(0, "downloading user/model");
    assert!(!seen.contains("Download it?"), "{seen}");
    drop(terminal);
    // Without a terminal there is no question.
    let mut child = run(&[]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(line.starts_with("downloading user/model"), "{line}");
}
