//! `moeba launch`: the settings with which a client uses a server. Prints them and writes nothing.

use super::args::tokens;
use super::{out, serve};
use crate::Result;
use clap::ValueEnum;
use clap::builder::NonEmptyStringValueParser;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// A prompt's first token may take this long where experts are read from disk, in milliseconds.
const PATIENCE: u32 = 3_600_000;

#[derive(clap::Args, Debug)]
pub struct Args {
    /// The client
    #[arg(value_name = "CLIENT", value_enum)]
    client: Client,
    /// URL of the server
    #[arg(long, value_name = "URL", default_value_t = serve::default_url(), value_parser = url)]
    url: String,
    /// Name of the model; the server answers to any unless it has --strict-model
    // Arguments called `model` are files.
    #[arg(long = "model", value_name = "NAME", default_value = "moeba")]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    served: String,
    /// Variable that has the server's API key
    #[arg(long, value_name = "VARIABLE", value_parser = variable)]
    api_key_env: Option<String>,
    /// Tokens of context of a text, as the server's -c
    #[arg(short, long, value_name = "N", value_parser = tokens)]
    ctx_size: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Client {
    Codex,
    Claude,
    Opencode,
    Aider,
    OpenWebui,
}

/// Stdout has what a shell or a file takes; stderr says which.
pub fn run(args: Args) -> Result<()> {
    let (settings, how) = match args.client {
        Client::Codex => (codex(&args), CODEX.to_owned()),
        Client::Claude => (claude(&args), CLAUDE.to_owned()),
        Client::Opencode => (opencode(&args), OPENCODE.to_owned()),
        Client::Aider => {
            let model = word(&format!("openai/{}", args.served));
            (aider(&args), format!("{AIDER}aider --model {model}"))
        }
        Client::OpenWebui => (open_webui(&args), OPEN_WEBUI.to_owned()),
    };
    out::note(&how);
    out::write(settings.as_bytes())
}

const CODEX: &str = "put these lines into ~/.codex/moeba.config.toml; then: codex --profile moeba";
const CLAUDE: &str = "set these variables in a shell; then: claude";
const OPENCODE: &str = "put this into the project's opencode.json; then: opencode";
const AIDER: &str = "set these variables in a shell; then: ";
const OPEN_WEBUI: &str = "\
set these variables in a shell; then: open-webui serve --port 3000
Open WebUI reads them when it starts for the first time; later: Admin Panel, Settings, Connections";

/// A profile of Codex, which speaks Responses only and would try a WebSocket first.
fn codex(args: &Args) -> String {
    let mut out = format!("model = {}\nmodel_provider = \"moeba\"\n", quoted(&args.served));
    if let Some(n) = args.ctx_size {
        let _ = writeln!(out, "model_context_window = {n}");
    }
    let _ = write!(
        out,
        "\n[model_providers.moeba]\n\
         name = \"moeba\"\n\
         base_url = {}\n\
         wire_api = \"responses\"\n\
         supports_websockets = false\n\
         stream_idle_timeout_ms = {PATIENCE}\n",
        quoted(&format!("{}/v1", args.url))
    );
    if let Some(name) = &args.api_key_env {
        let _ = writeln!(out, "env_key = {}", quoted(name));
    }
    out
}

/// Variables of Claude Code, which asks for several models by the names of Anthropic's.
fn claude(args: &Args) -> String {
    let mut out = Exports::default();
    out.set("ANTHROPIC_BASE_URL", &args.url);
    out.set_key("ANTHROPIC_AUTH_TOKEN", args);
    // A key would be sent in place of the token.
    out.set("ANTHROPIC_API_KEY", "");
    for name in ["", "DEFAULT_OPUS_", "DEFAULT_SONNET_", "DEFAULT_HAIKU_"] {
        out.set(&format!("ANTHROPIC_{name}MODEL"), &args.served);
    }
    out.set("CLAUDE_CODE_SUBAGENT_MODEL", &args.served);
    // The header is another one in each request.
    out.set("CLAUDE_CODE_ATTRIBUTION_HEADER", "0");
    out.set("API_TIMEOUT_MS", &PATIENCE.to_string());
    if let Some(n) = args.ctx_size {
        out.set("CLAUDE_CODE_AUTO_COMPACT_WINDOW", &n.to_string());
    }
    out.0
}

/// OpenCode's configuration, in the form that its first and its second version read.
fn opencode(args: &Args) -> String {
    let mut options = json!({ "baseURL": format!("{}/v1", args.url) });
    if let Some(name) = &args.api_key_env {
        options["apiKey"] = format!("{{env:{name}}}").into();
    }
    let mut model = json!({ "name": args.served, "tool_call": true });
    if let Some(n) = args.ctx_size {
        model["limit"] = json!({ "context": n, "output": (n / 4).max(1) });
    }
    let provider = json!({
        "npm": "@ai-sdk/openai-compatible",
        "name": "moeba",
        "options": options,
        "models": Map::from_iter([(args.served.clone(), model)]),
    });
    let config = json!({
        "$schema": "https://opencode.ai/config.json",
        "provider": { "moeba": provider },
        "model": format!("moeba/{}", args.served),
    });
    format!("{config:#}\n")
}

fn aider(args: &Args) -> String {
    let mut out = Exports::default();
    out.set("OPENAI_API_BASE", &format!("{}/v1", args.url));
    out.set_key("OPENAI_API_KEY", args);
    out.set("AIDER_TIMEOUT", &(PATIENCE / 1000).to_string());
    out.0
}

fn open_webui(args: &Args) -> String {
    let mut out = Exports::default();
    out.set("OPENAI_API_BASE_URL", &format!("{}/v1", args.url));
    out.set_key("OPENAI_API_KEY", args);
    out.set("ENABLE_OLLAMA_API", "false");
    out.0
}

/// Lines that a shell reads.
#[derive(Default)]
struct Exports(String);

impl Exports {
    fn set(&mut self, name: &str, value: &str) {
        let _ = writeln!(self.0, "export {name}={}", word(value));
    }

    /// Clients want a key, also where the server has none.
    fn set_key(&mut self, name: &str, args: &Args) {
        match &args.api_key_env {
            Some(variable) => {
                let _ = writeln!(self.0, "export {name}=\"${variable}\"");
            }
            None => self.set(name, "none"),
        }
    }
}

/// A text as one word of a shell's line.
fn word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+,=".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// A text as a string of JSON, which is one of TOML, too.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A URL without a slash at its end.
fn url(text: &str) -> std::result::Result<String, String> {
    let is_url = ["http://", "https://"].iter().any(|scheme| {
        let rest = text.strip_prefix(scheme).unwrap_or_default();
        !rest.trim_matches('/').is_empty()
    });
    match is_url && text.chars().all(|c| c.is_ascii_graphic()) {
        true => Ok(text.trim_end_matches('/').to_owned()),
        false => Err("expected a URL such as http://127.0.0.1:8080".into()),
    }
}

/// The name of a variable.
fn variable(text: &str) -> std::result::Result<String, String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let begins = text.starts_with(|c: char| !c.is_ascii_digit());
    match begins && text.chars().all(is_part) {
        true => Ok(text.to_owned()),
        false => Err("expected the name of a variable".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_read_them_otherwise() {
        assert_eq!(word("http://a:1/b"), "http://a:1/b");
        assert_eq!(word(""), "''");
        assert_eq!(word("a b"), "'a b'");
        assert_eq!(word("it's $(x)"), r"'it'\''s $(x)'");
    }

    #[test]
    fn urls_and_variables_are_checked() {
        assert_eq!(url("http://a:1//").as_deref(), Ok("http://a:1"));
        for wrong in ["", "a:1", "ftp://a", "http://", "http:///", "http://a b", "http://a\n"] {
            assert!(url(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(variable("_A1").as_deref(), Ok("_A1"));
        for wrong in ["", "1A", "A-B", "$A", "A B"] {
            assert!(variable(wrong).is_err(), "{wrong:?}");
        }
    }
}
