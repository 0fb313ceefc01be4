//! Jobs on their way to the thread that computes.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::core::Core;
use super::job::{AnySink, Job};
use super::saved_slots::BetweenPasses;
use crate::cancel::Cancel;

pub struct Inbox<J> {
    state: Mutex<InboxState<J>>,
    pub changed: Condvar,
}

pub struct InboxState<J> {
    pub jobs: VecDeque<J>,
    pub tasks: Vec<BetweenPasses<AnySink>>,
    /// No more jobs are taken.
    pub is_closed: bool,
    /// The thread ends: jobs that are left are cancelled.
    pub is_over: bool,
    /// Whether the thread should look at its jobs again.
    pub is_woken: bool,
    /// Jobs with the thread: the cancel tokens of those that wait for a session, and the number of
    /// the others.
    pub waiting: Vec<Cancel>,
    pub n_running: usize,
    /// Jobs whose readers are behind, without a session.
    pub n_resting: usize,
}

impl<J> Default for Inbox<J> {
    fn default() -> Self {
        let state = InboxState {
            jobs: VecDeque::new(),
            tasks: Vec::new(),
            is_closed: false,
            is_over: false,
            is_woken: false,
            waiting: Vec::new(),
            n_running: 0,
            n_resting: 0,
        };
        Inbox { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<J> Inbox<J> {
    pub fn lock(&self) -> MutexGuard<'_, InboxState<J>> {
        // Its users change one field after the other and panic nowhere between.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// If there is a job, waits until there are `n` of them, for at most `time`.
    pub fn gather<'a>(
        &self,
        state: MutexGuard<'a, InboxState<J>>,
        n: usize,
        time: Duration,
    ) -> MutexGuard<'a, InboxState<J>> {
        let lacks_jobs = |state: &mut InboxState<J>| {
            !state.jobs.is_empty() && state.jobs.len() < n && !state.is_over
        };
        let waited = self.changed.wait_timeout_while(state, time, lacks_jobs);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl<J> InboxState<J> {
    /// Jobs that are to have a session and have none.
    pub fn n_queued(&self) -> usize {
        self.jobs.len() + self.waiting.iter().filter(|cancel| !cancel.is_cancelled()).count()
    }
}

impl<J> InboxState<J> {
    /// Notes how many jobs the thread has.
    pub fn look(&mut self, core: &Core<AnySink>) {
        (self.n_running, self.n_resting) = (core.n_running(), core.n_resting());
        self.waiting = core.waiting();
    }
}

impl<S> InboxState<Job<S>> {
    /// Takes out the jobs whose clients have left before the thread has looked at them: while a
    /// pass is long they must not keep others out.
    pub fn take_cancelled(&mut self) -> VecDeque<Job<S>> {
        let jobs = std::mem::take(&mut self.jobs).into_iter();
        let (cancelled, left) = jobs.partition(|job| job.cancel.is_cancelled());
        self.jobs = left;
        cancelled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn as_many_jobs_as_there_are_sessions_are_gathered() {
        let inbox = Inbox::default();
        std::thread::scope(|scope| {
            inbox.lock().jobs.push_back(0);
            scope.spawn(|| {
                for job in 1..3 {
                    inbox.lock().jobs.push_back(job);
                    inbox.changed.notify_one();
                }
            });
            let state = inbox.gather(inbox.lock(), 3, LONG);
            assert_eq!(state.jobs, [0, 1, 2]);
        });
    }

    #[test]
    fn there_is_no_waiting_without_a_reason() {
        let inbox = Inbox::default();
        // No job that could wait for others.
        drop(inbox.gather(inbox.lock(), 2, LONG));
        inbox.lock().jobs.push_back(0);
        // One session alone; no time; the end.
        drop(inbox.gather(inbox.lock(), 1, LONG));
        drop(inbox.gather(inbox.lock(), 2, Duration::ZERO));
        inbox.lock().is_over = true;
        assert_eq!(inbox.gather(inbox.lock(), 2, LONG).jobs.len(), 1);
    }
}
