//! Figure 12: throughput by batch size.

use super::bench::{Bench, DEVICES, SCHEDULERS, by_size, needed_share, on, throughput};
use crate::hybrid::{HybridOptions, Scheduler};
use crate::tables::{Axes, Cell, Claim, Paper, Row, Table, columns};

pub fn figure_12(bench: &Bench) -> Table {
    let (mut rows, mut greedy) = (Vec::new(), Vec::new());
    for device in DEVICES {
        for (name, scheduler) in SCHEDULERS {
            let options = HybridOptions { scheduler, ..bench.prescope(device) };
            let reports = match scheduler {
                Scheduler::PreSched => bench.run(&options),
                Scheduler::Greedy(_) | Scheduler::Static => bench.run_by_gate(&options),
            };
            rows.push(Row::new(on(name, device), reports.iter().map(throughput)));
            if name == "HybriMoE" {
                greedy.extend(reports.into_iter().flatten());
            }
        }
    }
    let fine = bench.is_fine();
    let mut table = Table {
        id: if fine { "prescope-fig-12-fine" } else { "prescope-fig-12-coarse" },
        title: format!("PreScope, Figure 12: throughput, {} sizes", bench.model()),
        setting: bench.setting("Tokens generated in a second, prompts included in the time,"),
        columns: by_size("who schedules"),
        rows,
        paper: Some(paper(fine)),
        plot: Some(Axes { x: "batch".into(), y: "tokens/s".into() }),
        ..Table::default()
    };
    table.claims = claims(&table, needed_share(&greedy));
    table
}

/// 6.2.2, what the text says of the A100 with batches of 64.
fn paper(fine: bool) -> Paper {
    let cells = if fine {
        [Cell::Number(37.4, 1), Cell::Share(0.587), Cell::Share(0.71)]
    } else {
        [Cell::Missing, Cell::Share(0.32), Cell::Share(0.88)]
    };
    let names = ["PreScope, tokens/s", "faster than HybriMoE by", "faster than Fiddler by"];
    let model = if fine { "DeepSeek-V2-Lite" } else { "Mixtral-8x7B" };
    Paper {
        columns: columns("model", names),
        rows: vec![Row::new(model, cells)],
        setting: "A100, batches of 64, 512 tokens in and 64 out.".into(),
    }
}

/// By how much PreScope is faster, in percent, by size.
fn gains(table: &Table, rival: &str, device: &str) -> Vec<f64> {
    let ours = table.values(&on("PreScope", device));
    let theirs = table.values(&on(rival, device));
    ours.iter().zip(theirs).map(|(a, b)| 100.0 * (a / b - 1.0)).collect()
}

/// `a to b %`, of numbers there are.
fn span(values: &[f64]) -> String {
    let there = || values.iter().copied().filter(|value| value.is_finite());
    let (low, high) = (there().fold(f64::MAX, f64::min), there().fold(f64::MIN, f64::max));
    format!("{low:+.1} to {high:+.1} %")
}

/// `needed`: the part of HybriMoE's prefetches that were.
fn claims(table: &Table, needed: f64) -> Vec<Claim> {
    let [a100, v100] = DEVICES;
    let mut claims = Vec::new();
    for (rival, otherwise) in [
        (
            "HybriMoE",
            format!(
                "both balance the link and the CPU alike; of what HybriMoE prefetches without \
                 asking {:.0} % is needed, so that asking saves little",
                100.0 * needed
            ),
        ),
        ("Fiddler", "a prefetch that was wrong is in the way of an upload that is needed".into()),
    ] {
        let all = DEVICES.map(|device| gains(table, rival, device)).concat();
        claims.push(Claim::new(
            format!("PreScope is faster than {rival} with every batch ({})", span(&all)),
            all.iter().all(|gain| gain.is_nan() || *gain > 0.0),
            otherwise,
        ));
    }
    let [fast, slow] = [a100, v100].map(|device| gains(table, "Fiddler", device));
    let last = |gains: &[f64]| gains.iter().copied().rfind(|gain| gain.is_finite());
    let (fast_last, slow_last) = (last(&fast).unwrap_or(0.0), last(&slow).unwrap_or(0.0));
    claims.push(Claim::new(
        format!(
            "With the largest batch the lead over Fiddler is larger on the A100, whose link is \
             twice as fast ({fast_last:+.1} %, on the V100 {slow_last:+.1} %)"
        ),
        fast_last > slow_last,
        "the slower link still carries all that is worth it",
    ));
    let first = fast.first().copied().unwrap_or(0.0);
    claims.push(Claim::new(
        format!(
            "The lead over Fiddler on the A100 grows with the batch ({first:+.1} % to \
             {fast_last:+.1} %)"
        ),
        fast_last > first,
        "the CPU keeps up",
    ));
    claims
}
