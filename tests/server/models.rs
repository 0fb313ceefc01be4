use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::cli::{Tiny, tiny, write_tiny};
use common::hub::{self, Cache, Repo};
use moeba::engine::{Engine, EngineOptions, LoadPhase, Loading};
use moeba::server::{Library, Limits, Listed, Loaded, Need, Shelf};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::operations::check_with_promtool;
use crate::support::{
    Answer, Server, command_of_none, loaded, merged, model, options, post_to, read, start_command,
    start_of,
};

const CHAT: &str = "/v1/chat/completions";
const ARGS: &[&str] = &["-c", "256", "--parallel", "2", "--kv-ram", "0"];

/// A folder with the demo model and a tiny one.
fn shelf() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(model(), folder.path().join("demo.gguf")).unwrap();
    write_tiny(&folder.path().join("tiny.gguf"), Tiny { chat: true, broken: false });
    folder
}

fn start_dir(folder: &Path, args: &[&str]) -> Server {
    let own = tempfile::tempdir().unwrap();
    let mut command = command_of_none(&own, &[ARGS, args].concat());
    command.arg("--models-dir").arg(folder);
    quiet(start_command(command, own))
}

/// A pipe that is not read would fill.
fn quiet(mut server: Server) -> Server {
    let mut stderr = server.child.stderr.take().unwrap();
    std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
    server
}

fn chat(model: &str) -> Value {
    let message = json!({"role": "user", "content": "What is a branch?"});
    json!({"model": model, "messages": [message], "max_tokens": 8, "seed": 7})
}

/// The text of an answer, and its counts.
fn text(answer: &Answer) -> (Value, Value) {
    assert_eq!(answer.status, 200, "{answer:?}");
    let json = answer.json();
    (json["choices"][0].clone(), json["usage"]["completion_tokens"].clone())
}

/// The state of a model.
fn state(server: &Server, name: &str) -> String {
    let list = server.get("/v1/models").json();
    let entry = list["data"].as_array().unwrap().iter().find(|entry| entry["id"] == name);
    entry.unwrap_or_else(|| panic!("{list}"))["status"]["value"].as_str().unwrap().to_owned()
}

fn wait_for(server: &Server, name: &str, wanted: &str) {
    let start = Instant::now();
    while state(server, name) != wanted {
        assert!(start.elapsed() < Duration::from_secs(60), "{name} is not {wanted}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn names(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap()).collect()
}

/// Each series of a model has its name, those of one name stand together, and a name in the query
/// leaves out the other model's.
fn check_metrics(server: &Server) {
    let both = server.get("/metrics").body;
    let one = server.get("/metrics?model=demo").body;
    for text in [&both, &one] {
        let names: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")).collect();
        let unique: std::collections::BTreeSet<&&str> = names.iter().collect();
        assert_eq!(unique.len(), names.len(), "a name has one place: {text}");
    }
    for name in ["moeba_queue_length", "llamacpp:n_decode_total", "moeba_grammar_mask_seconds_sum"]
    {
        let lines = |text: &str| {
            let own = text.lines().filter(|line| line.starts_with(&format!("{name}{{")));
            let own = own.map(|line| line.rsplit_once(' ').unwrap().0.to_owned());
            own.collect::<Vec<String>>()
        };
        let of = |model: &str| format!("{name}{{model=\"{model}\"}}");
        assert_eq!(lines(&both), [of("demo"), of("tiny")], "{both}");
        assert_eq!(lines(&one), [of("demo")], "{one}");
    }
    let bucket = "moeba_queue_wait_seconds_bucket{model=\"tiny\",le=\"+Inf\"} 1";
    assert!(both.lines().any(|line| line == bucket), "{both}");
    assert!(!one.contains(bucket) && one.contains("moeba_model_loaded{model=\"tiny\"} 1"), "{one}");
    check_with_promtool(&both);
}

#[test]
fn models_of_a_folder_are_listed_loaded_and_unloaded() {
    let folder = shelf();
    let server = start_dir(folder.path(), &[]);
    let list = server.get("/v1/models").json();
    let ids: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|e| &e["id"]).collect();
    assert_eq!(ids, ["demo", "tiny"]);
    assert!(list["data"].as_array().unwrap().iter().all(|e| e["status"]["value"] == "unloaded"));
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/props").json()["role"], "router");
    let tags = server.get("/api/tags").json();
    assert_eq!(names(&tags["models"]), ["demo", "tiny"]);
    assert_eq!(server.get("/api/ps").json(), json!({"models": []}));
    // A look at a model does not load it.
    let shown = server.post("/api/show", &json!({"model": "tiny:latest"})).json();
    assert_eq!(shown["model_info"]["qwen3moe.context_length"], 256);
    assert!(server.get("/slots?model=tiny").error(503).contains("not loaded"));
    assert_eq!(server.get("/props?model=tiny").json()["is_sleeping"], true);
    assert!(server.get("/metrics").body.contains("moeba_model_loaded{model=\"tiny\"} 0"));

    let answer = server.post(CHAT, &chat("tiny"));
    assert_eq!((answer.status, &answer.json()["model"]), (200, &json!("tiny")));
    let ps = server.get("/api/ps").json();
    assert_eq!((names(&ps["models"]), state(&server, "demo")), (vec!["tiny"], "unloaded".into()));
    assert_eq!(server.get("/v1/models/tiny").json()["context_length"], 128);
    // Facts of the file are the same before and after.
    assert_eq!(server.get("/api/tags").json(), tags);
    assert_eq!(server.get("/slots?model=tiny").json().as_array().unwrap().len(), 2);
    let metrics = server.get("/metrics?model=tiny").body;
    assert!(metrics.contains("moeba_model_loaded{model=\"tiny\"} 1"));
    assert!(metrics.contains("\nmoeba_tokens_predicted_total{model=\"tiny\"} 8\n"), "{metrics}");

    assert_eq!(server.post("/models/load", &json!({"model": "demo"})).json()["success"], true);
    wait_for(&server, "demo", "loaded");
    check_metrics(&server);
    assert_eq!(server.post("/models/unload", &json!({"model": "tiny"})).json()["success"], true);
    wait_for(&server, "tiny", "unloaded");
    server.post("/models/unload", &json!({"model": "tiny"})).error(400);
    // Names that are not there, and none.
    let unknown = server.post(CHAT, &chat("other"));
    assert_eq!(unknown.error(404), "model 'other' not found: the server has demo, tiny");
    assert_eq!(unknown.json()["error"]["code"], "model_not_found");
    let mut nameless = chat("");
    nameless.as_object_mut().unwrap().remove("model");
    assert!(server.post(CHAT, &nameless).error(400).contains("demo, tiny"));
    assert_eq!(server.get("/props?model=other").status, 404);
    server.post(CHAT, &json!({"model": 5})).error(400);
    assert!(server.post_text(CHAT, "{").error(400).contains("no JSON"));
    server.post("/models/load", &json!({})).error(400);
    // A file that comes is there, and one that goes is not.
    write_tiny(&folder.path().join("new.gguf"), Tiny { chat: true, broken: false });
    assert_eq!(server.post(CHAT, &chat("new")).status, 200);
    std::fs::remove_file(folder.path().join("new.gguf")).unwrap();
    assert_eq!(names(&server.get("/api/tags").json()["models"]), ["demo", "tiny"]);
    server.post(CHAT, &chat("new")).error(404);
}

#[test]
fn answers_are_those_of_each_model_alone() {
    let folder = shelf();
    let alone = ["demo", "tiny"].map(|name| {
        let server = quiet(start_of(&folder.path().join(format!("{name}.gguf")), ARGS));
        text(&server.post(CHAT, &chat("any")))
    });
    let server = start_dir(folder.path(), &[]);
    let (server, alone) = (&server, &alone);
    std::thread::scope(|scope| {
        for i in 0..8 {
            scope.spawn(move || {
                let name = ["demo", "tiny"][i % 2];
                assert_eq!(text(&server.post(CHAT, &chat(name))), alone[i % 2], "{name}");
            });
        }
    });
    // One after the other, where memory holds one.
    let server = start_dir(folder.path(), &["--models-max", "1"]);
    for i in 0..4 {
        let (name, other) = [("demo", "tiny"), ("tiny", "demo")][i % 2];
        assert_eq!(text(&server.post(CHAT, &chat(name))), alone[i % 2], "{name}");
        assert_eq!(
            (state(&server, name), state(&server, other)),
            ("loaded".into(), "unloaded".into())
        );
    }
}

#[test]
fn a_model_in_use_stays_until_its_requests_have_ended() {
    let folder = shelf();
    let server = start_dir(folder.path(), &["--models-max", "1", "-c", "8192"]);
    let long = json!({"stream": true, "max_tokens": 600, "ignore_eos": true});
    let mut stream = server.begin(CHAT, &merged(chat("demo"), &long));
    stream.read_exact(&mut [0; 200]).unwrap();
    // The second one needs the place of the first, which ends before.
    let waiting = server.begin(CHAT, &chat("tiny"));
    let first = read(&mut stream);
    assert!(first.body.contains("\"finish_reason\":\"length\""), "{first:?}");
    assert_eq!(text(&read(&mut { waiting })).1, 8);
    assert_eq!(state(&server, "demo"), "unloaded");
    // An unload waits, too.
    let mut stream = server.begin(CHAT, &merged(chat("demo"), &long));
    stream.read_exact(&mut [0; 200]).unwrap();
    assert_eq!(server.post("/models/unload", &json!({"model": "demo"})).status, 200);
    assert!(read(&mut stream).body.contains("\"finish_reason\":\"length\""));
    wait_for(&server, "demo", "unloaded");
}

#[test]
fn experts_of_all_models_share_the_memory_of_ram() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.gguf", "b.gguf"] {
        write_tiny(&folder.path().join(name), Tiny { chat: true, broken: false });
    }
    let plan = Engine::plan_of(&folder.path().join("a.gguf"), &EngineOptions::default()).unwrap();
    for (times, expected) in [(1.5, "unloaded"), (2.0, "loaded")] {
        let ram = format!("{}", (plan.sizes.expert_bytes as f64 * times) as u64);
        let server = start_dir(folder.path(), &["--ram", &ram]);
        for name in ["a", "b"] {
            assert_eq!(server.post(CHAT, &chat(name)).status, 200);
        }
        assert_eq!(
            (state(&server, "a").as_str(), state(&server, "b").as_str()),
            (expected, "loaded")
        );
    }
}

#[test]
fn models_are_kept_as_ollamas_clients_say() {
    let folder = shelf();
    let server = start_dir(folder.path(), &[]);
    let generate =
        |body: Value| server.post("/api/generate", &merged(json!({"model": "tiny"}), &body));
    // Nothing is loaded to be unloaded.
    let gone = generate(json!({"keep_alive": 0})).json();
    assert_eq!((&gone["done_reason"], &gone["model"]), (&json!("unload"), &json!("tiny")));
    assert_eq!(state(&server, "tiny"), "unloaded");
    assert_eq!(generate(json!({})).json()["done_reason"], "load");
    let expires = || server.get("/api/ps").json()["models"][0]["expires_at"].clone();
    assert!(expires().as_str().unwrap().starts_with("9999"));
    assert_eq!(generate(json!({"keep_alive": "1h30m"})).status, 200);
    assert!(expires().as_str().unwrap().starts_with("20"), "{}", expires());
    assert_eq!(generate(json!({"keep_alive": -1})).status, 200);
    assert!(expires().as_str().unwrap().starts_with("9999"));
    assert_eq!(generate(json!({"keep_alive": "0s"})).json()["done_reason"], "unload");
    wait_for(&server, "tiny", "unloaded");
    let body =
        json!({"prompt": "x", "keep_alive": 0.05, "stream": false, "options": {"num_predict": 2}});
    assert_eq!(generate(body).json()["done"], true);
    wait_for(&server, "tiny", "unloaded");
    for bad in [json!("soon"), json!({}), json!("5x"), json!("")] {
        let body = json!({"model": "tiny", "prompt": "x", "keep_alive": bad});
        assert_eq!(server.post("/api/generate", &body).status, 400, "{bad}");
    }
    let unknown = server.post("/api/chat", &json!({"model": "none"}));
    assert!(unknown.json()["error"].as_str().unwrap().starts_with("model 'none' not found"));
}

#[test]
fn one_model_sleeps_and_wakes() {
    let tiny = tiny(Tiny { chat: true, broken: false });
    let server = quiet(start_of(&tiny.path, &[ARGS, &["--sleep-idle-seconds", "1"]].concat()));
    let first = text(&server.post(CHAT, &chat("whatever")));
    wait_for(&server, "tiny", "sleeping");
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/props").json()["is_sleeping"], true);
    assert_eq!(text(&server.post(CHAT, &chat("another"))), first);
}

/// Threads, but for those of HTTP, which come and go; open files and maps of models of the server's
/// process.
fn holdings(server: &Server) -> [usize; 3] {
    let proc = PathBuf::from(format!("/proc/{}", server.child.id()));
    let threads = std::fs::read_dir(proc.join("task")).unwrap().flatten();
    let name = |path: PathBuf| std::fs::read_to_string(path.join("comm")).unwrap_or_default();
    let threads = threads.filter(|thread| name(thread.path()).trim() != "http").count();
    let n_files = std::fs::read_dir(proc.join("fd")).unwrap().count();
    let maps = std::fs::read_to_string(proc.join("maps")).unwrap();
    [threads, n_files, maps.lines().filter(|line| line.ends_with(".gguf")).count()]
}

#[test]
fn a_model_that_has_left_holds_nothing() {
    let folder = shelf();
    let server = start_dir(folder.path(), &["--ram", "50%"]);
    let mut seen = Vec::new();
    for i in 0..21 {
        let form = json!({"response_format": {"type": "json_object"}});
        assert_eq!(server.post(CHAT, &merged(chat("demo"), &form)).status, 200);
        assert_eq!(server.post("/models/unload", &json!({"model": "demo"})).status, 200);
        wait_for(&server, "demo", "unloaded");
        if i % 10 == 0 {
            seen.push(settled(&server));
        }
    }
    assert_eq!(seen[1], seen[0]);
    assert_eq!(seen[2], seen[0]);
    assert_eq!(seen[0][2], 0, "no file of a model is mapped");
}

/// [`holdings`] once they have not changed for a while.
fn settled(server: &Server) -> [usize; 3] {
    let start = Instant::now();
    let mut last = (holdings(server), Instant::now());
    while last.1.elapsed() < Duration::from_millis(500) {
        assert!(start.elapsed() < Duration::from_secs(60), "threads keep coming and going");
        std::thread::sleep(Duration::from_millis(50));
        let now = holdings(server);
        if now != last.0 {
            last = (now, Instant::now());
        }
    }
    last.0
}

#[test]
fn a_file_that_cannot_be_loaded_fails_its_own_requests() {
    let folder = shelf();
    std::fs::write(folder.path().join("bad.gguf"), "not a model").unwrap();
    let server = start_dir(folder.path(), &[]);
    let why = server.post(CHAT, &chat("bad")).error(400);
    assert!(
        why.starts_with("the model 'bad' cannot be loaded: ") && why.contains("bad.gguf"),
        "{why}"
    );
    let entry = server.get("/v1/models/bad").json();
    assert_eq!(entry["status"], json!({"value": "unloaded", "failed": true, "error": why}));
    assert_eq!(server.post(CHAT, &chat("tiny")).status, 200);
    // It is tried again, and works once the file does.
    write_tiny(&folder.path().join("bad.gguf"), Tiny { chat: true, broken: false });
    assert_eq!(server.post(CHAT, &chat("bad")).status, 200);
    // A loaded model whose file is replaced is loaded again.
    std::fs::remove_file(folder.path().join("bad.gguf")).unwrap();
    std::os::unix::fs::symlink(model(), folder.path().join("bad.gguf")).unwrap();
    server.get("/v1/models");
    let same = text(&server.post(CHAT, &chat("demo")));
    assert_eq!(text(&server.post(CHAT, &chat("bad"))), same);
}

#[test]
fn the_first_model_is_that_of_requests_without_a_name() {
    let folder = shelf();
    let own = tempfile::tempdir().unwrap();
    let mut command = command_of_none(&own, &[ARGS, &["--alias", "mine"]].concat());
    command.arg(folder.path().join("tiny.gguf")).arg("--models-dir").arg(folder.path());
    let server = quiet(start_command(command, own));
    assert_eq!(state(&server, "mine"), "loaded");
    assert_eq!(names(&server.get("/api/tags").json()["models"]), ["mine", "demo"]);
    let mut nameless = chat("");
    nameless.as_object_mut().unwrap().remove("model");
    assert_eq!(server.post(CHAT, &nameless).json()["model"], "mine");
    assert_eq!(server.get("/props").json()["model_alias"], "mine");
    server.post(CHAT, &chat("tiny")).error(404);
}

#[test]
fn flags_that_have_no_sense_together_are_refused() {
    let folder = shelf();
    let (dir, empty) = (folder.path().to_str().unwrap(), tempfile::tempdir().unwrap());
    let file = model().to_str().unwrap().to_owned();
    let nothing = empty.path().to_str().unwrap();
    for (args, words) in [
        (vec![&*file, "--models-max", "2"], "--models-max: there is one model"),
        (vec![&*file, "--allow-pull"], "--allow-pull: the server has one model"),
        (vec!["--models-dir", dir, "--kv-disk", nothing], "--kv-disk: "),
        (vec!["--models-dir", dir, "--lora", &*file], "--lora: "),
        (vec!["--models-dir", dir, "--alias", "x"], "--alias: "),
        (vec!["--models-dir", dir, "--models-preset", "x.ini"], "--models-preset"),
        (vec!["--models-dir", dir, "--no-models-autoload"], "--no-models-autoload"),
        (vec!["--models-dir", nothing], "the folder has no GGUF file"),
        (vec![], "none is downloaded"),
    ] {
        let own = tempfile::tempdir().unwrap();
        let mut command = command_of_none(&own, &args);
        command.env("HF_HUB_CACHE", empty.path());
        let out = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(words), "{args:?}: {stderr}");
    }
}

#[test]
fn models_are_pulled_served_and_deleted() {
    let bytes = std::fs::read(tiny(Tiny { chat: true, broken: false }).path).unwrap();
    let repo = Repo::new(&[("m-F32.gguf", &bytes), ("README.md", b"x")]);
    let hub = hub::Server::new(move |request| repo.answer(request));
    let cache = Cache::new();
    let start = |args: &[&str]| {
        let own = tempfile::tempdir().unwrap();
        let mut command = command_of_none(&own, &[ARGS, args].concat());
        command.env("HF_ENDPOINT", hub.url()).env("HF_HUB_CACHE", cache.path());
        quiet(start_command(command, own))
    };
    let server = start(&["--allow-pull"]);
    let wanted = json!({"model": "user/model"});
    server.post(CHAT, &chat("user/model")).error(404);
    let lines = server.post("/api/pull", &wanted).lines();
    assert_eq!(lines[0], json!({"status": "pulling manifest"}));
    let last = &lines[lines.len() - 2];
    assert_eq!((&last["total"], &last["completed"]), (&json!(bytes.len()), &json!(bytes.len())));
    assert!(last["status"].as_str().unwrap().starts_with("pulling m-F32"), "{last}");
    assert_eq!(last["digest"].as_str().unwrap().len(), "sha256:".len() + 64);
    assert_eq!(lines.last(), Some(&json!({"status": "success"})));
    let whole = server.post("/api/pull", &merged(wanted.clone(), &json!({"stream": false})));
    assert_eq!(whole.json(), json!({"status": "success"}));
    assert_eq!(names(&server.get("/api/tags").json()["models"]), ["user/model:F32"]);
    for name in ["user/model:F32", "user/model", "hf.co/user/model:f32"] {
        assert_eq!(server.post(CHAT, &chat(name)).status, 200, "{name}");
    }
    let failed = server.post("/api/pull", &json!({"model": "user/other"})).lines();
    assert!(failed.last().unwrap()["error"].as_str().unwrap().contains("user/other"), "{failed:?}");
    assert_eq!(server.post("/api/pull", &json!({"model": "../x", "stream": false})).status, 400);
    // Without the flag nothing is fetched and nothing is removed.
    let other = start(&[]);
    let delete = |server: &Server, name: &str| {
        server.send_body("DELETE", "/api/delete", &json!({ "model": name }).to_string())
    };
    assert_eq!(other.post("/api/pull", &wanted).status, 501);
    assert_eq!(delete(&other, "user/model:F32").status, 501);
    assert_eq!(delete(&server, "none").status, 404);
    assert_eq!(delete(&server, "user/model").json()["status"], "success");
    assert_eq!(server.get("/api/tags").json(), json!({"models": []}));
    server.post(CHAT, &chat("user/model")).error(404);
}

/// Models whose loads wait for a word.
struct Gated {
    path: PathBuf,
    begun: Mutex<Sender<String>>,
    go: Mutex<Receiver<bool>>,
}

impl Library for Gated {
    fn list(&self) -> Vec<Listed> {
        ["a", "b"].map(|name| Listed::new(name.into(), self.path.clone())).into()
    }

    fn need(&self, _: &Listed) -> moeba::Result<Need> {
        Ok(Need::default())
    }

    fn load(&self, model: &Listed, progress: &mut dyn FnMut(Loading)) -> moeba::Result<Loaded> {
        progress(LoadPhase::Pages.at(0.25));
        self.begun.lock().unwrap().send(model.name.clone()).unwrap();
        if !self.go.lock().unwrap().recv().unwrap() {
            panic!("a fault in the program");
        }
        let options = EngineOptions { n_threads: Some(1), ..EngineOptions::default() };
        Ok(loaded(Engine::load(&self.path, &options, &mut |_| ())?, options))
    }

    fn names(&self, _: &Listed) -> Vec<String> {
        Vec::new()
    }
}

#[test]
fn requests_wait_for_a_load_and_others_do_not() {
    let tiny = tiny(Tiny { chat: true, broken: false });
    let ((begun, is_begun), (go, gate)) = (channel(), channel());
    let library = Gated { path: tiny.path.clone(), begun: begun.into(), go: gate.into() };
    let limits = Limits { most: 2, bytes: None, expert_bytes: None, n_waiting: 1, keep: None };
    let server = moeba::server::Server::bind(options()).unwrap();
    let shelf = Shelf {
        library: Box::new(library),
        limits,
        first: None,
        is_single: false,
        body_bytes: 0,
        patience: Some(Duration::from_secs(60)),
    };
    server.open_models(shelf).unwrap();
    let url = Arc::new(server.url().to_owned());
    let ask = |name: &'static str| {
        let url = url.clone();
        std::thread::spawn(move || post_to(&url, CHAT, &chat(name)))
    };
    let first = ask("a");
    assert_eq!(is_begun.recv().unwrap(), "a");
    go.send(true).unwrap();
    assert_eq!(first.join().unwrap().status, 200);
    // While the second one is loaded, the first one answers, and one more may wait for it.
    let second = ask("b");
    assert_eq!(is_begun.recv().unwrap(), "b");
    assert_eq!(ask("a").join().unwrap().status, 200);
    let too_many = ask("b").join().unwrap();
    assert!(too_many.error(503).contains("wait for the model 'b'"), "{too_many:?}");
    assert!(too_many.header("retry-after").is_some());
    let health = get(&url, "/health?model=b");
    assert_eq!((health.status, &health.json()["progress"]), (503, &json!(0.25)));
    assert_eq!(health.json()["phase"], "reading the file");
    assert_eq!(get(&url, "/health").status, 200);
    let entry = get(&url, "/v1/models/b").json();
    let expected = json!({"value": "loading", "progress": 0.25, "phase": "reading the file"});
    assert_eq!(entry["status"], expected);
    // A panic is the error of this model, and the next load is another one.
    go.send(false).unwrap();
    assert!(second.join().unwrap().error(400).contains("the model 'b' cannot be loaded"));
    let third = ask("b");
    assert_eq!(is_begun.recv().unwrap(), "b");
    go.send(true).unwrap();
    assert_eq!(third.join().unwrap().status, 200);
    server.stop();
}

fn get(url: &str, path: &str) -> Answer {
    use std::io::Write;
    let host = url.trim_start_matches("http://");
    let mut stream = std::net::TcpStream::connect(host).unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    read(&mut stream)
}
