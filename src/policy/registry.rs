//! Names of predictors, evictions and policies, and how each is built. Baselines are listed here;
//! each paper lists its own, and a program can [`register`] more.

use std::sync::{Mutex, PoisonError};

use super::{
    AllNext, Counts, Eviction, HotTable, Lcp, Lfu, Lru, NextLayer, NextToken, PolicySpec,
    Predictor, Profile, Random, ScanResistant, Shape, TrajectoryPredictor, papers,
};
use crate::{Error, Result};

/// The seed of random eviction: runs are repeatable.
const RANDOM_SEED: u64 = 0x6d6f_6562_6121;

/// The names that a paper, the set of baselines or a program adds to `--policy`.
pub struct Names {
    pub predictors: &'static [PredictorEntry],
    pub evictions: &'static [EvictionEntry],
    pub policies: &'static [(&'static str, PolicySpec)],
}

impl Names {
    fn predictors(&self) -> Vec<&'static str> {
        self.predictors.iter().map(|entry| entry.name).collect()
    }

    fn evictions(&self) -> Vec<&'static str> {
        self.evictions.iter().map(|entry| entry.name).collect()
    }

    fn policies(&self) -> Vec<&'static str> {
        self.policies.iter().map(|(name, _)| *name).collect()
    }
}

pub struct PredictorEntry {
    pub name: &'static str,
    /// Returns `None` if there is nothing to predict with, and says why in the builder's notes.
    pub build: fn(&mut Builder<'_>) -> Option<Box<dyn Predictor>>,
}

pub struct EvictionEntry {
    pub name: &'static str,
    pub build: fn(&mut Builder<'_>) -> Box<dyn Eviction>,
}

/// The inputs of a policy: the tier's shape and what earlier runs learned.
pub struct Builder<'a> {
    pub shape: &'a Shape,
    pub profile: &'a Profile,
    /// Messages for the user: sections of the profile that were refused.
    pub notes: Vec<String>,
}

impl Builder<'_> {
    /// Restores a section of the profile; `None` if it is missing or refused.
    pub fn restore<T>(
        &mut self,
        section: &str,
        restore: impl FnOnce(&Shape, &[u8]) -> std::result::Result<T, String>,
    ) -> Option<T> {
        let restored = restore(self.shape, self.profile.get(section)?);
        let refuse =
            |why| self.notes.push(format!("the profile's section {section} is not used: {why}"));
        restored.map_err(refuse).ok()
    }

    /// The trajectory predictor, with what the profile knows, and the look-ahead of models that
    /// have a layer for it.
    fn trajectory(&mut self) -> Box<dyn Predictor> {
        let restored = self.restore(TrajectoryPredictor::SECTION, TrajectoryPredictor::restore);
        let trajectory = restored.unwrap_or_else(|| TrajectoryPredictor::new(self.shape));
        Box::new(NextToken::new(self.shape, Some(Box::new(trajectory))))
    }
}

const fn predictor(
    name: &'static str,
    build: fn(&mut Builder<'_>) -> Option<Box<dyn Predictor>>,
) -> PredictorEntry {
    PredictorEntry { name, build }
}

const fn eviction(
    name: &'static str,
    build: fn(&mut Builder<'_>) -> Box<dyn Eviction>,
) -> EvictionEntry {
    EvictionEntry { name, build }
}

const BASELINES: Names = Names {
    predictors: &[
        predictor("none", |_| None),
        predictor("next-layer", |b| Some(Box::new(NextLayer::new(b.shape)))),
        predictor("next-token", |b| Some(Box::new(NextToken::new(b.shape, None)))),
        predictor("trajectory", |b| Some(b.trajectory())),
        predictor("all-next", |b| Some(Box::new(AllNext::new(b.shape)))),
        predictor("counts", |b| Some(Box::new(Counts::new(b.shape)))),
    ],
    evictions: &[
        eviction("lru", |b| Box::new(Lru::new(b.shape))),
        eviction("lfu", |b| Box::new(Lfu::new(b.shape))),
        eviction("lcp", |b| Box::new(Lcp::new(b.shape))),
        eviction("random", |_| Box::new(Random::new(RANDOM_SEED))),
        eviction("scan-resistant", |b| {
            let uses = b.restore(HotTable::SECTION, HotTable::restore);
            let uses = uses.unwrap_or_else(|| HotTable::new(b.shape));
            Box::new(ScanResistant::with(b.shape, uses))
        }),
    ],
    policies: &[
        ("on-demand", PolicySpec::whole("none", "lru")),
        ("deepspeed", PolicySpec::whole("all-next", "lru")),
        ("brainstorm", PolicySpec::whole("counts", "lfu")),
        ("mixtral-offloading", PolicySpec::whole("next-layer", "lru")),
    ],
};

/// Names that programs have added.
static REGISTERED: Mutex<Vec<&'static Names>> = Mutex::new(Vec::new());

/// Adds names that [`PolicySpec`] is parsed from and built of, beside moeba's own. Fails for a name
/// that is taken or cannot stand in a policy's text, and for a policy with unknown parts; nothing
/// is added then.
pub fn register(names: &'static Names) -> Result<()> {
    let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    let mut known = with(&registered);
    known.push(names);
    for of in [Names::predictors, Names::evictions, Names::policies] {
        let n_of = |name| known.iter().flat_map(|names| of(names)).filter(|n| *n == name).count();
        for name in of(names) {
            if name.is_empty() || name.contains([',', '=']) || name.trim() != name {
                return Err(Error::invalid(format!("a policy cannot be written with {name:?}")));
            }
            if n_of(name) > 1 {
                return Err(Error::invalid(format!("policies: the name {name} is taken")));
            }
        }
    }
    let has =
        |of: fn(&Names) -> Vec<&'static str>, name| known.iter().any(|k| of(k).contains(name));
    for (name, PolicySpec { predictor, eviction, .. }) in names.policies {
        if !has(Names::predictors, predictor) || !has(Names::evictions, eviction) {
            let parts = format!("predictor={predictor},eviction={eviction}");
            return Err(Error::invalid(format!("the policy {name} has an unknown part: {parts}")));
        }
    }
    registered.push(names);
    Ok(())
}

/// moeba's names, and these.
fn with(registered: &[&'static Names]) -> Vec<&'static Names> {
    [&BASELINES].into_iter().chain(papers::NAMES).chain(registered.iter().copied()).collect()
}

fn all() -> Vec<&'static Names> {
    with(&REGISTERED.lock().unwrap_or_else(PoisonError::into_inner))
}

pub fn predictors() -> impl Iterator<Item = &'static PredictorEntry> {
    all().into_iter().flat_map(|names| names.predictors)
}

pub fn evictions() -> impl Iterator<Item = &'static EvictionEntry> {
    all().into_iter().flat_map(|names| names.evictions)
}

pub fn policies() -> impl Iterator<Item = &'static (&'static str, PolicySpec)> {
    all().into_iter().flat_map(|names| names.policies)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique() {
        let distinct = |names: Vec<&str>| {
            let n = names.len();
            assert_eq!(names.into_iter().collect::<BTreeSet<_>>().len(), n);
        };
        distinct(predictors().map(|entry| entry.name).collect());
        distinct(evictions().map(|entry| entry.name).collect());
        distinct(policies().map(|(name, _)| *name).collect());
    }

    #[test]
    fn registered_names_are_new_and_complete() {
        const fn lru_as(name: &'static str) -> EvictionEntry {
            EvictionEntry { name, build: |b| Box::new(Lru::new(b.shape)) }
        }
        const NONE: Names = Names { predictors: &[], evictions: &[], policies: &[] };
        const BAD: [(&Names, &str); 5] = [
            (&Names { evictions: &[lru_as("lru")], ..NONE }, "lru is taken"),
            (&Names { evictions: &[lru_as("a"), lru_as("a")], ..NONE }, "a is taken"),
            (&Names { evictions: &[lru_as("a,b")], ..NONE }, "\"a,b\""),
            (&Names { evictions: &[lru_as("")], ..NONE }, "\"\""),
            (
                &Names { policies: &[("half", PolicySpec::whole("none", "absent"))], ..NONE },
                "predictor=none,eviction=absent",
            ),
        ];
        for (names, why) in BAD {
            let message = register(names).unwrap_err().to_string();
            assert!(message.contains(why), "{message}");
        }
        assert!("eviction=a".parse::<PolicySpec>().is_err());
        const NEW: &Names = &Names {
            evictions: &[lru_as("registered")],
            policies: &[("registered-too", PolicySpec::whole("none", "registered"))],
            ..NONE
        };
        register(NEW).unwrap();
        let spec: PolicySpec = "registered-too".parse().unwrap();
        assert_eq!(spec, "predictor=none,eviction=registered".parse().unwrap());
        let shape = Shape::of_model(vec![4], 1);
        assert!(spec.build(&shape, &Profile::default()).predictor.is_none());
        assert!(register(NEW).is_err());
    }

    #[test]
    fn policies_are_made_of_parts_that_exist() {
        for (name, spec) in policies() {
            assert!(predictors().any(|entry| entry.name == spec.predictor), "{name}");
            assert!(evictions().any(|entry| entry.name == spec.eviction), "{name}");
        }
    }
}
