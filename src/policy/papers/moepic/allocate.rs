//! `VramAllocation` of MoEpic's Algorithm 1: from some division of the slots among the layers to a
//! better one, by moving ζ of all slots at a time from the layer that would lose least to the one
//! that would gain most, until the exposed latency falls no more.
//!
//! Differences from the paper:
//! - A move is in whole slots, and smaller than ζ where the giver would not keep one slot or the
//!   taker would have more than its experts fill.
//! - When a move of ζ no longer pays, moves of half as much are tried, and so on down to one slot.
//!   In a model of 48 layers the paper's ζ is half of a layer's part, and moves of that size alone
//!   mostly end with the first.
//! - Slots of different granule sizes are not exchanged, so each size class is divided by itself,
//!   with the windows of the whole model; as a move in one class changes windows in the other,
//!   they take turns until neither moves.

use super::exposure::Exposure;
use crate::policy::Shape;

/// The search terminates, as each move lowers the exposed latency, but without a bound on the
/// number of moves. Some 60 moves are usual with 48 layers; they and the failed ones take 5 ms.
const N_MOVES_MAX: usize = 1000;

/// Layers that exchange slots.
struct Pool<'a> {
    layers: &'a [usize],
    /// Slots of one move.
    step: usize,
}

/// A division of the slots.
#[derive(Clone)]
struct Division {
    n_slots: Vec<usize>,
    /// By layer, ns.
    exposed: Vec<f64>,
    keep: Vec<usize>,
}

impl Division {
    fn new(exposure: &Exposure, n_slots: Vec<usize>) -> Division {
        let mut keep = vec![0; n_slots.len()];
        let exposed = exposure.expert_split(&n_slots, &mut keep);
        Division { n_slots, exposed, keep }
    }

    fn exposed_ns(&self) -> f64 {
        self.exposed.iter().sum()
    }
}

/// The layers of each size class that have experts.
pub(super) fn layers_of_classes(shape: &Shape) -> Vec<Vec<usize>> {
    let of_class = |class: usize| shape.moe_layers().filter(|l| shape.class[*l] == class).collect();
    (0..shape.n_slots.len()).map(of_class).collect()
}

/// Slots that a layer's experts fill when all of them are whole.
fn most(shape: &Shape, layer: usize) -> usize {
    shape.n_experts[layer] * shape.n_granules[layer]
}

/// Equal parts for all layers of a class: V_e ÷ L. A layer whose experts are all there leaves the
/// rest of its part to the others; where that is so everywhere, what is left goes to all.
pub(super) fn uniform(shape: &Shape) -> Vec<usize> {
    let mut n_slots = vec![0; shape.n_layers()];
    for (mut layers, total) in layers_of_classes(shape).into_iter().zip(&shape.n_slots) {
        layers.sort_by_key(|layer| most(shape, *layer));
        let mut left = *total;
        for (at, &layer) in layers.iter().enumerate() {
            n_slots[layer] = (left / (layers.len() - at)).min(most(shape, layer));
            left -= n_slots[layer];
        }
        for (at, &layer) in layers.iter().enumerate() {
            let part = left / (layers.len() - at);
            n_slots[layer] += part;
            left -= part;
        }
    }
    n_slots
}

/// Improves a division; answers it with the granules that each layer's experts keep.
pub(super) fn allocate(
    exposure: &Exposure,
    shape: &Shape,
    zeta: f64,
    n_slots: Vec<usize>,
) -> (Vec<usize>, Vec<usize>) {
    let classes = layers_of_classes(shape);
    let pools = classes.iter().zip(&shape.n_slots).map(|(layers, total)| {
        let step = (zeta * *total as f64).round().max(1.0) as usize;
        Pool { layers, step }
    });
    let mut pools: Vec<Pool<'_>> = pools.collect();
    let mut now = Division::new(exposure, n_slots);
    let mut moves_left = N_MOVES_MAX;
    while moves_left > 0 {
        let before = moves_left;
        for pool in &pools {
            while let Some(next) = pool.exchange(exposure, shape, &now).filter(|_| moves_left > 0) {
                now = next;
                moves_left -= 1;
            }
        }
        if moves_left == before {
            if pools.iter().all(|pool| pool.step == 1) {
                break;
            }
            pools.iter_mut().for_each(|pool| pool.step = (pool.step / 2).max(1));
        }
    }
    (now.n_slots, now.keep)
}

impl Pool<'_> {
    /// The division after the move that promises most, unless it does not lower the exposed
    /// latency or no layer can give or take.
    fn exchange(&self, exposure: &Exposure, shape: &Shape, now: &Division) -> Option<Division> {
        let room = |l: usize| most(shape, l).saturating_sub(now.n_slots[l]);
        let spare = |l: usize| now.n_slots[l].saturating_sub(1);
        // T_2 and T_3 of lines 17 and 18: all layers shifted at once, so windows shift as well.
        let (mut raised, mut lowered) = (now.n_slots.clone(), now.n_slots.clone());
        for &l in self.layers {
            raised[l] += self.step.min(room(l));
            lowered[l] -= self.step.min(spare(l));
        }
        let raised = Division::new(exposure, raised).exposed;
        let lowered = Division::new(exposure, lowered).exposed;
        let gain = |l: usize| now.exposed[l] - raised[l];
        let loss = |l: usize| lowered[l] - now.exposed[l];
        // The first of equals.
        let takers = self.layers.iter().copied().filter(|l| room(*l) > 0);
        let taker = takers.min_by(|a, b| gain(*b).total_cmp(&gain(*a)))?;
        let givers = self.layers.iter().copied().filter(|l| *l != taker && spare(*l) > 0);
        let giver = givers.min_by(|a, b| loss(*a).total_cmp(&loss(*b)))?;
        let moved = self.step.min(room(taker)).min(spare(giver));
        let mut n_slots = now.n_slots.clone();
        n_slots[taker] += moved;
        n_slots[giver] -= moved;
        let after = Division::new(exposure, n_slots);
        (after.exposed_ns() < now.exposed_ns()).then_some(after)
    }
}
