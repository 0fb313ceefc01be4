//! `auto`: a predictor has to prove that it pays (DESIGN, promise 4). Candidates, of which one is
//! to predict nothing, take turns in short windows of decode steps; what is kept is the one under
//! which tokens take the least time beside the computation of experts. Later the others are tried
//! again, the more seldom the longer the choice has stood.

use super::{Event, Phase, Prediction, Predictor, Profile, Wants};

/// Decode steps of a window, and how many of its first ones do not count: prefetches of the
/// candidate before are still there.
const WINDOW_STEPS: u32 = 8;
const SKIPPED_STEPS: u32 = 2;

/// Windows that each candidate gets before the first choice.
const TRIAL_ROUNDS: u32 = 3;

/// Windows between two tries of another candidate, at first and at most.
const INTERVAL_MIN: u32 = 8;
const INTERVAL_MAX: u32 = 256;

/// A window's weight in a candidate's running mean.
const WEIGHT: f64 = 0.25;

/// By how much a candidate must be better than the one that is kept: noise is no reason.
const MARGIN: f64 = 0.02;

const SECTION: &str = "auto";

pub struct Candidate {
    pub name: &'static str,
    /// `None` predicts nothing.
    pub predictor: Option<Box<dyn Predictor>>,
}

/// What was seen of a candidate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Tally {
    /// ns a token, the running mean over windows.
    mean: f64,
    windows: u32,
}

impl Tally {
    fn add(&mut self, mean: f64) {
        self.windows = self.windows.saturating_add(1);
        // A plain mean at first.
        let weight = WEIGHT.max(1.0 / f64::from(self.windows));
        self.mean += weight * (mean - self.mean);
    }
}

/// The window that is under way.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    steps: u32,
    sum_ns: u64,
}

pub struct Auto {
    candidates: Vec<Candidate>,
    tallies: Vec<Tally>,
    /// Who predicts now, and who is kept when nobody else is tried.
    active: usize,
    kept: usize,
    window: Window,
    /// Windows of the trial that are left.
    trial_left: u32,
    /// Windows until the next try, and the interval that was waited for.
    wait: u32,
    interval: u32,
    next_try: usize,
}

impl Auto {
    /// The first candidate is what the others are compared with.
    pub fn new(candidates: Vec<Candidate>, profile: &Profile) -> Auto {
        assert!(!candidates.is_empty());
        let n = candidates.len();
        let mut auto = Auto {
            candidates,
            tallies: vec![Tally::default(); n],
            active: 0,
            kept: 0,
            window: Window::default(),
            trial_left: TRIAL_ROUNDS * n as u32,
            wait: 0,
            interval: INTERVAL_MIN,
            next_try: 0,
        };
        auto.restore(profile.get(SECTION).unwrap_or_default());
        auto
    }

    /// One step's time beside its experts: waiting for them, attention, and what the policy itself
    /// costs the layer loop.
    fn count(&mut self, ns: u64) {
        self.window.steps += 1;
        if self.window.steps > SKIPPED_STEPS {
            self.window.sum_ns += ns;
        }
        if self.window.steps == WINDOW_STEPS {
            let Window { steps, sum_ns } = std::mem::take(&mut self.window);
            self.tallies[self.active].add(sum_ns as f64 / f64::from(steps - SKIPPED_STEPS));
            self.active = self.next();
        }
    }

    /// Who predicts in the next window.
    fn next(&mut self) -> usize {
        let n = self.candidates.len();
        if self.trial_left > 0 {
            self.trial_left -= 1;
            if self.trial_left > 0 {
                return self.trial_left as usize % n;
            }
            self.choose();
            return self.kept;
        }
        if self.active != self.kept {
            let before = self.kept;
            self.choose();
            let is_same = self.kept == before;
            self.interval =
                if is_same { (2 * self.interval).min(INTERVAL_MAX) } else { INTERVAL_MIN };
            self.wait = self.interval;
            return self.kept;
        }
        self.wait = self.wait.saturating_sub(1);
        if self.wait > 0 || n == 1 {
            return self.kept;
        }
        self.next_try = (self.next_try + 1) % n;
        if self.next_try == self.kept {
            self.next_try = (self.next_try + 1) % n;
        }
        self.next_try
    }

    /// Keeps the candidate of least mean, if it is clearly better than the one kept so far.
    fn choose(&mut self) {
        self.wait = self.interval;
        let tried = |i: &usize| self.tallies[*i].windows > 0;
        let mean = |i: &usize| self.tallies[*i].mean;
        let best = (0..self.candidates.len())
            .filter(tried)
            .min_by(|a, b| mean(a).total_cmp(&mean(b)))
            .unwrap_or(self.kept);
        if !tried(&self.kept) || mean(&best) < mean(&self.kept) * (1.0 - MARGIN) {
            self.kept = best;
        }
    }

    /// Whether a candidate hears of things: the one at work, those on trial, and the next one to
    /// be tried, early enough for it to know where the text is.
    fn listens(&self, i: usize) -> bool {
        self.trial_left > 0 || i == self.active || i == self.kept || self.wait <= 1
    }

    /// A choice of an earlier run, if it was among as many candidates.
    fn restore(&mut self, bytes: &[u8]) {
        let n = self.candidates.len();
        let Some((kept, means)) = bytes.split_first() else { return };
        if usize::from(*kept) >= n || means.len() != 8 * n {
            return;
        }
        let means = means.chunks_exact(8);
        let means = means.map(|m| f64::from_le_bytes(m.try_into().expect("eight bytes")));
        if means.clone().any(|mean| !mean.is_finite() || mean < 0.0) {
            return;
        }
        self.tallies = means.map(|mean| Tally { mean, windows: 1 }).collect();
        (self.kept, self.active) = (usize::from(*kept), usize::from(*kept));
        (self.trial_left, self.wait) = (0, self.interval);
    }
}

impl Predictor for Auto {
    fn observe(&mut self, event: &Event<'_>) {
        for i in 0..self.candidates.len() {
            let listens = self.listens(i);
            if let Some(predictor) = self.candidates[i].predictor.as_mut().filter(|_| listens) {
                predictor.observe(event);
            }
        }
        if let Event::IterationEnd { phase: Phase::Decode, timing, .. } = event {
            self.count(timing.wall_ns.saturating_sub(timing.experts_ns + timing.head_ns));
        }
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        match &mut self.candidates[self.active].predictor {
            Some(predictor) => predictor.predict(out),
            None => out.clear(),
        }
    }

    fn wants(&self) -> Wants {
        let active = self.candidates.iter().filter_map(|c| c.predictor.as_ref());
        active.map(|p| p.wants()).fold(Wants::default(), |all, one| Wants {
            ahead: all.ahead || one.ahead,
            hidden: all.hidden || one.hidden,
        })
    }

    fn is_slow(&self) -> bool {
        self.candidates.iter().any(|c| c.predictor.as_ref().is_some_and(|p| p.is_slow()))
    }

    fn tell(&self, listener: &mut dyn FnMut(&Event<'_>)) {
        if let Some(predictor) = &self.candidates[self.active].predictor {
            predictor.tell(listener);
        }
    }

    fn save(&self, profile: &mut Profile) {
        self.candidates.iter().filter_map(|c| c.predictor.as_ref()).for_each(|p| p.save(profile));
        if self.tallies.iter().all(|tally| tally.windows > 0) {
            let mut bytes = vec![self.kept as u8];
            self.tallies.iter().for_each(|tally| bytes.extend(tally.mean.to_le_bytes()));
            profile.set(SECTION, bytes);
        }
    }

    /// What is kept and why.
    fn verdict(&self) -> Option<String> {
        let ms = |i: usize| format!("{:.3} ms/token", self.tallies[i].mean / 1e6);
        let others = (0..self.candidates.len()).filter(|i| *i != self.kept);
        let others: Vec<String> = others
            .filter(|i| self.tallies[*i].windows > 0)
            .map(|i| format!("{} {}", self.candidates[i].name, ms(i)))
            .collect();
        let name = self.candidates[self.kept].name;
        if others.is_empty() {
            return Some(format!("auto has not measured enough to choose yet; it uses {name}"));
        }
        let kept = ms(self.kept);
        let others = others.join(", ");
        Some(format!("auto keeps {name}: {kept} beside the experts, against {others}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Expert, Timing};

    /// Predicts its own number.
    struct Fake(u32);

    impl Predictor for Fake {
        fn observe(&mut self, _: &Event<'_>) {}

        fn predict(&mut self, out: &mut Vec<Prediction>) {
            let expert = Expert { layer: 0, expert: self.0 };
            *out = vec![Prediction { expert, priority: 1.0 }];
        }
    }

    fn auto(n: u32, profile: &Profile) -> Auto {
        let predictor = |i: u32| (i > 0).then(|| Box::new(Fake(i)) as Box<dyn Predictor>);
        let candidate = |i| Candidate { name: "some", predictor: predictor(i) };
        Auto::new((0..n).map(candidate).collect(), profile)
    }

    /// Runs steps that cost what `cost` says of the active candidate; answers how many steps each
    /// candidate had.
    fn run(auto: &mut Auto, n_steps: u32, cost: impl Fn(usize, u32) -> u64) -> Vec<u32> {
        let mut steps = vec![0; auto.candidates.len()];
        let mut out = Vec::new();
        for step in 0..n_steps {
            auto.predict(&mut out);
            let active = out.first().map_or(0, |p| p.expert.expert as usize);
            steps[active] += 1;
            let stall_ns = cost(active, step);
            let timing = Timing { wall_ns: stall_ns + 50, stall_ns, experts_ns: 50, head_ns: 0 };
            auto.observe(&Event::IterationEnd { request: 0, phase: Phase::Decode, timing });
        }
        steps
    }

    #[test]
    fn what_pays_is_kept_and_little_time_goes_to_the_others() {
        for best in 0..4 {
            let mut auto = auto(4, &Profile::default());
            let steps = run(&mut auto, 20_000, |i, step| {
                let noise = u64::from(step * 7919 % 101);
                if i == best { 1000 + noise } else { 1200 + noise }
            });
            assert_eq!(auto.kept, best);
            assert!(steps[best] > 19_000, "{steps:?}");
            assert!(steps.iter().all(|n| *n > 0), "each is tried: {steps:?}");
        }
    }

    #[test]
    fn a_change_is_noticed() {
        let mut auto = auto(2, &Profile::default());
        run(&mut auto, 2_000, |i, _| if i == 1 { 100 } else { 200 });
        assert_eq!(auto.kept, 1);
        run(&mut auto, 8_000, |i, _| if i == 1 { 400 } else { 200 });
        assert_eq!(auto.kept, 0);
    }

    #[test]
    fn equals_are_not_exchanged_for_noise() {
        let mut auto = auto(3, &Profile::default());
        run(&mut auto, 500, |_, step| 1000 + u64::from(step * 31 % 11));
        let kept = auto.kept;
        for _ in 0..50 {
            run(&mut auto, 100, |_, step| 1000 + u64::from(step * 31 % 11));
            assert_eq!(auto.kept, kept);
        }
    }

    #[test]
    fn the_choice_of_an_earlier_run_is_the_first_one() {
        let mut before = auto(3, &Profile::default());
        run(&mut before, 3_000, |i, _| if i == 2 { 100 } else { 200 });
        let mut profile = Profile::default();
        before.save(&mut profile);
        let mut warm = auto(3, &profile);
        let steps = run(&mut warm, 40, |_, _| 100);
        assert_eq!(steps, [0, 0, 40]);
        assert!(warm.verdict().unwrap().contains("keeps"));
        // Of other candidates, or damaged: as if there were none.
        assert_eq!(auto(2, &profile).trial_left, auto(2, &Profile::default()).trial_left);
        profile.set(SECTION, vec![9; 25]);
        assert_eq!(auto(3, &profile).kept, auto(3, &Profile::default()).kept);
    }
}
