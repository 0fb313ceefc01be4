//! Texts on the emulated device come back from pages and go on from checkpoints, with the bits that
//! they have alone.

use crate::support::choice;
use common::jobs::{Text, alone, core, job, prompt, run};
use common::{convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::Config;
use moeba::engine::{CacheType, DeviceChoice, Engine, EngineOptions, FinishReason};
use std::collections::HashMap;
use std::sync::Arc;

/// Room for all that a test keeps.
const ROOM: usize = 64 << 20;

/// The emulated device looks at all memory of a pass at each launch: passes are small.
fn on_device(types: [CacheType; 2], n_ctx: usize, n_ubatch: usize) -> EngineOptions {
    let device = choice(Config { seed: 1, ..Config::default() });
    let [cache_type_k, cache_type_v] = types;
    let (n_ctx, n_ubatch) = (Some(n_ctx), Some(n_ubatch));
    EngineOptions { device, cache_type_k, cache_type_v, n_ctx, n_ubatch, ..golden_options() }
}

/// Prompts one after the other in one session: each has the text that it has alone, and of its
/// tokens the cache has so many.
fn check(engine: &Arc<Engine>, what: &str, cases: &[(&[u32], usize)]) -> Vec<Text> {
    let mut core = core(engine, 1, ROOM);
    let (mut n_before, mut known, mut all) = (0, HashMap::new(), Vec::new());
    for (i, (prompt, n_reused)) in cases.iter().enumerate() {
        let (mut texts, status) = run(engine, &mut core, &[prompt]);
        let n = status.counts.n_reused as usize - n_before;
        assert_eq!(n, *n_reused, "{what}: text {i}");
        // One without anything before it is alone.
        let text = if n == 0 { texts[0].clone() } else { alone(engine, prompt) };
        let expected = known.entry(*prompt).or_insert(text);
        assert_eq!(texts[0], *expected, "{what}: text {i}");
        n_before += n;
        all.push(texts.remove(0));
    }
    all
}

/// A text, another one in its place, and the first one again, of which a page is there.
fn comes_back(engine: &Arc<Engine>, what: &str) {
    let texts = [prompt(80, 0, 1), prompt(70, 0, 2)];
    check(engine, what, &[(&texts[0], 0), (&texts[1], 0), (&texts[0], 64)]);
}

/// Keys and values by head, latent rows, windows with sinks, states; layers on either side.
#[test]
fn a_text_comes_back_in_pages() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("qwen3moe", [CacheType::F16, CacheType::Q8_0], None),
        ("deepseek_v2", [CacheType::F32, CacheType::F32], None),
        ("gpt_oss", [CacheType::BF16, CacheType::F16], Some(2)),
        ("qwen3moe", [CacheType::Q4_0, CacheType::Q5_1], Some(3)),
        ("qwen35moe", [CacheType::F32, CacheType::F32], Some(3)),
        // A past without a state, a state without a past, both, and layers on either side.
        ("lfm2moe", [CacheType::F32, CacheType::F32], None),
        ("minimax-01", [CacheType::F32, CacheType::F32], None),
        ("nemotron_h_moe", [CacheType::F32, CacheType::F32], None),
        ("jamba", [CacheType::F32, CacheType::F32], None),
        ("kimi-linear", [CacheType::F32, CacheType::F32], Some(3)),
        // Keys of an indexer beside latent rows, and behind heads of keys.
        ("glm-dsa", [CacheType::F16, CacheType::Q8_0], None),
        ("mistral-large4", [CacheType::F16, CacheType::Q8_0], Some(4)),
        ("minimax-m3", [CacheType::F16, CacheType::Q8_0], None),
        // Keys of blocks, and what is kept of one that is not whole.
        ("glm5-next", [CacheType::F32, CacheType::F16], None),
        ("qwen4exp", [CacheType::F16, CacheType::F32], Some(3)),
        // Compressed rows, those of an indexer, and the rows that make the next ones.
        ("deepseek4", [CacheType::F16, CacheType::F32], Some(2)),
    ];
    for (name, types, gpu_layers) in cases {
        let path = convert_golden(name, "q8_0", dir.path());
        let options = EngineOptions { gpu_layers, ..on_device(types, 96, 32) };
        comes_back(&load(&path, &options), name);
    }
}

#[test]
fn a_text_goes_on_from_the_last_checkpoint_before_it_parts() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3next", "f32", dir.path());
    let engine = load(&path, &on_device([CacheType::F32; 2], 160, 64));
    let [first, second, third] = [1, 2, 3].map(|kind| prompt(150, 100, kind));
    let cases: [(&[u32], usize); 4] = [
        (&first, 0),
        // Nothing is kept where this one parts; from now on there is.
        (&second, 0),
        (&third, 64),
        // From pages, of which there are two.
        (&first, 128),
    ];
    check(&engine, "qwen3next", &cases);
    is_cancelled_in_the_second_pass(&engine, &first);
}

/// The text is left up to the first pass's checkpoint.
fn is_cancelled_in_the_second_pass(engine: &Arc<Engine>, prompt: &[u32]) {
    let mut core = core(engine, 1, ROOM);
    let (job, sink) = job(engine, prompt, Some(engine.n_layers() + 2));
    core.submit(job);
    while core.step() {}
    assert_eq!(sink.text.lock().unwrap().end, Some(FinishReason::Cancelled));
    assert_eq!(core.board().read().slots[0].n_past, 64);
    let (texts, status) = run(engine, &mut core, &[prompt]);
    assert_eq!(texts[0], alone(engine, prompt));
    assert_eq!(status.counts.n_reused, 64);
}

/// Hashes of the tokens behind a checkpoint are of those before it, too, and a convolution carries
/// on what they made. The checkpoint is in the middle of a pass.
#[test]
fn ngrams_go_on_from_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen4exp", "q8_0", dir.path());
    let on_device =
        |gpu_layers| EngineOptions { gpu_layers, ..on_device([CacheType::F32; 2], 96, 70) };
    let on_cpu = EngineOptions { device: DeviceChoice::Cpu, ..on_device(None) };
    let [first, second] = [1, 2].map(|kind| prompt(80, 72, kind));
    let mut expected = None;
    // Layer 1 has n-grams.
    let cases = [(on_cpu, None), (on_device(None), Some(0)), (on_device(Some(3)), Some(3))];
    for (options, start) in cases {
        let engine = load(&path, &options);
        let plan = engine.plan().device.as_ref().map(|device| device.plan.gpu_layers.start);
        assert_eq!(plan, start);
        let what = format!("layers from {start:?} on a device");
        let texts = check(&engine, &what, &[(&first, 0), (&second, 64), (&first, 64)]);
        assert_eq!(*expected.get_or_insert_with(|| texts.clone()), texts, "{what}");
    }
}

/// Sessions copy from each other what they have in common.
#[test]
fn texts_that_begin_alike_compute_their_beginning_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3next", "q8_0", dir.path());
    let engine = load(&path, &on_device([CacheType::F32; 2], 96, 64));
    let prompts = [1, 2].map(|kind| prompt(90, 70, kind));
    let rows: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let (texts, status) = run(&engine, &mut core(&engine, 2, ROOM), &rows);
    for (text, prompt) in texts.iter().zip(&prompts) {
        assert_eq!(*text, alone(&engine, prompt));
    }
    assert_eq!(status.counts.n_prompt, 2 * 90 - 64);
}
