//! The simulator against the live engine: on the same routing, with the same budget and policy,
//! both count the same hits, misses and bytes. The live engine runs in lockstep (see
//! `StreamOptions`), so that nothing depends on how long a read takes.

use moeba::engine::{
    Engine, EngineOptions, EvalHooks, Recorder, RouteRows, Session, TestHooks, Want,
};
use moeba::experts::Counters;
use moeba::policy::{PolicySpec, Profile};
use moeba::trace::{
    Budget, Caching, CostModel, Device, Geometry, Host, Mode, Pass, Recorded, Routing, SimOptions,
    Tiers, Token, TokenLayer, simulate_policy,
};
use std::path::Path;
use std::sync::Arc;

/// Prompts and what follows each, token by token.
fn requests() -> Vec<(Vec<u32>, Vec<u32>)> {
    let lengths = [(7, 9), (1, 12), (13, 1), (4, 20)];
    let text = |seed: u64, (prompt, decode): (usize, usize)| {
        let mut tokens = common::stream::tokens(prompt + decode, seed);
        let rest = tokens.split_off(prompt);
        (tokens, rest)
    };
    lengths.iter().enumerate().map(|(i, lengths)| text(i as u64, *lengths)).collect()
}

/// Writes down everything that a replay can ask for, as it is.
struct Scribe<'a> {
    recorded: &'a mut Recorded,
    /// The first token of the pass.
    first: usize,
}

impl Recorder for Scribe<'_> {
    fn pass(&mut self, tokens: &[u32], embeddings: &[f32]) {
        self.first = self.recorded.tokens.len();
        let n_layers = self.recorded.n_experts.len();
        for embedding in embeddings.chunks_exact(embeddings.len() / tokens.len()) {
            let layers = vec![TokenLayer::default(); n_layers];
            self.recorded.tokens.push(Token { embedding: embedding.to_vec(), layers });
        }
        let tokens = self.first..self.recorded.tokens.len();
        let passes = self.recorded.requests.last_mut().unwrap();
        passes.push(Pass { is_prompt: passes.is_empty(), tokens });
    }

    fn routed(&mut self, layer: usize, route: RouteRows<'_>, hidden: &[f32]) {
        let n = self.recorded.tokens.len() - self.first;
        let rows = |all: &[f32], i: usize| all[i * all.len() / n..(i + 1) * all.len() / n].to_vec();
        for i in 0..n {
            let to = &mut self.recorded.tokens[self.first + i].layers[layer];
            to.probs = rows(&route.probs, i);
            to.hidden = rows(hidden, i);
            to.chosen = route.chosen[i * route.k..(i + 1) * route.k].to_vec();
        }
    }

    fn n_ahead(&self) -> usize {
        1
    }

    fn ahead(&mut self, layer: usize, _distance: usize, probs: &[f32]) {
        self.recorded.tokens[self.first].layers[layer].ahead.push(probs.to_vec());
    }
}

/// Each request in a session of its own, as a server would.
fn serve(engine: &Arc<Engine>, mut listen: impl FnMut(&mut Session, &[u32])) {
    for (prompt, rest) in requests() {
        let mut session = engine.new_session().unwrap();
        listen(&mut session, &prompt);
        rest.iter().for_each(|token| listen(&mut session, &[*token]));
    }
}

fn record(path: &Path) -> Recorded {
    let engine = Engine::load(path, &EngineOptions::default(), &mut |_| ()).unwrap();
    let layers = 0..engine.n_layers();
    let n_experts = layers.map(|l| engine.model().routed_experts(l).map_or(0, |l| l.n_experts));
    let mut recorded = Recorded {
        n_experts: n_experts.collect(),
        k: engine.model().hyper().routing.k,
        ..Recorded::default()
    };
    serve(&engine, |session, tokens| {
        if session.n_past() == 0 {
            recorded.requests.push(Vec::new());
        }
        let mut scribe = Scribe { recorded: &mut recorded, first: 0 };
        let hooks = EvalHooks { recorder: Some(&mut scribe), ..EvalHooks::default() };
        session.eval_with(tokens, Want::None, hooks).unwrap();
    });
    recorded
}

fn live(path: &Path, options: &EngineOptions) -> Counters {
    let engine = common::stream::load(path, options);
    serve(&engine, |session, tokens| {
        session.eval(tokens, Want::None).unwrap();
    });
    common::stream::expect_rest(&engine);
    engine.expert_counters().unwrap()
}

fn replay(path: &Path, options: &EngineOptions, recorded: &Recorded) -> Counters {
    let (plan, layout) = Engine::tier_of(path, options).unwrap().unwrap();
    let geometry = Geometry::published("mixtral-8x7b").unwrap();
    let device = Device::by_name("rtx3090").unwrap();
    let options = SimOptions {
        policy: options.policy,
        profile: Profile::default(),
        geometry,
        costs: CostModel::derive(&device, &Host::XEON_6230R, &geometry),
        budget: Budget::Share(1.0),
        caching: Caching::Keep,
        mode: Mode::Lockstep,
        n_warm_up: 0,
    };
    let build = |shape: &_| options.policy.build(shape, &options.profile);
    simulate_policy(recorded, &options, Tiers { plan, layout }, build).unwrap().counters
}

/// Counters that do not depend on time.
fn counted(c: &Counters) -> Vec<(&'static str, u64)> {
    vec![
        ("whole hits", c.hits_whole),
        ("partial hits", c.hits_partial),
        ("misses", c.misses),
        ("demanded bytes", c.demand_bytes),
        ("prefetched bytes that were used", c.prefetch_used_bytes),
        ("prefetched bytes that were not", c.prefetch_wasted_bytes),
        ("read bytes", c.read_bytes),
        ("reads", c.n_reads),
        ("resident bytes", c.resident_bytes),
    ]
}

fn compare(path: &Path, shares: &[f64], policies: &[&str]) {
    let recorded = record(path);
    assert_eq!(recorded.n_requests(), requests().len());
    for &share in shares {
        let mut answers = Vec::new();
        for policy in policies {
            let options = EngineOptions {
                ram: common::stream::budget(path, share),
                policy: policy.parse::<PolicySpec>().unwrap(),
                test: TestHooks { lockstep: true, ..Default::default() },
                n_threads: Some(1),
                ..EngineOptions::default()
            };
            let (live, replayed) = (live(path, &options), replay(path, &options, &recorded));
            assert_eq!(counted(&live), counted(&replayed), "{policy} at {share}");
            answers.push(counted(&live));
        }
        // Policies that all do the same would prove little.
        answers.sort();
        answers.dedup();
        assert!(answers.len() > policies.len() / 2, "{} kinds at {share}", answers.len());
    }
}

const POLICIES: &[&str] = &[
    "on-demand",
    "mixtral-offloading",
    "predictor=none,eviction=lfu",
    "predictor=none,eviction=lcp",
    "predictor=next-layer,eviction=random",
    "deepspeed",
    "brainstorm",
    "moe-infinity",
    "finemoe",
    "predictor=next-layer,eviction=lcp,split=0.5",
    "predictor=eamc,eviction=scan-resistant",
    "predictor=none,eviction=hot",
    "predictor=trajectory,eviction=scan-resistant",
    "predictor=trajectory,eviction=lru",
];

#[test]
fn replay_counts_what_the_engine_counts() {
    compare(&common::repo().join("models/demo/moeba-demo.gguf"), &[0.05, 0.5], POLICIES);
}

#[test]
fn and_so_with_experts_of_several_granules_and_slots_of_several_sizes() {
    let folder = tempfile::tempdir().unwrap();
    compare(&common::stream::wide(folder.path()), &[0.25, 0.6], POLICIES);
}
