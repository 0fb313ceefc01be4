//! Figure 16 and Table 3: how well LLaPor predicts.

use crate::tables::{Axes, Cell, Claim, Inputs, Paper, Row, Table, columns};
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
    let values = report.layers().into_iter().filter_map(|l| report.get(l, predictor, measure));
    let (n, sum) = values.fold((0, 0.0), |(n, sum), value| (n + 1, sum + value));
    (n > 0).then(|| sum / f64::from(n))
}

pub fn figure_16(inputs: &Inputs, report: &LlaporReport) -> Table {
    let layers = report.layers();
    let k = report.k().unwrap_or(0);
    let measure = format!("top{k}");
    let row = |(name, predictor): (&str, &str)| {
        Row::new(name, layers.iter().map(|layer| cell(report, *layer, predictor, &measure)))
    };
    let mut table = Table {
        id: "prescope-fig-16",
        title: format!("PreScope, Figure 16: accuracy of the top {k} by layer"),
        setting: format!(
            "Of the {k} experts of a token how many are among the {k} predicted, by layer; {} \
             The first layer is predicted from the last one of the token before.",
            setting(inputs, report)
        ),
        columns: columns("predictor", &layers),
        rows: NAMES.map(row).into(),
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
    };
    table.claims = accuracy_claims(&table);
    table
}

fn accuracy_claims(table: &Table) -> Vec<Claim> {
    let [llapor, gate, frequent] = NAMES.map(|(name, _)| table.values(name));
    let lowest = llapor.iter().copied().fold(f64::MAX, f64::min);
    let n = llapor.len();
    let outer = (0..n).filter(|at| Group::of(*at, n) == Group::Outer);
    let wins = |at: usize, rival: &[f64]| llapor[at] > rival[at] || rival[at].is_nan();
    let n_won = (0..n).filter(|at| wins(*at, &gate)).count();
    vec![
        Claim::new(
            format!("LLaPor is above 80 % in every layer (the lowest is {lowest:.1} %)"),
            lowest >= 80.0,
            "the first layer follows a token that is not known yet, and the others were learned \
             from thousands of tokens where the paper has data sets",
        ),
        Claim::new(
            format!("LLaPor is more accurate than the gate in every layer (in {n_won} of {n})"),
            n_won == n,
            "in a small model whose activations change little from layer to layer the next router \
             knows more than a network that few tokens have taught",
        ),
        Claim::new(
            "LLaPor is more accurate than the gate in most layers of the input and output groups",
            2 * outer.clone().filter(|at| wins(*at, &gate)).count() > outer.count(),
            "the output group of this model is as smooth as its middle",
        ),
        Claim::new(
            "LLaPor is more accurate than what is most frequent in every layer",
            (0..n).all(|at| wins(at, &frequent)),
            "it has been trained too little",
        ),
    ]
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

pub fn table_3(inputs: &Inputs, report: &LlaporReport) -> Table {
    let measures = [("Top2", "hot2"), ("Top3", "hot3"), ("Top4", "hot4"), ("Tokens", "coverage")];
    let row = |(name, measure): (&str, &str)| {
        let mean = |(_, predictor): (&str, &str)| {
            mean(report, predictor, measure).map_or(Cell::Missing, Cell::Share)
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
    let mut table = Table {
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
    };
    table.claims = hot_claims(&table);
    table.claims.extend(span(report, PREDICTION).map(|(_, most)| time_claim(most)));
    table
}

const TIMES: &str = "; time is that of one token's prediction for a layer and training that of a \
                     layer's network in all epochs, on the processor of the machine that trained";

/// A pass of the paper's takes no longer, µs.
const PASS_US: f64 = 480.0;

fn time_claim(most_us: f64) -> Claim {
    Claim::new(
        format!(
            "A prediction takes no longer than the paper's 0.12 to 0.48 ms ({:.3} ms at most)",
            most_us / 1e3
        ),
        most_us <= PASS_US,
        "the processor of that machine is slower than a GPU at some 10⁵ products, or was busy",
    )
}

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

fn hot_claims(table: &Table) -> Vec<Claim> {
    let of = |row: &str| table.values(row)[0];
    let (hot, tokens) = (of("Top4"), of("Tokens"));
    let falls = of("Top2") >= of("Top3") && of("Top3") >= of("Top4");
    vec![
        Claim::new(
            format!("At least 94 % of the hot four are found ({hot:.1} %)"),
            hot >= 94.0,
            "routing here is more even: an expert has few tokens of a batch, and one more or less \
             changes its rank",
        ),
        Claim::new(
            format!("The tokens covered are off by less than 5 % ({:.1} %)", 100.0 - tokens),
            tokens > 95.0,
            "experts that are nearly as hot are taken for each other, and the first layer, whose \
             token is not known when it is predicted, is in the mean",
        ),
        Claim::new(
            "The hotter an expert the surer it is found: Top2 ≥ Top3 ≥ Top4",
            falls,
            "the window of two more is a larger part of a shorter list, and among many experts \
             that are equally hot no order is sure",
        ),
    ]
}
