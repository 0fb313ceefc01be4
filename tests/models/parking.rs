//! Texts that share the memory of their sessions: those that are parked have the bytes that they
//! have alone.

use common::{convert_golden, golden_options, load};
use moeba::engine::scheduler::{Core, Job, JobSink, Owner, Status};
use moeba::engine::{
    Cancel, Engine, EngineOptions, FinishReason, Generation, Limits, Outcome, Request, TextSink,
};
use moeba::sample::{SamplerOptions, TokenLogprob};
use std::sync::{Arc, Mutex};

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

/// A text's tokens with the bits of their probabilities, and its end.
#[derive(Clone, Debug, Default, PartialEq)]
struct Text {
    tokens: Vec<(u32, u32)>,
    end: Option<FinishReason>,
}

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Text>>);

impl TextSink for Sink {
    fn text(&mut self, _text: &str) -> moeba::Result<()> {
        Ok(())
    }
}

impl JobSink for Sink {
    fn token(&mut self, id: u32, logprob: Option<&TokenLogprob>) {
        let bits = logprob.expect("it was asked for").logprob.to_bits();
        self.0.lock().unwrap().tokens.push((id, bits));
    }

    fn finished(&mut self, result: moeba::Result<Outcome>) {
        self.0.lock().unwrap().end = Some(result.unwrap().finish);
    }
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
    let mut generation = Generation::new(engine, &request).unwrap();
    generation.report_logprobs(0);
    let sink = Sink::default();
    let job = Job {
        id: i as u64,
        prompt: request.prompt,
        source: None,
        generation,
        sink: sink.clone(),
        cancel: request.cancel,
        owner: Owner::default(),
        // Some leave nothing in a cache.
        salt: (i % 5 != 4).then_some(0),
        priority: 0,
        slot: None,
    };
    (job, sink)
}

fn core(engine: &Arc<Engine>, n_sessions: usize, page_bytes: usize) -> Core<Sink> {
    let sessions = (0..n_sessions).map(|_| engine.new_session().unwrap()).collect();
    Core::new(engine, sessions, 0.5, page_bytes)
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
    sink.0.lock().unwrap().clone()
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
        assert!(*sink.0.lock().unwrap() == *expected, "text {i}, {page_bytes} bytes of pages");
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
    assert_eq!(sinks[first].0.lock().unwrap().end, Some(FinishReason::Cancelled));
    assert!(!status.slots[slot].is_parked);
    // A text that was parked keeps no other one from going on.
    while core.step() {
        check(&core.board().read());
    }
    for i in (0..4).filter(|i| *i != first) {
        assert!(*sinks[i].0.lock().unwrap() == alone(&engine, i, 100), "text {i}");
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
    let ends = sinks.iter().map(|sink| sink.0.lock().unwrap().end);
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
    assert_eq!(sink.0.lock().unwrap().end, Some(FinishReason::ContextFull));
    assert_eq!(held(&core), [0, 0, N_CTX]);
    assert_eq!(core.board().read().counts.n_parked, 0);
}
