//! How the traces of past requests (EAMC) serve (7.5): how many it takes, and how soon they have
//! adapted to other requests.

use super::prefetching::{capitalised, name};
use super::workload::{Workload, kinds, policy};
use super::{DEVICE, Inputs, Table};
use crate::Result;
use crate::policy::{EamcPredictor, InfinityOptions, RequestEam};
use crate::replay::Report;
use crate::replay::tables::{Axes, Cell, Claim, Paper, Row, Source, columns};

/// Slots in parts of all experts.
const SHARE: f64 = 0.25;
const CAPACITIES: [usize; 5] = [1, 10, 30, 60, 120];

/// Requests before a change, of half a kind, and those after it that are looked at.
const N_BEFORE: usize = 20;
const N_AFTER: usize = 12;
/// Requests whose mean is taken.
const WINDOW: usize = 3;
/// How much above its usual level a latency may be.
const SLACK: f64 = 1.05;

/// Figure 13: time per token by the number of traces kept.
pub fn figure_13(inputs: &Inputs) -> Result<Table> {
    let mut rows = Vec::new();
    for source in inputs.sources() {
        let workload = Workload::mixed(source.trace, 1);
        let tpot = |capacity| {
            let infinity = InfinityOptions { capacity, ..InfinityOptions::default() };
            let options = source.options(DEVICE, "moe-infinity", SHARE);
            let report = workload.replay(&source, &options, |shape| {
                let predictor = EamcPredictor::new(shape, infinity);
                policy(Box::new(RequestEam::new(shape)), Some(Box::new(predictor)))
            });
            Ok(report?.tpot.mean / 1e6)
        };
        let values = CAPACITIES.into_iter().map(tpot).collect::<Result<Vec<_>>>()?;
        rows.push(Row::numbers(format!("{}, ms", name(&source)), 3, values));
    }
    let routings: Vec<String> = inputs.sources().map(|source| source.describe(DEVICE)).collect();
    let mut table = Table {
        id: "moe-infinity-fig-13",
        title: "MoE-Infinity, Figure 13: time per output token by EAMC capacity".into(),
        setting: format!(
            "{}. {}. Batch 1, room for {:.0} % of all experts. Milliseconds a decode step.",
            capitalised(&routings.join("; ")),
            capitalised(&Workload::mixed(inputs.fine.trace, 1).describe()),
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
    };
    let everywhere = |holds: &dyn Fn(&[f64]) -> bool| {
        table.rows.iter().all(|row| holds(&table.values(&row.name)))
    };
    let lowest = |v: &[f64]| v.iter().copied().fold(f64::INFINITY, f64::min);
    table.claims = vec![
        Claim::new(
            "120 traces give the lowest latency, but for a hundredth",
            everywhere(&|v| v[4] <= 1.01 * lowest(v)),
            "",
        ),
        Claim::new("120 traces are better than one", everywhere(&|v| v[4] < v[0]), ""),
        Claim::new(
            "The same capacity serves all models: every routing is best within a hundredth at \
             120 or below",
            everywhere(&|v| v[..4].iter().any(|x| *x <= 1.01 * v[4])),
            "",
        ),
    ];
    Ok(table)
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
fn latencies(source: &Source, before: &[usize], after: &[usize]) -> Result<Vec<f64>> {
    let order = [before, after].concat();
    let workload = Workload { order, n_history: before.len() };
    Ok(by_request(&workload.replay_named(source, "moe-infinity", SHARE)?))
}

fn by_request(report: &Report) -> Vec<f64> {
    let requests = report.timeline.chunk_by(|a, b| a.request == b.request);
    let mean = |request: &[crate::replay::Iteration]| {
        let steps = request.iter().filter(|iteration| !iteration.is_prompt);
        let sum: u64 = steps.clone().map(|iteration| iteration.timing.wall_ns).sum();
        sum as f64 / steps.count() as f64
    };
    requests.map(mean).collect()
}

/// Requests until latencies are as usual: the first at which a window's mean is within the slack
/// of that of the same requests without a change. All of them if there is none.
pub(super) fn n_to_recover(after_change: &[f64], usual: &[f64]) -> usize {
    let windows = after_change.windows(WINDOW).zip(usual.windows(WINDOW));
    let is_usual = |(now, usual): (&[f64], &[f64])| {
        now.iter().sum::<f64>() <= SLACK * usual.iter().sum::<f64>()
    };
    windows.into_iter().position(is_usual).unwrap_or(after_change.len())
}

/// A source's shifts: the kind before, the kind after, requests to recover, and how much slower
/// the first window was than usual.
fn shifts(source: &Source) -> Result<Vec<(String, String, usize)>> {
    let kinds = kinds(source.trace);
    let halves = halves(&kinds);
    let mut shifts = Vec::new();
    for (to, half) in halves.iter().enumerate() {
        let usual = latencies(source, half.before, half.after)?;
        for (_, other) in halves.iter().enumerate().filter(|(from, _)| *from != to) {
            let changed = latencies(source, other.before, half.after)?;
            let n = n_to_recover(&changed, &usual);
            shifts.push((other.kind.to_string(), half.kind.to_string(), n));
        }
    }
    Ok(shifts)
}

/// Table 7: requests until latency has recovered from a change of the workload.
pub fn table_7(inputs: &Inputs) -> Result<Table> {
    let mut rows: Vec<Row> = Vec::new();
    let mut names = Vec::new();
    for (at, source) in inputs.sources().enumerate() {
        names.extend(["minimum", "mean", "maximum"].map(|n| format!("{n}, {}", name(&source))));
        let shifts = shifts(&source)?;
        for (from, to, _) in &shifts {
            let title = if from == to { format!("other {to}") } else { format!("{from} ↦ {to}") };
            if !rows.iter().any(|row| row.name == title) {
                rows.push(Row::new(title.as_str(), vec![Cell::Missing; 3 * at]));
            }
            let row = rows.iter_mut().find(|row| row.name == title).expect("just put there");
            if row.cells.len() == 3 * at {
                let of_row = shifts.iter().filter(|s| (&s.0, &s.1) == (from, to));
                row.cells.extend(extent(of_row.map(|s| s.2 as f64).collect()));
            }
        }
    }
    let within = |row: &Row| row.name.starts_with("other ");
    rows.sort_by_key(|row| !within(row));
    let routings: Vec<String> = inputs.sources().map(|source| source.describe(DEVICE)).collect();
    let mut table = Table {
        id: "moe-infinity-table-7",
        title: "MoE-Infinity, Table 7: requests to recover from workload changes".into(),
        setting: format!(
            "{}. Batch 1, room for {:.0} % of all experts. {N_BEFORE} requests, then {N_AFTER} of \
             another kind, or of the other half of the same. Latency is the mean time of a \
             request's decode steps; it has recovered at the first request from which {WINDOW} in \
             a row take together at most {:.0} % more than the same requests do after \
             {N_BEFORE} of their own kind and half. 0: the change is not felt; {N_AFTER}: not \
             recovered.",
            capitalised(&routings.join("; ")),
            100.0 * SHARE,
            100.0 * (SLACK - 1.0)
        ),
        columns: columns("workload", names),
        rows,
        paper: Some(paper()),
        ..Table::default()
    };
    table.claims = claims_7(&table);
    Ok(table)
}

/// Minimum, mean and maximum.
fn extent(values: Vec<f64>) -> [Cell; 3] {
    let fold = |f: fn(f64, f64) -> f64, first| values.iter().copied().fold(first, f);
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let (min, max) = (fold(f64::min, f64::INFINITY), fold(f64::max, 0.0));
    [Cell::Number(min, 0), Cell::Number(mean, 1), Cell::Number(max, 0)]
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

fn claims_7(table: &Table) -> Vec<Claim> {
    let columns = |rows: &dyn Fn(&Row) -> bool, column: usize| {
        let rows = table.rows.iter().filter(|row| rows(row));
        let values = rows.flat_map(|row| row.cells.iter().skip(column).step_by(3));
        values.filter_map(Cell::value).collect::<Vec<f64>>()
    };
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
    let (within, between) =
        (|row: &Row| row.name.starts_with("other "), |row: &Row| row.name.contains('↦'));
    let maxima = columns(&|_| true, 2);
    let minima = columns(&|_| true, 0);
    vec![
        Claim::new(
            "Latency recovers from every change",
            maxima.iter().all(|n| *n < N_AFTER as f64),
            "",
        ),
        Claim::new(
            "Some changes of most workloads are not felt at all: the minimum is 0",
            2 * minima.iter().filter(|n| **n == 0.0).count() > minima.len(),
            "",
        ),
        Claim::new(
            "Recovery between kinds is quicker than within one, as the text says in the mean",
            mean(columns(&between, 1)) < mean(columns(&within, 1)),
            "",
        ),
    ]
}
