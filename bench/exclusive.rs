//! How many copies of what is in VRAM should memory keep, where experts are on disk, in memory and
//! in VRAM at once? Routing of trained models, an LRU in both tiers; every expert that VRAM misses
//! is brought there through memory. The rule in question (`COPIES` in
//! src/experts/tier/state/room.rs): while more than a share of memory's slots hold copies, the
//! hottest copy leaves first; otherwise the coldest expert does.
//!
//!     cargo bench --bench exclusive -- bench/traces/demo.mtrace bench/traces/sibling.mtrace
//!
//! Prints the percentage of uses that read the disk, by sizes of the tiers and by that share.

use moeba::trace::format::Trace;
use moeba::trace::{Routing, Traced};
use std::collections::HashMap;
use std::path::Path;

/// (layer, expert)
type Id = (usize, u32);

/// Parts of all experts that VRAM and memory hold.
const SIZES: [(f64, f64); 6] =
    [(0.1, 0.3), (0.1, 0.6), (0.25, 0.25), (0.25, 0.5), (0.25, 0.7), (0.4, 0.4)];

/// `None`: copies are experts like any other.
const SHARES: [Option<f64>; 6] =
    [None, Some(0.0), Some(0.125), Some(0.25), Some(1.0 / 3.0), Some(0.5)];

/// Decode steps of each trace.
const STEPS: usize = 1500;

/// What is in a tier, and when each expert was used last, which both tiers know.
fn coldest(tier: &[Id], used: &HashMap<Id, u64>) -> usize {
    (0..tier.len()).min_by_key(|i| used[&tier[*i]]).expect("a tier of some size")
}

fn victim(memory: &[Id], vram: &[Id], used: &HashMap<Id, u64>, share: Option<f64>) -> usize {
    let copies: Vec<usize> = (0..memory.len()).filter(|i| vram.contains(&memory[*i])).collect();
    match share {
        Some(share) if copies.len() as f64 > share * memory.len() as f64 => {
            copies.into_iter().max_by_key(|i| used[&memory[*i]]).expect("a copy")
        }
        _ => coldest(memory, used),
    }
}

/// Puts an expert in, where `n` have room; `leaves` says who goes.
fn put(tier: &mut Vec<Id>, n: usize, id: Id, leaves: impl Fn(&[Id]) -> usize) {
    if tier.len() >= n {
        let i = leaves(tier);
        tier.swap_remove(i);
    }
    tier.push(id);
}

/// The part of uses that read the disk.
fn disk_reads(uses: &[Id], n_vram: usize, n_memory: usize, share: Option<f64>) -> f64 {
    let (mut vram, mut memory) = (Vec::new(), Vec::new());
    let (mut used, mut reads) = (HashMap::new(), 0);
    for (clock, id) in uses.iter().enumerate() {
        if !vram.contains(id) {
            if !memory.contains(id) {
                reads += 1;
                put(&mut memory, n_memory, *id, |memory| victim(memory, &vram, &used, share));
            }
            put(&mut vram, n_vram, *id, |vram| coldest(vram, &used));
        }
        used.insert(*id, clock as u64);
    }
    f64::from(reads) / uses.len() as f64
}

/// Experts that decode uses, in order.
fn uses(routing: &Traced) -> Vec<Id> {
    let requests = 0..routing.n_requests();
    let steps = requests.flat_map(|r| routing.passes(r)).filter(|pass| !pass.is_prompt);
    let mut chosen = Vec::new();
    let mut uses = Vec::new();
    for pass in steps.take(STEPS) {
        for layer in (0..routing.n_experts().len()).filter(|l| routing.n_experts()[*l] > 0) {
            routing.chosen(pass.tokens.start, layer, &mut chosen);
            uses.extend(chosen.iter().map(|expert| (layer, *expert)));
        }
    }
    uses
}

fn main() {
    let paths = std::env::args().skip(1).filter(|arg| arg != "--bench");
    for path in paths {
        let trace = Trace::open(Path::new(&path)).expect("a trace");
        let routing = Traced::new(&trace, 512);
        let (uses, all) = (uses(&routing), routing.n_experts().iter().sum::<usize>());
        let names = SHARES.map(|s| s.map_or("no rule".into(), |s| format!("{:.0} %", 100.0 * s)));
        println!("\n{path}: {all} experts, {} uses\n", uses.len());
        println!("| VRAM | memory | {} |", names.join(" | "));
        println!("|---|---|{}", "---|".repeat(SHARES.len()));
        for (vram, memory) in SIZES {
            let slots = |part: f64| (part * all as f64) as usize;
            let of = |share| 100.0 * disk_reads(&uses, slots(vram), slots(memory), share);
            let cells = SHARES.map(|share| format!("{:.1}", of(share)));
            println!("| {vram} | {memory} | {} |", cells.join(" | "));
        }
    }
}
