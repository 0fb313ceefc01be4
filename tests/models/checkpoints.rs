//! Models with a recurrent state: texts go on from checkpoints, with the bits that they have alone.

use common::jobs::{TOKENS, alone, core, job, prompt, run};
use common::{convert_golden, golden_options, load};
use moeba::engine::{Engine, EngineOptions, FinishReason, Generator, Limits, Request};
use moeba::sample::SamplerOptions;
use std::sync::Arc;

const MODELS: [&str; 9] = [
    "qwen3next",
    "qwen35moe",
    "jamba",
    "kimi-linear",
    "kimi-k3",
    "deepseek4",
    "deepseek41",
    "glm5-next",
    "qwen4exp",
];

/// Room for all that a test keeps.
const ROOM: usize = 64 << 20;

fn model(name: &str) -> Arc<Engine> {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden(name, "f32", dir.path());
    let n_ctx = Some(512);
    let options =
        EngineOptions { n_ctx, n_ubatch: Some(100), n_threads: Some(1), ..golden_options() };
    load(&path, &options)
}

#[test]
fn a_text_goes_on_from_the_last_checkpoint_before_it_parts() {
    for name in MODELS {
        let engine = model(name);
        let first = prompt(300, 200, 1);
        let longer = [&first[..], &[9; 20]].concat();
        let cases = [
            (first.clone(), 0),
            // The first prompt's last whole page.
            (longer, 256),
            // Nothing is kept where this one parts; from now on there is.
            (prompt(300, 200, 2), 0),
            (prompt(290, 200, 3), 192),
            // From pages: the session has had other texts since.
            (first.clone(), 256),
            (first[..256].to_vec(), 192),
        ];
        for page_bytes in [ROOM, 0] {
            let mut core = core(&engine, 1, page_bytes);
            let mut n_before = 0;
            for (i, (prompt, n_reused)) in cases.iter().enumerate() {
                let (texts, status) = run(&engine, &mut core, &[prompt]);
                assert_eq!(texts[0].tokens.len(), TOKENS);
                assert_eq!(texts[0], alone(&engine, prompt), "{name}: text {i}");
                let n = (status.counts.n_reused - n_before) as usize;
                assert_eq!(n, if page_bytes > 0 { *n_reused } else { 0 }, "{name}: text {i}");
                n_before = status.counts.n_reused;
                assert_eq!(status.n_checkpoints > 0, page_bytes > 0);
            }
        }
    }
}

#[test]
fn texts_that_begin_alike_compute_their_beginning_once() {
    let engine = model(MODELS[0]);
    let prompts: Vec<_> = (0..3).map(|kind| prompt(300, 220, kind)).collect();
    let prompts: Vec<&[u32]> = prompts.iter().chain(&prompts[..1]).map(Vec::as_slice).collect();
    let (texts, status) = run(&engine, &mut core(&engine, 4, ROOM), &prompts);
    for (text, prompt) in texts.iter().zip(&prompts) {
        assert_eq!(*text, alone(&engine, prompt));
    }
    // 192 tokens of two of them, and at least 256 of the one that is there twice.
    let n_prompt = status.counts.n_prompt as usize;
    assert!(n_prompt <= 4 * 300 - 2 * 192 - 256, "{n_prompt}");
}

#[test]
fn a_cancelled_pass_costs_what_follows_the_last_checkpoint() {
    for (name, page_bytes, n_left) in [(MODELS[0], ROOM, 192), (MODELS[1], 0, 0)] {
        let engine = model(name);
        let mut core = core(&engine, 1, page_bytes);
        let prompt = prompt(300, 300, 0);
        let (job, sink) = job(&engine, &prompt, Some(2 * engine.n_layers() + 2));
        core.submit(job);
        while core.step() {}
        assert_eq!(sink.text.lock().unwrap().end, Some(FinishReason::Cancelled));
        assert_eq!(core.board().read().slots[0].n_past, n_left);
        let (texts, status) = run(&engine, &mut core, &[&prompt]);
        assert_eq!(texts[0], alone(&engine, &prompt));
        assert_eq!(status.counts.n_reused as usize, n_left);
    }
}

/// As in a chat: the last answer is asked for again, or a turn follows whose template has dropped
/// a part of the answer.
#[test]
fn a_generator_goes_on_from_its_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden(MODELS[0], "f32", dir.path());
    let first = prompt(200, 200, 0);
    let second = [&first[..], &[9; 30]].concat();
    for (n_checkpoints, n_reused) in [(4, [0, 192, 192, 192]), (0, [0; 4])] {
        let options = EngineOptions { n_ctx: Some(512), n_checkpoints, ..golden_options() };
        let engine = load(&path, &options);
        assert_eq!(engine.plan().page_bytes > 0, n_checkpoints > 0);
        let mut generator = Generator::new(&engine).unwrap();
        for (prompt, n_reused) in [&first, &first, &first, &second].into_iter().zip(n_reused) {
            let limits = Limits { n_predict: Some(8), ignore_eos: true, ..Limits::default() };
            let sampling = SamplerOptions { seed: Some(3), ..SamplerOptions::default() };
            let prompt = prompt.clone();
            let request = Request { prompt, limits, sampling, ..Request::default() };
            let mut texts = [String::new(), String::new()];
            let generate = |generator: &mut Generator, text: &mut String| {
                let mut sink = |more: &str| {
                    text.push_str(more);
                    Ok(())
                };
                generator.generate(&request, &mut sink).unwrap()
            };
            let outcome = generate(&mut generator, &mut texts[0]);
            assert_eq!(outcome.n_reused, n_reused, "{n_checkpoints} checkpoints");
            generate(&mut Generator::new(&engine).unwrap(), &mut texts[1]);
            assert_eq!(texts[0], texts[1]);
        }
        generator.clear();
        assert_eq!(generator.n_past(), 0);
    }
}
