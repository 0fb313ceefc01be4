//! The time of an expert with n tokens on the CPU: a·n + b (PreScope, section 4.3.2), fitted while
//! the engine runs.

/// The share of its weight that an observation loses with each newer one. The last 64 count most.
const FORGET: f64 = 1.0 / 64.0;

/// A line by least squares through the observations, with more weight on later ones.
#[derive(Clone, Debug, Default)]
pub struct CpuTimer {
    /// Weighted sums over the observations.
    weight: f64,
    n: f64,
    ns: f64,
    n_n: f64,
    n_ns: f64,
}

impl CpuTimer {
    /// Observes that an expert with `n_tokens` has taken `ns`.
    pub fn observe(&mut self, n_tokens: usize, ns: f64) {
        let n = n_tokens as f64;
        let add = |sum: &mut f64, value: f64| *sum = *sum * (1.0 - FORGET) + value;
        add(&mut self.weight, 1.0);
        add(&mut self.n, n);
        add(&mut self.ns, ns);
        add(&mut self.n_n, n * n);
        add(&mut self.n_ns, n * ns);
    }

    /// a and b, neither below 0; `None` before the first observation. If all observations had about
    /// the same number of tokens, a is 0: few tokens read the same weights as one.
    pub fn fit(&self) -> Option<(f64, f64)> {
        if self.weight == 0.0 {
            return None;
        }
        let (n, ns) = (self.n / self.weight, self.ns / self.weight);
        let spread = self.n_n / self.weight - n * n;
        let slope = (self.n_ns / self.weight - n * ns) / spread;
        let is_line = spread > 1e-6 * n * n && slope > 0.0;
        if !is_line {
            return Some((0.0, ns));
        }
        let start = ns - slope * n;
        // The best line through the origin, if the best line begins below it.
        Some(if start < 0.0 { (self.n_ns / self.n_n, 0.0) } else { (slope, start) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fit(observations: &[(usize, f64)]) -> (f64, f64) {
        let mut timer = CpuTimer::default();
        observations.iter().for_each(|(n, ns)| timer.observe(*n, *ns));
        timer.fit().unwrap()
    }

    #[track_caller]
    fn expect_near(found: (f64, f64), expected: (f64, f64)) {
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs().max(1.0);
        assert!(near(found.0, expected.0) && near(found.1, expected.1), "{found:?}");
    }

    #[test]
    fn a_line_is_found() {
        assert_eq!(CpuTimer::default().fit(), None);
        let line: Vec<_> =
            [3, 1, 17, 1, 40].iter().map(|n| (*n, 7.0 * *n as f64 + 100.0)).collect();
        expect_near(fit(&line), (7.0, 100.0));
        // Scatter on both sides of it.
        let scattered: Vec<_> = (0..64)
            .map(|i| {
                (1 + i % 8, 7.0 * (1 + i % 8) as f64 + if i / 8 % 2 == 0 { 90.0 } else { 110.0 })
            })
            .collect();
        let (a, b) = fit(&scattered);
        assert!((a - 7.0).abs() < 0.5 && (b - 100.0).abs() < 3.0, "{a} {b}");
    }

    #[test]
    fn no_cost_is_below_nothing() {
        expect_near(fit(&[(1, 100.0)]), (0.0, 100.0));
        expect_near(fit(&[(4, 100.0); 50]), (0.0, 100.0));
        // Falling: a mean.
        let (a, b) = fit(&[(1, 300.0), (9, 100.0)]);
        assert!(a == 0.0 && b > 100.0 && b < 300.0);
        // Begins below 0: through the origin.
        let (a, b) = fit(&[(1, 1.0), (10, 100.0)]);
        assert!(b == 0.0 && a > 9.0 && a < 11.0, "{a} {b}");
    }

    #[test]
    fn a_change_is_followed() {
        let mut timer = CpuTimer::default();
        (0..200).for_each(|i| timer.observe(1 + i % 4, 10.0 * (1 + i % 4) as f64));
        (0..400).for_each(|i| timer.observe(1 + i % 4, 20.0 * (1 + i % 4) as f64 + 50.0));
        let (a, b) = timer.fit().unwrap();
        assert!((a - 20.0).abs() < 0.5 && (b - 50.0).abs() < 1.0, "{a} {b}");
    }
}
