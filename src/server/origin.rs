//! Which hosts and origins are served: a page of another site must not reach a server that runs
//! beside the browser, also not by a name that it has pointed at this machine.

use std::net::IpAddr;

use hyper::http::{HeaderMap, HeaderValue, Method, Uri, header};

use super::errors::{ApiError, Kind};

/// Names of hosts and origins that are allowed beside the local ones.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// `--allow-host`, in lower case.
    pub hosts: Vec<String>,
    /// `--cors-origins`, in lower case; `*` is any.
    pub origins: Vec<String>,
    /// Whether a key is asked for, which no page of another site has.
    pub has_keys: bool,
}

/// Whether a name always means this machine.
fn is_local(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    ["localhost", "127.0.0.1", "[::1]"].contains(&name) || name.ends_with(".localhost")
}

/// The name of a `host[:port]`, in lower case; `None` if it is odd.
fn name_of(authority: &str) -> Option<String> {
    let (name, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let end = rest.find(']')? + 2;
            authority.split_at(end)
        }
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let port = port.strip_prefix(':').unwrap_or(port);
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b".-_[]:".contains(&byte);
    let is_odd = name.is_empty() || !name.bytes().all(is_name);
    let is_odd = is_odd || !port.bytes().all(|byte| byte.is_ascii_digit());
    (!is_odd).then(|| name.to_ascii_lowercase())
}

/// Refuses a target that names a host, as a proxy gets it, other than the one of the header.
pub fn check_target(target: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(authority) = target.authority() else { return Ok(()) };
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    match host.and_then(name_of) == name_of(authority.as_str()) {
        true => Ok(()),
        false => {
            let why = "the request is for another host than its Host header says";
            Err(ApiError::new(Kind::Invalid, "invalid_host", why))
        }
    }
}

impl Allowed {
    /// Checks the `Host` header. `local` is the address that the client has connected to; a socket
    /// of this machine has none, and no browser comes by it.
    pub fn check_host(&self, headers: &HeaderMap, local: Option<IpAddr>) -> Result<(), ApiError> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let odd = |why: &str| ApiError::new(Kind::Invalid, "invalid_host", why);
        let host = match (hosts.next(), hosts.next()) {
            (Some(host), None) => host,
            (None, _) => return Err(odd("the Host header is missing")),
            (Some(_), Some(_)) => return Err(odd("there are several Host headers")),
        };
        let name = host.to_str().ok().and_then(name_of);
        let name = name.ok_or_else(|| odd("the Host header is no host"))?;
        let is_own = |local: IpAddr| {
            let text = name.trim_matches(['[', ']']);
            text.parse() == Ok(local)
        };
        let is_named = || self.hosts.contains(&name) || is_machine(&name);
        let Some(local) = local.filter(|_| !self.has_keys) else { return Ok(()) };
        if is_local(&name) || is_own(local) || is_named() {
            return Ok(());
        }
        let message = format!(
            "the host {name} is not served: start the server with --allow-host {name}, or with \
             --api-key"
        );
        Err(ApiError::new(Kind::Permission, "host_not_allowed", message))
    }

    /// The request's origin, if it has one and it is allowed; an error if it is not.
    pub fn check_origin(&self, headers: &HeaderMap) -> Result<Option<HeaderValue>, ApiError> {
        let refused =
            |message: String| Err(ApiError::new(Kind::Permission, "origin_not_allowed", message));
        let mut origins = headers.get_all(header::ORIGIN).iter();
        match (origins.next(), origins.next()) {
            (None, _) => {}
            (Some(origin), None) if self.allows_origin(origin) || is_same(origin, headers) => {
                return Ok(Some(origin.clone()));
            }
            (Some(origin), _) => {
                let origin = origin.to_str().unwrap_or("of the request");
                return refused(format!(
                    "the origin {origin} is not served: start the server with --cors-origins"
                ));
            }
        }
        let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
        if site == Some(b"cross-site") {
            let message = "requests of other sites are not served: see --cors-origins";
            return refused(message.into());
        }
        Ok(None)
    }

    fn allows_origin(&self, origin: &HeaderValue) -> bool {
        let Ok(origin) = origin.to_str().map(str::to_ascii_lowercase) else { return false };
        if self.origins.iter().any(|allowed| *allowed == origin || allowed == "*") {
            return true;
        }
        let authority = origin.strip_prefix("http://").or(origin.strip_prefix("https://"));
        authority.and_then(name_of).is_some_and(|name| is_local(&name))
    }
}

/// Whether an origin is the host that the request names, as in requests of this server's own page.
/// A page that has pointed its own name here is refused for its host, or lacks the key.
fn is_same(origin: &HeaderValue, headers: &HeaderMap) -> bool {
    let origin = origin.as_bytes();
    let authority = origin.strip_prefix(b"http://").or(origin.strip_prefix(b"https://"));
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes);
    authority.zip(host).is_some_and(|(authority, host)| authority.eq_ignore_ascii_case(host))
}

/// Whether a name is that of this machine.
fn is_machine(name: &str) -> bool {
    let own = rustix::system::uname();
    own.nodename().to_str().is_ok_and(|own| own.eq_ignore_ascii_case(name))
}

/// Headers that let a page of an allowed origin read the answer.
pub fn allow(headers: &mut HeaderMap, origin: &HeaderValue) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    headers.append(header::VARY, HeaderValue::from_static("Origin"));
    let exposed = "x-request-id, retry-after, retry-after-ms";
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(exposed));
}

/// Headers of the answer to a browser's question before a request.
pub fn allow_methods(headers: &mut HeaderMap, asked: &HeaderMap) {
    let methods = HeaderValue::from_static("GET, POST, HEAD, OPTIONS");
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    let names = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let names = names.unwrap_or(HeaderValue::from_static("authorization, content-type"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
}

/// Whether a body of this type is read as JSON. Forms and plain text come from pages without a
/// question before, so they count where no browser can have sent them: `curl -d` sends a form.
pub fn check_content_type(headers: &HeaderMap, method: &Method) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE).filter(|_| method == Method::POST) else {
        return Ok(());
    };
    let text = value.to_str().unwrap_or_default().to_ascii_lowercase();
    let kind = text.split(';').next().unwrap_or_default().trim();
    let is_json = kind.is_empty() || kind == "application/x-ndjson" || kind.ends_with("json");
    let no_browser = !headers.contains_key(header::ORIGIN);
    let is_plain = ["text/plain", "application/x-www-form-urlencoded"].contains(&kind);
    if is_json || is_plain && no_browser {
        return Ok(());
    }
    let message = "the body must be JSON: send Content-Type: application/json";
    Err(ApiError::new(Kind::Body(415), "unsupported_media_type", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in list {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn host(allowed: &Allowed, list: &[(&'static str, &'static str)]) -> u16 {
        let local = IpAddr::from([192, 168, 1, 5]);
        let checked = allowed.check_host(&headers(list), Some(local));
        checked.err().map_or(200, |e| e.status(super::super::errors::Wire::OpenAi))
    }

    #[test]
    fn foreign_hosts_are_refused() {
        let allowed = Allowed { hosts: vec!["box.lan".into()], ..Allowed::default() };
        for (name, status) in [
            ("localhost", 200),
            ("LOCALHOST:8080", 200),
            ("127.0.0.1:1", 200),
            ("[::1]:8080", 200),
            ("a.localhost", 200),
            ("box.lan:80", 200),
            ("192.168.1.5:8080", 200),
            ("192.168.1.6:8080", 403),
            ("evil.example", 403),
            ("localhost.evil.example", 403),
            ("127.0.0.1.evil.example", 403),
            ("localhost:80a", 400),
            ("evil@localhost", 400),
            ("", 400),
        ] {
            let list: &[_] = &[("host", name)];
            assert_eq!(host(&allowed, list), status, "{name}");
        }
        assert_eq!(host(&allowed, &[]), 400);
        assert_eq!(host(&allowed, &[("host", "localhost"), ("host", "localhost")]), 400);
        let keys = Allowed { has_keys: true, ..Allowed::default() };
        assert_eq!(host(&keys, &[("host", "anything.example")]), 200);
    }

    #[test]
    fn foreign_origins_are_refused() {
        let allowed = Allowed { origins: vec!["https://app.example".into()], ..Allowed::default() };
        let check = |list: &[(&'static str, &'static str)]| {
            allowed.check_origin(&headers(list)).map(|origin| origin.is_some()).ok()
        };
        assert_eq!(check(&[]), Some(false));
        for ok in
            ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:5", "https://app.example"]
        {
            assert_eq!(
                check(&[("origin", ok), ("sec-fetch-site", "cross-site")]),
                Some(true),
                "{ok}"
            );
        }
        for bad in ["null", "https://evil.example", "http://localhost.evil.example", "file://"] {
            assert_eq!(check(&[("origin", bad)]), None, "{bad}");
        }
        let at = |origin, host| check(&[("origin", origin), ("host", host)]);
        assert_eq!(at("http://192.168.1.5:8080", "192.168.1.5:8080"), Some(true));
        assert_eq!(at("https://Box.lan", "box.lan"), Some(true));
        assert_eq!(at("http://192.168.1.5:81", "192.168.1.5:8080"), None);
        assert_eq!(at("https://evil.example", "box.lan"), None);
        assert_eq!(at("null", "null"), None);
        assert_eq!(check(&[("sec-fetch-site", "cross-site")]), None);
        assert_eq!(check(&[("sec-fetch-site", "same-origin")]), Some(false));
    }

    #[test]
    fn forms_of_pages_are_refused() {
        let check = |list| check_content_type(&headers(list), &Method::POST).is_ok();
        assert!(check(&[]));
        assert!(check(&[("content-type", "application/json; charset=utf-8")]));
        assert!(check(&[("content-type", "application/x-www-form-urlencoded")]));
        assert!(!check(&[("content-type", "text/plain"), ("origin", "http://localhost")]));
        assert!(!check(&[("content-type", "multipart/form-data")]));
    }
}
