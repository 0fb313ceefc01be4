//! Table 1: hit rates of evictions.

use super::super::{Axes, Claim, Inputs, Paper, Row, Table, columns};
use super::bench::Bench;
use super::{EVERY, Ids, each};
use crate::Result;

/// The paper's 10 to 50 of 60 experts a layer.
const N_CACHED: [usize; 5] = [10, 20, 30, 40, 50];
const N_EXPERTS: f64 = 60.0;

/// The paper's name of an eviction and ours.
const POLICIES: &[(&str, &str)] =
    &[("RND", "random"), ("LFU", "lfu"), ("LRU", "lru"), ("LCP", "lcp")];

/// Ours, for comparison.
const SCAN_RESISTANT: &str = "scan-resistant (ours)";
const BELADY: &str = "Belady (knows the future)";

const IDS: Ids = Ids { fine: "moepic-table-1", as_measured: None, coarse: "moepic-table-1-coarse" };

pub fn table_1(inputs: &Inputs) -> Result<Vec<Table>> {
    each(inputs, IDS, EVERY, table)
}

fn table(id: &'static str, bench: &Bench) -> Result<Table> {
    let mut rows = Vec::new();
    for (name, eviction) in POLICIES.iter().chain(&[(SCAN_RESISTANT, "scan-resistant")]) {
        rows.push(Row::shares(*name, hit_rates(bench, eviction, false)?));
    }
    rows.push(Row::shares(BELADY, hit_rates(bench, "lru", true)?));
    let mut table = Table {
        id,
        title: format!("MoEpic, Table 1: hit rates of evictions, {}", bench.name()),
        setting: format!(
            "Demanded experts of decode steps that are cached, on demand alone: {}. A layer \
             caches a part of its experts, as whole ones; a buffer of one token's experts beside \
             that is what a demand passes through.",
            bench.describe()
        ),
        columns: columns("policy", N_CACHED.map(|n| format!("{:.0} %", share(n) * 100.0))),
        rows,
        paper: Some(paper()),
        claims: Vec::new(),
        plot: Some(Axes { x: "cached experts of a layer, %".into(), y: "hit rate, %".into() }),
    };
    table.claims = claims(&table);
    Ok(table)
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

fn claims(table: &Table) -> Vec<Claim> {
    let best_of_three =
        |name: &str| ["RND", "LFU", "LRU"].iter().all(|other| table.at_least(name, other, 0.0));
    vec![
        Claim::new(
            "LCP hits more than random, LFU and LRU, whatever is cached",
            best_of_three("LCP"),
            "",
        ),
        Claim::new("LFU hits more than LRU", table.at_least("LFU", "LRU", 0.0), ""),
        Claim::new("LRU hits more than random", table.at_least("LRU", "RND", 0.0), ""),
    ]
}
