//! The simulator against the live engine: on the same routing, with the same budget and policy,
//! both count the same hits, misses and bytes. The live engine runs in lockstep (see
//! `StreamOptions`), so that nothing depends on how long a read takes.

use moeba::engine::{
    Engine, EngineOptions, EvalHooks, ProfileChoice, Recorder, RouteRows, Session, TestHooks, Want,
};
use moeba::experts::Counters;
use moeba::gguf::Gguf;
use moeba::policy::papers::prescope::llapor::{LayerModel, Linear, Loss};
use moeba::policy::{LlaPor, LlaporModel, PolicySpec, Profile};
use moeba::trace::{
    Budget, Caching, CostModel, Device, Geometry, Host, Mode, Pass, Recorded, Routing, SimOptions,
    Tiers, Token, TokenLayer, simulate_policy,
};
use std::path::Path;
use std::sync::Arc;

/// Prompts and what follows each, token by token.
type Requests = Vec<(Vec<u32>, Vec<u32>)>;

/// Prompts and continuations of these lengths.
fn requests(lengths: &[(usize, usize)]) -> Requests {
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
        let rows = embeddings.chunks_exact(embeddings.len() / tokens.len());
        for (id, embedding) in tokens.iter().zip(rows) {
            let layers = vec![TokenLayer::default(); n_layers];
            let embedding = embedding.to_vec();
            self.recorded.tokens.push(Token { id: Some(*id), embedding, layers });
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
            to.probs = rows(route.probs, i);
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
fn serve(engine: &Arc<Engine>, requests: &Requests, mut listen: impl FnMut(&mut Session, &[u32])) {
    for (prompt, rest) in requests {
        let mut session = engine.new_session().unwrap();
        listen(&mut session, prompt);
        rest.iter().for_each(|token| listen(&mut session, &[*token]));
    }
}

fn record(path: &Path, requests: &Requests) -> Recorded {
    let engine = Engine::load(path, &EngineOptions::default(), &mut |_| ()).unwrap();
    let layers = 0..engine.n_layers();
    let n_experts = layers.map(|l| engine.model().routed_experts(l).map_or(0, |l| l.n_experts));
    let mut recorded = Recorded {
        n_experts: n_experts.collect(),
        k: engine.model().hyper().routing.k,
        ..Recorded::default()
    };
    serve(&engine, requests, |session, tokens| {
        if session.n_past() == 0 {
            recorded.requests.push(Vec::new());
        }
        let mut scribe = Scribe { recorded: &mut recorded, first: 0 };
        let hooks = EvalHooks { recorder: Some(&mut scribe), ..EvalHooks::default() };
        session.eval_with(tokens, Want::None, hooks).unwrap();
    });
    recorded
}

fn live(path: &Path, options: &EngineOptions, requests: &Requests) -> Counters {
    let engine = common::stream::load(path, options);
    serve(&engine, requests, |session, tokens| {
        session.eval(tokens, Want::None).unwrap();
    });
    common::stream::expect_rest(&engine);
    engine.expert_counters().unwrap()
}

fn replay(
    path: &Path,
    options: &EngineOptions,
    profile: &Profile,
    recorded: &Recorded,
) -> Counters {
    let (plan, layout) = Engine::tier_of(path, options).unwrap().unwrap();
    let geometry = Geometry::published("mixtral-8x7b").unwrap();
    let device = Device::by_name("rtx3090").unwrap();
    let options = SimOptions {
        policy: options.policy,
        profile: profile.clone(),
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

/// A policy that starts with this profile.
type Start = (&'static str, Profile);

fn compare(
    path: &Path,
    requests: &Requests,
    shares: &[f64],
    starts: impl Fn(&Recorded) -> Vec<Start>,
) {
    let recorded = record(path, requests);
    assert_eq!(recorded.n_requests(), requests.len());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.moeba");
    let key = Gguf::open(path).unwrap().key();
    let starts = starts(&recorded);
    for &share in shares {
        let mut answers = Vec::new();
        for (policy, profile) in &starts {
            std::fs::write(&file, profile.encode(&key)).unwrap();
            let options = EngineOptions {
                ram: common::stream::budget(path, share),
                policy: policy.parse::<PolicySpec>().unwrap(),
                profile: ProfileChoice::At(file.clone()),
                test: TestHooks { lockstep: true, ..Default::default() },
                n_threads: Some(1),
                ..EngineOptions::default()
            };
            let live = live(path, &options, requests);
            let replayed = replay(path, &options, profile, &recorded);
            assert_eq!(counted(&live), counted(&replayed), "{policy} at {share}");
            answers.push(counted(&live));
        }
        // Policies that all do the same would prove little.
        answers.sort();
        answers.dedup();
        assert!(answers.len() > starts.len() / 2, "{} kinds at {share}", answers.len());
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
    "moepic",
];

/// Policies that need nothing to start with.
fn plain(policies: &[&'static str]) -> Vec<Start> {
    policies.iter().map(|policy| (*policy, Profile::default())).collect()
}

/// LLaPor with networks, which predicts from activations.
fn warm(recorded: &Recorded) -> Vec<Start> {
    let mut networks = Profile::default();
    networks.set(LlaPor::SECTION, networks_of(recorded).encode());
    vec![("prescope", networks)]
}

/// Networks for the model's layers, of random weights.
fn networks_of(recorded: &Recorded) -> LlaporModel {
    let n_embd = recorded.tokens[0].layers.iter().map(|layer| layer.hidden.len()).max().unwrap();
    let mut at = 0;
    let mut linear = |n_out: usize, n_in: usize| {
        let mut list = |n: usize| {
            let numbers = (at..at + n as u64).map(|i| common::stream::mixed(i) % 2001);
            at += n as u64;
            numbers.map(|i| (i as f32 / 1000.0 - 1.0) / (n_in as f32).sqrt()).collect()
        };
        Linear::new(list(n_out * n_in), list(n_out), n_in)
    };
    let moe: Vec<usize> = recorded.n_experts.iter().copied().filter(|n| *n > 0).collect();
    let mut source = *moe.last().unwrap();
    let layers = recorded.n_experts.iter().map(|&n_experts| {
        let n_source = std::mem::replace(&mut source, n_experts);
        (n_experts > 0).then(|| LayerModel {
            compress: linear(4, n_embd),
            input: linear(16, 4 + 2 * n_source),
            residual: None,
            output: linear(n_experts, 16),
            loss: Loss { lambda: 0.5, gamma: 2.0, balance: vec![1.0; n_experts] },
        })
    });
    LlaporModel { layers: layers.collect(), second: Vec::new() }
}

const LENGTHS: &[(usize, usize)] = &[(7, 9), (1, 12), (13, 1), (4, 20)];

#[test]
fn replay_counts_what_the_engine_counts() {
    let demo = common::repo().join("models/demo/moeba-demo.gguf");
    compare(&demo, &requests(LENGTHS), &[0.05, 0.5], |_| plain(POLICIES));
}

#[test]
fn and_so_with_experts_of_several_granules_and_slots_of_several_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let wide = common::stream::wide(folder.path());
    compare(&wide, &requests(LENGTHS), &[0.25, 0.6], |_| plain(POLICIES));
    compare(&wide, &requests(&LENGTHS[..2]), &[0.4], warm);
}

/// Algorithm 1 plans from what a request has done so far.
#[test]
fn and_so_within_a_long_request() {
    let folder = tempfile::tempdir().unwrap();
    let wide = common::stream::wide(folder.path());
    compare(&wide, &requests(&[(9, 220)]), &[0.4], |_| {
        plain(&["moepic", "predictor=trajectory,split=auto"])
    });
}
