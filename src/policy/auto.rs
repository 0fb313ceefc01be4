//! `auto`: prefetch only where it pays. The candidates, one of which predicts nothing, take turns
//! in short windows of decode steps. The one with the least time per token, computation of experts
//! left out, is kept. The others are tried again from time to time, less often the longer the
//! choice has stood.
//!
//! A choice is kept in the profile. Layout, little-endian: version (u32), number of the kept
//! candidate (u8); for each candidate its name (u8 length, UTF-8) and its mean (f64).

use super::{Event, Phase, Prediction, Predictor, Profile, Wants};

/// Decode steps of a window. The first ones do not count: they find prefetches of the candidate
/// before.
const WINDOW_STEPS: u32 = 8;
const SKIPPED_STEPS: u32 = 2;

/// Windows that each candidate gets before the first choice.
const TRIAL_ROUNDS: u32 = 3;

/// Windows between two tries of another candidate, at first and at most.
const INTERVAL_MIN: u32 = 8;
const INTERVAL_MAX: u32 = 256;

/// A window's weight in a candidate's running mean.
const WEIGHT: f64 = 0.25;

/// How much better than the kept candidate another must be to replace it: more than noise.
const MARGIN: f64 = 0.02;

const SECTION: &str = "auto";
const VERSION: u32 = 2;

pub struct Candidate {
    pub name: &'static str,
    /// `None` predicts nothing.
    pub predictor: Option<Box<dyn Predictor>>,
}

/// Measurements of a candidate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Tally {
    /// ns per token: the running mean over windows.
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
    /// Tells the eviction what it expects, whichever candidate prefetches.
    estimator: Option<Box<dyn Predictor>>,
    tallies: Vec<Tally>,
    /// The candidate that predicts now, and the one that is kept between trials.
    active: usize,
    kept: usize,
    window: Window,
    /// Windows left of the first trial.
    trial_left: u32,
    /// Windows until the next try, and the interval between tries.
    wait: u32,
    interval: u32,
    next_try: usize,
}

impl Auto {
    /// The first candidate is the one to beat.
    pub fn new(candidates: Vec<Candidate>, profile: &Profile) -> Auto {
        assert!(!candidates.is_empty());
        let n = candidates.len();
        let mut auto = Auto {
            candidates,
            estimator: None,
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

    pub fn with_estimator(self, estimator: Box<dyn Predictor>) -> Auto {
        Auto { estimator: Some(estimator), ..self }
    }

    /// Adds a step's time without the computation of experts: waiting for them, attention, and the
    /// policy's own cost to the layer loop.
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

    /// The candidate for the next window.
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

    /// Keeps the candidate with the least mean if it is clearly better than the one kept so far.
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

    /// Whether a candidate gets events: the active one, those on trial, and the next one to be
    /// tried, early enough to have followed the text.
    fn listens(&self, i: usize) -> bool {
        self.trial_left > 0 || i == self.active || i == self.kept || self.wait <= 1
    }

    /// Takes over the choice of an earlier run, by the candidates' names: means of candidates that
    /// are gone are dropped, and new candidates are tried in their turn. Starts with a trial if the
    /// bytes are damaged or the kept candidate is gone.
    fn restore(&mut self, bytes: &[u8]) {
        let Some((kept, means)) = decode(bytes) else { return };
        let at = |name: &[u8]| self.candidates.iter().position(|c| c.name.as_bytes() == name);
        let Some(kept) = means.get(kept).and_then(|(name, _)| at(name)) else { return };
        for (name, mean) in &means {
            if let Some(i) = at(name) {
                self.tallies[i] = Tally { mean: *mean, windows: 1 };
            }
        }
        (self.kept, self.active) = (kept, kept);
        (self.trial_left, self.wait) = (0, self.interval);
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        bytes.push(self.kept as u8);
        for (candidate, tally) in self.candidates.iter().zip(&self.tallies) {
            bytes.push(candidate.name.len() as u8);
            bytes.extend(candidate.name.as_bytes());
            bytes.extend(tally.mean.to_le_bytes());
        }
        bytes
    }
}

/// The number of the kept candidate, and all candidates with their means.
fn decode(bytes: &[u8]) -> Option<(usize, Vec<(&[u8], f64)>)> {
    let (version, bytes) = bytes.split_first_chunk()?;
    let (kept, mut rest) = bytes.split_first()?;
    let mut means = Vec::new();
    while let Some((n, bytes)) = rest.split_first() {
        let (name, bytes) = bytes.split_at_checked((*n).into())?;
        let (mean, bytes) = bytes.split_first_chunk()?;
        let mean = f64::from_le_bytes(*mean);
        if !mean.is_finite() || mean < 0.0 {
            return None;
        }
        means.push((name, mean));
        rest = bytes;
    }
    (u32::from_le_bytes(*version) == VERSION).then_some(((*kept).into(), means))
}

impl Predictor for Auto {
    fn observe(&mut self, event: &Event<'_>) {
        self.estimator.iter_mut().for_each(|estimator| estimator.observe(event));
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

    /// The active candidate's: a look-ahead is paid for only while it is used.
    fn wants(&self) -> Wants {
        let active = self.candidates[self.active].predictor.as_ref();
        active.map_or(Wants::default(), |predictor| predictor.wants())
    }

    fn is_slow(&self) -> bool {
        self.candidates.iter().any(|c| c.predictor.as_ref().is_some_and(|p| p.is_slow()))
    }

    fn emit(&self, listener: &mut dyn FnMut(&Event<'_>)) {
        if let Some(predictor) = &self.candidates[self.active].predictor {
            predictor.emit(listener);
        }
        self.estimator.iter().for_each(|estimator| estimator.emit(listener));
    }

    fn save(&self, profile: &mut Profile) {
        let candidates = self.candidates.iter().filter_map(|c| c.predictor.as_ref());
        candidates.chain(&self.estimator).for_each(|predictor| predictor.save(profile));
        if self.tallies.iter().all(|tally| tally.windows > 0) {
            profile.set(SECTION, self.encode());
        }
    }

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

    const NAMES: [&str; 4] = ["none", "one", "two", "three"];

    /// Predicts its own number, and wants a look-ahead.
    struct Fake(u32);

    impl Predictor for Fake {
        fn observe(&mut self, _: &Event<'_>) {}

        fn predict(&mut self, out: &mut Vec<Prediction>) {
            let expert = Expert { layer: 0, expert: self.0 };
            *out = vec![Prediction { expert, priority: 1.0 }];
        }

        fn wants(&self) -> Wants {
            Wants { ahead: true, hidden: false }
        }
    }

    /// Some of `NAMES`; the first predicts nothing.
    fn auto_of(candidates: &[u32], profile: &Profile) -> Auto {
        let predictor = |i: u32| (i > 0).then(|| Box::new(Fake(i)) as Box<dyn Predictor>);
        let candidate = |i: &u32| Candidate { name: NAMES[*i as usize], predictor: predictor(*i) };
        Auto::new(candidates.iter().map(candidate).collect(), profile)
    }

    fn auto(n: u32, profile: &Profile) -> Auto {
        auto_of(&(0..n).collect::<Vec<_>>(), profile)
    }

    /// Runs steps that cost what `cost` says of the active candidate; returns the number of steps
    /// of each candidate.
    fn run(auto: &mut Auto, n_steps: u32, cost: impl Fn(usize, u32) -> u64) -> Vec<u32> {
        let mut steps = vec![0; NAMES.len()];
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
        assert_eq!(steps, [0, 0, 40, 0]);
        assert!(warm.verdict().unwrap().contains("keeps"));
        // Damaged: as if there were none.
        let whole = profile.get(SECTION).unwrap().to_vec();
        for damaged in [&[9; 25][..], &whole[..whole.len() - 1], &whole[..3], &[]] {
            profile.set(SECTION, damaged.to_vec());
            let again = auto(3, &profile);
            assert_eq!((again.kept, again.trial_left), (0, 3 * TRIAL_ROUNDS));
        }
    }

    #[test]
    fn a_choice_goes_by_name() {
        let mut before = auto_of(&[0, 1, 3], &Profile::default());
        run(&mut before, 3_000, |i, _| if i == 3 { 100 } else { 200 });
        assert_eq!(before.candidates[before.kept].name, "three");
        let mut profile = Profile::default();
        before.save(&mut profile);
        // Another candidate has come in between, and one has gone: the same one is kept.
        for candidates in [&[0, 1, 2, 3][..], &[0, 3], &[3]] {
            let again = auto_of(candidates, &profile);
            assert_eq!((again.candidates[again.kept].name, again.trial_left), ("three", 0));
        }
        // The new one is tried in its turn, and kept if it is better.
        let mut more = auto_of(&[0, 1, 2, 3], &profile);
        run(&mut more, 3_000, |i, _| if i == 2 { 50 } else { 100 });
        assert_eq!(more.candidates[more.kept].name, "two");
        // The kept one has gone: a trial as if there were no choice.
        let without = auto_of(&[0, 1], &profile);
        assert_eq!((without.kept, without.trial_left), (0, 2 * TRIAL_ROUNDS));
    }

    #[test]
    fn a_look_ahead_is_wanted_while_its_candidate_is_active() {
        let mut auto = auto(2, &Profile::default());
        let mut seen = [false; 2];
        for _ in 0..200 {
            let is_active = auto.active == 1;
            assert_eq!(auto.wants(), Wants { ahead: is_active, hidden: false });
            seen[usize::from(is_active)] = true;
            run(&mut auto, 1, |i, _| if i == 1 { 200 } else { 100 });
        }
        assert_eq!(seen, [true, true]);
    }
}
