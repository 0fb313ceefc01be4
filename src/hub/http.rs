//! Requests to the hub. Redirects are followed here and not by the HTTP library, because only here
//! it is known which host may hear the token; statuses become sentences.

use super::retry::{Failure, Try};
use super::{Config, RepoId, url};
use crate::{Error, interrupt};
use std::io::Read;
use std::time::{Duration, Instant};
use ureq::http::{HeaderMap, Response};
use ureq::{Agent, Body};

/// A redirect to a redirect to …
const MAX_REDIRECTS: usize = 10;

/// The most bytes of a listing.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// A server may send its headers this much slower than it may stall.
const HEADER_STALLS: u32 = 3;

pub struct Http<'a> {
    agent: Agent,
    config: &'a Config,
}

/// An answer whose status is fine, or 416 to a request with a range.
pub struct FileResponse {
    pub status: u16,
    pub body: Body,
    pub headers: HeaderMap,
    /// `X-Linked-Etag` of the first answer: of the file that a redirect leads to.
    pub linked_etag: Option<String>,
}

impl FileResponse {
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

impl<'a> Http<'a> {
    pub fn new(config: &'a Config) -> Self {
        let patience = &config.patience;
        let agent = Agent::config_builder()
            .user_agent(concat!("moeba/", env!("CARGO_PKG_VERSION")))
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .timeout_resolve(Some(patience.connect))
            .timeout_connect(Some(patience.connect))
            .timeout_recv_response(Some(patience.stall * HEADER_STALLS))
            .timeout_per_read(Some(patience.stall))
            .timeout_per_write(Some(patience.stall))
            .build()
            .new_agent();
        Http { agent, config }
    }

    /// A JSON document of the API, and the address of its next page.
    pub fn json(&self, url: &str, repo: &RepoId) -> Try<(Vec<u8>, Option<String>)> {
        let answer = self.get(url, None, repo)?;
        let next = answer.header("link").and_then(super::listing::next_page);
        let next = next.and_then(|link| url::join(url, link));
        // A page of another server is not part of this listing.
        let next = next.filter(|next| url::origin(next) == url::origin(url));
        let mut body = Vec::new();
        let mut reader = answer.body.into_reader().take(MAX_JSON_BYTES + 1);
        reader.read_to_end(&mut body).map_err(|e| broken(url, &e))?;
        if body.len() as u64 > MAX_JSON_BYTES {
            let sentence = format!("{}: more than {MAX_JSON_BYTES} bytes", url::shown(url));
            return Err(Error::Invalid(sentence).into());
        }
        Ok((body, next))
    }

    /// Asks for `url`, from byte `from` on; follows redirects.
    pub fn get(&self, url: &str, from: Option<u64>, repo: &RepoId) -> Try<FileResponse> {
        let home = url::origin(&self.config.endpoint);
        let mut at = url.to_owned();
        let mut linked_etag = None;
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&at).header("Accept-Encoding", "identity");
            let token = self.config.token.as_ref().filter(|_| url::origin(&at) == home);
            if let Some(token) = token {
                request = request.header("Authorization", token.bearer());
            }
            if let Some(from) = from.filter(|from| *from > 0) {
                request = request.header("Range", format!("bytes={from}-"));
            }
            let response = request.call().map_err(|e| unreachable(&at, e))?;
            let status = response.status().as_u16();
            let (head, body) = response.into_parts();
            log::debug!("{status} {}", url::shown(&at));
            if linked_etag.is_none() {
                linked_etag = header(&head.headers, "x-linked-etag").map(etag);
            }
            match status {
                200 | 206 => {}
                416 if from.is_some() => {}
                301 | 302 | 303 | 307 | 308 => {
                    at = self.redirect(&at, header(&head.headers, "location"))?;
                    continue;
                }
                _ => {
                    let response = Response::from_parts(head, body);
                    return Err(self.refused(&at, repo, token.is_some(), &response));
                }
            }
            return Ok(FileResponse { status, body, headers: head.headers, linked_etag });
        }
        let sentence = format!("{}: more than {MAX_REDIRECTS} redirects", url::shown(url));
        Err(Error::Invalid(sentence).into())
    }

    /// Bytes a second that come from `url`, received for so long and dropped. `None` if nothing
    /// comes, which is to be told when it matters.
    pub fn rate(&self, url: &str, repo: &RepoId, time: Duration) -> Option<f64> {
        let mut reader = self.get(url, None, repo).ok()?.body.into_reader();
        let mut buffer = vec![0; 1 << 16];
        let (start, mut n_bytes) = (Instant::now(), 0);
        while start.elapsed() < time && !interrupt::is_set() {
            match reader.read(&mut buffer) {
                Ok(n @ 1..) => n_bytes += n,
                _ => break,
            }
        }
        (n_bytes > 0).then(|| n_bytes as f64 / start.elapsed().as_secs_f64())
    }

    fn redirect(&self, from: &str, location: Option<&str>) -> Try<String> {
        let location = location.unwrap_or_default();
        let Some(to) = url::join(from, location) else {
            let sentence = format!(
                "{}: a redirect that cannot be followed, to {:?}",
                url::shown(from),
                url::shown(location)
            );
            return Err(Error::Invalid(sentence).into());
        };
        if url::is_downgrade(from, &to) {
            let sentence = format!(
                "{}: a redirect without encryption, to {}, is not followed",
                url::shown(from),
                url::shown(&to)
            );
            return Err(Error::Invalid(sentence).into());
        }
        Ok(to)
    }

    /// A status that is no answer.
    fn refused(&self, at: &str, repo: &RepoId, token: bool, response: &Response<Body>) -> Failure {
        let (status, at) = (response.status(), url::shown(at));
        let said = header(response.headers(), "x-error-message").map(harmless).unwrap_or_default();
        let said = if said.is_empty() { said } else { format!(" ({said})") };
        let sentence = match status.as_u16() {
            401 if token => format!("{repo}: the hub refused the token{said}"),
            401 => format!(
                "{repo}: no such repository, or a private one{said}: check the name, or give a \
                 token with --hf-token or HF_TOKEN"
            ),
            403 => format!(
                "{repo}: access denied{said}: its terms may have to be accepted at {}/{repo}, and \
                 the token given with --hf-token or HF_TOKEN",
                self.config.endpoint
            ),
            404 => format!("{repo}: not found at {at}{said}: check the name"),
            code @ (408 | 425 | 429 | 500..=599) => {
                let what = match code {
                    429 => " (too many requests: wait some minutes, or give a token)",
                    _ => "",
                };
                let why = format!("{at}: the server answered {code}{what}{said}");
                let after = header(response.headers(), "retry-after");
                let after = after.and_then(|text| text.trim().parse().ok());
                return Failure::Passing { why, after: after.map(Duration::from_secs) };
            }
            code => format!("{at}: the server answered {code}{said}"),
        };
        Failure::Lasting(Error::Invalid(sentence))
    }
}

/// An ETag without quotes and weakness.
fn etag(text: &str) -> String {
    text.trim().trim_start_matches("W/").trim_matches('"').to_owned()
}

/// A server's text, made safe for a terminal.
fn harmless(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// No answer came.
fn unreachable(url: &str, e: ureq::Error) -> Failure {
    let url = url::shown(url);
    match e {
        // These are of the address itself and would come again.
        ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::InvalidProxyUrl => {
            Failure::Lasting(Error::Invalid(format!("{url}: {e}")))
        }
        e if is_unresolved(&e) => Failure::Unreachable(format!(
            "{url}: no connection, as the host's name cannot be resolved: check the network"
        )),
        e => Failure::passing(format!("{url}: {e}")),
    }
}

/// Whether the name of the host leads to no address.
fn is_unresolved(e: &ureq::Error) -> bool {
    match e {
        ureq::Error::HostNotFound => true,
        // The standard library has no kind of error for it.
        ureq::Error::Io(e) => e.to_string().contains("failed to lookup address information"),
        _ => false,
    }
}

/// The answer broke off.
pub fn broken(url: &str, e: &std::io::Error) -> Failure {
    Failure::passing(format!("{}: the connection broke: {e}", url::shown(url)))
}
