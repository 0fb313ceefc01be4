//! Caching and prefetching together (7.3): how many of the experts that decode steps use are in
//! the buffer as a whole when they are asked for.

use super::workload::{self, Pace, TWICE, Workload, cases, policy};
use super::{Inputs, N_REQUESTS, Table, with_claims};
use crate::tables::{
    Alteration, Change, Claim, Compared, Finding, Paper, Row, Runs, Source, check, columns,
};
use moeba::Result;
use moeba::policy::RequestEam;
use moeba::trace::Budget;
use moeba::trace::Ordered;
use moeba::trace::{Belady, Oracle, future};

/// Slots in parts of all experts: the shares that NLLB, Mixtral and Switch had in the paper
/// (52 of 1,536, 39 of 256 and 953 of 1,536), the first as near as two tokens' experts allow, and
/// one between.
const SHARES: [f64; 4] = [0.05, 0.15, 0.3, 0.62];

const STRATEGIES: [(&str, &str); 3] =
    [("LRU", "on-demand"), ("model-tracing", "brainstorm"), ("ours", "moe-infinity")];

/// Table 5: hit rates by slots.
pub fn table_5(inputs: &Inputs) -> Result<Table> {
    with_claims(inputs, rows, claims)
}

fn rows(inputs: &Inputs, changes: &[Change]) -> Result<Table> {
    let mut rows = Vec::new();
    for (source, pace) in cases(inputs) {
        for share in SHARES {
            rows.push(row(&source, pace, share, changes)?);
        }
    }
    let requests = Workload::of(&inputs.fine, N_REQUESTS, changes).describe();
    Ok(Table {
        id: "moe-infinity-table-5",
        title: "MoE-Infinity, Table 5: buffer hit rate of caching and prefetching together".into(),
        setting: format!(
            "{} Slots are of whole experts and include those for what is on its \
             way. Of the experts that decode steps ask for, the part that is there as a whole. \
             Ideal drops what is used last (Belady) and prefetches what the next layer will use.",
            workload::setting(inputs, &requests),
        ),
        columns: columns("routing and slots", STRATEGIES.map(|s| s.0).into_iter().chain(["ideal"])),
        rows,
        paper: Some(paper()),
        ..Table::default()
    })
}

fn row(source: &Source, pace: Pace, share: f64, changes: &[Change]) -> Result<Row> {
    let header = source.trace.header();
    let n_all: usize = header.layers.iter().map(|layer| layer.n_experts).sum();
    let geometry = source.geometry();
    let expert_bytes = geometry.slot_bytes() * geometry.n_granules;
    // One token's experts and one more are the least that a tier takes.
    let n_slots = ((share * n_all as f64).round() as usize).max(header.k + 1);
    let workload = Workload::of(source, N_REQUESTS, changes);
    let options = |policy| {
        let mut options = pace.options(source, policy, share);
        options.budget = Budget::Bytes((n_slots * expert_bytes) as u64);
        options
    };
    let routing = source.routing();
    let future = future(&Ordered { routing: &routing, order: workload.order.clone() });
    let oracle = || Box::new(Oracle::new(future.clone(), 1)) as Box<_>;
    let mut values = Vec::new();
    for (_, name) in STRATEGIES {
        let options = options(name);
        let report = match name {
            "moe-infinity" if changes.contains(&EXACT) => {
                workload.replay(source, &options, |shape| {
                    policy(Box::new(RequestEam::new(shape)), Some(oracle()))
                })
            }
            _ => workload.replay_named(source, &options),
        };
        values.push(report?.decode.counters.hit_rate());
    }
    let ideal = workload.replay(source, &options("on-demand"), |_| {
        let knows_next = !changes.contains(&BLIND);
        policy(Box::new(Belady::new(future.clone())), knows_next.then(oracle))
    })?;
    values.push(ideal.decode.counters.hit_rate());
    let slots = format!("{n_slots} slots ({:.0} %)", 100.0 * n_slots as f64 / n_all as f64);
    Ok(Row::shares(format!("{}, {slots}", pace.name(source)), values))
}

fn paper() -> Paper {
    let rows = [
        ("Switch, 953 slots (62 %)", [0.31, 0.39, 0.52, 0.63]),
        ("NLLB, 52 slots (3 %)", [0.18, 0.25, 0.46, 0.51]),
        ("Arctic, 76 slots (2 %)", [0.09, 0.12, 0.28, 0.32]),
        ("Mixtral, 39 slots (15 %)", [0.02, 0.05, 0.17, 0.21]),
    ];
    Paper {
        columns: columns("model and slots", STRATEGIES.map(|s| s.0).into_iter().chain(["ideal"])),
        rows: rows.map(|(name, values)| Row::shares(name, values)).to_vec(),
        setting: "one of eight A5000; the shares are ours, of 12 MoE layers of 128 experts, 12 of \
                  128, 35 of 128 and 32 of 8."
            .into(),
    }
}

const EXACT: Change = Change::Own("with exact prefetches in the place of those by traces");
const BLIND: Change = Change::Own("with an ideal that does not know the next layer");

/// A column is above another in every row, by more than nothing.
fn above(table: &Table, upper: usize, lower: usize) -> Finding {
    Finding::strict(table.rows.iter().map(|row| {
        let (a, b) = (&row.cells[upper], &row.cells[lower]);
        Compared {
            margin: a.value().zip(b.value()).map_or(f64::NAN, |(a, b)| a - b),
            figures: format!("{a} and {} {b} of {}", table.columns[lower + 1], row.name),
        }
    }))
}

/// No row is further from the ideal than the paper's.
fn near(table: &Table) -> Finding {
    Finding::of(table.rows.iter().map(|row| {
        let (ours, ideal) = (&row.cells[2], &row.cells[3]);
        Compared {
            margin: ours.value().zip(ideal.value()).map_or(f64::NAN, |(a, b)| a - b + 11.0),
            figures: format!("{ours} and ideally {ideal} of {}", row.name),
        }
    }))
}

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let shuffled = Change::Routing(Alteration::Shuffle);
    let (again, few) =
        ("a text soon uses again what it has just used", "there are few past requests");
    let guessed = "what the next layer uses is guessed";
    let counts = "Counts of all requests hit more often than LRU";
    let counts = check(counts, table, runs, |table| above(table, 1, 0))
        .unless(few, &[TWICE])?
        .unless(again, &[shuffled])?;
    let ours = "Request-level traces hit more often than both";
    let ours = check(ours, table, runs, |table| above(table, 2, 0).and(above(table, 2, 1)))
        .unless(few, &[TWICE])?
        .unless(again, &[shuffled])?
        .unless(guessed, &[EXACT])?;
    let ideal = "They stay within 11 points of the ideal (the most in the paper's table)";
    let ideal = check(ideal, table, runs, near)
        .unless(few, &[TWICE])?
        .unless(guessed, &[EXACT])?
        .unless("the ideal knows the next layer", &[BLIND])?
        .unless("a request's counts are no knowledge of the next token", &[EXACT, shuffled])?;
    Ok(vec![counts.done(), ours.done(), ideal.done()])
}
