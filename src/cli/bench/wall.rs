//! The machine's walls beside a test's figures.

use super::super::stats;
use crate::engine::{Engine, memory};
use crate::machine::{Rounds, Wall};
use crate::simd;

/// What the engine's threads can do at most, right now: where others share the machine it changes
/// within seconds. The memory that this takes for a moment is no part of what a test takes.
pub fn measure(engine: &Engine) -> Wall {
    let (kernels, available) = (simd::kernels().name, memory::available_bytes());
    let wall = Wall::measure(engine.n_threads(), kernels, available, engine.weights_in_place());
    stats::forget_peak_rss();
    wall
}

/// Says what was measured before each run of a test.
pub fn tell(n_threads: usize, walls: &[Wall]) {
    if walls.is_empty() {
        return;
    }
    let range = |of: fn(&Wall) -> &Option<Rounds>, unit: &str| {
        let all = walls.iter().filter_map(|wall| of(wall).as_ref().map(Rounds::median));
        match all.clone().reduce(f64::min).zip(all.reduce(f64::max)) {
            Some((least, most)) => format!("{least:.1} to {most:.1} {unit}"),
            None => format!("- {unit}"),
        }
    };
    let read = range(|wall| &wall.read_gb_per_second, "GB/s");
    let ops = range(|wall| &wall.giga_ops_per_second, "GOP/s");
    log::info!("machine, {n_threads} threads: reads {read}, multiplies and adds {ops}");
    if !walls.iter().all(Wall::is_steady) {
        log::warn!("the machine is too busy to measure: its figures differ from round to round");
    }
}
