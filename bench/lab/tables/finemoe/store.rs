//! Figure 16a: how near the best stored map is, by how many are stored.

use super::split::{Split, iteration, shape, steps};
use super::{routing_of, stated};
use crate::tables::{
    Alteration, Axes, Change, Claim, Compared, Finding, Inputs, Row, Runs, Source, Table, check,
    columns,
};
use moeba::Result;
use moeba::policy::FineMoeOptions;
use moeba::policy::papers::finemoe::{Iteration, MapStore, Trajectory};
use moeba::trace::Routing;

const CAPACITIES: [usize; 8] = [32, 64, 128, 256, 500, 1000, 2000, 4000];
/// The paper's choice.
const CHOSEN: usize = 1000;

/// Decode steps that are stored, if there are as many, and searched for.
const N_STORED: usize = 4200;
const N_SEARCHED: usize = 400;

pub fn figure_16a(inputs: &Inputs) -> Result<Vec<Table>> {
    let make = |changes: &[Change]| inputs.with(changes, |inputs| rows(inputs, changes));
    let mut table = make(&[])?;
    table.claims = claims(&table, &Runs::new(&make))?;
    Ok(vec![table])
}

fn rows(inputs: &Inputs, changes: &[Change]) -> Result<Table> {
    let (mut rows, mut settings) = (Vec::new(), Vec::new());
    for source in inputs.sources() {
        let routing = source.routing();
        let split = Split::of(source.trace);
        let known = sample(&routing, &split.known, N_STORED);
        let new = sample(&routing, &split.new, N_SEARCHED);
        let newest = changes.contains(&NEWEST);
        let found = CAPACITIES.map(|capacity| {
            let first = if newest { known.len().saturating_sub(capacity) } else { 0 };
            search(&routing, capacity, &known[first..], &new)
        });
        let name = |what: &str| format!("{what}, {}", source.trace.header().model);
        rows.push(Row::numbers(name("semantic"), 3, found.map(|found| found.semantic)));
        rows.push(Row::numbers(name("trajectory"), 3, found.map(|found| found.trajectory)));
        settings.push(setting(&source, known.len(), new.len()));
    }
    Ok(Table {
        id: "finemoe-fig-16a",
        title: "FineMoE, Figure 16a: mean similarity of what searches find, by store capacity"
            .into(),
        setting: format!(
            "{} The semantic search is by the token's embedding; trajectories are those of all \
             searches of a step with d = 3.",
            settings.join(" Also ")
        ),
        columns: columns("search", CAPACITIES),
        rows,
        paper: Some(stated(
            "a plot, of which the text states",
            &[
                ("below 1K", "a significant increase with the capacity"),
                ("above 1K", "diminishing gains"),
            ],
        )),
        claims: Vec::new(),
        plot: Some(Axes { x: "maps that are kept at most".into(), y: "similarity".into() }),
    })
}

fn setting(source: &Source, n_stored: usize, n_searched: usize) -> String {
    format!(
        "{}; {n_stored} decode steps of known requests are stored one after another, the most \
         redundant making room, then {n_searched} of others searched for.",
        routing_of(source.trace)
    )
}

/// Decode steps at even intervals, no more than so many.
fn sample(routing: &dyn Routing, requests: &[usize], n: usize) -> Vec<Iteration> {
    let steps = steps(routing, requests);
    let n = n.min(steps.len());
    (0..n).map(|i| iteration(routing, steps[i * steps.len() / n])).collect()
}

#[derive(Clone, Copy)]
struct Found {
    semantic: f64,
    trajectory: f64,
}

fn search(routing: &dyn Routing, capacity: usize, known: &[Iteration], new: &[Iteration]) -> Found {
    let shape = shape(routing);
    let distance = FineMoeOptions::default().distance;
    let mut store = MapStore::new(&shape, capacity, distance);
    let mut trajectory = Trajectory::new(&store);
    let layers: Vec<u32> = shape.moe_layers().map(|layer| layer as u32).collect();
    for iteration in known {
        trajectory.restart(&store);
        for (layer, probs) in layers.iter().zip(&iteration.map) {
            trajectory.push(&store, *layer, probs);
        }
        store.insert(&iteration.embedding, &trajectory);
    }
    let (mut semantic, mut by_layer) = (Mean::default(), Mean::default());
    for iteration in new {
        semantic.add(store.nearest(&iteration.embedding).map(|found| found.score));
        trajectory.restart(&store);
        let n_searches = layers.len().saturating_sub(distance);
        for (layer, probs) in layers.iter().zip(&iteration.map).take(n_searches) {
            trajectory.push(&store, *layer, probs);
            by_layer.add(trajectory.best().map(|found| found.score));
        }
    }
    Found { semantic: semantic.value(), trajectory: by_layer.value() }
}

#[derive(Default)]
struct Mean {
    n: usize,
    sum: f64,
}

impl Mean {
    fn add(&mut self, value: Option<f32>) {
        let Some(value) = value else { return };
        (self.n, self.sum) = (self.n + 1, self.sum + f64::from(value));
    }

    fn value(&self) -> f64 {
        self.sum / self.n as f64
    }
}

const NEWEST: Change = Change::Own("with stores of the newest maps alone");

/// By how much similarity may fall for nothing; ours.
const NOISE: f64 = 0.005;

fn rises(table: &Table) -> Finding {
    let steps = table.rows.iter().flat_map(|row| {
        let values = table.values(&row.name);
        let steps = (1..values.len()).map(move |at| (at, values[at - 1], values[at]));
        steps.map(|(at, before, after)| Compared {
            margin: after - before + NOISE,
            figures: format!(
                "{before:.3} and then {after:.3} with {} maps of {}",
                CAPACITIES[at], row.name
            ),
        })
    });
    Finding::of(steps)
}

fn diminishing(table: &Table) -> Finding {
    let at = CAPACITIES.iter().position(|capacity| *capacity == CHOSEN).expect("it is among them");
    Finding::strict(table.rows.iter().map(|row| {
        let values = table.values(&row.name);
        let (below, above) = (values[at] - values[0], values[values.len() - 1] - values[at]);
        let figures = format!("by {below:.3} to {CHOSEN} and by {above:.3} beyond, {}", row.name);
        Compared { margin: below - above, figures }
    }))
}

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let rises =
        check("Similarity rises with the capacity (to 0.005, which is ours)", table, runs, rises)
            .unless("what makes room is what resembles a newcomer most", &[NEWEST])?;
    let text = "From 32 to 1,000 maps it rises by more than from there to 4,000";
    let diminishing = check(text, table, runs, diminishing)
        .unless("texts of a kind come together", &[Change::Routing(Alteration::Shuffle)])?;
    Ok(vec![rises.done(), diminishing.done()])
}
