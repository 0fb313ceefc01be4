//! The page at `/`: files in the binary, and the headers that they are served with. They hold
//! nothing secret, so they come without a key; the data that the page shows does not.

#[cfg(test)]
mod tests;

use std::hash::{DefaultHasher, Hasher};

use hyper::http::{HeaderMap, HeaderValue, Response, StatusCode, header};

use super::body::{self, Body};

/// The page loads nothing from elsewhere, runs nothing inline, makes no markup of text, and is
/// shown in no frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; \
                      connect-src 'self'; img-src 'self' data:; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

const HEADERS: &[(&str, &str)] = &[
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    // A new version of the program has another page: browsers ask whether a file has changed.
    ("cache-control", "no-cache"),
    ("vary", "accept"),
];

struct File {
    path: &'static str,
    bytes: &'static [u8],
}

macro_rules! files {
    ($($name:literal),*) => {
        &[
            File { path: "/", bytes: include_bytes!("index.html") },
            $(File { path: concat!("/page/", $name), bytes: include_bytes!($name) }),*
        ]
    };
}

const FILES: &[File] = files![
    "style.css",
    "icon.svg",
    "main.js",
    "api.js",
    "attach.js",
    "chat.js",
    "code.js",
    "tree.js",
    "store.js",
    "list.js",
    "message.js",
    "models.js",
    "markdown.js",
    "math.js",
    "settings.js",
    "replay.js",
    "export.js",
    "machine.js",
    "heatmap.js",
    "charts.js",
    "dom.js",
    "third_party/markdown-it.min.js",
    "third_party/highlight.min.js",
    "third_party/katex.min.js",
    "third_party/katex.min.css",
    "third_party/fonts/KaTeX_AMS-Regular.woff2",
    "third_party/fonts/KaTeX_Caligraphic-Bold.woff2",
    "third_party/fonts/KaTeX_Caligraphic-Regular.woff2",
    "third_party/fonts/KaTeX_Fraktur-Bold.woff2",
    "third_party/fonts/KaTeX_Fraktur-Regular.woff2",
    "third_party/fonts/KaTeX_Main-Bold.woff2",
    "third_party/fonts/KaTeX_Main-BoldItalic.woff2",
    "third_party/fonts/KaTeX_Main-Italic.woff2",
    "third_party/fonts/KaTeX_Main-Regular.woff2",
    "third_party/fonts/KaTeX_Math-BoldItalic.woff2",
    "third_party/fonts/KaTeX_Math-Italic.woff2",
    "third_party/fonts/KaTeX_SansSerif-Bold.woff2",
    "third_party/fonts/KaTeX_SansSerif-Italic.woff2",
    "third_party/fonts/KaTeX_SansSerif-Regular.woff2",
    "third_party/fonts/KaTeX_Script-Regular.woff2",
    "third_party/fonts/KaTeX_Size1-Regular.woff2",
    "third_party/fonts/KaTeX_Size2-Regular.woff2",
    "third_party/fonts/KaTeX_Size3-Regular.woff2",
    "third_party/fonts/KaTeX_Size4-Regular.woff2",
    "third_party/fonts/KaTeX_Typewriter-Regular.woff2"
];

/// Whether a request is for a file of the page. Programs that ask whether the server is there ask
/// for `/` as well, but not for HTML.
pub fn is_asked_for(path: &str, headers: &HeaderMap) -> bool {
    let mut accepted = headers.get_all(header::ACCEPT).iter().filter_map(|a| a.to_str().ok());
    let is_file = FILES.iter().any(|file| file.path == path);
    is_file && (path != "/" || accepted.any(|accepted| accepted.contains("text/html")))
}

/// The file at a path of the page; 304 in its place if the browser that asks has it.
pub fn file(path: &str, asked: &HeaderMap) -> Option<Response<Body>> {
    let file = FILES.iter().find(|file| file.path == path)?;
    let tag = tag(file.bytes);
    let known = asked.get_all(header::IF_NONE_MATCH).iter().any(|value| *value == tag);
    let mut response = Response::new(body::whole(if known { &[][..] } else { file.bytes }));
    if known {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    }
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind(file.path)));
    headers.insert(header::ETAG, tag);
    for (name, value) in HEADERS {
        headers.insert(*name, HeaderValue::from_static(value));
    }
    Some(response)
}

/// A name for these bytes, as `If-None-Match` has it.
fn tag(bytes: &[u8]) -> HeaderValue {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    let text = format!("\"{:016x}\"", hasher.finish());
    text.try_into().expect("digits in quotes are a value of a header")
}

fn kind(path: &str) -> &'static str {
    match path.rsplit_once('.') {
        Some((_, "css")) => "text/css; charset=utf-8",
        Some((_, "js")) => "text/javascript; charset=utf-8",
        Some((_, "svg")) => "image/svg+xml",
        Some((_, "woff2")) => "font/woff2",
        _ => "text/html; charset=utf-8",
    }
}
