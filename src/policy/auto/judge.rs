//! The choice of a candidate by measured times. One candidate is kept. From time to time another
//! one is tried in a bout: short windows of decode steps with the one and with the other, by turns,
//! so that what changes with the text or the machine changes both. A bout ends as soon as it is
//! clear enough who is faster; a candidate that is clearly faster is kept from then on.

/// Decode steps of a window. The first ones do not count: they find prefetches of the candidate
/// before.
const WINDOW_STEPS: u32 = 8;
const SKIPPED_STEPS: u32 = 2;

/// Windows before the first bout, in which memory fills and candidates learn; and where they have
/// learned in earlier runs.
const WARM_UP: u32 = 8;
const WARM_UP_AGAIN: u32 = 2;

/// Windows between two bouts, at first and at most. It grows when all candidates have been tried in
/// vain.
const INTERVAL_MIN: u32 = 4;
const INTERVAL_MAX: u32 = 256;
const INTERVAL_GROWTH: u32 = 4;

/// Windows of the challenger in a bout.
const PAIRS_MIN: u32 = 3;
const PAIRS_MAX: u32 = 12;

/// A window of the challenger that takes so many times as long as one of the kept candidate ends
/// the bout at once, and no pair of windows counts as further apart: a disk or a machine that is
/// busy for a moment must not decide.
const CLEAR: f64 = 2.0;

/// How much faster than the kept candidate another must be to be worth a change.
const MARGIN: f64 = 0.02;

/// How many standard errors a result must be away from the margin.
const CONFIDENCE: f64 = 1.5;

/// The noise of a pair of windows before any is measured: its standard deviation, and the number of
/// pairs that this counts for.
const NOISE: f64 = 0.05;
const NOISE_PAIRS: f64 = 2.0;

#[derive(Clone, Debug)]
pub struct Judge {
    kept: usize,
    active: usize,
    window: Window,
    /// With the kept candidate, ns a token: the running mean over windows.
    kept_ns: f64,
    /// By candidate: the times as long that a token takes with it as with the kept one, by its last
    /// bout.
    ratios: Vec<Option<f64>>,
    bout: Option<Bout>,
    /// Windows until the next bout, and between two bouts.
    wait: u32,
    interval: u32,
    /// The next challenger, and how many are left before the interval grows.
    next: usize,
    left: usize,
}

/// The window that is under way.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    steps: u32,
    sum_ns: u64,
}

impl Window {
    /// Adds a step; returns the mean time of a step when the window is over.
    fn add(&mut self, ns: u64) -> Option<f64> {
        self.steps += 1;
        if self.steps > SKIPPED_STEPS {
            self.sum_ns += ns;
        }
        if self.steps < WINDOW_STEPS {
            return None;
        }
        let Window { steps, sum_ns } = std::mem::take(self);
        // A logarithm is taken of it.
        Some((sum_ns as f64 / f64::from(steps - SKIPPED_STEPS)).max(1.0))
    }
}

/// A bout that is under way.
#[derive(Clone, Copy, Debug)]
struct Bout {
    challenger: usize,
    /// The kept candidate's last window, and the challenger's since.
    before: f64,
    tried: f64,
    /// Logarithms of the challenger's windows, each divided by the lesser of those beside it: one
    /// that a busy disk or machine has disturbed decides nothing.
    n: u32,
    sum: f64,
    squares: f64,
}

impl Bout {
    fn new(challenger: usize, before: f64) -> Bout {
        Bout { challenger, before, tried: 0.0, n: 0, sum: 0.0, squares: 0.0 }
    }

    /// The kept candidate's window that follows one of the challenger.
    fn add(&mut self, after: f64) {
        let most = CLEAR.ln();
        let ratio = (self.tried / self.before.min(after)).ln().clamp(-most, most);
        self.before = after;
        self.n += 1;
        self.sum += ratio;
        self.squares += ratio * ratio;
    }

    fn mean(&self) -> f64 {
        self.sum / f64::from(self.n)
    }

    /// Whether the challenger is faster by the margin, once that is clear.
    fn outcome(&self) -> Option<bool> {
        if self.n < PAIRS_MIN {
            return None;
        }
        let (n, mean) = (f64::from(self.n), self.mean());
        let squares = (self.squares - n * mean * mean).max(0.0) + NOISE_PAIRS * NOISE * NOISE;
        let error = (squares / (n - 1.0 + NOISE_PAIRS) / n).sqrt();
        let margin = (1.0 - MARGIN).ln();
        if mean + CONFIDENCE * error < margin {
            return Some(true);
        }
        let is_over = mean - CONFIDENCE * error > margin || self.n == PAIRS_MAX;
        is_over.then_some(false)
    }
}

impl Judge {
    /// Keeps one of `n` candidates at first. `ratios`: of an earlier run; one that has tried all in
    /// vain is believed for as long as if this run had, else what it has not tried comes first.
    pub fn new(kept: usize, ratios: Vec<Option<f64>>) -> Judge {
        let n = ratios.len();
        assert!(kept < n);
        let is_known = n > 1 && (0..n).all(|i| i == kept || ratios[i].is_some());
        let interval = INTERVAL_MIN * if is_known { INTERVAL_GROWTH } else { 1 };
        let is_new = ratios.iter().all(Option::is_none);
        let warm_up = if is_new { WARM_UP } else { WARM_UP_AGAIN };
        let others = (1..n).map(|i| (kept + i) % n);
        let untried: Vec<usize> = others.filter(|i| ratios[*i].is_none()).collect();
        Judge {
            kept,
            active: kept,
            window: Window::default(),
            kept_ns: 0.0,
            ratios,
            bout: None,
            wait: warm_up.max(interval),
            interval,
            next: untried.first().copied().unwrap_or((kept + 1) % n),
            left: if untried.is_empty() { n - 1 } else { untried.len() },
        }
    }

    pub fn kept(&self) -> usize {
        self.kept
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
        &self.ratios
    }

    /// The same for a later run: a bout that is under way counts with what it has measured, so that
    /// short runs try one candidate after the other.
    pub fn ratios_so_far(&self) -> Vec<Option<f64>> {
        let mut ratios = self.ratios.clone();
        if let Some(bout) = self.bout.as_ref().filter(|bout| bout.n > 0) {
            ratios[bout.challenger] = Some(bout.mean().exp());
        }
        ratios
    }

    /// A decode step has ended.
    pub fn count(&mut self, ns: u64) {
        let Some(mean) = self.window.add(ns) else { return self.give_up_early() };
        if self.active != self.kept {
            self.bout.as_mut().expect("another is active in a bout alone").tried = mean;
            self.active = self.kept;
            return;
        }
        let is_first = self.kept_ns == 0.0;
        self.kept_ns += (mean - self.kept_ns) * if is_first { 1.0 } else { 0.25 };
        let Some(mut bout) = self.bout.take() else { return self.rest(mean) };
        bout.add(mean);
        match bout.outcome() {
            Some(is_faster) => self.end_bout(&bout, is_faster),
            None => self.go_on(bout),
        }
    }

    /// Ends the challenger's window, and its bout, once it has taken too long.
    fn give_up_early(&mut self) {
        let most = CLEAR * self.kept_ns * f64::from(WINDOW_STEPS - SKIPPED_STEPS);
        if self.active == self.kept || self.window.sum_ns as f64 <= most {
            return;
        }
        let mut bout = self.bout.take().expect("another is active in a bout alone");
        bout.tried = CLEAR * bout.before;
        bout.add(bout.before);
        self.window = Window::default();
        self.active = self.kept;
        self.end_bout(&bout, false);
    }

    fn rest(&mut self, mean: f64) {
        self.wait = self.wait.saturating_sub(1);
        if self.wait == 0 && self.left > 0 {
            self.go_on(Bout::new(self.next, mean));
        }
    }

    fn go_on(&mut self, bout: Bout) {
        self.active = bout.challenger;
        self.bout = Some(bout);
    }

    fn end_bout(&mut self, bout: &Bout, is_faster: bool) {
        let (n, ratio) = (self.ratios.len(), bout.mean().exp());
        self.ratios[bout.challenger] = Some(ratio);
        if is_faster {
            self.ratios[self.kept] = Some(1.0);
            self.ratios.iter_mut().flatten().for_each(|of_kept| *of_kept /= ratio);
            self.ratios[bout.challenger] = None;
            self.kept_ns *= ratio;
            (self.kept, self.active) = (bout.challenger, bout.challenger);
            (self.interval, self.left) = (INTERVAL_MIN, n - 1);
        } else {
            self.left -= 1;
            if self.left == 0 {
                let interval = (INTERVAL_GROWTH * self.interval).min(INTERVAL_MAX);
                (self.interval, self.left) = (interval, n - 1);
            }
        }
        self.wait = self.interval;
        self.next = (bout.challenger + 1) % n;
        if self.next == self.kept {
            self.next = (self.next + 1) % n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(n: usize) -> Judge {
        Judge::new(0, vec![None; n])
    }

    /// Runs steps that cost what `cost` says of the active candidate; returns the number of steps
    /// of each.
    fn run(judge: &mut Judge, n_steps: u32, cost: impl Fn(usize, u32) -> u64) -> Vec<u32> {
        let mut steps = vec![0; judge.ratios.len()];
        for step in 0..n_steps {
            steps[judge.active()] += 1;
            judge.count(cost(judge.active(), step));
        }
        steps
    }

    /// From 0 to 1, whatever the step.
    fn noise(step: u32) -> f64 {
        (crate::policy::mix(step.into()) >> 40) as f64 / (1 << 24) as f64
    }

    #[test]
    fn what_pays_is_kept_and_little_time_goes_to_the_others() {
        for best in 0..4 {
            let mut judge = judge(4);
            let steps = run(&mut judge, 20_000, |i, step| {
                let cost = if i == best { 1000.0 } else { 1200.0 };
                (cost + 300.0 * noise(step)) as u64
            });
            assert_eq!(judge.kept(), best);
            assert!(steps[best] > 18_500, "{steps:?}");
            assert!(steps.iter().all(|n| *n > 0), "each is tried: {steps:?}");
        }
    }

    /// The costs of all rise and fall by half, slowly: texts differ more than candidates.
    #[test]
    fn what_changes_for_all_decides_nothing() {
        let mut judge = judge(3);
        run(&mut judge, 20_000, |i, step| {
            let text = 1.0 + 0.5 * (f64::from(step) / 150.0).sin();
            (1000.0 * text * [1.0, 0.9, 1.1][i] + 100.0 * noise(step)) as u64
        });
        assert_eq!(judge.kept(), 1);
        let ratio = |i: usize| judge.ratios()[i].unwrap();
        assert!((ratio(0) / (1.0 / 0.9) - 1.0).abs() < 0.05, "{}", ratio(0));
        assert!((ratio(2) / (1.1 / 0.9) - 1.0).abs() < 0.05, "{}", ratio(2));
    }

    #[test]
    fn a_change_is_noticed() {
        let mut judge = judge(2);
        run(&mut judge, 2_000, |i, _| if i == 1 { 100 } else { 200 });
        assert_eq!(judge.kept(), 1);
        run(&mut judge, 8_000, |i, _| if i == 1 { 400 } else { 200 });
        assert_eq!(judge.kept(), 0);
    }

    /// A candidate that learns is slower at first and faster in the end.
    #[test]
    fn a_late_learner_gets_its_chance() {
        let mut judge = judge(5);
        run(&mut judge, 20_000, |i, step| match i {
            3 => 800 + 600_000 / u64::from(step + 1000),
            _ => 1000 + (100.0 * noise(step)) as u64,
        });
        assert_eq!(judge.kept(), 3);
    }

    #[test]
    fn equals_are_not_exchanged_for_noise() {
        let mut judge = judge(3);
        let mut n_changes = 0;
        let mut kept = judge.kept();
        for step in 0..20_000 {
            judge.count(1000 + (200.0 * noise(step)) as u64);
            n_changes += u32::from(std::mem::replace(&mut kept, judge.kept()) != kept);
        }
        assert_eq!(n_changes, 0);
    }

    /// A window that takes twice as long as usual is the last of its bout.
    #[test]
    fn a_challenger_that_is_much_slower_loses_little_time() {
        let mut judge = judge(2);
        let steps = run(&mut judge, 200, |i, _| if i == 1 { 1000 } else { 100 });
        assert!(judge.kept() == 0 && judge.ratios()[1].is_some_and(|ratio| ratio > 1.5));
        assert!((1..=8).contains(&steps[1]), "{steps:?}");
    }

    /// Some of the kept one's steps take a hundred times as long, as where a disk is busy.
    #[test]
    fn outliers_decide_nothing() {
        let mut judge = judge(3);
        let cost = |_, step: u32| if step.is_multiple_of(37) { 100_000 } else { 1000 };
        for step in 0..40_000 {
            judge.count(cost(judge.active(), step));
            assert_eq!(judge.kept(), 0, "step {step}");
        }
    }

    /// Runs that are too short for a bout to end, with a profile between them, try all candidates.
    #[test]
    fn short_runs_try_one_after_the_other() {
        let mut ratios = vec![None; 5];
        let mut tried = [false; 5];
        for _ in 0..8 {
            let mut judge = Judge::new(0, ratios);
            for step in 0..(WARM_UP_AGAIN + 2 * PAIRS_MIN + 4) * WINDOW_STEPS {
                tried[judge.active()] = true;
                judge.count((1000.0 + 30.0 * noise(step)) as u64);
            }
            ratios = judge.ratios_so_far();
        }
        assert_eq!(tried, [true; 5]);
        assert!(ratios[1..].iter().all(Option::is_some));
    }

    /// A short run after one that has tried all candidates tries none again.
    #[test]
    fn an_earlier_verdict_is_believed() {
        let n_steps = 12 * WINDOW_STEPS;
        let cost = |i: usize, _| if i == 1 { 100 } else { 200 };
        let mut known = Judge::new(1, vec![Some(2.0), None, Some(2.0)]);
        assert_eq!(run(&mut known, n_steps, cost), [0, n_steps, 0]);
        let mut new_one = Judge::new(1, vec![Some(2.0), None, None]);
        assert!(run(&mut new_one, n_steps, cost)[1] < n_steps);
    }

    #[test]
    fn times_of_nothing_decide_nothing() {
        for n in 1..4 {
            let mut judge = judge(n);
            run(&mut judge, 2_000, |_, _| 0);
            assert_eq!(judge.kept(), 0);
            assert!(judge.ratios().iter().flatten().all(|ratio| *ratio == 1.0));
        }
    }
}
