//! Figure 14b: what to drop, with FineMoE's prefetching.

use super::split::{Split, profile};
use super::{DEVICE, N_WARM_UP, learned, stated};
use crate::tables::{Claim, Inputs, Row, Source, Table, columns};
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
    let mut rows = EVICTIONS.map(|(name, _)| Row::new(name, []));
    let (mut names, mut settings) = (Vec::new(), Vec::new());
    for source in inputs.sources() {
        let split = Split::of(source.trace).at_most(usize::MAX, N_WARM_UP + N_NEW);
        names.extend(SHARES.map(|share| format!("{} {:.0} %", source.stands_for, 100.0 * share)));
        settings.push(format!("{}; {}", source.describe(DEVICE), learned(&split)));
        add(&source, &split, &mut rows)?;
    }
    let mut table = Table {
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
    };
    table.claims = claims(&table);
    Ok(vec![table])
}

/// The source's cells of each row.
fn add(source: &Source, split: &Split, rows: &mut [Row]) -> Result<()> {
    let routing = source.routing();
    let profile = profile(&routing, &split.known);
    let new = Ordered { routing: &routing, order: split.new.clone() };
    for (row, (_, eviction)) in rows.iter_mut().zip(EVICTIONS) {
        for share in SHARES {
            let policy = format!("predictor=map,eviction={eviction}");
            let options = source.options(DEVICE, &policy, share);
            let options = SimOptions { profile: profile.clone(), n_warm_up: N_WARM_UP, ..options };
            let report = simulate(&new, &options)?;
            row.cells.extend(Row::shares("", [report.decode.counters.hit_rate()]).cells);
        }
    }
    Ok(())
}

fn claims(table: &Table) -> Vec<Claim> {
    vec![
        Claim::new(
            "LFU hits more often than LRU",
            table.at_least("LFU", "LRU", 0.0),
            "what this text has just used counts for more than what all texts have used, but where \
             a token goes through more than the memory holds before it returns to a layer, when \
             LRU has nothing left of it",
        ),
        Claim::new(
            "FineMoE's eviction hits more often than LRU and LFU",
            table.at_least("FineMoE", "LRU", 0.0) && table.at_least("FineMoE", "LFU", 0.0),
            "p is what one past iteration did, and of layers that the present token has passed it \
             says nothing of the next token's, so where little has room frequencies alone may \
             keep more",
        ),
    ]
}
