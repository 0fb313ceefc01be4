//! Texts of slots to files and back.

use serde_json::{Value, json};

use crate::support::{Server, start};

const PROMPT: &str = "A branch is a line of work in a tree of versions. A queue is a list in which \
                      the first item that was added is the first to leave it. A stack is a list \
                      in which the last item that was added is the first to leave it. A tree is \
                      a set of nodes in which each node but the first has one parent. A heap is";

fn with_folder(folder: &tempfile::TempDir, more: &[&str]) -> Server {
    let path = folder.path().to_str().unwrap();
    let args = ["-c", "512", "--parallel", "2", "--kv-ram", "0", "--slot-save-path", path];
    start(&[&args, more].concat())
}

/// An answer of slot 0: its text, and the tokens that the slot had of its prompt.
fn complete(server: &Server) -> (Value, u64) {
    let body = json!({
        "prompt": PROMPT, "n_predict": 8, "temperature": 0, "id_slot": 0, "ignore_eos": true,
    });
    let answer = server.post("/completion", &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    let answer = answer.json();
    (answer["content"].clone(), answer["timings"]["cache_n"].as_u64().unwrap())
}

fn act(server: &Server, slot: u32, action: &str, name: &str) -> (u16, Value) {
    let answer =
        server.post(&format!("/slots/{slot}?action={action}"), &json!({ "filename": name }));
    (answer.status, answer.json())
}

#[test]
fn a_saved_text_is_found_by_another_server() {
    let folder = tempfile::tempdir().unwrap();
    let server = with_folder(&folder, &[]);
    let (text, n_cached) = complete(&server);
    assert_eq!(n_cached, 0);
    let (status, saved) = act(&server, 0, "save", "branch.kv");
    assert_eq!(status, 200, "{saved}");
    let n = saved["n_saved"].as_u64().unwrap();
    let n_bytes = std::fs::metadata(folder.path().join("branch.kv")).unwrap().len();
    assert!(n > 60 && saved["n_written"] == n_bytes && saved["id_slot"] == 0, "{saved}");
    assert!(saved["timings"]["save_ms"].is_number() && saved["filename"] == "branch.kv");
    // An erased slot has nothing.
    let (status, erased) = act(&server, 0, "erase", "");
    assert_eq!((status, &erased["n_erased"]), (200, &json!(n)));
    assert_eq!(act(&server, 0, "save", "nothing.kv").0, 400);
    assert_eq!(complete(&server), (text.clone(), 0));
    drop(server);
    let server = with_folder(&folder, &[]);
    let (status, restored) = act(&server, 0, "restore", "branch.kv");
    assert_eq!((status, &restored["n_restored"]), (200, &json!(n)), "{restored}");
    assert_eq!(restored["n_read"], n_bytes);
    let (again, n_cached) = complete(&server);
    assert!(again == text && n_cached > 60, "{n_cached}");
}

#[test]
fn what_is_no_text_of_this_model_is_refused_in_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let server = with_folder(&folder, &[]);
    complete(&server);
    assert_eq!(act(&server, 0, "save", "branch.kv").0, 200);
    let refused = |slot, action, name: &str, part: &str| {
        let (status, answer) = act(&server, slot, action, name);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains(part), "{action} {name}: {status} {answer}");
    };
    for name in ["", "../branch.kv", "/etc/passwd", ".hidden", "a/b", "x\u{0}"] {
        refused(0, "restore", name, "filename: expected a name");
        refused(0, "save", name, "filename: expected a name");
    }
    refused(0, "restore", "nothing.kv", "filename: ");
    refused(7, "restore", "branch.kv", "from 0 to 1");
    refused(0, "remove", "branch.kv", "save, restore or erase");
    refused(1, "save", "empty.kv", "holds no text");
    let path = folder.path().join("branch.kv");
    let whole = std::fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 4;
    std::fs::write(folder.path().join("damaged.kv"), &damaged).unwrap();
    std::fs::write(folder.path().join("cut.kv"), &whole[..whole.len() - 9]).unwrap();
    refused(0, "restore", "damaged.kv", "the checksum is wrong");
    refused(0, "restore", "cut.kv", "cut or too long");
    // The slot's text has stayed.
    assert!(complete(&server).1 > 60);
    let other = with_folder(&folder, &["-ctk", "f32"]);
    let (status, answer) = act(&other, 0, "restore", "branch.kv");
    assert!(status == 400 && answer.to_string().contains("another model"), "{answer}");
    let without = start(&["-c", "64", "--parallel", "1"]);
    assert_eq!(act(&without, 0, "save", "branch.kv").0, 501);
}

#[test]
fn a_texts_key_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let server = with_folder(&folder, &["--api-key", "first,second"]);
    let post = |key: &str, path: &str, body: &Value| {
        let body = body.to_string();
        let head = format!(
            "Authorization: Bearer {key}\r\nContent-Type: application/json\r\nContent-Length: \
             {}\r\n",
            body.len()
        );
        server.send(format!("{}{body}", server.head("POST", path, &head)))
    };
    let body = json!({ "prompt": PROMPT, "n_predict": 1, "id_slot": 0 });
    assert_eq!(post("first", "/completion", &body).status, 200);
    let name = json!({ "filename": "text.kv" });
    assert_eq!(post("second", "/slots/0?action=save", &name).status, 400);
    assert_eq!(post("second", "/slots/0?action=erase", &name).status, 400);
    assert_eq!(post("first", "/slots/0?action=save", &name).status, 200);
}
