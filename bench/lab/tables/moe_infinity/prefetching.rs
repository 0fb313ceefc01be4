//! Prefetching by itself (7.2): experts are released when they have been used, so that nothing is
//! saved but by being brought in time. What is counted are decode steps.

use super::workload::{self, Pace, Workload, cases, predictor};
use super::{Inputs, Table};
use crate::tables::{Cell, Claim, Paper, Row, columns};
use moeba::Result;
use moeba::policy::{EamcPredictor, InfinityOptions, Shape};
use moeba::trace::Report;

/// Slots of the buffer in parts of all experts: a few layers, and what Switch had in Table 5.
const SHARES: [f64; 2] = [0.25, 0.62];
/// Every third request of each kind.
const STEP: usize = 3;

/// The paper's names, and the policies whose predictors they are.
const STRATEGIES: [(&str, &str); 4] = [
    ("dependency", "deepspeed"),
    ("model-tracing", "brainstorm"),
    ("on-demand", "on-demand"),
    ("ours", "moe-infinity"),
];
const ON_DEMAND: usize = 2;

fn blocking(report: &Report) -> f64 {
    report.decode.stall_ns_per_token()
}

fn bandwidth(report: &Report) -> f64 {
    report.decode.read_bytes_per_token()
}

fn setting(inputs: &Inputs) -> String {
    let requests = Workload::mixed(inputs.fine.trace, STEP).describe();
    format!(
        "{} Experts are released after use; room is the buffer's, in parts of all experts.",
        workload::setting(inputs, &requests)
    )
}

/// Table 2, what the GPU waits for, and Table 3, what is read.
pub fn tables_2_and_3(inputs: &Inputs) -> Result<Vec<Table>> {
    let mut rows = [Vec::new(), Vec::new()];
    let cases = cases(inputs).flat_map(|(source, pace)| SHARES.map(|s| (source, pace, s)));
    for (source, pace, share) in cases {
        let workload = Workload::mixed(source.trace, STEP);
        let options = pace.options(&source, "on-demand", share);
        let reports = STRATEGIES.iter().map(|(_, policy)| {
            workload.replay_released(&source, &options, |shape| predictor(policy, shape))
        });
        let reports = reports.collect::<Result<Vec<_>>>()?;
        let name = format!("{}, room for {:.0} %", pace.name(&source), 100.0 * share);
        for (rows, measure) in rows.iter_mut().zip([blocking, bandwidth]) {
            let base = measure(&reports[ON_DEMAND]);
            let values = reports.iter().map(|report| measure(report) / base);
            rows.push(Row::shares(name.as_str(), values));
        }
    }
    let [blocking, bandwidth] = rows;
    Ok(vec![table_2(setting(inputs), blocking), table_3(setting(inputs), bandwidth)])
}

/// Rows at the paper's pace.
const SLOW: &str = "slow";

/// Whether the values of all rows of such a name do.
fn all(table: &Table, part: &str, holds: impl Fn(&[f64]) -> bool) -> bool {
    let mut rows = table.rows.iter().filter(|row| row.name.contains(part));
    rows.all(|row| holds(&table.values(&row.name)))
}

fn table_2(setting: String, rows: Vec<Row>) -> Table {
    let mut table = Table {
        id: "moe-infinity-table-2",
        title: "MoE-Infinity, Table 2: normalised GPU blocking time".into(),
        setting: format!("{setting} Time waited for experts a token, on-demand is 100 %."),
        columns: columns("routing", STRATEGIES.map(|s| s.0)),
        rows,
        paper: Some(paper([
            ("Switch", [2.30, 0.51, 1.0, 0.12]),
            ("NLLB", [1.47, 0.71, 1.0, 0.31]),
            ("Arctic", [1.95, 0.63, 1.0, 0.43]),
            ("Mixtral", [1.47, 0.91, 1.0, 0.37]),
        ])),
        ..Table::default()
    };
    table.claims = vec![
        Claim::new(
            "Where it is slow, bringing all of the next layer makes the GPU wait longer than \
             bringing nothing beforehand",
            all(&table, SLOW, |v| v[0] > v[2]),
            "with little room it does; with much, what was brought and not used stays, as it has \
             not been used yet, and may serve a later token.",
        ),
        Claim::new(
            "Where it is slow, model-level counts make it wait less than on-demand",
            all(&table, SLOW, |v| v[1] < v[2]),
            "what is used most by all requests is seldom what a token uses next.",
        ),
        Claim::new(
            "Request-level traces make it wait less than on-demand everywhere",
            all(&table, "", |v| v[3] < v[2]),
            "where computing takes a small part of loading there is next to nothing that a \
             prefetch could pass beside, and where there is, far layers compete with the next \
             (Table 4).",
        ),
        Claim::new(
            "Request-level traces make it wait least of all",
            all(&table, "", |v| v[3] <= v[0].min(v[1]).min(v[2])),
            "by the next layer alone they do where it is slow (Table 4); what they bring for far \
             layers takes the link from the next one, and room where there is little.",
        ),
    ];
    table
}

fn table_3(setting: String, rows: Vec<Row>) -> Table {
    let mut table = Table {
        id: "moe-infinity-table-3",
        title: "MoE-Infinity, Table 3: normalised bandwidth usage".into(),
        setting: format!("{setting} Bytes read a token, on-demand is 100 %."),
        columns: columns("routing", STRATEGIES.map(|s| s.0)),
        rows,
        paper: Some(paper([
            ("Switch", [2.39, 2.04, 1.0, 1.68]),
            ("NLLB", [1.48, 1.27, 1.0, 1.26]),
            ("Arctic", [1.83, 1.86, 1.0, 1.87]),
            ("Mixtral", [1.43, 1.01, 1.0, 1.43]),
        ])),
        ..Table::default()
    };
    table.claims = vec![
        Claim::new(
            "On-demand reads least, as it is exact",
            all(&table, "", |v| v.iter().all(|x| *x >= v[2])),
            "what was brought too early for its request was used by the next.",
        ),
        Claim::new(
            "Request-level traces read no more than all of the next layer, but for a twentieth",
            all(&table, "", |v| v[3] <= 1.05 * v[0]),
            "they go on reading for far layers where all of the next one is there.",
        ),
        Claim::new(
            "No strategy reads more than 2.5 times what is used",
            all(&table, "", |v| v.iter().all(|x| *x <= 2.5 * v[2])),
            "nothing else limits prefetching here than the time there is for it.",
        ),
    ];
    table
}

fn paper(rows: [(&str, [f64; 4]); 4]) -> Paper {
    Paper {
        columns: columns("model", STRATEGIES.map(|s| s.0)),
        rows: rows.map(|(name, values)| Row::shares(name, values)).to_vec(),
        setting: "one of eight A5000, PCIe 4.0; 290 tasks of BIGBench, FLAN and MMLU; on-demand \
                  fetches take 1, 2.5, 7 and 10 ms an expert from Switch to Mixtral."
            .into(),
    }
}

const OFF: InfinityOptions = InfinityOptions {
    capacity: 120,
    n_matches: 3,
    request_level: false,
    multi_layer: false,
    layer_proximity: false,
};

/// The design of each row of Table 4; `None` prefetches all of the next layer.
fn designs() -> [(&'static str, Option<InfinityOptions>); 5] {
    let request_level = InfinityOptions { request_level: true, ..OFF };
    let multi_layer = InfinityOptions { multi_layer: true, ..request_level };
    let layer_proximity = InfinityOptions { layer_proximity: true, ..multi_layer };
    [
        ("vanilla: all of the next layer", None),
        ("the next layer's most used", Some(OFF)),
        ("+ request-level tracing", Some(request_level)),
        ("+ multi-layer", Some(multi_layer)),
        ("+ layer-proximity", Some(layer_proximity)),
    ]
}

/// Table 4: what each step of the design adds.
pub fn table_4(inputs: &Inputs) -> Result<Table> {
    let designs = designs();
    let mut rows = designs.map(|(name, _)| Row::new(name, []));
    let mut names = Vec::new();
    for source in inputs.sources() {
        let pace = Pace::Load;
        let workload = Workload::mixed(source.trace, STEP);
        let sim = pace.options(&source, "on-demand", SHARES[0]);
        let mut reports = Vec::new();
        for (_, options) in designs {
            let build = |shape: &Shape| match options {
                Some(options) => Some(Box::new(EamcPredictor::new(shape, options)) as Box<_>),
                None => predictor("deepspeed", shape),
            };
            reports.push(workload.replay_released(&source, &sim, build)?);
        }
        for (what, measure) in
            [("bandwidth", bandwidth as fn(&Report) -> f64), ("blocking", blocking)]
        {
            names.push(format!("{what}, {}", pace.name(&source)));
            let base = measure(&reports[0]);
            for (row, report) in rows.iter_mut().zip(&reports) {
                row.cells.push(Cell::Share(measure(report) / base));
            }
        }
    }
    let mut table = Table {
        id: "moe-infinity-table-4",
        title: "MoE-Infinity, Table 4: performance breakdown of prefetching designs".into(),
        setting: format!(
            "{} This table is slow throughout, with room for {:.0} %. Bytes read and time \
             waited a token, vanilla is 100 %. The second row is not the paper's: model-level \
             counts, of which as much is brought as of the traces.",
            setting(inputs),
            100.0 * SHARES[0]
        ),
        columns: columns("design", names),
        rows: rows.to_vec(),
        paper: Some(Paper {
            columns: columns("design", ["bandwidth usage", "blocking time"]),
            rows: vec![
                Row::shares("vanilla prefetching", [1.0, 1.0]),
                Row::shares("+ request-level tracing", [0.56, 0.55]),
                Row::shares("+ multi-layer", [0.73, 0.39]),
                Row::shares("+ layer-proximity", [0.68, 0.32]),
            ],
            setting: "as in Table 2; of which model is not said.".into(),
        }),
        ..Table::default()
    };
    table.claims = claims_4(&table);
    Ok(table)
}

/// Whether a row has less than another by 0.1 points at least, in the columns of one kind.
fn less(table: &Table, what: usize, row: &str, than: &str) -> bool {
    let (row, than) = (table.values(row), table.values(than));
    let pairs = row.iter().zip(&than).skip(what).step_by(2);
    pairs.clone().count() > 0 && pairs.into_iter().all(|(a, b)| a + 0.1 <= *b)
}

const BANDWIDTH: usize = 0;
const BLOCKING: usize = 1;

fn claims_4(table: &Table) -> Vec<Claim> {
    let [vanilla, _, request_level, multi_layer, proximity] = designs().map(|d| d.0);
    vec![
        Claim::new(
            "Request-level tracing lessens both what is read and the wait",
            less(table, BANDWIDTH, request_level, vanilla)
                && less(table, BLOCKING, request_level, vanilla),
            "past requests that resemble one say little of what its next layer uses.",
        ),
        Claim::new(
            "Several layers cost more reads and save waiting",
            less(table, BANDWIDTH, request_level, multi_layer)
                && less(table, BLOCKING, multi_layer, request_level),
            "a load takes as long as computing an expert, and the buffer holds few layers: time \
             and room that far layers get, and often do not use, are taken from the next one.",
        ),
        Claim::new(
            "Layer proximity lessens both again",
            less(table, BANDWIDTH, proximity, multi_layer)
                && less(table, BLOCKING, proximity, multi_layer),
            "its weight falls by 1 ÷ layers a layer: a likely expert far ahead still goes before \
             a less likely one of the next layer.",
        ),
        Claim::new(
            "All together wait less than request-level tracing of the next layer alone",
            less(table, BLOCKING, proximity, request_level),
            "proximity makes good only a part of what several layers cost: its weight falls by no \
             more than 1 ÷ layers a layer.",
        ),
    ]
}
