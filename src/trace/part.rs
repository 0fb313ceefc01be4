//! Half of a trace's requests to tune by, and the other half to report on.

use super::format::Trace;
use sha2::{Digest, Sha256};

/// Requests are divided by a hash of what they are, so that a request is in the same part whatever
/// the file it is in and whatever comes before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    #[default]
    All,
    /// Requests that constants may be chosen by.
    Tuning,
    /// Requests that may judge, as they have chosen nothing.
    Report,
}

impl Part {
    /// The numbers of its requests, in order.
    pub fn requests(self, trace: &Trace) -> Vec<usize> {
        let is_in = |request: &usize| match self {
            Part::All => true,
            Part::Tuning => !is_reported(trace, *request),
            Part::Report => is_reported(trace, *request),
        };
        (0..trace.requests().len()).filter(is_in).collect()
    }
}

/// By the ids and the experts of all tokens.
fn is_reported(trace: &Trace, request: usize) -> bool {
    let mut hash = Sha256::new();
    for token in trace.requests()[request].tokens.clone() {
        hash.update(trace.token_id(token).to_le_bytes());
        for layer in trace.header().moe_layers() {
            trace.chosen(token, layer).iter().for_each(|expert| hash.update(expert.to_le_bytes()));
        }
    }
    hash.finalize()[0] & 1 == 1
}
