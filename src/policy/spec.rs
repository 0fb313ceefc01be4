//! Policies by name: what `--policy` takes.

use std::fmt;
use std::str::FromStr;

use super::{
    AllNext, Auto, Candidate, Counts, EamcPredictor, Eviction, FineMoe, FineMoeOptions, Hot,
    HotTable, InfinityOptions, Lcp, Lfu, LlaPor, Lru, MapEviction, Moepic, MoepicOptions,
    NextLayer, Predictor, Profile, Random, RequestEam, ScanResistant, Shape, Splitter,
    papers::finemoe,
};
use crate::{Error, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PredictorKind {
    None,
    NextLayer,
    AllNext,
    Counts,
    Eamc,
    Map,
    Llapor,
    Auto,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionKind {
    Lru,
    Lfu,
    Lcp,
    Random,
    RequestEam,
    Map,
    Hot,
    ScanResistant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitKind {
    /// Experts stay as they are, wherever there is room.
    Whole,
    /// Equal shares for all layers and one θ, in thousandths.
    Fixed(u16),
    /// Shares and θ of each layer by MoEpic's Algorithm 1.
    Auto,
}

/// A policy's parts. Written as a name of `NAMED`, or by hand as
/// `predictor=NAME,eviction=NAME,split=NAME` in any order, where a missing part is the default
/// policy's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicySpec {
    pub predictor: PredictorKind,
    pub eviction: EvictionKind,
    pub split: SplitKind,
}

/// A policy at work.
pub struct Policy {
    pub eviction: Box<dyn Eviction>,
    pub predictor: Option<Box<dyn Predictor>>,
    pub splitter: Option<Box<dyn Splitter>>,
    /// What the user should hear of: sections of the profile that were refused.
    pub notes: Vec<String>,
}

const PREDICTORS: &[(&str, PredictorKind)] = &[
    ("none", PredictorKind::None),
    ("next-layer", PredictorKind::NextLayer),
    ("all-next", PredictorKind::AllNext),
    ("counts", PredictorKind::Counts),
    ("eamc", PredictorKind::Eamc),
    ("map", PredictorKind::Map),
    ("llapor", PredictorKind::Llapor),
    ("auto", PredictorKind::Auto),
];

const EVICTIONS: &[(&str, EvictionKind)] = &[
    ("lru", EvictionKind::Lru),
    ("lfu", EvictionKind::Lfu),
    ("lcp", EvictionKind::Lcp),
    ("random", EvictionKind::Random),
    ("request-eam", EvictionKind::RequestEam),
    ("map", EvictionKind::Map),
    ("hot", EvictionKind::Hot),
    ("scan-resistant", EvictionKind::ScanResistant),
];

const fn whole(predictor: PredictorKind, eviction: EvictionKind) -> PolicySpec {
    PolicySpec { predictor, eviction, split: SplitKind::Whole }
}

/// Published compositions, and ours.
const NAMED: &[(&str, PolicySpec)] = &[
    ("on-demand", whole(PredictorKind::None, EvictionKind::Lru)),
    ("deepspeed", whole(PredictorKind::AllNext, EvictionKind::Lru)),
    ("brainstorm", whole(PredictorKind::Counts, EvictionKind::Lfu)),
    ("mixtral-offloading", whole(PredictorKind::NextLayer, EvictionKind::Lru)),
    ("moe-infinity", whole(PredictorKind::Eamc, EvictionKind::RequestEam)),
    ("finemoe", whole(PredictorKind::Map, EvictionKind::Map)),
    (
        "moepic",
        PolicySpec {
            predictor: PredictorKind::NextLayer,
            eviction: EvictionKind::Lcp,
            split: SplitKind::Auto,
        },
    ),
    ("prescope", whole(PredictorKind::Llapor, EvictionKind::Hot)),
    ("auto", whole(PredictorKind::Auto, EvictionKind::ScanResistant)),
];

/// The fastest policy in `bench/README.md`.
const DEFAULT: PolicySpec = whole(PredictorKind::NextLayer, EvictionKind::ScanResistant);

/// Runs are to be repeatable, and a policy that draws is there to be compared with.
const RANDOM_SEED: u64 = 0x6d6f_6562_6121;

/// What a policy is made of: the tier's shape and what was learned before.
struct Builder<'a> {
    shape: &'a Shape,
    profile: &'a Profile,
    notes: Vec<String>,
}

impl Builder<'_> {
    /// What the profile has of a section, restored; `None` where it has nothing or nothing good.
    fn restore<T>(
        &mut self,
        section: &str,
        restore: impl FnOnce(&Shape, &[u8]) -> std::result::Result<T, String>,
    ) -> Option<T> {
        let restored = restore(self.shape, self.profile.get(section)?);
        let refuse =
            |why| self.notes.push(format!("the profile's section {section} is not used: {why}"));
        restored.map_err(refuse).ok()
    }

    fn eviction(&mut self, kind: EvictionKind) -> Box<dyn Eviction> {
        let shape = self.shape;
        match kind {
            EvictionKind::Lru => Box::new(Lru::new(shape)),
            EvictionKind::Lfu => Box::new(Lfu::new(shape)),
            EvictionKind::Lcp => Box::new(Lcp::new(shape)),
            EvictionKind::Random => Box::new(Random::new(RANDOM_SEED)),
            EvictionKind::RequestEam => Box::new(RequestEam::new(shape)),
            EvictionKind::Map => Box::new(MapEviction::new(shape)),
            EvictionKind::Hot => {
                let table = self.restore(HotTable::SECTION, HotTable::restore);
                Box::new(table.map_or_else(|| Hot::new(shape), Hot::with))
            }
            EvictionKind::ScanResistant => Box::new(ScanResistant::new(shape)),
        }
    }

    fn predictor(&mut self, kind: PredictorKind) -> Option<Box<dyn Predictor>> {
        let shape = self.shape;
        Some(match kind {
            PredictorKind::None => return None,
            PredictorKind::NextLayer => Box::new(NextLayer::new(shape)),
            PredictorKind::AllNext => Box::new(AllNext::new(shape)),
            PredictorKind::Counts => Box::new(Counts::new(shape)),
            PredictorKind::Eamc => Box::new(self.eamc()),
            PredictorKind::Map => Box::new(self.map()),
            PredictorKind::Llapor => {
                let llapor = LlaPor::from_profile(shape, self.profile, true);
                Box::new(llapor.map_err(|why| self.notes.push(why)).ok()?)
            }
            PredictorKind::Auto => Box::new(self.auto()),
        })
    }

    fn eamc(&mut self) -> EamcPredictor {
        let options = InfinityOptions::default();
        let restore = |shape: &Shape, bytes: &[u8]| EamcPredictor::restore(shape, options, bytes);
        let eamc = self.restore(EamcPredictor::SECTION, restore);
        eamc.unwrap_or_else(|| EamcPredictor::new(self.shape, options))
    }

    fn map(&mut self) -> FineMoe {
        let n_layers = self.shape.moe_layers().count().max(1);
        let profiled = self.restore(finemoe::DISTANCE_SECTION, finemoe::restore_distance);
        let distance = profiled.unwrap_or(FineMoeOptions::default().distance.min(n_layers));
        let options = FineMoeOptions { distance, ..FineMoeOptions::default() };
        let restore = |shape: &Shape, bytes: &[u8]| FineMoe::restore(shape, options, bytes);
        let map = self.restore(FineMoe::SECTION, restore);
        map.unwrap_or_else(|| FineMoe::new(self.shape, options))
    }

    /// What must learn before it can predict is a candidate once it has, in an earlier run.
    fn auto(&mut self) -> Auto {
        let mut candidates = vec![Candidate { name: "no prefetch", predictor: None }];
        let kinds = [
            ("next-layer", PredictorKind::NextLayer, None),
            ("eamc", PredictorKind::Eamc, Some(EamcPredictor::SECTION)),
            ("map", PredictorKind::Map, Some(FineMoe::SECTION)),
            ("llapor", PredictorKind::Llapor, Some(LlaPor::SECTION)),
        ];
        for (name, kind, section) in kinds {
            let has_learned = section.is_none_or(|name| self.profile.get(name).is_some());
            if let Some(predictor) = has_learned.then(|| self.predictor(kind)).flatten() {
                candidates.push(Candidate { name, predictor: Some(predictor) });
            }
        }
        Auto::new(candidates, self.profile)
    }

    fn splitter(&mut self, kind: SplitKind) -> Option<Box<dyn Splitter>> {
        let fixed_theta = match kind {
            SplitKind::Whole => return None,
            SplitKind::Fixed(thousandths) => Some(f64::from(thousandths) / 1000.0),
            SplitKind::Auto => None,
        };
        let options = MoepicOptions { fixed_theta, ..MoepicOptions::default() };
        let restore = |shape: &Shape, bytes: &[u8]| Moepic::restore(shape, options.clone(), bytes);
        let moepic = self.restore(Moepic::SECTION, restore);
        Some(Box::new(moepic.unwrap_or_else(|| Moepic::new(self.shape, options))))
    }
}

impl PolicySpec {
    /// The policy for a model and tier of this shape, as warm as the profile makes it.
    pub fn build(&self, shape: &Shape, profile: &Profile) -> Policy {
        let mut builder = Builder { shape, profile, notes: Vec::new() };
        let eviction = builder.eviction(self.eviction);
        let predictor = builder.predictor(self.predictor);
        let splitter = builder.splitter(self.split);
        Policy { eviction, predictor, splitter, notes: builder.notes }
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
        let (mut predictor, mut eviction, mut split) = (None, None, None);
        for part in text.split(',') {
            let fresh = match part.split_once('=') {
                Some(("predictor", name)) => set(&mut predictor, by_name(PREDICTORS, name)),
                Some(("eviction", name)) => set(&mut eviction, by_name(EVICTIONS, name)),
                Some(("split", name)) => set(&mut split, name.parse().ok()),
                _ => false,
            };
            if !fresh {
                return Err(unknown(text));
            }
        }
        Ok(PolicySpec {
            predictor: predictor.unwrap_or(DEFAULT.predictor),
            eviction: eviction.unwrap_or(DEFAULT.eviction),
            split: split.unwrap_or(DEFAULT.split),
        })
    }
}

impl FromStr for SplitKind {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        match text {
            "whole" => Ok(SplitKind::Whole),
            "auto" => Ok(SplitKind::Auto),
            theta => {
                let thousandths = (theta.parse::<f64>().map_err(drop)? * 1000.0).round();
                let fits = (1.0..=1000.0).contains(&thousandths);
                fits.then_some(SplitKind::Fixed(thousandths as u16)).ok_or(())
            }
        }
    }
}

impl fmt::Display for SplitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SplitKind::Whole => f.write_str("whole"),
            SplitKind::Auto => f.write_str("auto"),
            SplitKind::Fixed(thousandths) => write!(f, "{}", f64::from(*thousandths) / 1000.0),
        }
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
         predictor={}, eviction={} and split=whole|auto|0.5 (or another θ from 0.001 to 1)",
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
        write!(f, "predictor={predictor},eviction={eviction}")?;
        match self.split {
            SplitKind::Whole => Ok(()),
            split => write!(f, ",split={split}"),
        }
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
                for split in ["whole", "auto", "0.5", "0.125"] {
                    let text = format!("predictor={predictor},eviction={eviction},split={split}");
                    let there = parse(&text);
                    let text = format!("split={split},eviction={eviction},predictor={predictor}");
                    assert_eq!(there, parse(&text));
                    assert_eq!(parse(&there.to_string()), there);
                }
            }
        }
        for (name, spec) in NAMED {
            assert_eq!((parse(name), spec.to_string().as_str()), (*spec, *name));
        }
    }

    #[test]
    fn a_missing_part_is_the_defaults() {
        assert_eq!(parse("eviction=scan-resistant"), PolicySpec::default());
        assert_eq!(parse("predictor=none").eviction, DEFAULT.eviction);
        assert_eq!(
            PolicySpec::default().to_string(),
            "predictor=next-layer,eviction=scan-resistant"
        );
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
            "split=0",
            "split=1.1",
            "split=half",
            "predictor=none;eviction=lru",
        ];
        for text in bad {
            let message = PolicySpec::from_str(text).unwrap_err().to_string();
            for word in [
                "on-demand",
                "mixtral-offloading",
                "none|next-layer",
                "lru|lfu|lcp|random",
                "split=",
            ] {
                assert!(message.contains(word), "{text}: {message}");
            }
        }
    }

    /// A dense layer and two others.
    fn shape() -> Shape {
        let (n_experts, n_granules) = (vec![0, 4, 6], vec![0, 2, 2]);
        Shape { n_experts, k: 2, n_granules, class: vec![0; 3], n_slots: vec![8] }
    }

    #[test]
    fn every_policy_is_built_and_damaged_sections_are_told_of() {
        let mut damaged = Profile::default();
        let sections = [
            HotTable::SECTION,
            EamcPredictor::SECTION,
            FineMoe::SECTION,
            finemoe::DISTANCE_SECTION,
            Moepic::SECTION,
            LlaPor::SECTION,
        ];
        sections.iter().for_each(|section| damaged.set(section, vec![1; 7]));
        for (name, spec) in NAMED {
            let cold = spec.build(&shape(), &Profile::default());
            // What was never trained cannot predict.
            assert_eq!(cold.notes.is_empty(), *name != "prescope", "{name}: {:?}", cold.notes);
            let warm = spec.build(&shape(), &damaged);
            let knows_it = ["moe-infinity", "finemoe", "moepic", "prescope", "auto"].contains(name);
            assert_eq!(warm.notes.is_empty(), !knows_it, "{name}: {:?}", warm.notes);
            assert_eq!(warm.splitter.is_some(), spec.split != SplitKind::Whole);
        }
    }

    #[test]
    fn maps_are_searched_as_far_ahead_as_was_profiled() {
        let verdict = |profile: &Profile| {
            let policy = parse("finemoe").build(&shape(), profile);
            assert_eq!(policy.notes, [""; 0]);
            policy.predictor.unwrap().verdict().unwrap()
        };
        let mut profile = Profile::default();
        // The paper's three, of which there are two.
        assert!(verdict(&profile).contains("distance 2,"));
        finemoe::save_distance(1, &mut profile);
        assert!(verdict(&profile).contains("distance 1,"));
    }

    #[test]
    fn predictors_are_built_where_there_is_one() {
        let shape = shape();
        let predictor = |name| parse(name).build(&shape, &Profile::default()).predictor;
        assert!(predictor("on-demand").is_none());
        assert!(predictor("mixtral-offloading").unwrap().wants().ahead);
    }
}
