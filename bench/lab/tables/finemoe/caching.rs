//! Figure 14b: what to drop, with FineMoE's prefetching.

use super::split::{N_WARM_UP, Split, profile};
use super::{DEVICE, learned, stated};
use crate::tables::{Alteration, Change, Claim, Inputs, Row, Runs, Source, Table, check, columns};
use moeba::Result;
use moeba::trace::Ordered;
use moeba::trace::{SimOptions, simulate};

/// Shares of all experts' memory.
const SHARES: [f64; 3] = [0.25, 0.5, 0.75];

/// The first three are the paper's.
const EVICTIONS: [(&str, &str); 5] = [
    ("LRU", "lru"),
    ("LFU", "lfu"),
    ("FineMoE", "map"),
    ("LCP", "lcp"),
    ("scan-resistant", "scan-resistant"),
];

const N_NEW: usize = 24;

pub fn figure_14b(inputs: &Inputs) -> Result<Vec<Table>> {
    let make = |changes: &[Change]| inputs.with(changes, |inputs| rows(inputs, changes));
    let mut table = make(&[])?;
    table.claims = claims(&table, &Runs::new(&make))?;
    Ok(vec![table])
}

fn rows(inputs: &Inputs, changes: &[Change]) -> Result<Table> {
    let mut rows = EVICTIONS.map(|(name, _)| Row::new(name, []));
    let (mut names, mut settings) = (Vec::new(), Vec::new());
    for source in inputs.sources() {
        let split = Split::of(source.trace).at_most(usize::MAX, N_WARM_UP + N_NEW);
        names.extend(SHARES.map(|share| format!("{} {:.0} %", source.stands_for, 100.0 * share)));
        settings.push(format!("{}; {}", source.describe(DEVICE), learned(&split)));
        add(&source, &split, changes, &mut rows)?;
    }
    Ok(Table {
        id: "finemoe-fig-14b",
        title: "FineMoE, Figure 14b: expert hit rate of ways to evict".into(),
        setting: format!(
            "{}. Experts of decode steps that were \
             in memory as a whole when they were asked for, with FineMoE's prefetching (d = 3, \
             C = 1000), by the share of all experts that has room. The last two rows are not \
             the paper's.",
            settings.join(". Also ")
        ),
        columns: columns("eviction", names),
        rows: rows.to_vec(),
        paper: Some(stated(
            "a plot, of which the text states",
            &[
                ("LRU", "performs poorly"),
                ("LFU", "a higher hit rate than LRU"),
                ("FineMoE", "surpasses both"),
            ],
        )),
        ..Table::default()
    })
}

/// The source's cells of each row.
fn add(source: &Source, split: &Split, changes: &[Change], rows: &mut [Row]) -> Result<()> {
    let routing = source.routing();
    let predictor = if changes.contains(&ON_DEMAND) { "none" } else { "map" };
    let profile = profile(&routing, &split.known);
    let new = Ordered { routing: &routing, order: split.new.clone() };
    for (row, (_, eviction)) in rows.iter_mut().zip(EVICTIONS) {
        for share in SHARES {
            let policy = format!("predictor={predictor},eviction={eviction}");
            let options = source.options(DEVICE, &policy, share);
            let options =
                SimOptions { profile: profile.clone(), n_warm_up: split.n_warm_up(), ..options };
            let report = simulate(&new, &options)?;
            row.cells.extend(Row::shares("", [report.decode.counters.hit_rate()]).cells);
        }
    }
    Ok(())
}

const ON_DEMAND: Change = Change::Own("without prefetching");

const AGAIN: &str = "a text soon uses again what it has just used";

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let shuffled = Change::Routing(Alteration::Shuffle);
    let lfu = check("LFU hits more often than LRU", table, runs, |t| t.compare("LFU", "LRU", 0.0))
        .unless(AGAIN, &[shuffled])?
        .unless("prefetches fill the cache as well", &[ON_DEMAND])?;
    let both = "FineMoE's eviction hits more often than LRU and LFU";
    let both = check(both, table, runs, |table| {
        table.compare("FineMoE", "LRU", 0.0).and(table.compare("FineMoE", "LFU", 0.0))
    });
    let both = both
        .unless(AGAIN, &[shuffled])?
        .unless("prefetches fill the cache as well", &[ON_DEMAND])?
        .unless("both hold", &[shuffled, ON_DEMAND])?;
    Ok(vec![lfu.done(), both.done()])
}
