//! A window of decode steps with one candidate.

/// Steps of a short window, and of a long one.
pub const SHORT: u32 = 8;
pub const LONG: u32 = 32;

/// A part of a window's steps that does not count: they find what the candidate before has left.
const SKIPPED: u32 = 4;

/// A part of its other steps, rounded up, that does not count either: the slowest, which a busy
/// disk or machine may have disturbed.
const SLOWEST: usize = 8;

#[derive(Clone, Debug)]
pub struct Window {
    n: u32,
    n_skipped: u32,
    steps: Vec<u64>,
}

impl Window {
    pub fn new(n: u32) -> Window {
        Window { n, n_skipped: n / SKIPPED, steps: Vec::new() }
    }

    pub fn short() -> Window {
        Window::new(SHORT)
    }

    /// Adds a step; returns the mean time of a step, ns, when the window is over.
    pub fn add(&mut self, ns: u64) -> Option<f64> {
        if self.n_skipped > 0 {
            self.n_skipped -= 1;
        } else {
            self.steps.push(ns);
        }
        if self.steps.len() < self.counted() as usize {
            return None;
        }
        self.steps.sort_unstable();
        let n = self.steps.len() - self.steps.len().div_ceil(SLOWEST);
        // A logarithm is taken of it.
        Some((self.steps[..n].iter().sum::<u64>() as f64 / n as f64).max(1.0))
    }

    /// Steps behind the skipped ones.
    fn counted(&self) -> u32 {
        self.n - self.n / SKIPPED
    }

    /// Whether its steps have not taken longer yet than all of them would with this mean, ns.
    pub fn is_within(&self, mean: f64) -> bool {
        self.steps.iter().sum::<u64>() as f64 <= mean * f64::from(self.counted())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean(n: u32, step: impl Fn(u32) -> u64) -> f64 {
        let mut window = Window::new(n);
        let means: Vec<f64> = (0..n).filter_map(|i| window.add(step(i))).collect();
        assert_eq!(means.len(), 1);
        means[0]
    }

    #[test]
    fn the_first_quarter_does_not_count() {
        assert_eq!(mean(8, |i| if i < 2 { 900 } else { 100 }), 100.0);
        assert_eq!(mean(32, |i| if i < 8 { 900 } else { 100 }), 100.0);
        assert_eq!(mean(32, |_| 0), 1.0);
    }

    #[test]
    fn the_slowest_do_not_count() {
        assert_eq!(mean(8, |i| if i == 5 { 1_000_000 } else { 100 }), 100.0);
        assert_eq!(mean(32, |i| if i > 28 { 1_000_000 } else { 100 }), 100.0);
    }

    #[test]
    fn what_takes_too_long_is_seen_before_the_end() {
        let mut window = Window::short();
        for (ns, is_within) in [(900, true), (900, true), (500, true), (200, false)] {
            window.add(ns);
            assert_eq!(window.is_within(100.0), is_within);
        }
    }
}
