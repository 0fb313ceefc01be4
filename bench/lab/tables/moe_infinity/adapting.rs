//! How the traces of past requests (EAMC) serve (7.5): how many it takes, and how soon they have
//! adapted to other requests.

use super::workload::{self, Pace, TWICE, Workload, cases, policy};
use super::{Inputs, Table, with_claims};
use crate::tables::{
    Alteration, Axes, Cell, Change, Claim, Compared, Finding, Paper, Row, Runs, Source, check,
    columns,
};
use moeba::Result;
use moeba::policy::{EamcPredictor, InfinityOptions, RequestEam};
use moeba::trace::Report;
use moeba::trace::kinds;

/// Slots in parts of all experts.
const SHARE: f64 = 0.25;
const CAPACITIES: [usize; 5] = [1, 10, 30, 60, 120];

/// Requests before a change, of half a kind, and those after it that are looked at.
const N_BEFORE: usize = 20;
const N_AFTER: usize = 12;
/// Requests whose mean is taken.
const WINDOW: usize = 3;
/// How much above its usual level a latency may be.
const SLACK: f64 = 1.01;

const ONE_MATCH: Change = Change::Own("with the nearest trace alone");

/// Figure 13: time per token by the number of traces kept.
pub fn figure_13(inputs: &Inputs) -> Result<Table> {
    with_claims(inputs, rows_13, claims_13)
}

fn rows_13(inputs: &Inputs, changes: &[Change]) -> Result<Table> {
    let usual = InfinityOptions::default();
    let n_matches = if changes.contains(&ONE_MATCH) { 1 } else { usual.n_matches };
    let mut rows = Vec::new();
    for (source, pace) in cases(inputs) {
        let workload = Workload::of(&source, usize::MAX, changes);
        let tpot = |capacity| {
            let infinity = InfinityOptions { capacity, n_matches, ..usual };
            let options = pace.options(&source, "moe-infinity", SHARE);
            let report = workload.replay(&source, &options, |shape| {
                let predictor = EamcPredictor::new(shape, infinity);
                policy(Box::new(RequestEam::new(shape)), Some(Box::new(predictor)))
            });
            Ok(report?.tpot.mean / 1e6)
        };
        let values = CAPACITIES.into_iter().map(tpot).collect::<Result<Vec<_>>>()?;
        rows.push(Row::numbers(format!("{}, ms", pace.name(&source)), 3, values));
    }
    Ok(Table {
        id: "moe-infinity-fig-13",
        title: "MoE-Infinity, Figure 13: time per output token by EAMC capacity".into(),
        setting: format!(
            "{} Room for {:.0} % of all experts. Milliseconds a decode step.",
            workload::setting(inputs, &Workload::of(&inputs.fine, usize::MAX, changes).describe()),
            100.0 * SHARE
        ),
        columns: columns("routing", CAPACITIES),
        rows,
        paper: Some(Paper {
            columns: columns("finding", ["as stated"]),
            rows: vec![Row::new(
                "all models",
                [Cell::Text("lowest average latency from 1 to 120 at 120".into())],
            )],
            setting: "a plot; the text says that increasing the capacity from 1 to 120 lets all \
                      models reach their lowest latency, with 3 % of the requests kept."
                .into(),
        }),
        plot: Some(Axes { x: "EAMs kept".into(), y: "ms a token".into() }),
        ..Table::default()
    })
}

/// The time with one number of traces is within a factor of that with another, or of the least.
fn within(table: &Table, at: usize, factor: f64, other: Option<usize>) -> Finding {
    Finding::of(table.rows.iter().map(|row| {
        let values = table.values(&row.name);
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let other = other.map_or(least, |other| values[other]);
        let figures = format!("{:.3} ms and {other:.3} of {}", values[at], row.name);
        Compared { margin: other * factor - values[at], figures }
    }))
}

fn claims_13(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let (few, noise) = ("there are few past requests", "several traces are added up");
    let text = "120 traces give the lowest latency, but for a hundredth, which is ours";
    let lowest = check(text, table, runs, |table| within(table, 4, 1.01, None))
        .unless(noise, &[ONE_MATCH])?
        .unless(few, &[TWICE])?;
    let text = "120 traces are better than one";
    let better = check(text, table, runs, |table| within(table, 4, 1.0, Some(0)))
        .unless(few, &[TWICE])?
        .unless(noise, &[ONE_MATCH])?;
    let text = "A small part of the requests is enough: with 10 traces latency is within a \
                hundredth of its lowest, which is ours";
    let small = check(text, table, runs, |table| within(table, 1, 1.01, None))
        .unless(noise, &[ONE_MATCH])?
        .unless(few, &[TWICE])?;
    Ok(vec![lowest.done(), better.done(), small.done()])
}

/// Half of a kind: requests to learn from, and others to be served then.
struct Half<'a> {
    kind: &'a str,
    before: &'a [usize],
    after: &'a [usize],
}

fn halves<'a>(kinds: &'a [(&'a str, Vec<usize>)]) -> Vec<Half<'a>> {
    let halves = kinds.iter().flat_map(|(kind, requests)| {
        let (first, second) = requests.split_at(requests.len() / 2);
        [first, second].map(|half| {
            let n_after = N_AFTER.min(half.len() / 2);
            let (before, after) = half.split_at(half.len() - n_after);
            Half { kind, before: &before[..before.len().min(N_BEFORE)], after }
        })
    });
    halves.collect()
}

/// Latencies of the requests after those of `before`: mean time of a decode step, ns.
fn latencies(source: &Source, pace: Pace, before: &[usize], after: &[usize]) -> Result<Vec<f64>> {
    let order = [before, after].concat();
    let workload = Workload { order, n_history: before.len() };
    Ok(by_request(&workload.replay_named(source, &pace.options(source, "moe-infinity", SHARE))?))
}

fn by_request(report: &Report) -> Vec<f64> {
    let requests = report.timeline.chunk_by(|a, b| a.request == b.request);
    let mean = |request: &[moeba::trace::Iteration]| {
        let steps = request.iter().filter(|iteration| !iteration.is_prompt);
        let sum: u64 = steps.clone().map(|iteration| iteration.timing.wall_ns).sum();
        sum as f64 / steps.count() as f64
    };
    requests.map(mean).collect()
}

/// Requests until latencies are as usual: the first at which a window's mean is within the slack
/// of that of the same requests without a change. `N_AFTER` if there is none.
pub fn n_to_recover(after_change: &[f64], usual: &[f64], slack: f64) -> usize {
    let window = WINDOW.min(usual.len()).max(1);
    let windows = after_change.windows(window).zip(usual.windows(window));
    let is_usual = |(now, usual): (&[f64], &[f64])| {
        now.iter().sum::<f64>() <= slack * usual.iter().sum::<f64>()
    };
    windows.into_iter().position(is_usual).unwrap_or(N_AFTER)
}

/// A change of the workload.
struct Shift {
    /// Half of the same kind.
    within: bool,
    to: String,
    n_to_recover: f64,
    /// How much longer than usual the first window takes, in parts of that.
    slower: f64,
}

fn shifts(source: &Source, pace: Pace, slack: f64) -> Result<Vec<Shift>> {
    let kinds = kinds(source.trace);
    let halves = halves(&kinds);
    let mut shifts = Vec::new();
    for (to, half) in halves.iter().enumerate() {
        let usual = latencies(source, pace, half.before, half.after)?;
        for (_, other) in halves.iter().enumerate().filter(|(from, _)| *from != to) {
            let changed = latencies(source, pace, other.before, half.after)?;
            let first = |latencies: &[f64]| latencies.iter().take(WINDOW).sum::<f64>();
            shifts.push(Shift {
                within: other.kind == half.kind,
                to: half.kind.to_string(),
                n_to_recover: n_to_recover(&changed, &usual, slack) as f64,
                slower: first(&changed) / first(&usual) - 1.0,
            });
        }
    }
    Ok(shifts)
}

const WITHIN: &str = "within a kind";

/// Table 7: requests until latency has recovered from a change of the workload.
pub fn table_7(inputs: &Inputs) -> Result<Table> {
    with_claims(inputs, rows_7, claims_7)
}

fn rows_7(inputs: &Inputs, changes: &[Change]) -> Result<Table> {
    let slack = if changes.contains(&TOLERANT) { 1.05 } else { SLACK };
    let mut rows = Vec::new();
    for (source, pace) in cases(inputs) {
        let shifts = shifts(&source, pace, slack)?;
        let name = pace.name(&source);
        rows.push(row(format!("{name}: {WITHIN}"), shifts.iter().filter(|shift| shift.within)));
        for (kind, _) in kinds(source.trace) {
            let between = shifts.iter().filter(|shift| !shift.within && shift.to == kind);
            rows.push(row(format!("{name}: others ↦ {kind}"), between));
        }
    }
    let requests = format!(
        "{N_BEFORE} requests, then {N_AFTER} of another kind, or of the other half of the same"
    );
    Ok(Table {
        id: "moe-infinity-table-7",
        title: "MoE-Infinity, Table 7: requests to recover from workload changes".into(),
        setting: format!(
            "{} Room for {:.0} % of all experts. Latency is the mean time of a request's decode \
             steps; it has recovered at the first request from which {WINDOW} in a row take \
             together at most {:.0} % more than the same requests do after {N_BEFORE} of their \
             own kind and half. 0: the change is not felt; {N_AFTER}: not recovered. Slower at \
             first: how much more the first {WINDOW} requests take, on average over the changes.",
            workload::setting(inputs, &requests),
            100.0 * SHARE,
            100.0 * (slack - 1.0)
        ),
        columns: columns("workload", ["minimum", "mean", "maximum", "slower at first"]),
        rows,
        paper: Some(paper()),
        ..Table::default()
    })
}

/// Minimum, mean and maximum, and the mean of how much slower.
fn row<'a>(name: String, shifts: impl Iterator<Item = &'a Shift>) -> Row {
    let (n, slower): (Vec<f64>, Vec<f64>) =
        shifts.map(|shift| (shift.n_to_recover, shift.slower)).unzip();
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let min = n.iter().copied().fold(N_AFTER as f64, f64::min);
    let max = n.iter().copied().fold(0.0, f64::max);
    let counts = [(min, 0), (mean(&n), 1), (max, 0)];
    let cells = counts.map(|(value, decimals)| Cell::Number(value, decimals));
    Row::new(name, cells.into_iter().chain([Cell::Share(mean(&slower))]))
}

fn paper() -> Paper {
    let rows = [
        ("MMLU tasks", ["0-14-43", "0-9-49", "28-43-45"]),
        ("BIGBench tasks", ["1-15-49", "0-11-49", "0-29-42"]),
        ("MMLU ↦ BIGBench", ["0-6-17", "0-27-42", "2-28-41"]),
        ("BIGBench ↦ MMLU", ["3-11-24", "0-35-46", "5-27-45"]),
    ];
    let row = |(name, cells): (&str, [&str; 3])| {
        Row::new(name, cells.map(|cell| Cell::Text(cell.into())))
    };
    Paper {
        columns: columns("workload", ["NLLB", "Mixtral", "Arctic"]),
        rows: rows.map(row).to_vec(),
        setting: "minimum, mean and maximum; how far latency may be from its best is not said."
            .into(),
    }
}

const TOLERANT: Change = Change::Own("with a latency that has recovered at 5 % more than usual");

/// Each row's count is below a bound.
fn bounded(table: &Table, column: usize, bound: f64) -> Finding {
    Finding::of(table.rows.iter().map(|row| {
        let n = row.cells[column].value().unwrap_or(f64::NAN);
        Compared { margin: bound - n, figures: format!("{n:.1} requests of {}", row.name) }
    }))
}

/// Most rows have a minimum of 0.
fn mostly_unfelt(table: &Table) -> Finding {
    let felt = table.rows.iter().filter(|row| row.cells[0].value() > Some(0.0)).count();
    let n = table.rows.len();
    let figures = format!("of {n} workloads {felt} have only changes that are felt");
    Finding::one(n as f64 / 2.0 - felt as f64 - 0.5, figures)
}

fn no_slower_between(table: &Table) -> Finding {
    let mean = |within: bool| {
        let rows = table.rows.iter().filter(|row| row.name.ends_with(WITHIN) == within);
        let means: Vec<f64> = rows.filter_map(|row| row.cells[1].value()).collect();
        means.iter().sum::<f64>() / means.len() as f64
    };
    let (within, between) = (mean(true), mean(false));
    Finding::one(within - between, format!("{between:.1} requests, {within:.1} within a kind"))
}

fn claims_7(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let alike = [Change::Routing(Alteration::Shuffle)];
    let strict = "a hundredth, our reading of \"recovered\", is little beside what latencies vary";
    let other = "kinds of text use other experts";
    let text = "Latency recovers from every change";
    let recovers = check(text, table, runs, |table| bounded(table, 2, N_AFTER as f64 - 1.0))
        .unless(strict, &[TOLERANT])?
        .unless(other, &alike)?
        .unless("both hold", &[TOLERANT, alike[0]])?;
    let text = "Most workloads have changes that are not felt at all";
    let unfelt = check(text, table, runs, mostly_unfelt)
        .unless(strict, &[TOLERANT])?
        .unless(other, &alike)?
        .unless("both hold", &[TOLERANT, alike[0]])?;
    let text = "Recovery between kinds is on average no slower than within one (the paper: 30 \
                requests between datasets, 50 within)";
    let between = check(text, table, runs, no_slower_between)
        .unless(strict, &[TOLERANT])?
        .unless(other, &alike)?
        .unless("both hold", &[TOLERANT, alike[0]])?;
    Ok(vec![recovers.done(), unfelt.done(), between.done()])
}
