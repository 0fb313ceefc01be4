//! The page at `/`: files in the binary, and the headers that they are served with. They hold
//! nothing secret, so they come without a key; the data that the page shows does not.

#[cfg(test)]
mod tests;

use hyper::http::{HeaderMap, HeaderValue, Response, header};

use super::body::{self, Body};

/// The page loads nothing from elsewhere, runs nothing inline, and is shown in no frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

const HEADERS: &[(&str, &str)] = &[
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    // A new version of the program has another page.
    ("cache-control", "no-cache"),
    ("vary", "accept"),
];

struct File {
    path: &'static str,
    text: &'static str,
}

macro_rules! files {
    ($($name:literal),*) => {
        &[
            File { path: "/", text: include_str!("index.html") },
            $(File { path: concat!("/page/", $name), text: include_str!($name) }),*
        ]
    };
}

const FILES: &[File] = files![
    "style.css",
    "icon.svg",
    "main.js",
    "api.js",
    "chat.js",
    "tree.js",
    "store.js",
    "message.js",
    "markdown.js",
    "settings.js",
    "replay.js",
    "export.js",
    "machine.js",
    "heatmap.js",
    "charts.js",
    "dom.js"
];

/// Whether a request is for a file of the page. Programs that ask whether the server is there ask
/// for `/` as well, but not for HTML.
pub fn is_asked_for(path: &str, headers: &HeaderMap) -> bool {
    let mut accepted = headers.get_all(header::ACCEPT).iter().filter_map(|a| a.to_str().ok());
    let is_file = FILES.iter().any(|file| file.path == path);
    is_file && (path != "/" || accepted.any(|accepted| accepted.contains("text/html")))
}

/// The file at a path of the page.
pub fn file(path: &str) -> Option<Response<Body>> {
    let file = FILES.iter().find(|file| file.path == path)?;
    let mut response = Response::new(body::whole(file.text));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind(file.path)));
    for (name, value) in HEADERS {
        headers.insert(*name, HeaderValue::from_static(value));
    }
    Some(response)
}

fn kind(path: &str) -> &'static str {
    match path.rsplit_once('.') {
        Some((_, "css")) => "text/css; charset=utf-8",
        Some((_, "js")) => "text/javascript; charset=utf-8",
        Some((_, "svg")) => "image/svg+xml",
        _ => "text/html; charset=utf-8",
    }
}
