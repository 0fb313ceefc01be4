//! Scripts of `clients/`, each with a server of its own. `MOEBA_TEST_PYTHON` names a Python that
//! has their packages, `MOEBA_TEST_NODE_PATH` a `node_modules` folder; what is missing is said.

use std::process::Command;

use common::repo;

use crate::support::start;

const KEY: &str = "test-key";
/// The status of a script whose package is missing.
const SKIPPED: i32 = 77;

#[track_caller]
fn run(script: &str) {
    run_with(script, &[]);
}

/// The same with further arguments of the server.
#[track_caller]
fn run_with(script: &str, args: &[&str]) {
    let folder = repo().join("tests/server/clients");
    let python = std::env::var("MOEBA_TEST_PYTHON").unwrap_or("python3".into());
    let program = match script.rsplit_once('.') {
        Some((_, "py")) => python.as_str(),
        Some((_, "mjs")) => "node",
        _ => "bash",
    };
    let usual = ["-c", "16384", "--parallel", "4", "--alias", "moeba-demo", "--api-key", KEY];
    let server = start(&[&usual, args].concat());
    let mut command = Command::new(program);
    command.arg(folder.join(script)).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("MOEBA_URL", format!("http://{}", server.address)).env("MOEBA_KEY", KEY);
    if let Ok(path) = std::env::var("MOEBA_TEST_NODE_PATH") {
        command.env("NODE_PATH", path);
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(e) => return println!("{script} is skipped: {program}: {e}"),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    match output.status.code() {
        Some(0) => {}
        Some(SKIPPED) => println!("{script} is {}", text.trim()),
        _ => panic!("{script}: {text}{}", String::from_utf8_lossy(&output.stderr)),
    }
}

#[test]
fn curl() {
    run("curl.sh");
}

#[test]
fn openai_for_python() {
    run("openai_sdk.py");
}

#[test]
fn responses_for_python() {
    run("responses_sdk.py");
}

#[test]
fn openai_for_node() {
    run("openai_sdk.mjs");
}

#[test]
fn anthropic_for_python() {
    run("anthropic_sdk.py");
}

#[test]
fn anthropic_for_node() {
    run("anthropic_sdk.mjs");
}

#[test]
fn ollama_for_python() {
    run("ollama_sdk.py");
}

#[test]
fn types_of_openai() {
    run("openai_schema.py");
}

#[test]
fn page_in_chromium() {
    run_with("page.py", &["--ram", "25%"]);
}

#[test]
fn litellm() {
    run("litellm_client.py");
}

#[test]
fn langchain() {
    run("langchain_standard.py");
}
