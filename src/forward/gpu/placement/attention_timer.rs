//! The time between two layers' experts: from when a layer's misses are answered until the host
//! knows what the next layer's router chose. The link has it for prefetches (PreScope's
//! t_attention, section 4.3.2).

use std::time::Instant;

/// Weight of a new figure in the running mean: some tens of layers count.
const WEIGHT: f64 = 1.0 / 32.0;

#[derive(Clone, Debug, Default)]
pub struct AttentionTimer {
    /// When the last layer was answered.
    since: Option<Instant>,
    ns: Option<f64>,
}

impl AttentionTimer {
    /// A pass begins: what comes first is no layer's.
    pub fn reset(&mut self) {
        self.since = None;
    }

    /// A layer's experts are answered.
    pub fn begin(&mut self, now: Instant) {
        self.since = Some(now);
    }

    /// The next router's choice is known.
    pub fn end(&mut self, now: Instant) {
        let Some(since) = self.since.take() else { return };
        let new = now.saturating_duration_since(since).as_nanos() as f64;
        let mean = self.ns.get_or_insert(new);
        *mean += WEIGHT * (new - *mean);
    }

    /// The mean; `None` before the first.
    pub fn ns(&self) -> Option<f64> {
        self.ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_is_between_layers_is_measured() {
        let (mut timer, start) = (AttentionTimer::default(), Instant::now());
        let at = |ns| start + Duration::from_nanos(ns);
        timer.end(at(5));
        assert_eq!(timer.ns(), None);
        timer.begin(at(10));
        timer.end(at(110));
        assert_eq!(timer.ns(), Some(100.0));
        // Between passes is no layer.
        timer.begin(at(200));
        timer.reset();
        timer.end(at(9000));
        assert_eq!(timer.ns(), Some(100.0));
        timer.begin(at(10_000));
        timer.end(at(10_420));
        assert_eq!(timer.ns(), Some(110.0));
    }
}
