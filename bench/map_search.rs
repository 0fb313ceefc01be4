//! FineMoE's expert map store at work, on synthetic routing of 48 layers of 128 experts: time and
//! memory.
//!
//!     cargo bench --bench map_search                    # 1,000 and 32,768 maps, in Markdown
//!     cargo bench --bench map_search -- --maps 4096
//!
//! A decode step is one semantic search and one trajectory search a layer; an insertion follows it.
//! The last line is all of that in the predictor itself, its predictions included.

use moeba::policy::papers::finemoe::{MapStore, Trajectory};
use moeba::policy::{
    Event, FineMoe, FineMoeOptions, Phase, Prediction, Predictor, Routed, Shape, Timing,
};
use std::hint::black_box;
use std::time::Instant;

const N_LAYERS: usize = 48;
const N_EXPERTS: usize = 128;
const K: usize = 8;
const EMBEDDING: usize = 2048;
/// Iterations that routing knows; others are between them.
const N_TOPICS: u64 = 64;
const ROUNDS: usize = 50;

/// Embedding and map.
type Iteration = (Vec<f32>, Vec<Vec<f32>>);

/// SplitMix64, made a uniform number of -1 to 1.
fn noise(seed: u64) -> f32 {
    let z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// A mixture of what the topic says and of what is the iteration's own.
fn mixture(iteration: u64, at: u64) -> f32 {
    let topic = iteration % N_TOPICS;
    0.8 * noise(topic << 32 | at) + 0.6 * noise((iteration + N_TOPICS) << 32 | at)
}

/// Softmax of logits of -5.6 to 5.6: eight of 128 experts have about half of the probability.
fn row(iteration: u64, layer: usize) -> Vec<f32> {
    let logit = |expert: u64| 4.0 * mixture(iteration, (layer as u64) << 16 | expert);
    let weights: Vec<f32> = (0..N_EXPERTS as u64).map(|expert| logit(expert).exp()).collect();
    let sum: f32 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

fn map(iteration: u64) -> Vec<Vec<f32>> {
    (0..N_LAYERS).map(|layer| row(iteration, layer)).collect()
}

fn embedding(iteration: u64) -> Vec<f32> {
    (0..EMBEDDING as u64).map(|i| mixture(iteration, 1 << 31 | i)).collect()
}

/// Calls `work` for each of the rounds; returns the median time, us.
fn median_us(mut work: impl FnMut(u64)) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS as u64)
        .map(|round| {
            let start = Instant::now();
            work(round);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

/// All of a decode step that the predictor does, us a layer.
fn step_us(shape: &Shape, n_maps: usize, iterations: &[Iteration]) -> f64 {
    let options = FineMoeOptions { capacity: n_maps, ..FineMoeOptions::default() };
    let mut predictor = FineMoe::new(shape, options);
    let mut out: Vec<Prediction> = Vec::new();
    let mut step = |(embedding, map): &Iteration| {
        let phase = Phase::Decode;
        predictor.observe(&Event::IterationStart { request: 0, phase, embedding });
        predictor.predict(&mut out);
        for (layer, probs) in (0..).zip(map) {
            let (chosen, hidden, ahead) = (&[][..], &[][..], None);
            let routed = Routed { request: 0, layer, chosen, probs, hidden, ahead };
            predictor.observe(&Event::Routed(routed));
            predictor.predict(&mut out);
        }
        predictor.observe(&Event::IterationEnd { request: 0, phase, timing: Timing::default() });
        black_box(&out);
    };
    (0..n_maps).for_each(|at| step(&iterations[at % iterations.len()]));
    median_us(|round| step(&iterations[round as usize % iterations.len()])) / N_LAYERS as f64
}

fn go(trajectory: &mut Trajectory, store: &MapStore, map: &[Vec<f32>]) {
    trajectory.restart(store);
    (0..).zip(map).for_each(|(layer, probs)| trajectory.push(store, layer, probs));
}

fn full_store(n_maps: usize, shape: &Shape, iterations: &[Iteration]) -> MapStore {
    let mut store = MapStore::new(shape, n_maps, 3);
    // Nothing is searched for, as long as there is room for all.
    let empty = store.clone();
    let mut trajectory = Trajectory::new(&empty);
    for at in 0..n_maps {
        let (embedding, map) = &iterations[at % iterations.len()];
        go(&mut trajectory, &empty, map);
        store.insert(embedding, &trajectory);
    }
    store
}

fn measure(n_maps: usize, shape: &Shape, iterations: &[Iteration]) {
    let mut store = full_store(n_maps, shape, iterations);
    let mut trajectory = Trajectory::new(&store);
    let iteration = |round: u64| &iterations[round as usize % iterations.len()];
    let semantic_us = median_us(|round| {
        black_box(store.nearest(&iteration(round).0));
    });
    let trajectory_us = median_us(|round| {
        trajectory.restart(&store);
        for (layer, probs) in (0..).zip(&iteration(round).1) {
            trajectory.push(&store, layer, probs);
            black_box(trajectory.best());
        }
    }) / N_LAYERS as f64;
    let mut insertions: Vec<f64> = (0..ROUNDS as u64)
        .map(|round| {
            let (embedding, map) = iteration(round);
            go(&mut trajectory, &store, map);
            let start = Instant::now();
            black_box(store.insert(embedding, &trajectory));
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    insertions.sort_by(f64::total_cmp);
    let insertion_us = insertions[ROUNDS / 2];
    let bytes = store.bytes() / n_maps;
    println!("| {n_maps} | {semantic_us:.1} | {trajectory_us:.1} | {insertion_us:.1} | {bytes} |");
}

fn main() {
    let mut sizes = vec![1000, 32768];
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            // Cargo's own.
            "--bench" => {}
            "--maps" => sizes = vec![args.next().and_then(|n| n.parse().ok()).expect("--maps N")],
            _ => {
                eprintln!("usage: cargo bench --bench map_search -- [--maps N]");
                return;
            }
        }
    }
    let shape = Shape::of_model(vec![N_EXPERTS; N_LAYERS], K);
    let iterations: Vec<_> = (0..1000).map(|i| (embedding(i), map(i))).collect();
    println!("| maps | semantic, µs | trajectory, µs/layer | insertion, µs | bytes/map |");
    println!("|---|---|---|---|---|");
    sizes.iter().for_each(|&n_maps| measure(n_maps, &shape, &iterations));
    let step_us = step_us(&shape, 1000, &iterations);
    println!("\nA whole step of the predictor with 1,000 maps: {step_us:.1} µs/layer");
}
