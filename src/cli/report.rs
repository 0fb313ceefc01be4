//! The cost of moving experts: lines for people and the flat keys of `--stats` and `bench`.

use super::stats::Stats;
use crate::engine::plan::ram::Place;
use crate::engine::{ExpertTraffic, MemoryPlan, PeerCounters};
use crate::experts::Counters;
use crate::units::size;
use serde_json::{Value, json};

/// Two lines for each link, about `n_tokens`.
pub fn lines(traffic: &ExpertTraffic, n_tokens: usize) -> Vec<String> {
    let to_devices =
        traffic.link.map(|c| of_link(&c, n_tokens, ("experts in VRAM", "link", "moved")));
    let at = if traffic.link.is_some() { "experts in memory" } else { "experts" };
    let to_memory = traffic.disk.map(|c| of_link(&c, n_tokens, (at, "disk", "read")));
    let peers = traffic.peers.iter().map(|c| of_peers(c, n_tokens));
    to_devices.into_iter().chain(to_memory).flatten().chain(peers).collect()
}

fn of_link(c: &Counters, n_tokens: usize, (at, link, moved): (&str, &str, &str)) -> [String; 2] {
    let percent = |rate: f64| if rate.is_nan() { 0.0 } else { 100.0 * rate };
    let (hits, partial) = (percent(c.hit_rate()), percent(c.partial_hit_rate()));
    let stall = match n_tokens {
        0 => String::new(),
        n => format!(", stall {:.1} ms/token", stall_ms(c, n)),
    };
    let rate = match c.busy_ns {
        0 => String::new(),
        _ => format!(" at {:.2} GB/s", c.gb_per_second()),
    };
    let resident = size(c.resident_bytes_max);
    let (read, on_demand) = (size(c.read_bytes), size(c.demand_bytes));
    let (used, wasted) = (size(c.prefetch_used_bytes), size(c.prefetch_wasted_bytes));
    [
        format!(
            "{at}: {hits:.1} % hits, {partial:.1} % partial{stall}; at most {resident} resident"
        ),
        format!(
            "{link}: {moved} {read}{rate}; {on_demand} on demand, {used} prefetched and used, \
             {wasted} wasted"
        ),
    ]
}

fn of_peers(c: &PeerCounters, n_tokens: usize) -> String {
    let wait = match n_tokens {
        0 => String::new(),
        n => format!(", waited for {:.1} ms/token", c.wait_ns as f64 / 1e6 / n as f64),
    };
    let (sent, received) = (size(c.sent_bytes), size(c.received_bytes));
    let (experts, lost) = (c.experts, c.lost);
    format!("peers: {experts} experts, {lost} of them lost{wait}; sent {sent}, received {received}")
}

/// Time that a token waited for experts.
pub fn stall_ms(counters: &Counters, n_tokens: usize) -> f64 {
    counters.stall_ns as f64 / 1e6 / n_tokens as f64
}

/// The placement of the experts and their counters over `n_tokens`. Counters are null if experts
/// are in place, where nothing is counted. Keys that name no link belong to the link to the place
/// where experts are computed.
pub fn fields(
    plan: &MemoryPlan,
    traffic: &ExpertTraffic,
    n_tokens: usize,
) -> Vec<(&'static str, Value)> {
    let streamed = match plan.place {
        Place::InPlace => None,
        Place::Streamed { budget } => Some(budget),
    };
    let counters = traffic.top();
    // What is no finite number becomes null.
    let number = |f: &dyn Fn(&Counters) -> f64| counters.map(f).into();
    let count = |f: &dyn Fn(&Counters) -> u64| counters.map(f).into();
    let peers = |f: &dyn Fn(&PeerCounters) -> u64| traffic.peers.as_ref().map(f).into();
    let resident = counters.map_or(plan.sizes.expert_bytes, |c| c.resident_bytes_max);
    vec![
        ("expert_budget_bytes", streamed.into()),
        ("policy", streamed.map(|_| plan.policy.to_string()).into()),
        ("io", streamed.map(|_| plan.io.to_string()).into()),
        ("hit_rate", number(&Counters::hit_rate)),
        ("partial_hit_rate", number(&Counters::partial_hit_rate)),
        ("demand_bytes", count(&|c| c.demand_bytes)),
        ("prefetch_used_bytes", count(&|c| c.prefetch_used_bytes)),
        ("prefetch_wasted_bytes", count(&|c| c.prefetch_wasted_bytes)),
        ("read_bytes", count(&|c| c.read_bytes)),
        ("n_reads", count(&|c| c.n_reads)),
        ("disk_gb_per_second", traffic.disk.map(|c| c.gb_per_second()).into()),
        ("stall_ms_per_token", number(&|c| stall_ms(c, n_tokens))),
        ("policy_ms_per_token", number(&|c| c.policy_ns as f64 / 1e6 / n_tokens as f64)),
        ("policy_loop_ms_per_token", number(&|c| c.policy_loop_ns as f64 / 1e6 / n_tokens as f64)),
        ("policy_events_dropped", count(&|c| c.policy_events_dropped)),
        ("resident_expert_bytes_max", resident.into()),
        ("demand_wait_histogram", counters.map_or(Value::Null, |c| json!(c.demand_wait_histogram))),
        ("disk_read_bytes", traffic.disk.map(|c| c.read_bytes).into()),
        ("link_bytes", traffic.link.map(|c| c.read_bytes).into()),
        ("link_gb_per_second", traffic.link.map(|c| c.gb_per_second()).into()),
        ("link_prefetch_hits", traffic.link.map(|c| c.hits_prefetched).into()),
        ("peer_requests", peers(&|c| c.requests)),
        ("peer_experts", peers(&|c| c.experts)),
        ("peer_lost", peers(&|c| c.lost)),
        ("peer_pairs", peers(&|c| c.pairs)),
        ("peer_sent_bytes", peers(&|c| c.sent_bytes)),
        ("peer_received_bytes", peers(&|c| c.received_bytes)),
        ("peer_wait_ms", traffic.peers.map(|c| c.wait_ns as f64 / 1e6).into()),
    ]
}

/// `fields` into `--stats`.
pub fn fill(stats: &mut Stats, plan: &MemoryPlan, traffic: &ExpertTraffic, n_tokens: usize) {
    for (key, value) in fields(plan, traffic, n_tokens) {
        stats.value(key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::plan::ram::Sizes;
    use crate::experts::disk::IoKind;
    use crate::policy::PolicySpec;

    fn counters() -> Counters {
        Counters {
            hits_whole: 612,
            hits_partial: 30,
            misses: 358,
            demand_bytes: 900 << 20,
            prefetch_used_bytes: 300 << 20,
            prefetch_wasted_bytes: 20 << 20,
            read_bytes: 1280 << 20,
            busy_ns: 2_314_099_201,
            stall_ns: 123_000_000,
            resident_bytes_max: 512 << 20,
            ..Counters::default()
        }
    }

    #[test]
    fn people_read_two_lines_a_link() {
        let from_disk = "\
experts: 61.2 % hits, 3.0 % partial, stall 12.3 ms/token; at most 512.0 MiB resident
disk: read 1.25 GiB at 0.58 GB/s; 900.0 MiB on demand, 300.0 MiB prefetched and used, 20.0 MiB \
wasted";
        assert_eq!(lines(&disk(counters()), 10).join("\n"), from_disk);
        let nothing = lines(&disk(Counters::default()), 0).join("\n");
        assert!(!nothing.contains("NaN") && !nothing.contains("stall"), "{nothing}");
        assert_eq!(lines(&ExpertTraffic::default(), 10), Vec::<String>::new());
        let link = Some(Counters::default());
        let moved = ExpertTraffic { link, disk: Some(counters()), peers: None };
        let both = lines(&moved, 10);
        let starts = ["experts in VRAM: 0.0 %", "link: moved 0 B; ", "experts in memory: 61.2 %"];
        for (line, start) in both.iter().zip(starts) {
            assert!(line.starts_with(start), "{line}");
        }
        let peers = PeerCounters { experts: 40, lost: 2, wait_ns: 5_000_000, ..Default::default() };
        let said = lines(&ExpertTraffic { peers: Some(peers), ..Default::default() }, 10);
        let line =
            "peers: 40 experts, 2 of them lost, waited for 0.5 ms/token; sent 0 B, received 0 B";
        assert_eq!(said, [line]);
        assert_eq!(both.last().unwrap(), from_disk.lines().last().unwrap());
    }

    /// Each link has its own bytes and its own rate.
    #[test]
    fn a_device_and_a_disk_are_told_apart() {
        let slow = Counters { read_bytes: 7, busy_ns: 7, ..Counters::default() };
        let moved = ExpertTraffic { link: Some(slow), disk: Some(counters()), peers: None };
        let fields = fields(&plan(Place::InPlace), &moved, 10);
        let value = |key| &fields.iter().find(|(name, _)| *name == key).unwrap().1;
        assert_eq!((value("read_bytes"), value("link_bytes")), (&json!(7), &json!(7)));
        assert_eq!(value("disk_read_bytes"), &json!(1280 << 20));
        assert_eq!(value("link_gb_per_second"), &json!(1.0));
        assert_eq!(value("disk_gb_per_second"), &json!(counters().gb_per_second()));
    }

    fn disk(counters: Counters) -> ExpertTraffic {
        ExpertTraffic { disk: Some(counters), ..Default::default() }
    }

    fn plan(place: Place) -> MemoryPlan {
        MemoryPlan {
            sizes: Sizes { expert_bytes: 7, ..Sizes::default() },
            place,
            is_mapped: true,
            io: IoKind::Pread,
            policy: PolicySpec::default(),
            n_ctx: 1,
            n_sessions: 1,
            n_ctx_all: 1,
            page_bytes: 0,
            body_bytes: 0,
            n_ubatch: 1,
            n_moe_layers: 1,
            n_experts: 1,
            k: 1,
            expert_bytes_per_token: 1,
            dense_bytes_per_token: 1,
            token_types: Vec::new(),
            n_threads: 1,
            device: None,
        }
    }

    /// Streamed or not, the keys are the same, and rates of nothing are null.
    #[test]
    fn keys_are_stable() {
        let streamed = plan(Place::Streamed { budget: 5 });
        let streamed = fields(&streamed, &disk(counters()), 10);
        let value = |key| &streamed.iter().find(|(name, _)| *name == key).unwrap().1;
        assert_eq!((value("hit_rate"), value("io")), (&json!(0.612), &json!("pread")));
        assert_eq!(value("stall_ms_per_token"), &json!(12.3));
        assert_eq!(value("resident_expert_bytes_max"), &json!(512 << 20));
        assert_eq!(value("demand_wait_histogram"), &json!(vec![0; 10]));
        let in_place = fields(&plan(Place::InPlace), &ExpertTraffic::default(), 10);
        let keys =
            |fields: &[(&'static str, Value)]| fields.iter().map(|f| f.0).collect::<Vec<_>>();
        assert_eq!(keys(&streamed), keys(&in_place));
        let known: Vec<_> = in_place.iter().filter(|(_, value)| !value.is_null()).collect();
        assert_eq!(known, [&("resident_expert_bytes_max", json!(7))]);
        let idle = fields(&plan(Place::InPlace), &disk(Counters::default()), 0);
        assert!(idle.iter().any(|(key, value)| *key == "hit_rate" && value.is_null()));
    }
}
