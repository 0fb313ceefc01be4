//! All policies side by side: time, hit rate and traffic by budget, with what no policy can beat,
//! and (`side_by_side_live`) what the engine itself measured.

use std::sync::Arc;

use super::side_by_side_live;
use super::{
    Axes, Cell, Change, Claim, Compared, Finding, Inputs, Row, Runs, Source, Table, check, columns,
};
use moeba::Result;
use moeba::policy::Policy;
use moeba::trace::{Belady, Future, Oracle, future};
use moeba::trace::{Ordered, Report, Routing, SimOptions, Tiers, simulate, simulate_policy};

/// Parts of all experts' memory.
const BUDGETS: &[f64] = &[0.10, 0.25, 0.50, 0.75];

const MACHINE: &str = "rtx3090";

/// Names of rows, and policies.
const POLICIES: &[(&str, &str)] = &[
    ("on-demand (LRU)", "on-demand"),
    ("on-demand (LFU)", "predictor=none,eviction=lfu"),
    ("deepspeed", "deepspeed"),
    ("brainstorm", "brainstorm"),
    ("mixtral-offloading", "mixtral-offloading"),
    ("moe-infinity", "moe-infinity"),
    ("finemoe", "finemoe"),
    ("moepic", "moepic"),
    ("prescope, networks untrained", "prescope"),
    ("next-layer, LCP", "predictor=next-layer,eviction=lcp"),
    ("next-layer, scan-resistant", "predictor=next-layer,eviction=scan-resistant"),
    (DEFAULT, "predictor=trajectory,eviction=scan-resistant"),
];

/// The default policy.
const DEFAULT: &str = "trajectory, scan-resistant";
const ON_DEMAND: &str = "on-demand (LRU)";
const BELADY: &str = "Belady, on demand";
const ORACLE: &str = "Belady, next layer known";

pub fn all(inputs: &Inputs) -> Result<Vec<Table>> {
    let mut tables = Vec::new();
    for source in inputs.sources() {
        let alone = Inputs { n_warm_up: inputs.n_warm_up, ..Inputs::of(source) };
        let mut four = of_source(&alone, &source, false)?;
        let make = |changes: &[Change]| {
            let [tpot, ..] = of_source(&alone, &source, changes.contains(&TWICE))?;
            Ok(tpot)
        };
        four[0].claims = claims(&four[0], &Runs::new(&make))?;
        tables.extend(four);
    }
    tables.extend(side_by_side_live::table(inputs)?);
    Ok(tables)
}

/// A policy's replays, one a budget.
struct Replays {
    name: &'static str,
    reports: Vec<Report>,
}

/// Policies learn more.
const TWICE: Change = Change::Own("with all requests served once before");

fn of_source(inputs: &Inputs, source: &Source, twice: bool) -> Result<[Table; 4]> {
    let n = source.trace.requests().len();
    let order: Vec<usize> = (0..n).chain((0..n).take(if twice { n } else { 0 })).collect();
    let n_warm_up = inputs.n_warm_up + order.len() - n;
    let routing = source.routing();
    let routing = Ordered { routing: &routing, order };
    let mut all = Vec::new();
    for (name, policy) in POLICIES {
        let run = |share: &f64| {
            let mut options = source.options(MACHINE, policy, *share);
            options.n_warm_up = n_warm_up;
            simulate(&routing, &options)
        };
        all.push(Replays { name, reports: BUDGETS.iter().map(run).collect::<Result<_>>()? });
    }
    let future = future(&routing);
    for (name, n_known) in [(BELADY, 0), (ORACLE, 1)] {
        let run = |share: &f64| {
            let mut options = source.options(MACHINE, ON_DEMAND_NAME, *share);
            options.n_warm_up = n_warm_up;
            clairvoyant(&routing, &options, &future, n_known)
        };
        all.push(Replays { name, reports: BUDGETS.iter().map(run).collect::<Result<_>>()? });
    }
    Ok(tables(source, &all))
}

/// Belady's eviction, with a prefetch that knows so many of the next layers.
fn clairvoyant(
    routing: &dyn Routing,
    options: &SimOptions,
    future: &Arc<Future>,
    n_known: usize,
) -> Result<Report> {
    let tiers = Tiers::of(routing, options)?;
    simulate_policy(routing, options, tiers, |_| Policy {
        eviction: Box::new(Belady::new(future.clone())),
        predictor: (n_known > 0).then(|| Box::new(Oracle::new(future.clone(), n_known)) as Box<_>),
        splitter: None,
        notes: Vec::new(),
    })
}

const ON_DEMAND_NAME: &str = "on-demand";

fn tables(source: &Source, all: &[Replays]) -> [Table; 4] {
    let fine = source.stands_for.starts_with("qwen");
    let id = |fine_id, coarse_id| if fine { fine_id } else { coarse_id };
    let of = |value: &dyn Fn(&Report) -> Cell| -> Vec<Row> {
        all.iter().map(|runs| Row::new(runs.name, runs.reports.iter().map(value))).collect()
    };
    let table = |id, what: &str, rows| Table {
        id,
        title: format!("All policies, {} sizes: {what}", source.stands_for),
        setting: format!("{what}, by the part of all experts that fits; {}.", setting(source)),
        columns: columns("policy", BUDGETS.iter().map(|b| format!("{:.0} %", 100.0 * b))),
        rows,
        plot: Some(Axes { x: "experts in memory, %".into(), y: what.into() }),
        ..Table::default()
    };
    let ms = |ns: f64| Cell::Number(ns / 1e6, 2);
    let mib = |bytes: f64| Cell::Number(bytes / f64::from(1 << 20), 0);
    let tpot = table(
        id("all-tpot-fine", "all-tpot-coarse"),
        "TPOT, ms",
        of(&|r: &Report| ms(r.tpot.mean)),
    );
    let hits = of(&|r: &Report| Cell::Share(r.decode.counters.hit_rate()));
    let traffic = of(&|r: &Report| mib(r.decode.read_bytes_per_token()));
    [
        tpot,
        table(id("all-ttft-fine", "all-ttft-coarse"), "TTFT, ms", of(&|r| ms(r.ttft.mean))),
        table(id("all-hits-fine", "all-hits-coarse"), "hit rate of decode", hits),
        table(id("all-traffic-fine", "all-traffic-coarse"), "MiB read for a token", traffic),
    ]
}

fn setting(source: &Source) -> String {
    source.describe(MACHINE)
}

/// The default against the best of the others, with some slack, at each budget.
fn near_the_best(tpot: &Table) -> Finding {
    let fixed = |name: &str| ![DEFAULT, BELADY, ORACLE].contains(&name);
    let own = tpot.values(DEFAULT);
    Finding::of(own.iter().enumerate().map(|(i, own)| {
        let names = tpot.rows.iter().filter(|row| fixed(&row.name));
        let best = names.map(|row| tpot.values(&row.name)[i]).fold(f64::INFINITY, f64::min);
        let excess = 100.0 * (own / best - 1.0);
        let figures = format!("{excess:+.1} % at {}", tpot.columns[i + 1]);
        Compared { margin: 3.0 - excess, figures }
    }))
}

/// The default against loading on demand.
fn never_slower(tpot: &Table) -> Finding {
    let pairs = tpot.values(DEFAULT).into_iter().zip(tpot.values(ON_DEMAND));
    Finding::of(pairs.zip(&tpot.columns[1..]).map(|((own, demand), column)| Compared {
        margin: 1.001 * demand - own,
        figures: format!("{own:.2} ms, {demand:.2} on demand at {column}"),
    }))
}

/// The promises of the default policy, which are ours.
fn claims(tpot: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let short = "runs as short as these leave it little to learn from";
    let text = "the default is at most 3 % slower than the best of the others that can be run";
    let near = check(text, tpot, runs, near_the_best).unless(short, &[TWICE])?;
    let text = "the default is never slower than loading on demand, but for a thousandth";
    let never = check(text, tpot, runs, never_slower).unless(short, &[TWICE])?;
    Ok(vec![near.done(), never.done()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use moeba::trace::format::Trace;

    /// Nothing beats a cache that knows the future, and memory helps everyone.
    #[test]
    fn rows_keep_the_order_that_theory_gives_them() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/bench/traces/demo.mtrace");
        let trace = Trace::open(path.as_ref()).unwrap();
        let inputs = Inputs::new(&trace, None, None);
        let [tpot, _, hits, traffic] = &of_source(&inputs, &inputs.fine, false).unwrap();
        for row in &tpot.rows {
            let name = &row.name;
            assert!(tpot.at_least(name, ORACLE, 0.0), "{name}: faster than {ORACLE}");
            let ms = tpot.values(name);
            assert!(ms.windows(2).all(|pair| pair[0] > pair[1]), "{name}: {ms:?}");
            let shares = hits.values(name);
            assert!(shares.windows(2).all(|pair| pair[0] <= pair[1]), "{name}: {shares:?}");
        }
        for name in ["on-demand (LRU)", "on-demand (LFU)"] {
            assert!(tpot.at_least(name, BELADY, 0.0) && hits.at_least(BELADY, name, 0.0));
            assert!(traffic.at_least(name, BELADY, 0.0), "{name}: less read than {BELADY}");
        }
        // A prefetch may read what is not used, and saves no read that a token needs.
        assert!(traffic.at_least(ORACLE, BELADY, 0.0));
    }

    #[test]
    fn the_promises_of_the_default_are_held_against_the_rows() {
        let mut table = Table {
            rows: vec![
                Row::numbers(ON_DEMAND, 2, [10.0, 5.0]),
                Row::numbers("other", 2, [9.0, 5.5]),
                Row::numbers(DEFAULT, 2, [9.1, 5.0]),
                Row::numbers(BELADY, 2, [1.0, 1.0]),
            ],
            ..Table::default()
        };
        table.columns = columns("policy", ["25 %", "50 %"]);
        assert!(near_the_best(&table).holds() && never_slower(&table).holds());
        table.rows[2] = Row::numbers(DEFAULT, 2, [9.9, 5.2]);
        assert!(!near_the_best(&table).holds() && !never_slower(&table).holds());
    }
}
