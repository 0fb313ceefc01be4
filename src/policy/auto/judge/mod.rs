//! The choice of a candidate by measured times. One candidate is kept. From time to time another
//! one is tried in a bout: windows of decode steps with the one and with the other, by turns, so
//! that what changes with the text or the machine changes both. A bout ends as soon as it is clear
//! enough who is faster; a candidate that is clearly faster is kept from then on.
//!
//! For some tokens a candidate lives on the experts that the one before it has left in memory, so
//! that short windows show a part of a difference. They decide about candidates that are much
//! slower. Those that come near the kept one are tried again in long windows.

mod bout;
#[cfg(test)]
mod tests;
mod window;

pub use bout::BoutSoFar;
use bout::{Bout, Look};
use window::Window;

/// Short windows before the first bout, in which memory fills and candidates learn; and where they
/// have learned in earlier runs.
const WARM_UP: u32 = 8;
const WARM_UP_AGAIN: u32 = 2;

/// Short windows between two bouts, at first and at most. It grows when all candidates have been
/// tried in vain.
const INTERVAL_MIN: u32 = 2;
const INTERVAL_MAX: u32 = 256;
const INTERVAL_GROWTH: u32 = 4;

/// A window of the challenger that takes so many times as long as one of the kept candidate ends
/// the bout at once, and no pair of windows counts as further apart: a disk or a machine that is
/// busy for a moment must not decide.
const CLEAR: f64 = 2.0;

/// A candidate that takes longer than the kept one by more than this part is tried again only once
/// the interval has grown as far as it does, or when another one has just been kept: its ratio is
/// then of two bouts, and the new one may owe its place to a busy moment. One that was given up at
/// once is tried in every turn: a busy moment may have been the reason, and it costs a window at
/// most.
const NEAR: f64 = 0.1;

/// The state that later runs go on with.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub kept: usize,
    /// By candidate: the times as long that a token takes with it as with the kept one, by its last
    /// bout.
    pub ratios: Vec<Option<f64>>,
    /// The next challenger, or that of the bout that is under way, and the bout.
    pub next: usize,
    pub bout: BoutSoFar,
    /// Short windows until the next bout, and between two bouts.
    pub wait: u32,
    pub interval: u32,
    /// Challengers that are left before the interval grows.
    pub left: usize,
}

impl Record {
    /// The first of `n` candidates is kept, and no other one has been tried.
    pub fn new(n: usize) -> Record {
        Record {
            kept: 0,
            ratios: vec![None; n],
            next: usize::from(n > 1),
            bout: BoutSoFar::default(),
            wait: WARM_UP,
            interval: INTERVAL_MIN,
            left: n - 1,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Judge {
    record: Record,
    active: usize,
    /// The window that is under way.
    window: Window,
    /// With the kept candidate, ns a token: the running mean over windows.
    kept_ns: f64,
    bout: Option<Bout>,
}

impl Judge {
    /// Goes on where an earlier run has ended. What has not been tried yet comes first.
    pub fn new(record: Record) -> Judge {
        let n = record.ratios.len();
        assert!(record.kept < n && record.next < n);
        let mut judge = Judge {
            active: record.kept,
            record,
            window: Window::short(),
            kept_ns: 0.0,
            bout: None,
        };
        let record = &mut judge.record;
        record.wait = record.wait.max(WARM_UP_AGAIN);
        if record.bout.is_empty() {
            let is_untried = |i: &usize| *i != record.kept && record.ratios[*i].is_none();
            let untried: Vec<usize> = (0..n).filter(is_untried).collect();
            if let Some(first) = untried.first().filter(|_| untried.len() < n - 1) {
                (record.next, record.left) = (*first, untried.len());
                (record.interval, record.wait) = (INTERVAL_MIN, WARM_UP_AGAIN);
            }
        }
        judge
    }

    pub fn kept(&self) -> usize {
        self.record.kept
    }

    /// The candidate that predicts now.
    pub fn active(&self) -> usize {
        self.active
    }

    /// ns a token; 0 before the first window is over.
    pub fn kept_ns(&self) -> f64 {
        self.kept_ns
    }

    pub fn ratios(&self) -> &[Option<f64>] {
        &self.record.ratios
    }

    /// The state for a later run.
    pub fn record(&self) -> Record {
        let bout = self.bout.map_or(self.record.bout, |bout| bout.so_far);
        Record { bout, ..self.record.clone() }
    }

    /// A decode step has ended.
    pub fn count(&mut self, ns: u64) {
        let Some(mean) = self.window.add(ns) else { return self.give_up_early() };
        if self.active != self.kept() {
            let bout = self.bout.as_mut().expect("another is active in a bout alone");
            bout.tried = mean;
            self.window = bout.window();
            self.active = self.kept();
            return;
        }
        let is_first = self.kept_ns == 0.0;
        self.kept_ns += (mean - self.kept_ns) * if is_first { 1.0 } else { 0.25 };
        let Some(mut bout) = self.bout.take() else { return self.rest(mean) };
        bout.add(mean);
        match bout.outcome() {
            Some(is_faster) => self.end_bout(&bout.so_far, is_faster),
            None => self.go_on(bout),
        }
    }

    /// Ends the challenger's window, and its bout, once it has taken too long.
    fn give_up_early(&mut self) {
        if self.active == self.kept() || self.window.is_within(CLEAR * self.kept_ns) {
            return;
        }
        let mut bout = self.bout.take().expect("another is active in a bout alone");
        bout.tried = CLEAR * bout.before;
        bout.add(bout.before);
        self.active = self.kept();
        self.end_bout(&bout.so_far, false);
    }

    fn rest(&mut self, mean: f64) {
        self.window = Window::short();
        self.record.wait = self.record.wait.saturating_sub(1);
        if self.record.wait == 0 && self.record.left > 0 {
            let so_far = std::mem::take(&mut self.record.bout);
            self.go_on(Bout::new(self.record.look(), mean, so_far));
        }
    }

    fn go_on(&mut self, bout: Bout) {
        self.active = self.record.next;
        self.window = bout.window();
        self.bout = Some(bout);
    }

    fn end_bout(&mut self, bout: &BoutSoFar, is_faster: bool) {
        let (record, ratio) = (&mut self.record, bout.ratio());
        let (n, challenger) = (record.ratios.len(), record.next);
        record.ratios[challenger] = Some(ratio);
        if is_faster {
            record.ratios[record.kept] = Some(1.0);
            record.ratios.iter_mut().flatten().for_each(|of_kept| *of_kept /= ratio);
            record.ratios[challenger] = None;
            self.kept_ns *= ratio;
            record.kept = challenger;
            // One more is subtracted for the challenger.
            (record.interval, record.left) = (INTERVAL_MIN, n);
        }
        (self.active, self.window) = (record.kept, Window::short());
        record.choose_next();
    }
}

impl Record {
    /// Whether a judge can have written it.
    pub fn is_sound(&self) -> bool {
        let Record { ratios, bout, wait, interval, .. } = self;
        ratios.iter().flatten().chain([&bout.squares]).all(|x| x.is_finite() && *x >= 0.0)
            && bout.sum.is_finite()
            && *wait <= INTERVAL_MAX
            && (INTERVAL_MIN..=INTERVAL_MAX).contains(interval)
    }

    /// How closely the next challenger is looked at.
    fn look(&self) -> Look {
        match self.ratios[self.next] {
            Some(ratio) if ratio < 1.0 + NEAR => Look::Close,
            Some(_) | None => Look::First,
        }
    }

    /// Goes to the next challenger that is worth a bout, after a bout.
    fn choose_next(&mut self) {
        let n = self.ratios.len();
        loop {
            self.left -= 1;
            if self.left == 0 {
                self.interval = (INTERVAL_GROWTH * self.interval).min(INTERVAL_MAX);
                self.left = n - 1;
            }
            self.next = (self.next + 1) % n;
            if self.next == self.kept {
                self.next = (self.next + 1) % n;
            }
            let is_far = |ratio| (1.0 + NEAR..CLEAR).contains(&ratio);
            let is_worth_it = !self.ratios[self.next].is_some_and(is_far);
            if is_worth_it || [INTERVAL_MIN, INTERVAL_MAX].contains(&self.interval) {
                break;
            }
        }
        self.wait = self.interval;
    }
}
