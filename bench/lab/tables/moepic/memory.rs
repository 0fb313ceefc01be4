//! Figure 8: memory that a time per output token takes.

use super::super::{Axes, Cell, Claim, Inputs, Paper, Row, Table, columns};
use super::bench::{Bench, N_LAYERS, TAU, tpot};
use super::{EVERY_FOR_SEARCHES, Ids, each};
use moeba::Result;
use moeba::trace::{Budget, Routing, SimOptions, Tiers};
use std::collections::BTreeMap;

const SYSTEMS: [&str; 4] = ["mixtral-offloading", "moe-infinity", "moepic", "auto"];
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
    each(inputs, IDS, EVERY_FOR_SEARCHES, table)
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
    fn new(bench: &'a Bench<'a>, policy: &str) -> Times<'a> {
        let options = bench.options(policy, N_GRANULES);
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

fn table(id: &'static str, bench: &Bench) -> Result<Table> {
    let mut systems = SYSTEMS.map(|system| Times::new(bench, system));
    let full = systems[0].at(PARTS)?;
    let least = systems[0].least;
    let slow = systems[0].at(least)?;
    let targets = targets(bench, full, slow);
    let geometry = systems[0].options.geometry;
    let gb = (bench.n_experts() * geometry.expert_bytes) as f64 / 1e9;
    let (mut rows, mut parts_of_all) = (Vec::new(), Vec::new());
    for (system, times) in SYSTEMS.iter().zip(&mut systems) {
        let parts: Result<Vec<u32>> = targets.iter().map(|ms| times.memory(*ms)).collect();
        let shares: Vec<f64> = parts?.iter().map(|n| f64::from(*n) / f64::from(PARTS)).collect();
        rows.push(Row::numbers(*system, 2, shares.iter().map(|share| share * gb)));
        let percent = |share: &f64| Cell::Text(format!("{:.0} %", 100.0 * share));
        parts_of_all.push(Row::new(share_of(system), shares.iter().map(percent)));
    }
    rows.extend(parts_of_all);
    let mut table = Table {
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
    };
    table.claims = claims(&table, gb);
    Ok(table)
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

fn claims(table: &Table, gb: f64) -> Vec<Claim> {
    let moepic = table.values(MOEPIC);
    let saved = |system: &str| {
        let theirs = table.values(system);
        let saved = theirs.iter().zip(&moepic).map(|(theirs, ours)| 1.0 - ours / theirs);
        100.0 * saved.fold(f64::NEG_INFINITY, f64::max)
    };
    let most = BASELINES.map(saved);
    vec![
        Claim::new(
            "MoEpic needs the least memory for every target",
            BASELINES.iter().all(|system| table.at_least(system, MOEPIC, 0.0)),
            "equal shares and tops are worth nothing where nearly everything fits, and there a \
             system whose layers compete for memory needs as little or less",
        ),
        Claim::new(
            "For some target it saves 37 % or more of each baseline's memory",
            most.iter().all(|saved| *saved >= 37.0),
            format!(
                "it saves at most {:.0} % of {}'s and {:.0} % of {}'s. They are on the same engine \
                 here: each computes an expert's granules as they arrive, which in the paper is \
                 MoEpic's alone, and their caches are not divided between layers",
                most[0], BASELINES[0], most[1], BASELINES[1]
            ),
        ),
        Claim::new(
            "About half of all memory comes within 5.3 % of the time with everything in memory",
            moepic[0] <= 0.55 * gb,
            "with half of the experts a token still misses some in most layers, and next-layer \
             prefetch has one layer's computation to bring them; 5.3 % of a token's computation is \
             time for few loads",
        ),
    ]
}
