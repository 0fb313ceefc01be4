//! Bounds on what clients can send, ask for and hold.

use std::time::Duration;

use super::proxy::Network;

pub const MAX_HEADER_BYTES: usize = 64 << 10;
pub const MAX_HEADERS: usize = 100;
/// Time for a whole header, for a whole body, and for a client to take what is written to it.
pub const HEADER_TIME: Duration = Duration::from_secs(10);
pub const BODY_TIME: Duration = Duration::from_secs(60);
/// Time for the head of a request for which there is no place.
pub const REFUSED_TIME: Duration = Duration::from_secs(2);
pub const WRITE_TIME: Duration = Duration::from_secs(30);

/// Bounds on connections. The command line says others.
#[derive(Clone, Debug)]
pub struct ConnectionLimits {
    /// Open connections.
    pub most: usize,
    /// Connections of one address, or requests behind a proxy. Programs of this machine and
    /// proxies have none.
    pub most_per_address: usize,
    /// Addresses whose `X-Forwarded-For` is believed, besides those of this machine.
    pub proxies: Vec<Network>,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        ConnectionLimits { most: 1024, most_per_address: 64, proxies: Vec::new() }
    }
}

/// Clients that look at the experts at a time.
pub const MAX_VIEWERS: usize = 8;

pub const MAX_MESSAGES: usize = 16_384;
pub const MAX_TOOLS: usize = 512;
/// Bytes of the tools as JSON.
pub const MAX_TOOLS_BYTES: usize = 2 << 20;
pub const MAX_STOPS: usize = 128;
pub const MAX_STOP_BYTES: usize = 1 << 10;
pub const MAX_PROMPTS: usize = 64;
/// Texts to embed, and documents to rank.
pub const MAX_TEXTS: usize = 2048;
/// The largest `n`.
pub const MAX_CHOICES: usize = 16;
pub const MAX_BIASES: usize = 1024;
/// The largest number in `logit_bias`, up and down.
pub const MAX_BIAS: f64 = 100.0;
