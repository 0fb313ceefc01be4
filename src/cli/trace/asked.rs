//! The policies that a replay compares: those that can be run, and bounds, which know the future.

use crate::policy::PolicySpec;
use crate::trace::Bound;
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    Policy(PolicySpec),
    Bound(Bound),
}

impl Asked {
    /// The policy for all but the eviction; a bound loads on demand.
    pub fn spec(self) -> PolicySpec {
        match self {
            Asked::Policy(spec) => spec,
            Asked::Bound(_) => PolicySpec::whole("none", "lru"),
        }
    }
}

impl Default for Asked {
    fn default() -> Self {
        Asked::Policy(PolicySpec::default())
    }
}

impl FromStr for Asked {
    type Err = Error;

    fn from_str(text: &str) -> Result<Asked> {
        match Bound::parse(text) {
            Some(bound) => bound.map(Asked::Bound).map_err(Error::Usage),
            None => text.parse().map(Asked::Policy).map_err(|e: Error| {
                Error::Usage(format!("{e}; a replay knows the bounds belady and known:N, too"))
            }),
        }
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Asked::Policy(spec) => spec.fmt(f),
            Asked::Bound(bound) => bound.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_policies_and_bounds_come_back() {
        for name in ["belady", "known:0", "known:32", "on-demand", "predictor=map,eviction=lru"] {
            assert_eq!(name.parse::<Asked>().unwrap().to_string(), name);
        }
        let refused = |text: &str| text.parse::<Asked>().unwrap_err().to_string();
        for n in ["", "x", "-1", "1.5", "99999999999999999999"] {
            let why = refused(&format!("known:{n}"));
            assert!(why.contains("known:4") && why.contains(&format!("{n:?}")), "{why}");
        }
        let why = refused("beladys");
        assert!(why.contains("there is no policy") && why.contains("belady"), "{why}");
    }
}
