//! Figure 15: what PreScope loses with each of its parts.

use super::accuracy::gate_is_better;
use super::bench::{Bench, DEVICES, SIZES, by_size, on, resident_share, with_claims};
use crate::hybrid::{HybridReport, Part};
use crate::tables::{
    Alteration, Axes, Cell, Change, Claim, Compared, Finding, Inputs, Paper, Row, Runs, Source,
    Table, check, columns,
};
use moeba::Result;

/// As the rows name them.
const PARTS: [(&str, Part); 3] = [
    ("hot expert table", Part::HotTable),
    ("PreSched", Part::PreSched),
    ("LLaPor", Part::Predictor),
];

/// A row of its own: it depends on a measured figure.
const ASYNC_IO: &str = "AsyncIO";

/// A row of its own where there are networks: LLaPor's place taken by the next layers' routers.
const GATE: &str = "LLaPor, but with the gate";

/// Seed for the experts that are kept instead of the hot ones.
const SEED: u64 = 1;

/// A row of its own: of what is needed, what is kept, with the table and without.
const KEPT: &str = "kept of what is needed";
const BY_CHANCE: &str = "kept by chance";

pub fn figure_15(inputs: &Inputs, source: Source) -> Result<Table> {
    let slowdown = inputs.sync_slowdown;
    let rows = |bench: &Bench, _: &[Change]| rows(bench, slowdown);
    with_claims(inputs, source, &rows, &|table, runs| claims(table, inputs, runs))
}

/// `sync_slowdown`: how many times as long transfers take without AsyncIO, if it was measured.
fn rows(bench: &Bench, sync_slowdown: Option<f64>) -> Table {
    let mut rows = Vec::new();
    let mut kept = Vec::new();
    for device in DEVICES {
        let whole = bench.prescope(device);
        let full = bench.run(&whole);
        for (name, part) in PARTS {
            let without = bench.run(&whole.clone().without(part, SEED));
            if part == Part::HotTable && device == DEVICES[0] {
                let share = |report: &Option<HybridReport>| {
                    report
                        .as_ref()
                        .map_or(Cell::Missing, |report| Cell::Share(resident_share(report)))
                };
                kept.push(Row::new(KEPT, full.iter().map(share)));
                kept.push(Row::new(BY_CHANCE, without.iter().map(share)));
            }
            rows.push(losses(on(name, device), &full, &without));
        }
        rows.push(match sync_slowdown {
            Some(slowdown) => {
                let without = bench.run(&whole.clone().without(Part::AsyncIo(slowdown), SEED));
                losses(on(ASYNC_IO, device), &full, &without)
            }
            None => Row::new(on(ASYNC_IO, device), SIZES.map(|_| not_measured())),
        });
        if bench.has_networks() {
            rows.push(losses(on(GATE, device), &full, &bench.run_by_gate(&whole)));
        }
    }
    rows.extend(kept);
    let fine = bench.is_fine();
    Table {
        id: if fine { "prescope-fig-15-fine" } else { "prescope-fig-15-coarse" },
        title: format!("PreScope, Figure 15: without each part, {} sizes", bench.model()),
        setting: format!(
            "{} The last two rows are parts of the experts that a layer needs. In the parts' \
             places: random experts kept, one expert of the next layer prefetched \
             and uploads layer by layer, no prediction, transfers that computation waits for{}.",
            bench.setting("By how much throughput falls without a part,"),
            sync_slowdown.map_or(String::new(), |slowdown| format!(
                " and that take {slowdown:.2} times as long, as `moeba doctor` has measured"
            )),
        ),
        columns: by_size("without"),
        rows,
        paper: Some(paper()),
        plot: Some(Axes { x: "batch".into(), y: "throughput lost, %".into() }),
        ..Table::default()
    }
}

fn losses(name: String, full: &[Option<HybridReport>], without: &[Option<HybridReport>]) -> Row {
    Row::new(name, full.iter().zip(without).map(|(full, without)| loss(full, without)))
}

fn not_measured() -> Cell {
    Cell::Text("not measured".into())
}

/// Loss of throughput, as a share.
fn loss(full: &Option<HybridReport>, without: &Option<HybridReport>) -> Cell {
    match (full, without) {
        (Some(full), Some(without)) => {
            Cell::Share(1.0 - without.tokens_per_second() / full.tokens_per_second())
        }
        _ => Cell::Missing,
    }
}

/// 6.3, what its text says.
fn paper() -> Paper {
    let row = |name: &str, lost: f64, setting: &str| {
        Row::new(name, [Cell::Share(lost), Cell::Text(setting.into())])
    };
    Paper {
        columns: columns("without", ["throughput lost", "of"]),
        rows: vec![
            row("hot expert table", 0.222, "DeepSeek-V2-Lite, V100, batch 4"),
            row("PreSched", 0.541, "Mixtral-8x7B, A100, batch 64"),
            row("LLaPor", 0.202, "Moonlight-16B-A3B, batch 32"),
            row(ASYNC_IO, 0.493, "Mixtral-8x7B, A100, batch 64"),
        ],
        setting: "512 tokens in and 64 out.".into(),
    }
}

/// The first and the last that there are.
fn ends(values: &[f64]) -> (f64, f64) {
    let mut there = values.iter().copied().filter(|value| value.is_finite());
    let first = there.next().unwrap_or(0.0);
    (first, there.next_back().unwrap_or(first))
}

/// Losses without a part, with where each is.
fn losses_of(table: &Table, part: &str) -> Vec<Compared> {
    let of_device = |device: &'static str| {
        let cells = table.row(&on(part, device)).cells.iter().zip(&table.columns[1..]);
        cells.map(move |(cell, size)| Compared {
            margin: cell.value().unwrap_or(f64::NAN),
            figures: format!("{cell} without {part}, batch {size}, {device}"),
        })
    };
    DEVICES.into_iter().flat_map(of_device).collect()
}

fn in_the_way(table: &Table) -> Finding {
    Finding::of(PARTS.iter().flat_map(|(name, _)| losses_of(table, name)))
}

/// The most that each part is worth.
fn worth(table: &Table) -> Finding {
    Finding::of(PARTS.iter().map(|(name, _)| {
        let losses = losses_of(table, name).into_iter().map(|one| one.margin);
        let most = losses.filter(|loss| loss.is_finite()).fold(f64::MIN, f64::max);
        Compared { margin: most - 20.0, figures: format!("{most:.1} % of {name}") }
    }))
}

fn of_the_hits(table: &Table) -> Finding {
    let (hot, random) = (table.values(KEPT)[0], table.values(BY_CHANCE)[0]);
    let figures = format!("{hot:.1} % of what is needed is there, of random experts {random:.1} %");
    Finding::one(0.7 * hot - random, figures)
}

/// A part's loss is larger with the first batch than with the last, or the other way round.
fn most_in(table: &Table, part: &str, small: bool) -> Finding {
    let (first, last) = ends(&table.values(&on(part, DEVICES[0])));
    let margin = if small { first - last } else { last - first };
    let figures = format!("{first:.1} % of the smallest batch, {last:.1} % of the largest, A100");
    Finding::strict([Compared { margin, figures }])
}

fn claims(table: &Table, inputs: &Inputs, runs: &Runs) -> Result<Vec<Claim>> {
    let [skew, exact, wrong] =
        [Alteration::Skew, Alteration::Exact, Alteration::Wrong].map(Change::Routing);
    let slow = Change::Link(0.25);
    let even = "experts are used more evenly than the paper's";
    let way = check("No part is in the way", table, runs, in_the_way)
        .unless("the link has time for a prefetch in every layer", &[slow])?
        .unless("predictions are not exact", &[exact])?
        .unless("both hold", &[slow, exact])?;
    let each = check("Each part is worth 20 % or more somewhere", table, runs, worth)
        .unless(even, &[skew])?
        .unless("a wrong or late prefetch delays little", &[slow])?
        .unless("both hold", &[skew, slow])?
        .unless("both hold, and predictions are not exact", &[skew, slow, exact])?
        .unless("the link has no time for more than uploads", &[Change::Link(4.0)])?
        .unless("predictions are good whoever schedules by them", &[wrong])?;
    let hits = "In small batches the hot expert table makes 30 % or more of the hits";
    let hits = check(hits, table, runs, of_the_hits).unless(even, &[skew])?;
    let small = "The hot expert table matters most in small batches";
    let small = check(small, table, runs, |t| most_in(t, "hot expert table", true))
        .unless(even, &[skew])?
        .unless(
            "the kept experts spare the CPU tokens in large batches",
            &[Change::Compute(0.25)],
        )?;
    let mut claims = vec![way.done(), each.done(), hits.done(), small.done()];
    if inputs.sync_slowdown.is_some() {
        let text = "AsyncIO matters most in large batches";
        let large = check(text, table, runs, |table| most_in(table, ASYNC_IO, false));
        claims.push(large.unless("small batches wait for transfers as well", &[slow])?.done());
    }
    if table.rows.iter().any(|row| row.name.starts_with(GATE)) {
        let text = "With the gate in LLaPor's place less is done";
        let gate = check(text, table, runs, |table| Finding::strict(losses_of(table, GATE)));
        let gate = match &inputs.llapor {
            Some(report) => gate.shown(
                "the next router is the more accurate of the two",
                "in the mean over the layers of Figure 16",
                || Ok(gate_is_better(report)),
            )?,
            None => gate,
        };
        claims.push(gate.done());
    }
    Ok(claims)
}
