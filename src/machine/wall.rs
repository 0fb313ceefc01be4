//! The two walls that computing a token runs into.

use super::{Peak, ReadTest, Rounds};

/// The rates at which threads read memory, and multiply and add with the units that the kernels
/// use. `None` for a rate that could not be measured.
#[derive(Clone, Debug, Default)]
pub struct Wall {
    pub read_gb_per_second: Option<Rounds>,
    pub giga_ops_per_second: Option<Rounds>,
}

impl Wall {
    /// Takes some 0.7 s, and a quarter of the `available` memory at most, which is given back. Not
    /// all memory of a machine is read alike (pages are large or small, nodes near or far), so
    /// reads are measured where `weights` are, too, and the better figure counts.
    pub fn measure(
        n_threads: usize,
        kernels: &str,
        available: Option<u64>,
        weights: Option<&[u8]>,
    ) -> Wall {
        let peak = Peak::of_kernels(kernels);
        let tests = [ReadTest::new(available).ok(), weights.and_then(ReadTest::over)];
        let reads = tests.into_iter().flatten().map(|test| test.gb_per_second(n_threads));
        Wall {
            read_gb_per_second: reads.max_by(|a, b| a.median().total_cmp(&b.median())),
            giga_ops_per_second: Some(peak.giga_ops_per_second(n_threads)),
        }
    }

    /// Whether all rounds agreed.
    pub fn is_steady(&self) -> bool {
        let all = [&self.read_gb_per_second, &self.giga_ops_per_second];
        all.into_iter().flatten().all(Rounds::is_steady)
    }
}
