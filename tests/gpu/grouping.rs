//! Prompts whose pairs of rows and experts the device groups: they have the bits of those that the
//! host groups, and count as they do.

use crate::support::{at_rest, choice};
use common::stream::wide;
use common::{convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::Config;
use moeba::engine::{Engine, EngineOptions, Want};
use moeba::experts::{Counters, ExpertPlace};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn on_device(seed: u64) -> EngineOptions {
    let device = choice(Config { seed, ..Config::default() });
    EngineOptions { device, n_ctx: Some(96), ..golden_options() }
}

/// Some tokens, or one of them again and again: then all rows choose much the same experts.
fn text(n: usize, is_skewed: bool) -> Vec<u32> {
    let id = |i: u32| if is_skewed { 40 } else { (i * 37) % 90 + 3 };
    (0..n as u32).map(id).collect()
}

/// The bits of all logits of a prompt. The host groups the pairs if the experts are recorded.
fn answer(engine: &Arc<Engine>, text: &[u32], is_recorded: bool) -> Vec<u32> {
    let (mut session, mut out) = (engine.new_session().unwrap(), Vec::new());
    session.record_experts(is_recorded);
    session.eval_all(text, &mut |_, l| out.extend(l.iter().map(|l| l.to_bits()))).unwrap();
    drop(session);
    at_rest(engine, Duration::from_secs(20));
    out
}

/// The place of each expert of each layer that has some.
fn places(engine: &Engine) -> Vec<Vec<ExpertPlace>> {
    let mut layers = Vec::new();
    for l in 0..engine.n_layers() {
        let mut experts = Vec::new();
        engine.report_experts(l, &mut experts);
        if !experts.is_empty() {
            layers.push(experts.iter().map(|expert| expert.place).collect());
        }
    }
    layers
}

/// Computes prompts until all experts are in VRAM. Returns the number of layers that have some.
fn load_all(engine: &Arc<Engine>) -> usize {
    let start = Instant::now();
    loop {
        let places = places(engine);
        if places.iter().flatten().all(|place| *place == ExpertPlace::Vram) {
            return places.len();
        }
        assert!(start.elapsed() < Duration::from_secs(60), "not all experts are in VRAM");
        answer(engine, &text(20, false), false);
    }
}

/// Layers that the device has grouped so far, and that the host read first; and the use of experts.
fn counts(engine: &Engine) -> ([usize; 2], Counters) {
    let counts = engine.graph_counts().unwrap();
    let link = engine.model().hierarchy().link_counters().unwrap();
    ([counts.n_grouped, counts.n_read_first], link)
}

fn uses(now: &Counters, before: &Counters) -> [u64; 4] {
    let since = now.since(before);
    [since.hits_whole, since.hits_partial, since.misses, since.demand_bytes]
}

/// A prompt in `n_passes`, grouped by the device and by the host.
fn compare(engine: &Arc<Engine>, what: &str, text: &[u32], n_layers: usize, n_passes: usize) {
    let before = counts(engine);
    let got = answer(engine, text, false);
    let between = counts(engine);
    let expected = answer(engine, text, true);
    let after = counts(engine);
    let n = n_layers * n_passes;
    assert_eq!([between.0[0] - before.0[0], between.0[1] - before.0[1]], [n, 0], "{what}");
    assert_eq!([after.0[0] - between.0[0], after.0[1] - between.0[1]], [0, n], "{what}");
    assert!(got == expected, "{what}: {} tokens", text.len());
    assert_eq!(uses(&between.1, &before.1), uses(&after.1, &between.1), "{what}");
}

fn check(path: &Path, what: &str, seed: u64, texts: &[(usize, bool)]) {
    let engine = load(path, &on_device(seed));
    let n_layers = load_all(&engine);
    assert!(n_layers > 0, "{what}");
    for (n, is_skewed) in texts {
        compare(&engine, what, &text(*n, *is_skewed), n_layers, 1);
    }
    let cpu = load(path, &EngineOptions { n_ctx: Some(96), ..golden_options() });
    let text = text(12, false);
    assert!(answer(&engine, &text, false) == answer(&cpu, &text, false), "{what}: the CPU");
}

/// Experts without rows and with one, and one with more rows than a tile has; biases, groups of
/// experts, and layers without any.
#[test]
fn the_device_groups_as_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["qwen3moe", "gpt_oss_mxfp4", "deepseek_v3", "qwen2moe_mixed"];
    for (seed, name) in names.into_iter().enumerate() {
        let texts = [(9, false), (33, false), (80, true)];
        check(&convert_golden(name, "q8_0", dir.path()), name, seed as u64, &texts);
    }
}

#[test]
fn experts_of_several_granules() {
    let dir = tempfile::tempdir().unwrap();
    check(&wide(dir.path()), "several granules", 3, &[(10, false), (9, true)]);
}

/// The last micro-batch of eight rows or fewer is not grouped, and the host reads its route.
#[test]
fn micro_batches() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "q8_0", dir.path());
    for (n_ubatch, n, n_passes) in [(11, 33, 3), (23, 41, 2), (64, 83, 2)] {
        let engine = load(&path, &EngineOptions { n_ubatch: Some(n_ubatch), ..on_device(5) });
        let n_layers = load_all(&engine);
        compare(&engine, &format!("-ub {n_ubatch}"), &text(n, false), n_layers, n_passes);
        let before = counts(&engine).0;
        engine.new_session().unwrap().eval(&text(n_ubatch + 5, false), Want::Last).unwrap();
        let after = counts(&engine).0;
        assert_eq!([after[0] - before[0], after[1] - before[1]], [n_layers; 2], "-ub {n_ubatch}");
    }
}

/// The host groups in each layer that lacks an expert.
#[test]
fn layers_that_lack_experts() {
    let dir = tempfile::tempdir().unwrap();
    for path in [convert_golden("qwen3moe", "q8_0", dir.path()), wide(dir.path())] {
        let cpu = load(&path, &EngineOptions { n_ctx: Some(96), ..golden_options() });
        let text = text(11, false);
        let expected = answer(&cpu, &text, false);
        for (seed, share) in ["50%", "95%"].into_iter().enumerate() {
            let vram = share.parse().unwrap();
            let engine = load(&path, &EngineOptions { vram, ..on_device(seed as u64) });
            for _ in 0..2 {
                assert!(answer(&engine, &text, false) == expected, "{share}, {}", path.display());
            }
            let ([n_grouped, n_read_first], _) = counts(&engine);
            assert_eq!(n_grouped + n_read_first, 2 * places(&engine).len());
            assert!(n_read_first > 0, "{share}");
        }
    }
}
