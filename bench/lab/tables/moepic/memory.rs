//! Figure 8: memory that a time per output token takes.

use super::super::{
    Alteration, Axes, Cell, Change, Claim, Finding, Inputs, Paper, Row, Runs, Table, check, columns,
};
use super::bench::{Bench, N_LAYERS, TAU, tpot};
use super::{Ids, Maker, N_FOR_SEARCHES, TWICE, each};
use moeba::Result;
use moeba::trace::{Budget, Routing, SimOptions, Tiers};
use std::collections::BTreeMap;

/// The last is the default.
pub const SYSTEMS: [&str; 4] = [
    "mixtral-offloading",
    "moe-infinity",
    "moepic",
    "predictor=trajectory,eviction=scan-resistant",
];
const BASELINES: [&str; 2] = ["mixtral-offloading", "moe-infinity"];
const MOEPIC: &str = "moepic";

/// Budgets are searched in parts of all experts' memory: from 6, about a tenth, to 64 of 64.
const PARTS: u32 = 64;
const LEAST: u32 = 6;

/// Coarser than elsewhere, for the sake of time.
const N_GRANULES: usize = 5;

/// Targets between the time with everything in memory, 0, and mixtral-offloading's with the least
/// that is searched, 1.
const TARGETS: [f64; 5] = [0.1, 0.25, 0.4, 0.55, 0.7];

/// A target above the time with everything in memory: the paper's 60 ms to 57 ms.
const ALMOST_FULL: f64 = 60.0 / 57.0;

/// Targets at the paper's speeds: the paper's own with Qwen1.5-MoE, ms for its layers.
const MEASURED_TARGETS: [f64; 6] = [60.0, 80.0, 100.0, 120.0, 140.0, 160.0];

const IDS: Ids = Ids {
    fine: "moepic-fig-8a",
    as_measured: Some("moepic-fig-8a-measured"),
    coarse: "moepic-fig-8b",
};

pub fn figure_8(inputs: &Inputs) -> Result<Vec<Table>> {
    each(inputs, IDS, N_FOR_SEARCHES, &Maker { rows, claims })
}

/// A system's times by the parts of memory that it has, each replayed once.
struct Times<'a> {
    bench: &'a Bench<'a>,
    options: SimOptions,
    /// The smallest budget of the search.
    least: u32,
    known: BTreeMap<u32, f64>,
}

impl<'a> Times<'a> {
    /// A system, with what changes do to the baselines.
    fn of(bench: &'a Bench<'a>, system: &str, changes: &[Change]) -> Times<'a> {
        let is_baseline = BASELINES.contains(&system);
        let has = |change: Change| is_baseline && changes.contains(&change);
        let policy = match (has(EQUAL_SHARES), system) {
            (true, "mixtral-offloading") => "predictor=next-layer,eviction=lru,split=1",
            (true, "moe-infinity") => "predictor=eamc,eviction=request-eam,split=1",
            _ => system,
        };
        Times::new(bench, policy, if has(WHOLE) { 1 } else { N_GRANULES })
    }

    fn new(bench: &'a Bench<'a>, policy: &str, n_granules: usize) -> Times<'a> {
        let options = bench.options(policy, n_granules);
        let routing = bench.routing();
        let needs = options.geometry.needs(routing.n_experts(), routing.k());
        let minimum = needs.minimum_bytes() as f64 / needs.all_bytes() as f64;
        let least = LEAST.max((minimum * f64::from(PARTS)).ceil() as u32);
        Times { bench, options, least, known: BTreeMap::new() }
    }

    /// ms a token
    fn at(&mut self, parts: u32) -> Result<f64> {
        if let Some(ms) = self.known.get(&parts) {
            return Ok(*ms);
        }
        let share = f64::from(parts) / f64::from(PARTS);
        let options = SimOptions { budget: Budget::Share(share), ..self.options.clone() };
        let tiers = Tiers::of(&self.bench.routing(), &options)?;
        let ms = tpot(&self.bench.run(&options, tiers)?);
        self.known.insert(parts, ms);
        Ok(ms)
    }

    /// The least memory that meets the target, taken that more memory is never slower.
    fn memory(&mut self, target: f64) -> Result<u32> {
        let (mut low, mut high) = (self.least, PARTS);
        while low < high {
            let middle = (low + high) / 2;
            if self.at(middle)? <= target {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        Ok(high)
    }
}

fn rows(id: &'static str, bench: &Bench, changes: &[Change]) -> Result<Table> {
    let mut systems = SYSTEMS.map(|system| Times::of(bench, system, changes));
    let full = systems[0].at(PARTS)?;
    let least = systems[0].least;
    let slow = systems[0].at(least)?;
    let targets = targets(bench, full, slow);
    let geometry = systems[0].options.geometry;
    let gb = (bench.n_experts() * geometry.expert_bytes) as f64 / 1e9;
    let (mut rows, mut parts_of_all) = (Vec::new(), Vec::new());
    // No claim is about the last system, which takes longest.
    let n_systems = if changes.is_empty() { SYSTEMS.len() } else { SYSTEMS.len() - 1 };
    for (system, times) in SYSTEMS.iter().zip(&mut systems).take(n_systems) {
        let parts: Result<Vec<u32>> = targets.iter().map(|ms| times.memory(*ms)).collect();
        let shares: Vec<f64> = parts?.iter().map(|n| f64::from(*n) / f64::from(PARTS)).collect();
        rows.push(Row::numbers(*system, 2, shares.iter().map(|share| share * gb)));
        let percent = |share: &f64| Cell::Text(format!("{:.0} %", 100.0 * share));
        parts_of_all.push(Row::new(share_of(system), shares.iter().map(percent)));
    }
    rows.extend(parts_of_all);
    Ok(Table {
        id,
        title: format!("MoEpic, Figure 8: memory for a target TPOT, {}", bench.name()),
        setting: format!(
            "Memory for experts, GB, that meets a time per output token, ms: {}. Searched in \
             steps of 1/{PARTS} of the {gb:.1} GB of all experts, with which a token takes \
             {full:.1} ms; with {:.0} % of it, mixtral-offloading takes {slow:.1} ms. Algorithm 1 \
             plans every {TAU} tokens.",
            bench.describe(),
            100.0 * f64::from(least) / f64::from(PARTS)
        ),
        columns: columns("system", targets.iter().map(|ms| format!("{ms:.1} ms"))),
        rows,
        paper: Some(paper()),
        claims: Vec::new(),
        plot: Some(Axes { x: "target TPOT, ms".into(), y: "memory for experts, GB".into() }),
    })
}

fn targets(bench: &Bench, full: f64, slow: f64) -> Vec<f64> {
    if bench.as_measured {
        let layers = bench.n_moe_layers() as f64 / N_LAYERS;
        return MEASURED_TARGETS.map(|ms| ms * layers).into();
    }
    let between = TARGETS.map(|part| full + part * (slow - full));
    [ALMOST_FULL * full].into_iter().chain(between).collect()
}

fn share_of(system: &str) -> String {
    format!("{system}, of all experts")
}

fn paper() -> Paper {
    let numbers = |values: [f64; 4]| values.map(|gb| Cell::Number(gb, 2));
    Paper {
        columns: columns(
            "target TPOT",
            ["MoEpic", "Mixtral-offloading", "AdapMoE", "MoE-Infinity"],
        ),
        rows: vec![
            Row::new("140 ms, GB", numbers([5.98, 11.97, 10.42, 9.56])),
            Row::new(
                "60 ms, GB",
                [Cell::Number(12.38, 2), Cell::Missing, Cell::Missing, Cell::Missing],
            ),
        ],
        setting: "Qwen1.5-MoE, all memory of the device, not of experts alone; with the whole \
                  model, 26.67 GB, a token takes 57 ms. Targets were 80 to 160 ms, and 100 to 220 \
                  ms for Mixtral-8x7B."
            .into(),
    }
}

const EQUAL_SHARES: Change = Change::Own("with the baselines' memory divided equally among layers");
const WHOLE: Change = Change::Own("with baselines that compute an expert when all of it is there");

/// The most that is saved of a baseline's memory, in percent, by the target.
fn most_saved(table: &Table) -> [f64; 2] {
    let moepic = table.values(MOEPIC);
    BASELINES.map(|system| {
        let theirs = table.values(system);
        let saved = theirs.iter().zip(&moepic).map(|(theirs, ours)| 1.0 - ours / theirs);
        100.0 * saved.fold(f64::NEG_INFINITY, f64::max)
    })
}

fn saves(table: &Table) -> Finding {
    let [first, second] = most_saved(table);
    let figures =
        format!("at most {first:.0} % of {}'s, {second:.0} % of {}'s", BASELINES[0], BASELINES[1]);
    Finding::one(first.min(second) - 37.0, figures)
}

fn least_memory(table: &Table) -> Finding {
    let [first, second] = BASELINES.map(|system| table.compare(system, MOEPIC, 0.0));
    first.and(second)
}

fn half(table: &Table) -> Finding {
    let cell = &table.row(&share_of(MOEPIC)).cells[0];
    let percent = match cell {
        Cell::Text(text) => text.trim_end_matches(" %").parse().unwrap_or(f64::NAN),
        _ => f64::NAN,
    };
    Finding::one(55.0 - percent, format!("{cell} of all experts"))
}

const ARRIVING: &str = "the baselines are on an engine that computes granules as they arrive, \
                        which in the paper MoEpic alone does";
const COMPETE: &str =
    "the layers of a baseline compete for memory, and those of MoEpic have equal shares";
const LITTLE: &str = "Algorithm 1 has the statistics of few tokens";

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let exact = Change::Routing(Alteration::Exact);
    let least = check("MoEpic needs the least memory for every target", table, runs, least_memory)
        .unless(ARRIVING, &[WHOLE])?
        .unless(COMPETE, &[EQUAL_SHARES])?
        .unless(LITTLE, &[TWICE])?
        .unless("all of these hold", &[WHOLE, EQUAL_SHARES, TWICE])?;
    let saved = "For some target it saves 37 % or more of each baseline's memory";
    let saved = check(saved, table, runs, saves)
        .unless(ARRIVING, &[WHOLE])?
        .unless(COMPETE, &[EQUAL_SHARES])?
        .unless("both hold", &[WHOLE, EQUAL_SHARES])?
        .unless(
            "both hold, and Algorithm 1 has the statistics of few tokens",
            &[WHOLE, EQUAL_SHARES, TWICE],
        )?;
    let half_text = "Half of all memory, 55 % by our reading, comes within 5.3 % of the time with \
                     everything in memory";
    let half = check(half_text, table, runs, half)
        .unless("the next layer's experts are guessed", &[exact])?
        .unless("a token's loads take longer than 5.3 % of its time", &[Change::Link(16.0)])?
        .unless("both hold", &[exact, Change::Link(16.0)])?;
    Ok(vec![least.done(), saved.done(), half.done()])
}
