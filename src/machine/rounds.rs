//! A figure measured several times.

use std::time::Duration;

/// Results of some rounds, ascending.
#[derive(Clone, Debug, PartialEq)]
pub struct Rounds(Vec<f64>);

/// Rounds of a quiet machine differ by a few percent; beyond this, something else was running.
const STEADY_SPREAD: f64 = 0.1;

impl Rounds {
    /// Rounds enough for a median, and no more: a whole report takes seconds.
    pub const N: usize = 5;
    /// Long enough for clocks and caches to settle, short enough to be repeated.
    pub const TIME: Duration = Duration::from_millis(40);

    pub fn of(mut round: impl FnMut() -> f64) -> Rounds {
        Rounds::sorted((0..Self::N).map(|_| round()).collect())
    }

    /// Rounds with these results.
    ///
    /// # Panics
    /// If there are none.
    pub fn sorted(mut results: Vec<f64>) -> Rounds {
        assert!(!results.is_empty());
        results.sort_by(f64::total_cmp);
        Rounds(results)
    }

    /// The median; for an even number of results the mean of the middle two.
    pub fn median(&self) -> f64 {
        let n = self.0.len();
        (self.0[(n - 1) / 2] + self.0[n / 2]) / 2.0
    }

    pub fn best(&self) -> f64 {
        self.0[self.0.len() - 1]
    }

    /// From the median to the best, as a part of the median: half of the rounds have been slower
    /// than the median, so a single interruption does not show, and a busy machine does.
    pub fn spread(&self) -> f64 {
        (self.best() - self.median()) / self.median()
    }

    /// Whether the rounds agree so far that the median says something of the machine.
    pub fn is_steady(&self) -> bool {
        self.spread() <= STEADY_SPREAD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        let mut results = [5.0, 1.0, 4.0, 2.0, 3.0].into_iter();
        let rounds = Rounds::of(|| results.next().unwrap());
        assert_eq!((rounds.median(), rounds.best()), (3.0, 5.0));
        assert_eq!(Rounds::sorted(vec![4.0, 1.0]).median(), 2.5);
    }

    #[test]
    fn rounds_that_differ_are_not_steady() {
        let rounds = Rounds::sorted(vec![10.0, 8.0, 7.0]);
        assert!((rounds.spread() - 0.25).abs() < 1e-12);
        assert!(!rounds.is_steady());
        // One interruption.
        assert!(Rounds::sorted(vec![10.0, 9.5, 1.0]).is_steady());
    }
}
