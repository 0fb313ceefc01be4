//! Figure 17: where the time of an iteration goes, and what searching adds to it.
//!
//! Policies read no clock, so a replay cannot measure a search. It is given how long one takes and
//! says what becomes of that beside the layer loop. Live runs measure what the whole policy does.

use super::split::{N_WARM_UP, Split, profile};
use super::{DEVICE, learned, stated};
use crate::tables::side_by_side_live::Live;
use crate::tables::{
    Cell, Change, Claim, Compared, Finding, Inputs, Row, Runs, Source, Table, check, columns,
};
use moeba::Result;
use moeba::policy::FineMoeOptions;
use moeba::trace::Ordered;
use moeba::trace::{Report, SimOptions, simulate};

/// ns of a search.
const SEARCHES: [u64; 4] = [0, 50_000, 500_000, 5_000_000];
/// Share of all experts' memory.
const SHARE: f64 = 0.5;
const N_NEW: usize = 15;

/// Columns, of which the first four add up to the fifth.
const COLUMNS: [&str; 8] = [
    "attention",
    "experts",
    "waiting",
    "head",
    "iteration",
    "longer by",
    "searches, µs",
    "of an iteration",
];
const ITERATION: usize = 4;
const LONGER: usize = 5;
const SEARCHES_SHARE: usize = 7;

pub fn figure_17(inputs: &Inputs) -> Result<Vec<Table>> {
    let make = |changes: &[Change]| inputs.with(changes, rows);
    let mut table = make(&[])?;
    table.claims = claims(&table, inputs, &Runs::new(&make))?;
    Ok(vec![table])
}

fn rows(inputs: &Inputs) -> Result<Table> {
    let (mut rows, mut settings) = (Vec::new(), Vec::new());
    for source in inputs.sources() {
        let split = Split::of(source.trace).at_most(usize::MAX, N_WARM_UP + N_NEW);
        settings.push(format!("{}; {}", source.describe(DEVICE), learned(&split)));
        rows.extend(of_source(&source, &split)?);
    }
    rows.extend(live(inputs).map(live_row));
    Ok(Table {
        id: "finemoe-fig-17",
        title: "FineMoE, Figure 17: latency breakdown of one iteration".into(),
        setting: format!(
            "{}. {:.0} % of all experts have room. \
             Mean of decode steps, ms, by how long one search takes; \"attention\" has routers and \
             shared experts in it. \"Searches\": all of a step, one after another, if they were \
             waited for. These times are modelled.{}",
            settings.join(". Also "),
            100.0 * SHARE,
            if live(inputs).next().is_some() { LIVE } else { "" },
        ),
        columns: columns("experts as, search", COLUMNS),
        rows,
        paper: Some(stated(
            "a plot, of which the text states",
            &[
                ("asynchronous tasks", "prefetching, searching and updating add nothing"),
                ("other operations", "less than 50 ms, 1 % of the iteration"),
                ("Qwen1.5-MoE", "a shorter iteration than Mixtral-8×7B's"),
            ],
        )),
        ..Table::default()
    })
}

const LIVE: &str = " Live rows are measured, a model's own experts from disk, by the part \
                    of them that has room: \"searches\" is all that the policy does for a token, \
                    the store's updates included, on whatever thread.";

fn live<'a>(inputs: &'a Inputs) -> impl Iterator<Item = &'a Live> {
    inputs.live.iter().filter(|run| run.policy == "finemoe")
}

/// A run does not tell attention, experts and head apart.
fn live_row(run: &Live) -> Row {
    let Live { ref model, budget, stall_ms, policy_share, .. } = *run;
    let tpot_ms = run.median();
    let cells = [
        Cell::Missing,
        Cell::Missing,
        Cell::Number(stall_ms, 2),
        Cell::Missing,
        Cell::Number(tpot_ms, 2),
        Cell::Missing,
        Cell::Number(1e3 * tpot_ms * policy_share, 0),
        Cell::Share(policy_share),
    ];
    Row::new(format!("live, {model}, {:.0} %", 100.0 * budget), cells)
}

fn name(source: &Source, search_ns: u64) -> String {
    format!("{}, {} µs", source.stands_for, search_ns / 1000)
}

fn of_source(source: &Source, split: &Split) -> Result<Vec<Row>> {
    let routing = source.routing();
    let profile = profile(&routing, &split.known);
    let new = Ordered { routing: &routing, order: split.new.clone() };
    let distance = FineMoeOptions::default().distance;
    // One by the embedding, and one at each layer that has another at the distance after it.
    let n_searches = source.trace.header().moe_layers().count().saturating_sub(distance) + 1;
    let mut rows = Vec::new();
    let mut without = f64::NAN;
    for search_ns in SEARCHES {
        let mut options = SimOptions {
            profile: profile.clone(),
            n_warm_up: split.n_warm_up(),
            ..source.options(DEVICE, "finemoe", SHARE)
        };
        options.costs.search_ns = search_ns;
        let times = breakdown(&simulate(&new, &options)?);
        if search_ns == 0 {
            without = times[ITERATION];
        }
        let mut row = Row::numbers(name(source, search_ns), 2, times);
        row.cells.push(Cell::Share(times[ITERATION] / without - 1.0));
        let searches_ns = (n_searches as u64 * search_ns) as f64;
        row.cells.push(Cell::Number(searches_ns / 1e3, 0));
        row.cells.push(Cell::Share(searches_ns / 1e6 / times[ITERATION]));
        rows.push(row);
    }
    Ok(rows)
}

/// ms of a decode step.
fn breakdown(report: &Report) -> [f64; 5] {
    let decode = &report.decode;
    let timing = decode.timing;
    let attention_ns = decode.dense_ns() - timing.head_ns;
    let parts = [attention_ns, timing.experts_ns, timing.stall_ns, timing.head_ns, timing.wall_ns];
    parts.map(|ns| ns as f64 / decode.n_tokens as f64 / 1e6)
}

/// Searches change the iteration by less than 1 %.
fn hidden(table: &Table, search_ns: u64) -> Finding {
    let suffix = format!(", {} µs", search_ns / 1000);
    let rows = table.rows.iter().filter(|row| row.name.ends_with(&suffix));
    Finding::strict(rows.map(|row| Compared {
        margin: 1.0 - row.cells[LONGER].value().map_or(f64::NAN, f64::abs),
        figures: format!("{} of {}", row.cells[LONGER], row.name),
    }))
}

/// Live, what the policy does is a small part.
fn live_share(table: &Table) -> Finding {
    let rows = table.rows.iter().filter(|row| row.name.starts_with("live"));
    Finding::of(rows.map(|row| Compared {
        margin: 1.0 - row.cells[SEARCHES_SHARE].value().unwrap_or(f64::NAN),
        figures: format!("{} of {}", row.cells[SEARCHES_SHARE], row.name),
    }))
}

/// The same time as a part of the modelled iteration, which is a published model's.
fn live_beside_modelled(table: &Table, iteration_ms: f64) -> Finding {
    let rows = table.rows.iter().filter(|row| row.name.starts_with("live"));
    Finding::of(rows.map(|row| {
        let us = row.cells[SEARCHES_SHARE - 1].value().unwrap_or(f64::NAN);
        let percent = us / 10.0 / iteration_ms;
        Compared {
            margin: 1.0 - percent,
            figures: format!("{us:.0} µs are {percent:.1} % of {iteration_ms:.1} ms"),
        }
    }))
}

const SHORT: &str = "a layer computes for less time than a search takes";

fn claims(table: &Table, inputs: &Inputs, runs: &Runs) -> Result<Vec<Claim>> {
    let text = "Searches of 50 µs change the iteration by less than 1 %";
    let short = check(text, table, runs, |table| hidden(table, SEARCHES[1]))
        .unless(SHORT, &[Change::Compute(8.0)])?;
    let long = "So do searches ten times as long";
    let long = check(long, table, runs, |table| hidden(table, SEARCHES[2]))
        .unless(SHORT, &[Change::Compute(8.0)])?
        .unless(
            "loads that come late are waited for",
            &[Change::Compute(8.0), Change::Link(8.0)],
        )?;
    let mut claims = vec![short.done(), long.done()];
    let iteration = |source: &Source, table: &Table| table.values(&name(source, 0))[ITERATION];
    if let Some(coarse) = inputs.coarse {
        let text = "The model of few parameters has the shorter iteration";
        let shorter = check(text, table, runs, |table| {
            let [fine, coarse] = [inputs.fine, coarse].map(|source| iteration(&source, table));
            Finding::one(coarse - fine, format!("{fine:.1} ms and {coarse:.1} ms"))
        });
        claims.push(shorter.unless("loads are waited for", &[Change::Link(16.0)])?.done());
    }
    if live(inputs).next().is_some() {
        let text = "Live, what the policy does is at most 1 % of an iteration (1 % is the paper's)";
        let live = check(text, table, runs, live_share).shown(
            "the demo model's iterations are short",
            "in the time of the first row above",
            || Ok(live_beside_modelled(table, iteration(&inputs.fine, table))),
        );
        claims.push(live?.done());
    }
    Ok(claims)
}
