//! The routes as an OpenAPI document, made from the table that serves them.

mod bodies;

use std::sync::LazyLock;

use hyper::http::{HeaderValue, Response, header};
use serde_json::{Map, Value, json};

use self::bodies::Table;
use super::body::{self, Body};
use super::errors::Wire;
use super::router::{Handler, ROUTES, Route};

/// `GET /openapi.json`
pub fn document() -> Response<Body> {
    static TEXT: LazyLock<String> = LazyLock::new(|| build().to_string());
    let mut response = Response::new(body::whole(TEXT.as_str()));
    let kind = HeaderValue::from_static("application/json; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

const ABOUT: &str = "HEAD is answered wherever GET is, and OPTIONS everywhere. A null is the same \
                     as nothing. Fields that are not listed are accepted and have no effect.";

fn build() -> Value {
    let mut paths = Map::new();
    // Peers' routes are moeba's own: their bodies are bytes.
    let is_public =
        |route: &&Route| ![Handler::Peer, Handler::PeerExperts].contains(&route.handler);
    for route in ROUTES.iter().filter(is_public) {
        let mut item = Map::new();
        if let Some(name) = parameter(route) {
            let schema = json!({ "type": "string", "minLength": 1 });
            let parameter =
                json!({ "name": name, "in": "path", "required": true, "schema": schema });
            let mut parameters = vec![parameter];
            if route.handler == Handler::Slot {
                let schema = json!({ "enum": ["save", "restore", "erase"] });
                parameters.push(json!({
                    "name": "action", "in": "query", "required": true, "schema": schema,
                }));
            }
            item.insert("parameters".into(), Value::Array(parameters));
        }
        for method in methods(route) {
            item.insert(method.to_lowercase(), operation(route, method));
        }
        paths.insert(path(route), Value::Object(item));
    }
    let info = json!({
        "title": "moeba",
        "version": env!("CARGO_PKG_VERSION"),
        "description": ABOUT,
    });
    json!({
        "openapi": "3.1.0",
        "info": info,
        "servers": [{ "url": "/" }],
        // The first one: without a key.
        "security": [{}, { "bearer": [] }, { "key": [] }],
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "bearer": { "type": "http", "scheme": "bearer" },
                "key": { "type": "apiKey", "in": "header", "name": "x-api-key" },
            },
        },
    })
}

/// The name of what stands for a route's `*`.
fn parameter(route: &Route) -> Option<&'static str> {
    route.path.ends_with('*').then_some(match route.handler {
        Handler::Model => "model",
        Handler::Slot => "id_slot",
        _ => "rest",
    })
}

fn path(route: &Route) -> String {
    let begin = route.path.trim_end_matches('*');
    parameter(route).map_or(begin.to_owned(), |name| format!("{begin}{{{name}}}"))
}

/// A route's methods, but for those that all routes have.
fn methods(route: &Route) -> impl Iterator<Item = &'static str> {
    route.allow.split(", ").filter(|method| !["HEAD", "OPTIONS"].contains(method))
}

/// The bodies that have a name, each under its own.
const BODIES: &[(&str, &Table)] = &[
    ("Chat", &bodies::CHAT),
    ("ChatPrompt", &bodies::PROMPT),
    ("Responses", &bodies::RESPONSES),
    ("Completions", &bodies::COMPLETIONS),
    ("Completion", &bodies::NATIVE),
    ("Embeddings", &bodies::EMBEDDINGS),
    ("Embedding", &bodies::EMBEDDING),
    ("Rerank", &bodies::RERANK),
    ("Tokenize", &bodies::TOKENIZE),
    ("Detokenize", &bodies::DETOKENIZE),
    ("Messages", &bodies::MESSAGES),
    ("MessagesPrompt", &bodies::MESSAGES_COUNT),
    ("OllamaChat", &bodies::OLLAMA_CHAT),
    ("OllamaGenerate", &bodies::OLLAMA_GENERATE),
    ("OllamaEmbed", &bodies::OLLAMA_EMBED),
    ("OllamaEmbeddings", &bodies::OLLAMA_EMBEDDINGS),
    ("OllamaShow", &bodies::OLLAMA_SHOW),
    ("OllamaDownload", &bodies::OLLAMA_DOWNLOAD),
    ("ModelName", &bodies::MODEL_NAME),
    ("Slot", &bodies::SLOT),
];

/// The request and the answer of a route.
struct Work {
    summary: &'static str,
    /// The name of its body.
    body: Option<&'static str>,
    /// The media types of its answer.
    media: &'static [&'static str],
    /// Members that an answer of JSON has.
    members: &'static [&'static str],
}

const JSON: &[&str] = &["application/json"];
const EVENTS: &[&str] = &["application/json", "text/event-stream"];
const STREAM: &[&str] = &["text/event-stream"];
const ROOT: &[&str] = &["text/html", "text/plain"];
const PAGE: &[&str] = &["text/css", "text/javascript", "image/svg+xml", "font/woff2"];
const LINES: &[&str] = &["application/json", "application/x-ndjson"];

impl Work {
    const fn get(summary: &'static str, members: &'static [&'static str]) -> Work {
        Work { summary, body: None, media: JSON, members }
    }

    const fn post(
        summary: &'static str,
        body: &'static str,
        media: &'static [&'static str],
        members: &'static [&'static str],
    ) -> Work {
        Work { summary, body: Some(body), media, members }
    }
}

/// The work of a handler; `None` if it has none to do.
fn work(handler: Handler) -> Option<Work> {
    use Handler as H;
    let text = |work: Work| Work { media: &["text/plain"], ..work };
    Some(match handler {
        H::Health => Work::get("Whether the model is loaded", &["status"]),
        H::Ready => Work::get("Whether requests are taken", &["status"]),
        H::Metrics => text(Work::get("Series for Prometheus", &[])),
        H::OpenApi => Work::get("This document", &["openapi", "paths"]),
        H::Models => Work::get("Each model under each of its names", &["object", "data"]),
        H::ModelsLoad => Work::post("Begins to load a model", "ModelName", JSON, &["success"]),
        H::ModelsUnload => {
            Work::post("Lets a model go once it is idle", "ModelName", JSON, &["success"])
        }
        H::Model => Work::get("The model", &["id", "object"]),
        H::Props => Work::get("The settings", &["default_generation_settings", "total_slots"]),
        H::Slots => Work::get("What each slot computes, as an array", &[]),
        H::Slot => {
            Work::post("Saves, restores or erases the text of a slot", "Slot", JSON, &["id_slot"])
        }
        H::Chat => Work::post("An answer to messages", "Chat", EVENTS, &["id", "choices"]),
        H::ChatTokens => {
            Work::post("Tokens of a chat's prompt", "ChatPrompt", JSON, &["input_tokens"])
        }
        H::Responses => Work::post("A response", "Responses", EVENTS, &["id", "output"]),
        H::ResponsesTokens => {
            Work::post("Tokens of a response's prompt", "Responses", JSON, &["input_tokens"])
        }
        H::Completions => {
            Work::post("Continuations of texts", "Completions", EVENTS, &["id", "choices"])
        }
        H::Completion => {
            Work::post("llama-server's continuation of a text", "Completion", EVENTS, &[])
        }
        H::Embeddings => {
            Work::post("Embeddings of texts", "Embeddings", JSON, &["object", "data", "usage"])
        }
        H::Embedding => Work::post("llama-server's embeddings of texts", "Embedding", JSON, &[]),
        H::Rerank => Work::post("Documents by how well they answer a query", "Rerank", JSON, &[]),
        H::Tokenize => Work::post("Tokens of a text", "Tokenize", JSON, &["tokens"]),
        H::Detokenize => Work::post("The text of tokens", "Detokenize", JSON, &["content"]),
        H::ApplyTemplate => Work::post("The prompt of messages", "ChatPrompt", JSON, &["prompt"]),
        H::Messages => {
            Work::post("Anthropic's answer to messages", "Messages", EVENTS, &["id", "content"])
        }
        H::CountTokens => {
            Work::post("Tokens of messages", "MessagesPrompt", JSON, &["input_tokens"])
        }
        H::Root => Work { media: ROOT, ..Work::get("The page, or a sign of life", &[]) },
        H::Page => Work { media: PAGE, ..Work::get("A file of the page", &[]) },
        H::Experts => {
            Work { media: STREAM, ..Work::get("Where every expert is, as it changes", &[]) }
        }
        H::Adapters => Work::get("LoRA adapters and their scales, as an array", &[]),
        H::Peer | H::PeerExperts | H::NotBuilt(_) => return None,
        other => return ollama_work(other),
    })
}

/// The work of a handler of Ollama's.
fn ollama_work(handler: Handler) -> Option<Work> {
    use Handler as H;
    Some(match handler {
        H::OllamaVersion => Work::get("The version of Ollama's API", &["version"]),
        H::OllamaTags => Work::get("The models as Ollama lists them", &["models"]),
        H::OllamaProcesses => Work::get("The models that are loaded", &["models"]),
        H::OllamaPull => Work::post("Downloads a model", "OllamaDownload", LINES, &["status"]),
        H::OllamaDelete => {
            Work::post("Deletes a downloaded model", "OllamaDownload", JSON, &["status"])
        }
        H::OllamaShow => {
            Work::post("Facts of the model", "OllamaShow", JSON, &["details", "model_info"])
        }
        H::OllamaChat => {
            Work::post("Ollama's answer to messages", "OllamaChat", LINES, &["message", "done"])
        }
        H::OllamaGenerate => {
            Work::post("Ollama's answer to a text", "OllamaGenerate", LINES, &["response", "done"])
        }
        H::OllamaEmbed => {
            Work::post("Ollama's embeddings of texts", "OllamaEmbed", JSON, &["embeddings"])
        }
        H::OllamaEmbeddings => {
            Work::post("The embedding of a text", "OllamaEmbeddings", JSON, &["embedding"])
        }
        _ => return None,
    })
}

fn operation(route: &Route, method: &str) -> Value {
    let wire = Wire::of(route.path);
    let mut operation = json!({ "tags": [tag(wire)] });
    let work = match (route.handler, method) {
        // Its body is no object.
        (Handler::Adapters, "POST") => Some(Work::get("Sets adapters' scales", &["success"])),
        (handler, method) => work(handler).filter(|w| (method != "GET") == w.body.is_some()),
    };
    let mut responses = Map::new();
    let mut fail = |status: u16| {
        responses.insert(status.to_string(), failure(status, wire));
    };
    // Hosts, origins, keys, methods and headers are checked before the route.
    [400, 401, 403, 429, 431].into_iter().for_each(&mut fail);
    // There may be no place for a connection, or no model yet.
    fail(if wire == Wire::Anthropic { 529 } else { 503 });
    match (&work, route.handler) {
        (Some(work), _) => {
            let is_list = route.handler == Handler::Adapters && method == "POST";
            if is_list {
                let items = json!({ "type": "object" });
                let schema = json!({ "type": "array", "items": items, "examples": [[]] });
                let content = json!({ "application/json": { "schema": schema } });
                operation["requestBody"] = json!({ "required": true, "content": content });
            }
            if work.body.is_some() || is_list {
                [408, 413, 415, 500, 501].into_iter().for_each(&mut fail);
            }
            let of_model = [
                Handler::Adapters,
                Handler::Experts,
                Handler::Health,
                Handler::Metrics,
                Handler::Model,
                Handler::Page,
                Handler::Props,
                Handler::Slots,
            ];
            if work.body.is_some() || of_model.contains(&route.handler) {
                fail(404);
            }
            // Flags decide whether they are served.
            let by_flag = [Handler::Metrics, Handler::Slots, Handler::Slot, Handler::Experts];
            if by_flag.contains(&route.handler) {
                fail(501);
            }
        }
        // A WebSocket, or nothing to get.
        (None, Handler::Responses) => [405, 426].into_iter().for_each(&mut fail),
        (None, _) => [415, 501].into_iter().for_each(&mut fail),
    }
    if let Some(work) = &work {
        responses.insert("200".into(), success(work));
        if let Some(name) = work.body {
            let schema = json!({ "$ref": format!("#/components/schemas/{name}") });
            let content = json!({ "application/json": { "schema": schema } });
            operation["requestBody"] = json!({ "required": true, "content": content });
        }
    }
    operation["summary"] = match route.handler {
        Handler::NotBuilt(why) => why.into(),
        _ => work.map_or("Why there is nothing to get", |work| work.summary).into(),
    };
    responses.sort_keys();
    operation["responses"] = Value::Object(responses);
    if super::router::is_public(route.path) || route.handler == Handler::Page {
        operation["security"] = json!([]);
    }
    operation
}

fn tag(wire: Wire) -> &'static str {
    match wire {
        Wire::OpenAi => "OpenAI",
        Wire::Native => "llama-server",
        Wire::Anthropic => "Anthropic",
        Wire::Ollama => "Ollama",
    }
}

fn success(work: &Work) -> Value {
    let content = work.media.iter().map(|media| {
        let schema = match (*media, work.members) {
            ("application/json", []) => json!({}),
            ("application/json", members) => json!({ "type": "object", "required": members }),
            _ => json!({ "type": "string" }),
        };
        ((*media).to_owned(), json!({ "schema": schema }))
    });
    json!({ "description": work.summary, "content": content.collect::<Map<_, _>>() })
}

fn failure(status: u16, wire: Wire) -> Value {
    let description = match status {
        400 => "the request makes no sense, or its prompt does not fit",
        401 => "the key is missing or wrong",
        403 => "the host or the origin is not allowed",
        404 => "no such model",
        405 => "the method has no meaning here",
        408 => "the body took too long",
        413 => "the body is too large",
        415 => "the body is compressed, or no JSON",
        426 => "there are no WebSockets",
        429 => "the key has as many requests as it may",
        431 => "the headers are too large",
        500 => "weights could not be read, or a fault of the server",
        501 => "not served here",
        _ => "the model is being loaded, the queue is full, or the server stops",
    };
    // Headers are read before it is known whose route it is.
    if status == 431 {
        return json!({ "description": description });
    }
    let name = match wire {
        Wire::OpenAi => "OpenAiError",
        Wire::Native => "NativeError",
        Wire::Anthropic => "AnthropicError",
        Wire::Ollama => "OllamaError",
    };
    let schema = json!({ "$ref": format!("#/components/schemas/{name}") });
    json!({ "description": description, "content": { "application/json": { "schema": schema } } })
}

fn schemas() -> Map<String, Value> {
    let mut schemas = Map::new();
    for (name, body) in BODIES {
        let mut schema = body.schema();
        let example: Value = serde_json::from_str(body.example).expect("an example is JSON");
        schema["examples"] = json!([example]);
        schemas.insert((*name).into(), schema);
    }
    let text = json!({ "type": "string" });
    let object = |properties: Value| {
        let required: Vec<String> =
            properties.as_object().into_iter().flat_map(Map::keys).cloned().collect();
        json!({ "type": "object", "properties": properties, "required": required })
    };
    let code = |kind: &str| {
        let properties = json!({ "message": text, "type": text, "code": { "type": kind } });
        object(json!({ "error": object(properties) }))
    };
    // While the model is loaded, the code is a number everywhere.
    let both = json!(["string", "integer"]);
    let mut openai = code("string");
    openai["properties"]["error"]["properties"]["code"]["type"] = both;
    schemas.insert("OpenAiError".into(), openai);
    schemas.insert("NativeError".into(), code("integer"));
    let error = object(json!({ "type": text, "message": text }));
    let anthropic = json!({ "type": { "const": "error" }, "error": error, "request_id": text });
    schemas.insert("AnthropicError".into(), object(anthropic));
    schemas.insert("OllamaError".into(), object(json!({ "error": text })));
    schemas
}
