use std::io::Read;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Server, command, start};

/// Token ids of a text of its own kind.
fn tokens(n: u32, kind: u32) -> Vec<u32> {
    (0..n).map(|i| 20 + (i * (7 + kind) + kind) % 400).collect()
}

fn ask(server: &Server, prompt: &[u32]) -> Value {
    let body = json!({ "prompt": prompt, "n_predict": 12, "ignore_eos": true, "seed": 3,
        "return_tokens": true });
    let answer = server.post("/completion", &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

/// Tokens of the prompt that a cache had.
fn cached(answer: &Value) -> u64 {
    answer["timings"]["cache_n"].as_u64().unwrap()
}

/// The prompt of the next turn: the last one, its answer, and more.
fn next_turn(prompt: &[u32], answer: &Value) -> Vec<u32> {
    let answer = answer["tokens"].as_array().unwrap().iter();
    let answer = answer.map(|id| id.as_u64().unwrap() as u32);
    prompt.iter().copied().chain(answer).chain(tokens(30, 5)).collect()
}

fn start_in(folder: &Path, size: &str, more: &[&str]) -> Server {
    let folder = format!("{}{size}", folder.display());
    start(&[&["-c", "2048", "--parallel", "1", "--kv-disk", &folder], more].concat())
}

/// Ends a server as a system does.
fn stop(mut server: Server) {
    server.signal("TERM");
    assert!(server.child.wait().unwrap().success());
}

/// The value of a series.
fn series(server: &Server, name: &str) -> f64 {
    let metrics = server.get("/metrics").body;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} in {metrics}")).parse().unwrap()
}

/// Files of pages, and all their bytes.
fn files(folder: &Path) -> (Vec<std::path::PathBuf>, u64) {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.filter(|path| path.extension().is_some()).collect();
    let n_bytes = files.iter().map(|path| path.metadata().map_or(0, |meta| meta.len())).sum();
    (files, n_bytes)
}

#[test]
fn a_conversation_goes_on_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    let prompt = tokens(1500, 0);
    let server = start_in(&path, "", &[]);
    let first = ask(&server, &prompt);
    assert_eq!(cached(&first), 0);
    stop(server);
    let second = next_turn(&prompt, &first);
    let without = start(&["-c", "2048", "--parallel", "1", "--kv-ram", "0"]);
    let expected = ask(&without, &second);
    assert_eq!((cached(&expected), &first["content"]), (0, &ask(&without, &prompt)["content"]));
    let server = start_in(&path, "", &[]);
    let answer = ask(&server, &second);
    let previous = 1500 + 12;
    assert!(cached(&answer) >= previous - 63, "{answer}");
    assert_eq!(
        (&answer["content"], &answer["tokens"]),
        (&expected["content"], &expected["tokens"])
    );
    assert_eq!(series(&server, "moeba_page_hits_total{tier=\"disk\"}"), 23.0);
    assert_eq!(series(&server, "moeba_page_corrupt_total{tier=\"disk\"}"), 0.0);
    assert!(series(&server, "moeba_page_disk_bytes") > 0.0);
    // A killed server has what it had written, with memory for no page at all.
    drop(server);
    let server = start_in(&path, "", &["--kv-ram", "0"]);
    let again = ask(&server, &second);
    assert!(cached(&again) >= previous - 63, "{again}");
    assert_eq!(again["tokens"], expected["tokens"]);
    // Other types of the cache are other bits.
    stop(server);
    let server = start_in(&path, "", &["-ctk", "q8_0"]);
    assert_eq!(cached(&ask(&server, &second)), 0);
}

#[test]
fn a_changed_byte_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = tokens(600, 1);
    let server = start_in(folder.path(), ",64M", &[]);
    let expected = ask(&server, &prompt);
    stop(server);
    let (pages, _) = files(folder.path());
    assert_eq!(pages.len(), 9);
    // One of nine: the text ends before it.
    let mut bytes = std::fs::read(&pages[4]).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&pages[4], bytes).unwrap();
    let server = start_in(folder.path(), ",64M", &[]);
    let answer = ask(&server, &prompt);
    assert_eq!(answer["tokens"], expected["tokens"]);
    assert!(cached(&answer) < 576 && cached(&answer).is_multiple_of(64), "{answer}");
    assert_eq!(series(&server, "moeba_page_corrupt_total{tier=\"disk\"}"), 1.0);
    stop(server);
    // It was computed and written again.
    let server = start_in(folder.path(), ",64M", &[]);
    let answer = ask(&server, &prompt);
    assert_eq!((cached(&answer), &answer["tokens"]), (576, &expected["tokens"]));
    assert_eq!(series(&server, "moeba_page_corrupt_total{tier=\"disk\"}"), 0.0);
}

#[test]
fn the_folder_stays_within_its_bound() {
    let folder = tempfile::tempdir().unwrap();
    let server = start_in(folder.path(), ",1M", &[]);
    for kind in 0..8 {
        ask(&server, &tokens(500, kind));
        let (_, n_bytes) = files(folder.path());
        assert!(n_bytes <= 1 << 20, "{n_bytes}");
    }
    let last = tokens(500, 7);
    let n_cached = cached(&ask(&server, &last));
    stop(server);
    let (pages, n_bytes) = files(folder.path());
    assert!(!pages.is_empty() && n_bytes <= 1 << 20, "{n_bytes}");
    // The latest text is there, as far as it fits.
    let server = start_in(folder.path(), ",1M", &[]);
    assert!(cached(&ask(&server, &last)) > 0 && n_cached > 0);
    assert_eq!(cached(&ask(&server, &tokens(500, 0))), 0);
    let evictions = series(&server, "moeba_page_evictions_total{tier=\"disk\"}");
    assert!(evictions > 0.0, "{evictions}");
}

#[test]
fn a_folder_that_cannot_be_had_ends_in_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |path: &Path| {
        let ready = tempfile::tempdir().unwrap();
        let mut child = command(&ready, &["--kv-disk", &path.display().to_string()]);
        let mut child = child.spawn().unwrap();
        let mut text = String::new();
        child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{text}");
        assert!(text.contains(&path.display().to_string()), "{text}");
        text
    };
    let own = folder.path().join("own");
    let server = start_in(&own, "", &[]);
    assert!(refused(&own).contains("another server"));
    assert_eq!(server.get("/health").status, 200);
    stop(server);
    std::fs::write(folder.path().join("letter"), "Dear").unwrap();
    assert!(refused(folder.path()).contains("no cache of moeba's"));
    assert!(refused(&folder.path().join("letter")).contains("cannot be kept there"));
    assert!(refused(Path::new("/proc/self/cache")).contains("cannot be kept there"));
}
