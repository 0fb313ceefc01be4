//! From a request to its response: who may ask, what is asked for, and the headers of every answer.

use std::net::IpAddr;
use std::sync::Arc;

use hyper::HeaderMap;
use hyper::body::Incoming;
use hyper::http::request::Parts;
use hyper::http::{HeaderValue, Method, Response, StatusCode, header};
use serde_json::Value;
use tokio::time::sleep;

use super::App;
use super::api::{
    anthropic, chat, completions, embeddings, models, native, ollama, rerank, responses, text,
};
use super::auth::Client;
use super::body::{self, Body};
use super::errors::{ApiError, ApiResult, Kind, Wire};
use super::models::Lease;
use super::report::Report;
use super::sockets::{Activity, Place, Socket};
use super::{adapters, experts, openapi, origin, page, peer, proxy, random, replay, slots, status};
use crate::engine::{EXPERTS_ROUTE, GREETING_ROUTE};

/// The other end of a connection, or a client behind it; a socket of this machine has no addresses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peer {
    pub address: Option<IpAddr>,
    /// The address that it has connected to.
    pub local: Option<IpAddr>,
}

/// A request that may be served.
pub struct Call {
    pub app: Arc<App>,
    pub client: Client,
    pub id: String,
    pub parts: Parts,
    pub(super) body: Option<Incoming>,
    pub activity: Arc<Activity>,
    /// Taken by answers that are streamed.
    pub report: Option<Report>,
}

/// A route's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handler {
    Health,
    Ready,
    Metrics,
    OpenApi,
    Models,
    Model,
    ModelsLoad,
    ModelsUnload,
    Props,
    Slots,
    /// Saves, restores or erases a slot.
    Slot,
    /// A file of the page.
    Page,
    Experts,
    /// A peer's facts, and its work.
    Peer,
    PeerExperts,
    Chat,
    ChatTokens,
    Responses,
    ResponsesTokens,
    Completions,
    Completion,
    Embeddings,
    /// llama-server's own.
    Embedding,
    Rerank,
    Tokenize,
    Detokenize,
    ApplyTemplate,
    Messages,
    CountTokens,
    Root,
    OllamaVersion,
    OllamaTags,
    OllamaProcesses,
    OllamaShow,
    OllamaChat,
    OllamaGenerate,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaPull,
    OllamaDelete,
    Adapters,
    /// A sentence that names the alternative.
    NotBuilt(&'static str),
}

use Handler::NotBuilt;

pub struct Route {
    /// Ends with `*` where anything may follow.
    pub path: &'static str,
    /// Methods, with commas between them.
    pub allow: &'static str,
    pub handler: Handler,
}

const GET: &str = "GET, HEAD, OPTIONS";
const POST: &str = "POST, OPTIONS";
/// `GET` is told why there is no WebSocket.
const RESPONSES: &str = "POST, OPTIONS, GET";
const ANY: &str = "GET, HEAD, POST, DELETE, OPTIONS";

const TEXT_ONLY: &str = "moeba reads and writes text only, no images and no sound";
const MANAGEMENT: &str = "moeba makes no models here: see moeba pull, convert and quantize";
const BATCHES: &str = "moeba keeps no batches: send each request to /v1/messages";

const fn route(path: &'static str, allow: &'static str, handler: Handler) -> Route {
    Route { path, allow, handler }
}

pub const ROUTES: &[Route] = &[
    route("/health", GET, Handler::Health),
    route("/v1/health", GET, Handler::Health),
    route("/ready", GET, Handler::Ready),
    route("/metrics", GET, Handler::Metrics),
    route("/openapi.json", GET, Handler::OpenApi),
    route("/v1/models", GET, Handler::Models),
    route("/models", GET, Handler::Models),
    route("/v1/models/*", GET, Handler::Model),
    route("/props", GET, Handler::Props),
    route("/slots", GET, Handler::Slots),
    route("/page/*", GET, Handler::Page),
    route("/moeba/experts", GET, Handler::Experts),
    route(GREETING_ROUTE, GET, Handler::Peer),
    route(EXPERTS_ROUTE, POST, Handler::PeerExperts),
    route("/v1/chat/completions", POST, Handler::Chat),
    route("/chat/completions", POST, Handler::Chat),
    route("/v1/chat/completions/input_tokens", POST, Handler::ChatTokens),
    route("/chat/completions/input_tokens", POST, Handler::ChatTokens),
    route("/v1/responses", RESPONSES, Handler::Responses),
    route("/responses", RESPONSES, Handler::Responses),
    route("/v1/responses/input_tokens", POST, Handler::ResponsesTokens),
    route("/responses/input_tokens", POST, Handler::ResponsesTokens),
    route("/v1/completions", POST, Handler::Completions),
    route("/completion", POST, Handler::Completion),
    route("/completions", POST, Handler::Completion),
    route("/tokenize", POST, Handler::Tokenize),
    route("/detokenize", POST, Handler::Detokenize),
    route("/apply-template", POST, Handler::ApplyTemplate),
    route("/v1/embeddings", POST, Handler::Embeddings),
    route("/embeddings", POST, Handler::Embedding),
    route("/embedding", POST, Handler::Embedding),
    route("/v1/rerank", POST, Handler::Rerank),
    route("/v1/reranking", POST, Handler::Rerank),
    route("/rerank", POST, Handler::Rerank),
    route("/reranking", POST, Handler::Rerank),
    route(
        "/infill",
        ANY,
        NotBuilt("moeba has no infilling: use /completion with the model's own tokens"),
    ),
    route("/lora-adapters", "GET, HEAD, POST, OPTIONS", Handler::Adapters),
    route("/v1/audio/*", ANY, NotBuilt(TEXT_ONLY)),
    route("/v1/images/*", ANY, NotBuilt(TEXT_ONLY)),
    route("/models/load", POST, Handler::ModelsLoad),
    route("/models/unload", POST, Handler::ModelsUnload),
    route("/tools", ANY, NotBuilt("moeba runs no tools: the client runs them")),
    route("/cors-proxy", ANY, NotBuilt("moeba fetches nothing for its clients")),
    route("/slots/*", POST, Handler::Slot),
    route("/v1/messages", POST, Handler::Messages),
    route("/v1/messages/count_tokens", POST, Handler::CountTokens),
    route("/v1/messages/batches", ANY, NotBuilt(BATCHES)),
    route("/v1/messages/batches/*", ANY, NotBuilt(BATCHES)),
    route(
        "/v1/responses/compact",
        ANY,
        NotBuilt("conversations are not compacted here: send a shorter input"),
    ),
    route("/v1/responses/*", ANY, NotBuilt(responses::NOT_STORED)),
    route("/responses/*", ANY, NotBuilt(responses::NOT_STORED)),
    route("/", GET, Handler::Root),
    route("/api/version", GET, Handler::OllamaVersion),
    route("/api/tags", GET, Handler::OllamaTags),
    route("/api/ps", GET, Handler::OllamaProcesses),
    route("/api/show", POST, Handler::OllamaShow),
    route("/api/chat", POST, Handler::OllamaChat),
    route("/api/generate", POST, Handler::OllamaGenerate),
    route("/api/embed", POST, Handler::OllamaEmbed),
    route("/api/embeddings", POST, Handler::OllamaEmbeddings),
    route("/api/pull", POST, Handler::OllamaPull),
    route("/api/push", ANY, NotBuilt(MANAGEMENT)),
    route("/api/create", ANY, NotBuilt(MANAGEMENT)),
    route("/api/copy", ANY, NotBuilt(MANAGEMENT)),
    route("/api/delete", "DELETE, OPTIONS", Handler::OllamaDelete),
    route("/api/blobs/*", ANY, NotBuilt(MANAGEMENT)),
];

/// Answers a request, whatever it is.
pub async fn answer(
    app: Arc<App>,
    peer: Peer,
    socket: &Socket,
    request: hyper::Request<Incoming>,
) -> Response<Body> {
    let id = random::name("req_");
    let prefix = &app.options.api_prefix;
    if request.uri().path() == prefix && !prefix.is_empty() {
        return moved(format!("{prefix}/"));
    }
    let path = trimmed(below(prefix, request.uri().path())).to_owned();
    let wire = Wire::of(&path);
    let mut response = respond(app, peer, socket, request, &path, &id).await;
    if let Ok(id) = HeaderValue::from_str(&id) {
        let headers = response.headers_mut();
        if wire == Wire::Anthropic {
            headers.insert("request-id", id.clone());
        }
        headers.insert("x-request-id", id);
    }
    response
}

async fn respond(
    app: Arc<App>,
    peer: Peer,
    socket: &Socket,
    request: hyper::Request<Incoming>,
    path: &str,
    id: &str,
) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let (wire, route) = (Wire::of(path), find(path));
    let pattern = route.map_or("other", |route| route.path);
    let mut report = Report::new(&app.metrics, app.options.log_requests, id, pattern);
    let (peer, place) = match admit(&app, peer, socket, &parts.headers) {
        Ok(admitted) => admitted,
        Err(error) => return finished(error.response(wire, id), &app, None, report),
    };
    let checked = check(&app, peer, &parts, path).await;
    let (origin, mut client) = match checked {
        Ok(checked) => checked,
        Err(error) => return finished(error.response(wire, id), &app, None, report),
    };
    report.set_client(client.name.clone());
    let said_priority = parts.headers.get("x-priority").and_then(|value| value.to_str().ok());
    client.has_priority |= app.options.allow_priority;
    client.said_priority = said_priority.map(str::to_owned);
    if parts.method == Method::OPTIONS {
        let response = preflight(&parts, origin.is_some(), route);
        return finished(response, &app, origin, report);
    }
    let call = Call {
        app: app.clone(),
        client,
        id: id.to_owned(),
        parts,
        body: Some(body),
        activity: socket.activity.clone(),
        report: Some(report),
    };
    let (mut response, report) = handle(call, route, path, wire).await;
    // It goes with the answer.
    response.extensions_mut().insert(place.map(Arc::new));
    match report {
        Some(report) => finished(response, &app, origin, report),
        None => with_headers(response, origin),
    }
}

/// Whether a request has a place, and a form that proxies and this server read alike; then the
/// client, also one behind a proxy, and its place.
fn admit(
    app: &App,
    peer: Peer,
    socket: &Socket,
    headers: &HeaderMap,
) -> ApiResult<(Peer, Option<Place>)> {
    let full = |message: String| {
        let error = ApiError::new(Kind::Overloaded, "too_many_connections", message);
        error.after(app.time_to_wait())
    };
    if socket.is_refused {
        return Err(full("The server has no place for more connections. Try again later.".into()));
    }
    check_coding(headers)?;
    let proxies = &app.options.connections.proxies;
    let client = Peer { address: proxy::client(peer.address, headers, proxies), ..peer };
    let is_behind = client.address != peer.address.map(|ip| ip.to_canonical());
    let address =
        client.address.filter(|_| is_behind && !proxy::is_trusted(client.address, proxies));
    let Some(address) = address else { return Ok((client, None)) };
    let place = app.sockets.place(address);
    let most = app.sockets.most_per_address();
    let message = || format!("{address} has {most} requests here already. Try again later.");
    place.map(|place| (client, Some(place))).ok_or_else(|| full(message()))
}

/// Refuses bodies in codings that are not read. A proxy may see another end of such a body.
fn check_coding(headers: &HeaderMap) -> ApiResult<()> {
    let lines = headers.get_all(header::TRANSFER_ENCODING).iter();
    let lines: Vec<&str> = lines.map(|line| line.to_str().unwrap_or("?")).collect();
    let all: Vec<&str> = lines.iter().flat_map(|line| line.split(',')).map(str::trim).collect();
    let is_chunked = |coding: &&str| coding.eq_ignore_ascii_case("chunked");
    match &all[..] {
        [] => Ok(()),
        [one] if is_chunked(one) => Ok(()),
        all if all.iter().all(is_chunked) => {
            let message = "Transfer-Encoding: chunked may be there once";
            Err(ApiError::new(Kind::Body(400), "invalid_transfer_encoding", message))
        }
        _ => {
            let message = "Transfer-Encoding: only chunked is read";
            Err(ApiError::new(Kind::Body(501), "unsupported_transfer_encoding", message))
        }
    }
}

/// The part of a path behind the prefix of all paths; nothing, which is no route, where it has
/// another beginning.
fn below<'a>(prefix: &str, path: &'a str) -> &'a str {
    path.strip_prefix(prefix).filter(|rest| rest.starts_with('/')).unwrap_or_default()
}

/// Leads to another path, relative to which a page finds its files.
fn moved(to: String) -> Response<Body> {
    let mut response = Response::new(body::whole(""));
    *response.status_mut() = StatusCode::PERMANENT_REDIRECT;
    if let Ok(to) = HeaderValue::from_str(&to) {
        response.headers_mut().insert(header::LOCATION, to);
    }
    response
}

/// A path without a slash at its end.
fn trimmed(path: &str) -> &str {
    match path.strip_suffix('/') {
        Some(trimmed) if !trimmed.is_empty() => trimmed,
        _ => path,
    }
}

fn find(path: &str) -> Option<&'static Route> {
    ROUTES.iter().find(|route| match route.path.strip_suffix('*') {
        Some(begin) => path.strip_prefix(begin).is_some_and(|rest| !rest.is_empty()),
        None => path == route.path,
    })
}

/// The last steps of an answer that is not streamed.
fn finished(
    mut response: Response<Body>,
    app: &App,
    origin: Option<HeaderValue>,
    mut report: Report,
) -> Response<Body> {
    let status = response.status().as_u16();
    if status >= 400 {
        app.metrics.add_rejected(reason(status));
    }
    let hash = report.request_hash.take().filter(|_| status < 400);
    if let Some(Ok(hash)) = hash.map(|hash| HeaderValue::from_str(&hash)) {
        response.headers_mut().insert(replay::HEADER, hash);
    }
    report.answered(status);
    with_headers(response, origin)
}

fn reason(status: u16) -> &'static str {
    match status {
        401 | 403 => "not_allowed",
        404 | 405 => "no_route",
        408 | 413 | 415 => "body",
        429 => "rate_limit",
        501 => "not_built",
        503 | 529 => "overloaded",
        500.. => "server_error",
        _ => "invalid",
    }
}

fn with_headers(mut response: Response<Body>, origin: Option<HeaderValue>) -> Response<Body> {
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(origin) = origin {
        origin::allow(headers, &origin);
    }
    response
}

/// Checks host, origin and key: the origin, and whose request it is.
async fn check(
    app: &App,
    peer: Peer,
    parts: &Parts,
    path: &str,
) -> ApiResult<(Option<HeaderValue>, Client)> {
    app.allowed.check_host(&parts.headers, peer.local)?;
    origin::check_target(&parts.uri, &parts.headers)?;
    // A link elsewhere may lead to the page, which no other site can read or frame.
    let is_page = app.options.page && page::is_asked_for(path, &parts.headers);
    if parts.method == Method::GET && is_page {
        return Ok((None, Client::at(peer.address)));
    }
    let origin = app.allowed.check_origin(&parts.headers)?;
    let is_public = is_public(path) || is_page;
    let keys = app.keys();
    if keys.is_empty() || is_public || parts.method == Method::OPTIONS {
        return Ok((origin, Client::at(peer.address)));
    }
    if let Some(client) = given_keys(parts).find_map(|key| keys.find(key)) {
        return Ok((origin, client));
    }
    match app.failures.add(peer.address) {
        Some(delay) => sleep(delay).await,
        None => {
            let message = "there were too many requests with a wrong key: try again later";
            let error = ApiError::new(Kind::RateLimit, "rate_limit_exceeded", message);
            return Err(ApiError { retry_after: Some(5), ..error });
        }
    }
    let message = "the API key is missing or wrong: send Authorization: Bearer KEY";
    Err(ApiError::new(Kind::Authentication, "invalid_api_key", message))
}

/// Whether a path needs no key.
pub fn is_public(path: &str) -> bool {
    ["/", "/health", "/v1/health", "/ready"].contains(&path)
}

/// The keys of a request's headers.
fn given_keys(parts: &Parts) -> impl Iterator<Item = &str> {
    let bearer = parts.headers.get_all(header::AUTHORIZATION).iter();
    let bearer = bearer.filter_map(|value| {
        let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    let own = parts.headers.get_all("x-api-key").iter().filter_map(|value| value.to_str().ok());
    bearer.chain(own)
}

/// The answer to a browser that asks before it sends a request.
fn preflight(parts: &Parts, is_allowed: bool, route: Option<&Route>) -> Response<Body> {
    let mut response = Response::new(body::whole(""));
    *response.status_mut() = StatusCode::NO_CONTENT;
    let allow = HeaderValue::from_static(route.map_or(ANY, |route| route.allow));
    response.headers_mut().insert(header::ALLOW, allow);
    if is_allowed {
        origin::allow_methods(response.headers_mut(), &parts.headers);
    }
    response
}

/// Serves a call: the response, and the report unless a stream has it.
async fn handle(
    mut call: Call,
    route: Option<&'static Route>,
    path: &str,
    wire: Wire,
) -> (Response<Body>, Option<Report>) {
    let result = match route {
        None => Err(no_route(path)),
        Some(route) => serve(&mut call, route, path).await,
    };
    let response = result.unwrap_or_else(|error| error.response(wire, &call.id));
    (response, call.report)
}

/// The file of the page that a call is for.
fn asked_page(call: &Call, path: &str) -> Option<Response<Body>> {
    let is_page = call.app.options.page && page::is_asked_for(path, &call.parts.headers);
    page::file(path, &call.parts.headers).filter(|_| is_page)
}

fn no_route(path: &str) -> ApiError {
    let message = format!("there is no route {path}: see moeba's README for the routes");
    ApiError::new(Kind::NotFound, "not_found", message)
}

async fn serve(call: &mut Call, route: &'static Route, path: &str) -> ApiResult<Response<Body>> {
    let method = call.parts.method.as_str();
    if !route.allow.split(", ").any(|allowed| allowed == method) {
        let message = format!("{path} does not take {method}, but {}", route.allow);
        let error = ApiError::new(Kind::Method, "method_not_allowed", message);
        return Err(ApiError { allow: Some(route.allow), ..error });
    }
    if route.handler != Handler::PeerExperts {
        origin::check_content_type(&call.parts.headers, &call.parts.method)?;
    }
    match route.handler {
        Handler::Health => status::health(&call.app, call.query()),
        Handler::Ready => status::ready(&call.app),
        Handler::Metrics => status::metrics(&call.app, call.query()),
        Handler::OpenApi => Ok(openapi::document()),
        Handler::Models => models::list(&call.app).await,
        Handler::Model => models::one(&call.app, path).await,
        Handler::ModelsLoad => models::load(call).await,
        Handler::ModelsUnload => models::unload(call).await,
        Handler::Props => status::props(&call.app, call.query()),
        Handler::Slots => status::slots(&call.app, call.query()),
        Handler::Slot => slots::act(call, path).await,
        Handler::Page => asked_page(call, path).ok_or_else(|| no_route(path)),
        Handler::Experts => experts::stream(&call.app, call.query()),
        Handler::Peer => peer::greeting(&call.app),
        Handler::PeerExperts => peer::experts(call).await,
        Handler::Chat => chat::answer(call).await,
        Handler::ChatTokens => chat::input_tokens(call).await,
        Handler::Responses => responses::answer(call).await,
        Handler::ResponsesTokens => responses::input_tokens(call).await,
        Handler::Completions => completions::answer(call).await,
        Handler::Completion => native::answer(call).await,
        Handler::Embeddings => embeddings::openai(call).await,
        Handler::Embedding => embeddings::native(call).await,
        Handler::Rerank => rerank::answer(call).await,
        Handler::Tokenize => text::tokenize(call).await,
        Handler::Detokenize => text::detokenize(call).await,
        Handler::ApplyTemplate => text::apply_template(call).await,
        Handler::Messages => anthropic::messages(call).await,
        Handler::CountTokens => anthropic::count_tokens(call).await,
        Handler::Root => Ok(asked_page(call, path).unwrap_or_else(ollama::models::running)),
        Handler::OllamaVersion => Ok(ollama::models::version()),
        Handler::OllamaTags => ollama::models::tags(&call.app).await,
        Handler::OllamaProcesses => ollama::models::running_models(&call.app),
        Handler::OllamaShow => ollama::models::show(call).await,
        Handler::OllamaChat => ollama::chat(call).await,
        Handler::OllamaGenerate => ollama::generate(call).await,
        Handler::OllamaEmbed => ollama::embed::embed(call).await,
        Handler::OllamaEmbeddings => ollama::embed::embeddings(call).await,
        Handler::OllamaPull => ollama::downloads::pull(call).await,
        Handler::OllamaDelete => ollama::downloads::delete(call).await,
        Handler::Adapters => adapters::serve(call).await,
        NotBuilt(why) => Err(ApiError::not_supported(why)),
    }
}

impl Call {
    /// The query of the target.
    pub fn query(&self) -> &str {
        self.parts.uri.query().unwrap_or_default()
    }

    /// The model that the query names, if it is loaded.
    pub fn looked_at(&self) -> ApiResult<Arc<Lease>> {
        self.app.open_models()?;
        self.app.looked_at(self.query())?.ok_or_else(ApiError::not_loaded)
    }
}

/// A response with this JSON.
pub fn json(value: &Value) -> Response<Body> {
    let mut response = Response::new(body::whole(value.to_string()));
    let kind = HeaderValue::from_static("application/json; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_one_coding() {
        let of = |lines: &[&str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(header::TRANSFER_ENCODING, line.parse().unwrap());
            }
            check_coding(&headers).map_err(|error| error.status(Wire::OpenAi)).err()
        };
        assert_eq!((of(&[]), of(&["chunked"]), of(&[" Chunked"])), (None, None, None));
        assert_eq!((of(&["gzip, chunked"]), of(&["gzip", "chunked"])), (Some(501), Some(501)));
        assert_eq!((of(&["chunked, chunked"]), of(&["chunked"; 2])), (Some(400), Some(400)));
        assert_eq!((of(&["identity"]), of(&["\u{e4}"])), (Some(501), Some(501)));
    }

    #[test]
    fn routes_are_found_with_and_without_a_slash_at_the_end() {
        let handler = |path| find(trimmed(path)).map(|route| route.handler);
        assert_eq!(handler("/health/"), Some(Handler::Health));
        assert_eq!(handler("/v1/models/a/b"), Some(Handler::Model));
        assert_eq!(handler("/v1/models/"), Some(Handler::Models));
        assert_eq!(handler("//health"), None);
        assert_eq!(handler("/"), Some(Handler::Root));
        assert_eq!(handler("/v1/chat/completions/x"), None);
        assert!(matches!(handler("/infill"), Some(NotBuilt(_))));
    }

    #[test]
    fn each_route_is_there_once() {
        let mut paths: Vec<_> = ROUTES.iter().map(|route| route.path).collect();
        paths.sort_unstable();
        paths.dedup();
        assert_eq!(paths.len(), ROUTES.len());
    }
}
