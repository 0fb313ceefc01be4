//! All policies live: requests that the engine itself answered, experts from disk to RAM.

use super::{Cell, Change, Claim, Finding, Inputs, Row, Runs, Table, check, columns};
use moeba::Result;

/// The default policy.
pub const DEFAULT: &str = "predictor=trajectory,eviction=scan-resistant";

/// Requests of a policy with a model and a budget: a line that `live` wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Live {
    pub model: String,
    pub policy: String,
    /// Part of all experts' memory.
    pub budget: f64,
    /// Time per output token, ms: of each request, in the order of the prompts.
    pub tpots: Vec<f64>,
    /// The figures of the request of median time.
    pub hit_rate: f64,
    pub stall_ms: f64,
    /// Read for a token.
    pub mib: f64,
    /// Share of a token's time.
    pub policy_share: f64,
    pub ttft_ms: f64,
}

impl Live {
    /// `model;policy;budget;tpot_ms,tpot_ms…;hit_rate;stall_ms;mib;policy_share;ttft_ms`. Returns
    /// the reason as a clause, for use after a colon.
    pub fn parse(line: &str) -> std::result::Result<Live, String> {
        let fields: Vec<&str> = line.split(';').collect();
        let [model, policy, budget, tpots, numbers @ ..] = &fields[..] else {
            return Err(format!("{} fields, expected 9", fields.len()));
        };
        let number = |field: &str| field.trim().parse::<f64>().map_err(|e| e.to_string());
        let all = |fields: &[&str]| -> std::result::Result<Vec<f64>, String> {
            fields.iter().map(|field| number(field)).collect()
        };
        let (tpots, numbers) = (all(&tpots.split(',').collect::<Vec<_>>())?, all(numbers)?);
        let [hit_rate, stall_ms, mib, policy_share, ttft_ms] = numbers[..] else {
            return Err(format!("{} fields, expected 9", fields.len()));
        };
        let (model, policy, budget) = (model.to_string(), policy.to_string(), number(budget)?);
        Ok(Live { model, policy, budget, tpots, hit_rate, stall_ms, mib, policy_share, ttft_ms })
    }

    /// From the least to the most, ms.
    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.tpots.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }

    /// ms
    pub fn median(&self) -> f64 {
        self.sorted()[self.tpots.len() / 2]
    }

    /// The least and the most, ms.
    pub fn extremes(&self) -> [f64; 2] {
        let sorted = self.sorted();
        [sorted[0], sorted[sorted.len() - 1]]
    }
}

/// The engine's own runs, disk to RAM.
pub fn table(inputs: &Inputs) -> Result<Option<Table>> {
    if inputs.live.is_empty() {
        return Ok(None);
    }
    let row = |run: &Live| {
        let name = format!("{}, {}, {:.0} %", run.model, run.policy, 100.0 * run.budget);
        let [least, most] = run.extremes();
        let numbers = [
            Cell::Share(run.hit_rate),
            Cell::Number(run.median(), 3),
            Cell::Number(least, 3),
            Cell::Number(most, 3),
            Cell::Number(run.ttft_ms, 1),
            Cell::Number(run.stall_ms, 3),
            Cell::Number(run.mib, 2),
            Cell::Share(run.policy_share),
        ];
        Row::new(name, numbers)
    };
    let names = [
        "hit rate",
        "TPOT, ms",
        "least",
        "most",
        "TTFT, ms",
        "stall, ms",
        "MiB read for a token",
        "policy's time",
    ];
    let mut table = Table {
        id: "all-live",
        title: "All policies, live: disk to RAM".into(),
        setting: "End to end, as FineMoE's Fig. 10, MoE-Infinity's Fig. 9, MoEpic's Fig. 7 and \
                  PreScope's Fig. 14: the engine itself answers prompts of held-out prose with \
                  128 tokens each, experts streamed from the disk of the machine that made this \
                  table (`--io auto`), each policy with a profile of its requests so far; the \
                  request of median TPOT. The policy's time is that of all its threads, as a part \
                  of a token's."
            .into(),
        columns: columns("model, policy and budget", names),
        rows: inputs.live.iter().map(row).collect(),
        ..Table::default()
    };
    table.claims = claims(&table, &inputs.live)?;
    Ok(Some(table))
}

/// Every other prompt, from the first or the second; all of one.
fn half(tpots: &[f64], first: usize) -> impl Iterator<Item = f64> + '_ {
    tpots.iter().skip(first.min(tpots.len() - 1)).step_by(2).copied()
}

/// Logarithm of how many times as long a token takes with the one as with the other: the mean over
/// half of the prompts, each with both.
fn mean_log(one: &Live, other: &Live, first: usize) -> f64 {
    let ratios: Vec<f64> =
        half(&one.tpots, first).zip(half(&other.tpots, first)).map(|(a, b)| (a / b).ln()).collect();
    ratios.iter().sum::<f64>() / ratios.len() as f64
}

/// The default beside the fastest of the other policies, which is chosen by every other prompt:
/// with the same prompts the least of many noisy times would be less than any policy's.
pub struct BesideBest<'a> {
    pub own: &'a Live,
    pub best: &'a Live,
    /// By how many percent the default takes longer on the prompts that chose nothing.
    pub excess: f64,
}

/// For each model and budget that the default and another policy answered prompts with.
pub fn beside_best(runs: &[Live]) -> Vec<BesideBest<'_>> {
    let is_own = |run: &&Live| run.policy == DEFAULT;
    let beside = |own: &'_ Live| {
        let others = runs.iter().filter(|run| {
            (&run.model, run.budget) == (&own.model, own.budget) && run.policy != DEFAULT
        });
        others.min_by(|a, b| mean_log(a, own, 0).total_cmp(&mean_log(b, own, 0)))
    };
    let pair = |own| {
        let best = beside(own)?;
        Some(BesideBest { own, best, excess: 100.0 * (mean_log(own, best, 1).exp() - 1.0) })
    };
    runs.iter().filter(is_own).filter_map(pair).collect()
}

/// The promise of the default, live: for each model and budget.
fn claims(table: &Table, runs: &[Live]) -> Result<Vec<Claim>> {
    let nothing = |_: &[Change]| Ok(Table::default());
    let none = Runs::new(&nothing);
    let claim = |&BesideBest { own, best, excess }: &BesideBest| {
        let (model, budget) = (&own.model, 100.0 * own.budget);
        let text = format!(
            "the default is at most 3 % slower than the fastest policy ({model}, {budget:.0} %)"
        );
        let figures = format!("{excess:+.1} % beside {}", best.policy);
        let claim = check(text, table, &none, |_| Finding::one(3.0 - excess, figures.clone()))
            .shown(
                "requests differ as much from each other",
                "the difference of two standard errors of the mean over prompts",
                || Ok(noise(own, best, excess)),
            )?
            .shown(
                "its own work takes the time",
                "without the time of its threads, less that of the fastest policy's,",
                || Ok(without_work(own, best, excess)),
            )?;
        Ok(claim.done())
    };
    beside_best(runs).iter().map(claim).collect()
}

/// Two standard errors of the mean ratio, against the difference; both in percent.
fn noise(own: &Live, best: &Live, excess: f64) -> Finding {
    let pairs = half(&own.tpots, 1).zip(half(&best.tpots, 1));
    let logs: Vec<f64> = pairs.map(|(a, b)| (a / b).ln()).collect();
    let mean = logs.iter().sum::<f64>() / logs.len() as f64;
    let squares: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
    let error = (squares / (logs.len() as f64 - 1.0).max(1.0) / logs.len() as f64).sqrt();
    let two = 200.0 * error;
    Finding::one(two - (excess - 3.0), format!("it is {two:.1} %, over {} prompts", logs.len()))
}

fn without_work(own: &Live, best: &Live, excess: f64) -> Finding {
    let more = own.policy_share - best.policy_share * best.median() / own.median();
    let rest = 100.0 * ((1.0 + excess / 100.0) * (1.0 - more) - 1.0);
    Finding::one(3.0 - rest, format!("it is {rest:+.1} %"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_runs_are_read() {
        let line = "demo;predictor=none,eviction=lfu;0.25;1.7,1.4,1.5;0.5;0.25;3;0.01;9";
        let run = Live::parse(line).unwrap();
        assert_eq!((&*run.model, &*run.policy), ("demo", "predictor=none,eviction=lfu"));
        assert_eq!((run.budget, run.mib, run.policy_share), (0.25, 3.0, 0.01));
        assert_eq!((run.median(), run.extremes()), (1.5, [1.4, 1.7]));
        assert_eq!((run.hit_rate, run.ttft_ms), (0.5, 9.0));
        for bad in ["", "x", "x;1;2;3", "x;p;1;2,z;3;4;5;6;7", "x;p;1;2;3;4;5;6;y"] {
            assert!(Live::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_default_is_held_against_the_fastest_of_its_model_and_budget() {
        let runs = [
            "a;on-demand;0.25;2;0;0;0;0;0",
            "a;finemoe;0.25;1.5;0;0;0;0;0",
            "a;predictor=trajectory,eviction=scan-resistant;0.25;1.54;0;0;0;0;0",
            "b;on-demand;0.25;1;0;0;0;0;0",
            "b;predictor=trajectory,eviction=scan-resistant;0.25;1.04;0;0;0;0;0",
        ];
        let runs: Vec<Live> = runs.iter().map(|line| Live::parse(line).unwrap()).collect();
        let claims = claims(&Table::default(), &runs).unwrap();
        assert_eq!(claims.iter().map(Claim::holds).collect::<Vec<_>>(), [true, false]);
        // There is one prompt, and no policy works for a time.
        let text = claims[1].markdown();
        assert!(text.contains("not because requests differ as much"), "{text}");
        assert!(text.contains("explained by none"), "{text}");
    }

    /// A policy that is the fastest by luck on some prompts is held against on others.
    #[test]
    fn the_fastest_is_chosen_by_prompts_that_judge_nothing() {
        let runs = [
            "a;lucky;0.25;1,4,1,4;0;0;0;0;0",
            "a;steady;0.25;2,2,2,2;0;0;0;0;0",
            "a;predictor=trajectory,eviction=scan-resistant;0.25;3,3,6,6;0;0;0;0;0",
        ];
        let runs: Vec<Live> = runs.iter().map(|line| Live::parse(line).unwrap()).collect();
        let found = beside_best(&runs);
        assert_eq!((found.len(), &*found[0].best.policy), (1, "lucky"));
        let expected = 100.0 * ((3.0f64 * 6.0 / 16.0).sqrt() - 1.0);
        assert!((found[0].excess - expected).abs() < 1e-9, "{}", found[0].excess);
    }
}
