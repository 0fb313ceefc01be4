use std::io::Write;
use std::net::TcpStream;

use moeba::server::Server;

use crate::support::{Answer, options, read};

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
        server.set_progress(part);
        let health = get(&server, "/health");
        assert_eq!((health.status, health.header("retry-after")), (503, Some("1")));
        assert!(health.body.starts_with(expected), "{}", health.body);
        assert_eq!(health.json()["status"], "loading model");
        assert_eq!(health.json()["progress"], (f64::from(part) * 1000.0).floor() / 1000.0);
    }
    let other = get(&server, "/v1/models");
    assert_eq!((other.status, other.body), (503, format!("{expected}}}")));
    server.stop();
}
