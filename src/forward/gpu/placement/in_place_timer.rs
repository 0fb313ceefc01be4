//! The time that kernels of a device take to read an expert where it is in the host's memory,
//! measured while the engine runs.

/// Weight of a new figure in the running mean, once there are some.
const WEIGHT: f64 = 1.0 / 32.0;

/// Uses before the figure counts. The first of them is left out: kernels may be loaded meanwhile.
const TRIES: u32 = 4;

#[derive(Clone, Debug, Default)]
pub struct InPlaceTimer {
    n_uses: u32,
    ns_a_byte: f64,
}

impl InPlaceTimer {
    /// Observes that kernels have read so many bytes of experts, those of each row counted.
    pub fn observe(&mut self, n_bytes: usize, ns: f64) {
        self.n_uses = self.n_uses.saturating_add(1);
        if n_bytes > 0 && self.n_uses > 1 {
            let weight = WEIGHT.max(1.0 / f64::from(self.n_uses - 1));
            self.ns_a_byte += weight * (ns / n_bytes as f64 - self.ns_a_byte);
        }
    }

    /// An expert of so many bytes, for one row; `None` while it is being tried out.
    pub fn ns(&self, n_bytes: usize) -> Option<f64> {
        (self.n_uses >= TRIES).then_some(self.ns_a_byte * n_bytes as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_of_all_uses_but_the_first() {
        let mut timer = InPlaceTimer::default();
        for (bytes, ns) in [(100, 9e9), (100, 200.0), (50, 100.0)] {
            timer.observe(bytes, ns);
            assert_eq!(timer.ns(100), None);
        }
        timer.observe(100, 500.0);
        assert!((timer.ns(100).unwrap() - 300.0).abs() < 1e-9);
        // A change is followed.
        (0..400).for_each(|_| timer.observe(10, 10.0));
        let ns = timer.ns(100).unwrap();
        assert!((ns - 100.0).abs() < 1.0, "{ns}");
    }
}
