//! Jobs that wait for a session.

use std::collections::VecDeque;

use super::job::{Job, Owner};
use super::ledger::Ledger;

/// The waiting jobs in the order of their arrival.
pub struct Queue<S>(VecDeque<Job<S>>);

impl<S> Default for Queue<S> {
    fn default() -> Self {
        Queue(VecDeque::new())
    }
}

impl<S> Queue<S> {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Job<S>> {
        self.0.iter()
    }

    /// The jobs' owners.
    pub fn owners(&self) -> impl Iterator<Item = Owner> {
        self.iter().map(|job| job.owner)
    }

    pub fn push(&mut self, job: Job<S>) {
        self.0.push_back(job);
    }

    /// The job that is next, and its place: one of the owner that has used the least time, of those
    /// with the lowest priority number the first.
    pub fn next(&self, ledger: &Ledger) -> Option<(usize, &Job<S>)> {
        let next = self.owners().min_by_key(|owner| ledger.used(*owner))?;
        let jobs = self.iter().enumerate().filter(|(_, job)| job.owner.id == next.id);
        jobs.min_by_key(|(_, job)| job.priority)
    }

    /// Takes the job at a place.
    pub fn take(&mut self, place: usize) -> Option<Job<S>> {
        self.0.remove(place)
    }

    /// Takes out all jobs.
    pub fn take_all(&mut self) -> VecDeque<Job<S>> {
        std::mem::take(&mut self.0)
    }

    /// Takes out the jobs that were cancelled.
    pub fn take_cancelled(&mut self) -> VecDeque<Job<S>> {
        if !self.0.iter().any(|job| job.cancel.is_cancelled()) {
            return VecDeque::new();
        }
        let jobs = std::mem::take(&mut self.0).into_iter();
        let (cancelled, left) = jobs.partition(|job| job.cancel.is_cancelled());
        self.0 = left;
        cancelled
    }
}
