//! Caching and prefetching together (7.3): how many of the experts that decode steps use are in
//! the buffer as a whole when they are asked for.

use super::workload::{self, Pace, Workload, cases, policy};
use super::{Inputs, Table};
use crate::future::{Belady, Oracle, future};
use crate::tables::{Claim, Paper, Row, Source, columns};
use moeba::Result;
use moeba::trace::Budget;
use moeba::trace::Ordered;

const STEP: usize = 3;

/// Slots in parts of all experts: the shares that NLLB, Mixtral and Switch had in the paper
/// (52 of 1,536, 39 of 256 and 953 of 1,536), the first as near as two tokens' experts allow, and
/// one between.
const SHARES: [f64; 4] = [0.05, 0.15, 0.3, 0.62];

const STRATEGIES: [(&str, &str); 3] =
    [("LRU", "on-demand"), ("model-tracing", "brainstorm"), ("ours", "moe-infinity")];

/// Table 5: hit rates by slots.
pub fn table_5(inputs: &Inputs) -> Result<Table> {
    let mut rows = Vec::new();
    for (source, pace) in cases(inputs) {
        for share in SHARES {
            rows.push(row(&source, pace, share)?);
        }
    }
    let requests = Workload::mixed(inputs.fine.trace, STEP).describe();
    let mut table = Table {
        id: "moe-infinity-table-5",
        title: "MoE-Infinity, Table 5: buffer hit rate of caching and prefetching together".into(),
        setting: format!(
            "{} Slots are of whole experts and include those for what is on its \
             way. Of the experts that decode steps ask for, the part that is there as a whole. \
             Ideal drops what is used last (Belady) and prefetches what the next layer will use.",
            workload::setting(inputs, &requests),
        ),
        columns: columns("routing and slots", STRATEGIES.map(|s| s.0).into_iter().chain(["ideal"])),
        rows,
        paper: Some(paper()),
        ..Table::default()
    };
    table.claims = claims(&table);
    Ok(table)
}

fn row(source: &Source, pace: Pace, share: f64) -> Result<Row> {
    let header = source.trace.header();
    let n_all: usize = header.layers.iter().map(|layer| layer.n_experts).sum();
    let geometry = source.geometry();
    let expert_bytes = geometry.slot_bytes() * geometry.n_granules;
    // One token's experts and one more are the least that a tier takes.
    let n_slots = ((share * n_all as f64).round() as usize).max(header.k + 1);
    let workload = Workload::mixed(source.trace, STEP);
    let options = |policy| {
        let mut options = pace.options(source, policy, share);
        options.budget = Budget::Bytes((n_slots * expert_bytes) as u64);
        options
    };
    let mut values = Vec::new();
    for (_, name) in STRATEGIES {
        let options = options(name);
        values.push(workload.replay_named(source, &options)?.decode.counters.hit_rate());
    }
    let routing = source.routing();
    let future = future(&Ordered { routing: &routing, order: workload.order.clone() });
    let ideal = workload.replay(source, &options("on-demand"), |_| {
        let oracle = Oracle::new(future.clone(), 1);
        policy(Box::new(Belady::new(future)), Some(Box::new(oracle)))
    })?;
    values.push(ideal.decode.counters.hit_rate());
    let slots = format!("{n_slots} slots ({:.0} %)", 100.0 * n_slots as f64 / n_all as f64);
    Ok(Row::shares(format!("{}, {slots}", pace.name(source)), values))
}

fn paper() -> Paper {
    let rows = [
        ("Switch, 953 slots (62 %)", [0.31, 0.39, 0.52, 0.63]),
        ("NLLB, 52 slots (3 %)", [0.18, 0.25, 0.46, 0.51]),
        ("Arctic, 76 slots (2 %)", [0.09, 0.12, 0.28, 0.32]),
        ("Mixtral, 39 slots (15 %)", [0.02, 0.05, 0.17, 0.21]),
    ];
    Paper {
        columns: columns("model and slots", STRATEGIES.map(|s| s.0).into_iter().chain(["ideal"])),
        rows: rows.map(|(name, values)| Row::shares(name, values)).to_vec(),
        setting: "one of eight A5000; the shares are ours, of 12 MoE layers of 128 experts, 12 of \
                  128, 35 of 128 and 32 of 8."
            .into(),
    }
}

fn claims(table: &Table) -> Vec<Claim> {
    let everywhere = |holds: &dyn Fn(&[f64]) -> bool| {
        table.rows.iter().all(|row| holds(&table.values(&row.name)))
    };
    vec![
        Claim::new(
            "Counts of all requests hit more often than LRU",
            everywhere(&|v| v[1] > v[0]),
            "what was used lately is the better guess of what comes than what was used most by all \
             requests, wherever a token's experts fit into the slots; where they do not, LRU \
             drops each before it comes again, and counts are better.",
        ),
        Claim::new(
            "Request-level traces hit more often than both",
            everywhere(&|v| v[2] > v[0].max(v[1])),
            "where there is next to no time to prefetch, caching alone counts, and a request's \
             own counts hit less often than recent use where a token's experts fit.",
        ),
        Claim::new(
            "They stay within 11 points of the ideal, as the paper's table does",
            everywhere(&|v| v[2] >= v[3] - 11.0),
            "knowing what the next layer uses is worth more here than in the paper, whose \
             ideal hits half or less where slots are few.",
        ),
    ]
}
