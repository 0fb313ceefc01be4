//! Answers as a stream of server-sent events, or of lines, in any wire's format.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Bytes, Frame};
use hyper::http::{HeaderName, HeaderValue, Response, header};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::body::Body;
use super::errors::ApiError;
use super::events::{Event, Finish};
use super::replay;
use super::report::Report;
use super::service::PendingAnswer;

/// Writes a wire's frames.
pub trait Encoder: Send {
    /// The frames before the first event.
    fn begin(&mut self, out: &mut Frames);

    /// The frames of an event of a choice.
    fn event(&mut self, choice: usize, event: &Event, out: &mut Frames);

    /// The frames after the last choice has ended.
    fn end(&mut self, finishes: &[Finish], out: &mut Frames);

    /// The frames of an answer that has failed; none follow.
    fn fail(&mut self, error: &ApiError, out: &mut Frames);

    /// The frames that keep the client waiting.
    fn ping(&mut self, out: &mut Frames) {
        out.comment("ping");
    }

    fn content_type(&self) -> &'static str {
        "text/event-stream"
    }
}

/// Frames that are ready to be written.
#[derive(Debug, Default)]
pub struct Frames(String);

impl Frames {
    pub fn data(&mut self, value: &Value) {
        self.text(&value.to_string());
    }

    /// A frame with the name of its event.
    pub fn event(&mut self, name: &str, value: &Value) {
        self.0.push_str("event: ");
        self.0.push_str(name);
        self.0.push('\n');
        self.data(value);
    }

    /// A frame whose data is no JSON.
    pub fn text(&mut self, text: &str) {
        self.0.push_str("data: ");
        self.0.push_str(text);
        self.0.push_str("\n\n");
    }

    pub fn comment(&mut self, text: &str) {
        self.0.push_str(": ");
        self.0.push_str(text);
        self.0.push_str("\n\n");
    }

    /// A line that is JSON: a frame of streams that are no server-sent events.
    pub fn line(&mut self, value: &Value) {
        self.0.push_str(&value.to_string());
        self.0.push('\n');
    }

    /// Takes the text of all frames.
    pub fn take(&mut self) -> Bytes {
        Bytes::from(std::mem::take(&mut self.0))
    }
}

/// A stream between two frames.
struct Stream {
    answer: PendingAnswer,
    encoder: Box<dyn Encoder>,
    /// A line goes to the log at its end.
    report: Report,
    frames: Frames,
    finishes: Vec<Finish>,
    ping: Option<Duration>,
    is_over: bool,
}

/// Bytes that come by and by. Dropping it ends what it reports on.
pub trait Source: Send + 'static {
    /// The next frames; `None` at the end.
    fn next(&mut self) -> impl Future<Output = Option<Bytes>> + Send;
}

impl Source for Stream {
    async fn next(&mut self) -> Option<Bytes> {
        // Not every event has a frame.
        let deadline = self.ping.map(|time| Instant::now() + time);
        while !self.is_over {
            let next = match deadline {
                Some(deadline) => match timeout_at(deadline, self.answer.next()).await {
                    Ok(next) => next,
                    Err(_) => {
                        self.encoder.ping(&mut self.frames);
                        return Some(self.frames.take());
                    }
                },
                None => self.answer.next().await,
            };
            match next {
                Some((_, Event::Failed(error))) => {
                    self.encoder.fail(&error, &mut self.frames);
                    self.report.fail(&error);
                    self.is_over = true;
                }
                Some((choice, event)) => {
                    self.report.see(&event);
                    self.encoder.event(choice, &event, &mut self.frames);
                    if let Event::Finished(finish) = event {
                        self.report.finish(&finish, &self.answer);
                        self.finishes.push(*finish);
                    }
                }
                None => {
                    self.encoder.end(&self.finishes, &mut self.frames);
                    self.report.end();
                    self.is_over = true;
                }
            }
            if !self.frames.0.is_empty() {
                return Some(self.frames.take());
            }
        }
        None
    }
}

type Next<S> = Pin<Box<dyn Future<Output = (S, Option<Bytes>)> + Send>>;

/// The body of a stream. It is polled when the client has taken what was written before; dropping
/// it drops the source.
struct StreamBody<S> {
    ready: VecDeque<Bytes>,
    next: Option<Next<S>>,
}

async fn advance<S: Source>(mut source: S) -> (S, Option<Bytes>) {
    let bytes = source.next().await;
    (source, bytes)
}

impl<S: Source> hyper::body::Body for StreamBody<S> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(bytes) = self.ready.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        let Some(next) = &mut self.next else { return Poll::Ready(None) };
        let Poll::Ready((source, bytes)) = next.as_mut().poll(cx) else { return Poll::Pending };
        self.next = bytes.is_some().then(|| Box::pin(advance(source)) as Next<S>);
        Poll::Ready(bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// The response that streams an answer. `ping` is the longest silence.
pub fn respond(
    answer: PendingAnswer,
    mut encoder: Box<dyn Encoder>,
    report: Report,
    ping: Option<Duration>,
) -> Response<Body> {
    let mut frames = Frames::default();
    let hash = HeaderValue::from_str(&answer.hash);
    let content_type = HeaderValue::from_static(encoder.content_type());
    encoder.begin(&mut frames);
    let first = frames.take();
    let stream =
        Stream { answer, encoder, report, frames, finishes: Vec::new(), ping, is_over: false };
    let mut response = events(first, stream);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, content_type);
    headers.extend(hash.ok().map(|hash| (HeaderName::from_static(replay::HEADER), hash)));
    response
}

/// The response that streams these bytes and then the source's, as server-sent events.
pub fn events(first: Bytes, source: impl Source) -> Response<Body> {
    let ready = if first.is_empty() { VecDeque::new() } else { VecDeque::from([first]) };
    let body = StreamBody { ready, next: Some(Box::pin(advance(source))) };
    let mut response = Response::new(body.boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    let cache = HeaderValue::from_static("no-cache, no-transform");
    headers.insert(header::CACHE_CONTROL, cache);
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_end_with_an_empty_line() {
        let mut frames = Frames::default();
        frames.data(&serde_json::json!({"a": "x\ny"}));
        frames.comment("ping");
        frames.text("[DONE]");
        frames.event("stop", &serde_json::json!({}));
        let expected = "data: {\"a\":\"x\\ny\"}\n\n: ping\n\ndata: [DONE]\n\n\
                        event: stop\ndata: {}\n\n";
        assert_eq!(frames.0, expected);
    }
}
