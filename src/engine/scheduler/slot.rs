//! A session and the job that has it.

use std::sync::Arc;
use std::time::Instant;

use super::job::{Job, JobSink, Owner};
use super::kv_budget::Holder;
use super::ledger::Ledger;
use super::marks::Marks;
use super::pages::{Load, PAGE, Pages};
use super::resting::Resting;
use super::running::{Given, Running};
use super::status::{Counts, SlotStatus};
use crate::engine::kv_disk::TextReader;
use crate::engine::session::n_common;
use crate::engine::{BatchRow, Engine, ExpertTraffic, FinishReason, Session};
use crate::{Error, Result};

pub struct Slot<S> {
    pub id: usize,
    pub session: Session,
    pub job: Option<Running<S>>,
    /// The number of the last job that had it.
    pub last_used: u64,
    /// Positions that the session may fill, and how many of them during a prompt's pass only.
    pub room: usize,
    pub lent: usize,
    /// The job waits for memory, and the session is empty.
    pub is_parked: bool,
    /// The salt of the session's text. `None`: the text is not to be used again.
    salt: Option<u64>,
    /// The job's tokens in the next pass.
    pub next: Vec<u32>,
    /// The result of the job's last pass.
    pub given: Given,
    /// The positions of the session's checkpoints, if it needs any to go on in its text.
    marks: Option<Marks>,
    /// The part of the job's text that comes from disk: no pass computes it until it is there.
    load: Option<Load>,
    /// Pages of the text that the disk was handed, and whether it has all that it is to have of a
    /// text whose job has ended.
    n_saved: usize,
    is_saved: bool,
}

impl<S: JobSink> Slot<S> {
    /// Without a job; `pages` are those that it will have.
    pub fn new(id: usize, session: Session, pages: &Pages) -> Slot<S> {
        let marks = session.needs_checkpoints(pages).then(Marks::default);
        Slot {
            id,
            room: session.n_past(),
            lent: 0,
            session,
            job: None,
            last_used: 0,
            is_parked: false,
            salt: Some(0),
            next: Vec::new(),
            given: Given::default(),
            marks,
            load: None,
            n_saved: 0,
            is_saved: true,
        }
    }

    /// Tokens of a text of the same salt that the session holds from its beginning.
    pub fn n_common(&self, salt: Option<u64>, text: &[u32]) -> usize {
        let is_same = salt.is_some() && salt == self.salt;
        if is_same { n_common(self.session.tokens(), text) } else { 0 }
    }

    /// Whether a prompt goes on where the session's text is, or soon after its half.
    pub fn is_continued(&self, salt: Option<u64>, prompt: &[u32]) -> bool {
        let n = self.n_common(salt, prompt);
        n > 0 && 2 * n >= self.session.n_past()
    }

    /// Gives the session to a job; what it drops of its text goes to `pages`.
    pub fn start(&mut self, job: Job<S>, pages: &mut Pages, engine: &Engine) {
        let n = self.n_common(job.salt, &job.prompt);
        if n < self.session.n_past() {
            self.keep_text(pages);
        }
        if job.salt.is_none() || job.salt != self.salt {
            self.session.truncate(0);
            self.salt = job.salt;
        }
        let scales = job.adapters.clone();
        self.session.set_adapters(scales.as_deref().unwrap_or(engine.adapter_scales()));
        self.job = Running::start(job, self.id, &mut self.session, engine);
        if let (Some(salt), Some(_)) = (self.salt, &self.marks) {
            pages.use_states(salt, self.session.tokens());
        }
        self.marks.iter_mut().for_each(Marks::clear);
        self.session.give_back();
        (self.n_saved, self.is_saved) = (0, false);
        if self.job.is_none() {
            self.room = self.session.n_past();
        }
    }

    /// Gives all memory of the session back; its text goes to `pages`. A job is parked.
    pub fn empty(&mut self, pages: &mut Pages) {
        self.keep_text(pages);
        self.session.truncate(0);
        self.session.give_back();
        (self.room, self.lent) = (0, 0);
        self.next.clear();
        (self.load, self.n_saved) = (None, 0);
        self.marks.iter_mut().for_each(Marks::clear);
        self.is_parked = self.job.is_some();
        self.forget_step();
    }

    /// Takes the session from the job, which rests until its reader has caught up.
    pub fn unseat(&mut self, pages: &mut Pages) -> Option<Resting<S>> {
        self.empty(pages);
        self.is_parked = false;
        let mut job = self.job.take()?;
        job.rest();
        self.is_saved = true;
        Some(Resting { job, salt: self.salt, adapters: self.session.adapters().clone() })
    }

    /// Gives the session to a job that has rested; what it drops of its text goes to `pages`.
    pub fn reseat(&mut self, resting: Resting<S>, pages: &mut Pages, engine: &Engine) {
        let Resting { mut job, salt, adapters } = resting;
        if self.n_common(salt, job.text()) < self.session.n_past() {
            self.keep_text(pages);
        }
        if salt.is_none() || salt != self.salt {
            self.session.truncate(0);
            self.salt = salt;
        }
        self.session.set_adapters(&adapters);
        match job.resume(self.id, &mut self.session) {
            Ok(()) => self.job = Some(job),
            Err(why) => job.finish(Err(why), self.session.n_past(), engine),
        }
        self.marks.iter_mut().for_each(Marks::clear);
        self.session.give_back();
        (self.n_saved, self.is_saved) = (0, false);
    }

    /// The salt of the session's text, if it is to be used again.
    pub fn salt(&self) -> Option<u64> {
        self.salt
    }

    /// Drops the session's text.
    pub fn erase(&mut self) {
        self.session.truncate(0);
        self.session.give_back();
        (self.room, self.lent) = (0, 0);
        (self.load, self.n_saved, self.is_saved) = (None, 0, true);
        self.marks.iter_mut().for_each(Marks::clear);
    }

    /// Takes a text of a file in place of the session's own.
    pub fn fill(&mut self, salt: u64, from: &mut TextReader, pages: &mut Pages) -> Result<()> {
        let result = self.session.load_text(from);
        self.salt = Some(salt);
        self.room = self.session.n_past();
        let states = result?;
        if let Some(states) = states {
            let n = self.session.n_past();
            if let Some(kept) = pages.keep_states(salt, self.session.tokens(), &states) {
                self.session.add_checkpoint(n, &kept);
            }
        }
        Ok(())
    }

    /// Hands the session's text to `pages`, if it is to be used again.
    fn keep_text(&self, pages: &mut Pages) {
        if let Some(salt) = self.salt
            && self.session.can_copy()
        {
            self.session.keep(pages, salt);
        }
    }

    /// The session as the budget of memory sees it.
    pub fn holder(&self) -> Holder {
        let (id, room, is_idle) = (self.id, self.room, self.job.is_none());
        Holder { id, room, is_idle, number: self.last_used }
    }

    /// Others have texts that part from the job's after `n` tokens, so that more may.
    pub fn parts_at(&mut self, n: usize) {
        self.marks.iter_mut().for_each(|marks| marks.add_branch(n));
    }

    /// Tokens of the job's text, of which the last one is always computed, that pages hold beyond
    /// the session. Those on disk come by and by.
    pub fn extend_from_pages(&mut self, pages: &mut Pages) {
        let Some(job) = self.job.as_ref().filter(|_| self.session.can_copy()) else { return };
        let Some(salt) = self.salt else { return };
        let text = &job.text()[..job.text().len() - 1];
        self.session.extend_from_pages(pages, salt, text);
        self.load = self.session.begin_load(pages, salt, text);
    }

    /// Loads some of the job's text from disk. False if there is nothing to load: another session
    /// may have more of it.
    pub fn load(&mut self, pages: &mut Pages) -> bool {
        let Some(load) = self.load.as_mut().filter(|load| load.n() > self.session.n_past()) else {
            self.load = None;
            return false;
        };
        let Some(job) = &self.job else { return false };
        if self.session.load(pages, load, job.text()) {
            self.load = None;
        }
        true
    }

    /// Whether the job waits for the disk.
    pub fn is_loading(&self) -> bool {
        self.load.is_some()
    }

    /// Hands what is new of the text to the disk behind `pages`: whole pages as they come about,
    /// and states once the job has ended.
    pub fn save(&mut self, pages: &Pages) {
        if self.is_saved || !pages.has_disk() {
            return;
        }
        let is_over = self.job.is_none();
        let is_new = !self.session.has_state() && self.session.n_past() / PAGE > self.n_saved;
        if let Some(salt) = self.salt.filter(|_| self.session.can_copy()) {
            if is_over || is_new {
                let is_all = self.session.save(pages, salt, &mut self.n_saved);
                self.is_saved = is_all && is_over;
            }
        } else {
            self.is_saved = is_over;
        }
    }

    /// Whether the job has ended and some of its text is still to be saved.
    pub fn is_saving(&self, pages: &Pages) -> bool {
        pages.has_disk() && self.job.is_none() && !self.is_saved
    }

    /// Tokens of the job's text that the session could have from another one's.
    pub fn n_from(&self, other: &Slot<S>) -> usize {
        let Some(job) = self.job.as_ref().filter(|_| self.session.can_copy()) else { return 0 };
        let n = other.n_common(self.salt, &job.text()[..job.text().len() - 1]);
        other.session.n_to_copy(n)
    }

    /// Tokens of the job's text that an older job has in its own and is about to compute, if there
    /// are enough of them to wait for.
    pub fn n_to_follow(&self, older: &Slot<S>) -> Option<usize> {
        let (Some(job), Some(leader)) = (&self.job, &older.job) else { return None };
        let is_same = self.salt.is_some() && self.salt == older.salt;
        let can_follow = is_same && self.session.can_copy();
        let n = n_common(job.text(), leader.text()).min(job.text().len() - 1);
        let n_held = self.session.n_past().max(older.session.n_past());
        (can_follow && self.has_branches() && older.has_prompt() && n >= n_held + PAGE).then_some(n)
    }

    /// Whether the session can go on from where texts part.
    fn has_branches(&self) -> bool {
        self.marks.is_some() || !self.session.has_state()
    }

    /// Positions that the session may come to need beyond those that it holds; `None` is no limit.
    pub fn n_to_come(&self) -> Option<usize> {
        let job = self.job.as_ref()?;
        Some(job.n_left(&self.session) + job.n_to_come()?)
    }

    /// Tokens of the job's text that are not computed.
    pub fn n_left(&self) -> usize {
        self.job.as_ref().map_or(0, |job| job.n_left(&self.session))
    }

    /// Whether the job has a prompt to compute, or a text that the session has lost.
    pub fn has_prompt(&self) -> bool {
        !self.is_loading() && self.wants_prompt()
    }

    /// [`Slot::has_prompt`], also while the text comes from disk.
    pub fn wants_prompt(&self) -> bool {
        !self.is_parked && self.job.as_ref().is_some_and(|job| !job.is_decoding(&self.session))
    }

    /// Whether a step of decode may compute the job's next token.
    pub fn can_decode(&self) -> bool {
        self.wants_decode() && self.session.n_past() < self.room
    }

    /// [`Slot::can_decode`], if the session has room for the token.
    pub fn wants_decode(&self) -> bool {
        let wants = |job: &Running<S>| job.is_decoding(&self.session) && !job.is_full();
        !self.is_parked && self.job.as_ref().is_some_and(wants)
    }

    /// Whether the next pass is the job's own.
    pub fn is_alone(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.is_alone)
    }

    /// Reads the job's source text, if the model has an encoder and it was not read.
    pub fn encode(&mut self) -> Result<()> {
        self.job.as_mut().map_or(Ok(()), |job| job.encode(&mut self.session))
    }

    /// See [`Running::begin`].
    pub fn begin(&mut self) -> usize {
        self.job.as_mut().map_or(0, |job| job.begin(&self.session))
    }

    /// Puts at most `n` tokens of the job's text into the next pass.
    pub fn plan(&mut self, n: usize) {
        self.next.clear();
        if let Some(job) = &self.job {
            self.next.extend(job.next_tokens(&self.session, n));
            if let Some(marks) = self.marks.as_mut().filter(|_| self.salt.is_some()) {
                let n_past = self.session.n_past();
                let pass = n_past..n_past + self.next.len();
                self.session.mark(marks.plan(pass, job.n_prompt(), job.text().len()));
            }
        }
    }

    /// Plans a step of decode of the job, with drafts behind its token if it may have some:
    /// refused ones must leave no trace.
    pub fn plan_step(&mut self, may_draft: bool, engine: &Engine, ledger: &mut Ledger) {
        self.plan(1);
        let Slot { session, job: Some(job), next, room, .. } = self else { return };
        if !may_draft || !session.can_verify() {
            return job.drop_drafts();
        }
        let free = (*room).min(engine.n_ctx()).saturating_sub(session.n_past() + 1);
        let most = free.min(engine.plan().n_ubatch - 1).min(session.most_drafts());
        job.plan_drafts(session, most, ledger);
        next.extend(job.drafts());
        session.begin_verification(job.drafts().len());
        if job.drafts().is_empty() {
            job.look_ahead(session);
        }
    }

    /// Whether the gate decides about the job's drafts.
    pub fn is_gated(&self) -> bool {
        self.job.as_ref().is_some_and(Running::is_gated)
    }

    /// The planned part of a pass, and the job to tell how far it is.
    pub fn part(&mut self) -> Option<SlotRow<'_, S>> {
        let Slot { session, job: Some(job), next, .. } = self else { return None };
        let (phase, want) = job.next_kind(session, next.len());
        let (owner, n_past) = (job.owner, session.n_past());
        Some(SlotRow { row: BatchRow { session, tokens: next, phase, want }, job, owner, n_past })
    }

    /// Hands the checkpoints that passes have made over to `pages`. The last one within a prompt or
    /// an answer goes when there is a later one.
    pub fn keep_checkpoints(&mut self, pages: &mut Pages) {
        let (Some(marks), Some(salt)) = (&mut self.marks, self.salt) else { return };
        for (n, states) in self.session.take_checkpoints() {
            let text = &self.session.tokens()[..n];
            let Some(kept) = pages.keep_states(salt, text, &states) else { continue };
            if let Some(old) = marks.replace(n, Arc::ptr_eq(&kept, &states)) {
                pages.drop_states(salt, &text[..old]);
            }
            self.session.add_checkpoint(n, &kept);
        }
    }

    /// Hands out a pass's results: the next token, or the job's end.
    pub fn settle(&mut self, engine: &Engine, result: std::result::Result<(), PassError>) {
        let Slot { session, job: Some(job), given, .. } = self else { return };
        let result = match result {
            Ok(()) => job.commit(session, engine).and_then(|end| match end {
                None if job.shift(session)? => {
                    self.marks.iter_mut().for_each(Marks::clear);
                    (self.n_saved, self.is_saved) = (0, false);
                    Ok(None)
                }
                end => Ok(end),
            }),
            Err(why) => {
                job.drop_drafts();
                match why {
                    PassError::Shared => {
                        job.is_alone = true;
                        Ok(None)
                    }
                    PassError::Own(why) => Err(why),
                }
            }
        };
        *given = job.take_given();
        match result {
            Ok(None) => {}
            Ok(Some(finish)) => self.end(engine, Ok(finish)),
            Err(Error::Interrupted) => self.end(engine, Ok(FinishReason::Cancelled)),
            Err(why) => self.end(engine, Err(why)),
        }
    }

    /// Adds to the job's traffic, if there is one: see [`Running::add_traffic`].
    pub fn add_traffic(&mut self, part: &ExpertTraffic) {
        self.job.iter_mut().for_each(|job| job.add_traffic(part));
    }

    /// See [`Running::count_stall`].
    pub fn count_stall(&self, start: Instant, counts: &mut Counts) {
        self.job.iter().for_each(|job| job.count_stall(start, counts));
    }

    /// See [`Running::count_step`].
    pub fn count_step(&mut self, counts: &mut Counts) {
        self.job.iter_mut().for_each(|job| job.count_step(counts));
    }

    /// The job rests, or is not in decode: the time to its next step is no stall.
    pub fn forget_step(&mut self) {
        self.job.iter_mut().for_each(Running::forget_step);
    }

    pub fn end_if_cancelled(&mut self, engine: &Engine) {
        if self.job.as_ref().is_some_and(|job| job.cancel.is_cancelled()) {
            self.end(engine, Ok(FinishReason::Cancelled));
        }
    }

    /// Ends the job; the session keeps its text for the next one.
    pub fn end(&mut self, engine: &Engine, result: Result<FinishReason>) {
        if let Some(job) = self.job.take() {
            job.finish(result, self.session.n_past(), engine);
            self.session.give_back();
            (self.room, self.lent) = (self.session.n_past(), 0);
            (self.load, self.n_saved) = (None, 0);
            self.is_parked = false;
        }
    }

    pub fn status(&self) -> SlotStatus {
        let job = self.job.as_ref().map(|job| job.status(&self.session));
        let (n_past, is_parked) = (self.session.n_past(), self.is_parked);
        SlotStatus { id: self.id, n_past, is_parked, job }
    }
}

/// A slot's part of a pass.
pub struct SlotRow<'a, S> {
    pub row: BatchRow<'a>,
    pub job: &'a mut Running<S>,
    pub owner: Owner,
    /// Tokens in the session before the pass.
    pub n_past: usize,
}

/// Why a pass has failed for a job.
pub enum PassError {
    /// For reasons of its own.
    Own(Error),
    /// For reasons of its own or of another job in the pass.
    Shared,
}
