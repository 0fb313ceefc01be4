//! Counts of the server's own, and the text that Prometheus reads.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::events::Finish;
use super::models::Listing;
use super::random;
use super::service::Service;
use crate::engine::scheduler::{Counts, Histogram, SECONDS, SlotStatus, Status};
use crate::engine::{DraftSource, Drafted};

/// Counts since the start.
#[derive(Debug)]
pub struct Metrics {
    /// In seconds since 1970-01-01.
    started: u64,
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    rejected: Mutex<BTreeMap<&'static str, u64>>,
    cancelled: Mutex<BTreeMap<&'static str, u64>>,
    unknown_fields: AtomicU64,
    /// By the name of the model.
    ended: Mutex<BTreeMap<String, Ended>>,
}

/// The choices of a model that have ended.
#[derive(Clone, Copy, Debug)]
struct Ended {
    n_generated: u64,
    /// Tokens of the longest text.
    longest: u64,
    first_token: Histogram,
    queue: Histogram,
    whole: Histogram,
}

impl Default for Ended {
    fn default() -> Self {
        let times = Histogram::new(&SECONDS);
        Ended { n_generated: 0, longest: 0, first_token: times, queue: times, whole: times }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics {
            started: random::now(),
            requests: Mutex::default(),
            rejected: Mutex::default(),
            cancelled: Mutex::default(),
            unknown_fields: AtomicU64::default(),
            ended: Mutex::default(),
        }
    }
}

/// Series as Prometheus wants them: all samples of a name stand together, whichever model they are
/// of.
#[derive(Default)]
struct Series {
    families: Vec<Family>,
    /// The family of the last header.
    at: usize,
    /// The label that samples have before their own: that of a model, where there are several.
    model: String,
}

struct Family {
    name: String,
    lines: String,
}

impl Series {
    /// The samples that follow are those of this name.
    fn header(&mut self, name: &str, kind: &str, help: &str) {
        let known = self.families.iter().position(|family| family.name == name);
        self.at = known.unwrap_or(self.families.len());
        if known.is_none() {
            let lines = format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
            self.families.push(Family { name: name.to_owned(), lines });
        }
    }

    /// A sample of the last header; `suffix` is behind its name.
    fn sample(&mut self, suffix: &str, labels: &str, value: impl Display) {
        let Family { name, lines } = &mut self.families[self.at];
        let comma = if self.model.is_empty() || labels.is_empty() { "" } else { "," };
        let labels = format!("{}{comma}{labels}", self.model);
        let _ = match labels.is_empty() {
            true => writeln!(lines, "{name}{suffix} {value}"),
            false => writeln!(lines, "{name}{suffix}{{{labels}}} {value}"),
        };
    }

    fn text(self) -> String {
        self.families.into_iter().map(|family| family.lines).collect()
    }
}

fn add<K: Ord>(counts: &Mutex<BTreeMap<K, u64>>, key: K) {
    *counts.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_insert(0) += 1;
}

impl Metrics {
    /// When the server has started, in seconds since 1970-01-01.
    pub fn started(&self) -> u64 {
        self.started
    }

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

    /// A choice of a model has ended after `time`.
    pub fn add_finish(&self, model: &str, finish: &Finish, time: Duration) {
        let n_generated = finish.outcome.n_generated as u64;
        let mut all = lock(&self.ended);
        let ended = match all.get_mut(model) {
            Some(ended) => ended,
            None => all.entry(model.to_owned()).or_default(),
        };
        ended.n_generated += n_generated;
        ended.longest = ended.longest.max(finish.n_prompt as u64 + n_generated);
        ended.first_token.add_time(finish.queue_time + finish.outcome.prompt_time);
        ended.queue.add_time(finish.queue_time);
        ended.whole.add_time(time);
    }

    /// All series: of the server, of `models`, and more of those that are `shown`. With several
    /// models each sample of one has its name as a label.
    pub fn text(&self, models: &[Listing], shown: &[Listing], has_several: bool) -> String {
        let mut out = Series::default();
        let ended = lock(&self.ended).clone();
        let ended = |name: &str| ended.get(name).copied();
        build_info(&mut out, shown, has_several);
        out.header("moeba_requests_total", "counter", "Requests by route and status.");
        for ((route, status), n) in lock(&self.requests).iter() {
            out.sample("", &format!("route=\"{route}\",status=\"{status}\""), n);
        }
        labelled(&mut out, "moeba_rejected_total", "reason", &self.rejected);
        labelled(&mut out, "moeba_cancelled_total", "phase", &self.cancelled);
        let unknown = self.unknown_fields.load(Ordering::Relaxed) as f64;
        let help = "Fields of requests that have no meaning here.";
        one(&mut out, "moeba_unknown_fields_total", "counter", help, unknown);
        if !has_several {
            let name = shown.first().map_or("", |listing| &listing.names[0]);
            times(&mut out, &ended(name).unwrap_or_default());
        }
        for listing in shown.iter().filter(|_| has_several) {
            out.model = label(listing);
            ended(&listing.names[0]).iter().for_each(|ended| times(&mut out, ended));
        }
        out.model.clear();
        out.header("moeba_model_loaded", "gauge", "Whether a model is loaded.");
        for listing in models {
            out.sample("", &label(listing), u8::from(listing.lease.is_some()));
        }
        for listing in shown {
            let Some(service) = &listing.lease else { continue };
            out.model = if has_several { label(listing) } else { String::new() };
            let ended = ended(&listing.names[0]).unwrap_or_default();
            of_service(service, &ended, &mut out);
        }
        out.text()
    }
}

/// The label of a model.
fn label(listing: &Listing) -> String {
    format!("model=\"{}\"", escaped(&listing.names[0]))
}

/// The versions of the server and of each model that is loaded.
fn build_info(out: &mut Series, shown: &[Listing], has_several: bool) {
    out.header("moeba_build_info", "gauge", "The version and what its bits depend on.");
    let version = env!("CARGO_PKG_VERSION");
    let mut info = |model: String, fingerprint: &str| {
        out.model = model;
        out.sample("", &format!("version=\"{version}\",fingerprint=\"{fingerprint}\""), 1);
    };
    let mut is_loaded = false;
    for listing in shown {
        let Some(service) = &listing.lease else { continue };
        let model = if has_several { label(listing) } else { String::new() };
        info(model, &service.info.fingerprint);
        is_loaded = true;
    }
    if !is_loaded {
        info(String::new(), "");
    }
    out.model.clear();
}

/// Times of choices.
fn times(out: &mut Series, ended: &Ended) {
    let help = "Time to the first token, the queue included.";
    histogram(out, "moeba_time_to_first_token_seconds", help, &ended.first_token);
    histogram(out, "moeba_queue_wait_seconds", "Time in the queue.", &ended.queue);
    let help = "Time from a request to the end of its answer.";
    histogram(out, "moeba_e2e_request_latency_seconds", help, &ended.whole);
}

/// Series of a loaded model.
fn of_service(service: &Service, ended: &Ended, out: &mut Series) {
    let status = service.status();
    let counts = status.counts;
    let n_parked = status.n_parked();
    let is_running = |slot: &&SlotStatus| slot.job.is_some() && !slot.is_parked;
    let n_running = status.slots.iter().filter(is_running).count();
    let n_past: usize = status.slots.iter().map(|slot| slot.n_past).sum();
    let room = service.engine().plan().n_ctx_all.max(1);
    let seconds = |ns: u64| ns as f64 / 1e9;
    let rate = |n: u64, ns: u64| n as f64 / seconds(ns).max(1e-9) * f64::from(ns > 0);
    let (prompt, decode) = (counts.prompt_ns, counts.decode_ns);
    let longest = ended.longest as f64;
    let predicted = ended.n_generated as f64;
    let busy = counts.n_decode as f64 / (counts.n_steps as f64).max(1.0);
    let c = "counter";
    let g = "gauge";
    let both = [
        ("prompt_tokens_total", c, "Tokens of prompts that were computed.", counts.n_prompt as f64),
        (
            "prompt_tokens_cached_total",
            c,
            "Tokens of prompts that were in a cache.",
            counts.n_reused as f64,
        ),
        ("prompt_seconds_total", c, "Time of prompts' passes.", seconds(prompt)),
        ("tokens_predicted_total", c, "Tokens of answers that have ended.", predicted),
        ("tokens_predicted_seconds_total", c, "Time of steps of decode.", seconds(decode)),
        ("n_decode_total", c, "Steps of decode.", counts.n_steps as f64),
        ("n_tokens_max", g, "Tokens of the longest text so far.", longest),
        ("n_busy_slots_per_decode", g, "Texts in a step of decode.", busy),
        ("prompt_tokens_seconds", g, "Prompt tokens a second.", rate(counts.n_prompt, prompt)),
        ("predicted_tokens_seconds", g, "Tokens a second.", rate(counts.n_decode, decode)),
        ("requests_processing", g, "Requests that run.", n_running as f64),
        ("requests_deferred", g, "Requests that wait.", (status.n_queued + n_parked) as f64),
    ];
    for (name, kind, help, value) in both {
        one(out, &format!("moeba_{name}"), kind, help, value);
        one(out, &format!("llamacpp:{name}"), kind, help, value);
    }
    let n_queued = status.n_queued as f64;
    one(out, "moeba_queue_length", g, "Requests that wait.", n_queued);
    let help = "Requests that have begun and wait for memory or for their readers.";
    one(out, "moeba_requests_parked", g, help, n_parked as f64);
    let help = "Times that a request that had begun had to wait.";
    one(out, "moeba_parked_total", c, help, counts.n_parked as f64);
    let used = n_past as f64 / room as f64;
    one(out, "moeba_kv_cache_usage_ratio", g, "Part of the caches that is used.", used);
    let reused = counts.n_reused as f64;
    let help = "Tokens of prompts that a cache had already.";
    one(out, "moeba_prefix_tokens_reused_total", c, help, reused);
    let computed = counts.n_prompt as f64;
    let help = "Tokens of prompts that were computed.";
    one(out, "moeba_prefix_tokens_computed_total", c, help, computed);
    passes(&counts, out);
    drafts(&counts, out);
    pages(&status, out);
    let help = "Time in which a grammar was compiled, or found among the latest.";
    histogram(out, "moeba_grammar_compile_seconds", help, &service.compile_times());
    experts(service, out);
    peers(service, out);
}

/// Series of the passes.
fn passes(counts: &Counts, out: &mut Series) {
    let help = "Layers of prompts' passes.";
    let layers = counts.n_prompt_layers as f64;
    one(out, "moeba_prefill_layers_total", "counter", help, layers);
    let series = [
        ("batch_rows", "Texts in a step of decode.", &counts.batch_rows),
        ("expert_union", "Experts that a layer needed in a step.", &counts.expert_union),
        ("decode_stall_seconds", "Time between two steps of a text.", &counts.decode_stall),
        ("grammar_mask_seconds", "Time that a token's mask took.", &counts.mask_time),
    ];
    for (name, help, values) in series {
        histogram(out, &format!("moeba_{name}"), help, values);
    }
}

/// Series of drafts.
fn drafts(counts: &Counts, out: &mut Series) {
    type Read = fn(Drafted) -> u64;
    let series: [(&str, &str, Read); 2] = [
        ("drafted", "Tokens that were computed as drafts.", |drafted| drafted.n),
        ("accepted", "Drafts that the sampler chose.", |drafted| drafted.n_accepted),
    ];
    for (name, help, value) in series {
        let name = format!("moeba_spec_{name}_total");
        out.header(&name, "counter", help);
        for source in DraftSource::ALL {
            let labels = format!("source=\"{}\"", source.name());
            out.sample("", &labels, value(counts.drafts.of(source)));
        }
    }
    let series = [
        ("passes", "Steps of decode with drafts.", counts.n_verified),
        ("gate_off", "Steps whose drafts were not worth it.", counts.n_not_drafted),
    ];
    for (name, help, value) in series {
        one(out, &format!("moeba_spec_{name}_total"), "counter", help, value as f64);
    }
    let all = counts.drafts.all();
    for (name, help, value) in [
        ("draft_tokens", "Tokens that were computed as drafts.", all.n),
        ("accepted_tokens", "Drafts that the sampler chose.", all.n_accepted),
        ("drafts", "Steps of decode with drafts.", counts.n_verified),
    ] {
        let name = format!("llamacpp:spec_decode_num_{name}_total");
        one(out, &name, "counter", help, value as f64);
    }
}

/// Series of the texts that no session holds.
fn pages(status: &Status, out: &mut Series) {
    let gauges = [
        ("moeba_page_bytes", "Bytes of pages and states.", status.page_bytes),
        ("moeba_state_checkpoints", "States of texts that are kept.", status.n_checkpoints),
    ];
    for (name, help, value) in gauges {
        one(out, name, "gauge", help, value as f64);
    }
    let (ram, disk) = (status.page_counts, status.disk);
    let tiers = |out: &mut Series, name: &str, kind: &str, help: &str, of: [Option<u64>; 2]| {
        out.header(name, kind, help);
        for (tier, value) in ["ram", "disk"].iter().zip(of) {
            let labels = format!("tier=\"{tier}\"");
            value.iter().for_each(|value| out.sample("", &labels, value));
        }
    };
    let help = "Pages of texts that no session holds; on disk states count, too.";
    let on_disk = disk.map(|disk| disk.n_entries as u64);
    tiers(out, "moeba_pages", "gauge", help, [Some(status.n_pages as u64), on_disk]);
    let hits = [Some(ram.n_hits), disk.map(|disk| disk.n_hits)];
    let evictions = [Some(ram.n_evicted), disk.map(|disk| disk.n_evicted)];
    let counters = [
        ("hits", "Pages of prompts that were there.", hits),
        ("misses", "Pages of prompts that were not there.", [Some(ram.n_misses), None]),
        ("evictions", "Pages that made room for others.", evictions),
        ("corrupt", "Files that were not whole.", [None, disk.map(|disk| disk.n_damaged)]),
        ("writes", "Files that were written.", [None, disk.map(|disk| disk.n_written)]),
    ];
    for (name, help, values) in counters {
        tiers(out, &format!("moeba_page_{name}_total"), "counter", help, values);
    }
    if let Some(disk) = disk {
        let help = "Bytes of files with pages and states.";
        one(out, "moeba_page_disk_bytes", "gauge", help, disk.n_bytes as f64);
    }
}

/// Series of what peers have computed.
fn peers(service: &Service, out: &mut Series) {
    let engine = service.engine();
    let (Some(c), Some((n_up, _))) = (engine.peer_counters(), engine.n_peers()) else { return };
    one(out, "moeba_peers", "gauge", "Peers that can be asked for experts.", n_up as f64);
    let series = [
        ("experts", "Experts that peers were asked for.", c.experts as f64),
        ("lost", "Experts of these that were computed here after all.", c.lost as f64),
        ("sent_bytes", "Bytes of bodies to peers.", c.sent_bytes as f64),
        ("received_bytes", "Bytes of bodies from peers.", c.received_bytes as f64),
        ("wait_seconds", "Time that passes waited for peers.", c.wait_ns as f64 / 1e9),
    ];
    for (name, help, value) in series {
        one(out, &format!("moeba_peer_{name}_total"), "counter", help, value);
    }
}

/// Series of each tier of experts.
fn experts(service: &Service, out: &mut Series) {
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
        out.header(&name, "counter", help);
        for (tier, counters) in &tiers {
            out.sample("", &format!("tier=\"{tier}\""), value(counters));
        }
    }
}

/// A text as the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn one(out: &mut Series, name: &str, kind: &str, help: &str, value: f64) {
    out.header(name, kind, help);
    out.sample("", "", value);
}

fn histogram(out: &mut Series, name: &str, help: &str, values: &Histogram) {
    out.header(name, "histogram", help);
    let mut total = 0;
    for (i, count) in values.counts.iter().enumerate() {
        total += count;
        let bound = values.bounds.get(i).map_or("+Inf".into(), f64::to_string);
        out.sample("_bucket", &format!("le=\"{bound}\""), total);
    }
    out.sample("_sum", "", values.sum);
    out.sample("_count", "", total);
}

fn labelled(
    out: &mut Series,
    name: &str,
    label: &str,
    counts: &Mutex<BTreeMap<&'static str, u64>>,
) {
    out.header(name, "counter", "Requests that were not served to their end.");
    for (value, n) in lock(counts).iter() {
        out.sample("", &format!("{label}=\"{value}\""), n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up() {
        let metrics = Metrics::default();
        let mut ended = Ended::default();
        ended.first_token.add_time(Duration::from_millis(20));
        ended.first_token.add_time(Duration::from_secs(9999));
        lock(&metrics.ended).insert(String::new(), ended);
        metrics.add_request("/health", 200);
        let text = metrics.text(&[], &[], false);
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
