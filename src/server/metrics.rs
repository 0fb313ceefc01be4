//! Counts of the server's own, and the text that Prometheus reads.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::events::Finish;
use super::service::Service;

/// Upper bounds of a histogram's buckets, in seconds.
const SECONDS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0];

#[derive(Debug, Default)]
struct Histogram {
    counts: [AtomicU64; 16],
    sum_us: AtomicU64,
}

impl Histogram {
    fn add(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = SECONDS.iter().position(|most| seconds <= *most).unwrap_or(SECONDS.len());
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }

    fn write(&self, name: &str, help: &str, out: &mut String) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut total = 0;
        for (i, count) in self.counts.iter().enumerate() {
            total += count.load(Ordering::Relaxed);
            let bound = SECONDS.get(i).map_or("+Inf".into(), f64::to_string);
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {total}");
        }
        let sum = self.sum_us.load(Ordering::Relaxed) as f64 / 1e6;
        let _ = writeln!(out, "{name}_sum {sum}\n{name}_count {total}");
    }
}

/// Counts since the start.
#[derive(Debug, Default)]
pub struct Metrics {
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    rejected: Mutex<BTreeMap<&'static str, u64>>,
    cancelled: Mutex<BTreeMap<&'static str, u64>>,
    unknown_fields: AtomicU64,
    n_generated: AtomicU64,
    first_token: Histogram,
    queue: Histogram,
    whole: Histogram,
}

fn add<K: Ord>(counts: &Mutex<BTreeMap<K, u64>>, key: K) {
    *counts.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_insert(0) += 1;
}

impl Metrics {
    /// A request was answered. `route` is one of ours, not the client's text.
    pub fn add_request(&self, route: &'static str, status: u16) {
        add(&self.requests, (route, status));
    }

    /// A request was refused, for a reason with this name.
    pub fn add_rejected(&self, reason: &'static str) {
        add(&self.rejected, reason);
    }

    /// A client has gone in this phase of its answer.
    pub fn add_cancelled(&self, phase: &'static str) {
        add(&self.cancelled, phase);
    }

    pub fn add_unknown_fields(&self, n: usize) {
        self.unknown_fields.fetch_add(n as u64, Ordering::Relaxed);
    }

    /// A choice has ended after `time`.
    pub fn add_finish(&self, finish: &Finish, time: Duration) {
        let n_generated = finish.outcome.n_generated as u64;
        self.n_generated.fetch_add(n_generated, Ordering::Relaxed);
        self.first_token.add(finish.queue_time + finish.outcome.prompt_time);
        self.queue.add(finish.queue_time);
        self.whole.add(time);
    }

    /// All series.
    pub fn text(&self, service: Option<&Service>) -> String {
        let mut out = String::new();
        let version = env!("CARGO_PKG_VERSION");
        let fingerprint = service.map_or("", |service| service.info.fingerprint.as_str());
        let labels = format!("{{version=\"{version}\",fingerprint=\"{fingerprint}\"}}");
        header(&mut out, "moeba_build_info", "gauge", "The version and what its bits depend on.");
        let _ = writeln!(out, "moeba_build_info{labels} 1");
        header(&mut out, "moeba_requests_total", "counter", "Requests by route and status.");
        for ((route, status), n) in lock(&self.requests).iter() {
            let labels = format!("route=\"{route}\",status=\"{status}\"");
            let _ = writeln!(out, "moeba_requests_total{{{labels}}} {n}");
        }
        labelled(&mut out, "moeba_rejected_total", "reason", &self.rejected);
        labelled(&mut out, "moeba_cancelled_total", "phase", &self.cancelled);
        let unknown = self.unknown_fields.load(Ordering::Relaxed) as f64;
        let help = "Fields of requests that have no meaning here.";
        one(&mut out, "moeba_unknown_fields_total", "counter", help, unknown);
        let help = "Time to the first token, the queue included.";
        self.first_token.write("moeba_time_to_first_token_seconds", help, &mut out);
        self.queue.write("moeba_queue_wait_seconds", "Time in the queue.", &mut out);
        let help = "Time from a request to the end of its answer.";
        self.whole.write("moeba_e2e_request_latency_seconds", help, &mut out);
        if let Some(service) = service {
            self.of_service(service, &mut out);
        }
        out
    }

    fn of_service(&self, service: &Service, out: &mut String) {
        let status = service.scheduler.status();
        let counts = status.counts;
        let n_running = status.slots.iter().filter(|slot| slot.job.is_some()).count() as f64;
        let n_past: usize = status.slots.iter().map(|slot| slot.n_past).sum();
        let most = status.slots.iter().map(|slot| slot.n_past).max().unwrap_or(0) as f64;
        let room = (service.info.n_ctx * status.slots.len()).max(1);
        let seconds = |ns: u64| ns as f64 / 1e9;
        let rate = |n: u64, ns: u64| n as f64 / seconds(ns).max(1e-9) * f64::from(ns > 0);
        let (prompt, decode) = (counts.prompt_ns, counts.decode_ns);
        let predicted = self.n_generated.load(Ordering::Relaxed) as f64;
        let busy = counts.n_decode as f64 / (counts.n_steps as f64).max(1.0);
        let c = "counter";
        let g = "gauge";
        let both = [
            (
                "prompt_tokens_total",
                c,
                "Tokens of prompts that were computed.",
                counts.n_prompt as f64,
            ),
            ("prompt_seconds_total", c, "Time of prompts' passes.", seconds(prompt)),
            ("tokens_predicted_total", c, "Tokens of answers that have ended.", predicted),
            ("tokens_predicted_seconds_total", c, "Time of steps of decode.", seconds(decode)),
            ("n_decode_total", c, "Steps of decode.", counts.n_steps as f64),
            ("n_tokens_max", g, "Tokens in the fullest cache.", most),
            ("n_busy_slots_per_decode", g, "Texts in a step of decode.", busy),
            ("prompt_tokens_seconds", g, "Prompt tokens a second.", rate(counts.n_prompt, prompt)),
            ("predicted_tokens_seconds", g, "Tokens a second.", rate(counts.n_decode, decode)),
            ("requests_processing", g, "Requests that run.", n_running),
            ("requests_deferred", g, "Requests that wait.", status.n_queued as f64),
        ];
        for (name, kind, help, value) in both {
            one(out, &format!("moeba_{name}"), kind, help, value);
            one(out, &format!("llamacpp:{name}"), kind, help, value);
        }
        let n_queued = status.n_queued as f64;
        one(out, "moeba_queue_length", g, "Requests that wait.", n_queued);
        let used = n_past as f64 / room as f64;
        one(out, "moeba_kv_cache_usage_ratio", g, "Part of the caches that is used.", used);
        let reused = counts.n_reused as f64;
        let help = "Tokens of prompts that a cache had already.";
        one(out, "moeba_prefix_tokens_reused_total", c, help, reused);
        let computed = counts.n_prompt as f64;
        let help = "Tokens of prompts that were computed.";
        one(out, "moeba_prefix_tokens_computed_total", c, help, computed);
        let help = "Pages of texts that no session holds.";
        one(out, "moeba_pages", g, help, status.n_pages as f64);
        one(out, "moeba_page_bytes", g, "Bytes of these pages.", status.page_bytes as f64);
        experts(service, out);
    }
}

/// Series of each tier of experts.
fn experts(service: &Service, out: &mut String) {
    let traffic = service.engine().expert_traffic();
    let tiers = [("disk", traffic.disk), ("link", traffic.link)];
    let tiers: Vec<_> = tiers.iter().filter_map(|(name, c)| Some((*name, (*c)?))).collect();
    type Read = fn(&crate::engine::Counters) -> f64;
    let series: [(&str, &str, Read); 6] = [
        ("hits_total", "Experts that were there.", |c| c.hits_whole as f64),
        ("partial_hits_total", "Experts that were there in part.", |c| c.hits_partial as f64),
        ("misses_total", "Experts that were not there.", |c| c.misses as f64),
        ("read_bytes_total", "Bytes that were moved.", |c| c.read_bytes as f64),
        ("stall_seconds_total", "Time that passes waited.", |c| c.stall_ns as f64 / 1e9),
        ("prefetch_useful_bytes_total", "Prefetched bytes that were used.", |c| {
            c.prefetch_used_bytes as f64
        }),
    ];
    for (name, help, value) in series {
        let name = format!("moeba_expert_{name}");
        header(out, &name, "counter", help);
        for (tier, counters) in &tiers {
            let _ = writeln!(out, "{name}{{tier=\"{tier}\"}} {}", value(counters));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn header(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn one(out: &mut String, name: &str, kind: &str, help: &str, value: f64) {
    header(out, name, kind, help);
    let _ = writeln!(out, "{name} {value}");
}

fn labelled(
    out: &mut String,
    name: &str,
    label: &str,
    counts: &Mutex<BTreeMap<&'static str, u64>>,
) {
    header(out, name, "counter", "Requests that were not served to their end.");
    for (value, n) in lock(counts).iter() {
        let _ = writeln!(out, "{name}{{{label}=\"{value}\"}} {n}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up() {
        let metrics = Metrics::default();
        metrics.first_token.add(Duration::from_millis(20));
        metrics.first_token.add(Duration::from_secs(9999));
        metrics.add_request("/health", 200);
        let text = metrics.text(None);
        for line in [
            "moeba_time_to_first_token_seconds_bucket{le=\"0.01\"} 0",
            "moeba_time_to_first_token_seconds_bucket{le=\"0.025\"} 1",
            "moeba_time_to_first_token_seconds_bucket{le=\"+Inf\"} 2",
            "moeba_requests_total{route=\"/health\",status=\"200\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
