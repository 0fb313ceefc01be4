//! Drafts on the emulated device: a text has the tokens and the bits that it has without them. Of
//! models with a recurrent state refused drafts are taken back by copies of it, and where a layer
//! of the model drafts, it reads the device's outputs.

use crate::support::choice;
use common::jobs::{compare_drafts, core, run_in};
use common::{convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::Config;
use moeba::engine::{DraftSource, EngineOptions, Limits, Request};
use moeba::sample::SamplerOptions;
use std::path::Path;

fn on_device(seed: u64) -> EngineOptions {
    let device = choice(Config { seed, ..Config::default() });
    EngineOptions { device, n_ctx: Some(96), ..golden_options() }
}

/// All layers on the device, half of the experts, and some layers on either side.
fn placements(seed: u64) -> [(&'static str, EngineOptions); 3] {
    let vram = "50%".parse().unwrap();
    [
        ("all", on_device(seed)),
        ("half of the experts", EngineOptions { vram, ..on_device(seed + 1) }),
        ("two layers", EngineOptions { gpu_layers: Some(2), ..on_device(seed + 2) }),
    ]
}

fn request(temp: f32) -> Request {
    Request {
        prompt: (0..30).map(|i| (i * 37 + i * i) % 300 + 3).collect(),
        limits: Limits { n_predict: Some(12), ignore_eos: true, ..Limits::default() },
        sampling: SamplerOptions { temp, seed: Some(5), ..SamplerOptions::default() },
        ..Request::default()
    }
}

/// A text is predicted rightly, and then with errors.
fn check_states(path: &Path, what: &str, options: &EngineOptions) {
    let engine = load(path, options);
    let request = request(0.0);
    let (text, _) = run_in(&mut core(&engine, 1, 0), &engine, &request);
    let mut prediction: Vec<u32> = text.tokens.iter().map(|(id, _)| *id).collect();
    let right = compare_drafts(&engine, what, &request, &prediction).of(DraftSource::Prediction);
    assert!(right.n_accepted >= 6 && right.n == right.n_accepted, "{what}: {right:?}");
    prediction.iter_mut().skip(2).step_by(3).for_each(|id| *id = (*id + 1) % 300);
    let wrong = compare_drafts(&engine, what, &request, &prediction).of(DraftSource::Prediction);
    assert!(wrong.n_accepted > 0 && wrong.n > wrong.n_accepted, "{what}: {wrong:?}");
}

#[test]
fn models_with_a_state_go_back_to_it() {
    let dir = tempfile::tempdir().unwrap();
    for (seed, name) in ["qwen3next", "qwen35moe"].into_iter().enumerate() {
        let path = convert_golden(name, "f32", dir.path());
        let n = if seed == 0 { 3 } else { 1 };
        for (what, options) in placements(seed as u64).into_iter().take(n) {
            check_states(&path, &format!("{name}, {what}"), &options);
        }
    }
}

#[test]
fn the_layer_that_predicts_drafts_beside_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["glm4moe", "glm4_moe_lite", "qwen3next", "qwen35moe"];
    for (seed, name) in names.into_iter().enumerate() {
        let path = convert_golden(name, "f32", dir.path());
        let placed = placements(seed as u64 + 5);
        for (what, options) in placed.into_iter().skip(seed % 3).take(1) {
            let engine = load(&path, &EngineOptions { predicts_next: true, ..options });
            let drafts = compare_drafts(&engine, &format!("{name}, {what}"), &request(0.8), &[]);
            let drafted = drafts.of(DraftSource::Layer);
            assert!(drafted.n > 8, "{name}, {what}: {drafted:?}");
        }
    }
}

/// The layer's logits are those that it has beside a model on the CPU.
#[test]
fn the_layer_sees_the_outputs_of_the_device() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["glm4moe", "qwen3next"] {
        let path = convert_golden(name, "f32", dir.path());
        let logits = |options: &EngineOptions| {
            let engine = load(&path, &EngineOptions { predicts_next: true, ..options.clone() });
            let mut session = engine.new_session().unwrap();
            session.eval(&[3, 1, 4, 1, 5, 9, 2, 6], moeba::engine::Want::Last).unwrap();
            session.eval(&[5], moeba::engine::Want::Last).unwrap();
            session.next_token_logits(3).unwrap().unwrap()
        };
        let expected = logits(&golden_options());
        let largest = expected.iter().fold(0f32, |most, v| most.max(v.abs()));
        for (what, options) in placements(20) {
            let got = logits(&options);
            let worst =
                got.iter().zip(&expected).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(worst < 1e-3 * largest, "{name}, {what}: off by {worst} of {largest}");
        }
    }
}
