//! `GET /moeba/experts`: where every expert is and what the engine does, as a stream of events. A
//! snapshot copies some bytes an expert, one layer at a time, at most ten times a second for all
//! who look together; without them none is taken.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::body::Bytes;
use hyper::http::Response;
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep_until};

use super::App;
use super::body::Body;
use super::errors::{ApiError, ApiResult, Kind};
use super::limits::MAX_VIEWERS;
use super::models::Lease;
use super::service::Service;
use super::sse::{Frames, Source, events};
use super::status::slot_list;
use crate::engine::{Counters, DevicePart, MemoryPlan, PlacedExpert};

/// The time between two snapshots.
const INTERVAL: Duration = Duration::from_millis(100);
/// The longest silence of a stream.
const SILENCE: Duration = Duration::from_secs(1);

/// The number of viewers, and the newest snapshot, which they share.
#[derive(Debug, Default)]
pub struct Viewers {
    n: AtomicUsize,
    newest: Mutex<Option<Arc<Snapshot>>>,
}

#[derive(Debug)]
struct Snapshot {
    time: Instant,
    /// [`Lease::load`] of the model.
    load: u64,
    /// Layer after layer, and how many each layer has.
    experts: Vec<PlacedExpert>,
    n_experts: Vec<usize>,
    figures: Map<String, Value>,
}

impl Viewers {
    fn enter(&self) -> ApiResult<()> {
        let one_more = |n| (n < MAX_VIEWERS).then_some(n + 1);
        let entered = self.n.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        entered.map(|_| ()).map_err(|n| {
            let message = format!("{n} clients look at the experts already");
            ApiError::new(Kind::Overloaded, "too_many_viewers", message)
        })
    }

    fn leave(&self) {
        if self.n.fetch_sub(1, Ordering::Relaxed) == 1 {
            *self.newest.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// The newest snapshot, or a new one if that is older than a moment.
    fn look(&self, model: &Lease) -> Arc<Snapshot> {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let of_model = newest.as_ref().filter(|old| old.load == model.load);
        if let Some(snapshot) = of_model.filter(|old| old.time.elapsed() < INTERVAL) {
            return snapshot.clone();
        }
        let verdict = of_model.and_then(|old| old.figures.get("verdict").cloned());
        newest.insert(Arc::new(Snapshot::take(model, verdict))).clone()
    }
}

impl Snapshot {
    /// `verdict` is the last one: a policy that is at work has none to give.
    fn take(service: &Lease, verdict: Option<Value>) -> Snapshot {
        let engine = service.engine();
        let mut experts = Vec::new();
        let mut report = |layer| {
            let n_before = experts.len();
            engine.report_experts(layer, &mut experts);
            experts.len() - n_before
        };
        let n_experts = (0..engine.n_layers()).map(&mut report).collect();
        let mut figures = figures(service);
        let verdict = engine.policy_verdict().map_or(verdict, |new| Some(new.into()));
        figures.insert("verdict".into(), verdict.unwrap_or_default());
        Snapshot { time: Instant::now(), load: service.load, experts, n_experts, figures }
    }
}

/// One who looks, until this is dropped.
struct View {
    app: Arc<App>,
    id: usize,
    /// [`Lease::load`] of the model.
    load: u64,
    start: Instant,
    /// The snapshot that the client has, and when it was sent.
    shown: Option<(Arc<Snapshot>, Instant)>,
    next: Instant,
}

impl Drop for View {
    fn drop(&mut self) {
        self.app.viewers.leave();
    }
}

impl Source for View {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            sleep_until(self.next).await;
            if self.app.is_stopping.load(Ordering::Relaxed) {
                return None;
            }
            // A look keeps no model; the stream ends with it.
            let model = self.app.models().ok()?.look(self.id);
            let model = model.filter(|model| model.load == self.load)?;
            let app = self.app.clone();
            let looked = tokio::task::spawn_blocking(move || (app.viewers.look(&model), model));
            let (snapshot, model) = looked.await.ok()?;
            self.next = Instant::now() + INTERVAL;
            let ms = snapshot.time.duration_since(self.start).as_millis() as u64;
            let mut frames = Frames::default();
            match &self.shown {
                None => frames.event("experts", &first(&snapshot, &model, ms)),
                Some((before, sent)) => {
                    let cells = changes(&before.experts, &snapshot.experts);
                    let is_new = !cells.is_empty() || before.figures != snapshot.figures;
                    if !is_new && sent.elapsed() < SILENCE {
                        continue;
                    }
                    frames.event("change", &change(&snapshot, cells, ms));
                }
            }
            self.shown = Some((snapshot, Instant::now()));
            return Some(frames.take());
        }
    }
}

/// `GET /moeba/experts`
pub fn stream(app: &Arc<App>, query: &str) -> ApiResult<Response<Body>> {
    if !app.options.slots {
        return Err(ApiError::not_supported("start the server without --no-slots to have this"));
    }
    app.open_models()?;
    let model = app.looked_at(query)?.ok_or_else(ApiError::not_loaded)?;
    app.viewers.enter()?;
    let (id, load, now) = (model.id(), model.load, Instant::now());
    let view = View { app: app.clone(), id, load, start: now, shown: None, next: now };
    Ok(events(Bytes::new(), view))
}

/// The first event: the model, the plan of its memory, and every expert.
fn first(snapshot: &Snapshot, service: &Service, ms: u64) -> Value {
    let engine = service.engine();
    let plan = engine.plan();
    let mut all = snapshot.experts.iter();
    let (mut layers, mut places) = (Vec::new(), Vec::new());
    for (layer, n_experts) in snapshot.n_experts.iter().enumerate().filter(|(_, n)| **n > 0) {
        let digits = all.by_ref().take(*n_experts).map(|expert| digit(expert).to_string());
        places.push(Value::String(digits.collect()));
        layers.push(json!({ "layer": layer, "n_experts": n_experts }));
    }
    let n_all = snapshot.experts.len().max(1) as u64;
    let mut event = json!({
        "ms": ms,
        "model": service.info.name(),
        "fingerprint": service.info.fingerprint,
        "layers": layers,
        "places": places,
        "hits": snapshot.experts.iter().map(|expert| expert.n_hits).collect::<Vec<_>>(),
        "misses": snapshot.experts.iter().map(|expert| expert.n_misses).collect::<Vec<_>>(),
        "k": plan.k,
        "expert_bytes": plan.sizes.expert_bytes / n_all,
        "policy": engine.expert_counters().map(|_| plan.policy.to_string()),
        "memory": memory(plan),
    });
    if let Some(event) = event.as_object_mut() {
        event.extend(snapshot.figures.clone());
    }
    event
}

fn change(snapshot: &Snapshot, cells: Vec<u32>, ms: u64) -> Value {
    let mut event = snapshot.figures.clone();
    event.insert("ms".into(), ms.into());
    event.insert("cells".into(), cells.into());
    Value::Object(event)
}

/// Four numbers for each expert that is not as before: its index among all, its place, and the
/// hits and misses since.
fn changes(before: &[PlacedExpert], now: &[PlacedExpert]) -> Vec<u32> {
    let mut cells = Vec::new();
    for (i, (old, new)) in before.iter().zip(now).enumerate().filter(|(_, (old, new))| old != new) {
        let hits = new.n_hits.wrapping_sub(old.n_hits);
        let misses = new.n_misses.wrapping_sub(old.n_misses);
        cells.extend([i as u32, digit(new), hits, misses]);
    }
    cells
}

/// The place of an expert: 0 on disk, 1 on its way, 2 in RAM in part, 3 in RAM, 4 in VRAM.
fn digit(expert: &PlacedExpert) -> u32 {
    expert.place as u32
}

/// Counts since the start, and the slots.
fn figures(service: &Service) -> Map<String, Value> {
    let status = service.status();
    let counts = &status.counts;
    let traffic = service.engine().expert_traffic();
    let pages = status.page_counts;
    let mut figures = Map::new();
    let mut set = |name: &str, value: Value| figures.insert(name.into(), value);
    set("prompt", json!({ "tokens": counts.n_prompt, "ns": counts.prompt_ns }));
    let decode = json!({ "tokens": counts.n_decode, "ns": counts.decode_ns });
    set("decode", decode);
    set("disk", traffic.disk.as_ref().map_or(Value::Null, traffic_of));
    set("link", traffic.link.as_ref().map_or(Value::Null, traffic_of));
    set("slots", slot_list(service, &status));
    set("n_queued", status.n_queued.into());
    let pages = json!({
        "n": status.n_pages,
        "bytes": status.page_bytes,
        "hits": pages.n_hits,
        "misses": pages.n_misses,
    });
    set("pages", pages);
    figures
}

/// The counters of a link.
fn traffic_of(counters: &Counters) -> Value {
    json!({
        "hits": counters.hits_whole,
        "partial": counters.hits_partial,
        "misses": counters.misses,
        "read_bytes": counters.read_bytes,
        "busy_ns": counters.busy_ns,
        "stall_ns": counters.stall_ns,
        "prefetch_used_bytes": counters.prefetch_used_bytes,
        "prefetch_wasted_bytes": counters.prefetch_wasted_bytes,
        "resident_bytes": counters.resident_bytes,
    })
}

/// Bytes of the plan. `budget` is the memory that streamed experts have; without one they are in
/// place.
fn memory(plan: &MemoryPlan) -> Value {
    let device = |part: &DevicePart| {
        let devices = part.names.iter().zip(&part.plan.devices).enumerate();
        let device = devices.map(|(i, (name, room))| {
            let all = part.plan.planned_bytes(i);
            json!({ "name": name, "experts": room.expert_budget_bytes, "all": all })
        });
        Value::Array(device.collect())
    };
    json!({
        "experts": plan.sizes.expert_bytes,
        "budget": plan.expert_budget(),
        "dense": plan.sizes.dense_bytes,
        "kv": plan.sizes.kv_bytes - plan.page_bytes.min(plan.sizes.kv_bytes),
        "pages": plan.page_bytes,
        "bodies": plan.body_bytes,
        "buffers": plan.sizes.buffer_bytes,
        "available": plan.sizes.available,
        "devices": plan.device.as_ref().map_or(json!([]), device),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ExpertPlace;

    #[test]
    fn changes_are_what_is_not_as_before() {
        let expert = |place, n_hits, n_misses| PlacedExpert { place, n_hits, n_misses };
        let before = [
            expert(ExpertPlace::Disk, 0, 0),
            expert(ExpertPlace::Ram, 7, 1),
            PlacedExpert::default(),
        ];
        let now = [
            expert(ExpertPlace::InFlight, 0, 1),
            expert(ExpertPlace::Ram, 7, 1),
            expert(ExpertPlace::Vram, 2, 0),
        ];
        assert_eq!(changes(&before, &now), [0, 1, 0, 1, 2, 4, 2, 0]);
        assert!(changes(&now, &now).is_empty());
        let wrapped = [expert(ExpertPlace::Ram, u32::MAX, 0)];
        assert_eq!(changes(&wrapped, &[expert(ExpertPlace::Ram, 1, 0)]), [0, 3, 2, 0]);
    }

    #[test]
    fn viewers_are_bounded() {
        let viewers = Viewers::default();
        assert!((0..MAX_VIEWERS).all(|_| viewers.enter().is_ok()));
        assert!(viewers.enter().is_err());
        viewers.leave();
        assert!(viewers.enter().is_ok());
    }
}
