//! The machine's walls beside a test's figures.

use super::super::stats;
use crate::engine::memory;
use crate::machine::{Rounds, Wall};
use crate::simd;

/// What so many threads can do at most. Measured while no model is in memory.
pub fn measure(n_threads: usize) -> Wall {
    let wall = Wall::measure(n_threads, simd::kernels().name, memory::available_bytes());
    // The memory that was read is no part of what a test takes.
    stats::forget_peak_rss();
    let text = |rounds: &Option<Rounds>, unit| match rounds {
        Some(rounds) => format!("{:.1} {unit}", rounds.median()),
        None => format!("- {unit}"),
    };
    let read = text(&wall.read_gb_per_second, "GB/s");
    let ops = text(&wall.giga_ops_per_second, "GOP/s");
    log::info!("machine, {n_threads} threads: reads {read}, multiplies and adds {ops}");
    if !wall.is_steady() {
        log::warn!("the machine is too busy to measure: its figures differ from round to round");
    }
    wall
}
