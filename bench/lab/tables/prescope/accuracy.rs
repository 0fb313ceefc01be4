//! Figure 16 and Table 3: how well LLaPor predicts.

use super::alike::alike;
use crate::tables::{
    Axes, Cell, Change, Claim, Compared, Finding, Inputs, Paper, Row, Runs, Source, Table, check,
    columns,
};
use moeba::Result;
use moeba::policy::papers::prescope::llapor::Group;
use moeba::train::report::{GATE, LLAPOR, LlaporReport, PREDICTION, STATISTICS, TRAINING};

/// As rows and columns name them.
const NAMES: [(&str, &str); 3] =
    [("LLaPor", LLAPOR), ("gate", GATE), ("most frequent", STATISTICS)];

const MIB: f64 = (1 << 20) as f64;

fn setting(inputs: &Inputs, report: &LlaporReport) -> String {
    let trace = inputs.full.unwrap_or(inputs.fine.trace);
    let n = report.layers().iter().filter_map(|l| report.get(*l, LLAPOR, "samples")).next_back();
    format!(
        "{} decoded tokens of {} that LLaPor was not trained on. The gate is the next router on \
         the present activation; the most frequent are those of the tokens it was trained on.",
        n.unwrap_or(0.0),
        trace.header().model,
    )
}

fn cell(report: &LlaporReport, layer: usize, predictor: &str, measure: &str) -> Cell {
    report.get(layer, predictor, measure).map_or(Cell::Missing, Cell::Share)
}

/// Over all layers that have it.
fn mean(report: &LlaporReport, predictor: &str, measure: &str) -> Option<f64> {
    mean_from(report, 0, predictor, measure)
}

/// Without so many of the first layers.
fn mean_from(report: &LlaporReport, first: usize, predictor: &str, measure: &str) -> Option<f64> {
    let layers = report.layers().into_iter().skip(first);
    let values = layers.filter_map(|l| report.get(l, predictor, measure));
    let (n, sum) = values.fold((0, 0.0), |(n, sum), value| (n + 1, sum + value));
    (n > 0).then(|| sum / f64::from(n))
}

/// Names the cosine of the router's inputs of a layer and of the one before it.
const ALIKE: &str = "cosine of the inputs";

pub fn figure_16(inputs: &Inputs, report: &LlaporReport) -> Result<Table> {
    let make = |changes: &[Change]| Ok(rows_16(inputs, report, changes));
    let mut table = make(&[])?;
    table.claims = accuracy_claims(&table, &Runs::new(&make))?;
    Ok(table)
}

fn rows_16(inputs: &Inputs, report: &LlaporReport, changes: &[Change]) -> Table {
    let mut layers = report.layers();
    if changes.contains(&NO_FIRST) {
        layers.remove(0);
    }
    let k = report.k().unwrap_or(0);
    let measure = format!("top{k}");
    let row = |(name, predictor): (&str, &str)| {
        Row::new(name, layers.iter().map(|layer| cell(report, *layer, predictor, &measure)))
    };
    let mut rows: Vec<Row> = NAMES.map(row).into();
    if let Some(trace) = inputs.full.filter(|trace| trace.header().hidden) {
        rows.push(Row::numbers(ALIKE, 2, layers.iter().map(|layer| alike(trace, *layer))));
    }
    Table {
        id: "prescope-fig-16",
        title: format!("PreScope, Figure 16: accuracy of the top {k} by layer"),
        setting: format!(
            "Of the {k} experts of a token how many are among the {k} predicted, by layer; {} \
             The first layer is predicted from the last one of the token before.",
            setting(inputs, report)
        ),
        columns: columns("predictor", &layers),
        rows,
        paper: Some(Paper {
            columns: columns("predictor", ["accuracy"]),
            rows: vec![
                Row::new("LLaPor", [Cell::Text("80 % or more in every layer".into())]),
                Row::new("gate", [Cell::Text("15 to 68.4 % less".into())]),
            ],
            setting: "DeepSeek-V2-Lite, Mixtral-8x7B, Qwen3-30B-A3B and Moonlight-16B-A3B; \
                      ShareGPT, DPO and LLaVA."
                .into(),
        }),
        plot: Some(Axes { x: "layer".into(), y: format!("top {k}, %") }),
        ..Table::default()
    }
}

const NO_FIRST: Change = Change::Own("with the layers alone that follow another of the same token");

/// The gate's accuracy against LLaPor's, in the mean over layers.
pub fn gate_is_better(report: &LlaporReport) -> Finding {
    let measure = format!("top{}", report.k().unwrap_or(0));
    let [llapor, gate] = [LLAPOR, GATE]
        .map(|predictor| 100.0 * mean(report, predictor, &measure).unwrap_or(f64::NAN));
    Finding::one(gate - llapor, format!("the gate {gate:.1} %, LLaPor {llapor:.1} %"))
}

/// LLaPor above a rival in some layers; one that has no figure is no rival.
fn beside(table: &Table, rival: &str, of: impl Fn(usize) -> bool) -> Finding {
    let margins = table.margins(NAMES[0].0, rival, 0.0).into_iter().enumerate();
    Finding::strict(margins.filter(|(at, _)| of(*at)).map(|(_, one)| one))
}

/// Most of the layers of the input and output groups.
fn most_outer(table: &Table) -> Finding {
    let n = table.columns.len() - 1;
    let outer = beside(table, "gate", |at| Group::of(at, n) == Group::Outer);
    if outer.n == 0 {
        return outer;
    }
    let figures = format!("in {} of {}, at worst {}", outer.n_held, outer.n, outer.figures);
    Finding::strict([Compared { margin: outer.n_held as f64 - outer.n as f64 / 2.0, figures }])
}

/// Whether the gate knows the more of a layer the more alike the inputs are: the correlation over
/// layers of the cosine and of the gate's lead.
fn lead_by_likeness(table: &Table) -> Finding {
    if !table.rows.iter().any(|row| row.name == ALIKE) {
        return Finding::default();
    }
    let [llapor, gate] = [NAMES[0].0, NAMES[1].0].map(|name| table.values(name));
    let leads = gate.iter().zip(llapor).map(|(gate, llapor)| gate - llapor);
    let points: Vec<(f64, f64)> = table.values(ALIKE).into_iter().zip(leads).collect();
    let r = super::alike::correlation(&points);
    Finding::strict([Compared { margin: r - 0.5, figures: format!("their correlation is {r:.2}") }])
}

fn accuracy_claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let above = |table: &Table| {
        let cells = table.row(NAMES[0].0).cells.iter().zip(&table.columns[1..]);
        Finding::of(cells.map(|(cell, layer)| Compared {
            margin: cell.value().unwrap_or(f64::NAN) - 80.0,
            figures: format!("{cell} of layer {layer}"),
        }))
    };
    let likeness = "in this model inputs of neighbouring layers are alike, which the gate gains by";
    let measured = "the gate's lead over LLaPor by the cosine of the inputs, layer by layer:";
    let unknown = "the first layer follows a token that is not known yet";
    let high = check("LLaPor is above 80 % in every layer", table, runs, above)
        .unless(unknown, &[NO_FIRST])?;
    let text = "LLaPor is more accurate than the gate in every layer";
    let every = check(text, table, runs, |table| beside(table, "gate", |_| true))
        .unless(unknown, &[NO_FIRST])?
        .shown(likeness, measured, || Ok(lead_by_likeness(table)))?;
    let text =
        "LLaPor is more accurate than the gate in most layers of the input and output groups";
    let outer = check(text, table, runs, most_outer)
        .shown(likeness, measured, || Ok(lead_by_likeness(table)))?;
    let text = "LLaPor is more accurate than what is most frequent in every layer";
    let frequent = check(text, table, runs, |table| beside(table, "most frequent", |_| true));
    let frequent = frequent.unless(unknown, &[NO_FIRST])?;
    Ok(vec![high.done(), every.done(), outer.done(), frequent.done()])
}

/// Least and most over the layers of what LLaPor has of a measure, if any.
fn span(report: &LlaporReport, measure: &str) -> Option<(f64, f64)> {
    let values = report.layers().into_iter().filter_map(|l| report.get(l, LLAPOR, measure));
    values.fold(None, |span, x| {
        let (least, most) = span.unwrap_or((x, x));
        Some((x.min(least), x.max(most)))
    })
}

/// Costs of a layer's network, by rows of the table: measure, unit and its size.
const TAKEN: [(&str, &str, &str, f64); 3] = [
    ("Memory", "bytes", "MiB", MIB),
    ("Time", PREDICTION, "µs", 1.0),
    ("Training", TRAINING, "s", 1.0),
];

pub fn table_3(inputs: &Inputs, report: &LlaporReport) -> Result<Table> {
    let make = |changes: &[Change]| Ok(rows_3(inputs, report, changes));
    let mut table = make(&[])?;
    table.claims = hot_claims(&table, inputs, report, &Runs::new(&make))?;
    Ok(table)
}

fn rows_3(inputs: &Inputs, report: &LlaporReport, changes: &[Change]) -> Table {
    let first = usize::from(changes.contains(&NO_FIRST));
    let measures = [("Top2", "hot2"), ("Top3", "hot3"), ("Top4", "hot4"), ("Tokens", "coverage")];
    let row = |(name, measure): (&str, &str)| {
        let mean = |(_, predictor): (&str, &str)| {
            mean_from(report, first, predictor, measure).map_or(Cell::Missing, Cell::Share)
        };
        Row::new(name, NAMES.map(mean))
    };
    let mut rows: Vec<Row> = measures.map(row).into();
    for (name, measure, unit, size) in TAKEN {
        if let Some((least, most)) = span(report, measure) {
            let taken = format!("{:.1}-{:.1} {unit}", least / size, most / size);
            rows.push(Row::new(name, [Cell::Text(taken), Cell::Missing, Cell::Missing]));
        }
    }
    Table {
        id: "prescope-table-3",
        title: "PreScope, Table 3: hot experts found".into(),
        setting: format!(
            "Batches of 32 tokens, means over layers: of the n experts predicted to have most \
             tokens how many are of the n + 2 that have, and the tokens of the 4 predicted in \
             parts of those of the right 4; memory is that of a layer's weights, the compression's \
             included{}. {}",
            if span(report, PREDICTION).is_some() { TIMES } else { "" },
            setting(inputs, report)
        ),
        columns: columns("measure", NAMES.map(|(name, _)| name)),
        rows,
        paper: Some(paper_3()),
        ..Table::default()
    }
}

const TIMES: &str = "; time is that of one token's prediction for a layer and training that of a \
                     layer's network in all epochs, on the processor of the machine that trained";

/// A pass of the paper's takes no longer, µs.
const PASS_US: f64 = 480.0;

fn paper_3() -> Paper {
    let text =
        |name: &str, cells: [&str; 4]| Row::new(name, cells.map(|cell| Cell::Text(cell.into())));
    Paper {
        columns: columns("measure", ["DeepSeek", "Mixtral", "Qwen3", "Moonlight"]),
        rows: vec![
            Row::shares("Top2", [1.0; 4]),
            Row::shares("Top3", [0.97, 1.0, 0.99, 1.0]),
            Row::shares("Top4", [0.94, 0.99, 0.97, 0.99]),
            Row::shares("Tokens", [0.95, 0.97, 0.97, 0.98]),
            text("Memory", ["0.6-2.7 MB", "0.5-2.5 MB", "0.5-2.8 MB", "0.6-2.7 MB"]),
            text("Time", ["0.48 ms", "0.15 ms", "0.12 ms", "0.48 ms"]),
            text("Training", ["30 epochs of 0.6 s on an A100 (6.4)"; 4]),
        ],
        setting: "batches of 32, 128 tokens in and 32 out.".into(),
    }
}

/// LLaPor's figure of a row, in percent.
fn of(table: &Table, row: &str) -> f64 {
    table.values(row)[0]
}

const HOT: [&str; 3] = ["Top2", "Top3", "Top4"];

/// The hotter the surer; `of` gives each list's part that is found.
fn surer(parts: [f64; 3]) -> Finding {
    let pairs = [(0, 1), (1, 2)].map(|(hotter, other)| Compared {
        margin: parts[hotter] - parts[other],
        figures: format!(
            "{} {:.1} % and {} {:.1} %",
            HOT[hotter], parts[hotter], HOT[other], parts[other]
        ),
    });
    Finding::of(pairs)
}

/// The same without what a random list would find: n + 2 of all experts are right.
fn surer_than_chance(table: &Table, n_experts: f64) -> Finding {
    let parts = [2.0, 3.0, 4.0].map(|n: f64| (n, of(table, HOT[n as usize - 2])));
    let found = parts.map(|(n, part)| {
        let chance = 100.0 * (n + 2.0) / n_experts;
        100.0 * (part - chance) / (100.0 - chance)
    });
    surer(found)
}

fn hot_claims(
    table: &Table,
    inputs: &Inputs,
    report: &LlaporReport,
    runs: &Runs,
) -> Result<Vec<Claim>> {
    let unknown = "the first layer follows a token that is not known yet";
    let covered = |table: &Table| {
        let tokens = of(table, "Tokens");
        Finding::strict([Compared { margin: tokens - 95.0, figures: format!("{tokens:.1} %") }])
    };
    let hot = check("At least 94 % of the hot four are found", table, runs, |table| {
        Finding::one(of(table, "Top4") - 94.0, format!("{:.1} %", of(table, "Top4")))
    });
    let hot = hot.unless(unknown, &[NO_FIRST])?.shown(
        "experts that are nearly as hot are taken for each other",
        "the four that are predicted have nearly the tokens of the right four, as",
        || Ok(covered(table)),
    )?;
    let tokens = check("The tokens covered are off by less than 5 %", table, runs, covered)
        .unless(unknown, &[NO_FIRST])?;
    let n_experts = Source { trace: inputs.full.unwrap_or(inputs.fine.trace), ..inputs.fine };
    let n_experts = n_experts.n_experts() as f64;
    let text = "The hotter an expert the surer it is found: Top2 ≥ Top3 ≥ Top4";
    let parts = |table: &Table| surer(HOT.map(|row| of(table, row)));
    let surer = check(text, table, runs, parts).unless(unknown, &[NO_FIRST])?.shown(
        "the window of two more makes a longer list surer by chance",
        "of what chance does not find",
        || Ok(surer_than_chance(table, n_experts)),
    )?;
    let mut claims = vec![hot.done(), tokens.done(), surer.done()];
    if let Some((_, most_us)) = span(report, PREDICTION) {
        let text = "A prediction takes no longer than the paper's 0.12 to 0.48 ms";
        let ms = format!("{:.3} ms at most", most_us / 1e3);
        let time = check(text, table, runs, |_| Finding::one(PASS_US - most_us, ms.clone()));
        claims.push(time.done());
    }
    Ok(claims)
}
