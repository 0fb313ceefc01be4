//! The machine's walls beside a test's figures.

use super::super::{figures, stats};
use crate::engine::Engine;
use crate::engine::plan::memory;
use crate::machine::{Rounds, Wall};
use crate::simd;

/// The limits of the machine for the engine's threads, right now: if others share the machine, they
/// change within seconds. The memory that this takes does not count in the test's peak.
pub fn measure(engine: &Engine) -> Wall {
    let (kernels, available) = (simd::kernels().name, memory::available_bytes());
    let wall = Wall::measure(engine.n_threads(), kernels, available, engine.weights_in_place());
    stats::forget_peak_rss();
    wall
}

/// Says what was measured before each run, by so many threads.
pub fn report(walls: &[(usize, Wall)]) {
    for of_threads in walls.chunk_by(|(a, _), (b, _)| a == b) {
        let range = |of: fn(&Wall) -> &Option<Rounds>, unit: &str| {
            let all = of_threads.iter().filter_map(|(_, wall)| of(wall).as_ref());
            let all = all.map(Rounds::median);
            match all.clone().reduce(f64::min).zip(all.reduce(f64::max)) {
                Some((least, most)) => format!("{least:.1} to {most:.1} {unit}"),
                None => format!("- {unit}"),
            }
        };
        let threads = figures::counted(of_threads[0].0, "thread");
        let read = range(|wall| &wall.read_gb_per_second, "GB/s");
        let ops = range(|wall| &wall.giga_ops_per_second, "GOP/s");
        log::info!("machine, {threads}: reads {read}, multiplies and adds {ops}");
    }
    if !walls.iter().all(|(_, wall)| wall.is_steady()) {
        log::warn!("other programs keep this machine busy: its own figures vary from run to run");
    }
}
