//! The cost of moving experts.

use super::Engine;
use crate::experts::Counters;
use crate::experts::peers::PeerCounters;

/// Counters of the links that move experts, since the engine was loaded or over a span of time.
/// `None` where nothing moves.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertTraffic {
    /// Between memory and GPUs.
    pub link: Option<Counters>,
    /// Between disk and memory.
    pub disk: Option<Counters>,
    /// Between this machine and peers that compute experts.
    pub peers: Option<PeerCounters>,
}

impl ExpertTraffic {
    /// The link to where experts are computed: the GPUs', or the disk's without a GPU.
    pub fn top(&self) -> Option<&Counters> {
        self.link.as_ref().or(self.disk.as_ref())
    }

    /// The counts since `before`.
    pub fn since(&self, before: &ExpertTraffic) -> ExpertTraffic {
        self.with(before, Counters::since, PeerCounters::since)
    }

    /// The sums of two spans.
    pub fn plus(&self, other: &ExpertTraffic) -> ExpertTraffic {
        self.with(other, Counters::plus, PeerCounters::plus)
    }

    /// `n` of `total` equal parts.
    pub fn part(&self, n: usize, total: usize) -> ExpertTraffic {
        ExpertTraffic {
            link: self.link.map(|counters| counters.part(n, total)),
            disk: self.disk.map(|counters| counters.part(n, total)),
            peers: self.peers.map(|counters| counters.part(n, total)),
        }
    }

    fn with(
        &self,
        other: &ExpertTraffic,
        of_links: fn(&Counters, &Counters) -> Counters,
        of_peers: fn(&PeerCounters, &PeerCounters) -> PeerCounters,
    ) -> Self {
        let both = |a: Option<Counters>, b: Option<Counters>| Some(of_links(&a?, &b?));
        ExpertTraffic {
            link: both(self.link, other.link),
            disk: both(self.disk, other.disk),
            peers: self.peers.zip(other.peers).map(|(own, other)| of_peers(&own, &other)),
        }
    }
}

impl Engine {
    /// Counters of all links since the engine was loaded.
    pub fn expert_traffic(&self) -> ExpertTraffic {
        ExpertTraffic {
            link: self.link_counters(),
            disk: self.disk_counters(),
            peers: self.peer_counters(),
        }
    }
}

/// Divides traffic among those who cause it: whatever has moved since the last look belongs to the
/// pass that looks.
#[derive(Debug, Default)]
pub(in crate::engine) struct TrafficMeter(Option<ExpertTraffic>);

impl TrafficMeter {
    /// The traffic since the last look.
    pub fn take(&mut self, engine: &Engine) -> ExpertTraffic {
        let now = engine.expert_traffic();
        let before = self.0.replace(now).unwrap_or(now);
        now.since(&before)
    }
}
