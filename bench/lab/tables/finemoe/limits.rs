//! Figure 12: time per output token by the memory that experts may have.

use super::split::{N_WARM_UP, Split, profile};
use super::{DEVICE, learned};
use crate::tables::{
    Alteration, Axes, Cell, Change, Claim, Compared, Finding, Inputs, Paper, Row, Runs, Source,
    Table, check, columns,
};
use moeba::Result;
use moeba::trace::{Caching, Ordered, SimOptions, simulate};

/// Shares of all experts' memory; the paper goes from 6 to 96 GB, of which Mixtral's take 90.
const SHARES: [f64; 4] = [0.1, 0.25, 0.5, 0.75];

const FINEMOE: &str = "finemoe";
/// The paper's, and what the text says that FineMoE saves at 6 GB.
const BASELINES: [(&str, f64); 3] =
    [("deepspeed", 0.36), ("mixtral-offloading", 0.25), ("moe-infinity", 0.29)];
/// Not the paper's: no prefetching at all.
const REFERENCE: &str = "on-demand";

const N_NEW: usize = 24;

pub fn figure_12(inputs: &Inputs) -> Result<Vec<Table>> {
    let sources =
        [("finemoe-fig-12-fine", Some(inputs.fine)), ("finemoe-fig-12-coarse", inputs.coarse)];
    let mut tables = Vec::new();
    for (id, source) in sources {
        let Some(source) = source else { continue };
        let alone = Inputs::of(source);
        let make =
            |changes: &[Change]| alone.with(changes, |inputs| of_source(id, &inputs.fine, changes));
        let mut table = make(&[])?;
        table.claims = claims(&table, &Runs::new(&make))?;
        tables.push(table);
    }
    Ok(tables)
}

fn of_source(id: &'static str, source: &Source, changes: &[Change]) -> Result<Table> {
    let split = Split::of(source.trace).at_most(usize::MAX, N_WARM_UP + N_NEW);
    let routing = source.routing();
    let profile = profile(&routing, &split.known);
    let new = Ordered { routing: &routing, order: split.new.clone() };
    let names = BASELINES.iter().map(|(name, _)| *name).chain([FINEMOE, REFERENCE]);
    let mut rows = Vec::new();
    for name in names {
        let mut times = Vec::new();
        for share in SHARES {
            let policy = match name {
                FINEMOE if changes.contains(&OTHER_EVICTION) => {
                    "predictor=map,eviction=scan-resistant"
                }
                _ => name,
            };
            let mut options = SimOptions {
                profile: profile.clone(),
                n_warm_up: split.n_warm_up(),
                ..source.options(DEVICE, policy, share)
            };
            if changes.contains(&NOTHING_KEPT) && name == BASELINES[0].0 {
                options.caching = Caching::Release;
            }
            times.push(simulate(&new, &options)?.tpot.mean / 1e6);
        }
        rows.push(Row::numbers(name, 1, times));
    }
    let mut table = Table {
        id,
        title: format!(
            "FineMoE, Figure 12: time per output token by expert cache limit, {}",
            source.stands_for
        ),
        columns: columns("policy", SHARES.map(|share| format!("{:.0} %", 100.0 * share))),
        rows,
        paper: Some(paper()),
        plot: Some(Axes { x: "memory, % of all experts'".into(), y: "TPOT, ms".into() }),
        ..Table::default()
    };
    let saved = BASELINES.map(|(name, _)| format!("{:.0} %", 100.0 * saved(&table, name)[0]));
    table.setting = format!(
        "{}; {}. Mean time of a decode step, ms. \
         deepspeed prefetches all of the next layer's experts, which the paper's did not. At the \
         least memory FineMoE takes {} less than {}.",
        source.describe(DEVICE),
        learned(&split),
        saved.join(", "),
        BASELINES.map(|(name, _)| name).join(", "),
    );
    Ok(table)
}

/// Which part of the baseline's time FineMoE saves, by limit.
fn saved(table: &Table, baseline: &str) -> Vec<f64> {
    let pairs = table.values(baseline).into_iter().zip(table.values(FINEMOE));
    pairs.map(|(other, finemoe)| 1.0 - finemoe / other).collect()
}

fn paper() -> Paper {
    Paper {
        columns: columns("baseline", ["FineMoE saves at 6 GB"]),
        rows: BASELINES
            .iter()
            .map(|(name, saved)| Row::new(*name, [Cell::Share(*saved)]))
            .collect(),
        setting: "six RTX 3090, mean of Mixtral-8×7B, Qwen1.5-MoE and Phi-3.5-MoE; a plot, of \
                  which the text states"
            .into(),
    }
}

const OTHER_EVICTION: Change =
    Change::Own("with the scan-resistant eviction in the place of FineMoE's");
const NOTHING_KEPT: Change =
    Change::Own("with nothing kept for deepspeed from one token to the next");

/// A system takes no less than some others, but for a twentieth of a millisecond.
fn slowest(table: &Table, system: &str, others: &[&str]) -> Finding {
    let margins = others.iter().flat_map(|other| table.margins(system, other, 0.05));
    Finding::of(margins)
}

fn fastest(table: &Table) -> Finding {
    Finding::of(BASELINES.iter().flat_map(|(name, _)| table.margins(name, FINEMOE, 0.05)))
}

/// The time between the fastest and the slowest policy, at a limit.
fn gap(table: &Table, at: usize) -> f64 {
    let rows = table.rows[..=BASELINES.len()].iter();
    let times: Vec<f64> = rows.filter_map(|row| row.cells[at].value()).collect();
    times.iter().copied().fold(f64::MIN, f64::max) - times.iter().copied().fold(f64::MAX, f64::min)
}

fn narrows(table: &Table) -> Finding {
    let (lowest, highest) = (gap(table, 0), gap(table, SHARES.len() - 1));
    Finding::one(
        lowest - highest,
        format!("{lowest:.1} ms at the lowest, {highest:.1} at the highest"),
    )
}

fn saves(table: &Table) -> Finding {
    Finding::of(BASELINES.map(|(name, paper)| {
        let saved = saved(table, name)[0];
        Compared {
            margin: saved - paper / 2.0,
            figures: format!("{:.0} % of {name}", 100.0 * saved),
        }
    }))
}

const SLOW_LINK: &str = "an expert takes longer to load than a layer to compute, so that \
                         prefetching hides little";
const AGAIN: &str = "a text soon uses again what it has just used, which LRU keeps";
const EVICTION: &str = "FineMoE's eviction keeps less of use";

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let (link, shuffled) = (Change::Link(8.0), Change::Routing(Alteration::Shuffle));
    let best = check("FineMoE takes the least time at every limit", table, runs, fastest)
        .unless(SLOW_LINK, &[link])?
        .unless(EVICTION, &[OTHER_EVICTION])?
        .unless(AGAIN, &[shuffled])?
        .unless("the first two hold", &[link, OTHER_EVICTION])?;
    let [deepspeed, offloading, infinity] = BASELINES.map(|(name, _)| name);
    let others = [offloading, infinity, FINEMOE];
    let worst = check("DeepSpeed takes the longest at every limit", table, runs, |table| {
        slowest(table, deepspeed, &others)
    });
    let worst = worst
        .unless(AGAIN, &[shuffled])?
        .unless("it keeps experts from token to token here", &[NOTHING_KEPT])?;
    let gaps = "The gap between the policies is narrower at the highest limit than at the lowest";
    let gaps = check(gaps, table, runs, narrows)
        .unless("at the lowest all wait for nearly every expert", &[link])?
        .unless(AGAIN, &[shuffled])?;
    let least = "At the lowest limit FineMoE saves at least half, by our reading, of what it saves \
                 in the paper";
    let least = check(least, table, runs, saves)
        .unless(SLOW_LINK, &[link])?
        .unless(EVICTION, &[OTHER_EVICTION])?
        .unless("both hold", &[link, OTHER_EVICTION])?
        .unless(
            "both hold, and deepspeed keeps experts here",
            &[link, OTHER_EVICTION, NOTHING_KEPT],
        )?;
    Ok(vec![best.done(), worst.done(), gaps.done(), least.done()])
}
