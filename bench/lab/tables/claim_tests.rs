//! Claims on real replays of a short trace: one whose cause a run confirms, one whose suspected
//! cause a run refutes, and one that holds and runs nothing.

use super::change::Change;
use super::{Alteration, Cell, Claim, Finding, Inputs, Row, Runs, Table, check, columns};
use moeba::Result;
use moeba::trace::format::Trace;
use std::cell::Cell as Counter;

const SHARE: f64 = 0.5;

fn trace() -> Trace {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/bench/traces/demo.mtrace");
    Trace::open(path.as_ref()).unwrap()
}

/// Hit rates of two evictions on demand.
fn table(inputs: &Inputs) -> Result<Table> {
    let row = |(name, policy): (&str, &str)| {
        let report = inputs.fine.run(&inputs.fine.options("rtx3090", policy, SHARE))?;
        Ok(Row::shares(name, [report.decode.counters.hit_rate()]))
    };
    let rows = [("LRU", "on-demand"), ("LFU", "predictor=none,eviction=lfu")].map(row);
    let rows = rows.into_iter().collect::<Result<Vec<Row>>>()?;
    Ok(Table { id: "hits", columns: columns("eviction", ["50 %"]), rows, ..Table::default() })
}

fn lfu_wins(table: &Table) -> Finding {
    table.compare("LFU", "LRU", 0.0)
}

#[test]
fn a_cause_is_confirmed_or_refuted_by_a_replay_without_it() {
    let trace = trace();
    let inputs = Inputs::new(&trace, None, None);
    let make = |changes: &[Change]| inputs.with(changes, table);
    let (runs, measured) = (Runs::new(&make), make(&[]).unwrap());
    let shuffled = [Change::Routing(Alteration::Shuffle)];
    let claim = check("LFU hits more than LRU", &measured, &runs, lfu_wins)
        .unless("the link is slow", &[Change::Link(8.0)])
        .unwrap()
        .unless("a text soon uses again what it has just used", &shuffled)
        .unwrap()
        .unless("never looked into", &[Change::Compute(2.0)])
        .unwrap()
        .done();
    // What a cache hits on demand hardly depends on the link.
    let [link, again] = &claim.causes[..] else { panic!("{claim:?}") };
    assert!(!claim.holds() && !link.found.holds(), "{claim:?}");
    assert!(again.found.holds(), "{claim:?}");
    let text = claim.markdown();
    assert!(text.contains("- not because the link is slow: with a link 8 times as fast"), "{text}");
    assert!(text.contains("- because a text soon uses again"), "{text}");
    assert!(!text.contains("explained by none"), "{text}");
}

#[test]
fn a_claim_that_holds_runs_nothing() {
    let trace = trace();
    let inputs = Inputs::new(&trace, None, None);
    let n_runs = Counter::new(0);
    let make = |changes: &[Change]| {
        n_runs.set(n_runs.get() + 1);
        inputs.with(changes, table)
    };
    let (runs, measured) = (Runs::new(&make), table(&inputs).unwrap());
    let holds = |table: &Table| table.compare("LRU", "LFU", 0.0);
    let check = |judge: fn(&Table) -> Finding| {
        let link = [Change::Link(2.0)];
        check("…", &measured, &runs, judge).unless("no cause", &link).unwrap().done()
    };
    let claim = check(holds);
    assert!(claim.holds() && claim.causes.is_empty(), "{claim:?}");
    assert_eq!((n_runs.get(), claim.markdown().as_str()), (0, "- … — agrees\n"));
    // Two claims share a run.
    let claims = [check(lfu_wins), check(lfu_wins)];
    assert!(claims.iter().all(|claim| claim.causes.len() == 1 && !claim.holds()));
    assert!(claims[0].markdown().ends_with("explained by none of these runs\n"));
    assert_eq!(n_runs.get(), 1);
}

#[test]
fn a_claim_without_figures_is_not_judged() {
    let rows = vec![Row::new("LRU", [Cell::Missing]), Row::new("LFU", [Cell::Share(0.5)])];
    let table = Table { columns: columns("eviction", ["50 %"]), rows, ..Table::default() };
    let make = |_: &[Change]| -> Result<Table> { panic!("nothing to look into") };
    let runs = Runs::new(&make);
    let claim: Claim = check("…", &table, &runs, lfu_wins)
        .unless("no cause", &[Change::Link(2.0)])
        .unwrap()
        .done();
    assert_eq!(claim.markdown(), "- … — not judged: there are no figures\n");
}

#[test]
fn part_of_a_difference_is_told_from_all_of_it() {
    let table = |n: [f64; 2]| Table {
        columns: columns("x", ["a", "b"]),
        rows: vec![Row::numbers("up", 0, n), Row::numbers("down", 0, [1.0, 1.0])],
        ..Table::default()
    };
    let make = |changes: &[Change]| match changes {
        [] | [_] => Ok(table([2.0, 0.0])),
        _ => Ok(table([f64::NAN; 2])),
    };
    let runs = Runs::new(&make);
    let measured = table([0.0, 0.0]);
    let claim = check("…", &measured, &runs, |t| t.compare("up", "down", 0.0))
        .unless("that", &[Change::Own("without it")])
        .unwrap()
        .unless("more", &[Change::Own("without it"), Change::Own("this")])
        .unwrap()
        .done();
    let text = claim.markdown();
    assert!(text.contains("**differs**: 0 of 2, at worst up 0 and down 1 at a\n"), "{text}");
    assert!(text.contains("in part because that: without it more of it holds (1 of 2"), "{text}");
    assert!(text.contains("unknown whether because more: without it and this nothing"), "{text}");
    assert!(text.contains("explained by none"), "{text}");
}
