use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::{command, start};

#[test]
fn a_server_stops_when_its_stdin_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = command(&folder, &["-c", "128", "--parallel", "1", "--lifeline"]);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    // The port that was chosen, before the model is loaded.
    let mut url = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
    let port = url.trim_end().strip_prefix("http://127.0.0.1:").and_then(|n| n.parse().ok());
    assert!(port.is_some_and(|port: u16| port > 0), "{url:?}");
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none(), "it has ended with its stdin open");
    drop(child.stdin.take());
    let end = Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < end, "it goes on without its stdin");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn servers_whose_answers_may_differ_have_other_identities() {
    let identity = |args: &[&str]| start(args).get("/props").json()["identity"].clone();
    let usual = identity(&["-c", "128", "--parallel", "1"]);
    assert_eq!(usual["n_ctx"], 128);
    assert!(usual["tensor_types"].as_str().unwrap().contains("Q2_K 8644608"), "{usual}");
    assert_eq!(usual["model"].as_str().unwrap().len(), 64);
    // The number of texts and the threads change no byte.
    let same = ["-c", "256", "--parallel", "2", "--no-kv-unified", "-t", "1"];
    assert_eq!(identity(&same), usual);
    let cases: &[(&[&str], &[&str])] = &[
        (&["-c", "256"], &["n_ctx"]),
        (&["-c", "128", "-ctk", "q8_0"], &["cache_type_k", "fingerprint"]),
        (&["-c", "128", "--temp", "0.3"], &["settings"]),
    ];
    for (args, names) in cases {
        let other = identity(&[*args, &["--parallel", "1"]].concat());
        let differ = usual.as_object().unwrap().keys().filter(|name| usual[*name] != other[*name]);
        assert_eq!(differ.map(String::as_str).collect::<Vec<_>>(), *names, "{args:?}");
    }
}
