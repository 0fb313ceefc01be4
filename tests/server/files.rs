use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Server, model, read, start, start_of};

/// A copy of the model that a test may harm.
fn copy() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("copy.gguf");
    std::fs::copy(model(), &path).unwrap();
    // The clock of a file system has ticks.
    std::thread::sleep(Duration::from_millis(50));
    (folder, path)
}

/// Writes other bytes over the second half of a file.
fn overwrite(path: &Path) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    let n = file.metadata().unwrap().len();
    file.write_all_at(&vec![0x5a; 1 << 16], n / 2).unwrap();
}

fn put_back(path: &Path) {
    let bytes = std::fs::read(model()).unwrap();
    std::fs::File::options().write(true).open(path).unwrap().write_all_at(&bytes, 0).unwrap();
}

fn question() -> Value {
    let prompt: Vec<u32> = (0..200).map(|i| 20 + (i * 7) % 400).collect();
    json!({ "prompt": prompt, "n_predict": 12, "ignore_eos": true, "seed": 3 })
}

fn ask(server: &Server) -> Value {
    let answer = server.post("/completion", &question());
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["content"].clone()
}

/// The error of a request whose model has changed.
fn is_told(server: &Server) {
    let error = server.post("/v1/completions", &json!({ "prompt": "x", "max_tokens": 3 }));
    let sentence = error.error(500);
    assert_eq!(error.json()["error"]["code"], "io_error", "{error:?}");
    assert!(sentence.contains("copy.gguf: the file has changed"), "{sentence}");
}

#[test]
fn texts_of_a_changed_file_are_neither_given_nor_kept() {
    let right = ask(&start(&["-c", "1024", "--parallel", "1"]));
    for ram in [&[][..], &["--ram", "30%"]] {
        let (folder, path) = copy();
        let pages = folder.path().join("pages").display().to_string();
        let args = [&["-c", "1024", "--parallel", "1", "--kv-disk", &pages], ram].concat();
        let server = start_of(&path, &args);
        assert_eq!(ask(&server), right);
        overwrite(&path);
        is_told(&server);
        is_told(&server);
        server.post("/completion", &question()).error(500);
        assert_eq!(server.get("/health").status, 200);
        assert!(server.get("/ready").error(500).contains("the file has changed"));
        // The bytes are right again, but what was read in between is not known.
        put_back(&path);
        is_told(&server);
        drop(server);
        let server = start_of(&path, &args);
        assert_eq!(ask(&server), right);
        assert_eq!(ask(&server), right);
    }
}

#[test]
fn a_file_with_another_name_or_mode_is_the_same_file() {
    let (folder, path) = copy();
    let server = start_of(&path, &["-c", "256", "--parallel", "1"]);
    let right = ask(&server);
    std::fs::rename(&path, folder.path().join("other")).unwrap();
    std::fs::copy(model(), &path).unwrap();
    overwrite(&path);
    assert_eq!(ask(&server), right);
    std::fs::remove_file(folder.path().join("other")).unwrap();
    assert_eq!(ask(&server), right);
}

#[test]
fn a_file_that_is_cut_short_ends_in_a_sentence() {
    for ram in [&[][..], &["--ram", "30%"]] {
        let (_folder, path) = copy();
        let args = [&["-c", "60000", "--parallel", "1"], ram].concat();
        let mut server = start_of(&path, &args);
        let mut stderr = server.child.stderr.take().unwrap();
        let body = json!({ "prompt": "x", "max_tokens": -1, "ignore_eos": true, "stream": true });
        let mut stream = server.begin("/v1/completions", &body);
        server.wait_busy(1);
        std::fs::File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
        let answer = read(&mut stream);
        // In a pass the system ends the program; between two of them the request fails.
        std::thread::sleep(Duration::from_millis(300));
        match server.child.try_wait().unwrap() {
            Some(status) => {
                assert!(ram.is_empty(), "experts are read, not mapped");
                let mut text = String::new();
                stderr.read_to_string(&mut text).unwrap();
                assert_eq!(status.code(), Some(1), "{status} {text}");
                assert!(text.contains("error: ") && text.contains("copy.gguf: a part"), "{text}");
                assert!(text.contains("--no-mmap"), "{text}");
            }
            None => assert!(answer.body.contains("io_error"), "{answer:?}"),
        }
    }
}
