//! Table 3: MoEpic without each of its parts.

use super::super::{
    Alteration, Cell, Change, Claim, Compared, Finding, Inputs, Paper, Row, Runs, Table, check,
    columns,
};
use super::bench::{Bench, N_GRANULES, TAU, tpot, ttft};
use super::{Ids, Maker, N_REQUESTS, TWICE, each};
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
    each(inputs, IDS, N_REQUESTS, &Maker { rows, claims })
}

fn rows(id: &'static str, bench: &Bench, _: &[Change]) -> Result<Table> {
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
    Ok(Table {
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
    })
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

/// A part's absence makes decode slower.
fn slower(table: &Table, without: &str) -> Finding {
    let times = table.values(without)[3];
    Finding::strict([Compared { margin: times - 1.0, figures: format!("{times:.3} times") }])
}

fn first_token(table: &Table) -> Finding {
    let times = table.values(NO_CONFIGURATOR)[1];
    Finding::one(times - 1.05, format!("{times:.3} times"))
}

/// How far apart all systems of the table are, in percent of the shortest first token, against
/// what the claim asks for.
fn alike(table: &Table) -> Finding {
    let times = table.rows.iter().filter_map(|row| row.cells[0].value());
    let (least, most) = times.fold((f64::MAX, 0.0_f64), |(a, b), ms| (a.min(ms), b.max(ms)));
    let percent = 100.0 * (most / least - 1.0);
    Finding::one(5.0 - percent, format!("they differ by {percent:.1} % at most"))
}

/// The configurator's absence costs the most.
fn worth_most(table: &Table) -> Finding {
    let tpot = |name: &str| table.values(name)[3];
    Finding::of([NO_PREFETCH, NO_LCP].map(|other| Compared {
        margin: tpot(NO_CONFIGURATOR) - tpot(other),
        figures: format!("{:.3} times, {:.3} {other}", tpot(NO_CONFIGURATOR), tpot(other)),
    }))
}

const GUESSED: &str = "the next layer's experts are guessed";
const LITTLE: &str = "Algorithm 1 has the statistics of few tokens";
const SHORT: &str = "computation is short beside loads";

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let [exact, even, shuffled] =
        [Alteration::Exact, Alteration::Even, Alteration::Shuffle].map(Change::Routing);
    let (link, short) = (Change::Link(4.0), Change::Routing(Alteration::ShortPrompts));
    let prefetch = "Decode is slower without prefetching";
    let prefetch = check(prefetch, table, runs, |table| slower(table, NO_PREFETCH))
        .unless(GUESSED, &[exact])?
        .unless(SHORT, &[link])?;
    let lcp = "Decode is slower with random eviction than with LCP";
    let lcp = check(lcp, table, runs, |table| slower(table, NO_LCP))
        .unless("LCP has few tokens to count", &[TWICE])?
        .unless("a text soon uses again what it has just used", &[shuffled])?;
    let planned = "Decode is slower without the configurator";
    let planned = check(planned, table, runs, |table| slower(table, NO_CONFIGURATOR))
        .unless(LITTLE, &[TWICE])?
        .unless(GUESSED, &[exact])?
        .unless(SHORT, &[link])?;
    let most = "Of its parts the configurator is worth most to decode";
    let most = check(most, table, runs, worth_most)
        .unless(LITTLE, &[TWICE])?
        .unless(SHORT, &[link])?
        .unless("prefetching finds computation to hide behind", &[Change::Link(0.25)])?
        .unless("some experts are used more than others", &[even])?
        .unless(GUESSED, &[exact])?;
    let ttft =
        "The first token is later, too, without the configurator: by 5 % or more (5 % is ours)";
    let ttft = check(ttft, table, runs, first_token)
        .unless("a prompt uses most of a layer's experts", &[short])?
        .unless(LITTLE, &[TWICE])?
        .unless(SHORT, &[link])?
        .shown(
            "no way to keep experts makes a difference to a prompt",
            "with split experts or whole, by any eviction and with prefetches or without",
            || Ok(alike(table)),
        )?;
    Ok(vec![prefetch.done(), lcp.done(), planned.done(), most.done(), ttft.done()])
}
