//! The layer that predicts the token after the next: its logits are those of a reference, and its
//! drafts and look-aheads change no bit of a text.

use common::edits::File;
use common::jobs::{Text, compare_drafts as compare, core, run_in};
use common::{Npy, argmax, convert_golden, golden_options, load, read_ids, repo};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{
    DraftCounts, DraftSource, Engine, EngineOptions, Limits, Request, Speculation, TestHooks, Want,
};
use moeba::sample::SamplerOptions;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One of each architecture that has such a layer.
const MODELS: [&str; 4] = ["glm4moe", "glm4_moe_lite", "qwen3next", "qwen35moe"];

fn engine(name: &str, folder: &Path, ram: RamBudget) -> Arc<Engine> {
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

/// A model whose layers change the residual stream little, and whose layer that predicts passes the
/// next token's embedding on: every router sees in its state what it will see in the token's.
fn transparent(folder: &Path) -> PathBuf {
    let path = convert_golden("qwen3next", "f32", folder);
    let mut file = File::read(&path);
    for tensor in &mut file.tensors {
        let mut values = tensor.f32s();
        let is = |end: &str| tensor.name.ends_with(end);
        if is("attn_output.weight") || is("ssm_out.weight") || tensor.name.contains(".ffn_down") {
            values.iter_mut().for_each(|v| *v *= 0.01);
        } else if is("nextn.enorm.weight") {
            values.fill(1.0);
        } else if is("nextn.eh_proj.weight") {
            // [n_embd, 2 · n_embd], the embedding first
            let n_in = tensor.dims[0] as usize;
            let at = |i: usize| f32::from(u8::from(i % n_in == i / n_in));
            values.iter_mut().enumerate().for_each(|(i, v)| *v = at(i));
        }
        tensor.bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    }
    let path = folder.join("transparent.gguf");
    file.write(&path);
    path
}

/// With part of the experts, where times do not matter.
fn streamed(path: &Path, policy: &str, predicts_next: bool) -> Arc<Engine> {
    let options = EngineOptions {
        predicts_next,
        n_ctx: Some(256),
        ram: RamBudget::Percent(80.0),
        policy: policy.parse().unwrap(),
        test: TestHooks { lockstep: true, ..TestHooks::default() },
        ..golden_options()
    };
    load(path, &options)
}

/// A long answer without drafts, bytes of experts that were prefetched and used, prefetched in vain
/// and demanded, and the policy's verdict.
fn foretold(path: &Path, policy: &str, predicts_next: bool) -> (Text, [u64; 3], Option<String>) {
    let engine = streamed(path, policy, predicts_next);
    let base = request(0.8);
    let limits = Limits { n_predict: Some(160), ..base.limits.clone() };
    let (text, drafts) = run_in(&mut core(&engine, 1, 0), &engine, &Request { limits, ..base });
    assert_eq!((drafts.all().n, text.tokens.len()), (0, 160));
    let c = engine.disk_counters().unwrap();
    let bytes = [c.prefetch_used_bytes, c.prefetch_wasted_bytes, c.demand_bytes];
    (text, bytes, engine.model().hierarchy().verdict())
}

const ALONE: &str = "predictor=next-token,eviction=lru";

#[test]
fn experts_that_the_layer_foretells_are_prefetched_and_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = transparent(folder.path());
    let (text, [used, wasted, demanded], verdict) = foretold(&path, ALONE, true);
    let (without, [used_without, wasted_without, demanded_without], none) =
        foretold(&path, ALONE, false);
    assert!(text == without);
    assert!(verdict.as_deref().is_some_and(|v| v.ends_with("in 4 of 4 layers")), "{verdict:?}");
    assert_eq!(none, None);
    // The prompt prefetches whole layers in both.
    let (used, wasted) = (used - used_without, wasted.saturating_sub(wasted_without));
    assert!(used > 20 * wasted, "{used} bytes used, {wasted} wasted");
    // Before the first decision nothing is prefetched.
    assert!(
        3 * demanded < 2 * demanded_without,
        "{demanded} bytes demanded, not {demanded_without}"
    );
}

/// Layers with random weights foretell nothing.
#[test]
fn a_look_ahead_that_is_wrong_prefetches_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["qwen3next", "qwen35moe"] {
        let path = convert_golden(name, "f32", folder.path());
        let (text, bytes, verdict) = foretold(&path, ALONE, true);
        let (without, bytes_without, _) = foretold(&path, ALONE, false);
        assert!(text == without, "{name}");
        assert_eq!(bytes, bytes_without, "{name}");
        assert!(verdict.is_some_and(|v| v.contains("no look-ahead")), "{name}");
    }
}

/// With drafts and without.
#[test]
fn look_aheads_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = transparent(folder.path());
    for policy in ["predictor=trajectory,eviction=scan-resistant", "predictor=next-token"] {
        let (text, _, _) = foretold(&path, policy, true);
        assert!(text == foretold(&path, policy, false).0, "{policy}");
        let engine = streamed(&path, policy, true);
        let drafted = compare(&engine, policy, &request(0.8), &[]).of(DraftSource::Layer);
        assert!(drafted.n > 40, "{policy}: {drafted:?}");
    }
}
