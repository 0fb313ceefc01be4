//! `auto`: prefetch only where it pays. All candidates, one of which predicts nothing, learn from
//! the first token on; one of them predicts, and is kept while no other takes less time per token
//! (`judge`). Another one may tell the eviction what it expects. After some hundred tokens those
//! that are not used learn from a part of them (`attention`). Candidates that are slow learn and
//! predict beside the layer loop. The choice is kept in the profile (`persist`).

mod attention;
mod judge;
mod persist;

#[cfg(test)]
mod tests;

use super::{Event, Phase, Prediction, Predictor, Profile, Wants};
use attention::Attention;
use judge::{Judge, Record};

const SECTION: &str = "auto";

pub struct Candidate {
    pub name: &'static str,
    /// `None` predicts nothing.
    pub predictor: Option<Box<dyn Predictor>>,
    /// Whether the candidate is tried without the estimator as well.
    pub is_tried_alone: bool,
}

/// A way to run: the judge chooses one.
struct Mode {
    name: String,
    /// The candidate that predicts.
    candidate: usize,
    /// The eviction hears the estimator, which then observes everything.
    has_estimates: bool,
}

/// The place of a candidate's predictor.
enum Place {
    Nowhere,
    Here(Box<dyn Predictor>),
    /// Given away: a slow part of this number.
    Beside(usize),
}

impl Place {
    fn here(&self) -> Option<&dyn Predictor> {
        match self {
            Place::Here(predictor) => Some(&**predictor),
            Place::Nowhere | Place::Beside(_) => None,
        }
    }
}

pub struct Auto {
    modes: Vec<Mode>,
    places: Vec<Place>,
    /// The candidate that tells the eviction what it expects, in modes with estimates.
    estimator: Option<usize>,
    judge: Judge,
    attention: Attention,
}

impl Auto {
    /// The first candidate is the one to beat. `estimator`: the name of one that is not slow.
    pub fn new(candidates: Vec<Candidate>, estimator: Option<&str>, profile: &Profile) -> Auto {
        let estimator =
            estimator.and_then(|name| candidates.iter().position(|known| known.name == name));
        let modes: Vec<Mode> =
            candidates.iter().enumerate().flat_map(|(i, known)| modes(i, known)).collect();
        let places =
            candidates.into_iter().map(|c| c.predictor.map_or(Place::Nowhere, Place::Here));
        let names: Vec<&str> = modes.iter().map(|mode| &*mode.name).collect();
        let restored = profile.get(SECTION).and_then(|bytes| persist::decode(bytes, &names));
        let attention = restored.as_ref().map_or(Attention::default(), |_| Attention::again());
        let judge = Judge::new(restored.unwrap_or_else(|| Record::new(modes.len())));
        Auto { places: places.collect(), modes, estimator, judge, attention }
    }

    /// The candidate that predicts, and that whose estimates the eviction hears.
    fn used(&self) -> [Option<usize>; 2] {
        let mode = &self.modes[self.judge.active()];
        [Some(mode.candidate), self.estimator.filter(|_| mode.has_estimates)]
    }

    fn active(&self) -> usize {
        self.modes[self.judge.active()].candidate
    }

    fn active_place(&self) -> &Place {
        &self.places[self.active()]
    }

    fn here(&self) -> impl Iterator<Item = &dyn Predictor> {
        self.places.iter().filter_map(Place::here)
    }
}

fn modes(candidate: usize, known: &Candidate) -> impl Iterator<Item = Mode> {
    let usual = Mode { name: known.name.into(), candidate, has_estimates: true };
    let name = format!("{} without estimates", known.name);
    let alone = known.is_tried_alone.then_some(Mode { name, candidate, has_estimates: false });
    std::iter::once(usual).chain(alone)
}

impl Predictor for Auto {
    fn observe(&mut self, event: &Event<'_>) {
        self.attention.observe(event);
        let used = self.used();
        for (i, place) in self.places.iter_mut().enumerate() {
            if let Place::Here(predictor) = place
                && (self.attention.is_general() || used.contains(&Some(i)))
            {
                predictor.observe(event);
            }
        }
        if let Event::IterationEnd { phase: Phase::Decode, timing, .. } = event {
            // All of it: what a candidate costs beside the layer loop takes time from the experts.
            self.judge.count(timing.wall_ns);
        }
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        let active = self.active();
        match &mut self.places[active] {
            Place::Here(predictor) => predictor.predict(out),
            Place::Nowhere | Place::Beside(_) => out.clear(),
        }
    }

    /// The active candidate's: a look-ahead is paid for only while it is used.
    fn wants(&self) -> Wants {
        self.active_place().here().map_or(Wants::default(), |predictor| predictor.wants())
    }

    fn predicts_prompts(&self) -> bool {
        self.active_place().here().is_some_and(|predictor| predictor.predicts_prompts())
    }

    fn take_slow_parts(&mut self) -> Vec<Box<dyn Predictor>> {
        let mut slow = Vec::new();
        for place in &mut self.places {
            if place.here().is_some_and(|predictor| predictor.is_slow())
                && let Place::Here(predictor) = std::mem::replace(place, Place::Beside(slow.len()))
            {
                slow.push(predictor);
            }
        }
        slow
    }

    fn slow_parts_observe(&self) -> bool {
        self.attention.is_general()
    }

    fn deputy(&self) -> Option<usize> {
        match self.active_place() {
            Place::Beside(part) => Some(*part),
            Place::Nowhere | Place::Here(_) => None,
        }
    }

    fn emit(&self, listener: &mut dyn FnMut(&Event<'_>)) {
        let [active, estimator] = self.used();
        let estimator = estimator.filter(|estimator| Some(*estimator) != active);
        let used = active.into_iter().chain(estimator);
        used.filter_map(|i| self.places[i].here()).for_each(|predictor| predictor.emit(listener));
    }

    fn save(&self, profile: &mut Profile) {
        self.here().for_each(|predictor| predictor.save(profile));
        let record = self.judge.record();
        if !record.bout.is_empty() || record.ratios.iter().any(Option::is_some) {
            let names: Vec<&str> = self.modes.iter().map(|mode| &*mode.name).collect();
            profile.set(SECTION, persist::encode(&record, &names));
        }
    }

    fn verdict(&self) -> Option<String> {
        let name = &self.modes[self.judge.kept()].name;
        let others = self.modes.iter().zip(self.judge.ratios());
        let others: Vec<String> = others
            .filter_map(|(mode, ratio)| Some(format!("{} {:.3}", mode.name, (*ratio)?)))
            .collect();
        if others.is_empty() {
            return Some(format!("auto has not measured enough to choose yet; it uses {name}"));
        }
        let (ms, others) = (self.judge.kept_ns() / 1e6, others.join(", "));
        Some(format!(
            "auto keeps {name}: {ms:.3} ms/token; the others take so many times as long: {others}"
        ))
    }
}
