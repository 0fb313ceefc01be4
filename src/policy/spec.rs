//! `--policy`: a name, or parts by name.

use std::fmt;
use std::str::FromStr;

use super::registry::{self, Builder};
use super::{Eviction, Predictor, PrefetchPlanner, Profile, Shape, Splitter, papers::moepic};
use crate::{Error, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitKind {
    /// Whole experts, wherever there is room.
    Whole,
    /// Equal shares for all layers and one θ, in thousandths.
    Fixed(u16),
    /// Shares and θ of each layer by MoEpic's Algorithm 1.
    Auto,
}

/// How a link's time is divided between what a layer demands and what is predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementKind {
    /// Each layer by itself; what is predicted comes whenever no demand is queued.
    Demand,
    /// Across layers: prefetches are planned by measured times and hit rates (PreScope, 4.3).
    PreSched,
}

/// The parts of a policy. Written as the name of a policy or as
/// `predictor=NAME,eviction=NAME,split=NAME,placement=NAME` in any order; a missing part is the
/// default policy's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicySpec {
    /// Name of a registered predictor.
    pub predictor: &'static str,
    /// Name of a registered eviction.
    pub eviction: &'static str,
    pub split: SplitKind,
    pub placement: PlacementKind,
}

/// A policy at work.
pub struct Policy {
    pub eviction: Box<dyn Eviction>,
    pub predictor: Option<Box<dyn Predictor>>,
    pub splitter: Option<Box<dyn Splitter>>,
    /// Messages for the user: sections of the profile that were refused.
    pub notes: Vec<String>,
}

/// The fastest policy in `bench/reports/policies.md`.
const DEFAULT: PolicySpec = PolicySpec::whole("trajectory", "scan-resistant");

impl PolicySpec {
    /// The policies that have a name of their own.
    pub fn names() -> impl Iterator<Item = &'static str> {
        registry::policies().map(|(name, _)| *name)
    }

    /// Whole experts, each layer placed by itself; the parts are names that are registered.
    pub const fn whole(predictor: &'static str, eviction: &'static str) -> PolicySpec {
        let (split, placement) = (SplitKind::Whole, PlacementKind::Demand);
        PolicySpec { predictor, eviction, split, placement }
    }

    pub(super) const fn placed(self, placement: PlacementKind) -> PolicySpec {
        PolicySpec { placement, ..self }
    }

    /// The planner of a link's prefetches; none where each layer is placed by itself.
    pub fn prefetch_planner(&self, shape: &Shape) -> Option<PrefetchPlanner> {
        match self.placement {
            PlacementKind::Demand => None,
            PlacementKind::PreSched => Some(PrefetchPlanner::new(shape)),
        }
    }

    /// The policy for a model and tier of this shape, as warm as the profile makes it. Panics if
    /// a part has an unknown name; names that were parsed are known.
    pub fn build(&self, shape: &Shape, profile: &Profile) -> Policy {
        let mut builder = Builder { shape, profile, notes: Vec::new() };
        let eviction = registry::evictions().find(|entry| entry.name == self.eviction);
        let predictor = registry::predictors().find(|entry| entry.name == self.predictor);
        let eviction = (eviction.expect("a registered eviction").build)(&mut builder);
        let predictor = (predictor.expect("a registered predictor").build)(&mut builder);
        let splitter = match self.split {
            SplitKind::Whole => None,
            SplitKind::Fixed(thousandths) => {
                Some(moepic::splitter(&mut builder, Some(f64::from(thousandths) / 1000.0)))
            }
            SplitKind::Auto => Some(moepic::splitter(&mut builder, None)),
        };
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
        if let Some((_, spec)) = registry::policies().find(|(name, _)| *name == text) {
            return Ok(*spec);
        }
        let (mut predictor, mut eviction, mut split, mut placement) = (None, None, None, None);
        for part in text.split(',') {
            let is_new = match part.split_once('=') {
                Some(("predictor", name)) => set(&mut predictor, known(predictors(), name)),
                Some(("eviction", name)) => set(&mut eviction, known(evictions(), name)),
                Some(("split", name)) => set(&mut split, name.parse().ok()),
                Some(("placement", name)) => set(&mut placement, name.parse().ok()),
                _ => false,
            };
            if !is_new {
                return Err(unknown(text));
            }
        }
        Ok(PolicySpec {
            predictor: predictor.unwrap_or(DEFAULT.predictor),
            eviction: eviction.unwrap_or(DEFAULT.eviction),
            split: split.unwrap_or(DEFAULT.split),
            placement: placement.unwrap_or(DEFAULT.placement),
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

impl FromStr for PlacementKind {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        match text {
            "demand" => Ok(PlacementKind::Demand),
            "presched" => Ok(PlacementKind::PreSched),
            _ => Err(()),
        }
    }
}

impl fmt::Display for PlacementKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PlacementKind::Demand => "demand",
            PlacementKind::PreSched => "presched",
        })
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

/// Sets a part; false if there is no value, or was one before.
fn set<T>(part: &mut Option<T>, value: Option<T>) -> bool {
    let is_new = part.is_none() && value.is_some();
    *part = value;
    is_new
}

fn predictors() -> impl Iterator<Item = &'static str> {
    registry::predictors().map(|entry| entry.name)
}

fn evictions() -> impl Iterator<Item = &'static str> {
    registry::evictions().map(|entry| entry.name)
}

fn known(mut names: impl Iterator<Item = &'static str>, name: &str) -> Option<&'static str> {
    names.find(|known| *known == name)
}

fn unknown(text: &str) -> Error {
    if text == "belady" || text.starts_with("known:") {
        return Error::Usage(format!(
            "{text} knows the routing that is still to come, so it can only be simulated: give it \
             to moeba trace replay"
        ));
    }
    if let Some(name) = known(evictions(), text) {
        return Error::Usage(format!("{name} is an eviction: give predictor=none,eviction={name}"));
    }
    if let Some(name) = known(predictors(), text) {
        return Error::Usage(format!("{name} is a predictor: give predictor={name}"));
    }
    let list = |names: &mut dyn Iterator<Item = &'static str>, between: &str| {
        names.collect::<Vec<_>>().join(between)
    };
    Error::Usage(format!(
        "there is no policy {text:?}: give {}, or parts with a comma between them, \
         predictor={}, eviction={}, split=whole|auto|0.5 (or another θ from 0.001 to 1) and \
         placement=demand|presched",
        list(&mut PolicySpec::names(), ", "),
        list(&mut predictors(), "|"),
        list(&mut evictions(), "|"),
    ))
}

impl fmt::Display for PolicySpec {
    /// The policy's name, if it has one, or its parts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((name, _)) = registry::policies().find(|(_, spec)| spec == self) {
            return f.write_str(name);
        }
        write!(f, "predictor={},eviction={}", self.predictor, self.eviction)?;
        if self.split != DEFAULT.split {
            write!(f, ",split={}", self.split)?;
        }
        if self.placement != DEFAULT.placement {
            write!(f, ",placement={}", self.placement)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::papers::finemoe;
    use crate::policy::{EamcPredictor, FineMoe, HotTable, LlaPor, Moepic, TrajectoryPredictor};

    fn parse(text: &str) -> PolicySpec {
        text.parse().unwrap()
    }

    #[test]
    fn names_and_parts_come_back_as_they_were() {
        for predictor in predictors() {
            for eviction in evictions() {
                for split in ["whole", "auto", "0.5", "0.125"] {
                    for placement in ["demand", "presched"] {
                        let (a, b) = (format!("predictor={predictor}"), format!("split={split}"));
                        let c = format!("placement={placement}");
                        let there = parse(&format!("{a},eviction={eviction},{b},{c}"));
                        assert_eq!(there, parse(&format!("{c},{b},eviction={eviction},{a}")));
                        assert_eq!(parse(&there.to_string()), there);
                    }
                }
            }
        }
        for (name, spec) in registry::policies() {
            assert_eq!((parse(name), spec.to_string().as_str()), (*spec, *name));
        }
    }

    #[test]
    fn a_missing_part_is_the_defaults() {
        assert_eq!(parse("eviction=scan-resistant"), PolicySpec::default());
        assert_eq!(parse("predictor=none").eviction, DEFAULT.eviction);
        assert_eq!(
            PolicySpec::default().to_string(),
            "predictor=trajectory,eviction=scan-resistant"
        );
    }

    #[test]
    fn what_is_unknown_is_told_what_there_is() {
        let bad = [
            "",
            "auto",
            "predictor=",
            "eviction=LRU",
            "eviction=lru,",
            "eviction=lru,eviction=lfu",
            "split=0",
            "split=1.1",
            "split=half",
            "placement=",
            "placement=greedy",
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
                "placement=",
            ] {
                assert!(message.contains(word), "{text}: {message}");
            }
        }
    }

    #[test]
    fn a_lone_part_is_told_how_to_give_it() {
        let told = |text| PolicySpec::from_str(text).unwrap_err().to_string();
        assert_eq!(told("lru"), "lru is an eviction: give predictor=none,eviction=lru");
        assert_eq!(told("counts"), "counts is a predictor: give predictor=counts");
    }

    #[test]
    fn a_bound_is_for_replays() {
        for text in ["belady", "known:4"] {
            let why = PolicySpec::from_str(text).unwrap_err().to_string();
            assert!(why.starts_with(text) && why.contains("moeba trace replay"), "{why}");
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
            TrajectoryPredictor::SECTION,
        ];
        sections.iter().for_each(|section| damaged.set(section, vec![1; 7]));
        for (name, spec) in registry::policies() {
            let cold = spec.build(&shape(), &Profile::default());
            // What was never trained cannot predict.
            assert_eq!(cold.notes.is_empty(), *name != "prescope", "{name}: {:?}", cold.notes);
            let warm = spec.build(&shape(), &damaged);
            let knows_it = ["moe-infinity", "finemoe", "moepic", "prescope"].contains(name);
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
