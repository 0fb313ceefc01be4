//! Steps of decode between the layers of a prompt's pass on the emulated device: every text has the
//! bits that it has alone.

use crate::support::{at_rest, choice};
use common::{convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::Config;
use moeba::engine::{BatchRow, CacheType, Engine, EngineOptions, Interlude, Phase, Session, Want};
use std::sync::Arc;
use std::time::Duration;

const N_PROMPT: usize = 12;

fn tokens(n: usize, first: u32) -> Vec<u32> {
    (0..n).map(|i| (first + 37 * i as u32) % 90 + 3).collect()
}

fn row<'a>(session: &'a mut Session, tokens: &'a [u32], phase: Phase) -> BatchRow<'a> {
    BatchRow { session, tokens, phase, want: Want::Last }
}

fn bits(session: &mut Session) -> Vec<u32> {
    session.logits().all().iter().map(|logit| logit.to_bits()).collect()
}

/// Texts in decode, each with its own beginning.
fn begin(engine: &Arc<Engine>, n: usize) -> Vec<Session> {
    let session = |i: usize| {
        let mut session = engine.new_session().unwrap();
        session.eval(&tokens(5 + i, i as u32), Want::Last).unwrap();
        session
    };
    (0..n).map(session).collect()
}

/// A token of each text: the logits' bits.
fn step(
    sessions: &mut [Session],
    token: u32,
    eval: &mut dyn FnMut(&mut [BatchRow<'_>]) -> moeba::Result<()>,
) -> Vec<Vec<u32>> {
    let token = [token];
    let rows = sessions.iter_mut().map(|session| row(session, &token, Phase::Decode));
    eval(&mut rows.collect::<Vec<_>>()).unwrap();
    sessions.iter_mut().map(bits).collect()
}

/// `n` texts in decode take a step before each layer of a prompt but the first.
fn check(engine: &Arc<Engine>, what: &str, n: usize) {
    let prompt = tokens(N_PROMPT, 50);
    let mut alone = engine.new_session().unwrap();
    alone.eval(&prompt, Want::Last).unwrap();
    let mut expected = begin(engine, n);
    let (mut others, mut session) = (begin(engine, n), engine.new_session().unwrap());
    let (mut steps, mut n_rests) = (Vec::new(), 0);
    let rows = &mut [row(&mut session, &prompt, Phase::Prompt)];
    let between = &mut |_, interlude: Option<Interlude<'_, '_>>| {
        if let Some(mut interlude) = interlude {
            n_rests += 1;
            let eval = &mut |rows: &mut [BatchRow<'_>]| interlude.eval_batch(engine, rows);
            steps.push(step(&mut others, n_rests, eval));
        }
        Ok(())
    };
    engine.eval_batch_with(rows, true, between).unwrap();
    assert_eq!(n_rests as usize, engine.n_layers(), "{what}");
    assert!(bits(&mut session) == bits(&mut alone), "{what}: the prompt");
    // Steps on their own, as before and after the prompt.
    let eval = &mut |rows: &mut [BatchRow<'_>]| engine.eval_batch(rows);
    for (i, got) in (1..).zip(&steps) {
        assert!(step(&mut expected, i, eval) == *got, "{what}: step {i}");
    }
    assert!(step(&mut expected, 7, eval) == step(&mut others, 7, eval), "{what}: the next step");
    at_rest(engine, Duration::from_secs(20));
}

fn on_device(devices: usize) -> EngineOptions {
    let device = choice(Config { devices, seed: 2, ..Config::default() });
    let (cache_type_k, cache_type_v) = (CacheType::F32, CacheType::F16);
    EngineOptions { device, cache_type_k, cache_type_v, n_ctx: Some(24), ..golden_options() }
}

#[test]
fn every_kind_of_layer() {
    let dir = tempfile::tempdir().unwrap();
    let usual = ["qwen3moe", "gpt_oss", "deepseek_v2", "qwen3next", "arctic_mixed"];
    for name in usual.into_iter().chain(["kimi-k3", "qwen4exp"]) {
        let engine = load(&convert_golden(name, "q8_0", dir.path()), &on_device(1));
        check(&engine, name, 1);
    }
}

/// Some experts on the CPU or on another device, and layers on either side of the link.
#[test]
fn every_placement() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "q8_0", dir.path());
    let half = "50%".parse().unwrap();
    let all = [
        ("half of the experts", EngineOptions { vram: half, ..on_device(1) }),
        ("two devices", EngineOptions { vram: half, ..on_device(2) }),
        ("some layers", EngineOptions { gpu_layers: Some(2), ..on_device(1) }),
    ];
    for (what, options) in all {
        let engine = load(&path, &options);
        // One row is a captured graph, and two are not.
        check(&engine, what, 1);
        check(&engine, what, 2);
    }
}
