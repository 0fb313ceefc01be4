//! Texts that share the memory of their sessions: those that are parked have the bytes that they
//! have alone.

use common::jobs::{Sink, Text, core, job_of};
use common::{convert_golden, golden_options, load};
use moeba::engine::scheduler::{Core, Job, Status};
use moeba::engine::{Cancel, ContextShift, Engine, EngineOptions, FinishReason, Limits, Request};
use moeba::sample::SamplerOptions;
use std::sync::Arc;

/// Tokens that all sessions share.
const N_CTX: usize = 192;
const N_SESSIONS: usize = 3;

fn model(name: &str) -> Arc<Engine> {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden(name, "f32", dir.path());
    let options = EngineOptions {
        n_ctx: Some(N_CTX),
        n_sessions: N_SESSIONS,
        kv_unified: true,
        n_ubatch: Some(64),
        n_threads: Some(1),
        ..golden_options()
    };
    load(&path, &options)
}

/// A job whose text goes on until it has `n_predict` tokens or the context is full.
fn job(engine: &Arc<Engine>, i: usize, n_predict: usize) -> (Job<Sink>, Sink) {
    let (n, first) = (20 + 13 * (i % 4), 10 + i as u32);
    let request = Request {
        prompt: (0..n as u32).map(|at| (first + 7 * at) % 200).collect(),
        limits: Limits { n_predict: Some(n_predict), ignore_eos: true, ..Limits::default() },
        sampling: SamplerOptions { seed: Some(i as u64), temp: 0.8, ..SamplerOptions::default() },
        cancel: Cancel::new(),
        ..Request::default()
    };
    let sink = Sink::default();
    // Some leave nothing in a cache.
    let salt = (i % 5 != 4).then_some(0);
    (Job { id: i as u64, salt, ..job_of(engine, request, sink.clone()) }, sink)
}

/// Tokens that texts hold are never more than they share.
fn check(status: &Status) {
    let n_past: usize = status.slots.iter().map(|slot| slot.n_past).sum();
    assert!(n_past <= N_CTX, "{:?}", status.slots);
    assert!(status.slots.iter().all(|slot| !slot.is_parked || slot.n_past == 0));
}

fn alone(engine: &Arc<Engine>, i: usize, n_predict: usize) -> Text {
    let mut core = core(engine, 1, 0);
    let (job, sink) = job(engine, i, n_predict);
    core.submit(job);
    while core.step() {}
    assert_eq!(core.board().read().counts.n_parked, 0);
    sink.text.lock().unwrap().clone()
}

/// Lengths of answers that together exceed the memory, and of more that wait for a session.
const LENGTHS: [usize; 6] = [100, 100, 100, 9, 70, 999];

/// Runs the texts with memory for pages; returns the scheduler's last snapshot.
fn compare(engine: &Arc<Engine>, expected: &[Text], page_bytes: usize) -> Arc<Status> {
    let mut core = core(engine, N_SESSIONS, page_bytes);
    let mut sinks = Vec::new();
    for (i, n) in LENGTHS.iter().enumerate() {
        let (job, sink) = job(engine, i, *n);
        core.submit(job);
        sinks.push(sink);
    }
    while core.step() {
        check(&core.board().read());
    }
    assert!(core.is_idle());
    for (i, (expected, sink)) in expected.iter().zip(sinks).enumerate() {
        assert!(*sink.text.lock().unwrap() == *expected, "text {i}, {page_bytes} bytes of pages");
    }
    let status = core.board().read();
    assert!(status.counts.n_parked > 0);
    assert_eq!(status.n_parked(), 0);
    status
}

#[test]
fn texts_that_exceed_the_memory_together_end_as_they_do_alone() {
    // One with latent attention, and one with a recurrent state.
    for name in ["qwen3moe", "deepseek_v2", "qwen3next"] {
        let engine = model(name);
        assert!(engine.plan().shares_kv());
        assert_eq!((engine.n_ctx(), engine.plan().n_ctx_all), (N_CTX, N_CTX));
        let texts = LENGTHS.iter().enumerate().map(|(i, n)| alone(&engine, i, *n));
        let texts: Vec<Text> = texts.collect();
        let ends: Vec<_> = texts.iter().filter_map(|text| text.end).collect();
        assert_eq!(ends[..5], [FinishReason::Length; 5]);
        assert_eq!(ends[5], FinishReason::ContextFull);
        let without = compare(&engine, &texts, 0).counts;
        let with = compare(&engine, &texts, 64 << 20).counts;
        // What was computed of a parked text comes back from pages, if a state was kept there.
        let is_less = with.n_prompt < without.n_prompt;
        assert!(is_less || name == "qwen3next", "{} {}", with.n_prompt, without.n_prompt);
        if name == "qwen3moe" {
            // Room for a few pages.
            compare(&engine, &texts, 3 * engine.kv_bytes() as usize * 64 / N_CTX);
        }
    }
}

#[test]
fn a_parked_text_can_be_cancelled_and_others_go_on() {
    let engine = model("qwen3moe");
    let mut core = core(&engine, N_SESSIONS, 0);
    let jobs: Vec<_> = (0..4).map(|i| job(&engine, i, 100)).collect();
    let cancels: Vec<Cancel> = jobs.iter().map(|(job, _)| job.cancel.clone()).collect();
    let sinks: Vec<Sink> = jobs.iter().map(|(_, sink)| sink.clone()).collect();
    jobs.into_iter().for_each(|(job, _)| core.submit(job));
    let parked = |core: &Core<Sink>| {
        let status = core.board().read();
        check(&status);
        let jobs = status.slots.iter().filter_map(|slot| Some((slot, slot.job?.id)));
        let (youngest, id) = jobs.max_by_key(|(_, id)| *id)?;
        assert!(youngest.is_parked || status.n_parked() == 0);
        youngest.is_parked.then_some((youngest.id, id as usize))
    };
    let (slot, first) = loop {
        assert!(core.step());
        if let Some(found) = parked(&core) {
            break found;
        }
    };
    cancels[first].cancel();
    assert!(core.step());
    let status = core.board().read();
    assert_eq!(sinks[first].text.lock().unwrap().end, Some(FinishReason::Cancelled));
    assert!(!status.slots[slot].is_parked);
    // A text that was parked keeps no other one from going on.
    while core.step() {
        check(&core.board().read());
    }
    for i in (0..4).filter(|i| *i != first) {
        assert!(*sinks[i].text.lock().unwrap() == alone(&engine, i, 100), "text {i}");
    }
    // All of them while one is parked.
    let jobs: Vec<_> = (0..4).map(|i| job(&engine, i, 100)).collect();
    let sinks: Vec<Sink> = jobs.iter().map(|(_, sink)| sink.clone()).collect();
    jobs.into_iter().for_each(|(job, _)| core.submit(job));
    while parked(&core).is_none() {
        assert!(core.step());
    }
    core.cancel_all();
    assert!(core.is_idle());
    let ends = sinks.iter().map(|sink| sink.text.lock().unwrap().end);
    assert!(ends.into_iter().all(|end| end == Some(FinishReason::Cancelled)));
}

#[test]
fn idle_texts_make_room_before_a_job_is_parked() {
    let engine = model("qwen3moe");
    let mut core = core(&engine, N_SESSIONS, 0);
    for i in 0..3 {
        let (job, _) = job(&engine, i, 30);
        core.submit(job);
        while core.step() {}
    }
    let held = |core: &Core<Sink>| -> Vec<usize> {
        core.board().read().slots.iter().map(|slot| slot.n_past).collect()
    };
    assert!(held(&core).iter().all(|n| *n > 40), "{:?}", held(&core));
    let (job, sink) = job(&engine, 3, 999);
    core.submit(job);
    while core.step() {}
    assert_eq!(sink.text.lock().unwrap().end, Some(FinishReason::ContextFull));
    assert_eq!(held(&core), [0, 0, N_CTX]);
    assert_eq!(core.board().read().counts.n_parked, 0);
}

/// A text that fills the context goes on as the shorter text does that is left of it: the same
/// tokens and bits, whatever the cache held.
#[test]
fn a_text_that_goes_on_beyond_the_context_is_that_of_what_is_left() {
    const N_KEEP: usize = 5;
    let greedy = SamplerOptions { temp: 0.0, ..SamplerOptions::default() };
    for name in ["qwen3moe", "deepseek_v2", "qwen3next"] {
        let engine = model(name);
        let text = |prompt: Vec<u32>, n_predict: usize, shift: Option<ContextShift>| {
            let (n_predict, ignore_eos) = (Some(n_predict), true);
            let stops = Vec::new();
            let limits = Limits { n_predict, ignore_eos, stops, context_shift: shift };
            let request =
                Request { prompt, limits, sampling: greedy.clone(), ..Request::default() };
            let (mut core, sink) = (core(&engine, 1, 0), Sink::default());
            core.submit(job_of(&engine, request, sink.clone()));
            while core.step() {
                check(&core.board().read());
            }
            let text = sink.text.lock().unwrap().clone();
            assert_eq!(text.end, Some(FinishReason::Length));
            text.tokens
        };
        let prompt: Vec<u32> = (0..40).map(|at| (3 + 7 * at) % 200).collect();
        let n_predict = 2 * N_CTX;
        for n_keep in [Some(N_KEEP), None] {
            let tokens = text(prompt.clone(), n_predict, Some(ContextShift { n_keep }));
            let mut whole = prompt.clone();
            let mut n_compared = 0;
            while n_compared < tokens.len() {
                let part = N_CTX + 1 - whole.len();
                let part = &tokens[n_compared..tokens.len().min(n_compared + part)];
                assert_eq!(text(whole.clone(), part.len(), None), part, "{name} {n_keep:?}");
                n_compared += part.len();
                whole.extend(part.iter().map(|(id, _)| id));
                let n_kept = n_keep.unwrap_or(prompt.len());
                whole.drain(n_kept..n_kept + (whole.len() - n_kept).div_ceil(2));
            }
        }
    }
}
