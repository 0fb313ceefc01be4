//! The cost of a token's searches.

use super::*;
use std::time::{Duration, Instant};

/// `cargo test --release --lib finemoe::tests::cost -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn cost_of_a_token_of_48_layers_of_128_experts_and_1000_maps() {
    let shape = Shape::of_model(vec![128; 48], 8);
    let mut predictor = FineMoe::new(&shape, FineMoeOptions::default());
    let iterations: Vec<Iteration> = (0..1200)
        .map(|seed| Iteration { embedding: embedding(seed, 2048), ..iteration(&shape, seed, 2.0) })
        .collect();
    let mut out = Vec::new();
    let mut times = [Duration::ZERO; 3];
    for (n, iteration) in iterations.iter().enumerate() {
        let mut at = |part: usize, event: Event<'_>, predictor: &mut FineMoe| {
            let begin = Instant::now();
            predictor.observe(&event);
            if event.is_step() {
                predictor.predict(&mut out);
            }
            if n >= 1000 {
                times[part] += begin.elapsed();
            }
        };
        at(0, start(0, &iteration.embedding), &mut predictor);
        for (layer, probs) in (0..).zip(&iteration.map) {
            at(1, routed(0, layer, probs), &mut predictor);
        }
        at(2, end(0), &mut predictor);
    }
    let micros = times.map(|time| time.as_secs_f64() * 1e6 / 200.0);
    eprintln!(
        "µs a token: semantic {:.0}, trajectory {:.0}, storing {:.0}",
        micros[0], micros[1], micros[2]
    );
}
