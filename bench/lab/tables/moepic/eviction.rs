//! Table 1: hit rates of evictions.

use super::super::{
    Alteration, Axes, Cell, Change, Claim, Inputs, Paper, Row, Runs, Table, check, columns,
};
use super::bench::Bench;
use super::{Ids, Maker, N_REQUESTS, TWICE, each};
use moeba::Result;
use moeba::trace::Routing;

/// The paper's 10 to 50 of 60 experts a layer.
const N_CACHED: [usize; 5] = [10, 20, 30, 40, 50];
const N_EXPERTS: f64 = 60.0;

/// The paper's name of an eviction and ours.
const POLICIES: &[(&str, &str)] =
    &[("RND", "random"), ("LFU", "lfu"), ("LRU", "lru"), ("LCP", "lcp")];

/// Ours, for comparison.
const SCAN_RESISTANT: &str = "scan-resistant (ours)";
const FIXED: &str = "the most frequent, held for good";
const BELADY: &str = "Belady (knows the future)";

const IDS: Ids = Ids { fine: "moepic-table-1", as_measured: None, coarse: "moepic-table-1-coarse" };

pub fn table_1(inputs: &Inputs) -> Result<Vec<Table>> {
    each(inputs, IDS, N_REQUESTS, &Maker { rows, claims })
}

fn rows(id: &'static str, bench: &Bench, changes: &[Change]) -> Result<Table> {
    let mut rows = Vec::new();
    for (name, eviction) in POLICIES.iter().chain(&[(SCAN_RESISTANT, "scan-resistant")]) {
        rows.push(Row::shares(*name, hit_rates(bench, eviction, false)?));
    }
    rows.push(Row::shares(FIXED, N_CACHED.map(|n| most_frequent(bench, share(n)))));
    rows.push(Row::shares(BELADY, hit_rates(bench, "lru", true)?));
    if changes.contains(&ROOMY) {
        let (n, k) = (bench.source.n_experts() as f64, bench.source.trace.header().k as f64);
        let n_small = N_CACHED.iter().filter(|cached| share(**cached) * n < 2.0 * k).count();
        rows.iter_mut().for_each(|row| row.cells[..n_small].fill(Cell::Missing));
    }
    Ok(Table {
        id,
        title: format!("MoEpic, Table 1: hit rates of evictions, {}", bench.name()),
        setting: format!(
            "Demanded experts of decode steps that are cached, on demand alone: {}. A layer \
             caches a part of its experts, as whole ones; a buffer of one token's experts beside \
             that is what a demand passes through. Random evicts any expert for the one that was \
             used; the paper's caches random ones and keeps them.",
            bench.describe()
        ),
        columns: columns("policy", N_CACHED.map(|n| format!("{:.0} %", share(n) * 100.0))),
        rows,
        paper: Some(paper()),
        claims: Vec::new(),
        plot: Some(Axes { x: "cached experts of a layer, %".into(), y: "hit rate, %".into() }),
    })
}

fn share(n_cached: usize) -> f64 {
    n_cached as f64 / N_EXPERTS
}

fn hit_rates(bench: &Bench, eviction: &str, knows_future: bool) -> Result<Vec<f64>> {
    let options = bench.options(&format!("predictor=none,eviction={eviction},split=1"), 1);
    let rate = |n_cached: &usize| {
        let tiers = bench.tiers(&options.geometry, share(*n_cached))?;
        let report = match knows_future {
            false => bench.run(&options, tiers)?,
            true => bench.run_belady(&options, tiers)?,
        };
        Ok(report.decode.counters.hit_rate())
    };
    N_CACHED.iter().map(rate).collect()
}

/// Hits of the experts that decode uses most, if each layer caches those and no others.
fn most_frequent(bench: &Bench, share: f64) -> f64 {
    let routing = bench.routing();
    let mut counts: Vec<Vec<u64>> = routing.n_experts().iter().map(|n| vec![0; *n]).collect();
    let mut chosen = Vec::new();
    let passes = (0..routing.n_requests()).flat_map(|request| routing.passes(request));
    for token in passes.filter(|pass| !pass.is_prompt).flat_map(|pass| pass.tokens) {
        for (layer, counts) in counts.iter_mut().enumerate().filter(|(_, c)| !c.is_empty()) {
            routing.chosen(token, layer, &mut chosen);
            chosen.iter().for_each(|expert| counts[*expert as usize] += 1);
        }
    }
    let (mut hits, mut all) = (0.0, 0.0);
    for counts in &mut counts {
        counts.sort_unstable_by(|a, b| b.cmp(a));
        // The last one that there is room for may be cached in part of the layers only.
        let room = |rank: usize| (share * counts.len() as f64 - rank as f64).clamp(0.0, 1.0);
        hits += counts.iter().enumerate().map(|(rank, n)| *n as f64 * room(rank)).sum::<f64>();
        all += counts.iter().sum::<u64>() as f64;
    }
    hits / all
}

fn paper() -> Paper {
    let rows = [
        ("RND", [0.1641, 0.3302, 0.4969, 0.6741, 0.8315]),
        ("LFU", [0.2436, 0.4374, 0.6068, 0.7584, 0.8934]),
        ("LRU", [0.1911, 0.3888, 0.5638, 0.7316, 0.8897]),
        ("LCP", [0.2556, 0.4536, 0.6221, 0.7712, 0.9008]),
    ];
    Paper {
        columns: columns("policy", N_CACHED.map(|n| format!("{n} of 60"))),
        rows: rows.map(|(name, rates)| Row::shares(name, rates)).into(),
        setting: "Qwen1.5-MoE on MMLU.".into(),
    }
}

const ROOMY: Change = Change::Own("with caches of at least twice a token's experts alone");

const AGAIN: &str = "a text soon uses again what it has just used";
const LITTLE: &str = "there are few requests to learn from";

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let shuffled = [Change::Routing(Alteration::Shuffle)];
    let lcp_wins = |table: &Table| {
        let [random, lfu, lru] =
            ["RND", "LFU", "LRU"].map(|other| table.compare("LCP", other, 0.0));
        random.and(lfu).and(lru)
    };
    let lcp =
        check("LCP hits more than random, LFU and LRU, whatever is cached", table, runs, lcp_wins)
            .unless(AGAIN, &shuffled)?
            .unless(LITTLE, &[TWICE])?
            .unless("both hold", &[shuffled[0], TWICE])?;
    let lfu = check("LFU hits more than LRU", table, runs, |t| t.compare("LFU", "LRU", 0.0))
        .unless(LITTLE, &[TWICE])?
        .unless(AGAIN, &shuffled)?;
    let lru = check("LRU hits more than random", table, runs, |t| t.compare("LRU", "RND", 0.0))
        .unless(LITTLE, &[TWICE])?
        .unless("a token's experts leave a cache before the next token uses them", &[ROOMY])?;
    Ok(vec![lcp.done(), lfu.done(), lru.done()])
}
