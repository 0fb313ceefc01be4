//! Bodies of requests: read into memory that all of them share, and parsed there.
//!
//! A body waits unread until its bytes have a place, and its JSON until what is made of it has one:
//! values of serde_json take up to some hundred times their text. Short bodies have memory of their
//! own, so that long ones keep none of them waiting.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::http::{HeaderValue, header};
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::errors::{ApiError, ApiResult, Kind};
use super::fields::wrong;
use super::limits::BODY_TIME;
use super::models::{Lease, Models};
use super::report::LogRequests;
use super::router::Call;
use super::sockets::{Reading, is_slow};
use crate::meter;

/// The longest body that is short. Reading one takes at most some MiB.
const SHORT: usize = 64 << 10;

/// Time for which a body waits for memory.
const WAIT: Duration = Duration::from_secs(10);

/// The time between two looks at a body that does not come.
const TICK: Duration = Duration::from_millis(500);

/// Bytes a second below which a body gives its memory to others that wait, once it has had a while.
const SLOW: u64 = 512 << 10;
const PATIENCE: Duration = Duration::from_secs(2);

/// The part of a refused body that is read all the same.
const MAX_DISCARDED: usize = 128 << 20;
const DISCARD_TIME: Duration = Duration::from_secs(20);

/// Memory is counted in these.
const UNIT: usize = 1 << 10;

/// Memory for bodies where the plan has none.
const USUAL_BYTES: u64 = 512 << 20;

/// The memory of all bodies.
#[derive(Debug)]
pub struct Bodies {
    short: Pool,
    long: Pool,
    /// For the values of long ones.
    parsed: Pool,
}

#[derive(Debug)]
struct Pool {
    free: Arc<Semaphore>,
    n_bytes: usize,
    n_waiting: AtomicUsize,
}

impl Pool {
    fn new(n_bytes: usize) -> Pool {
        let free = Arc::new(Semaphore::new(n_bytes / UNIT));
        Pool { free, n_bytes, n_waiting: AtomicUsize::new(0) }
    }

    /// Waits for memory; `None` if that takes too long.
    async fn take(&self, n_bytes: usize) -> Option<OwnedSemaphorePermit> {
        self.take_within(n_bytes, WAIT).await
    }

    async fn take_within(&self, n_bytes: usize, time: Duration) -> Option<OwnedSemaphorePermit> {
        let n = u32::try_from(n_bytes.min(self.n_bytes).div_ceil(UNIT)).unwrap_or(u32::MAX);
        let n = n.min(u32::try_from(self.n_bytes / UNIT).unwrap_or(u32::MAX));
        if let Ok(taken) = self.free.clone().try_acquire_many_owned(n) {
            return Some(taken);
        }
        let _waiting = Waiting::new(&self.n_waiting);
        timeout(time, self.free.clone().acquire_many_owned(n)).await.ok()?.ok()
    }

    fn is_wanted(&self) -> bool {
        self.n_waiting.load(Ordering::Relaxed) > 0
    }
}

/// Counts one who waits, also if it goes.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(n: &'a AtomicUsize) -> Waiting<'a> {
        n.fetch_add(1, Ordering::Relaxed);
        Waiting(n)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Bodies {
    /// For `n_bytes`; 0 is the usual number.
    pub fn new(n_bytes: u64) -> Bodies {
        let n_bytes = if n_bytes == 0 { USUAL_BYTES } else { n_bytes };
        // An eighth is for what short bodies become, and for buffers of sockets.
        let part = |eighths: u64| usize::try_from(n_bytes / 8 * eighths).unwrap_or(usize::MAX);
        Bodies { short: Pool::new(part(1)), long: Pool::new(part(2)), parsed: Pool::new(part(4)) }
    }

    /// Bytes of a body at most.
    fn most(&self) -> usize {
        self.long.n_bytes
    }

    fn pool(&self, n_bytes: usize) -> &Pool {
        if n_bytes <= SHORT { &self.short } else { &self.long }
    }
}

/// A body, and its place in memory.
pub struct Held {
    pub bytes: Vec<u8>,
    /// Given back when this is dropped.
    _place: Option<OwnedSemaphorePermit>,
}

/// The depth that serde_json refuses.
const MAX_DEPTH: usize = 128;

/// Bytes that JSON takes when it is read, copied into a request and rendered, as its marks tell.
/// More for odd texts: it need not be JSON.
fn parsed_bytes(json: &[u8]) -> usize {
    // What serde_json's values and their maps take, doubled where a request copies them.
    let (mut n, mut in_string, mut bytes) = (3 * json.len(), false, json.iter());
    let mut depth = 0usize;
    while let Some(byte) = bytes.next() {
        match byte {
            b'{' | b'[' if !in_string => depth += 1,
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        // Nothing behind this is read.
        if depth > MAX_DEPTH {
            break;
        }
        n += match byte {
            b'\\' if in_string => {
                bytes.next();
                0
            }
            b'"' => {
                in_string = !in_string;
                16
            }
            _ if in_string => 0,
            b',' => 192,
            b':' => 448,
            b'{' => 512,
            b'[' => 256,
            _ => 0,
        };
    }
    n
}

impl Call {
    /// Reads the body as JSON and runs `work` on it and on the model that it names, which is loaded
    /// if it is not there, on a thread that may take its time.
    pub async fn with_body<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Value, &Arc<Lease>) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let body = self.receive().await?;
        self.with_received(body, work).await
    }

    /// The bytes of the body.
    pub async fn receive(&mut self) -> ApiResult<Held> {
        let app = self.app.clone();
        let body = self.read_body(Some(&app.open_models()?.bodies)).await?;
        if app.options.log_requests == LogRequests::Full {
            log::info!("{} {}", self.id, String::from_utf8_lossy(&body.bytes));
        }
        Ok(body)
    }

    /// [`Call::with_body`] of a body that is there.
    pub async fn with_received<T: Send + 'static>(
        &self,
        body: Held,
        work: impl FnOnce(&Value, &Arc<Lease>) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let models = self.app.open_models()?;
        let is_long = body.bytes.len() > SHORT;
        let is_single = models.is_single();
        let measured = move || {
            let asked = if is_single { Ok(None) } else { asked(&body.bytes) };
            (asked, if is_long { parsed_bytes(&body.bytes) } else { 0 }, body)
        };
        let (asked, n_bytes, body) = match is_long {
            true => in_background(measured).await?,
            false => measured(),
        };
        let id = find(models, asked?).await?;
        let model = models.take(id).await?;
        let room = match is_long {
            true => Some(self.room_for_values(n_bytes, &models.bodies).await?),
            false => None,
        };
        let work = move || {
            let value = parsed(&body.bytes);
            drop(body);
            let result = value.and_then(|value: Value| work(&value, &model));
            if is_long {
                meter::give_back();
            }
            drop(room);
            result
        };
        in_background(work).await?
    }

    /// Waits until there is memory for what a long body becomes.
    async fn room_for_values(
        &self,
        n_bytes: usize,
        bodies: &Bodies,
    ) -> ApiResult<OwnedSemaphorePermit> {
        let pool = &bodies.parsed;
        if n_bytes > pool.n_bytes {
            let message = format!(
                "the body has so many values that reading them may take {n_bytes} bytes, and there \
                 are {}: see --body-ram",
                pool.n_bytes
            );
            return Err(ApiError::new(Kind::Body(413), "body_too_large", message));
        }
        pool.take(n_bytes).await.ok_or_else(|| self.no_room())
    }

    fn no_room(&self) -> ApiError {
        let message = "other bodies take all memory for them: try again, or see --body-ram";
        ApiError::new(Kind::Overloaded, "bodies_full", message).after(self.app.time_to_wait())
    }

    /// Reads the body, which has a bound in bytes and in time, into the memory of all bodies. A
    /// peer's are bounded by their number.
    pub async fn read_body(&mut self, bodies: Option<&Bodies>) -> ApiResult<Held> {
        let most = self.app.options.max_body;
        let most = bodies.map_or(most, |bodies| most.min(bodies.most()));
        let headers = &self.parts.headers;
        let encoding = headers.get(header::CONTENT_ENCODING).map(HeaderValue::as_bytes);
        if encoding.is_some_and(|encoding| encoding != b"identity") {
            let message = "compressed bodies are not read: send it as it is";
            return Err(ApiError::new(Kind::Body(415), "unsupported_encoding", message));
        }
        let length =
            headers.get(header::CONTENT_LENGTH).and_then(|n| n.to_str().ok()?.parse().ok());
        let is_large = length.is_some_and(|length: u64| length > most as u64);
        let Some(body) = self.body.take() else {
            return Ok(Held { bytes: Vec::new(), _place: None });
        };
        let reading = self.activity.body();
        let mut intake = Intake { body, bytes: Vec::new(), reading };
        if is_large {
            intake.discard().await;
            return Err(too_large(most));
        }
        // One that does not say its length is short until it is longer.
        let expected = length.map_or(SHORT.min(most), |length| length as usize);
        let pool = bodies.map(|bodies| bodies.pool(expected));
        let first = if length.is_some() { most } else { expected };
        let place = self.place(pool, expected, &mut intake).await?;
        intake.bytes.reserve(expected);
        if intake.read(first, pool).await? {
            return Ok(Held { bytes: intake.bytes, _place: place });
        }
        if first == most {
            intake.discard().await;
            return Err(too_large(most));
        }
        drop(place);
        let pool = bodies.map(|bodies| &bodies.long);
        let place = self.place(pool, most, &mut intake).await?;
        if intake.read(most, pool).await? {
            return Ok(Held { bytes: intake.bytes, _place: place });
        }
        intake.discard().await;
        Err(too_large(most))
    }

    /// Waits for memory for a body.
    async fn place(
        &self,
        pool: Option<&Pool>,
        n_bytes: usize,
        intake: &mut Intake,
    ) -> ApiResult<Option<OwnedSemaphorePermit>> {
        let Some(pool) = pool else { return Ok(None) };
        let place = pool.take(n_bytes).await;
        if place.is_none() {
            intake.discard().await;
            return Err(self.no_room());
        }
        Ok(place)
    }
}

/// The model that a body names; `name` is the field of Ollama's older clients.
#[derive(Deserialize)]
struct Asked<'a> {
    #[serde(borrow)]
    model: Option<Cow<'a, str>>,
    #[serde(borrow)]
    name: Option<Cow<'a, str>>,
}

/// The name of the model in a body. Its other members are read over.
fn asked(body: &[u8]) -> ApiResult<Option<String>> {
    match serde_json::from_slice(body.strip_prefix(super::body::MARK).unwrap_or(body)) {
        Ok(Asked { model, name }) => return Ok(model.or(name).map(Cow::into_owned)),
        // There is no memory yet for the values of a long one.
        Err(why) if body.len() > SHORT && why.is_data() => {
            let message = format!("model: expected a string: {why}");
            return Err(ApiError::invalid("model", message));
        }
        Err(why) if body.len() > SHORT => return Err(no_json(&why)),
        // No JSON, or a name that is none, or one that is there twice.
        Err(_) => {}
    }
    let value = parsed(body)?;
    let given = ["model", "name"].iter().map(|name| &value[*name]).find(|name| !name.is_null());
    match given {
        Some(Value::String(name)) => Ok(Some(name.clone())),
        Some(other) => Err(wrong("model", "a string", other)),
        None => Ok(None),
    }
}

/// The JSON of a body.
pub fn parsed(body: &[u8]) -> ApiResult<Value> {
    super::body::json(body).map_err(|why| no_json(&why))
}

fn no_json(why: &serde_json::Error) -> ApiError {
    let message = format!("the request's body is no JSON: {why}");
    ApiError::new(Kind::Invalid, "invalid_json", message)
}

/// The model of this name. Where it is not known, folders are read.
pub async fn find(models: &Arc<Models>, name: Option<String>) -> ApiResult<usize> {
    if let Some(id) = models.known(name.as_deref()) {
        return Ok(id);
    }
    let models = models.clone();
    in_background(move || models.find(name.as_deref())).await?
}

/// Runs work on a thread that may take its time.
pub async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> ApiResult<T> {
    let lost = |_| ApiError::server("the request could not be read: see the messages");
    tokio::task::spawn_blocking(work).await.map_err(lost)
}

fn too_large(most: usize) -> ApiError {
    let message = format!("the body has more than {most} bytes: see --max-body and --body-ram");
    ApiError::new(Kind::Body(413), "body_too_large", message)
}

/// A body that comes.
struct Intake {
    body: Incoming,
    bytes: Vec<u8>,
    reading: Reading,
}

impl Intake {
    /// Reads some of the rest and keeps none of it: most clients send all before they look at an
    /// answer, and would lose it with the connection.
    async fn discard(&mut self) {
        self.bytes = Vec::new();
        let mut left = MAX_DISCARDED;
        let all = async {
            while let Some(Ok(frame)) = self.body.frame().await {
                left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len()));
                if left == 0 || self.reading.is_evicted() {
                    return;
                }
            }
        };
        let _ = timeout(DISCARD_TIME, all).await;
    }

    /// Reads on; false once there are more than `most` bytes. A body that comes slowly ends where
    /// others wait for the memory or the connection.
    async fn read(&mut self, most: usize, pool: Option<&Pool>) -> ApiResult<bool> {
        let (start, n_before) = (Instant::now(), self.bytes.len());
        while self.bytes.len() <= most {
            let frame = timeout(TICK, self.body.frame()).await;
            let time = start.elapsed();
            match frame {
                Ok(None) => return Ok(true),
                Ok(Some(Ok(frame))) => {
                    let data = frame.data_ref().map_or(&[][..], |data| &data[..]);
                    self.reading.add(data.len());
                    self.bytes.extend_from_slice(data);
                }
                Ok(Some(Err(_))) => {
                    let message = "the body has ended early";
                    return Err(ApiError::new(Kind::Body(400), "incomplete_body", message));
                }
                Err(_) => {}
            }
            let n_new = (self.bytes.len() - n_before) as u64;
            let is_slow = time >= PATIENCE && is_slow(n_new, time, SLOW);
            let is_wanted = is_slow && pool.is_some_and(Pool::is_wanted);
            if time > BODY_TIME || is_wanted || self.reading.is_evicted() {
                let message = match time > BODY_TIME {
                    true => "the body took too long",
                    false => "the body came slowly while others waited for its place: try again",
                };
                return Err(ApiError::new(Kind::Body(408), "body_timeout", message));
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_marks_of_json_tell_what_it_takes() {
        let text = format!("{{\"prompt\": \"{}\"}}", "a,b:[{\\\"".repeat(1000));
        assert!(parsed_bytes(text.as_bytes()) < 4 * text.len());
        let numbers = format!("[{}1]", "1,".repeat(1000));
        assert!(parsed_bytes(numbers.as_bytes()) > 1000 * 72);
        let objects = "{\"\":1},".repeat(1000);
        assert!(parsed_bytes(objects.as_bytes()) > 1000 * 500);
        assert!(parsed_bytes(b"\"\\") < 100);
        assert!(parsed_bytes("[".repeat(1 << 20).as_bytes()) < 4 << 20);
    }

    #[test]
    fn the_model_is_found_without_the_rest() {
        let of = |body: &str| asked(body.as_bytes()).map_err(|why| why.code);
        let name = |name: &str| Ok(Some(name.to_owned()));
        assert_eq!(of(r#"{"messages": [{"model": "no"}], "model": "a\u0062"}"#), name("ab"));
        assert_eq!(of("\u{feff}{\"name\": \"old\", \"x\": \"\\ud83d\"}"), name("old"));
        assert_eq!(of(r#"{"name": "old", "model": "new"}"#), name("new"));
        assert_eq!(of(r#"{"model": "first", "model": "last"}"#), name("last"));
        assert_eq!((of("{}"), of(r#"{"model": null}"#), of("[1]")), (Ok(None), Ok(None), Ok(None)));
        assert_eq!((of(r#"{"model": 5}"#), of("{")), (Err("invalid_value"), Err("invalid_json")));
        let long = |rest: &str| format!(r#"{{"prompt": "{}", {rest}"#, "x".repeat(SHORT));
        assert_eq!(of(&long(r#""model": "m"}"#)), name("m"));
        assert_eq!(of(&long(r#""model": []}"#)), Err("invalid_value"));
        assert_eq!(of(&long(r#""model""#)), Err("invalid_json"));
    }

    #[test]
    fn memory_is_shared_and_given_back() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let moment = Duration::from_millis(20);
        runtime.block_on(async {
            let bodies = Bodies::new(16 << 20);
            assert_eq!(bodies.most(), 4 << 20);
            let long = bodies.pool(3 << 20);
            let held = long.take(3 << 20).await.unwrap();
            let more = long.take_within(2 << 20, moment).await;
            assert!(more.is_none() && !long.is_wanted());
            // Short ones have their own.
            assert!(bodies.pool(100).take(100).await.is_some());
            drop(held);
            assert!(long.take(4 << 20).await.is_some());
        });
    }
}
