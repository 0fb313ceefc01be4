//! Bounds on what clients can send, ask for and hold.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub const MAX_HEADER_BYTES: usize = 64 << 10;
pub const MAX_HEADERS: usize = 100;
/// Time for a whole header, for a whole body, and for a client to take what is written to it.
pub const HEADER_TIME: Duration = Duration::from_secs(10);
pub const BODY_TIME: Duration = Duration::from_secs(60);
pub const WRITE_TIME: Duration = Duration::from_secs(30);

pub const MAX_SOCKETS: usize = 512;
pub const MAX_SOCKETS_PER_ADDRESS: usize = 64;

/// Clients that look at the experts at a time.
pub const MAX_VIEWERS: usize = 8;

pub const MAX_MESSAGES: usize = 16_384;
pub const MAX_TOOLS: usize = 512;
/// Bytes of the tools as JSON.
pub const MAX_TOOLS_BYTES: usize = 2 << 20;
pub const MAX_STOPS: usize = 16;
pub const MAX_STOP_BYTES: usize = 1 << 10;
pub const MAX_PROMPTS: usize = 64;
/// The largest `n`.
pub const MAX_CHOICES: usize = 16;
pub const MAX_BIASES: usize = 1024;
/// The largest number in `logit_bias`, up and down.
pub const MAX_BIAS: f64 = 100.0;

/// Counts open sockets, by address and together.
#[derive(Clone, Debug, Default)]
pub struct Sockets(Arc<Mutex<HashMap<Option<IpAddr>, usize>>>);

/// An open socket, until this is dropped.
#[derive(Debug)]
pub struct Socket {
    all: Sockets,
    address: Option<IpAddr>,
}

impl Sockets {
    /// Open sockets.
    pub fn count(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values().sum()
    }

    /// Takes in a socket; `None` if there are too many. Local sockets have no address.
    pub fn enter(&self, address: Option<IpAddr>) -> Option<Socket> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let total: usize = counts.values().sum();
        let own = counts.get(&address).copied().unwrap_or(0);
        let most = if address.is_some() { MAX_SOCKETS_PER_ADDRESS } else { MAX_SOCKETS };
        if total >= MAX_SOCKETS || own >= most {
            return None;
        }
        counts.insert(address, own + 1);
        Some(Socket { all: self.clone(), address })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let mut counts = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(n) = counts.get_mut(&self.address) {
            *n -= 1;
            if *n == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_and_all_together_have_a_bound() {
        let sockets = Sockets::default();
        let address = |n: u8| Some(IpAddr::from([10, 0, 0, n]));
        let mut held: Vec<Socket> = Vec::new();
        for n in 0..8 {
            let own = (0..MAX_SOCKETS_PER_ADDRESS).filter_map(|_| sockets.enter(address(n)));
            held.extend(own);
            assert!(sockets.enter(address(n)).is_none());
        }
        assert_eq!(held.len(), MAX_SOCKETS);
        assert!(sockets.enter(address(9)).is_none() && sockets.enter(None).is_none());
        held.pop();
        assert!(sockets.enter(None).is_some());
        drop(held);
        assert!(sockets.0.lock().unwrap().is_empty());
    }
}
