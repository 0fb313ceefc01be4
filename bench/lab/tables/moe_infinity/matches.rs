//! How many matched traces are added up to a prediction (5.1). The paper says "several", so the
//! number is chosen here: on one half of the requests, and judged on the other.

use super::workload::{Pace, TWICE, Workload};
use super::{DEVICE, Inputs, Table, with_claims};
use crate::tables::{Change, Claim, Compared, Finding, Row, Runs, Source, check, columns};
use moeba::Result;
use moeba::policy::{EamcPredictor, InfinityOptions};
use moeba::trace::by_turns;

const MATCHES: [usize; 7] = [1, 2, 3, 6, 12, 24, 48];
/// Slots in parts of all experts.
const SHARE: f64 = 0.25;

const CHOSEN_BY: &str = "to choose by";
const JUDGED_BY: &str = "to judge by";

pub fn matches(inputs: &Inputs) -> Result<Table> {
    with_claims(inputs, rows, claims)
}

/// Every other request of each kind, from the first or the second.
fn half(source: &Source, first: usize) -> Vec<usize> {
    let n_kinds = moeba::trace::kinds(source.trace).len().max(1);
    let all = by_turns(source.trace, 1);
    let turns = all.chunks(n_kinds).skip(first).step_by(2);
    turns.flatten().copied().collect()
}

fn rows(inputs: &Inputs, changes: &[Change]) -> Result<Table> {
    let mut rows = Vec::new();
    for source in inputs.sources() {
        for (first, name) in [CHOSEN_BY, JUDGED_BY].into_iter().enumerate() {
            let workload = Workload::ordered(half(&source, first), changes);
            let options = Pace::Load.options(&source, "on-demand", SHARE);
            let waits = |n_matches| {
                let infinity = InfinityOptions { n_matches, ..InfinityOptions::default() };
                let report = workload.replay_released(&source, &options, |shape| {
                    Some(Box::new(EamcPredictor::new(shape, infinity)))
                });
                Ok(report?.decode.stall_ns_per_token() / 1e6)
            };
            let waits = MATCHES.into_iter().map(waits).collect::<Result<Vec<f64>>>()?;
            rows.push(Row::numbers(format!("{name}, {}", source.stands_for), 2, waits));
        }
    }
    let routings: Vec<String> = inputs.sources().map(|source| source.describe(DEVICE)).collect();
    Ok(Table {
        id: "moe-infinity-matches",
        title: "MoE-Infinity, 5.1: how many matched traces are added up".into(),
        setting: format!(
            "{}. Time waited for experts a token, ms, as in Table 4 with all of the design, by the \
             number of traces. Every other request of each kind is to choose by, the others are \
             to judge by; half of either is history.",
            routings.join("; ").replacen("routing", "Routing", 1)
        ),
        columns: columns("requests", MATCHES),
        rows,
        ..Table::default()
    })
}

/// The default's time against the least, in the rows of such a name.
fn near_the_least(table: &Table, part: &str) -> Finding {
    let n_matches = InfinityOptions::default().n_matches;
    let at = MATCHES.iter().position(|n| *n == n_matches).expect("the default is among them");
    let rows = table.rows.iter().filter(|row| row.name.starts_with(part));
    Finding::of(rows.map(|row| {
        let values = table.values(&row.name);
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let figures =
            format!("{:.2} ms with {n_matches}, {least:.2} at best, {}", values[at], row.name);
        Compared { margin: 1.02 * least - values[at], figures }
    }))
}

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let few = "there are few past requests";
    let texts = [
        (
            CHOSEN_BY,
            "The default is within 2 % of the best on the requests that it was chosen by (ours)",
        ),
        (JUDGED_BY, "So it is on those that nothing was chosen by (ours)"),
    ];
    let claim = |(part, text): (&'static str, &str)| {
        let near = check(text, table, runs, move |table| near_the_least(table, part));
        Ok(near.unless(few, &[TWICE])?.done())
    };
    texts.into_iter().map(claim).collect()
}
