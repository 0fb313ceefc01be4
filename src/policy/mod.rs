//! Policies: which experts to bring before they are asked for, and which to drop. Pure state
//! machines: told what happened, they answer what they want. They do no I/O and read no clock, so
//! that the engine and the replay simulator drive the very same code and equal events give equal
//! answers.

mod lcp;
mod lfu;
mod lru;
mod next_layer;
mod random;
mod spec;

pub use lcp::Lcp;
pub use lfu::Lfu;
pub use lru::Lru;
pub use next_layer::NextLayer;
pub use random::Random;
pub use spec::{EvictionKind, PolicySpec, PredictorKind};

use std::ops::{Index, IndexMut};

/// One routed expert of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Expert {
    pub layer: u32,
    pub expert: u32,
}

/// What happened. Decode steps only, one token each: prompts leave the working set alone.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The router of MoE layer `layer` has chosen.
    Routed {
        layer: u32,
        /// Best first.
        chosen: &'a [u32],
        /// Of all the layer's experts.
        probs: &'a [f32],
        /// There if a predictor wants it.
        ahead: Option<Ahead<'a>>,
    },
}

/// A guess at a layer that comes later: its router, applied to the present layer's activation.
#[derive(Clone, Copy, Debug)]
pub struct Ahead<'a> {
    pub layer: u32,
    /// Of all experts of that layer.
    pub probs: &'a [f32],
}

/// What to drop.
pub trait Eviction: Send {
    fn observe(&mut self, event: &Event<'_>);

    /// Who has the lowest goes first. Holds until the next event; of equals any may go. Never NaN.
    fn priority(&self, expert: Expert) -> f64;
}

/// What to bring.
pub trait Predictor: Send {
    fn observe(&mut self, event: &Event<'_>);

    /// Replaces the contents of `out` by what should be prefetched now, most urgent first.
    fn predict(&mut self, out: &mut Vec<Prediction>);

    /// Whether `Event::Routed` should carry `ahead`, which costs the product with a router.
    fn wants_ahead(&self) -> bool;
}

/// An expert that will be asked for with probability `p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    pub expert: Expert,
    pub p: f32,
}

/// What a policy must know of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Experts of each layer; 0 where it is dense.
    pub n_experts: Vec<usize>,
    /// Experts a token uses in each MoE layer.
    pub k: usize,
}

/// A value for each expert of a model, in one allocation.
#[derive(Clone, Debug)]
struct PerExpert<T> {
    /// Where each layer begins in `values`.
    starts: Vec<usize>,
    values: Vec<T>,
}

impl<T: Clone + Default> PerExpert<T> {
    fn new(shape: &Shape) -> Self {
        let mut n = 0;
        let starts = shape.n_experts.iter().map(|&experts| {
            n += experts;
            n - experts
        });
        let starts = starts.collect();
        Self { starts, values: vec![T::default(); n] }
    }
}

impl<T> Index<Expert> for PerExpert<T> {
    type Output = T;

    fn index(&self, at: Expert) -> &T {
        &self.values[self.starts[at.layer as usize] + at.expert as usize]
    }
}

impl<T> IndexMut<Expert> for PerExpert<T> {
    fn index_mut(&mut self, at: Expert) -> &mut T {
        &mut self.values[self.starts[at.layer as usize] + at.expert as usize]
    }
}

#[cfg(test)]
mod tests;
