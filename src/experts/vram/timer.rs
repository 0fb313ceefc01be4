//! The time that the link takes, measured while it works: the Timer's t_L and D (PreScope, section
//! 4.3.2).

use std::sync::Mutex;
use std::time::Instant;

/// Weight of a new figure in the running mean: some tens of granules count.
const WEIGHT: f64 = 1.0 / 32.0;

struct State {
    ns_a_byte: Option<f64>,
    /// Bytes on their way.
    n_bytes: u64,
    /// When the last transfer ended, or the first began on an idle link.
    since: Instant,
}

/// The link as one server: a transfer takes from its own start or the end of the one before it,
/// whichever is later, to its end. So transfers side by side count once.
pub struct LinkTimer(Mutex<State>);

impl LinkTimer {
    pub fn new() -> LinkTimer {
        LinkTimer(Mutex::new(State { ns_a_byte: None, n_bytes: 0, since: Instant::now() }))
    }

    /// `n_bytes` that are in the host's memory are on their way from here on.
    pub fn start(&self, n_bytes: u64, now: Instant) {
        let mut state = self.0.lock().expect("no panic under this lock");
        if state.n_bytes == 0 {
            state.since = now;
        }
        state.n_bytes += n_bytes;
    }

    /// They have arrived, or failed to.
    pub fn end(&self, n_bytes: u64, arrived: bool, now: Instant) {
        let mut state = self.0.lock().expect("no panic under this lock");
        state.n_bytes -= n_bytes;
        let took = now.saturating_duration_since(state.since);
        state.since = now;
        if arrived && n_bytes > 0 {
            let new = took.as_nanos() as f64 / n_bytes as f64;
            let mean = state.ns_a_byte.get_or_insert(new);
            *mean += WEIGHT * (new - *mean);
        }
    }

    /// `None` before the first transfer.
    pub fn load_ns(&self, n_bytes: u64) -> Option<f64> {
        let state = self.0.lock().expect("no panic under this lock");
        state.ns_a_byte.map(|ns| ns * n_bytes as f64)
    }

    /// The time that the running transfers still take.
    pub fn delay_ns(&self, now: Instant) -> f64 {
        let state = self.0.lock().expect("no panic under this lock");
        let all = state.ns_a_byte.unwrap_or(0.0) * state.n_bytes as f64;
        (all - now.saturating_duration_since(state.since).as_nanos() as f64).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn transfers_side_by_side_share_the_link() {
        let timer = LinkTimer::new();
        let start = Instant::now();
        let at = |ns: u64| start + Duration::from_nanos(ns);
        assert_eq!((timer.load_ns(100), timer.delay_ns(start)), (None, 0.0));
        // Two of 100 bytes within 200 ns: 1 ns a byte, not two.
        timer.start(100, at(0));
        timer.start(100, at(10));
        timer.end(100, true, at(100));
        assert_eq!(timer.load_ns(300), Some(300.0));
        assert_eq!(timer.delay_ns(at(130)), 70.0);
        timer.end(100, true, at(200));
        assert_eq!((timer.load_ns(300), timer.delay_ns(at(200))), (Some(300.0), 0.0));
        // Idle time does not count for the link; a late transfer has no time left.
        timer.start(100, at(1000));
        assert_eq!(timer.delay_ns(at(1050)), 50.0);
        assert_eq!(timer.delay_ns(at(2000)), 0.0);
        // What failed tells nothing.
        timer.end(100, false, at(9000));
        assert_eq!(timer.load_ns(300), Some(300.0));
        // A change is followed, slowly.
        timer.start(100, at(10_000));
        timer.end(100, true, at(10_200));
        let load_ns = timer.load_ns(300).unwrap();
        assert!(300.0 < load_ns && load_ns < 320.0, "{load_ns}");
    }
}
