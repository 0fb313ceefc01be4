//! Bodies of responses.

use std::convert::Infallible;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;

/// A whole text, or a stream.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The body that is this text.
pub fn whole(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).boxed_unsync()
}
