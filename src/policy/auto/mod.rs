//! `auto`: prefetch only where it pays. All candidates, one of which predicts nothing, learn from
//! the first token on; one of them predicts, and is kept while no other takes less time per token,
//! computation of experts left out (`judge`). Candidates that are slow learn and predict beside the
//! layer loop. The choice is kept in the profile (`persist`).

mod judge;
mod persist;

#[cfg(test)]
mod tests;

use super::{Event, Phase, Prediction, Predictor, Profile, Wants};
use judge::Judge;
use persist::Choice;

const SECTION: &str = "auto";

pub struct Candidate {
    pub name: &'static str,
    /// `None` predicts nothing.
    pub predictor: Option<Box<dyn Predictor>>,
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
    names: Vec<&'static str>,
    places: Vec<Place>,
    /// Tells the eviction what it expects, whichever candidate prefetches.
    estimator: Option<usize>,
    judge: Judge,
}

impl Auto {
    /// The first candidate is the one to beat.
    pub fn new(candidates: Vec<Candidate>, profile: &Profile) -> Auto {
        let names: Vec<&'static str> = candidates.iter().map(|c| c.name).collect();
        let places =
            candidates.into_iter().map(|c| c.predictor.map_or(Place::Nowhere, Place::Here));
        let judge = profile.get(SECTION).and_then(|bytes| restore(&names, bytes));
        let judge = judge.unwrap_or_else(|| Judge::new(0, vec![None; names.len()]));
        Auto { places: places.collect(), names, estimator: None, judge }
    }

    /// Makes a candidate, which is not slow, the one that the eviction hears in any case.
    pub fn with_estimator(self, name: &str) -> Auto {
        Auto { estimator: self.names.iter().position(|known| *known == name), ..self }
    }

    fn active(&self) -> &Place {
        &self.places[self.judge.active()]
    }

    fn here(&self) -> impl Iterator<Item = &dyn Predictor> {
        self.places.iter().filter_map(Place::here)
    }
}

/// Takes over the choice of an earlier run, by the candidates' names: those that are gone are
/// forgotten, and new ones are tried in their turn. `None` if the bytes are damaged or the kept
/// candidate is gone.
fn restore(names: &[&str], bytes: &[u8]) -> Option<Judge> {
    let Choice { kept, candidates } = Choice::decode(bytes)?;
    let known = |name: &str| candidates.iter().find(|(known, _)| *known == name.as_bytes());
    let kept = names.iter().position(|name| name.as_bytes() == candidates[kept].0)?;
    let ratios = names.iter().map(|name| known(name).and_then(|(_, ratio)| *ratio));
    Some(Judge::new(kept, ratios.collect()))
}

impl Predictor for Auto {
    fn observe(&mut self, event: &Event<'_>) {
        for place in &mut self.places {
            if let Place::Here(predictor) = place {
                predictor.observe(event);
            }
        }
        if let Event::IterationEnd { phase: Phase::Decode, timing, .. } = event {
            // Waiting for experts, attention, and the policy's own cost to the layer loop.
            self.judge.count(timing.wall_ns.saturating_sub(timing.experts_ns + timing.head_ns));
        }
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        match &mut self.places[self.judge.active()] {
            Place::Here(predictor) => predictor.predict(out),
            Place::Nowhere | Place::Beside(_) => out.clear(),
        }
    }

    /// The active candidate's: a look-ahead is paid for only while it is used.
    fn wants(&self) -> Wants {
        self.active().here().map_or(Wants::default(), |predictor| predictor.wants())
    }

    fn predicts_prompts(&self) -> bool {
        self.active().here().is_some_and(|predictor| predictor.predicts_prompts())
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

    fn deputy(&self) -> Option<usize> {
        match self.active() {
            Place::Beside(part) => Some(*part),
            Place::Nowhere | Place::Here(_) => None,
        }
    }

    fn emit(&self, listener: &mut dyn FnMut(&Event<'_>)) {
        let estimator = self.estimator.filter(|estimator| *estimator != self.judge.active());
        let places = [Some(self.active()), estimator.map(|estimator| &self.places[estimator])];
        let predictors = places.into_iter().flatten().filter_map(Place::here);
        predictors.for_each(|predictor| predictor.emit(listener));
    }

    fn save(&self, profile: &mut Profile) {
        self.here().for_each(|predictor| predictor.save(profile));
        let ratios = self.judge.ratios();
        if ratios.iter().any(Option::is_some) {
            let candidates = self.names.iter().zip(ratios);
            let candidates = candidates.map(|(name, ratio)| (name.as_bytes(), *ratio)).collect();
            profile.set(SECTION, Choice { kept: self.judge.kept(), candidates }.encode());
        }
    }

    fn verdict(&self) -> Option<String> {
        let name = self.names[self.judge.kept()];
        let others = self.names.iter().zip(self.judge.ratios());
        let others: Vec<String> =
            others.filter_map(|(name, ratio)| Some(format!("{name} {:.3}", (*ratio)?))).collect();
        if others.is_empty() {
            return Some(format!("auto has not measured enough to choose yet; it uses {name}"));
        }
        let (ms, others) = (self.judge.kept_ns() / 1e6, others.join(", "));
        Some(format!(
            "auto keeps {name}: {ms:.3} ms/token beside the experts; \
             the others take so many times as long: {others}"
        ))
    }
}
