//! Random eviction: what every other policy has to beat.

use super::{Event, Eviction, Expert};

/// Each event redraws all priorities, so that the lowest of any set of candidates is any of them
/// with equal probability. Nothing is stored: a priority is a hash of seed, event and expert.
#[derive(Clone, Debug)]
pub struct Random {
    seed: u64,
    n_events: u64,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self { seed, n_events: 0 }
    }
}

impl Eviction for Random {
    fn observe(&mut self, event: &Event<'_>) {
        self.n_events += u64::from(matches!(event, Event::Routed(_)));
    }

    /// From 0 to below 1.
    fn priority(&self, expert: Expert) -> f64 {
        let id = u64::from(expert.layer) << 32 | u64::from(expert.expert);
        let draw = mix(mix(mix(self.seed) ^ self.n_events) ^ id);
        // As many bits as an f64 holds.
        (draw >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// One step of SplitMix64 (Steele, Lea, Flood 2014): a bijection that spreads each bit over all.
pub fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
