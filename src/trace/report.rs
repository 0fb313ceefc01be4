//! Results of a simulation.

use crate::experts::Counters;
use crate::policy::Timing;

/// One forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Iteration {
    pub request: usize,
    pub is_prompt: bool,
    pub n_tokens: usize,
    /// ns since the start of the replay.
    pub start_ns: u64,
    pub timing: Timing,
    /// The tier's counts meanwhile.
    pub counters: Counters,
}

impl Iteration {
    pub fn end_ns(&self) -> u64 {
        self.start_ns + self.timing.wall_ns
    }
}

/// Statistics of some durations, ns; all NaN if there are none. Percentiles are nearest ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distribution {
    pub n: usize,
    pub mean: f64,
    pub p50: f64,
    pub p99: f64,
}

impl Distribution {
    pub fn of(mut values: Vec<u64>) -> Distribution {
        values.sort_unstable();
        let n = values.len();
        let rank = |p: f64| ((p * n as f64).ceil() as usize).clamp(1, n.max(1)) - 1;
        let at = |p: f64| values.get(rank(p)).map_or(f64::NAN, |value| *value as f64);
        let sum: f64 = values.iter().map(|value| *value as f64).sum();
        Distribution { n, mean: sum / n as f64, p50: at(0.5), p99: at(0.99) }
    }
}

/// Passes of one kind together: prompts, or decode steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    pub n_tokens: usize,
    pub timing: Timing,
    pub counters: Counters,
}

impl Totals {
    fn of<'a>(iterations: impl Iterator<Item = &'a Iteration>) -> Totals {
        iterations.fold(Totals::default(), |sum, iteration| {
            let (a, b) = (sum.timing, iteration.timing);
            Totals {
                n_tokens: sum.n_tokens + iteration.n_tokens,
                timing: Timing {
                    wall_ns: a.wall_ns + b.wall_ns,
                    stall_ns: a.stall_ns + b.stall_ns,
                    experts_ns: a.experts_ns + b.experts_ns,
                    head_ns: a.head_ns + b.head_ns,
                },
                counters: iteration.counters.plus(&sum.counters),
            }
        })
    }

    /// Neither waiting nor computing routed experts.
    pub fn dense_ns(&self) -> u64 {
        let Timing { wall_ns, stall_ns, experts_ns, .. } = self.timing;
        wall_ns - stall_ns - experts_ns
    }

    pub fn stall_ns_per_token(&self) -> f64 {
        self.timing.stall_ns as f64 / self.n_tokens as f64
    }

    pub fn read_bytes_per_token(&self) -> f64 {
        self.counters.read_bytes as f64 / self.n_tokens as f64
    }
}

/// A replay, without the requests that it was warmed up with.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// From the start of each request to the end of its prompt.
    pub ttft: Distribution,
    /// Decode steps.
    pub tpot: Distribution,
    pub prompt: Totals,
    pub decode: Totals,
    /// Counts of all passes and of loads in flight at the end.
    pub counters: Counters,
    /// Slots of the plan, in bytes.
    pub plan_bytes: u64,
    /// Each pass, in order: for plots over time.
    pub timeline: Vec<Iteration>,
}

impl Report {
    pub(super) fn new(timeline: Vec<Iteration>, counters: Counters, plan_bytes: u64) -> Report {
        let prompts = || timeline.iter().filter(|i| i.is_prompt);
        let decodes = || timeline.iter().filter(|i| !i.is_prompt);
        let requests = timeline.chunk_by(|a, b| a.request == b.request);
        let ttft = |request: &[Iteration]| {
            let last = request.iter().rfind(|i| i.is_prompt)?;
            Some(last.end_ns() - request[0].start_ns)
        };
        Report {
            ttft: Distribution::of(requests.filter_map(ttft).collect()),
            tpot: Distribution::of(decodes().map(|i| i.timing.wall_ns).collect()),
            prompt: Totals::of(prompts()),
            decode: Totals::of(decodes()),
            counters,
            plan_bytes,
            timeline,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let d = Distribution::of((1..=200).rev().collect());
        assert_eq!((d.n, d.mean, d.p50, d.p99), (200, 100.5, 100.0, 198.0));
        let one = Distribution::of(vec![7]);
        assert_eq!((one.mean, one.p50, one.p99), (7.0, 7.0, 7.0));
        let none = Distribution::of(Vec::new());
        assert!(none.mean.is_nan() && none.p50.is_nan() && none.p99.is_nan());
    }

    #[test]
    fn the_first_token_comes_with_the_last_pass_of_the_prompt() {
        let pass = |request, is_prompt, start_ns, wall_ns| Iteration {
            request,
            is_prompt,
            n_tokens: 1 + usize::from(is_prompt),
            start_ns,
            timing: Timing { wall_ns, ..Timing::default() },
            counters: Counters { misses: 1, ..Counters::default() },
        };
        let timeline = vec![
            pass(4, true, 100, 10),
            pass(4, true, 110, 20),
            pass(4, false, 130, 3),
            pass(5, true, 133, 50),
            pass(5, false, 183, 5),
        ];
        let report = Report::new(timeline, Counters::default(), 0);
        assert_eq!((report.ttft.n, report.ttft.mean), (2, 40.0));
        assert_eq!((report.tpot.n, report.tpot.mean), (2, 4.0));
        assert_eq!((report.prompt.n_tokens, report.decode.n_tokens), (6, 2));
        assert_eq!((report.prompt.counters.misses, report.decode.timing.wall_ns), (3, 8));
    }
}
