//! A small trace through all tables.

use super::*;
use crate::tables::Cell;
use moeba::policy::Phase;
use moeba::trace::format::{Header, LayerShape, Trace, Writer};
use moeba::train::report::{LlaporReport, PREDICTION, PREDICTORS, TRAINING, Value};
use std::path::Path;

const N_EXPERTS: usize = 8;
const N_LAYERS: usize = 3;

/// Requests of two kinds, with what the next router makes of each decode step: it is right.
fn trace(n_requests: usize) -> Trace {
    let layers = vec![LayerShape { n_experts: N_EXPERTS, ..LayerShape::default() }; N_LAYERS];
    let header = Header { n_embd: 1, k: 2, layers, ahead: 1, ..Header::default() };
    let mut writer = Writer::new(Vec::new(), header).unwrap();
    let mut draw = 1u32;
    for request in 0..n_requests {
        writer.begin_request(["prose", "code"][request % 2]).unwrap();
        let steps = [(2, Phase::Prompt), (1, Phase::Decode), (1, Phase::Decode)];
        for (n_tokens, phase) in steps {
            let (ids, embeddings) = (vec![7; n_tokens], vec![0.5; n_tokens]);
            writer.begin_pass(phase, &ids, &embeddings).unwrap();
            for layer in 0..N_LAYERS {
                let choice = |_| {
                    draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let first = (draw >> 20) % 5;
                    [first, first + 3]
                };
                let chosen: Vec<u32> = (0..n_tokens).flat_map(choice).collect();
                writer.routed(layer, &chosen, &vec![0.125; n_tokens * N_EXPERTS]);
                if phase == Phase::Decode {
                    writer.ahead(layer, 1, &[0.125; N_EXPERTS]);
                }
            }
        }
    }
    Trace::decode(&writer.finish().unwrap(), Path::new("made-up")).unwrap()
}

fn report() -> LlaporReport {
    let mut report = LlaporReport::default();
    for (layer, predictor) in (0..N_LAYERS).flat_map(|l| PREDICTORS.map(|p| (l, p))) {
        for (measure, value) in [
            ("samples", 10.0),
            ("bytes", (layer + 1) as f64 * f64::from(1 << 20)),
            (PREDICTION, 20.0 + layer as f64),
            (TRAINING, 4.5),
            ("top1", 0.9),
            ("top2", if predictor == "gate" && layer == 1 { 0.95 } else { 0.9 }),
            ("hot2", 1.0),
            ("hot3", 0.98),
            ("hot4", 0.9 + 0.05 * layer as f64),
            ("coverage", 0.96),
        ] {
            let (predictor, measure) = (predictor.to_string(), measure.to_string());
            report.push(Value { layer, predictor, measure, value });
        }
    }
    report
}

#[test]
fn every_table_has_its_rows_and_finite_figures() {
    let (fine, coarse) = (trace(96), trace(40));
    let mut inputs = Inputs::new(&fine, Some(&coarse), None);
    (inputs.llapor, inputs.sync_slowdown) = (Some(report()), Some(1.5));
    let tables = all(&inputs).unwrap();
    let ids: Vec<&str> = tables.iter().map(|table| table.id).collect();
    let of = [
        "fig-12-fine",
        "fig-12-coarse",
        "fig-15-fine",
        "fig-15-coarse",
        "fig-16",
        "table-3",
        "fig-17-fine",
        "fig-17-coarse",
    ];
    assert_eq!(ids, of.map(|id| format!("prescope-{id}")));
    for table in &tables[..4] {
        // Of 40 requests 13 fill the table and 27 are served, which makes no batch of 32.
        let n = if table.id.ends_with("fine") { 5 } else { 3 };
        for row in &table.rows {
            let is_there = |cell: &Cell| cell.value().is_some();
            assert_eq!(row.cells.len(), 5, "{}: {}", table.id, row.name);
            assert!(row.cells[..n].iter().all(is_there), "{}: {row:?}", table.id);
            assert!(!row.cells[n..].iter().any(is_there), "{}: {row:?}", table.id);
        }
    }
    let claims = tables.iter().flat_map(|table| &table.claims);
    assert!(claims.clone().count() >= 18);
    for claim in claims {
        let text = claim.markdown();
        assert!(claim.found.n > 0 && !text.contains("NaN"), "{text}");
    }
    inputs.llapor = None;
    let untrained = all(&inputs).unwrap();
    assert_eq!(untrained[..4], tables[..4]);
    assert_eq!(untrained[4..], tables[6..]);
    // The gain of AsyncIO is a figure of a machine or none at all.
    assert!(tables[2].setting.contains("take 1.50 times as long"), "{}", tables[2].setting);
    inputs.sync_slowdown = None;
    let without = &all(&inputs).unwrap()[2];
    assert_eq!(without.claims.len(), tables[2].claims.len() - 1);
    for row in ["AsyncIO, a100", "AsyncIO, v100"] {
        let cells = &without.row(row).cells;
        assert!(cells.iter().all(|cell| cell.to_string() == "not measured"), "{cells:?}");
    }
}

#[test]
fn throughput_grows_with_the_batch_and_the_link() {
    let fine = trace(96);
    let table = &all(&Inputs::new(&fine, None, None)).unwrap()[0];
    for row in &table.rows {
        let rates = table.values(&row.name);
        assert!(rates.windows(2).all(|pair| pair[0] < pair[1]), "{row:?}");
    }
    for name in ["PreScope", "HybriMoE", "Fiddler"] {
        assert!(table.at_least(&format!("{name}, a100"), &format!("{name}, v100"), 0.0), "{name}");
    }
}

#[test]
fn accuracies_are_those_of_the_report() {
    let fine = trace(6);
    let (inputs, mut report) = (Inputs::new(&fine, None, None), report());
    let table = accuracy::figure_16(&inputs, &report).unwrap();
    assert_eq!(table.columns, ["predictor", "0", "1", "2"]);
    assert_eq!(table.row("LLaPor").cells, [0.9; 3].map(Cell::Share));
    assert_eq!(table.row("gate").cells, [0.9, 0.95, 0.9].map(Cell::Share));
    // 90 % are above 80, but equal is not more.
    assert_eq!(
        table.claims.iter().map(|c| c.holds()).collect::<Vec<_>>(),
        [true, false, false, false]
    );
    let table = accuracy::table_3(&inputs, &report).unwrap();
    let hot = table.values("Top4")[0];
    assert!((hot - 95.0).abs() < 1e-9, "{hot}");
    let taken = ["Memory", "Time", "Training"].map(|row| table.row(row).cells[0].to_string());
    assert_eq!(taken, ["1.0-3.0 MiB", "20.0-22.0 µs", "4.5-4.5 s"]);
    assert!(table.claims.iter().all(|claim| claim.holds()), "{:?}", table.claims);
    // Times that were not measured have no rows, and slow ones are told.
    let (predictor, measure) = ("llapor".to_string(), PREDICTION.to_string());
    report.push(Value { layer: 1, predictor, measure, value: 500.0 });
    let table = accuracy::table_3(&inputs, &report).unwrap();
    assert_eq!(
        table.claims.iter().map(|c| c.holds()).collect::<Vec<_>>(),
        [true, true, true, false]
    );
    // A predictor that was not measured has no figures, and then nothing is judged.
    let (predictor, measure) = ("llapor".to_string(), "top2".to_string());
    report = LlaporReport::default();
    report.push(Value { layer: 2, predictor, measure, value: 0.5 });
    let untimed = accuracy::table_3(&inputs, &report).unwrap();
    assert_eq!((untimed.rows.len(), untimed.claims.len()), (4, 3));
    let table = accuracy::figure_16(&inputs, &report).unwrap();
    assert_eq!(table.row("gate").cells, [Cell::Missing]);
    let [accurate, beside @ ..] = &table.claims[..] else { panic!("{table:?}") };
    assert!(!accurate.holds() && accurate.found.n == 1, "{accurate:?}");
    assert!(beside.iter().all(|claim| claim.markdown().contains("not judged")), "{beside:?}");
}
