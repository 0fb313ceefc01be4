//! The layer that predicts the token after the next: its logits are those of a reference, and its
//! drafts change no bit of a text.

use crate::speculation::compare;
use common::{Npy, argmax, convert_golden, golden_options, load, read_ids, repo};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{
    DraftCounts, DraftSource, Engine, EngineOptions, Limits, Request, Speculation, Want,
};
use moeba::sample::SamplerOptions;
use std::sync::Arc;

/// One of each architecture that has such a layer.
const MODELS: [&str; 4] = ["glm4moe", "glm4_moe_lite", "qwen3next", "qwen35moe"];

fn engine(name: &str, folder: &std::path::Path, ram: RamBudget) -> Arc<Engine> {
    let path = convert_golden(name, "f32", folder);
    let more = EngineOptions { predicts_next: true, n_ctx: Some(128), ram, ..golden_options() };
    load(&path, &more)
}

/// `tests/golden/make_next_token.py` has made the logits.
#[test]
fn logits_are_those_of_the_reference() {
    for name in MODELS {
        let folder = tempfile::tempdir().unwrap();
        let expect = repo().join("tests/golden").join(name).join("expect");
        let tokens = read_ids(&expect.join("p17.tokens.json"));
        let wanted = Npy::read(&expect.join("p17.next_token.npy")).f32s();
        let engine = engine(name, folder.path(), RamBudget::Auto);
        let largest = wanted.iter().fold(0f32, |most, v| most.max(v.abs()));
        let (last, rest) = tokens.split_last().unwrap();
        // In one pass, and in parts after some of which the layer computes.
        for part in [rest.len(), 5, 1] {
            let mut session = engine.new_session().unwrap();
            for (i, part) in rest.chunks(part).enumerate() {
                if i % 2 == 1 {
                    session.next_token_logits(part[0]).unwrap().unwrap();
                }
                session.eval(part, Want::Last).unwrap();
            }
            // What was drafted and taken back leaves no trace.
            session.eval(&[1, 2, 3], Want::None).unwrap();
            session.next_token_logits(4).unwrap().unwrap();
            if session.truncate(rest.len()) < rest.len() {
                continue; // a model with a state
            }
            session.truncate(rest.len() - 2);
            session.eval(&rest[rest.len() - 2..], Want::Last).unwrap();
            let got = session.next_token_logits(*last).unwrap().unwrap();
            let worst = got.iter().zip(&wanted).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(worst < 1e-3 * largest, "{name}, parts of {part}: off by {worst} of {largest}");
            assert_eq!(argmax(&got), argmax(&wanted), "{name}");
        }
        let mut session = engine.new_session().unwrap();
        session.eval(rest, Want::Last).unwrap();
        let got = session.next_token_logits(*last).unwrap().unwrap();
        let worst = got.iter().zip(&wanted).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(worst < 1e-3 * largest, "{name}: off by {worst} of {largest}");
    }
}

fn request(temp: f32) -> Request {
    Request {
        prompt: (0..40).map(|i| (i * 37 + i * i) % 300 + 3).collect(),
        limits: Limits { n_predict: Some(40), ignore_eos: true, ..Limits::default() },
        sampling: SamplerOptions { temp, seed: Some(5), ..SamplerOptions::default() },
        speculation: Speculation::default(),
        ..Request::default()
    }
}

/// Random weights draft at random: nearly all drafts are refused, and the states of models that
/// have some are taken back. With some of the experts on disk, too, where a model has enough.
#[test]
fn drafts_of_the_layer_change_nothing() {
    for name in MODELS {
        let few = name.starts_with("qwen").then_some(RamBudget::Percent(80.0));
        for ram in [RamBudget::Auto].into_iter().chain(few) {
            let folder = tempfile::tempdir().unwrap();
            let engine = engine(name, folder.path(), ram);
            for temp in [0.0, 0.8] {
                let counts = compare(&engine, name, &request(temp), &[]);
                let drafted = counts.of(DraftSource::Layer);
                assert!(drafted.n > 40 && drafted.n > drafted.n_accepted, "{name}: {drafted:?}");
            }
        }
    }
}

#[test]
fn without_the_option_nothing_is_loaded_or_drafted() {
    let folder = tempfile::tempdir().unwrap();
    let path = convert_golden("glm4moe", "f32", folder.path());
    let engine = load(&path, &EngineOptions { n_ctx: Some(128), ..golden_options() });
    let counts = compare(&engine, "off", &request(0.8), &[]);
    assert_eq!(counts.of(DraftSource::Layer), DraftCounts::default().all());
    assert!(engine.new_session().unwrap().next_token_logits(3).unwrap().is_none());
}
