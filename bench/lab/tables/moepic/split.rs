//! Figure 4b: how much of an expert to keep.

use super::super::{
    Alteration, Axes, Cell, Change, Claim, Finding, Inputs, Paper, Row, Runs, Table, check, columns,
};
use super::bench::{Bench, N_GRANULES, tpot};
use super::{Ids, Maker, N_REQUESTS, TWICE, each};
use moeba::Result;
use moeba::trace::{Caching, SimOptions};

/// Cached experts' memory, of all: the paper's 12 of 60 a layer.
const SHARE: f64 = 0.2;

const SPLIT: &str = "split";
const PREFETCH_ONLY: &str = "prefetch only";
const CACHE_ONLY: &str = "cache only";
const ALGORITHM_1: &str = "Algorithm 1";
const WHOLE: &str = "whole experts, layers compete (ours)";

const IDS: Ids = Ids {
    fine: "moepic-fig-4b",
    as_measured: Some("moepic-fig-4b-measured"),
    coarse: "moepic-fig-4b-coarse",
};

pub fn figure_4b(inputs: &Inputs) -> Result<Vec<Table>> {
    each(inputs, IDS, N_REQUESTS, &Maker { rows, claims })
}

fn rows(id: &'static str, bench: &Bench, changes: &[Change]) -> Result<Table> {
    // Runs that look for a cause try every other θ.
    let step = if changes.is_empty() { 1 } else { 2 };
    let tried = (step..=N_GRANULES).step_by(step);
    let thetas: Vec<f64> = tried.map(|n| n as f64 / N_GRANULES as f64).collect();
    let run = |policy: &str, n_granules: usize| {
        let options = bench.options(policy, n_granules);
        Ok::<f64, moeba::Error>(tpot(&bench.run(&options, bench.tiers(&options.geometry, SHARE)?)?))
    };
    let fixed =
        |theta: &f64| run(&format!("predictor=next-layer,eviction=lcp,split={theta}"), N_GRANULES);
    let split: Result<Vec<f64>> = thetas.iter().map(fixed).collect();
    let of_extremes = if changes.contains(&WHOLE_EXTREMES) { 1 } else { N_GRANULES };
    let line = |name: &str, value: f64| Row::numbers(name, 1, thetas.iter().map(|_| value));
    let rows = vec![
        Row::numbers(SPLIT, 1, split?),
        line(PREFETCH_ONLY, prefetch_only(bench, of_extremes)?),
        line(CACHE_ONLY, run("predictor=none,eviction=lcp,split=1", of_extremes)?),
        line(ALGORITHM_1, run("moepic", N_GRANULES)?),
        line(WHOLE, run("predictor=next-layer,eviction=lcp", N_GRANULES)?),
    ];
    Ok(Table {
        id,
        title: format!("MoEpic, Figure 4b: split ratios, {}", bench.name()),
        setting: format!(
            "Time per output token, ms: {}. Equal shares of all layers, which together hold {:.0} \
             % of all experts; experts in {N_GRANULES} granules; next-layer prefetch and LCP. \
             Beside the cache is a buffer of one token's experts of a layer, the paper's, in which \
             bottoms wait to be used: small θ are short of it.",
            bench.describe(),
            100.0 * SHARE
        ),
        columns: columns("θ", thetas),
        rows,
        paper: Some(paper()),
        claims: Vec::new(),
        plot: Some(Axes { x: "θ".into(), y: "TPOT, ms".into() }),
    })
}

/// θ = 0: nothing is cached.
fn prefetch_only(bench: &Bench, n_granules: usize) -> Result<f64> {
    let options = bench.options("predictor=next-layer,eviction=lcp", n_granules);
    let options = SimOptions { caching: Caching::Release, ..options };
    Ok(tpot(&bench.run(&options, bench.buffer(&options.geometry, SHARE)?)?))
}

fn paper() -> Paper {
    let text = |text: &str| [Cell::Text(text.into())];
    Paper {
        columns: columns("finding", ["figure"]),
        rows: vec![
            Row::new("best θ", [Cell::Number(0.4, 1)]),
            Row::new(
                "TPOT there, against prefetch only and cache only",
                text("−37.97 % to −48.67 %"),
            ),
        ],
        setting: "Qwen1.5-MoE, memory for 288 experts (12 of a layer's 60), A6000.".into(),
    }
}

const WHOLE_EXTREMES: Change =
    Change::Own("with whole experts that are computed when all of them is there for the extremes");

/// The least time of the split with a θ of a range, and that θ.
fn least(table: &Table, thetas: std::ops::RangeInclusive<f64>) -> (f64, &str) {
    let split = table.values(SPLIT).into_iter().zip(&table.columns[1..]);
    let is_asked = |theta: &str| theta.parse().is_ok_and(|theta| thetas.contains(&theta));
    let asked = split.filter(|(_, theta)| is_asked(theta)).map(|(ms, theta)| (ms, theta.as_str()));
    asked.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::NAN, "none"))
}

/// θ from 0.2 to 0.8 against whole experts.
fn beside_whole(table: &Table) -> Finding {
    let ((best, theta), (whole, _)) = (least(table, 0.2..=0.8), least(table, 1.0..=1.0));
    Finding::one(
        whole - best,
        format!("{best:.1} ms with θ {theta}, {whole:.1} with whole experts"),
    )
}

/// The parts of the extremes' times that the best split saves, in percent.
fn saved(table: &Table) -> [f64; 2] {
    let (best, _) = least(table, 0.0..=1.0);
    [PREFETCH_ONLY, CACHE_ONLY].map(|name| 100.0 * (1.0 - best / table.values(name)[0]))
}

fn beside_extremes(table: &Table, least: f64) -> Finding {
    let [prefetch, cache] = saved(table);
    let figures = format!("{prefetch:.0} % less than prefetch only, {cache:.0} % than cache only");
    Finding::one(prefetch.min(cache) - least, figures)
}

fn algorithm_1(table: &Table) -> Finding {
    let ((best, theta), planned) = (least(table, 0.0..=1.0), table.values(ALGORITHM_1)[0]);
    let figures = format!("{planned:.1} ms, {best:.1} with θ {theta}");
    Finding::one(1.03 * best - planned, figures)
}

const GUESSED: &str = "the next layer's experts are guessed";
const HOT: &str = "some experts are used more than others, and whole ones of those save more \
                   than tops of many";
const SLOW_LINK: &str = "most of a load takes longer than there is computation beside it";
const ARRIVING: &str = "the extremes are on an engine, too, that computes granules as they arrive";

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let (exact, even) = (Change::Routing(Alteration::Exact), Change::Routing(Alteration::Even));
    let link = Change::Link(4.0);
    let whole = "A split, θ from 0.2 to 0.8, is faster than prefetch with whole experts cached";
    let whole = check(whole, table, runs, beside_whole)
        .unless(GUESSED, &[exact])?
        .unless(SLOW_LINK, &[link])?
        .unless(HOT, &[even])?
        .unless("all of these hold", &[exact, even, link])?;
    let extremes = "Both extremes, prefetch only and cache only, are slower than the best split";
    let extremes = check(extremes, table, runs, |table| beside_extremes(table, 0.01))
        .unless(GUESSED, &[exact])?
        .unless(SLOW_LINK, &[link])?;
    let least = "The best split takes 38 % less than each of the extremes, or better";
    let least = check(least, table, runs, |table| beside_extremes(table, 37.97))
        .unless(ARRIVING, &[WHOLE_EXTREMES])?
        .unless(SLOW_LINK, &[link])?
        .unless(GUESSED, &[exact])?
        .unless("the first two hold", &[WHOLE_EXTREMES, link])?
        .unless("all of these hold", &[WHOLE_EXTREMES, link, exact])?;
    let planned =
        check("Algorithm 1 comes within 3 % of the best θ (3 % is ours)", table, runs, algorithm_1)
            .unless("it has the statistics of few tokens", &[TWICE])?
            .unless(HOT, &[even])?
            .unless(GUESSED, &[exact])?;
    Ok(vec![whole.done(), extremes.done(), least.done(), planned.done()])
}
