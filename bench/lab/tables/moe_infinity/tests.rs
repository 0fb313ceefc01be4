//! A small trace through all tables, and what they count by hand.

use super::adapting::n_to_recover;
use super::workload::Workload;
use super::*;
use crate::tables::Cell;
use moeba::policy::Phase;
use moeba::trace::format::{Header, LayerShape, Trace, Writer};
use moeba::trace::kinds;
use std::path::Path;

const N_EXPERTS: usize = 8;
const KINDS: [&str; 2] = ["prose", "code"];

/// Requests of either kind, which use experts of their own half of each layer's, now and then
/// others'.
fn trace(n_of_kind: usize) -> Trace {
    let layers = vec![LayerShape { n_experts: N_EXPERTS, ..LayerShape::default() }; 3];
    let header = Header { n_embd: 1, k: 2, layers, ..Header::default() };
    let mut writer = Writer::new(Vec::new(), header).unwrap();
    let mut draw = 1u32;
    for (half, kind) in KINDS.iter().enumerate() {
        for _ in 0..n_of_kind {
            writer.begin_request(kind).unwrap();
            for (n_tokens, phase) in
                [(2, Phase::Prompt), (1, Phase::Decode), (1, Phase::Decode), (1, Phase::Decode)]
            {
                let (ids, embeddings) = (vec![7; n_tokens], vec![0.5; n_tokens]);
                writer.begin_pass(phase, &ids, &embeddings).unwrap();
                for layer in 0..3 {
                    let chosen = (0..n_tokens).flat_map(|_| {
                        draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        let first = (draw >> 20) % 5 + 4 * half as u32;
                        [first % N_EXPERTS as u32, (first + 1) % N_EXPERTS as u32]
                    });
                    let chosen: Vec<u32> = chosen.collect();
                    writer.routed(layer, &chosen, &vec![0.125; n_tokens * N_EXPERTS]);
                }
            }
        }
    }
    Trace::decode(&writer.finish().unwrap(), Path::new("made-up")).unwrap()
}

fn tables() -> Vec<Table> {
    let (fine, coarse) = (trace(16), trace(16));
    all(&Inputs::new(&fine, Some(&coarse), None)).unwrap()
}

#[test]
fn every_table_has_its_rows_and_finite_figures() {
    let tables = tables();
    let ids: Vec<&str> = tables.iter().map(|table| table.id).collect();
    let expected = [
        "table-1", "fig-4", "table-2", "table-3", "table-4", "table-5", "table-7", "fig-13",
        "matches",
    ];
    assert_eq!(ids, expected.map(|id| format!("moe-infinity-{id}")));
    for table in &tables {
        for row in &table.rows {
            assert_eq!(row.cells.len() + 1, table.columns.len(), "{}: {}", table.id, row.name);
            let finite = |cell: &Cell| cell.value().is_some();
            assert!(row.cells.iter().all(finite), "{}: {row:?}", table.id);
        }
        assert!(table.claims.iter().all(|claim| claim.found.n > 0), "{}", table.id);
    }
}

#[test]
fn on_demand_reads_what_is_used_and_the_ideal_hits_most() {
    let tables = tables();
    for row in &tables[3].rows {
        assert_eq!(row.cells[2], Cell::Share(1.0));
        assert!(row.cells.iter().all(|cell| cell.value().unwrap() >= 100.0 - 1e-9), "{row:?}");
    }
    for row in &tables[5].rows {
        let values = tables[5].values(&row.name);
        assert!(values[..3].iter().all(|value| *value <= values[3]), "{row:?}");
    }
}

#[test]
fn kinds_take_turns() {
    let trace = trace(6);
    let expected = [("prose", (0..6).collect()), ("code", (6..12).collect())];
    assert_eq!(kinds(&trace), expected);
    let workload = Workload::ordered(moeba::trace::by_turns(&trace, 2), &[]);
    assert_eq!((workload.order, workload.n_history), (vec![0, 6, 2, 8, 4, 10], 3));
}

#[test]
fn recovery_is_where_a_window_is_as_usual() {
    let usual = [10.0, 20.0, 10.0, 20.0, 10.0];
    let n_to_recover = |after: &[f64], usual: &[f64]| n_to_recover(after, usual, 1.01);
    assert_eq!(n_to_recover(&usual, &usual), 0);
    // A single request that is slow does not count if its window makes up for it.
    assert_eq!(n_to_recover(&[11.0, 19.0, 10.0, 20.0, 10.0], &usual), 0);
    assert_eq!(n_to_recover(&[11.0, 21.0, 10.0, 20.0, 10.0], &usual), 2);
    // Twelve is the number of requests that are looked at, and stands for never.
    assert_eq!(n_to_recover(&[11.0, 21.0, 11.0, 21.0, 11.0], &usual), 12);
    // Of fewer requests than a window all are one.
    assert_eq!(n_to_recover(&[10.0, 20.0], &[11.0, 19.5]), 0);
}
