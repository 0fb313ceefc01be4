//! τ, the tokens from one plan of Algorithm 1 to the next. The paper's 5,000 are more than most
//! processes generate, so it is chosen here: on one half of the requests, and judged on the other.

use super::bench::{Bench, DEVICE, N_GRANULES, TAU, tpot};
use super::{Inputs, TWICE};
use crate::tables::chosen::{self, HALVES};
use crate::tables::{Change, Claim, Row, Runs, Table, columns};
use moeba::Result;
use moeba::policy::{Moepic, MoepicOptions, Policy, Shape};
use moeba::trace::simulate_policy;

const TAUS: [u64; 6] = [50, 100, 200, 400, 1000, 5000];
/// Cached experts' memory, of all.
const SHARES: [f64; 2] = [0.25, 0.5];

pub fn tau(inputs: &Inputs) -> Result<Vec<Table>> {
    let make = |changes: &[Change]| inputs.with(changes, |inputs| rows(inputs, changes));
    let mut table = make(&[])?;
    table.claims = claims(&table, &Runs::new(&make))?;
    Ok(vec![table])
}

fn rows(inputs: &Inputs, changes: &[Change]) -> Result<Table> {
    let mut rows = Vec::new();
    for source in inputs.sources() {
        for half in HALVES {
            let mut bench = Bench::of(inputs, source, half.of(source.trace));
            if changes.contains(&TWICE) {
                bench.serve_twice();
            }
            for share in SHARES {
                let times = TAUS.into_iter().map(|tau| time(&bench, share, tau));
                let times = times.collect::<Result<Vec<f64>>>()?;
                let name = format!("{}, {:.0} %, {}", half.name(), 100.0 * share, bench.name());
                rows.push(Row::numbers(name, 2, times));
            }
        }
    }
    let routings: Vec<String> = inputs.sources().map(|source| source.describe(DEVICE)).collect();
    Ok(Table {
        id: "moepic-tau",
        title: "MoEpic, Algorithm 1: tokens from one plan to the next".into(),
        setting: format!(
            "{}. Time per output token, ms, by τ, with a cache of a part of all experts; experts \
             in {N_GRANULES} granules. Every other request of each kind is to choose by, the \
             others are to judge by.",
            routings.join("; ").replacen("routing", "Routing", 1)
        ),
        columns: columns("requests", TAUS),
        rows,
        ..Table::default()
    })
}

/// ms
fn time(bench: &Bench, share: f64, tau: u64) -> Result<f64> {
    let options = bench.options("moepic", N_GRANULES);
    let build = |shape: &Shape| Policy {
        splitter: Some(Box::new(Moepic::new(
            shape,
            MoepicOptions { tau, ..MoepicOptions::default() },
        ))),
        ..options.policy.build(shape, &options.profile)
    };
    let tiers = bench.tiers(&options.geometry, share)?;
    Ok(tpot(&simulate_policy(&bench.routing(), &options, tiers, build)?))
}

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    chosen::claims(table, runs, &TAU.to_string(), &[("plans are of few tokens", &[TWICE])])
}
