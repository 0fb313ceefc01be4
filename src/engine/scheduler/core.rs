//! The steps of a scheduler: give sessions to jobs, choose the rows of a pass, compute it, hand out
//! its results.
//!
//! Texts in decode are computed together, one token each. A prompt's pass rests before each of its
//! layers and between the parts of it while steps of decode are due, so that a text in decode waits
//! for a part of a layer and not for the prompt, and the prompt's experts are loaded once all the
//! same. On GPUs layers have no parts.

use std::sync::Arc;
use std::time::Duration;

use super::job::{Job, JobSink};
use super::kv_budget::KvBudget;
use super::ledger::Ledger;
use super::pages::Pages;
use super::parking::Parking;
use super::passes;
use super::queue::Queue;
use super::resting::Resting;
use super::rows::divide;
use super::saved_slots::{SlotError, SlotResult};
use super::slot::Slot;
use super::status::{Board, Counts, Status};
use crate::cancel::Cancel;
use crate::engine::kv_disk::{KvDisk, KvFolder, TextReader};
use crate::engine::speculation::Gate;
use crate::engine::{BatchRow, Engine, FinishReason, Outcome, Session};
use crate::{Error, Result};

/// How long a job waits at most for others to share its prompt's pass with.
const GATHER_MAX: Duration = Duration::from_millis(25);

/// Jobs, sessions, and how time is shared.
pub struct Core<S> {
    engine: Arc<Engine>,
    budget: KvBudget,
    pub(super) pages: Pages,
    pub(super) slots: Vec<Slot<S>>,
    pub(super) queue: Queue<S>,
    /// Jobs that rest, the longest first.
    pub(super) resting: Vec<Resting<S>>,
    pub(super) ledger: Ledger,
    board: Board,
}

impl<S: JobSink> Core<S> {
    /// For sessions of `engine`; prompts get the part `prompt_share`, in 0..1, of the time, and
    /// `page_bytes` of memory keep texts that no session holds.
    pub fn new(
        engine: &Arc<Engine>,
        sessions: Vec<Session>,
        prompt_share: f64,
        page_bytes: usize,
    ) -> Core<S> {
        Core::with_pages(engine, sessions, prompt_share, Pages::new(page_bytes))
    }

    /// A core whose `folder` keeps all texts besides.
    pub fn on_disk(
        engine: &Arc<Engine>,
        sessions: Vec<Session>,
        prompt_share: f64,
        page_bytes: usize,
        folder: KvFolder,
    ) -> Result<Core<S>> {
        let identity = engine.kv_identity()?;
        let of_disk = engine.clone();
        let disk = KvDisk::start(folder, move || of_disk.reads_experts())?;
        let pages = Pages::new(page_bytes).on_disk(disk, identity);
        Ok(Core::with_pages(engine, sessions, prompt_share, pages))
    }

    /// [`Core::new`] with the pages of another core that had the same sessions.
    pub(in crate::engine) fn with_pages(
        engine: &Arc<Engine>,
        sessions: Vec<Session>,
        prompt_share: f64,
        pages: Pages,
    ) -> Core<S> {
        let plan = engine.plan();
        let most = if plan.shares_kv() { plan.n_ctx_all } else { usize::MAX };
        let budget = KvBudget::new(most, engine.n_ctx(), sessions.len());
        let slots = sessions.into_iter().enumerate();
        Core {
            engine: engine.clone(),
            slots: slots.map(|(id, session)| Slot::new(id, session, &pages)).collect(),
            budget,
            pages,
            queue: Queue::default(),
            resting: Vec::new(),
            ledger: Ledger::new(prompt_share),
            board: Board::default(),
        }
    }

    /// The sessions, in the order in which they were given, the pages and the gate of drafts.
    pub(in crate::engine) fn into_parts(self) -> (Vec<Session>, Pages, Gate) {
        let sessions = self.slots.into_iter().map(|slot| slot.session).collect();
        (sessions, self.pages, self.ledger.gate)
    }

    /// Goes on with what another one's passes have told of drafts.
    pub(in crate::engine) fn set_gate(&mut self, gate: Gate) {
        self.ledger.gate = gate;
    }

    /// Snapshots, which steps replace.
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// Adds a job.
    pub fn submit(&mut self, job: Job<S>) {
        let seated = self.slots.iter().filter_map(|slot| slot.job.as_ref());
        let running = seated.chain(self.resting.iter().map(|resting| &resting.job));
        let active = running.map(|job| job.owner).chain(self.queue.owners());
        self.ledger.enter(job.owner, &active.collect::<Vec<_>>());
        self.queue.push(job);
    }

    /// Whether there is no job.
    pub fn is_idle(&self) -> bool {
        let has_jobs = self.queue.len() > 0 || !self.resting.is_empty();
        !has_jobs && self.slots.iter().all(|slot| slot.job.is_none())
    }

    pub fn n_sessions(&self) -> usize {
        self.slots.len()
    }

    /// The time for which a job that finds no other one waits for some to share its prompt's pass
    /// with: a fiftieth of what such a pass takes, as passes so far tell.
    pub fn time_to_gather(&self) -> Duration {
        let Counts { prompt_ns, n_prompt_layers, .. } = self.ledger.counts;
        let pass_ns = prompt_ns / n_prompt_layers.max(1) * self.engine.n_layers() as u64;
        Duration::from_nanos(pass_ns / 50).min(GATHER_MAX)
    }

    /// Jobs with a session.
    pub fn n_running(&self) -> usize {
        self.slots.iter().filter(|slot| slot.job.is_some()).count()
    }

    /// Jobs whose readers are behind, without a session.
    pub fn n_resting(&self) -> usize {
        self.resting.len()
    }

    /// The cancel tokens of the jobs that wait for a session.
    pub fn waiting(&self) -> Vec<Cancel> {
        self.queue.iter().map(|job| job.cancel.clone()).collect()
    }

    /// Cancels every job and ends it.
    pub fn cancel_all(&mut self) {
        self.queue.iter().for_each(|job| job.cancel.cancel());
        let seated = self.slots.iter().filter_map(|slot| slot.job.as_ref());
        let resting = self.resting.iter().map(|resting| &resting.job);
        seated.chain(resting).for_each(|job| job.cancel.cancel());
        self.end_cancelled();
    }

    /// Computes a pass; false if there is none to compute now: no job, or only such whose readers
    /// are behind.
    pub fn step(&mut self) -> bool {
        if let Err(why) = self.engine.check_files() {
            self.fail_all(&why);
        }
        self.end_cancelled();
        self.rest_late();
        self.parking().grow();
        self.admit();
        self.copy_between_sessions();
        let is_loading = self.load();
        self.plan_prompts();
        let has_prompt = self.slots.iter().any(|slot| !slot.next.is_empty());
        let can_decode = self.slots.iter().any(Slot::can_decode);
        if !(has_prompt && can_decode) {
            self.ledger.share.reset();
        }
        let engine = self.engine.clone();
        let is_busy = if can_decode && self.ledger.share.is_decode_due() {
            let eval_batch = &mut |rows: &mut [BatchRow<'_>]| engine.eval_batch(rows);
            passes::decode(&engine, &mut self.slots, &mut self.ledger, eval_batch)
        } else if has_prompt {
            // Such a pass is long: it is seen before it ends.
            self.publish();
            self.parking().lend();
            self.compute_prompts();
            self.parking().take_back();
            true
        } else {
            is_loading
        };
        self.slots.iter_mut().for_each(|slot| slot.keep_checkpoints(&mut self.pages));
        self.slots.iter_mut().for_each(|slot| slot.save(&self.pages));
        self.publish();
        is_busy
    }

    /// Ends every job with this error: the model's file has changed. Texts are neither kept nor
    /// found again from then on.
    fn fail_all(&mut self, why: &Error) {
        let again = || why.again();
        self.pages.forget();
        for slot in &mut self.slots {
            slot.end(&self.engine, Err(again()));
            slot.erase();
        }
        let resting = std::mem::take(&mut self.resting);
        resting.into_iter().for_each(|one| one.job.finish(Err(again()), 0, &self.engine));
        let waiting = self.queue.take_all();
        waiting.into_iter().for_each(|mut job| job.sink.finished(Err(again())));
    }

    fn end_cancelled(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.end_if_cancelled(&self.engine));
        self.end_cancelled_resting();
        for mut job in self.queue.take_cancelled() {
            job.sink.finished(Ok(Outcome::new(FinishReason::Cancelled)));
        }
    }

    /// Lets parked jobs go on, then gives free sessions to those that have rested and to waiting
    /// ones, the ones of the owner that has used the least time first.
    fn admit(&mut self) {
        if !self.parking().resume() {
            return;
        }
        if self.slots.iter().all(|slot| slot.job.is_none()) {
            // Reads while there was no job belong to none.
            self.ledger.traffic.take(&self.engine);
        }
        while self.slots.iter().any(|slot| slot.job.is_none()) {
            let next = self.queue.next(&self.ledger);
            if let Some(i) = self.rested().filter(|i| {
                let used = |owner| self.ledger.used(owner);
                let rested = used(self.resting[*i].job.owner);
                next.is_none_or(|(_, job)| rested <= used(job.owner))
            }) {
                if self.resume_rested(i).is_none() {
                    return;
                }
                continue;
            }
            let Some((place, job)) = next else { return };
            let n_known = self.n_known(job.salt, &job.prompt);
            let Some(i) = self.best_free(job.slot, job.salt, &job.prompt) else { return };
            let (n_text, n_to_come) = (job.prompt.len(), job.generation.n_left());
            if !self.parking().start(i, n_text, n_to_come) {
                return;
            }
            let Some(job) = self.queue.take(place) else { return };
            let slot = &mut self.slots[i];
            self.ledger.counts.n_started += 1;
            slot.last_used = self.ledger.counts.n_started;
            slot.start(job, &mut self.pages, &self.engine);
            slot.extend_from_pages(&mut self.pages);
            slot.parts_at(n_known);
        }
    }

    /// Gives a free session to a job that has rested; `None` if there is no room.
    fn resume_rested(&mut self, place: usize) -> Option<()> {
        let Resting { job, salt, .. } = &self.resting[place];
        let (text, n_to_come) = (job.text(), job.n_to_come());
        let n_text = text.len();
        let i = self.best_free(None, *salt, text)?;
        self.parking().start(i, n_text, n_to_come).then_some(())?;
        let resting = self.resting.remove(place);
        self.ledger.counts.n_started += 1;
        let slot = &mut self.slots[i];
        slot.last_used = self.ledger.counts.n_started;
        slot.reseat(resting, &mut self.pages, &self.engine);
        slot.extend_from_pages(&mut self.pages);
        Some(())
    }

    /// The free session for a text: the one that is wished, else the one whose text it continues,
    /// else the one that was used least recently.
    fn best_free(&self, wished: Option<usize>, salt: Option<u64>, text: &[u32]) -> Option<usize> {
        let free = self.slots.iter().enumerate().filter(|(_, slot)| slot.job.is_none());
        let best = free.max_by_key(|(_, slot)| {
            let n = if slot.is_continued(salt, text) { slot.n_common(salt, text) } else { 0 };
            (wished == Some(slot.id), n, !slot.last_used)
        });
        best.map(|(i, _)| i)
    }

    fn parking(&mut self) -> Parking<'_, S> {
        Parking {
            budget: self.budget,
            slots: &mut self.slots,
            pages: &mut self.pages,
            counts: &mut self.ledger.counts,
        }
    }

    /// Tokens that a text has in common with a session's or with pages.
    fn n_known(&self, salt: Option<u64>, text: &[u32]) -> usize {
        let Some(in_pages) = salt.map(|salt| self.pages.n_held(salt, text)) else { return 0 };
        let in_sessions = self.slots.iter().map(|slot| slot.n_common(salt, text)).max();
        in_sessions.unwrap_or(0).max(in_pages)
    }

    /// Copies what other sessions hold of the texts that are to be computed.
    fn copy_between_sessions(&mut self) {
        for i in 0..self.slots.len() {
            let slot = &self.slots[i];
            if !slot.wants_prompt() {
                continue;
            }
            let others = (0..self.slots.len()).filter(|j| *j != i);
            let best = others.map(|j| (slot.n_from(&self.slots[j]), j)).max();
            if let Some((n, j)) = best.filter(|(n, _)| *n > slot.session.n_past())
                && let Ok([to, from]) = self.slots.get_disjoint_mut([i, j])
            {
                to.session.extend_from(&from.session, n);
            }
        }
    }

    /// Loads some of the texts that the disk has; false if there are none.
    fn load(&mut self) -> bool {
        let Core { slots, pages, .. } = self;
        let n_loading = slots.iter_mut().map(|slot| usize::from(slot.load(pages))).sum::<usize>();
        n_loading > 0
    }

    /// Whether texts of jobs that have ended are still to be saved.
    pub fn is_saving(&self) -> bool {
        self.slots.iter().any(|slot| slot.is_saving(&self.pages))
    }

    /// Saves them.
    pub fn finish_saving(&mut self) {
        while self.is_saving() {
            self.slots.iter_mut().for_each(|slot| slot.save(&self.pages));
            if self.is_saving() {
                self.pages.wait_for_disk();
            }
        }
    }

    /// Decides how many tokens of which prompts the next pass computes.
    fn plan_prompts(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.next.clear());
        let mut waiting: Vec<_> = self.slots.iter_mut().filter(|slot| slot.has_prompt()).collect();
        waiting.sort_by_key(|slot| slot.last_used);
        // The capacity of experts in an encoder–decoder model counts the tokens of a pass, and
        // tokens that see all of their text are computed with it.
        let sees_all = self.engine.model().hyper().sees_all;
        let is_whole = self.engine.encoder().is_some();
        if let Some(i) = waiting.iter().position(|slot| is_whole || slot.is_alone()) {
            waiting = vec![waiting.swap_remove(i)];
        }
        if sees_all {
            let mut room = self.engine.n_ctx();
            waiting.retain(|slot| {
                let fits = slot.n_left() <= room;
                room = if fits { room - slot.n_left() } else { 0 };
                fits
            });
        }
        // A text that begins as an older one waits for what that one computes.
        for i in (1..waiting.len()).rev() {
            let (older, younger) = waiting.split_at_mut(i);
            let mut leaders = older.iter_mut();
            let shared = leaders.find_map(|leader| Some((younger[0].n_to_follow(leader)?, leader)));
            if let Some((n, leader)) = shared {
                leader.parts_at(n);
                waiting.remove(i);
            }
        }
        let left: Vec<usize> = waiting.iter().map(|slot| slot.n_left()).collect();
        let is_all = is_whole || sees_all;
        let room = if is_all { left.iter().sum() } else { self.engine.plan().n_ubatch };
        for (slot, n) in waiting.into_iter().zip(divide(&left, room)) {
            if n > 0 {
                self.ledger.counts.n_reused += slot.begin() as u64;
            }
            slot.plan(n);
        }
    }

    /// One pass over the planned parts of prompts, with steps of decode in its rests.
    fn compute_prompts(&mut self) {
        let engine = &self.engine.clone();
        let slots = std::mem::take(&mut self.slots);
        let (mut prompts, mut others): (Vec<_>, Vec<_>) =
            slots.into_iter().partition(|slot| !slot.next.is_empty());
        passes::compute_prompts(engine, &mut prompts, &mut others, &mut self.ledger);
        self.slots = prompts;
        self.slots.extend(others);
        self.slots.sort_by_key(|slot| slot.id);
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// A slot without a job.
    pub(super) fn free_slot(&mut self, id: usize) -> SlotResult<&mut Slot<S>> {
        self.engine.check_files().map_err(SlotError::Other)?;
        let slot = self.slots.iter_mut().find(|slot| slot.id == id).ok_or(SlotError::NoText)?;
        if slot.job.is_some() { Err(SlotError::Busy) } else { Ok(slot) }
    }

    /// Makes room in a free slot for a text of `n` tokens; its own goes to the pages. False if
    /// others need it.
    pub(super) fn make_room(&mut self, id: usize, n: usize) -> bool {
        let Some(i) = self.slots.iter().position(|slot| slot.id == id) else { return false };
        self.slots[i].empty(&mut self.pages);
        self.parking().start(i, n, Some(0))
    }

    /// Reads a text into a slot that was emptied.
    pub(super) fn fill_slot(&mut self, id: usize, salt: u64, from: &mut TextReader) -> Result<()> {
        let slots = self.slots.iter_mut().filter(|slot| slot.id == id);
        for slot in slots {
            slot.fill(salt, from, &mut self.pages)?;
            self.ledger.counts.n_started += 1;
            slot.last_used = self.ledger.counts.n_started;
        }
        self.publish();
        Ok(())
    }

    pub(super) fn publish(&self) {
        let slots = self.slots.iter().map(Slot::status).collect();
        self.board.write(Status {
            slots,
            n_queued: self.queue.len(),
            n_resting: self.resting.len(),
            n_pages: self.pages.len(),
            n_checkpoints: self.pages.n_states(),
            page_bytes: self.pages.n_bytes(),
            page_counts: self.pages.counts(),
            disk: self.pages.disk_counts(),
            counts: self.ledger.counts,
        });
    }
}
