//! On a small made-up trace: the tables have their rows, and figures in all that must have any.

use super::split::{Split, iterations, profile, shape};
use super::*;
use crate::tables::side_by_side_live::Live;
use moeba::policy::mix;
use moeba::policy::{EamcPredictor, FineMoe, FineMoeOptions, InfinityOptions, Phase};
use moeba::trace::Routing;
use moeba::trace::format::{Header, LayerShape, Trace, Writer};
use std::path::Path;

const N_LAYERS: usize = 6;
const N_EXPERTS: usize = 8;
const N_EMBD: usize = 8;
const N_REQUESTS: usize = 40;
const AHEAD: usize = 3;
/// Themes. Experts follow the last token's theme, so that they can be predicted.
const N_THEMES: u64 = 5;

fn draw(of: [u64; 3]) -> u64 {
    of.iter().fold(0, |sum, part| mix(sum ^ part))
}

fn vector(n: usize, of: [u64; 2]) -> Vec<f32> {
    let values = (0..n as u64).map(|i| (draw([of[0], of[1], i]) % 1000) as f32 / 1000.0);
    values.collect()
}

/// A theme's probabilities in a layer.
fn probs(theme: u64, layer: u64) -> Vec<f32> {
    let values: Vec<f32> =
        vector(N_EXPERTS, [100 + theme, layer]).iter().map(|x| x.powi(4) + 0.001).collect();
    let sum: f32 = values.iter().sum();
    values.iter().map(|x| x / sum).collect()
}

fn trace() -> Trace {
    let layer = LayerShape { n_experts: N_EXPERTS, ..LayerShape::default() };
    let header = Header {
        model: "made up".into(),
        n_embd: N_EMBD,
        k: 2,
        layers: vec![layer; N_LAYERS],
        ahead: AHEAD,
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), header).unwrap();
    for request in 0..N_REQUESTS as u64 {
        writer.begin_request(["a", "b"][request as usize * 2 / N_REQUESTS]).unwrap();
        for pass in 0..5 {
            let phase = if pass == 0 { Phase::Prompt } else { Phase::Decode };
            let n_tokens = if pass == 0 { 2 } else { 1 };
            let theme = draw([request, pass, 0]) % N_THEMES;
            let ids = vec![theme as u32; n_tokens];
            writer.begin_pass(phase, &ids, &vector(N_EMBD, [theme, 0]).repeat(n_tokens)).unwrap();
            for layer in 0..N_LAYERS {
                let row = probs(theme, layer as u64);
                let chosen = moeba::policy::papers::finemoe::top_k(&row, 2);
                writer.routed(layer, &chosen.repeat(n_tokens), &row.repeat(n_tokens));
                for distance in (1..=AHEAD).filter(|_| phase == Phase::Decode) {
                    // Right at a distance of 1, and of another theme beyond.
                    let theme = theme + distance as u64 - 1;
                    let target = (layer + distance) % N_LAYERS;
                    writer.ahead(layer, distance, &probs(theme, target as u64));
                }
            }
        }
    }
    Trace::decode(&writer.finish().unwrap(), Path::new("made up")).unwrap()
}

fn is_finite(table: &Table) -> bool {
    table.rows.iter().flat_map(|row| &row.cells).all(|cell| cell.value().is_some())
}

#[test]
fn known_and_new_requests_are_all_and_of_all_kinds() {
    let trace = trace();
    let split = Split::of(&trace);
    assert_eq!((split.known.len(), split.new.len()), (28, 12));
    let mut all: Vec<usize> = split.known.iter().chain(&split.new).copied().collect();
    all.sort_unstable();
    assert_eq!(all, (0..N_REQUESTS).collect::<Vec<_>>());
    assert_eq!(split.known[..4], [0, 20, 1, 21]);
    assert_eq!(split.new[..4], [14, 34, 15, 35]);
    let part = split.at_most(3, 1);
    assert_eq!((part.known, part.new), (vec![0, 20, 1], vec![14]));
}

#[test]
fn what_was_learned_is_restored() {
    let trace = trace();
    let inputs = Inputs::new(&trace, None, None);
    let routing = inputs.fine.routing();
    let known = Split::of(&trace).known;
    let profile = profile(&routing, &known);
    let shape = shape(&routing);
    let map = profile.get(FineMoe::SECTION).unwrap();
    let map = FineMoe::restore(&shape, FineMoeOptions::default(), map).unwrap();
    // Prompts are iterations, too.
    let n_steps = iterations(&routing, &known).len();
    assert_eq!(map.store().len(), n_steps + known.len());
    let eamc = profile.get(EamcPredictor::SECTION).unwrap();
    EamcPredictor::restore(&shape, InfinityOptions::default(), eamc).unwrap();
    assert_eq!(routing.n_requests(), N_REQUESTS);
}

#[test]
fn what_always_repeats_itself_is_predicted() {
    let trace = trace();
    let table = &figure_14a(&Inputs::new(&trace, None, Some(&trace))).unwrap()[0];
    let n = N_LAYERS as f64;
    let speculate = table.values("Speculate");
    // The next router is right, and there is none before the first layer.
    assert!((speculate[0] - 100.0 * (n - 1.0) / n).abs() < 1e-9, "{speculate:?}");
    assert!((table.values("Speculate, later layers")[0] - 100.0).abs() < 1e-9);
    assert!(speculate[AHEAD..].iter().all(|rate| rate.is_nan()));
    assert!(table.values("Map (T+S)").iter().all(|rate| *rate > 99.0));
    let trajectory = table.values("Map (T)");
    for (rate, distance) in trajectory.iter().zip(1..) {
        let expected = 100.0 * (n - f64::from(distance)) / n;
        assert!((rate - expected).abs() < 1.0, "{trajectory:?}");
    }
}

#[test]
fn live_runs_of_finemoe_stand_beside_the_replayed() {
    let trace = trace();
    let mut inputs = Inputs::new(&trace, None, None);
    let replayed = figure_17(&inputs).unwrap().remove(0);
    for line in
        ["demo;on-demand;0.25;1;0.5;0.25;3;0.5;9", "demo;finemoe;0.25;1,2,3;0.5;0.75;3;0.004;9"]
    {
        inputs.live.push(Live::parse(line).unwrap());
    }
    let table = figure_17(&inputs).unwrap().remove(0);
    let (rows, live) = table.rows.split_at(replayed.rows.len());
    assert_eq!(rows, replayed.rows);
    assert_eq!(live.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(), ["live, demo, 25 %"]);
    let cells: Vec<f64> =
        table.values("live, demo, 25 %").into_iter().filter(|x| !x.is_nan()).collect();
    assert_eq!(cells, [0.75, 2.0, 8.0, 0.4]);
    // The claim follows the figures.
    let claim = table.claims.last().unwrap();
    assert!(claim.holds() && claim.found.figures.contains("0.4 %"), "{claim:?}");
    inputs.live.push(Live::parse("demo;finemoe;0.5;2;0.5;0.75;3;0.02;9").unwrap());
    let table = figure_17(&inputs).unwrap().remove(0);
    let claim = table.claims.last().unwrap();
    assert!(!claim.holds() && claim.markdown().contains("the demo model's iterations are short"));
    assert_eq!(table.claims.len(), replayed.claims.len() + 1);
}

#[test]
fn all_tables_have_their_figures() {
    let trace = trace();
    let inputs = Inputs::new(&trace, Some(&trace), Some(&trace));
    for table in all(&inputs).unwrap() {
        assert!(table.rows.len() >= 2 && !table.claims.is_empty(), "{}", table.id);
        assert!(table.rows.iter().all(|row| row.cells.len() + 1 == table.columns.len()));
        // Bins may be empty, and the trace has not all distances.
        if !["finemoe-fig-3", "finemoe-fig-8", "finemoe-fig-14a"].contains(&table.id) {
            assert!(is_finite(&table), "{table:?}");
        }
        if table.plot.is_some() {
            assert!(crate::plot::svg(&table).is_some(), "{}", table.id);
        }
    }
}
