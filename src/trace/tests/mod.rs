//! Replays of made-up routing: what must hold whatever was routed, and small cases by hand.

mod lists;
mod made_up;

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::experts::Counters;
use crate::policy::{
    Costs, Event, Eviction, Expert, LayerShare, Lru, NextLayer, Policy, Prediction, Predictor,
    Shape, Splitter, Wants,
};
use made_up::*;

fn demands(counters: &Counters) -> u64 {
    counters.hits_whole + counters.hits_partial + counters.misses
}

/// Experts that passes demand, each once a pass.
fn demanded(routing: &Recorded) -> u64 {
    let mut n = 0;
    for pass in routing.requests.iter().flatten() {
        for layer in 0..N_EXPERTS.len() {
            let tokens = &routing.tokens[pass.tokens.clone()];
            let chosen = tokens.iter().flat_map(|t| &t.layers[layer].chosen);
            n += chosen.collect::<BTreeSet<_>>().len() as u64;
        }
    }
    n
}

fn check_conservation(report: &Report, routing: &Recorded) {
    let c = &report.counters;
    assert_eq!(demands(c), demanded(routing));
    let accounted =
        c.demand_bytes + c.prefetch_used_bytes + c.prefetch_wasted_bytes + c.prefetch_pending_bytes;
    assert_eq!(c.read_bytes, accounted);
    assert_eq!(c.read_bytes, c.n_reads * GEOMETRY.slot_bytes() as u64);
    assert!(c.resident_bytes_max <= report.plan_bytes);
    let kinds = [&report.prompt, &report.decode];
    assert_eq!(c.stall_ns, kinds.map(|kind| kind.timing.stall_ns).iter().sum::<u64>());
    assert_eq!(demands(c), kinds.map(|kind| demands(&kind.counters)).iter().sum::<u64>());
    for (a, b) in report.timeline.iter().zip(report.timeline.iter().skip(1)) {
        assert_eq!(a.end_ns(), b.start_ns);
    }
    let last = report.timeline.last().unwrap().end_ns();
    // What is under way at the end is brought to its end.
    let transfers = (c.read_bytes as f64 / 2e9 * 1e9) as u64;
    assert!(c.busy_ns >= transfers && c.busy_ns <= last + transfers, "{c:?} {last}");
}

proptest! {
    #[test]
    fn bytes_and_hits_add_up(
        seed: u64,
        share in 0.45f64..1.1,
        n_prompt in 0usize..6,
        policy in prop::sample::select(&POLICIES[..]),
        caching in prop::sample::select(&[Caching::Keep, Caching::Release][..]),
    ) {
        let routing = routing(seed, 3, n_prompt, 12);
        let options = SimOptions { caching, ..options(policy, share) };
        check_conservation(&simulate(&routing, &options).unwrap(), &routing);
    }

    #[test]
    fn equal_seeds_give_equal_reports(
        seed: u64,
        policy in prop::sample::select(&POLICIES[..]),
    ) {
        let routing = routing(seed, 2, 3, 10);
        let mut options = options(policy, 0.5);
        (options.costs.link.jitter_ns, options.costs.link.seed) = (5000, seed);
        let report = simulate(&routing, &options).unwrap();
        prop_assert_eq!(&report, &simulate(&routing, &options).unwrap());
        options.costs.link.seed = !seed;
        prop_assert_ne!(report.tpot, simulate(&routing, &options).unwrap().tpot);
    }

    /// Without prediction, what is read does not depend on the link, so time can only grow.
    #[test]
    fn a_slower_link_is_never_faster_on_demand(seed: u64, share in 0.45f64..1.0) {
        let routing = routing(seed, 2, 0, 15);
        let mut last: Option<Report> = None;
        for rate in [1e12, 8e9, 2e9, 5e8, 1e8] {
            let options = SimOptions { costs: costs(rate), ..options("on-demand", share) };
            let report = simulate(&routing, &options).unwrap();
            if let Some(faster) = &last {
                prop_assert!(report.tpot.mean >= faster.tpot.mean);
                prop_assert_eq!(report.counters.read_bytes, faster.counters.read_bytes);
                prop_assert_eq!(report.counters.misses, faster.counters.misses);
            }
            last = Some(report);
        }
    }

    /// A slow predictor that takes no time is a fast one; in lockstep it never takes any.
    #[test]
    fn a_search_without_time_is_none(seed: u64) {
        let routing = routing(seed, 2, 3, 10);
        let options = options("mixtral-offloading", 0.5);
        let slow = |options: &SimOptions| {
            let tiers = Tiers::of(&routing, options).unwrap();
            simulate_policy(&routing, options, tiers, slow_next_layer).unwrap()
        };
        prop_assert_eq!(slow(&options), simulate(&routing, &options).unwrap());
        let mut late = SimOptions { mode: Mode::Lockstep, ..options.clone() };
        late.costs.search_ns = 1_000_000;
        let in_step = SimOptions { mode: Mode::Lockstep, ..options };
        prop_assert_eq!(slow(&late), simulate(&routing, &in_step).unwrap());
    }
}

struct Slow(NextLayer);

impl Predictor for Slow {
    fn observe(&mut self, event: &Event<'_>) {
        self.0.observe(event);
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        self.0.predict(out);
    }

    fn wants(&self) -> Wants {
        self.0.wants()
    }

    fn is_slow(&self) -> bool {
        true
    }
}

fn slow_next_layer(shape: &Shape) -> Policy {
    Policy {
        eviction: Box::new(Lru::new(shape)),
        predictor: Some(Box::new(Slow(NextLayer::new(shape)))),
        splitter: None,
        notes: Vec::new(),
    }
}

/// One token through the model, nothing to wait for: four attentions (one of the dense layer), and
/// in three layers the shared and two routed experts; then the head.
const TOKEN_NS: f64 = 4.0 * (50.0 + 150.0) + 3.0 * (30.0 + 2.0 * 400.0) + 70.0;

#[test]
fn without_a_link_to_wait_for_a_token_takes_its_computation() {
    let routing = routing(1, 2, 5, 20);
    for policy in POLICIES {
        let mut free = options(policy, 0.5);
        free.costs.link = LinkCosts::new(f64::INFINITY, 0, 2);
        for mode in [Mode::Timed, Mode::Lockstep] {
            let report = simulate(&routing, &SimOptions { mode, ..free.clone() }).unwrap();
            assert_eq!((report.tpot.p50, report.tpot.p99), (TOKEN_NS, TOKEN_NS), "{policy}");
            assert_eq!(report.counters.stall_ns, 0);
            check_kinds(&report);
        }
    }
}

fn check_kinds(report: &Report) {
    let n = report.decode.n_tokens as u64;
    assert_eq!(report.decode.timing.experts_ns, n * 3 * 800);
    assert_eq!(report.decode.timing.head_ns, n * 70);
    assert_eq!(report.decode.dense_ns(), n * (4 * 200 + 3 * 30 + 70));
}

#[test]
fn with_room_for_all_each_expert_is_missed_once() {
    let routing = routing(2, 3, 4, 30);
    let mut used = BTreeSet::new();
    for token in &routing.tokens {
        for (l, layer) in token.layers.iter().enumerate() {
            used.extend(layer.chosen.iter().map(|e| (l, *e)));
        }
    }
    // In lockstep, so that a prompt's layer prefetch has landed as a whole when the layer is
    // reached.
    let cold = SimOptions { mode: Mode::Lockstep, ..options("on-demand", 1.0) };
    let c = simulate(&routing, &cold).unwrap().counters;
    // An expert is missed, or predicted and no miss; all are of one size.
    let expert_bytes = c.demand_bytes / c.misses;
    let n_prefetched = c.prefetch_used_bytes / expert_bytes;
    assert!(n_prefetched > 0 && c.prefetch_used_bytes.is_multiple_of(expert_bytes));
    assert_eq!(c.misses + n_prefetched, used.len() as u64);
    assert_eq!(c.hits_partial, 0);
    // Warmed up, nothing is left to read.
    let warm = SimOptions { n_warm_up: 2, ..cold };
    let mut again = routing.clone();
    again.requests[2] = again.requests[0].clone();
    let report = simulate(&again, &warm).unwrap();
    assert_eq!((report.counters.misses, report.counters.read_bytes), (0, 0));
    assert_eq!(report.tpot.p99, TOKEN_NS);
    assert_eq!(report.timeline.len(), 31);
}

/// One layer, one expert of two granules, by hand: 100 ns of attention, a read of 500 bytes at 1
/// byte a ns with a latency of 10 ns, 60 ns of computation a granule, a head of 5 ns.
#[test]
fn a_miss_takes_its_reads_and_the_last_granule() {
    let layers = vec![TokenLayer { chosen: vec![0], ..TokenLayer::default() }];
    let token = Token { id: None, embedding: vec![], layers };
    let decode = |t| Pass { tokens: t..t + 1, is_prompt: false };
    let routing = Recorded {
        n_experts: vec![1],
        k: 1,
        requests: vec![vec![decode(0), decode(1)]],
        tokens: vec![token.clone(), token],
    };
    let roofline = |memory_ns| Roofline { launch_ns: 0.0, memory_ns, token_ns: 0.0 };
    let options = SimOptions {
        geometry: Geometry { expert_bytes: 1000, n_granules: 2, ..GEOMETRY },
        costs: CostModel {
            link: LinkCosts::new(1e9, 10, 2),
            expert: roofline(120.0),
            attention: roofline(100.0),
            shared: roofline(0.0),
            head: roofline(5.0),
            ..costs(1e9)
        },
        ..options("on-demand", 1.0)
    };
    let walls = |options: &SimOptions| {
        let report = simulate(&routing, options).unwrap();
        report.timeline.iter().map(|i| i.timing.wall_ns).collect::<Vec<_>>()
    };
    // The second read's latency passes beside the first read; the first granule is computed
    // beside the second read.
    assert_eq!(walls(&options), [100 + (10 + 500 + 500) + 60 + 5, 100 + 120 + 5]);
    let mut one_by_one = options.clone();
    one_by_one.costs.link.depth = 1;
    assert_eq!(walls(&one_by_one), [100 + 2 * (10 + 500) + 60 + 5, 100 + 120 + 5]);
}

#[test]
fn released_experts_are_missed_each_time() {
    let routing = routing(3, 2, 3, 20);
    let replay = |policy| {
        let costs = costs(1e10);
        let options = SimOptions { caching: Caching::Release, costs, ..options(policy, 0.6) };
        simulate(&routing, &options).unwrap()
    };
    let (on_demand, ahead) = (replay("on-demand"), replay("mixtral-offloading"));
    assert_eq!(on_demand.counters.misses, demanded(&routing));
    assert_eq!(on_demand.counters.demand_bytes, 4000 * demanded(&routing));
    // Whatever is there on demand has been prefetched.
    let hits = ahead.counters.hits_whole + ahead.counters.hits_partial;
    assert!(hits > 0 && hits * 1000 <= ahead.counters.prefetch_used_bytes);
    assert!(ahead.decode.stall_ns_per_token() < on_demand.decode.stall_ns_per_token());
}

#[test]
fn prediction_pays_where_the_link_is_idle() {
    let routing = routing(4, 3, 4, 40);
    let on_demand = simulate(&routing, &options("on-demand", 0.5)).unwrap();
    let ahead = simulate(&routing, &options("mixtral-offloading", 0.5)).unwrap();
    // Some of them come in part.
    assert!(ahead.counters.misses < on_demand.counters.misses);
    assert!(ahead.counters.prefetch_used_bytes > ahead.counters.prefetch_wasted_bytes);
    assert!(ahead.tpot.mean < on_demand.tpot.mean);
    // A search that takes several tokens finds nothing in time.
    let mut late = options("mixtral-offloading", 0.5);
    late.costs.search_ns = 10 * TOKEN_NS as u64;
    let tiers = Tiers::of(&routing, &late).unwrap();
    let late = simulate_policy(&routing, &late, tiers, slow_next_layer).unwrap();
    assert!(late.counters.misses > ahead.counters.misses);
}

/// Shares of the layers are planned by the machine's costs.
#[test]
fn a_splitter_cuts_experts_in_two() {
    struct Half;
    impl Splitter for Half {
        fn observe(&mut self, _: &Event<'_>) {}

        fn is_due(&self) -> bool {
            true
        }

        fn plan(&mut self, given: &Costs) -> Option<Vec<LayerShare>> {
            assert_eq!(*given, costs(2e9).timer(&GEOMETRY, K));
            Some(vec![LayerShare { n_slots: usize::MAX, keep: 2 }; N_EXPERTS.len()])
        }
    }
    let routing = routing(8, 2, 0, 40);
    let replay = |is_split: bool| {
        let build = |shape: &Shape| Policy {
            eviction: Box::new(Lru::new(shape)),
            predictor: None,
            splitter: is_split.then(|| Box::new(Half) as Box<dyn Splitter>),
            notes: Vec::new(),
        };
        let options = options("on-demand", 0.5);
        let tiers = Tiers::of(&routing, &options).unwrap();
        simulate_policy(&routing, &options, tiers, build).unwrap()
    };
    let (split, whole) = (replay(true).counters, replay(false).counters);
    // More experts are there, of fewer of them all.
    assert!(split.hits_partial > 2 * whole.hits_partial && split.hits_whole < whole.hits_whole);
    assert!(split.misses < whole.misses);
}

#[test]
fn a_budget_that_is_too_small_is_refused() {
    let routing = routing(5, 1, 0, 1);
    let error = simulate(&routing, &options("on-demand", 0.01)).unwrap_err().to_string();
    assert!(error.contains("12000"), "{error}");
    let exact = SimOptions { budget: Budget::Bytes(12_000), ..options("on-demand", 0.0) };
    assert_eq!(simulate(&routing, &exact).unwrap().plan_bytes, 12_000);
}

/// Policies hear what the engine tells them, in its order.
#[test]
fn events_come_in_the_engines_order() {
    struct Listening(std::sync::mpsc::Sender<String>);
    impl Eviction for Listening {
        fn observe(&mut self, event: &Event<'_>) {
            let text = match event {
                Event::Routed(r) => format!("routed {} {:?}", r.layer, r.chosen),
                Event::PromptRouted(r) => {
                    format!("prompt {} {} {:?}", r.layer, r.n_tokens, r.counts)
                }
                Event::IterationStart { phase, embedding, .. } => {
                    format!("start {phase:?} {embedding:?}")
                }
                Event::IterationEnd { phase, timing, .. } => {
                    assert!(timing.wall_ns >= timing.stall_ns + timing.experts_ns);
                    format!("end {phase:?}")
                }
                Event::RequestStart { .. } => "request".into(),
                Event::RequestEnd { .. } => "over".into(),
                Event::NextToken { .. } => "next token".into(),
                Event::Predicted { .. } => "predicted".into(),
                Event::Expected { .. } => "expected".into(),
            };
            self.0.send(text).unwrap();
        }

        fn priority(&self, _: Expert) -> f64 {
            0.0
        }
    }
    let mut routing = routing(6, 1, 2, 1);
    for (t, [a, b]) in [[0, 1], [1, 2], [3, 4]].into_iter().enumerate() {
        routing.tokens[t].embedding = vec![t as f32, 1.0];
        for l in [0, 2, 3] {
            routing.tokens[t].layers[l].chosen = vec![a, b];
        }
    }
    let (sender, events) = std::sync::mpsc::channel();
    let options = options("on-demand", 1.0);
    let tiers = Tiers::of(&routing, &options).unwrap();
    let build = |_: &Shape| Policy {
        eviction: Box::new(Listening(sender)),
        predictor: None,
        splitter: None,
        notes: Vec::new(),
    };
    simulate_policy(&routing, &options, tiers, build).unwrap();
    let expected = [
        "request",
        "start Prompt [0.5, 1.0]",
        "prompt 0 2 [1, 2, 1, 0, 0, 0]",
        "prompt 2 2 [1, 2, 1, 0, 0, 0, 0, 0]",
        "prompt 3 2 [1, 2, 1, 0, 0, 0]",
        "end Prompt",
        "start Decode [2.0, 1.0]",
        "routed 0 [3, 4]",
        "routed 2 [3, 4]",
        "routed 3 [3, 4]",
        "end Decode",
        "over",
    ];
    assert_eq!(events.iter().collect::<Vec<_>>(), expected);
}

/// Writes routing as `trace record` does, exactly.
fn traced(routing: &Recorded) -> format::Trace {
    let layers = routing.n_experts.iter().map(|&n_experts| match n_experts {
        0 => format::LayerShape::default(),
        n_experts => {
            let (expert_bytes, n_granules, slot_bytes) = (4000, 4, 1000);
            format::LayerShape { n_experts, expert_bytes, n_granules, slot_bytes }
        }
    });
    let header = format::Header {
        n_embd: 4,
        k: routing.k,
        layers: layers.collect(),
        precision: format::Precision::Exact,
        ahead: 1,
        ..format::Header::default()
    };
    let mut writer = format::Writer::new(Vec::new(), header).unwrap();
    for request in &routing.requests {
        writer.begin_request("test").unwrap();
        for pass in request {
            let tokens = &routing.tokens[pass.tokens.clone()];
            let ids: Vec<u32> = pass.tokens.clone().map(|token| token as u32).collect();
            let embeddings: Vec<f32> = tokens.iter().flat_map(|t| t.embedding.clone()).collect();
            writer.begin_pass(pass.phase(), &ids, &embeddings).unwrap();
            for layer in (0..N_EXPERTS.len()).filter(|l| N_EXPERTS[*l] > 0) {
                let of = |token: &Token| token.layers[layer].clone();
                let chosen: Vec<u32> = tokens.iter().flat_map(|t| of(t).chosen).collect();
                let probs: Vec<f32> = tokens.iter().flat_map(|t| of(t).probs).collect();
                writer.routed(layer, &chosen, &probs);
                writer.ahead(layer, 1, &tokens[0].layers[layer].ahead[0]);
            }
        }
    }
    format::Trace::decode(&writer.finish().unwrap(), std::path::Path::new("test")).unwrap()
}

#[test]
fn a_trace_replays_as_what_was_traced() {
    let routing = routing(7, 3, 5, 20);
    let trace = traced(&routing);
    let traced = Traced::new(&trace, 512);
    for policy in POLICIES {
        let options = options(policy, 0.5);
        let report = simulate(&routing, &options).unwrap();
        assert_eq!(simulate(&traced, &options).unwrap(), report, "{policy}");
        // Its own experts are as large as those of the geometry.
        let tiers = Tiers::plan(&traced.needs(), options.budget, options.caching).unwrap();
        let build = |shape: &Shape| options.policy.build(shape, &options.profile);
        assert_eq!(simulate_policy(&traced, &options, tiers, build).unwrap(), report);
    }
    // A prompt of five tokens in parts of two.
    let passes = Traced::new(&trace, 2).passes(1);
    let lengths: Vec<_> = passes.iter().map(|p| (p.tokens.len(), p.is_prompt)).collect();
    assert_eq!(lengths[..4], [(2, true), (2, true), (1, true), (1, false)]);
    assert_eq!((lengths.len(), passes[0].tokens.start), (23, 25));
}
