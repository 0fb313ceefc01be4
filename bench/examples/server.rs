//! `moeba serve` inside of another program, which asks it a question.
//!
//!     cargo run --release --example server -- models/demo/moeba-demo.gguf

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use moeba::engine::{Engine, EngineOptions};
use moeba::server::{Address, Loaded, Server, ServerOptions};
use moeba::{Error, Result};
use serde_json::{Value, json};

fn main() -> Result<()> {
    let model = std::env::args().nth(1);
    let model = model.ok_or_else(|| Error::Usage("usage: server MODEL".into()))?;
    let server = start(model.as_ref())?;
    let answer = ask(server.url(), "What is a branch?", 64)?;
    println!("{}", answer["choices"][0]["message"]["content"]);
    server.stop();
    Ok(())
}

/// A server of one model on a free port of this machine.
fn start(model: &Path) -> Result<Server> {
    // The socket answers from here on, with 503 until there is a model.
    let server = Server::bind(ServerOptions::new(Address::new("127.0.0.1", 0)))?;
    let options = EngineOptions { n_sessions: 4, n_ctx: Some(2048), ..EngineOptions::default() };
    let engine = Engine::load(model, &options, &mut |now| server.set_loading(now))?;
    server.open(Loaded::new(engine)?)?;
    Ok(server)
}

/// Posts a chat, as any client.
fn ask(url: &str, question: &str, max_tokens: usize) -> Result<Value> {
    let body = json!({
        "messages": [{ "role": "user", "content": question }],
        "max_tokens": max_tokens,
    });
    let (host, body) = (url.trim_start_matches("http://"), body.to_string());
    let failed = |e| Error::io(url, e);
    let mut stream = TcpStream::connect(host).map_err(failed)?;
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .map_err(failed)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(failed)?;
    let json = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    serde_json::from_str(json).map_err(|e| Error::format(url, "answer", "JSON", e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moeba-demo.gguf");

    #[test]
    fn it_answers() {
        let server = start(MODEL.as_ref()).unwrap();
        let answer = ask(server.url(), "Hello", 8).unwrap();
        let content = answer["choices"][0]["message"]["content"].as_str();
        assert!(content.is_some_and(|text| !text.is_empty()), "{answer}");
        server.stop();
    }
}
