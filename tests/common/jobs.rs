//! Jobs of a scheduler whose texts are compared token by token, with the bits of their
//! probabilities.

use moeba::engine::scheduler::{Core, Job, JobSink, Owner, Status};
use moeba::engine::{
    Cancel, DraftCounts, Engine, FinishReason, Generation, Limits, Outcome, Request, SpecMode,
    Speculation, TextSink,
};
use moeba::sample::{SamplerOptions, TokenLogprob};
use std::sync::{Arc, Mutex};

/// A text's tokens with the bits of their probabilities, and its end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Text {
    pub tokens: Vec<(u32, u32)>,
    pub end: Option<FinishReason>,
}

/// Tokens of a text.
pub const TOKENS: usize = 4;

/// Collects a job's text.
#[derive(Clone, Default)]
pub struct Sink {
    pub text: Arc<Mutex<Text>>,
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

/// A job, cancelled before a layer of its prompt if that is asked for.
pub fn job(engine: &Arc<Engine>, prompt: &[u32], cancelled_at: Option<usize>) -> (Job<Sink>, Sink) {
    let request = Request {
        prompt: prompt.to_vec(),
        limits: Limits { n_predict: Some(TOKENS), ignore_eos: true, ..Limits::default() },
        sampling: SamplerOptions { seed: Some(3), temp: 0.8, ..SamplerOptions::default() },
        cancel: Cancel::new(),
        ..Request::default()
    };
    let cancel = cancelled_at.map(|n| (n, request.cancel.clone()));
    let sink = Sink { cancel, ..Sink::default() };
    (job_of(engine, request, sink.clone()), sink)
}

/// A request as a job that reports the probabilities of its tokens.
pub fn job_of(engine: &Arc<Engine>, request: Request, sink: Sink) -> Job<Sink> {
    let mut generation = Generation::new(engine, &request).unwrap();
    generation.report_logprobs(0);
    Job {
        id: 0,
        prompt: request.prompt,
        source: None,
        generation,
        sink,
        cancel: request.cancel,
        owner: Owner::default(),
        salt: Some(0),
        priority: 0,
        slot: None,
        adapters: None,
    }
}

/// A scheduler with `page_bytes` of pages.
pub fn core(engine: &Arc<Engine>, n_sessions: usize, page_bytes: usize) -> Core<Sink> {
    let sessions = (0..n_sessions).map(|_| engine.new_session().unwrap()).collect();
    Core::new(engine, sessions, 0.5, page_bytes)
}

/// Runs jobs at once to their ends: their texts and the scheduler's counts.
pub fn run(
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

/// The text of a request whose drafts are verified in this mode, and the counts of drafts.
pub fn run_in(
    core: &mut Core<Sink>,
    engine: &Arc<Engine>,
    request: &Request,
) -> (Text, DraftCounts) {
    let before = core.board().read().counts.drafts;
    let sink = Sink::default();
    core.submit(job_of(engine, request.clone(), sink.clone()));
    while core.step() {}
    let mut drafts = core.board().read().counts.drafts;
    for (after, before) in drafts.0.iter_mut().zip(before.0) {
        after.n -= before.n;
        after.n_accepted -= before.n_accepted;
    }
    let text = sink.text.lock().unwrap().clone();
    (text, drafts)
}

/// Compares a request's text in all modes; returns the counts of drafts that were always verified.
pub fn compare_drafts(
    engine: &Arc<Engine>,
    name: &str,
    request: &Request,
    prediction: &[u32],
) -> DraftCounts {
    let with = |mode| {
        let speculation = Speculation { mode, prediction: prediction.to_vec() };
        let request = Request { speculation, ..request.clone() };
        run_in(&mut core(engine, 1, 0), engine, &request)
    };
    let (expected, none) = with(SpecMode::Off);
    assert_eq!(none, DraftCounts::default());
    let (auto, _) = with(SpecMode::Auto);
    let (always, drafts) = with(SpecMode::Always);
    assert!(auto == expected, "{name}, auto");
    assert!(always == expected, "{name}, always:\n{always:?}\n{expected:?}");
    drafts
}

/// The text that the prompt gets in a session of its own.
pub fn alone(engine: &Arc<Engine>, prompt: &[u32]) -> Text {
    let (mut texts, _) = run(engine, &mut core(engine, 1, 0), &[prompt]);
    texts.remove(0)
}

/// `n` tokens that begin like all others of `kind` up to `n_common`.
pub fn prompt(n: usize, n_common: usize, kind: u32) -> Vec<u32> {
    let token = |i: usize| (7 * i as u32 + if i < n_common { 0 } else { kind }) % 250;
    (0..n).map(token).collect()
}
