//! The parts of RFC 3986 that redirects and names of files need.

use std::fmt::Write as _;

/// Whether `text` is a URL that can be asked: its scheme is http or https, and there is a host.
pub fn is_http(text: &str) -> bool {
    origin(text).is_some()
}

/// Scheme, host and port of a URL, in lower case and with the scheme's own port if the URL has
/// none. A token is only sent to the origin that it was given for.
pub fn origin(url: &str) -> Option<(String, String)> {
    let (scheme, rest) = url.split_once("://")?;
    let scheme = scheme.to_ascii_lowercase();
    let port = match scheme.as_str() {
        "http" => 80,
        "https" => 443,
        _ => return None,
    };
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // What stands before an @ is a name and a password: no part of where the request goes.
    let host = host.rsplit('@').next().unwrap_or_default().to_ascii_lowercase();
    let told = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if host.is_empty() || host.starts_with(':') {
        return None;
    }
    Some((scheme, if told { host } else { format!("{host}:{port}") }))
}

/// The target of a redirect: `location` relative to `base`. `None` if it cannot be requested.
pub fn join(base: &str, location: &str) -> Option<String> {
    let location = location.trim();
    if location.is_empty() || location.contains(|c: char| c.is_control() || c == ' ') {
        return None;
    }
    let (scheme, rest) = base.split_once("://")?;
    let host = rest.split(['/', '?', '#']).next()?;
    let path = rest[host.len()..].split(['?', '#']).next()?;
    let joined = if location.contains("://") {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{host}{location}")
    } else {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{host}{folder}/{location}")
    };
    is_http(&joined).then_some(joined)
}

/// Whether a redirect gives up encryption.
pub fn is_downgrade(from: &str, to: &str) -> bool {
    let scheme = |url| origin(url).map(|(scheme, _)| scheme);
    scheme(from).as_deref() == Some("https") && scheme(to).as_deref() != Some("https")
}

/// A URL as a message shows it: what stands behind `?` may be a signature that opens the file.
pub fn shown(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or_default()
}

/// A path for a URL: everything but unreserved characters and slashes as %XX.
pub fn escape_path(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                out.push(char::from(byte));
            }
            // Writing to a String cannot fail.
            _ => drop(write!(out, "%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_scheme_host_and_port() {
        let same = [
            ("https://a.b/x", "https://A.B:443/y?z"),
            ("http://a.b", "http://a.b:80/"),
            ("http://127.0.0.1:8080/x", "http://127.0.0.1:8080"),
        ];
        for (a, b) in same {
            assert!(origin(a).is_some() && origin(a) == origin(b), "{a} {b}");
        }
        let other = [
            ("https://a.b/x", "http://a.b/x"),
            ("https://a.b/x", "https://a.b.c/x"),
            ("http://127.0.0.1:1/x", "http://127.0.0.1:2/x"),
            ("https://a.b/x", "https://a.b@evil.c/x"),
        ];
        for (a, b) in other {
            assert_ne!(origin(a), origin(b), "{a} {b}");
        }
        for bad in ["", "a.b/x", "ftp://a.b/x", "file:///etc/passwd", "https://", "http://:80/"] {
            assert!(!is_http(bad), "{bad:?}");
        }
    }

    #[test]
    fn redirects_may_be_relative() {
        let base = "https://a.b:1/c/d?e";
        let cases = [
            ("https://x.y/z?s=1", Some("https://x.y/z?s=1")),
            ("//x.y/z", Some("https://x.y/z")),
            ("/z", Some("https://a.b:1/z")),
            ("z", Some("https://a.b:1/c/z")),
            ("file:///etc/passwd", None),
            ("/z\r\nX: y", None),
            ("", None),
        ];
        for (location, expected) in cases {
            assert_eq!(join(base, location).as_deref(), expected, "{location}");
        }
        assert_eq!(join("http://a.b", "z").as_deref(), Some("http://a.b/z"));
    }

    #[test]
    fn encryption_is_not_given_up() {
        assert!(is_downgrade("https://a/", "http://a/"));
        assert!(!is_downgrade("http://a/", "https://a/"));
        assert!(!is_downgrade("http://a/", "http://b/"));
    }

    #[test]
    fn names_become_parts_of_urls() {
        assert_eq!(escape_path("sub dir/ä#?%.gguf"), "sub%20dir/%C3%A4%23%3F%25.gguf");
        assert_eq!(shown("https://a/b?Signature=secret"), "https://a/b");
    }
}
