//! Figure 4b: how much of an expert to keep.

use super::super::{Axes, Cell, Claim, Inputs, Paper, Row, Table, columns};
use super::bench::{Bench, N_GRANULES, tpot};
use super::{EVERY, Ids, each};
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
    each(inputs, IDS, EVERY, table)
}

fn table(id: &'static str, bench: &Bench) -> Result<Table> {
    let thetas: Vec<f64> = (1..=N_GRANULES).map(|n| n as f64 / N_GRANULES as f64).collect();
    let run = |policy: &str| {
        let options = bench.options(policy, N_GRANULES);
        Ok::<f64, moeba::Error>(tpot(&bench.run(&options, bench.tiers(&options.geometry, SHARE)?)?))
    };
    let fixed = |theta: &f64| run(&format!("predictor=next-layer,eviction=lcp,split={theta}"));
    let split: Result<Vec<f64>> = thetas.iter().map(fixed).collect();
    let line = |name: &str, value: f64| Row::numbers(name, 1, thetas.iter().map(|_| value));
    let rows = vec![
        Row::numbers(SPLIT, 1, split?),
        line(PREFETCH_ONLY, prefetch_only(bench)?),
        line(CACHE_ONLY, run("predictor=none,eviction=lcp,split=1")?),
        line(ALGORITHM_1, run("moepic")?),
        line(WHOLE, run("predictor=next-layer,eviction=lcp")?),
    ];
    let mut table = Table {
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
    };
    table.claims = claims(&table);
    Ok(table)
}

/// θ = 0: nothing is cached.
fn prefetch_only(bench: &Bench) -> Result<f64> {
    let options = bench.options("predictor=next-layer,eviction=lcp", N_GRANULES);
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

fn claims(table: &Table) -> Vec<Claim> {
    let split = table.values(SPLIT);
    let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    let best = least(&split);
    let saved = |name: &str| 100.0 * (1.0 - best / table.values(name)[0]);
    let (of_prefetch, of_cache) = (saved(PREFETCH_ONLY), saved(CACHE_ONLY));
    vec![
        Claim::new(
            "A split, θ from 0.2 to 0.8, is faster than prefetch with whole experts cached",
            least(&split[1..N_GRANULES - 2]) < split[N_GRANULES - 1],
            "the tops of more experts are the tops of ones less likely to be used, so that a \
             granule saves most loads where it completes a hot expert, and prefetches do not make \
             up for that (by Eq. 11, too, whole experts are mostly best). By its text the paper \
             compares with whole experts only where nothing is prefetched",
        ),
        Claim::new(
            "Both extremes, prefetch only and cache only, are slower than the best split",
            of_prefetch > 0.0 && of_cache > 0.0,
            "what is cached, or what is prefetched, is worth less here than the memory it takes",
        ),
        Claim::new(
            "The best split takes 38 % less than each of the extremes, or better",
            of_prefetch.min(of_cache) >= 37.97,
            format!(
                "it takes {of_prefetch:.0} % less than prefetch only and {of_cache:.0} % less than \
                 cache only. What is left is loads that no \
                 computation hides; and the extremes, too, are on an engine that computes granules \
                 as they arrive"
            ),
        ),
        Claim::new(
            "Algorithm 1 comes within 3 % of the best θ",
            table.values(ALGORITHM_1)[0] <= 1.03 * best,
            "it plans by the statistics of few tokens",
        ),
    ]
}
