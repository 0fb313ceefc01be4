//! Promise 1: streamed experts change no bit, whatever the budget, the policy, the threads, the
//! layout of the file, the way to read it and the order in which the disk answers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::convert_golden;
use common::stream::*;
use moeba::engine::{Engine, EngineOptions, TestHooks, Want};
use moeba::experts::Counters;
use moeba::experts::disk::{Faults, IoKind};
use moeba::gguf::Gguf;
use moeba::model::Bound;
use moeba::policy::{PlacementKind, PolicySpec, SplitKind};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const GOLDEN: [&str; 20] = [
    "afmoe",
    "arctic_mixed",
    "cohere2moe",
    "deepseek_v3",
    "gemma4",
    "glm4moe",
    "gpt_oss",
    "grok",
    "k2-horizon_mova",
    "llama4_hf",
    "mimo2",
    "mistral4",
    "mixtral",
    "nemotron_h_moe",
    "phimoe",
    "qwen2moe",
    "qwen2moe_mixed",
    "qwen3moe",
    "qwen3moe_mixed",
    "qwen3next",
];
const EVICTIONS: [&str; 4] = ["lru", "lfu", "lcp", "random"];
const PREDICTORS: [&str; 2] = ["none", "next-layer"];

/// Everything that can be had without training.
const ALL_EVICTIONS: &[&str] =
    &["lru", "lfu", "lcp", "random", "request-eam", "map", "hot", "scan-resistant"];
const ALL_PREDICTORS: &[&str] =
    &["none", "next-layer", "trajectory", "all-next", "counts", "eamc", "map"];
const ALL_PLACEMENTS: &[PlacementKind] = &[PlacementKind::Demand, PlacementKind::PreSched];
const ALL_SPLITS: &[SplitKind] =
    &[SplitKind::Whole, SplitKind::Fixed(300), SplitKind::Fixed(700), SplitKind::Auto];

/// A file, a request and what in place is answered to it.
#[derive(Debug)]
struct Model {
    path: PathBuf,
    tokens: Vec<u32>,
    expected: Answer,
}

/// Both layouts of a file.
fn both(standard: PathBuf, n_tokens: usize) -> [Model; 2] {
    let tokens = tokens(n_tokens, 1);
    let expected = in_place(&standard, &tokens);
    let model = |path| Model { path, tokens: tokens.clone(), expected: expected.clone() };
    [model(granule_major(&standard)), model(standard)]
}

fn golden(dir: &Path) -> Vec<Model> {
    let types = ["f32", "q8_0"];
    let files = GOLDEN.iter().flat_map(|name| types.map(|ty| convert_golden(name, ty, dir)));
    files.flat_map(|path| both(path, 18)).collect()
}

/// How the same is computed.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// Between the least budget and everything.
    share: f64,
    uring: bool,
    eviction: &'static str,
    predictor: &'static str,
    split: SplitKind,
    placement: PlacementKind,
    n_threads: usize,
    /// Tokens a call and tokens computed at once: 1 is decode.
    part: usize,
    n_ubatch: usize,
    /// Seed of a disk that answers late and out of order.
    late: Option<u64>,
}

const PLAIN: Way = Way {
    share: 0.0,
    uring: true,
    eviction: "lru",
    predictor: "none",
    split: SplitKind::Whole,
    placement: PlacementKind::Demand,
    n_threads: 2,
    part: usize::MAX,
    n_ubatch: 512,
    late: None,
};

/// `lockstep`: hits do not depend on time.
fn engine(path: &Path, way: &Way, lockstep: bool) -> Arc<Engine> {
    let options = EngineOptions {
        n_threads: Some(way.n_threads),
        n_ubatch: Some(way.n_ubatch),
        ram: budget(path, way.share),
        policy: PolicySpec {
            eviction: way.eviction,
            predictor: way.predictor,
            split: way.split,
            placement: way.placement,
        },
        io: if way.uring { uring() } else { IoKind::Pread },
        test: TestHooks {
            faults: way.late.map(|seed| Disk::late(seed, 3000) as Arc<dyn Faults>),
            lockstep,
            ..Default::default()
        },
        ..EngineOptions::default()
    };
    load(path, &options)
}

/// Asks twice, the second time with experts left over from the first.
fn same(model: &Model, way: &Way) -> Counters {
    let engine = engine(&model.path, way, false);
    for round in 0..2 {
        let answer = ask(&engine, &model.tokens, way.part).unwrap();
        let file = model.path.file_name().unwrap();
        assert!(answer.experts == model.expected.experts, "{file:?} {way:?} {round}: experts");
        assert!(answer.logits == model.expected.logits, "{file:?} {way:?} {round}: logits");
        expect_rest(&engine);
    }
    let counters = engine.expert_counters().unwrap();
    // Evictions hear of a layer's routing before they name victims for it.
    assert_eq!(counters.unheard_steps, 0, "{way:?}");
    counters
}

#[test]
fn golden_checkpoints_at_the_extremes() {
    let dir = tempfile::tempdir().unwrap();
    for (i, model) in golden(dir.path()).iter().enumerate() {
        let ways = [(0.0, 1), (0.0, usize::MAX), (1.0, 1), (1.0, usize::MAX)];
        for (j, (share, part)) in ways.into_iter().enumerate() {
            // Files come in pairs: each of a pair is read in the other way.
            let uring = (i + i / 2 + j).is_multiple_of(2);
            let predictor = PREDICTORS[usize::from(uring)];
            let counters =
                same(model, &Way { share, part, uring, predictor, n_ubatch: 8, ..PLAIN });
            assert!(counters.n_reads > 0, "{counters:?}");
            if share == 1.0 {
                // The second time everything is there.
                assert!(counters.hits_whole >= counters.misses, "{counters:?}");
            }
        }
    }
}

#[test]
fn experts_of_several_granules_at_the_extremes() {
    let dir = tempfile::tempdir().unwrap();
    let n_experts = (WIDE_LAYERS * WIDE_EXPERTS) as u64;
    for model in both(wide(dir.path()), 12) {
        let plan = Engine::plan_of(&model.path, &EngineOptions::default()).unwrap();
        let all = plan.sizes.expert_bytes;
        let mut between = Counters::default();
        for (i, eviction) in EVICTIONS.into_iter().enumerate() {
            // Room for one token: nearly everything is evicted before it is asked for again.
            let (uring, predictor) = (i % 2 == 0, PREDICTORS[1]);
            let least = same(&model, &Way { eviction, uring, part: 1, predictor, ..PLAIN });
            assert!(least.misses + least.hits_partial > n_experts, "{least:?}");
            assert!(least.read_bytes > all, "{least:?}");
            let share = [0.3, 0.4, 0.6, 0.75][i];
            let split = [SplitKind::Whole, SplitKind::Fixed(500)][i / 2];
            let more = same(&model, &Way { share, eviction, uring, split, part: 1, ..PLAIN });
            assert!(more.read_bytes < least.read_bytes, "{more:?} {least:?}");
            between = between.plus(&more);
        }
        // A split leaves prefixes, which the next loads complete.
        assert!(between.hits_partial > 0 && between.hits_whole > 0, "{between:?}");
        for uring in [true, false] {
            for n_ubatch in [4, 12] {
                let prompt = same(&model, &Way { uring, n_ubatch, ..PLAIN });
                assert!(prompt.read_bytes > all, "{prompt:?}");
            }
            // Everything: each expert is read once, with its padding.
            let everything = same(&model, &Way { share: 1.0, uring, part: 1, ..PLAIN });
            assert!(everything.misses + everything.hits_partial <= n_experts, "{everything:?}");
            assert!(everything.read_bytes < all * 5 / 4, "{everything:?}");
        }
    }
}

/// Experts that make values move as others do, and are no dense weights.
#[test]
fn experts_of_values_are_streamed() {
    let dir = tempfile::tempdir().unwrap();
    for (name, ty) in [("k2-horizon_mova", "f32"), ("k2-horizon_mova_softmax", "q8_0")] {
        let [_, model] = both(convert_golden(name, ty, dir.path()), 18);
        let bound = Bound::new(Gguf::open(&model.path).unwrap()).unwrap();
        let of = |part: &str| {
            let tensors = bound.gguf().tensors().iter().filter(|t| t.name.contains(part));
            tensors.map(|tensor| tensor.n_bytes).sum::<u64>()
        };
        let (experts, dense) = bound.expert_and_dense_bytes();
        assert_eq!((experts, dense), (of("_exps."), of("") - of("_exps.")), "{name}");
        let n = bound.in_tier().iter().flatten().map(|layer| layer.n_experts as u64).sum();
        assert_eq!(n, 4 * (6 + 8), "experts of values and others in four layers");
        for (i, eviction) in ALL_EVICTIONS.iter().enumerate() {
            let predictor = ALL_PREDICTORS[i % ALL_PREDICTORS.len()];
            let least = same(&model, &Way { eviction, predictor, part: 1, ..PLAIN });
            assert!(least.misses + least.hits_partial > n, "{least:?}");
            let share = [0.25, 0.5, 0.75][i % 3];
            let more = same(&model, &Way { share, eviction, predictor, part: 7, ..PLAIN });
            assert!(more.misses < least.misses, "{more:?} {least:?}");
        }
        let all = same(&model, &Way { share: 1.0, part: 1, ..PLAIN });
        assert!(all.misses + all.hits_partial <= n, "each is read once: {all:?}");
    }
}

fn any_way() -> impl Strategy<Value = Way> {
    let share = prop_oneof![Just(0.0), Just(1.0), 0.0..0.2, 0.0..1.0];
    let (eviction, predictor) =
        (prop::sample::select(ALL_EVICTIONS), prop::sample::select(ALL_PREDICTORS));
    let (split, placement) =
        (prop::sample::select(ALL_SPLITS), prop::sample::select(ALL_PLACEMENTS));
    let policy = (eviction, predictor, split, placement);
    let n_threads = prop::sample::select(vec![1, 2, 4]);
    let part = prop::sample::select(vec![1, 1, 3, 7, usize::MAX]);
    let n_ubatch = prop::sample::select(vec![2, 5, 512]);
    let late = prop::option::of(any::<u64>());
    (share, any::<bool>(), policy, n_threads, part, n_ubatch, late).prop_map(
        |(share, uring, policy, n_threads, part, n_ubatch, late)| {
            let (eviction, predictor, split, placement) = policy;
            Way {
                share,
                uring,
                eviction,
                predictor,
                split,
                placement,
                n_threads,
                part,
                n_ubatch,
                late,
            }
        },
    )
}

#[test]
fn any_way_gives_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let golden = golden(dir.path());
    let wide = both(wide(dir.path()), 12);
    let model = (any::<bool>(), any::<prop::sample::Index>());
    let config =
        Config { cases: 56, failure_persistence: None, max_shrink_iters: 30, ..Config::default() };
    let seen = std::cell::Cell::new(Counters::default());
    let result = TestRunner::new(config).run(&(model, any_way()), |((is_wide, index), way)| {
        let model = if is_wide { index.get(&wide) } else { index.get(&golden) };
        seen.set(same(model, &way).plus(&seen.get()));
        Ok(())
    });
    result.unwrap_or_else(|e| panic!("{e}"));
    let seen = seen.get();
    assert!(seen.hits_whole > 0 && seen.hits_partial > 0 && seen.misses > 0, "{seen:?}");
    assert!(seen.prefetch_used_bytes > 0 && seen.prefetch_wasted_bytes > 0, "{seen:?}");
}

/// A prompt uses most experts of a layer, so the next layer's are read while this one is computed.
#[test]
fn a_prompt_prefetches_its_next_layer() {
    let dir = tempfile::tempdir().unwrap();
    for model in both(wide(dir.path()), 60) {
        for (share, io) in [(0.0, IoKind::Pread), (0.3, uring()), (0.6, IoKind::Pread)] {
            let options = EngineOptions {
                n_threads: Some(2),
                ram: budget(&model.path, share),
                policy: "on-demand".parse().unwrap(),
                io,
                // All prefetches have landed when their layer comes.
                test: TestHooks { lockstep: true, ..Default::default() },
                ..EngineOptions::default()
            };
            let engine = load(&model.path, &options);
            let answer = ask(&engine, &model.tokens, usize::MAX).unwrap();
            assert!(answer == model.expected, "{share}: another answer");
            expect_rest(&engine);
            let counters = engine.expert_counters().unwrap();
            assert!(counters.prefetch_used_bytes > 0, "{share}: {counters:?}");
            // Each expert is used once, whoever asked for it.
            let used = counters.prefetch_used_bytes + counters.demand_bytes;
            let unused = counters.prefetch_wasted_bytes + counters.prefetch_pending_bytes;
            assert_eq!(used + unused, counters.read_bytes, "{share}");
            assert!(counters.prefetch_wasted_bytes < counters.prefetch_used_bytes, "{share}");
        }
    }
}

/// The cost of continuing a text, once the cache is warm, after a prompt of so many tokens.
fn continuation(path: &Path, way: &Way, n_prompt: usize) -> (Counters, Vec<u32>) {
    let engine = engine(path, way, true);
    let mut session = engine.new_session().unwrap();
    let mut decode = |tokens: &[u32]| {
        let mut bits = Vec::new();
        for token in tokens {
            let last = session.eval(&[*token], Want::Last).unwrap().all();
            bits.extend(last.iter().map(|value| value.to_bits()));
        }
        bits
    };
    decode(&tokens(24, 2));
    if n_prompt > 0 {
        ask(&engine, &tokens(n_prompt, 3), usize::MAX).unwrap();
    }
    expect_rest(&engine);
    let before = engine.expert_counters().unwrap();
    let bits = decode(&tokens(12, 4));
    expect_rest(&engine);
    (engine.expert_counters().unwrap().since(&before), bits)
}

/// A prompt takes the room in transit, where experts stay that had to leave the working set; it
/// takes no more, however long it is.
#[test]
fn a_prompt_leaves_the_working_set_alone() {
    let dir = tempfile::tempdir().unwrap();
    for path in [wide(dir.path()), convert_golden("qwen3moe", "f32", dir.path())] {
        let (mut n_hits, mut n_misses) = (0, 0);
        // Less than everything that the text needs, so that no slot is free when the prompt comes.
        for (share, eviction) in [0.1, 0.3, 0.5, 0.7].into_iter().zip(EVICTIONS) {
            let way = Way { share, eviction, n_ubatch: 50, ..PLAIN };
            let [(undisturbed, bits), (short, after_short), (long, after_long)] =
                [0, 50, 200].map(|n| continuation(&path, &way, n));
            assert!(bits == after_short && bits == after_long, "{way:?}");
            let of = |c: &Counters| (c.misses, c.hits_partial, c.hits_whole, c.demand_bytes);
            assert_eq!(of(&short), of(&long), "{way:?}");
            // Transit has an eighth of the room, or that of one expert.
            let read = |c: &Counters| c.misses + c.hits_partial;
            let lost = read(&long).saturating_sub(read(&undisturbed));
            let all = read(&long) + long.hits_whole;
            assert!(8 * lost <= all, "{way:?}: {undisturbed:?} {long:?}");
            (n_hits, n_misses) = (n_hits + undisturbed.hits_whole, n_misses + undisturbed.misses);
        }
        assert!(n_hits > 0 && n_misses > 0);
    }
}
