//! Figure 12: throughput by batch size.

use super::bench::{
    Bench, DEVICES, SCHEDULERS, by_size, needed_share, on, throughput, with_claims,
};
use crate::hybrid::{HybridOptions, Keep, Scheduler};
use crate::tables::{
    Alteration, Axes, Cell, Change, Claim, Compared, Finding, Inputs, Paper, Row, Runs, Source,
    Table, check, columns,
};
use moeba::Result;

pub fn figure_12(inputs: &Inputs, source: Source) -> Result<Table> {
    with_claims(inputs, source, &rows, &claims)
}

fn rows(bench: &Bench, changes: &[Change]) -> Table {
    let (mut rows, mut greedy) = (Vec::new(), Vec::new());
    for device in DEVICES {
        for (name, scheduler) in SCHEDULERS {
            let mut options = HybridOptions { scheduler, ..bench.prescope(device) };
            if name == HYBRIMOE && changes.contains(&DYNAMIC) {
                options.keep = Keep::Lru;
            }
            let reports = match scheduler {
                Scheduler::PreSched => bench.run(&options),
                Scheduler::Greedy(_) | Scheduler::Static => bench.run_by_gate(&options),
            };
            rows.push(Row::new(on(name, device), reports.iter().map(throughput)));
            if name == HYBRIMOE {
                greedy.extend(reports.into_iter().flatten());
            }
        }
    }
    let fine = bench.is_fine();
    Table {
        id: if fine { "prescope-fig-12-fine" } else { "prescope-fig-12-coarse" },
        title: format!("PreScope, Figure 12: throughput, {} sizes", bench.model()),
        setting: format!(
            "{} Of HybriMoE's prefetches {:.0} % are needed.",
            bench.setting("Tokens generated in a second, prompts included in the time,"),
            100.0 * needed_share(&greedy),
        ),
        columns: by_size("who schedules"),
        rows,
        paper: Some(paper(fine)),
        plot: Some(Axes { x: "batch".into(), y: "tokens/s".into() }),
        ..Table::default()
    }
}

const HYBRIMOE: &str = "HybriMoE";
const DYNAMIC: Change =
    Change::Own("with HybriMoE's own cache of recently used experts, not the hot experts' table,");

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

/// PreScope against a rival with every batch.
fn faster(table: &Table, rival: &str) -> Finding {
    let of_device = |device| {
        let sizes = table.columns[1..].iter().map(move |size| format!("batch {size}, {device}"));
        gains(table, rival, device).into_iter().zip(sizes)
    };
    let all = DEVICES.into_iter().flat_map(of_device);
    Finding::strict(
        all.map(|(gain, at)| Compared { margin: gain, figures: format!("{gain:+.1} % of {at}") }),
    )
}

/// The last figure that there is.
fn last(gains: &[f64]) -> f64 {
    gains.iter().copied().rfind(|gain| gain.is_finite()).unwrap_or(f64::NAN)
}

fn wider_link(table: &Table) -> Finding {
    let [fast, slow] = DEVICES.map(|device| last(&gains(table, "Fiddler", device)));
    Finding::strict([Compared {
        margin: fast - slow,
        figures: format!("{fast:+.1} % on the A100, {slow:+.1} % on the V100"),
    }])
}

fn grows(table: &Table) -> Finding {
    let gains = gains(table, "Fiddler", DEVICES[0]);
    let (first, last) = (gains[0], last(&gains));
    let figures = format!("{first:+.1} % with the smallest, {last:+.1} % with the largest");
    Finding::strict([Compared { margin: last - first, figures }])
}

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let [exact, wrong] = [Alteration::Exact, Alteration::Wrong].map(Change::Routing);
    let all = |rival: &str| span(&DEVICES.map(|device| gains(table, rival, device)).concat());
    let hybrimoe = format!("PreScope is faster than HybriMoE with every batch ({})", all(HYBRIMOE));
    let hybrimoe = check(hybrimoe, table, runs, |table| faster(table, HYBRIMOE))
        .unless("HybriMoE has PreScope's hot experts here", &[DYNAMIC])?
        .unless("a prefetch delays an upload little", &[Change::Link(0.25)])?
        .unless("predictions are good, so that asking saves little", &[wrong])?
        .unless("predictions are not good enough", &[exact])?
        .unless("the first two hold", &[DYNAMIC, Change::Link(0.25)])?;
    let fiddler = format!("PreScope is faster than Fiddler with every batch ({})", all("Fiddler"));
    let fiddler = check(fiddler, table, runs, |table| faster(table, "Fiddler"))
        .unless("wrong prefetches are in the way", &[exact])?
        .unless("the link is slow", &[Change::Link(4.0)])?;
    let link = "With the largest batch the lead over Fiddler is larger on the A100, whose link is \
                twice as fast";
    let link = check(link, table, runs, wider_link)
        .unless("the slower link carries all that is worth it", &[Change::Link(0.25)])?;
    let batch = "The lead over Fiddler on the A100 grows with the batch";
    let batch = check(batch, table, runs, grows)
        .unless("the CPU keeps up", &[Change::Compute(4.0)])?
        .unless("the link is slow", &[Change::Link(4.0)])?;
    Ok(vec![hybrimoe.done(), fiddler.done(), link.done(), batch.done()])
}
