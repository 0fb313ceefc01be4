//! `launch` prints settings that the clients' own formats take.

use common::cli::{failed, moeba, succeeded};
use serde_json::{Value, json};
use std::process::{Command, Output};

fn launch(args: &[&str]) -> Output {
    moeba().arg("launch").args(args).output().unwrap()
}

/// The variables that a shell has after it has read the settings.
fn variables(args: &[&str], name: &str) -> String {
    let settings = succeeded(&launch(args)).to_owned();
    let script = format!("{settings}printf %s \"${name}\"");
    let mut shell = Command::new("sh");
    let out = shell.args(["-euc", &script]).env("KEY", "s3cret").output().unwrap();
    assert!(out.status.success(), "{script}: {out:?}");
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn shells_take_the_variables_of_claude_code() {
    let get = |name: &str| variables(&["claude"], name);
    assert_eq!(get("ANTHROPIC_BASE_URL"), "http://127.0.0.1:8080");
    assert_eq!(get("ANTHROPIC_AUTH_TOKEN"), "none");
    assert_eq!(get("ANTHROPIC_API_KEY"), "");
    assert_eq!(get("CLAUDE_CODE_ATTRIBUTION_HEADER"), "0");
    assert_eq!(get("API_TIMEOUT_MS"), "3600000");
    let odd = "it's $HOME `x`";
    let args = [
        "claude",
        "--model",
        odd,
        "--api-key-env",
        "KEY",
        "-c",
        "65536",
        "--url",
        "https://gpu.example:9/x/",
    ];
    let get = |name: &str| variables(&args, name);
    assert_eq!(get("ANTHROPIC_BASE_URL"), "https://gpu.example:9/x");
    assert_eq!(get("ANTHROPIC_AUTH_TOKEN"), "s3cret");
    for name in ["MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL"] {
        assert_eq!(get(&format!("ANTHROPIC_{name}")), odd, "{name}");
    }
    assert_eq!(get("CLAUDE_CODE_AUTO_COMPACT_WINDOW"), "65536");
}

#[test]
fn shells_take_the_variables_of_clients_of_openai() {
    let url = "http://127.0.0.1:8080/v1";
    let args = ["aider", "--model", "a b", "--api-key-env", "KEY"];
    assert_eq!(variables(&args, "OPENAI_API_BASE"), url);
    assert_eq!(variables(&args, "OPENAI_API_KEY"), "s3cret");
    assert_eq!(variables(&args, "AIDER_TIMEOUT"), "3600");
    let out = launch(&args);
    let how = String::from_utf8_lossy(&out.stderr);
    assert!(how.contains("aider --model 'openai/a b'"), "{how}");
    assert_eq!(variables(&["open-webui"], "OPENAI_API_BASE_URL"), url);
    assert_eq!(variables(&["open-webui"], "OPENAI_API_KEY"), "none");
    assert_eq!(variables(&["open-webui"], "ENABLE_OLLAMA_API"), "false");
}

#[test]
fn codex_has_a_profile() {
    let args = ["codex", "--model", "a\"b\\", "--api-key-env", "KEY", "-c", "4096"];
    let settings: toml::Table = succeeded(&launch(&args)).parse().unwrap();
    let expected = toml::toml! {
        model = "a\"b\\"
        model_provider = "moeba"
        model_context_window = 4096

        [model_providers.moeba]
        name = "moeba"
        base_url = "http://127.0.0.1:8080/v1"
        wire_api = "responses"
        supports_websockets = false
        stream_idle_timeout_ms = 3600000
        env_key = "KEY"
    };
    assert_eq!(settings, expected);
    let plain = launch(&["codex"]);
    let plain = succeeded(&plain);
    assert!(!plain.contains("env_key") && !plain.contains("context_window"), "{plain}");
}

#[test]
fn opencode_has_a_configuration() {
    let config = |args: &[&str]| -> Value {
        let out = launch(&[&["opencode"], args].concat());
        serde_json::from_str(succeeded(&out)).unwrap()
    };
    let plain = config(&[]);
    assert_eq!(plain["model"], "moeba/moeba");
    let provider = &plain["provider"]["moeba"];
    assert_eq!(provider["npm"], "@ai-sdk/openai-compatible");
    assert_eq!(provider["options"], json!({"baseURL": "http://127.0.0.1:8080/v1"}));
    assert_eq!(provider["models"]["moeba"]["limit"], Value::Null);
    let full = config(&["--model", "a/b", "--api-key-env", "KEY", "-c", "4096"]);
    assert_eq!(full["model"], "moeba/a/b");
    let provider = &full["provider"]["moeba"];
    assert_eq!(provider["options"]["apiKey"], "{env:KEY}");
    assert_eq!(provider["models"]["a/b"]["limit"], json!({"context": 4096, "output": 1024}));
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (args, word) in [
        (&["emacs"][..], "codex"),
        (&["codex", "--url", "127.0.0.1:8080"], "http://127.0.0.1:8080"),
        (&["codex", "--url", "http://a\nb"], "URL"),
        (&["codex", "--api-key-env", "a b"], "variable"),
        (&["codex", "--model", ""], "--model"),
        (&["codex", "-c", "0"], "--ctx-size"),
        (&[], "CLIENT"),
    ] {
        let out = launch(args);
        failed(&out, 2, &[word]);
        assert!(out.stdout.is_empty(), "{args:?}");
    }
}
