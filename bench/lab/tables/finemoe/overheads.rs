//! Figure 17: where the time of an iteration goes, and what searching adds to it.
//!
//! Policies read no clock, so a replay cannot measure a search. It is given how long one takes and
//! says what becomes of that beside the layer loop. Live runs measure what the whole policy does.

use super::split::{Split, profile};
use super::{DEVICE, N_WARM_UP, learned, stated};
use crate::tables::side_by_side::Live;
use crate::tables::{Cell, Claim, Inputs, Row, Source, Table, columns};
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
    let (mut rows, mut settings) = (Vec::new(), Vec::new());
    for source in inputs.sources() {
        let split = Split::of(source.trace).at_most(usize::MAX, N_WARM_UP + N_NEW);
        settings.push(format!("{}; {}", source.describe(DEVICE), learned(&split)));
        rows.extend(of_source(&source, &split)?);
    }
    rows.extend(live(inputs).map(live_row));
    let mut table = Table {
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
    };
    table.claims = claims(&table, inputs);
    Ok(vec![table])
}

const LIVE: &str = " Live rows are measured, a model's own experts from disk, by the part \
                    of them that has room: \"searches\" is all that the policy does for a token, \
                    the store's updates included, on whatever thread.";

fn live<'a>(inputs: &'a Inputs) -> impl Iterator<Item = &'a Live> {
    inputs.live.iter().filter(|run| run.policy == "finemoe")
}

/// A run does not tell attention, experts and head apart.
fn live_row(run: &Live) -> Row {
    let Live { ref model, budget, tpot_ms, stall_ms, policy_share, .. } = *run;
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
            n_warm_up: N_WARM_UP,
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

fn claims(table: &Table, inputs: &Inputs) -> Vec<Claim> {
    let value =
        |source: &Source, search_ns, column: usize| table.values(&name(source, search_ns))[column];
    let is_hidden =
        |search_ns| inputs.sources().all(|source| value(&source, search_ns, LONGER).abs() < 1.0);
    let mut claims = vec![
        Claim::new(
            "Searches of 50 µs change the iteration by less than 1 %",
            is_hidden(SEARCHES[1]),
            "at this size of experts a layer takes hardly longer than a search",
        ),
        Claim::new(
            "So do searches ten times as long",
            is_hidden(SEARCHES[2]),
            "what is predicted late is prefetched late: half a millisecond is longer \
             than a layer of small experts computes, so some predictions come too late for a load",
        ),
    ];
    if let Some(coarse) = inputs.coarse {
        let [fine, coarse] = [inputs.fine, coarse].map(|source| value(&source, 0, ITERATION));
        claims.push(Claim::new(
            "The model of few parameters has the shorter iteration",
            fine < coarse,
            "the layers are as many and wait as long",
        ));
    }
    let of_live = live(inputs).map(live_row).filter_map(|row| row.cells[SEARCHES_SHARE].value());
    if let Some(most) = of_live.reduce(f64::max) {
        claims.push(Claim::new(
            format!("Live, what the policy does is at most 1 % of an iteration ({most:.1} %)"),
            most <= 1.0,
            "the demo model is so small that its iterations are much shorter than those above, \
             while its maps have as many rows to search",
        ));
    }
    claims
}
