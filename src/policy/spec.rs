//! Policies by name: what `--policy` takes.

use std::fmt;
use std::str::FromStr;

use super::{Eviction, Lcp, Lfu, Lru, NextLayer, Predictor, Profile, Random, Shape, Splitter};
use crate::{Error, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PredictorKind {
    None,
    NextLayer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionKind {
    Lru,
    Lfu,
    Lcp,
    Random,
}

/// A policy's parts. Written as a name of `NAMED`, or by hand as `predictor=NAME,eviction=NAME` in
/// any order, where a missing part is the default policy's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicySpec {
    pub predictor: PredictorKind,
    pub eviction: EvictionKind,
}

/// A policy at work.
pub struct Policy {
    pub eviction: Box<dyn Eviction>,
    pub predictor: Option<Box<dyn Predictor>>,
    pub splitter: Option<Box<dyn Splitter>>,
    /// What the user should hear of: sections of the profile that were refused.
    pub notes: Vec<String>,
}

const PREDICTORS: &[(&str, PredictorKind)] =
    &[("none", PredictorKind::None), ("next-layer", PredictorKind::NextLayer)];

const EVICTIONS: &[(&str, EvictionKind)] = &[
    ("lru", EvictionKind::Lru),
    ("lfu", EvictionKind::Lfu),
    ("lcp", EvictionKind::Lcp),
    ("random", EvictionKind::Random),
];

/// Published compositions.
const NAMED: &[(&str, PolicySpec)] = &[
    ("on-demand", PolicySpec { predictor: PredictorKind::None, eviction: EvictionKind::Lru }),
    (
        "mixtral-offloading",
        PolicySpec { predictor: PredictorKind::NextLayer, eviction: EvictionKind::Lru },
    ),
];

const DEFAULT: PolicySpec =
    PolicySpec { predictor: PredictorKind::NextLayer, eviction: EvictionKind::Lcp };

/// Runs are to be repeatable, and a policy that draws is there to be compared with.
const RANDOM_SEED: u64 = 0x6d6f_6562_6121;

impl PolicySpec {
    /// The policy for a model and tier of this shape, as warm as the profile makes it.
    pub fn build(&self, shape: &Shape, _profile: &Profile) -> Policy {
        let eviction: Box<dyn Eviction> = match self.eviction {
            EvictionKind::Lru => Box::new(Lru::new(shape)),
            EvictionKind::Lfu => Box::new(Lfu::new(shape)),
            EvictionKind::Lcp => Box::new(Lcp::new(shape)),
            EvictionKind::Random => Box::new(Random::new(RANDOM_SEED)),
        };
        let predictor: Option<Box<dyn Predictor>> = match self.predictor {
            PredictorKind::None => None,
            PredictorKind::NextLayer => Some(Box::new(NextLayer::new(shape))),
        };
        Policy { eviction, predictor, splitter: None, notes: Vec::new() }
    }
}

impl Default for PolicySpec {
    fn default() -> Self {
        DEFAULT
    }
}

impl FromStr for PolicySpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(spec) = by_name(NAMED, text) {
            return Ok(spec);
        }
        let (mut predictor, mut eviction) = (None, None);
        for part in text.split(',') {
            let fresh = match part.split_once('=') {
                Some(("predictor", name)) => set(&mut predictor, by_name(PREDICTORS, name)),
                Some(("eviction", name)) => set(&mut eviction, by_name(EVICTIONS, name)),
                _ => false,
            };
            if !fresh {
                return Err(unknown(text));
            }
        }
        Ok(PolicySpec {
            predictor: predictor.unwrap_or(DEFAULT.predictor),
            eviction: eviction.unwrap_or(DEFAULT.eviction),
        })
    }
}

/// Whether there was a value and none before it.
fn set<T>(part: &mut Option<T>, value: Option<T>) -> bool {
    let fresh = part.is_none() && value.is_some();
    *part = value;
    fresh
}

fn by_name<T: Copy>(list: &[(&str, T)], name: &str) -> Option<T> {
    list.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

fn name_of<T: PartialEq>(list: &[(&'static str, T)], value: &T) -> Option<&'static str> {
    list.iter().find(|(_, known)| known == value).map(|(name, _)| *name)
}

fn unknown(text: &str) -> Error {
    fn names<T>(list: &[(&str, T)], between: &str) -> String {
        list.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(between)
    }
    Error::Usage(format!(
        "there is no policy {text:?}: give {}, or parts with a comma between them, \
         predictor={} and eviction={}",
        names(NAMED, ", "),
        names(PREDICTORS, "|"),
        names(EVICTIONS, "|"),
    ))
}

impl fmt::Display for PolicySpec {
    /// The name, if it has one, or the parts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = name_of(NAMED, self) {
            return f.write_str(name);
        }
        let predictor = name_of(PREDICTORS, &self.predictor).unwrap_or("?");
        let eviction = name_of(EVICTIONS, &self.eviction).unwrap_or("?");
        write!(f, "predictor={predictor},eviction={eviction}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> PolicySpec {
        text.parse().unwrap()
    }

    #[test]
    fn names_and_parts_come_back_as_they_were() {
        for (predictor, _) in PREDICTORS {
            for (eviction, _) in EVICTIONS {
                let there = parse(&format!("predictor={predictor},eviction={eviction}"));
                let back = parse(&format!("eviction={eviction},predictor={predictor}"));
                assert_eq!(there, back);
                assert_eq!(parse(&there.to_string()), there);
            }
        }
        for (name, spec) in NAMED {
            assert_eq!((parse(name), spec.to_string().as_str()), (*spec, *name));
        }
    }

    #[test]
    fn a_missing_part_is_the_defaults() {
        assert_eq!(parse("eviction=lcp"), PolicySpec::default());
        assert_eq!(parse("predictor=none").eviction, DEFAULT.eviction);
        assert_eq!(PolicySpec::default().to_string(), "predictor=next-layer,eviction=lcp");
    }

    #[test]
    fn what_is_unknown_is_told_what_there_is() {
        let bad = [
            "",
            "lru",
            "predictor=",
            "eviction=LRU",
            "eviction=lru,",
            "eviction=lru,eviction=lfu",
            "split=0.5",
            "predictor=none;eviction=lru",
        ];
        for text in bad {
            let message = PolicySpec::from_str(text).unwrap_err().to_string();
            for word in ["on-demand", "mixtral-offloading", "none|next-layer", "lru|lfu|lcp|random"]
            {
                assert!(message.contains(word), "{text}: {message}");
            }
        }
    }

    #[test]
    fn predictors_are_built_where_there_is_one() {
        let shape = Shape::of_model(vec![0, 4], 2);
        let predictor = |name| parse(name).build(&shape, &Profile::default()).predictor;
        assert!(predictor("on-demand").is_none());
        assert!(predictor("mixtral-offloading").unwrap().wants().ahead);
    }
}
