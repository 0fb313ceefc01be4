//! Tokens that are one graph: their bits, what is launched, when they are, what policies hear.

use crate::support::choice;
use common::{convert_golden, golden_options, load};
use moeba::Result;
use moeba::backend::gpu::emulated::{Config, Faults, Queues};
use moeba::engine::{DeviceChoice, Engine, EngineOptions, Logits, Session, TestHooks, TopK, Want};
use moeba::experts::{ExpertPlace, PlacedExpert};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const DECODED: usize = 21;

fn options(config: Config) -> EngineOptions {
    let vram = "100%".parse().unwrap();
    EngineOptions { device: choice(config), vram, n_ctx: Some(40), ..golden_options() }
}

fn by_layer(options: EngineOptions) -> EngineOptions {
    EngineOptions { test: TestHooks { by_layer: true, ..options.test }, ..options }
}

fn places(engine: &Engine) -> Vec<PlacedExpert> {
    let mut places = Vec::new();
    (0..engine.n_layers()).for_each(|l| engine.model().hierarchy().report(l, &mut places));
    places
}

fn has_all(engine: &Engine) -> bool {
    places(engine).iter().all(|expert| expert.place == ExpertPlace::Vram)
}

fn is_at_rest(engine: &Engine) -> bool {
    engine.model().hierarchy().check_integrity()
}

/// Waits for an idle link to bring all experts; false if it does not.
fn fill(engine: &Engine, most: Duration) -> bool {
    let start = Instant::now();
    while !(has_all(engine) && is_at_rest(engine)) {
        if start.elapsed() > most {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

fn filled(path: &Path, options: &EngineOptions) -> Arc<Engine> {
    let engine = load(path, options);
    assert!(fill(&engine, Duration::from_secs(60)));
    engine
}

fn begin(engine: &Arc<Engine>) -> Result<Session> {
    let mut session = engine.new_session()?;
    session.eval(&[3, 40, 77], Want::Last)?;
    Ok(session)
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// The logits of token `i` behind the prompt.
fn eval(session: &mut Session, i: usize) -> Result<Vec<u32>> {
    session.eval(&[token(i)], Want::Last).map(|logits| bits(logits.all()))
}

fn token(i: usize) -> u32 {
    3 + (11 + 37 * i as u32) % 90
}

fn decode(engine: &Arc<Engine>) -> Vec<Vec<u32>> {
    let mut session = begin(engine).unwrap();
    (0..DECODED).map(|i| eval(&mut session, i).unwrap()).collect()
}

/// Models with layers of all kinds, and nodes of a token.
const KINDS: [(&str, usize); 13] = [
    ("qwen3moe", 45),
    ("llama", 36),
    ("gpt_oss", 31),
    ("deepseek_v3", 89),
    ("arctic", 47),
    ("qwen3next", 92),
    ("nemotron_h_moe", 53),
    ("llama4_hf", 63),
    ("grovemoe", 60),
    ("gemma4_shared_hf", 175),
    ("glm-dsa", 140),
    ("deepseek4", 201),
    ("qwen4exp", 259),
];

#[test]
fn tokens_of_all_kinds_of_layers_are_one_graph() {
    let dir = tempfile::tempdir().unwrap();
    for (seed, (name, n_nodes)) in KINDS.into_iter().enumerate() {
        let path = convert_golden(name, "q8_0", dir.path());
        let device = options(Config { seed: seed as u64, ..Config::default() });
        let (cpu, vram) = (DeviceChoice::Cpu, Default::default());
        let cpu = load(&path, &EngineOptions { device: cpu, vram, ..device.clone() });
        let expected = decode(&cpu);

        let engine = filled(&path, &device);
        assert!(decode(&engine) == expected, "{name}");
        let one = engine.graph_counts().unwrap();
        let counted = (one.n_tokens_captured, one.n_token_runs, one.n_launches, one.n_token_nodes);
        assert_eq!(counted, (1, DECODED, DECODED, n_nodes), "{name}");

        let engine = filled(&path, &by_layer(device));
        assert!(decode(&engine) == expected, "{name}, layer by layer");
        let parts = engine.graph_counts().unwrap();
        // A routed layer has two graphs behind its look-up, which is a launch of its own.
        let n_routed = parts.nodes.iter().filter(|[_, experts]| *experts > 0).count();
        let n_graphs = parts.nodes.len() + 2 * n_routed;
        assert_eq!((parts.n_token_runs, parts.n_launches), (0, DECODED * n_graphs), "{name}");
        assert!(n_nodes > n_routed + parts.nodes.iter().flatten().sum::<usize>(), "{name}");
    }
}

#[test]
fn a_token_has_the_same_bits_on_any_queues() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "q8_0", dir.path());
    let expected = decode(&filled(&path, &by_layer(options(Config::default()))));
    for queues in Queues::ALL {
        for (seed, waits) in [(0, None), (1, Some(true)), (2, Some(false)), (3, None)] {
            let config = Config { seed, queues, waits, ..Config::default() };
            let engine = filled(&path, &options(config));
            assert!(decode(&engine) == expected, "{queues:?}, {waits:?}, {seed}");
            assert_eq!(engine.graph_counts().unwrap().n_launches, DECODED);
        }
    }
}

/// A graph that chooses more logits than are wanted serves a token.
#[test]
fn a_graph_chooses_the_best_logits() {
    let dir = tempfile::tempdir().unwrap();
    // The second's logits are divided.
    for name in ["qwen3moe", "granitemoe"] {
        let path = convert_golden(name, "q8_0", dir.path());
        let one = options(Config::default());
        let engines = [filled(&path, &one), filled(&path, &by_layer(one))];
        let n_vocab = engines[0].tokenizer().n_vocab();
        let best = |k| Want::LastBest(TopK { k, n_vocab });
        // With the number of graphs captured by then. No device chooses 257.
        let wanted = [
            (Want::Last, 1),
            (best(1), 2),
            (best(5), 3),
            (best(3), 3),
            (Want::Last, 3),
            (Want::None, 3),
            (best(40), 4),
            (best(257), 4),
            (best(1), 4),
        ];
        let mut sessions = engines.each_ref().map(|engine| begin(engine).unwrap());
        for (i, (want, n_captured)) in wanted.into_iter().enumerate() {
            let [got, expected] =
                sessions.each_mut().map(|session| match session.eval(&[token(i)], want).unwrap() {
                    _ if want == Want::None => Default::default(),
                    Logits::All(all) => (Vec::new(), bits(all)),
                    Logits::Best { ids, logits } => (ids.to_vec(), bits(logits)),
                });
            assert_eq!(got, expected, "{name}: token {i}, {want:?}");
            let counts = engines[0].graph_counts().unwrap();
            let counted = (counts.n_tokens_captured, counts.n_launches);
            assert_eq!(counted, (n_captured, i + 1), "{name}: token {i}, {want:?}");
        }
    }
}

/// Experts come as they are demanded. As long as one is absent, and whenever someone records it, a
/// token is computed layer by layer.
#[test]
fn a_token_is_one_graph_when_all_experts_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("mixtral", "q8_0", dir.path());
    for seed in 0..2 {
        let test = TestHooks { lockstep: true, cpu_share: Some(0.0), ..Default::default() };
        let one = EngineOptions { test, ..options(Config { seed, ..Config::default() }) };
        let engines = [one.clone(), by_layer(one)].map(|options| load(&path, &options));
        let mut sessions = engines.each_ref().map(|engine| begin(engine).unwrap());
        let (mut n_by_layer, mut n_runs) = (0, 0);
        for i in 0..36 {
            let is_recorded = n_runs > 0 && i % 4 == 1;
            n_runs += usize::from(has_all(&engines[0]) && !is_recorded);
            n_by_layer += usize::from(n_runs == 0);
            let [got, expected] = sessions.each_mut().map(|session| {
                session.record_experts(is_recorded);
                (eval(session, i).unwrap(), session.take_experts())
            });
            assert!(got == expected, "token {i}");
            let counts = engines[0].graph_counts().unwrap();
            let counted = (counts.n_token_runs, counts.n_tokens_captured);
            assert_eq!(counted, (n_runs, n_runs.min(1)), "token {i}");
            let [got, expected] = engines.each_ref().map(|engine| {
                let c = engine.expert_counters().unwrap();
                assert_eq!(c.unheard_steps, 0, "evictions hear of a layer first");
                let hits = [c.hits_whole, c.hits_partial, c.misses, c.hits_prefetched];
                (places(engine), hits, c.demand_bytes, c.read_bytes, c.resident_bytes)
            });
            assert_eq!(got, expected, "token {i}");
        }
        assert!(n_by_layer > 2 && n_runs > 10, "{n_by_layer}, {n_runs}");
    }
}

/// Whatever a driver refuses to make, and whichever operation the device is lost at.
#[test]
fn a_token_that_fails_leaves_nothing_pinned() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "q8_0", dir.path());
    let expected = decode(&filled(&path, &options(Config::default())));
    for (is_lost, step) in [(false, 1), (true, 23)] {
        let mut n_failed = 0;
        for n in (0..).step_by(step) {
            let faults = match is_lost {
                false => Faults { make_at: Some(n), ..Faults::default() },
                true => Faults { lost_at_op: Some(n), ..Faults::default() },
            };
            let config = Config { seed: n, faults, ..Config::default() };
            let Ok(engine) = Engine::load(&path, &options(config), &mut |_| ()) else { continue };
            fill(&engine, Duration::from_millis(300));
            let Ok(mut session) = begin(&engine) else { continue };
            let Some((i, why)) = (0..3).find_map(|i| Some((i, eval(&mut session, i).err()?)))
            else {
                break;
            };
            assert!(is_at_rest(&engine), "{why}");
            assert_eq!(eval(&mut session, i).ok(), (!is_lost).then(|| expected[i].clone()));
            n_failed += 1;
        }
        assert!(n_failed > 0, "{is_lost}");
    }
}
