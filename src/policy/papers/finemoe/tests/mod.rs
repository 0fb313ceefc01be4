//! The parts against the paper's definitions, computed plainly.

mod compression;
mod cost;
mod distances;
mod events;
mod invariants;
mod persistence;
mod replacement;
mod searches;

use super::*;
use crate::policy::random::mix;
use crate::policy::*;
use proptest::prelude::*;

/// Layers 0 and 3 are dense. One layer has more experts than a row keeps.
const N_EXPERTS: [usize; 5] = [0, 6, 40, 0, 9];
const MOE_LAYERS: [u32; 3] = [1, 2, 4];
const K: usize = 2;

fn shape() -> Shape {
    Shape::of_model(N_EXPERTS.to_vec(), K)
}

/// 0 to below 1, always the same.
fn draw(seed: u64, at: u64) -> f32 {
    (mix(mix(seed) ^ at) >> 40) as f32 / (1 << 24) as f32
}

/// Standard normal.
fn normal(seed: u64, at: u64) -> f32 {
    let (u, v) = (draw(seed, 2 * at), draw(seed, 2 * at + 1));
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

/// Softmax of normal logits; the deeper the valleys, the higher `peak`. Rows of seeds of one topic
/// (the hundreds) are alike.
fn softmax(seed: u64, layer: usize, n_experts: usize, peak: f32) -> Vec<f32> {
    let logit = |expert: usize| {
        let at = (layer << 16 | expert) as u64;
        peak * (0.8 * normal(seed / 100, at) + 0.6 * normal(seed + 1_000_000, at))
    };
    let weights: Vec<f32> = (0..n_experts).map(|expert| logit(expert).exp()).collect();
    let sum: f32 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

fn embedding(seed: u64, len: usize) -> Vec<f32> {
    let value = |i| 0.8 * normal(seed / 100, 1 << 40 | i) + 0.6 * normal(seed, 1 << 41 | i);
    (0..len as u64).map(value).collect()
}

fn iteration(shape: &Shape, seed: u64, peak: f32) -> Iteration {
    let row = |layer| softmax(seed, layer, shape.n_experts[layer], peak);
    Iteration { embedding: embedding(seed, 64), map: shape.moe_layers().map(row).collect() }
}

fn trajectory(store: &MapStore, shape: &Shape, iteration: &Iteration) -> Trajectory {
    let mut trajectory = Trajectory::new(store);
    for (layer, probs) in shape.moe_layers().zip(&iteration.map) {
        trajectory.push(store, layer as u32, probs);
    }
    trajectory
}

fn insert(store: &mut MapStore, shape: &Shape, iteration: &Iteration) -> usize {
    let trajectory = trajectory(store, shape, iteration);
    store.insert(&iteration.embedding, &trajectory)
}

/// A stored map, as it comes back.
fn stored(store: &MapStore, shape: &Shape, index: usize) -> Iteration {
    let row = |layer| {
        let mut probs = Vec::new();
        store.probs(index, layer as u32, &mut probs);
        probs
    };
    Iteration { embedding: Vec::new(), map: shape.moe_layers().map(row).collect() }
}

fn start(request: u32, embedding: &[f32]) -> Event<'_> {
    Event::IterationStart { request, phase: Phase::Decode, token: None, embedding }
}

fn routed(request: u32, layer: u32, probs: &[f32]) -> Event<'_> {
    Event::Routed(Routed { request, layer, chosen: &[], probs, hidden: &[], ahead: None })
}

fn end(request: u32) -> Event<'static> {
    Event::IterationEnd { request, phase: Phase::Decode, timing: Timing::default() }
}

/// A decode step of one request, whole.
fn run(predictor: &mut FineMoe, request: u32, iteration: &Iteration) {
    predictor.observe(&start(request, &iteration.embedding));
    for (layer, probs) in MOE_LAYERS.into_iter().zip(&iteration.map) {
        predictor.observe(&routed(request, layer, probs));
    }
    predictor.observe(&end(request));
}
