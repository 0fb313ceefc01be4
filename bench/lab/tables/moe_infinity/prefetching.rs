//! Prefetching by itself (7.2): experts are released when they have been used, so that nothing is
//! saved but by being brought in time. What is counted are decode steps.

use super::workload::{self, Pace, TWICE, Workload, cases, predictor};
use super::{Inputs, N_REQUESTS, Table, with_claims};
use crate::tables::{
    Cell, Change, Checked, Claim, Compared, Finding, Paper, Row, Runs, check, columns,
};
use moeba::Result;
use moeba::policy::{EamcPredictor, InfinityOptions, Shape};
use moeba::trace::{Oracle, future};
use moeba::trace::{Ordered, Report};

/// Slots of the buffer in parts of all experts: a few layers, and what Switch had in Table 5.
pub const SHARES: [f64; 2] = [0.25, 0.62];

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
    let requests = Workload::of(&inputs.fine, N_REQUESTS, &[]).describe();
    format!(
        "{} Experts are released after use; room is the buffer's, in parts of all experts.",
        workload::setting(inputs, &requests)
    )
}

const NEXT_LAYER: Change = Change::Own("with the next layer alone prefetched by traces");
const LITTLE_ROOM: Change = Change::Own("with room for 25 % alone");
const EXACT: Change =
    Change::Own("with traces that know the next layer, or the next three, exactly");
/// Layers that several are.
const N_EXACT: usize = 3;
pub const MUCH_ROOM: Change = Change::Own("with room for 62 %");

/// Table 2, what the GPU waits for, and Table 3, what is read.
pub fn tables_2_and_3(inputs: &Inputs) -> Result<Vec<Table>> {
    let waits = with_claims(
        inputs,
        |inputs, changes| Ok(table_2(setting(inputs), rows(inputs, changes, blocking)?)),
        claims_2,
    )?;
    let reads = with_claims(
        inputs,
        |inputs, changes| Ok(table_3(setting(inputs), rows(inputs, changes, bandwidth)?)),
        claims_3,
    )?;
    Ok(vec![waits, reads])
}

fn rows(inputs: &Inputs, changes: &[Change], measure: fn(&Report) -> f64) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let n_shares = if changes.contains(&LITTLE_ROOM) { 1 } else { SHARES.len() };
    let shares = &SHARES[..n_shares];
    let cases =
        cases(inputs).flat_map(|(source, pace)| shares.iter().map(move |s| (source, pace, *s)));
    for (source, pace, share) in cases {
        let workload = Workload::of(&source, N_REQUESTS, changes);
        let options = pace.options(&source, "on-demand", share);
        let replay = |policy: &str| {
            workload.replay_released(&source, &options, |shape| match policy {
                "moe-infinity" if changes.contains(&NEXT_LAYER) => {
                    let options = InfinityOptions { request_level: true, ..OFF };
                    Some(Box::new(EamcPredictor::new(shape, options)) as Box<_>)
                }
                _ => predictor(policy, shape),
            })
        };
        let measured = STRATEGIES.iter().map(|(_, policy)| Ok(measure(&replay(policy)?)));
        let measured = measured.collect::<Result<Vec<f64>>>()?;
        let name = format!("{}, room for {:.0} %", pace.name(&source), 100.0 * share);
        rows.push(Row::shares(name, measured.iter().map(|value| value / measured[ON_DEMAND])));
    }
    Ok(rows)
}

/// Rows at the paper's pace.
const SLOW: &str = "slow";

fn table_2(setting: String, rows: Vec<Row>) -> Table {
    Table {
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
    }
}

/// A strategy is below another in the rows of such a name, by more than nothing.
fn below(table: &Table, part: &str, lower: usize, upper: usize) -> Finding {
    let rows = table.rows.iter().filter(|row| row.name.contains(part));
    let name = |at: usize| STRATEGIES[at].0;
    Finding::strict(rows.map(|row| {
        let (low, high) = (&row.cells[lower], &row.cells[upper]);
        Compared {
            margin: high.value().zip(low.value()).map_or(f64::NAN, |(high, low)| high - low),
            figures: format!("{} {low}, {} {high} of {}", name(lower), name(upper), row.name),
        }
    }))
}

const FAR: &str = "what is brought for far layers takes the link, and room, from the next one";
const FEW: &str = "there are few past requests";
const SHORT: &str = "computing takes a small part of loading";

fn claims_2(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let slow = Change::Compute(8.0);
    let all = "Where it is slow, bringing all of the next layer makes the GPU wait longer than \
               bringing nothing beforehand";
    let all = check(all, table, runs, |table| below(table, SLOW, ON_DEMAND, 0))
        .unless("much room keeps what was not used for a later token", &[LITTLE_ROOM])?;
    let counts = "Where it is slow, model-level counts make it wait less than on-demand";
    let counts = check(counts, table, runs, |table| below(table, SLOW, 1, ON_DEMAND))
        .unless(FEW, &[TWICE])?;
    let everywhere = "Request-level traces make it wait less than on-demand everywhere";
    let everywhere = check(everywhere, table, runs, |table| below(table, "", 3, ON_DEMAND))
        .unless(FEW, &[TWICE])?
        .unless(FAR, &[NEXT_LAYER])?
        .unless(SHORT, &[slow])?
        .unless("both hold", &[NEXT_LAYER, slow])?;
    let least = "Request-level traces make it wait least of all";
    let least = check(least, table, runs, |table| {
        let [all, counts, nothing] = [0, 1, 2].map(|other| below(table, "", 3, other));
        all.and(counts).and(nothing)
    });
    let least = least
        .unless(FEW, &[TWICE])?
        .unless(FAR, &[NEXT_LAYER])?
        .unless("both hold", &[TWICE, NEXT_LAYER])?
        .unless(
            "both hold, and computing takes a small part of loading",
            &[TWICE, NEXT_LAYER, slow],
        )?;
    Ok(vec![all.done(), counts.done(), everywhere.done(), least.done()])
}

fn table_3(setting: String, rows: Vec<Row>) -> Table {
    Table {
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
    }
}

fn claims_3(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let least = check("On-demand reads least, as it is exact", table, runs, |table| {
        let [all, counts, ours] = [0, 1, 3].map(|at| table.rows_compare("", at, ON_DEMAND, 1.0));
        all.and(counts).and(ours)
    });
    let least = least.unless("much room keeps what was brought too early", &[LITTLE_ROOM])?;
    let no_more = "Request-level traces read no more than all of the next layer, but for a \
                   twentieth, which is ours";
    let no_more = check(no_more, table, runs, |table| table.rows_compare("", 0, 3, 1.05))
        .unless("they go on reading for far layers", &[NEXT_LAYER])?;
    let bounded = "No strategy reads more than 2.5 times what is used (the paper's most is 2.4)";
    let bounded = check(bounded, table, runs, |table| {
        let [all, counts, ours] = [0, 1, 3].map(|at| table.rows_compare("", ON_DEMAND, at, 2.5));
        all.and(counts).and(ours)
    });
    let bounded = bounded.unless("a link has nothing else to do", &[Change::Link(0.25)])?;
    Ok(vec![least.done(), no_more.done(), bounded.done()])
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
    capacity: InfinityOptions::CAPACITY,
    n_matches: InfinityOptions::N_MATCHES,
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
    with_claims(inputs, rows_4, claims_4)
}

fn rows_4(inputs: &Inputs, changes: &[Change]) -> Result<Table> {
    let share = SHARES[usize::from(changes.contains(&MUCH_ROOM))];
    let designs = designs();
    let mut rows = designs.map(|(name, _)| Row::new(name, []));
    let mut names = Vec::new();
    for source in inputs.sources() {
        let pace = Pace::Load;
        let workload = Workload::of(&source, N_REQUESTS, changes);
        let sim = pace.options(&source, "on-demand", share);
        let routing = source.routing();
        let future = future(&Ordered { routing: &routing, order: workload.order.clone() });
        let mut reports = Vec::new();
        for (_, options) in designs {
            let build = |shape: &Shape| match options {
                Some(options) if options.request_level && changes.contains(&EXACT) => {
                    let n_layers = if options.multi_layer { N_EXACT } else { 1 };
                    Some(Box::new(Oracle::new(future.clone(), n_layers)) as Box<_>)
                }
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
    Ok(Table {
        id: "moe-infinity-table-4",
        title: "MoE-Infinity, Table 4: performance breakdown of prefetching designs".into(),
        setting: format!(
            "{} This table is slow throughout, with room for {:.0} %. Bytes read and time \
             waited a token, vanilla is 100 %. The second row is not the paper's: model-level \
             counts, of which as much is brought as of the traces.",
            setting(inputs),
            100.0 * share
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
    })
}

/// A row has less than another by 0.1 points at least, in the columns of one kind.
fn less(table: &Table, what: usize, row: &str, than: &str) -> Finding {
    Finding::of(table.margins(than, row, -0.1).into_iter().skip(what).step_by(2))
}

const BANDWIDTH: usize = 0;
const BLOCKING: usize = 1;

fn claims_4(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let [vanilla, _, request_level, multi_layer, proximity] = designs().map(|d| d.0);
    let slow = Change::Compute(4.0);
    let both = |row: &'static str, than: &'static str| {
        move |table: &Table| less(table, BANDWIDTH, row, than).and(less(table, BLOCKING, row, than))
    };
    let request = "Request-level tracing lessens both what is read and the wait";
    let request =
        check(request, table, runs, both(request_level, vanilla)).unless(FEW, &[TWICE])?;
    let several = "Several layers cost more reads and save waiting";
    let several = check(several, table, runs, |table| {
        less(table, BANDWIDTH, request_level, multi_layer).and(less(
            table,
            BLOCKING,
            multi_layer,
            request_level,
        ))
    });
    let several = unless_far_layers_lose(several, slow)?;
    let near =
        check("Layer proximity lessens both again", table, runs, both(proximity, multi_layer))
            .unless(LITTLE, &[MUCH_ROOM])?
            .unless(TIME, &[slow])?
            .unless(FEW, &[TWICE])?
            .unless(BOTH, &[MUCH_ROOM, slow])?
            .unless(ALL, &[MUCH_ROOM, slow, TWICE])?;
    let text = "All together wait less than request-level tracing of the next layer alone";
    let all = check(text, table, runs, |table| less(table, BLOCKING, proximity, request_level));
    let all = unless_far_layers_lose(all, slow)?;
    Ok(vec![request.done(), several.done(), near.done(), all.done()])
}

/// The suspected causes of what prefetching several layers loses.
fn unless_far_layers_lose<J: Fn(&Table) -> Finding>(
    checked: Checked<'_, J>,
    slow: Change,
) -> Result<Checked<'_, J>> {
    checked
        .unless(LITTLE, &[MUCH_ROOM])?
        .unless(GUESSED, &[EXACT])?
        .unless(GUESSED_IN_LITTLE, &[EXACT, MUCH_ROOM])?
        .unless(TIME, &[slow])?
        .unless(BOTH, &[MUCH_ROOM, slow])?
        .unless(ALL, &[MUCH_ROOM, slow, TWICE])
}

const GUESSED: &str = "what far layers use is guessed by past requests";
const GUESSED_IN_LITTLE: &str = "it is guessed, and the buffer holds few layers";
const LITTLE: &str = "the buffer holds few layers";
const TIME: &str = "an expert is computed in the time of one load, which leaves far layers none";
const BOTH: &str = "both hold";
const ALL: &str = "both hold, and there are few past requests";
