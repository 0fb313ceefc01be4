//! Routes of `moeba experts`: experts that other machines have this one compute. Bodies are bytes,
//! as `experts/peers/wire.rs` has them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hyper::http::{HeaderValue, Response, header};

use super::App;
use super::body::{self, Body};
use super::errors::{ApiError, ApiResult, Kind};
use super::router::{Call, json as response};
use crate::Error;
use crate::engine::ExpertsWork;

/// Requests that may be here at a time: one is computed, others arrive and wait.
const MAX_OPEN: usize = 12;

/// A peer's work, and the requests that it has.
pub struct PeerService {
    work: ExpertsWork,
    n_open: AtomicUsize,
}

/// A request that counts, until this is dropped.
struct Open(Arc<PeerService>);

impl PeerService {
    pub fn new(work: ExpertsWork) -> PeerService {
        PeerService { work, n_open: AtomicUsize::new(0) }
    }

    fn enter(self: &Arc<PeerService>) -> ApiResult<Open> {
        if self.n_open.fetch_add(1, Ordering::SeqCst) < MAX_OPEN {
            return Ok(Open(self.clone()));
        }
        self.n_open.fetch_sub(1, Ordering::SeqCst);
        let message = format!("{MAX_OPEN} requests for experts are here already");
        let error = ApiError::new(Kind::Overloaded, "overloaded", message);
        Err(ApiError { retry_after: Some(1), ..error })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.n_open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The peer that a server is, once its model is loaded.
fn peer(app: &App) -> ApiResult<Arc<PeerService>> {
    match app.peer.get() {
        Some(_) if app.is_stopping.load(Ordering::Relaxed) => Err(ApiError::shutting_down()),
        Some(peer) => Ok(peer.clone()),
        None if app.options.only_experts => Err(ApiError::loading()),
        None => Err(ApiError::not_supported("this server is no peer: moeba experts starts one")),
    }
}

/// `GET /moeba/peer`
pub fn greeting(app: &App) -> ApiResult<Response<Body>> {
    Ok(response(&peer(app)?.work.greeting()))
}

/// `POST /moeba/peer/experts`
pub async fn experts(call: &mut Call) -> ApiResult<Response<Body>> {
    let peer = peer(&call.app)?;
    let kind = call.parts.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    if kind != Some(BYTES.as_bytes()) {
        let message = format!("the body must be bytes: send Content-Type: {BYTES}");
        return Err(ApiError::new(Kind::Body(415), "unsupported_media_type", message));
    }
    let _running = call.client.enter()?;
    let open = peer.enter()?;
    let request = call.read_body(None).await?;
    let work = move || {
        let computed = open.0.work.compute(&request.bytes);
        drop(open);
        computed
    };
    let answer = match tokio::task::spawn_blocking(work).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(Error::Invalid(why))) => {
            return Err(ApiError::new(Kind::Invalid, "invalid_body", why));
        }
        Ok(Err(why)) => return Err(ApiError::server(why.to_string())),
        Err(_) => return Err(ApiError::server("experts could not be computed: see the messages")),
    };
    let mut response = Response::new(body::whole(answer));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(BYTES));
    Ok(response)
}

const BYTES: &str = "application/octet-stream";
