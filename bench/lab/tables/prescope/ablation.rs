//! Figure 15: what PreScope loses with each of its parts.

use super::bench::{Bench, DEVICES, SIZES, by_size, on, resident_share};
use crate::hybrid::{HybridReport, Part};
use crate::tables::{Axes, Cell, Claim, Paper, Row, Table, columns};

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

/// `sync_slowdown`: how many times as long transfers take without AsyncIO, if it was measured.
pub fn figure_15(bench: &Bench, sync_slowdown: Option<f64>) -> Table {
    let mut rows = Vec::new();
    // Of what is needed, the part that is kept: with the table and without.
    let mut kept = (0.0, 0.0);
    for device in DEVICES {
        let whole = bench.prescope(device);
        let full = bench.run(&whole);
        for (name, part) in PARTS {
            let without = bench.run(&whole.clone().without(part, SEED));
            if let (Part::HotTable, Some(Some(full)), Some(Some(without))) =
                (part, full.first(), without.first())
            {
                kept = (resident_share(full), resident_share(without));
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
    let fine = bench.is_fine();
    let mut table = Table {
        id: if fine { "prescope-fig-15-fine" } else { "prescope-fig-15-coarse" },
        title: format!("PreScope, Figure 15: without each part, {} sizes", bench.model()),
        setting: format!(
            "{} In the parts' places: random experts kept, one expert of the next layer prefetched \
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
    };
    table.claims = claims(&table, kept.0, kept.1);
    table.claims.extend(sync_slowdown.map(|_| async_io_claim(&table)));
    table.claims.extend(bench.has_networks().then(|| networks_claim(&table)));
    table
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

/// The paper's predictor is to be worth more than the next router.
fn networks_claim(table: &Table) -> Claim {
    let all = DEVICES.map(|device| table.values(&on(GATE, device))).concat();
    let there = || all.iter().copied().filter(|loss| loss.is_finite());
    let (least, most) = (there().fold(f64::MAX, f64::min), there().fold(f64::MIN, f64::max));
    Claim::new(
        format!("With the gate in LLaPor's place less is done ({least:+.1} to {most:+.1} %)"),
        least > 0.0,
        "in most layers of this small model the next router is the more accurate of the two \
         (Figure 16), and it tells of the layer after the next as well",
    )
}

/// The first and the last that there are.
fn ends(values: &[f64]) -> (f64, f64) {
    let mut there = values.iter().copied().filter(|value| value.is_finite());
    let first = there.next().unwrap_or(0.0);
    (first, there.next_back().unwrap_or(first))
}

fn claims(table: &Table, hot: f64, random: f64) -> Vec<Claim> {
    let all = |name: &str| DEVICES.map(|device| table.values(&on(name, device))).concat();
    let least = |name: &str| all(name).into_iter().fold(f64::MAX, f64::min);
    let most = |name: &str| all(name).into_iter().fold(f64::MIN, f64::max);
    let lowest = PARTS.map(|(name, _)| least(name)).into_iter().fold(f64::MAX, f64::min);
    let highest = PARTS.map(|(name, _)| format!("{name} {:.1} %", most(name))).join(", ");
    let [a100, _] = DEVICES;
    let (hot_first, hot_last) = ends(&table.values(&on("hot expert table", a100)));
    vec![
        Claim::new(
            format!("No part is in the way: the least that one brings is {lowest:+.1} %"),
            lowest >= 0.0,
            "where one prefetch a layer fits beside the computation, making it always is as good \
             as PreSched's choice",
        ),
        Claim::new(
            format!("Each part is worth 20 % or more somewhere (at most: {highest})"),
            PARTS.iter().all(|(name, _)| most(name) >= 20.0),
            "what one part leaves undone another does: an upload that was not predicted is still \
             an upload, and the CPU takes what the link does not bring",
        ),
        Claim::new(
            format!(
                "In small batches the hot expert table makes 30 % or more of the hits ({:.1} % of \
                 what is needed is there, of random experts {:.1} %)",
                100.0 * hot,
                100.0 * random,
            ),
            random <= 0.7 * hot,
            "experts are used more evenly here: a balanced model's hot experts are not much hotter",
        ),
        Claim::new(
            format!(
                "The hot expert table matters most in small batches ({hot_first:.1} % of batch \
                 {}, {hot_last:.1} % of the largest, A100)",
                table.columns[1],
            ),
            hot_first > hot_last,
            "the kept experts spare the CPU tokens in large batches too",
        ),
    ]
}

/// With the measured slowdown.
fn async_io_claim(table: &Table) -> Claim {
    let [a100, _] = DEVICES;
    let (first, last) = ends(&table.values(&on(ASYNC_IO, a100)));
    Claim::new(
        format!("AsyncIO matters most in large batches ({first:.1} % to {last:.1} %, A100)"),
        last > first,
        "small batches wait for each transfer as well",
    )
}
