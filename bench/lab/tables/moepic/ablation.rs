//! Table 3: MoEpic without each of its parts.

use super::super::{Cell, Claim, Inputs, Paper, Row, Table, columns};
use super::bench::{Bench, N_GRANULES, TAU, tpot, ttft};
use super::{EVERY, Ids, each};
use moeba::Result;

/// Name and policy. The first is the one that the others are compared with.
const SYSTEMS: &[(&str, &str)] = &[
    ("MoEpic", "predictor=next-layer,eviction=lcp,split=auto"),
    (NO_PREFETCH, "predictor=none,eviction=lcp,split=auto"),
    (NO_LCP, "predictor=next-layer,eviction=random,split=auto"),
    (NO_CONFIGURATOR, "predictor=next-layer,eviction=lcp,split=0.5"),
    (WHOLE, "predictor=next-layer,eviction=lcp"),
];
const NO_PREFETCH: &str = "w/o SP";
const NO_LCP: &str = "w/o LCP";
const NO_CONFIGURATOR: &str = "w/o CCA";
const WHOLE: &str = "whole experts, layers compete (ours)";

/// V_e, of all experts: 240 of 1440 and 96 of 256 (section 4.1).
fn share(bench: &Bench) -> f64 {
    match bench.source.stands_for {
        "mixtral-8x7b" => 96.0 / 256.0,
        _ => 240.0 / 1440.0,
    }
}

const IDS: Ids = Ids {
    fine: "moepic-table-3-fine",
    as_measured: Some("moepic-table-3-measured"),
    coarse: "moepic-table-3",
};

pub fn table_3(inputs: &Inputs) -> Result<Vec<Table>> {
    each(inputs, IDS, EVERY, table)
}

fn table(id: &'static str, bench: &Bench) -> Result<Table> {
    let mut rows: Vec<Row> = Vec::new();
    let mut whole = None;
    for (name, policy) in SYSTEMS {
        let options = bench.options(policy, N_GRANULES);
        let report = bench.run(&options, bench.tiers(&options.geometry, share(bench))?)?;
        let (ttft, tpot) = (ttft(&report), tpot(&report));
        let (first_ttft, first_tpot) = *whole.get_or_insert((ttft, tpot));
        let cells = [(ttft, 0), (ttft / first_ttft, 2), (tpot, 1), (tpot / first_tpot, 2)];
        rows.push(Row::new(*name, cells.map(|(x, decimals)| Cell::Number(x, decimals))));
    }
    let mut table = Table {
        id,
        title: format!("MoEpic, Table 3: without its parts, {}", bench.name()),
        setting: format!(
            "{}. A cache of {:.1} % of all experts and a buffer of one token's; experts in \
             {N_GRANULES} granules. Algorithm 1 plans every {TAU} tokens. SP is next-layer \
             prefetch, and without it there is none; LCP is replaced by random eviction; without \
             CCA all layers have equal shares and θ = 0.5.",
            bench.describe(),
            100.0 * share(bench)
        ),
        columns: columns("system", HEADINGS),
        rows,
        paper: Some(paper()),
        claims: Vec::new(),
        plot: None,
    };
    table.claims = claims(&table);
    Ok(table)
}

const HEADINGS: [&str; 4] = ["TTFT, ms", "TTFT, times", "TPOT, ms", "TPOT, times"];

fn paper() -> Paper {
    let rows = [
        ("MoEpic", [720.0, 1.0, 132.0, 1.0]),
        (NO_PREFETCH, [753.0, 1.05, 174.0, 1.32]),
        (NO_LCP, [782.0, 1.09, 157.0, 1.19]),
        (NO_CONFIGURATOR, [864.0, 1.21, 193.0, 1.46]),
    ];
    let row = |(name, [ttft, ttft_times, tpot, tpot_times]): (&str, [f64; 4])| {
        let cells = [(ttft, 0), (ttft_times, 2), (tpot, 0), (tpot_times, 2)];
        Row::new(name, cells.map(|(x, decimals)| Cell::Number(x, decimals)))
    };
    Paper {
        columns: columns("system", HEADINGS),
        rows: rows.map(row).into(),
        setting: "Mixtral-8x7B, attention in 4 bits and experts in 2, memory for 96 of 256 \
                  experts, A6000. Without SP experts are prefetched at random."
            .into(),
    }
}

fn claims(table: &Table) -> Vec<Claim> {
    let ttft = |name: &str| table.values(name)[1];
    let tpot = |name: &str| table.values(name)[3];
    let slower = |name: &str| tpot(name) > 1.0;
    let without = [NO_PREFETCH, NO_LCP, NO_CONFIGURATOR];
    vec![
        Claim::new(
            "Decode is slower without prefetching",
            slower(NO_PREFETCH),
            "unused loads delay those that are waited for",
        ),
        Claim::new(
            "Decode is slower with random eviction than with LCP",
            slower(NO_LCP),
            "a layer caches little more than a token uses, and has no choice what to evict",
        ),
        Claim::new(
            "Decode is slower without the configurator",
            slower(NO_CONFIGURATOR),
            "it plans by the statistics of few tokens, and the layers are much alike",
        ),
        Claim::new(
            "Of its parts the configurator is worth most to decode",
            without.iter().all(|name| tpot(NO_CONFIGURATOR) >= tpot(name)),
            "prefetching is worth what computation there is to hide loads behind; θ, which is \
             nearly all that the configurator changes, is worth less",
        ),
        Claim::new(
            "The first token is later, too, without the configurator: by 5 % or more",
            ttft(NO_CONFIGURATOR) >= 1.05,
            "a prompt uses nearly all experts of a layer, of which as many bytes are cached \
             whatever the division, and granules are computed as they arrive with all of these",
        ),
    ]
}
