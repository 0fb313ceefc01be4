//! Errors as clients get them: a status, and a body in the wire format of the route.

use std::time::Duration;

use hyper::http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Map, Value, json};

use super::body::{self, Body};
use crate::Error;
use crate::sample::grammar::TOO_COMPLEX;

/// Time after which a request may come again that was refused with [`Error::Busy`].
const BUSY_TIME: Duration = Duration::from_secs(2);

pub type ApiResult<T> = Result<T, ApiError>;

/// The wire format of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// OpenAI's chat completions, completions and responses.
    OpenAi,
    /// llama-server's own routes.
    Native,
    /// Anthropic's messages.
    Anthropic,
    /// Ollama's routes.
    Ollama,
}

impl Wire {
    /// The format that the clients of a path expect.
    pub fn of(path: &str) -> Wire {
        match path {
            _ if path.starts_with("/v1/messages") => Wire::Anthropic,
            _ if path.starts_with("/api/") => Wire::Ollama,
            _ if path.starts_with("/v1/") => Wire::OpenAi,
            "/models" => Wire::OpenAi,
            _ if path.starts_with("/chat/completions") => Wire::OpenAi,
            _ if path.starts_with("/responses") => Wire::OpenAi,
            _ => Wire::Native,
        }
    }
}

/// Kinds of errors: a status and a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Invalid,
    /// The prompt is longer than the context.
    ContextOverflow,
    Authentication,
    Permission,
    NotFound,
    Method,
    /// The client wants another protocol.
    Upgrade,
    /// A body that is too large, of a type that is not read, or too slow.
    Body(u16),
    RateLimit,
    Server,
    NotSupported,
    Overloaded,
    /// The model is being loaded.
    Loading,
}

impl Kind {
    fn status(self, wire: Wire) -> u16 {
        match self {
            Kind::Invalid | Kind::ContextOverflow => 400,
            Kind::Authentication => 401,
            Kind::Permission => 403,
            Kind::NotFound => 404,
            Kind::Method => 405,
            Kind::Upgrade => 426,
            Kind::Body(status) => status,
            Kind::RateLimit => 429,
            Kind::Server => 500,
            Kind::NotSupported => 501,
            Kind::Overloaded | Kind::Loading if wire == Wire::Anthropic => 529,
            Kind::Overloaded | Kind::Loading => 503,
        }
    }

    fn name(self, wire: Wire) -> &'static str {
        let is_anthropic = wire == Wire::Anthropic;
        match self {
            Kind::ContextOverflow if wire == Wire::Native => "exceed_context_size_error",
            Kind::Body(413) if is_anthropic => "request_too_large",
            Kind::Invalid
            | Kind::ContextOverflow
            | Kind::Method
            | Kind::Upgrade
            | Kind::Body(_) => "invalid_request_error",
            Kind::Authentication => "authentication_error",
            Kind::Permission => "permission_error",
            Kind::NotFound => "not_found_error",
            Kind::RateLimit => "rate_limit_error",
            Kind::Server if is_anthropic => "api_error",
            Kind::Server => "server_error",
            Kind::NotSupported => "not_supported_error",
            Kind::Overloaded | Kind::Loading if is_anthropic => "overloaded_error",
            Kind::Overloaded | Kind::Loading => "unavailable_error",
        }
    }
}

/// Why a request was not served.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub kind: Kind,
    /// A name for programs, as `context_length_exceeded`.
    pub code: &'static str,
    /// A sentence for people.
    pub message: String,
    /// The path of the field that is wrong, as `messages[3].content`.
    pub param: Option<String>,
    /// Seconds after which another try makes sense.
    pub retry_after: Option<u64>,
    /// Milliseconds after which another try makes sense, where they are known.
    pub retry_after_ms: Option<u64>,
    /// Methods that the route has.
    pub allow: Option<&'static str>,
    /// Further members of the body.
    pub details: Vec<(&'static str, Value)>,
}

impl ApiError {
    pub fn new(kind: Kind, code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            kind,
            code,
            message: message.into(),
            param: None,
            retry_after: None,
            retry_after_ms: None,
            allow: None,
            details: Vec::new(),
        }
    }

    /// The error of a request that may come again after this time.
    pub fn after(self, time: Duration) -> ApiError {
        let ms = time.as_millis() as u64;
        let retry_after = Some(ms.div_ceil(1000).max(1));
        ApiError { retry_after, retry_after_ms: Some(ms.max(1)), ..self }
    }

    /// A field that has no sense.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        let error = ApiError::new(Kind::Invalid, "invalid_value", message);
        ApiError { param: Some(param.into()), ..error }
    }

    /// A part of a message at `path` that is no text.
    pub fn not_text(path: &str, kind: &str) -> ApiError {
        let message = format!(
            "{path}: image input is not supported, nor sound and files: got {kind}: describe it in \
             words or leave it out; documents may have plain text"
        );
        ApiError::invalid(path, message)
    }

    pub fn not_supported(message: impl Into<String>) -> ApiError {
        ApiError::new(Kind::NotSupported, "not_supported", message)
    }

    pub fn server(message: impl Into<String>) -> ApiError {
        ApiError::new(Kind::Server, "server_error", message)
    }

    pub fn loading() -> ApiError {
        let error = ApiError::new(Kind::Loading, "model_loading", "Loading model");
        ApiError { retry_after: Some(1), ..error }
    }

    /// The error of a look at a model that is not there.
    pub fn not_loaded() -> ApiError {
        let message = "the model is not loaded: a request that uses it loads it";
        ApiError::new(Kind::Overloaded, "model_not_loaded", message).after(Duration::from_secs(2))
    }

    pub fn shutting_down() -> ApiError {
        let error =
            ApiError::new(Kind::Overloaded, "shutting_down", "The server is shutting down.");
        ApiError { retry_after: Some(10), ..error }
    }

    /// The prompt has more tokens than fit. The sentence has the phrases that clients look for.
    pub fn context_overflow(n_prompt: usize, n_ctx: usize) -> ApiError {
        let message = format!(
            "the request has {n_prompt} tokens and exceeds the available context size: the maximum \
             context length is {n_ctx} tokens; shorten the prompt or start the server with a \
             larger -c"
        );
        let error = ApiError::new(Kind::ContextOverflow, "context_length_exceeded", message);
        let details = vec![("n_prompt_tokens", n_prompt.into()), ("n_ctx", n_ctx.into())];
        ApiError { param: Some("messages".into()), details, ..error }
    }

    /// An error of the engine before the answer has begun: the request makes no sense.
    pub fn of_request(error: &Error) -> ApiError {
        match error {
            Error::Invalid(sentence) | Error::Usage(sentence) => {
                ApiError::new(Kind::Invalid, "invalid_value", sentence.clone())
            }
            other => ApiError::of_run(other),
        }
    }

    /// An error of the engine while it computes.
    pub fn of_run(error: &Error) -> ApiError {
        let code = match error {
            Error::Invalid(why) if why == TOO_COMPLEX => {
                return ApiError::new(Kind::Invalid, "invalid_grammar", TOO_COMPLEX);
            }
            Error::Busy(sentence) => {
                let error = ApiError::new(Kind::Overloaded, "server_overloaded", sentence);
                return error.after(BUSY_TIME);
            }
            Error::Load(_) | Error::Io { .. } => "io_error",
            _ => "server_error",
        };
        ApiError::new(Kind::Server, code, error.to_string())
    }

    /// A schema or a grammar that cannot be used. Its message may begin with a place that begins
    /// with `path`.
    pub fn of_schema(error: &Error, path: &str) -> ApiError {
        let message = match error {
            Error::Invalid(sentence) => sentence.clone(),
            other => return ApiError::of_run(other),
        };
        let place = message.split(": ").next().filter(|place| place.starts_with(path));
        let param = place.unwrap_or(path).to_owned();
        let error = ApiError::new(Kind::Invalid, "invalid_grammar", message);
        ApiError { param: (!param.is_empty()).then_some(param), ..error }
    }

    pub fn status(&self, wire: Wire) -> u16 {
        self.kind.status(wire)
    }

    /// Whether the same request may succeed later, for clients that try again by themselves;
    /// `None`: it may or may not, and they know as much.
    fn is_retry_of_use(&self) -> Option<bool> {
        match self.kind {
            Kind::RateLimit | Kind::Overloaded | Kind::Loading => Some(true),
            // A slow body may come faster, and a disk may recover. All else gives the same again.
            Kind::Body(408) => None,
            Kind::Server if self.code == "io_error" => None,
            _ => Some(false),
        }
    }

    /// The body.
    pub fn body(&self, wire: Wire, request_id: &str) -> Value {
        let (status, name) = (self.status(wire), self.kind.name(wire));
        if wire == Wire::Anthropic {
            let error = json!({ "type": name, "message": self.message_for_anthropic() });
            return json!({ "type": "error", "error": error, "request_id": request_id });
        }
        if wire == Wire::Ollama {
            return json!({ "error": self.message });
        }
        let mut error = Map::new();
        if wire == Wire::Native || self.kind == Kind::Loading {
            // The order of llama-server's members: wrappers compare the text.
            error.insert("code".into(), status.into());
            error.insert("message".into(), self.message.as_str().into());
            error.insert("type".into(), name.into());
        } else {
            error.insert("message".into(), self.message.as_str().into());
            error.insert("type".into(), name.into());
            error.insert("param".into(), self.param.as_deref().into());
            error.insert("code".into(), self.code.into());
            error.insert("status".into(), status.into());
        }
        error.extend(self.details.iter().map(|(name, value)| ((*name).into(), value.clone())));
        json!({ "error": error })
    }

    fn message_for_anthropic(&self) -> String {
        let detail = |name| self.details.iter().find(|(key, _)| *key == name);
        match (self.kind, detail("n_prompt_tokens"), detail("n_ctx")) {
            (Kind::ContextOverflow, Some((_, n)), Some((_, most))) => {
                format!("prompt is too long: {n} tokens > {most} maximum")
            }
            _ => self.message.clone(),
        }
    }

    /// The whole response.
    pub fn response(&self, wire: Wire, request_id: &str) -> Response<Body> {
        let mut response = Response::new(body::whole(self.body(wire, request_id).to_string()));
        let status = StatusCode::from_u16(self.status(wire));
        *response.status_mut() = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
            let ms = self.retry_after_ms.unwrap_or(seconds * 1000);
            headers.insert("retry-after-ms", ms.into());
        }
        if let Some(is_of_use) = self.is_retry_of_use() {
            let value = HeaderValue::from_static(if is_of_use { "true" } else { "false" });
            headers.insert("x-should-retry", value);
        }
        if self.kind == Kind::Authentication {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(methods) = self.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(methods));
        }
        if self.kind == Kind::Upgrade {
            headers.insert(header::UPGRADE, HeaderValue::from_static("HTTP/1.1"));
        }
        if matches!(self.kind, Kind::Body(_)) {
            // What is left of the body is not read.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_strings_for_openai_and_numbers_for_native_routes() {
        let error = ApiError::invalid("messages[3].content", "content: expected text");
        let body = error.body(Wire::OpenAi, "r");
        assert_eq!(
            body,
            json!({ "error": {
                "message": "content: expected text", "type": "invalid_request_error",
                "param": "messages[3].content", "code": "invalid_value", "status": 400,
            } })
        );
        assert_eq!(error.body(Wire::Native, "r")["error"]["code"], 400);
    }

    #[test]
    fn too_much_at_the_moment_is_overload_wherever_it_is_found() {
        let busy = Error::Busy("64 grammars wait to be compiled: try again".into());
        let schema = ApiError::of_schema(&busy, "tools");
        for error in [ApiError::of_request(&busy), ApiError::of_run(&busy), schema] {
            assert_eq!((error.status(Wire::OpenAi), error.retry_after), (503, Some(2)));
        }
    }

    #[test]
    fn retries_are_asked_for_where_they_may_help() {
        let asks = |error: ApiError| {
            let response = error.response(Wire::OpenAi, "r");
            let value = response.headers().get("x-should-retry");
            value.map(|value| value.to_str().unwrap() == "true")
        };
        let io = ApiError::new(Kind::Server, "io_error", "");
        let slow = ApiError::new(Kind::Body(408), "body_timeout", "");
        let limit = ApiError::new(Kind::RateLimit, "rate_limit_exceeded", "");
        let large = ApiError::new(Kind::Body(413), "body_too_large", "");
        assert_eq!([io, slow].map(asks), [None; 2]);
        assert_eq!(
            [ApiError::loading(), ApiError::shutting_down(), limit].map(asks),
            [Some(true); 3]
        );
        let never = [
            ApiError::invalid("x", ""),
            ApiError::context_overflow(9, 4),
            ApiError::not_supported(""),
            ApiError::server("the grammar cannot be followed"),
            large,
        ];
        assert_eq!(never.map(asks), [Some(false); 5]);
    }

    #[test]
    fn loading_is_the_text_that_wrappers_compare() {
        let expected =
            r#"{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}"#;
        for wire in [Wire::OpenAi, Wire::Native] {
            assert_eq!(ApiError::loading().body(wire, "r").to_string(), expected);
        }
        assert_eq!(ApiError::loading().status(Wire::Anthropic), 529);
        let body = ApiError::loading().body(Wire::Ollama, "r");
        assert_eq!(body, json!({ "error": "Loading model" }));
    }

    #[test]
    fn a_long_prompt_is_told_as_each_client_expects() {
        let error = ApiError::context_overflow(9000, 4096);
        let body = error.body(Wire::OpenAi, "r");
        assert_eq!(body["error"]["code"], "context_length_exceeded");
        assert_eq!(body["error"]["n_prompt_tokens"], 9000);
        let text = body["error"]["message"].as_str().unwrap();
        for phrase in
            ["exceeds the available context size", "maximum context length is 4096 tokens"]
        {
            assert!(text.contains(phrase), "{text}");
        }
        assert_eq!(error.body(Wire::Native, "r")["error"]["type"], "exceed_context_size_error");
        let anthropic = error.body(Wire::Anthropic, "r");
        let expected = "prompt is too long: 9000 tokens > 4096 maximum";
        assert_eq!(anthropic["error"]["message"], expected);
        assert_eq!(anthropic["request_id"], "r");
    }
}
