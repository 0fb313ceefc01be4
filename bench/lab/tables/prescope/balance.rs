//! Figure 17: how evenly GPU and CPU work, layer by layer.

use super::bench::{Bench, DEVICES, SCHEDULERS, SIZES, with_claims};
use crate::hybrid::{HybridOptions, HybridReport, Scheduler};
use crate::tables::{
    Alteration, Cell, Change, Claim, Compared, Finding, Inputs, Paper, Row, Runs, Source, Table,
    check, columns,
};
use moeba::Result;

const PRESCOPE: &str = "PreScope";
const FIDDLER: &str = "Fiddler";

/// The A100, of which the paper's figure is.
const DEVICE: &str = DEVICES[0];

/// Columns: parts of the layers within so much, and what GPU and CPU take.
const HEADINGS: [&str; 7] = [
    "differ by, median",
    "90 % of layers",
    "most",
    "within one load",
    "GPU, mean",
    "CPU, mean",
    "CPU ÷ GPU",
];
const MEDIAN: usize = 0;
const MOST: usize = 2;
const RATIO: usize = 6;

/// The paper's most difference is that of one load; a row of its own for ours.
const LOAD: &str = "one expert's load";

pub fn figure_17(inputs: &Inputs, source: Source) -> Result<Table> {
    with_claims(inputs, source, &rows, &claims)
}

fn rows(bench: &Bench, _: &[Change]) -> Table {
    let options = bench.prescope(DEVICE);
    let load_ns = options.costs.link.transfer_ns(options.geometry.expert_bytes) as f64;
    let mut size = 0;
    let mut rows: Vec<Row> = Vec::new();
    for (name, scheduler) in SCHEDULERS {
        let options = HybridOptions { scheduler, ..options.clone() };
        let reports = match scheduler {
            Scheduler::PreSched => bench.run(&options),
            Scheduler::Greedy(_) | Scheduler::Static => bench.run_by_gate(&options),
        };
        let largest = reports.iter().zip(SIZES).rfind(|(report, _)| report.is_some());
        let Some((Some(report), of)) = largest else { continue };
        size = of;
        rows.push(Row::new(name, cells(report, load_ns)));
    }
    let ms = Cell::Number(load_ns / 1e6, 2);
    rows.push(Row::new(LOAD, std::iter::once(ms).chain([(); 6].map(|()| Cell::Missing))));
    let fine = bench.is_fine();
    Table {
        id: if fine { "prescope-fig-17-fine" } else { "prescope-fig-17-coarse" },
        title: format!("PreScope, Figure 17: CPU and GPU time of a layer, {} sizes", bench.model()),
        setting: bench.setting(&format!(
            "ms by which GPU, with what it waits for, and CPU differ in a layer of a decode step, \
             batches of {size}, {DEVICE},"
        )),
        columns: columns("who schedules", HEADINGS),
        rows,
        paper: Some(paper()),
        ..Table::default()
    }
}

fn cells(report: &HybridReport, load_ns: f64) -> Vec<Cell> {
    let layers = &report.decode_layers;
    let mut gaps: Vec<f64> = layers.iter().map(|(gpu, cpu)| (gpu - cpu).abs()).collect();
    gaps.sort_by(f64::total_cmp);
    let at = |part: f64| {
        let rank = (part * gaps.len() as f64).ceil() as usize;
        gaps.get(rank.max(1) - 1).map_or(f64::NAN, |ns| ns / 1e6)
    };
    let n = layers.len() as f64;
    let within = gaps.iter().filter(|gap| **gap <= load_ns).count() as f64 / n;
    let gpu = layers.iter().map(|(gpu, _)| gpu).sum::<f64>() / n / 1e6;
    let cpu = layers.iter().map(|(_, cpu)| cpu).sum::<f64>() / n / 1e6;
    let ms = |ms: f64| Cell::Number(ms, 2);
    vec![
        ms(at(0.5)),
        ms(at(0.9)),
        ms(at(1.0)),
        Cell::Share(within),
        ms(gpu),
        ms(cpu),
        ms(cpu / gpu),
    ]
}

fn paper() -> Paper {
    let row =
        |name: &str, median: Cell, most: Cell, ratio: Cell| Row::new(name, [median, most, ratio]);
    let number = |ms| Cell::Number(ms, 1);
    Paper {
        columns: columns("who schedules", ["median", "most", "CPU ÷ GPU"]),
        rows: vec![
            row(PRESCOPE, number(8.0), number(14.0), Cell::Missing),
            row(FIDDLER, Cell::Missing, Cell::Missing, number(1.9)),
        ],
        setting: "Mixtral-8x7B, A100; 14 ms are the load of one expert there.".into(),
    }
}

/// A figure of PreScope's against that of the others.
fn lowest(table: &Table, column: usize) -> Finding {
    let ours = &table.row(PRESCOPE).cells[column];
    let others = table.rows.iter().filter(|row| ![PRESCOPE, LOAD].contains(&row.name.as_str()));
    Finding::of(others.map(|row| {
        let theirs = &row.cells[column];
        Compared {
            margin: theirs.value().zip(ours.value()).map_or(f64::NAN, |(a, b)| a - b),
            figures: format!("{ours} ms, {theirs} of {}", row.name),
        }
    }))
}

fn within_a_load(table: &Table) -> Finding {
    let (most, load) = (table.values(PRESCOPE)[MOST], table.values(LOAD)[0]);
    Finding::one(load - most, format!("{most:.2} ms, a load {load:.2}"))
}

/// Fiddler's CPU has most to do beside its GPU.
fn cpu_bound(table: &Table) -> Finding {
    let rows = table.rows.iter().filter(|row| ![FIDDLER, LOAD].contains(&row.name.as_str()));
    let fiddler = table.values(FIDDLER)[RATIO];
    Finding::of(rows.map(|row| {
        let theirs = row.cells[RATIO].value().unwrap_or(f64::NAN);
        let figures = format!("{fiddler:.2}, {theirs:.2} of {}", row.name);
        Compared { margin: fiddler - theirs, figures }
    }))
}

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let exact = Change::Routing(Alteration::Exact);
    let slow_cpu = "a layer with few missing experts leaves the CPU idle";
    let median = "Half of the layers of PreScope differ least";
    let median = check(median, table, runs, |table| lowest(table, MEDIAN))
        .unless("predictions are not exact", &[exact])?
        .unless("both balance uploads alike, and a prefetch changes little", &[Change::Link(0.25)])?
        .unless(slow_cpu, &[Change::Compute(4.0)])?;
    let most = "PreScope's largest difference is that of one expert's load";
    let most = check(most, table, runs, within_a_load)
        .unless("predictions are not exact", &[exact])?
        .unless("a hot expert on the CPU takes longer than a load", &[Change::Link(0.25)])?
        .unless("the CPU is slow", &[Change::Compute(0.25)])?
        .unless("both hold", &[Change::Link(0.25), Change::Compute(0.25)])?;
    let cpu = "Fiddler's CPU has most to do beside its GPU";
    let cpu =
        check(cpu, table, runs, cpu_bound).unless("the CPU is slow", &[Change::Compute(0.25)])?;
    Ok(vec![median.done(), most.done(), cpu.done()])
}
