//! Figure 12: time per output token by the memory that experts may have.

use super::split::{Split, profile};
use super::{DEVICE, N_WARM_UP, learned};
use crate::tables::{Axes, Cell, Claim, Inputs, Paper, Row, Source, Table, columns};
use moeba::Result;
use moeba::trace::Ordered;
use moeba::trace::{SimOptions, simulate};

/// Shares of all experts' memory; the paper goes from 6 to 96 GB, of which Mixtral's take 90.
const SHARES: [f64; 4] = [0.1, 0.25, 0.5, 0.75];

const FINEMOE: &str = "finemoe";
/// The paper's, and what the text says that FineMoE saves at 6 GB.
const BASELINES: [(&str, f64); 3] =
    [("deepspeed", 0.36), ("mixtral-offloading", 0.25), ("moe-infinity", 0.29)];
/// Not the paper's: no prefetching at all.
const REFERENCE: &str = "on-demand";

const N_NEW: usize = 24;

pub fn figure_12(inputs: &Inputs) -> Result<Vec<Table>> {
    let mut tables = vec![of_source("finemoe-fig-12-fine", &inputs.fine)?];
    if let Some(coarse) = &inputs.coarse {
        tables.push(of_source("finemoe-fig-12-coarse", coarse)?);
    }
    Ok(tables)
}

fn of_source(id: &'static str, source: &Source) -> Result<Table> {
    let split = Split::of(source.trace).at_most(usize::MAX, N_WARM_UP + N_NEW);
    let routing = source.routing();
    let profile = profile(&routing, &split.known);
    let new = Ordered { routing: &routing, order: split.new.clone() };
    let names = BASELINES.iter().map(|(name, _)| *name).chain([FINEMOE, REFERENCE]);
    let mut rows = Vec::new();
    for name in names {
        let mut times = Vec::new();
        for share in SHARES {
            let options = SimOptions {
                profile: profile.clone(),
                n_warm_up: N_WARM_UP,
                ..source.options(DEVICE, name, share)
            };
            times.push(simulate(&new, &options)?.tpot.mean / 1e6);
        }
        rows.push(Row::numbers(name, 1, times));
    }
    let mut table = Table {
        id,
        title: format!(
            "FineMoE, Figure 12: time per output token by expert cache limit, {}",
            source.stands_for
        ),
        columns: columns("policy", SHARES.map(|share| format!("{:.0} %", 100.0 * share))),
        rows,
        paper: Some(paper()),
        plot: Some(Axes { x: "memory, % of all experts'".into(), y: "TPOT, ms".into() }),
        ..Table::default()
    };
    let saved = BASELINES.map(|(name, _)| format!("{:.0} %", 100.0 * saved(&table, name)[0]));
    table.setting = format!(
        "{}; {}. Mean time of a decode step, ms. \
         deepspeed prefetches all of the next layer's experts, which the paper's did not. At the \
         least memory FineMoE takes {} less than {}.",
        source.describe(DEVICE),
        learned(&split),
        saved.join(", "),
        BASELINES.map(|(name, _)| name).join(", "),
    );
    table.claims = claims(&table);
    Ok(table)
}

/// Which part of the baseline's time FineMoE saves, by limit.
fn saved(table: &Table, baseline: &str) -> Vec<f64> {
    let pairs = table.values(baseline).into_iter().zip(table.values(FINEMOE));
    pairs.map(|(other, finemoe)| 1.0 - finemoe / other).collect()
}

fn paper() -> Paper {
    Paper {
        columns: columns("baseline", ["FineMoE saves at 6 GB"]),
        rows: BASELINES
            .iter()
            .map(|(name, saved)| Row::new(*name, [Cell::Share(*saved)]))
            .collect(),
        setting: "six RTX 3090, mean of Mixtral-8×7B, Qwen1.5-MoE and Phi-3.5-MoE; a plot, of \
                  which the text states"
            .into(),
    }
}

fn claims(table: &Table) -> Vec<Claim> {
    let best = BASELINES.iter().all(|(name, _)| table.at_least(name, FINEMOE, 0.05));
    let worst = [BASELINES[1].0, BASELINES[2].0, FINEMOE];
    let worst = worst.iter().all(|name| table.at_least(BASELINES[0].0, name, 0.05));
    let gaps: Vec<f64> = (0..SHARES.len())
        .map(|at| {
            let times = || table.rows[..=BASELINES.len()].iter().map(move |row| &row.cells[at]);
            let times = || times().filter_map(Cell::value);
            times().fold(f64::MIN, f64::max) - times().fold(f64::MAX, f64::min)
        })
        .collect();
    let least = BASELINES.iter().all(|(name, paper)| saved(table, name)[0] >= paper / 2.0);
    vec![
        Claim::new(
            "FineMoE takes the least time at every limit",
            best,
            "one expert takes longer to load than a layer to compute, so that what prefetching can \
             hide is little and what is kept decides; p · freq keeps less of use than the \
             evictions it is compared with where hardly a layer's experts have room",
        ),
        Claim::new(
            "DeepSpeed takes the longest at every limit",
            worst,
            "what it asks for is cancelled when the layer is reached and costs little, and LRU \
             keeps no less of use than MoE-Infinity's eviction where more has room",
        ),
        Claim::new(
            "The gap between the policies is narrower at the highest limit than at the lowest",
            gaps[gaps.len() - 1] < gaps[0],
            "at the lowest all wait for nearly every expert, whatever they do",
        ),
        Claim::new(
            "At the lowest limit FineMoE saves at least half of what it saves in the paper",
            least,
            "loads bound all policies alike here; the paper's baselines are implementations, with \
             delays of their own (they predict and prefetch synchronously, §4.5), and ours differ \
             in what they predict and drop alone",
        ),
    ]
}
