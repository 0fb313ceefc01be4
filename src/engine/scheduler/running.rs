//! A job that has a session.

use std::time::{Duration, Instant};

use super::job::{Job, JobSink, Owner};
use super::ledger::Ledger;
use super::status::{Counts, JobStatus};
use crate::Result;
use crate::cancel::Cancel;
use crate::engine::speculation::{DraftKind, Drafter};
use crate::engine::{
    Engine, ExpertTraffic, FinishReason, Generation, Outcome, Phase, Session, SpecMode, Step, Want,
};

/// Time for which a reader may be behind while other jobs wait for the session.
const PATIENCE: Duration = Duration::from_secs(1);

/// A job between two passes. Its text is the prompt and what was generated; the session may hold
/// less of it, and the passes to come compute the rest.
pub struct Running<S> {
    id: u64,
    /// The number of the job's session.
    slot: usize,
    pub owner: Owner,
    pub cancel: Cancel,
    /// Whether a pass that it shared has failed: the next one is its own, so that what fails is
    /// the job whose experts cannot be read.
    pub is_alone: bool,
    generation: Generation,
    sink: S,
    /// Token ids that the encoder has yet to read.
    source: Option<Vec<u32>>,
    text: Vec<u32>,
    n_prompt: usize,
    /// Whether a pass has been planned.
    has_begun: bool,
    /// Whether the first token is still to be chosen.
    in_prompt: bool,
    /// Finds tokens that the next step of decode computes behind its own.
    drafter: Drafter,
    /// The time that making the drafts of the next step took.
    drafting: Duration,
    /// The result of the last pass that was committed.
    given: Given,
    /// The end of the last step of decode, unless the job has rested since.
    last_step: Option<Instant>,
    outcome: Outcome,
    /// The beginning of the phase, and its part of what its passes have moved.
    start: Instant,
    traffic: ExpertTraffic,
    /// Time for which the reader was behind, of late, and the last look at it.
    behind: Duration,
    last_look: Option<Instant>,
}

/// The tokens that a pass has given, and the drafts that it has verified.
#[derive(Clone, Copy, Debug, Default)]
pub struct Given {
    pub n_tokens: usize,
    pub drafts: Option<(DraftKind, usize)>,
    /// The time that the model's layer took to make them.
    pub drafting: Duration,
}

impl<S: JobSink> Running<S> {
    /// Keeps of the session's text what the job's begins with. `None`: the prompt is not the
    /// model's, and the job has ended.
    pub fn start(
        job: Job<S>,
        slot: usize,
        session: &mut Session,
        engine: &Engine,
    ) -> Option<Running<S>> {
        let Job { id, prompt, source, generation, cancel, mut sink, owner, .. } = job;
        if source.is_some() {
            session.truncate(0);
        }
        if let Err(why) = session.sync(&prompt) {
            sink.finished(Err(why));
            return None;
        }
        session.begin_embedding(generation.pooling());
        session.set_cancel(cancel.clone());
        let mut outcome = Outcome::new(FinishReason::Cancelled);
        outcome.n_prompt = source.as_ref().map_or(0, Vec::len);
        Some(Running {
            id,
            slot,
            owner,
            cancel,
            source,
            is_alone: false,
            generation,
            sink,
            n_prompt: prompt.len(),
            text: prompt,
            has_begun: false,
            in_prompt: true,
            drafter: Drafter::new(),
            drafting: Duration::ZERO,
            given: Given::default(),
            last_step: None,
            outcome,
            start: Instant::now(),
            traffic: none_of(engine),
            behind: Duration::ZERO,
            last_look: None,
        })
    }

    /// Whether the next pass is a step of decode: all but the last generated token is computed.
    pub fn is_decoding(&self, session: &Session) -> bool {
        self.text.len() > self.n_prompt && self.n_left(session) == 1
    }

    /// The text so far.
    pub fn text(&self) -> &[u32] {
        &self.text
    }

    /// Tokens that there may be after the text so far; `None` is no limit.
    pub fn n_to_come(&self) -> Option<usize> {
        self.generation.n_left()
    }

    /// Tokens of the prompt.
    pub fn n_prompt(&self) -> usize {
        self.n_prompt
    }

    /// The first pass is planned: all that the session holds by now was there before. Returns the
    /// number of those tokens, and 0 when other passes are planned.
    pub fn begin(&mut self, session: &Session) -> usize {
        if std::mem::replace(&mut self.has_begun, true) {
            return 0;
        }
        self.outcome.n_reused = session.n_past();
        self.sink.started(self.slot, self.outcome.n_reused);
        self.outcome.n_reused
    }

    pub fn is_full(&self) -> bool {
        self.sink.is_full()
    }

    /// Looks whether the reader is behind, and whether it has been for so long that another job
    /// should have the session. A reader that now and then takes a little is behind, too.
    pub fn look_at_reader(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.last_look.replace(now).unwrap_or(now));
        self.behind = match self.is_full() {
            true => (self.behind + passed).min(2 * PATIENCE),
            false => self.behind.saturating_sub(passed),
        };
    }

    /// The time for which the reader has kept the session from others, if that is too long.
    pub fn is_late(&self) -> Option<Duration> {
        let is_late = self.behind >= PATIENCE && self.is_full() && !self.in_prompt;
        is_late.then_some(self.behind)
    }

    /// The job gives its session to another one: when it has one again there is less patience.
    pub fn rest(&mut self) {
        (self.behind, self.last_look) = (PATIENCE - PATIENCE / 5, None);
        self.drop_drafts();
        self.forget_step();
    }

    /// The job has a session again; what it holds of the text stays.
    pub fn resume(&mut self, slot: usize, session: &mut Session) -> Result<()> {
        self.slot = slot;
        session.set_cancel(self.cancel.clone());
        session.sync(&self.text).map(drop)
    }

    /// Plans drafts for a step of decode, `most` at most: those that the gate lets pass.
    pub fn plan_drafts(&mut self, session: &mut Session, most: usize, ledger: &mut Ledger) {
        let Running { generation, drafter, text, .. } = self;
        let most = most.min(generation.n_left().unwrap_or(usize::MAX).saturating_sub(1));
        drafter.find(generation, text, self.n_prompt, most);
        self.drafting = Duration::ZERO;
        if let Some(kind) = drafter.kind() {
            let n = gated(generation, kind, drafter.tokens().len(), ledger);
            drafter.keep(n);
        }
        if drafter.tokens().is_empty() {
            self.make_drafts(session, most, ledger);
        }
    }

    /// Lets another model or the model's layer make drafts, if the gate lets some pass.
    fn make_drafts(&mut self, session: &mut Session, most: usize, ledger: &mut Ledger) {
        let Running { generation, drafter, text, .. } = self;
        let Some((source, its_most)) = session.drafter() else { return };
        let most = most.min(its_most);
        if generation.speculation().mode == SpecMode::Off || most == 0 {
            return;
        }
        let kind = DraftKind { source, n_matched: 0 };
        let (n, start) = (gated(generation, kind, most, ledger), Instant::now());
        match session.draft(text, n) {
            Ok(drafts) => drafter.take(generation, source, drafts),
            Err(why) => log::debug!("no drafts: {why}"),
        }
        self.drafting = start.elapsed();
    }

    /// Shows predictors what the model's layer foretells of the next step's token.
    pub fn look_ahead(&self, session: &mut Session) {
        if let Err(why) = session.look_ahead(&self.text) {
            log::debug!("no look-ahead: {why}");
        }
    }

    /// The drafts of the step that is planned.
    pub fn drafts(&self) -> &[u32] {
        self.drafter.tokens()
    }

    /// No drafts in the next pass.
    pub fn drop_drafts(&mut self) {
        self.drafter.clear();
    }

    /// Whether the gate decides about drafts.
    pub fn is_gated(&self) -> bool {
        self.generation.speculation().mode == SpecMode::Auto
    }

    /// Tokens of the text that are not computed.
    pub fn n_left(&self, session: &Session) -> usize {
        self.text.len() - session.n_past()
    }

    /// The tokens that come next, at most `most`.
    pub fn next_tokens(&self, session: &Session, most: usize) -> &[u32] {
        let left = &self.text[session.n_past()..];
        &left[..left.len().min(most)]
    }

    /// The kind of a pass over the next `n` tokens, drafts included, and the logits that it is to
    /// give.
    pub fn next_kind(&self, session: &Session, n: usize) -> (Phase, Want) {
        let phase = if self.is_decoding(session) { Phase::Decode } else { Phase::Prompt };
        let is_last = n >= self.n_left(session);
        (phase, if is_last { self.generation.want() } else { Want::None })
    }

    /// Reads what the encoder has to read.
    pub fn encode(&mut self, session: &mut Session) -> Result<()> {
        self.source.take().map_or(Ok(()), |source| session.encode(&source))
    }

    /// Tells how much of the prompt is done while layer `l` of `n_layers` computes `n` tokens of
    /// it.
    pub fn progress(&mut self, n_past: usize, n: usize, l: usize, n_layers: usize) {
        if self.in_prompt {
            let done = (n_past + n * l / n_layers).saturating_sub(self.outcome.n_reused);
            self.sink.prompt_progress(done, self.n_prompt - self.outcome.n_reused);
        }
    }

    pub fn status(&self, session: &Session) -> JobStatus {
        JobStatus {
            id: self.id,
            n_prompt: self.n_prompt,
            n_prompt_done: session.n_past().min(self.n_prompt),
            n_generated: self.generation.n_generated(),
        }
    }

    /// The result of the last pass; once.
    pub fn take_given(&mut self) -> Given {
        std::mem::take(&mut self.given)
    }

    /// Chooses the token after those that a pass has computed, if they were the last ones, and
    /// after each draft that was right. Returns why the text ends, if it does. The session keeps
    /// what is part of the text.
    pub fn commit(
        &mut self,
        session: &mut Session,
        engine: &Engine,
    ) -> Result<Option<FinishReason>> {
        self.is_alone = false;
        let n_drafts = self.drafter.tokens().len();
        let mut n_past = session.n_past() - n_drafts;
        if n_past < self.text.len() {
            return Ok(None);
        }
        if self.in_prompt {
            let n = self.n_prompt - self.outcome.n_reused;
            self.sink.prompt_progress(n, n);
        }
        if let Some(embedding) = session.end_embedding() {
            self.end_prompt(n_past, engine);
            self.sink.embedded(embedding);
            return Ok(Some(FinishReason::Length));
        }
        let first = n_past;
        let result = loop {
            let i = n_past - first;
            let next = self.choose(i, n_past, session, engine);
            let is_draft = |id: u32| self.drafter.tokens().get(i) == Some(&id);
            match next {
                Ok(Step::Next(id)) if is_draft(id) && !self.cancel.is_cancelled() => n_past += 1,
                Ok(Step::Next(_)) => break Ok(None),
                Ok(Step::Finished(why)) => break Ok(Some(why)),
                Err(why) => break Err(why),
            }
        };
        if n_past < session.n_past() {
            session.truncate(n_past);
        }
        session.end_verification();
        let drafting = std::mem::take(&mut self.drafting);
        self.given = Given { n_tokens: n_past - first + 1, drafts: None, drafting };
        if let Some(kind) = self.drafter.kind() {
            self.given.drafts = Some((kind, n_drafts));
            self.outcome.drafts.add(kind.source, n_drafts, n_past - first);
            self.drafter.clear();
        }
        result
    }

    /// Chooses the token behind the pass's one of index `i` that decides, with `n_past` before it.
    fn choose(
        &mut self,
        i: usize,
        n_past: usize,
        session: &mut Session,
        engine: &Engine,
    ) -> Result<Step> {
        let has_drafts = !self.drafter.tokens().is_empty();
        let logits = if has_drafts { session.logits_of(i) } else { session.logits() };
        let token = self.generation.choose(logits, &mut self.sink)?;
        if self.in_prompt {
            self.end_prompt(session.n_past(), engine);
        }
        self.sink.token(token, self.generation.last_logprob());
        let step = self.generation.accept(token, n_past, &mut self.sink)?;
        if let Step::Next(token) = step {
            self.text.push(token);
        }
        Ok(step)
    }

    /// Makes room in a text that fills the context, if it goes on then: what stays behind what
    /// leaves is to be computed again. Returns whether anything left.
    pub fn shift(&mut self, session: &mut Session) -> Result<bool> {
        let leaving = self.generation.leaving(&self.text, self.n_prompt);
        if leaving.is_empty() {
            return Ok(false);
        }
        self.outcome.n_shifted += leaving.len();
        self.n_prompt -= self.n_prompt.min(leaving.end) - self.n_prompt.min(leaving.start);
        self.text.drain(leaving);
        session.sync(&self.text)?;
        Ok(true)
    }

    /// Counts the time from the last step of decode to the one that begins at `start`.
    pub fn count_stall(&self, start: Instant, counts: &mut Counts) {
        if let Some(last) = self.last_step {
            counts.decode_stall.add_time(start.saturating_duration_since(last));
        }
    }

    /// Counts a step of decode that has ended now.
    pub fn count_step(&mut self, counts: &mut Counts) {
        self.last_step = Some(Instant::now());
        if let Some(time) = self.generation.take_mask_time() {
            counts.mask_time.add_time(time);
        }
    }

    pub fn forget_step(&mut self) {
        self.last_step = None;
    }

    fn end_prompt(&mut self, n_past: usize, engine: &Engine) {
        self.in_prompt = false;
        let n_past = if self.has_begun { n_past } else { 0 };
        self.outcome.n_prompt += n_past.saturating_sub(self.outcome.n_reused);
        self.outcome.prompt_time = self.start.elapsed();
        self.outcome.prompt_traffic = std::mem::replace(&mut self.traffic, none_of(engine));
        self.start = Instant::now();
    }

    /// Counts the job's part of what a pass has moved.
    pub fn add_traffic(&mut self, part: &ExpertTraffic) {
        self.traffic = part.plus(&self.traffic);
    }

    /// Ends the job, whose session has `n_past` tokens.
    pub fn finish(mut self, result: Result<FinishReason>, n_past: usize, engine: &Engine) {
        let result = result.and_then(|finish| {
            self.outcome.finish = finish;
            if self.in_prompt {
                self.end_prompt(n_past, engine);
            }
            self.outcome.n_generated = self.generation.n_generated();
            self.outcome.stop = self.generation.stop();
            self.generation.finish(&mut self.sink)?;
            self.outcome.decode_time = self.start.elapsed();
            self.outcome.decode_traffic = self.traffic;
            Ok(self.outcome)
        });
        self.sink.finished(result);
    }
}

/// Traffic of nothing: the links that there are, with counts of 0.
fn none_of(engine: &Engine) -> ExpertTraffic {
    let now = engine.expert_traffic();
    now.since(&now)
}

/// Drafts of a kind that are worth a pass, of at most `most`.
fn gated(generation: &Generation, kind: DraftKind, most: usize, ledger: &mut Ledger) -> usize {
    if generation.speculation().mode != SpecMode::Auto {
        return most;
    }
    let n = ledger.gate.n_drafts(kind, most);
    ledger.counts.n_not_drafted += u64::from(n == 0);
    n
}
