//! Random events for this module's tests.

use crate::policy::{Event, LookAhead, Routed, Shape};
use proptest::prelude::*;

/// Layers 0 and 3 are dense; layer 4 has a granule size of its own.
pub fn shape() -> Shape {
    Shape {
        n_experts: vec![0, 9, 12, 0, 4],
        k: 2,
        n_granules: vec![0, 3, 3, 0, 2],
        class: vec![0, 0, 0, 0, 1],
        n_slots: vec![25, 5],
    }
}

/// A router's choice.
#[derive(Clone, Debug)]
pub struct Step {
    pub request: u32,
    pub layer: u32,
    pub chosen: Vec<u32>,
    /// A layer and scores of its experts; of no length that fits where nothing is predicted.
    pub ahead: (u32, Vec<f32>),
}

const MOE_LAYERS: [u32; 3] = [1, 2, 4];

fn step() -> impl Strategy<Value = Step> {
    let layer = || prop::sample::select(&MOE_LAYERS[..]);
    // Few different scores: equals are common.
    let scores = prop::collection::vec((0u8..6).prop_map(|score| f32::from(score) / 8.0), 12);
    (0u32..2, layer(), any::<u32>(), prop::option::weighted(0.8, layer()), scores).prop_map(
        |(request, layer, at, ahead, mut scores)| {
            let n = shape().n_experts[layer as usize] as u32;
            // Squared, so that some experts are more frequent than others.
            let first = (at % n) * (at / n % n) / n;
            let chosen = (0..2).map(|i| (first + i) % n).collect();
            // The layer after the last does not exist; a wrong number must do no harm.
            let ahead = ahead.unwrap_or(5);
            scores.truncate(shape().n_experts.get(ahead as usize).copied().unwrap_or(3));
            Step { request, layer, chosen, ahead: (ahead, scores) }
        },
    )
}

pub fn history() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 0..150)
}

pub fn routed(step: &Step) -> Event<'_> {
    let ahead = Some(LookAhead { layer: step.ahead.0, probs: &step.ahead.1 });
    let Step { request, layer, ref chosen, .. } = *step;
    Event::Routed(Routed { request, layer, chosen, probs: &[], hidden: &[], ahead })
}
