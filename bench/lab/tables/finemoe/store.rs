//! Figure 16a: how near the best stored map is, by how many are stored.

use super::split::{Split, iteration, shape, steps};
use super::{routing_of, stated};
use crate::tables::{Axes, Claim, Inputs, Row, Source, Table, columns};
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
    let (mut rows, mut settings) = (Vec::new(), Vec::new());
    for source in inputs.sources() {
        let routing = source.routing();
        let split = Split::of(source.trace);
        let known = sample(&routing, &split.known, N_STORED);
        let new = sample(&routing, &split.new, N_SEARCHED);
        let found = CAPACITIES.map(|capacity| search(&routing, capacity, &known, &new));
        let name = |what: &str| format!("{what}, {}", source.trace.header().model);
        rows.push(Row::numbers(name("semantic"), 3, found.map(|found| found.semantic)));
        rows.push(Row::numbers(name("trajectory"), 3, found.map(|found| found.trajectory)));
        settings.push(setting(&source, known.len(), new.len()));
    }
    let mut table = Table {
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
    };
    table.claims = claims(&table);
    Ok(vec![table])
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

fn claims(table: &Table) -> Vec<Claim> {
    let rows: Vec<Vec<f64>> = table.rows.iter().map(|row| table.values(&row.name)).collect();
    let at = CAPACITIES.iter().position(|capacity| *capacity == CHOSEN).expect("it is among them");
    let rises = rows.iter().all(|row| row.windows(2).all(|pair| pair[1] >= pair[0] - 0.005));
    let gains = |row: &Vec<f64>| (row[at] - row[0], row[row.len() - 1] - row[at]);
    vec![
        Claim::new(
            "Similarity rises with the capacity (to 0.005)",
            rises,
            "what makes room is what resembles a newcomer the most, so a larger store is not \
             always one that holds all of a smaller",
        ),
        Claim::new(
            "From 32 to 1,000 maps it rises by more than from there to 4,000",
            rows.iter().map(gains).all(|(below, above)| below > above),
            "the texts repeat themselves over longer ranges than a thousand iterations",
        ),
    ]
}
