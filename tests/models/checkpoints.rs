//! Models with a recurrent state: texts go on from checkpoints, with the bits that they have alone.

use common::{convert_golden, golden_options, load};
use moeba::engine::scheduler::{Core, Job, JobSink, Owner, Status};
use moeba::engine::{
    Cancel, Engine, EngineOptions, FinishReason, Generation, Limits, Outcome, Request, TextSink,
};
use moeba::sample::{SamplerOptions, TokenLogprob};
use std::sync::{Arc, Mutex};

const MODELS: [&str; 2] = ["qwen3next", "qwen35moe"];

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

/// A text's tokens with the bits of their probabilities, and its end.
#[derive(Clone, Debug, Default, PartialEq)]
struct Text {
    tokens: Vec<(u32, u32)>,
    end: Option<FinishReason>,
}

#[derive(Clone, Default)]
struct Sink {
    text: Arc<Mutex<Text>>,
    n_layers: usize,
    /// Cancelled before this layer, of all that the prompt's passes compute.
    cancel: Option<(usize, Cancel)>,
}

impl TextSink for Sink {
    fn text(&mut self, _text: &str) -> moeba::Result<()> {
        Ok(())
    }

    fn prompt_progress(&mut self, _done: usize, _total: usize) {
        self.n_layers += 1;
        if let Some((n, cancel)) = &self.cancel
            && self.n_layers == *n
        {
            cancel.cancel();
        }
    }
}

impl JobSink for Sink {
    fn token(&mut self, id: u32, logprob: Option<&TokenLogprob>) {
        let bits = logprob.expect("it was asked for").logprob.to_bits();
        self.text.lock().unwrap().tokens.push((id, bits));
    }

    fn finished(&mut self, result: moeba::Result<Outcome>) {
        self.text.lock().unwrap().end = Some(result.unwrap().finish);
    }
}

fn job(engine: &Arc<Engine>, prompt: &[u32], cancelled_at: Option<usize>) -> (Job<Sink>, Sink) {
    let request = Request {
        prompt: prompt.to_vec(),
        limits: Limits { n_predict: Some(8), ignore_eos: true, ..Limits::default() },
        sampling: SamplerOptions { seed: Some(3), temp: 0.8, ..SamplerOptions::default() },
        cancel: Cancel::new(),
        ..Request::default()
    };
    let mut generation = Generation::new(engine, &request).unwrap();
    generation.report_logprobs(0);
    let cancel = cancelled_at.map(|n| (n, request.cancel.clone()));
    let sink = Sink { cancel, ..Sink::default() };
    let job = Job {
        id: 0,
        prompt: request.prompt,
        source: None,
        generation,
        sink: sink.clone(),
        cancel: request.cancel,
        owner: Owner::default(),
        salt: Some(0),
        priority: 0,
        slot: None,
    };
    (job, sink)
}

fn core(engine: &Arc<Engine>, n_sessions: usize, page_bytes: usize) -> Core<Sink> {
    let sessions = (0..n_sessions).map(|_| engine.new_session().unwrap()).collect();
    Core::new(engine, sessions, 0.5, page_bytes)
}

/// Runs jobs at once; returns their texts and the scheduler's counts.
fn run(
    engine: &Arc<Engine>,
    core: &mut Core<Sink>,
    prompts: &[&[u32]],
) -> (Vec<Text>, Arc<Status>) {
    let submit = |prompt: &&[u32]| {
        let (job, sink) = job(engine, prompt, None);
        core.submit(job);
        sink.text
    };
    let texts: Vec<_> = prompts.iter().map(submit).collect();
    while core.step() {}
    let texts = texts.iter().map(|text| text.lock().unwrap().clone()).collect();
    (texts, core.board().read())
}

fn alone(engine: &Arc<Engine>, prompt: &[u32]) -> Text {
    let (mut texts, _) = run(engine, &mut core(engine, 1, 0), &[prompt]);
    texts.remove(0)
}

/// `n` tokens that begin like all others of `kind` up to `n_common`.
fn prompt(n: usize, n_common: usize, kind: u32) -> Vec<u32> {
    let token = |i: usize| (7 * i as u32 + if i < n_common { 0 } else { kind }) % 250;
    (0..n).map(token).collect()
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
                assert_eq!(texts[0].tokens.len(), 8);
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
