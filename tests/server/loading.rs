use std::io::Write;
use std::net::TcpStream;

use moeba::engine::{Engine, EngineOptions, LoadPhase};
use moeba::server::Server;

use crate::support::{Answer, loaded, model, options, read};

fn get(server: &Server, path: &str) -> Answer {
    let host = server.url().trim_start_matches("http://");
    let mut stream = TcpStream::connect(host).unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    read(&mut stream)
}

#[test]
fn health_tells_how_far_loading_is() {
    let server = Server::bind(options()).unwrap();
    let expected = r#"{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}"#;
    for part in [0.0, 0.25, 0.999] {
        server.set_loading(LoadPhase::DenseWeights.at(part));
        let health = get(&server, "/health");
        assert_eq!((health.status, health.header("retry-after")), (503, Some("1")));
        assert!(health.body.starts_with(expected), "{}", health.body);
        assert_eq!(health.json()["status"], "loading model");
        assert_eq!(health.json()["progress"], (f64::from(part) * 1000.0).floor() / 1000.0);
        assert_eq!(health.json()["phase"], "reading dense weights");
    }
    let other = get(&server, "/v1/models");
    assert_eq!((other.status, other.body), (503, format!("{expected}}}")));
    server.stop();
}

/// The health of a real load: it never goes back, names each work, and ends.
#[test]
fn health_follows_a_load_to_its_end() {
    let server = Server::bind(options()).unwrap();
    let options = EngineOptions { ram: "50%".parse().unwrap(), ..EngineOptions::default() };
    let mut seen: Vec<(f64, String)> = Vec::new();
    let engine = Engine::load(&model(), &options, &mut |now| {
        server.set_loading(now);
        let health = get(&server, "/health");
        assert_eq!(health.status, 503, "{health:?}");
        let health = health.json();
        let phase = health["phase"].as_str().unwrap().to_owned();
        seen.push((health["progress"].as_f64().unwrap(), phase));
    });
    let progress: Vec<f64> = seen.iter().map(|(progress, _)| *progress).collect();
    assert!(progress.is_sorted() && progress.first() == Some(&0.0), "{seen:?}");
    assert_eq!(progress.last(), Some(&1.0), "{seen:?}");
    let mut phases: Vec<&str> = seen.iter().map(|(_, phase)| phase.as_str()).collect();
    phases.dedup();
    let expected = [
        "planning memory",
        "reading dense weights",
        "taking memory for experts",
        "taking memory for texts",
    ];
    assert_eq!(phases, expected);
    server.open(loaded(engine.unwrap(), options)).unwrap();
    let health = get(&server, "/health");
    assert_eq!((health.status, health.body.as_str()), (200, r#"{"status":"ok"}"#));
    server.stop();
}
