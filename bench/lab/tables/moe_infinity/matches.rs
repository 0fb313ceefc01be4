//! How many matched traces are added up to a prediction (5.1). The paper says "several", so the
//! number is chosen here: on one half of the requests, and judged on the other.

use super::prefetching::{MUCH_ROOM, SHARES};
use super::workload::{Pace, TWICE, Workload};
use super::{DEVICE, Inputs, Table, with_claims};
use crate::tables::chosen::{self, HALVES};
use crate::tables::{Change, Claim, Row, Runs, columns};
use moeba::Result;
use moeba::policy::{EamcPredictor, InfinityOptions};

const MATCHES: [usize; 7] = [1, 2, 3, 6, 12, 24, 48];

pub fn matches(inputs: &Inputs) -> Result<Table> {
    with_claims(inputs, rows, claims)
}

fn rows(inputs: &Inputs, changes: &[Change]) -> Result<Table> {
    let mut rows = Vec::new();
    let share = SHARES[usize::from(changes.contains(&MUCH_ROOM))];
    for source in inputs.sources() {
        for half in HALVES {
            let name = half.name();
            let workload = Workload::ordered(half.of(source.trace), changes);
            let options = Pace::Load.options(&source, "on-demand", share);
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

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let default = InfinityOptions::default().n_matches.to_string();
    let slow = Change::Compute(8.0);
    let causes: [(_, &[Change]); 4] = [
        ("there are few past requests", &[TWICE]),
        ("what is brought for far layers finds little room", &[MUCH_ROOM]),
        ("computing takes no longer than loading", &[slow]),
        ("all of these hold", &[TWICE, MUCH_ROOM, slow]),
    ];
    chosen::claims(table, runs, &default, &causes)
}
