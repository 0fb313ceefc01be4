//! Jobs whose readers are behind, without a session: others have theirs meanwhile.

use std::sync::Arc;
use std::time::Instant;

use super::core::Core;
use super::job::JobSink;
use super::running::Running;
use super::slot::Slot;
use crate::engine::FinishReason;

/// A job without a session. What was computed of its text is in pages; the rest is computed again
/// when it goes on, and the bits are those that it has without a rest.
pub struct Resting<S> {
    pub job: Running<S>,
    /// The salt of the text.
    pub salt: Option<u64>,
    /// How much of each adapter the text takes.
    pub adapters: Arc<[f32]>,
}

impl<S: JobSink> Core<S> {
    /// Takes sessions from jobs whose readers are behind, as many as other jobs wait for, from
    /// those that have kept others waiting longest first.
    pub(super) fn rest_late(&mut self) {
        let now = Instant::now();
        let jobs = self.slots.iter_mut().filter_map(|slot| slot.job.as_mut());
        jobs.for_each(|job| job.look_at_reader(now));
        // What an encoder has read is in its session alone.
        if self.engine().encoder().is_some() {
            return;
        }
        let late = |slot: &Slot<S>| slot.job.as_ref().filter(|_| !slot.is_parked)?.is_late();
        let mut all: Vec<_> =
            (0..self.slots.len()).filter_map(|i| Some((late(&self.slots[i])?, i))).collect();
        all.sort_unstable();
        let n_ready = self.resting.iter().filter(|resting| !resting.job.is_full()).count();
        let n_free = self.slots.iter().filter(|slot| slot.job.is_none()).count();
        let n_parked = self.slots.iter().filter(|slot| slot.is_parked).count();
        let n = (self.queue.len() + n_ready).saturating_sub(n_free) + n_parked;
        for (_, i) in all.into_iter().rev().take(n) {
            let resting = self.slots[i].unseat(&mut self.pages);
            self.ledger.counts.n_parked += resting.iter().len() as u64;
            self.resting.extend(resting);
        }
    }

    /// The job that may go on next, if any reader has caught up: the one that rests longest.
    pub(super) fn rested(&self) -> Option<usize> {
        self.resting.iter().position(|resting| !resting.job.is_full())
    }

    /// Ends those that were cancelled.
    pub(super) fn end_cancelled_resting(&mut self) {
        let all = std::mem::take(&mut self.resting).into_iter();
        let (over, left): (Vec<_>, Vec<_>) = all.partition(|one| one.job.cancel.is_cancelled());
        self.resting = left;
        let engine = self.engine().clone();
        over.into_iter().for_each(|one| one.job.finish(Ok(FinishReason::Cancelled), 0, &engine));
    }
}
