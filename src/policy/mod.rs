//! Policies: which experts to bring before they are asked for, and which to drop. Pure state
//! machines: told what happened, they answer what they want. They do no I/O and read no clock, so
//! that the engine and the replay simulator drive the very same code and equal events give equal
//! answers.

mod all_next;
mod auto;
mod counts;
mod grid;
mod lcp;
mod lfu;
mod lru;
mod measured;
mod next_layer;
pub mod papers;
pub mod placement;
mod profile;
mod random;
mod ranks;
mod registry;
mod scan_resistant;
mod spec;

pub use all_next::AllNext;
pub use auto::{Auto, Candidate};
pub use counts::Counts;
pub use lcp::Lcp;
pub use lfu::Lfu;
pub use lru::Lru;
pub use measured::Measured;
pub use next_layer::NextLayer;
pub use papers::finemoe::{FineMoe, FineMoeOptions, MapEviction};
pub use papers::moe_infinity::{EamcPredictor, InfinityOptions, RequestEam};
pub use papers::moepic::{Moepic, MoepicOptions};
pub use papers::prescope::{Hot, HotTable, LlaPor, LlaporModel, PreSched};
pub use placement::{Missing, Placement, Schedule, Timer, View};
pub use profile::{ModelKey, Profile};
pub use random::{Random, mix};
pub use scan_resistant::ScanResistant;
pub use spec::{Policy, PolicySpec, SplitKind};

use std::ops::{Index, IndexMut};

/// One routed expert of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Expert {
    pub layer: u32,
    pub expert: u32,
}

/// What a forward pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Some tokens of a prompt at once.
    Prompt,
    /// One token of one timeline.
    Decode,
}

/// What happened. `request` says in whose timeline; numbers are used again when a timeline ends.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A new text begins. What an earlier one of this number left unended is over.
    RequestStart {
        request: u32,
    },
    /// A forward pass begins. `embedding` is the token's row of the embedding table, of a prompt
    /// the mean over its tokens.
    IterationStart {
        request: u32,
        phase: Phase,
        embedding: &'a [f32],
    },
    /// The router of a layer has chosen for a decode step's token.
    Routed(Routed<'a>),
    /// The router of a layer has chosen for tokens of a prompt.
    PromptRouted(PromptRouted<'a>),
    /// A predictor's estimate of a layer's router, for whom it may concern: probabilities of all
    /// the layer's experts.
    Foreseen {
        layer: u32,
        probs: &'a [f32],
    },
    /// A forward pass has ended.
    IterationEnd {
        request: u32,
        phase: Phase,
        timing: Timing,
    },
    RequestEnd {
        request: u32,
    },
}

impl Event<'_> {
    /// Whether a decode step has gone on, so that predictors have something new to say.
    pub fn is_step(&self) -> bool {
        matches!(self, Event::Routed(_) | Event::IterationStart { phase: Phase::Decode, .. })
    }
}

impl<'a> Event<'a> {
    /// What of it somebody hears who has experts of some layers only.
    pub fn of_layers(&self, has: &dyn Fn(u32) -> bool) -> Option<Event<'a>> {
        match *self {
            Event::Routed(routed) => has(routed.layer).then(|| {
                let ahead = routed.ahead.filter(|ahead| has(ahead.layer));
                Event::Routed(Routed { ahead, ..routed })
            }),
            Event::PromptRouted(PromptRouted { layer, .. }) | Event::Foreseen { layer, .. } => {
                has(layer).then_some(*self)
            }
            other => Some(other),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    pub request: u32,
    pub layer: u32,
    /// Best first.
    pub chosen: &'a [u32],
    /// Of all the layer's experts.
    pub probs: &'a [f32],
    /// What the router saw: the normalised input of the experts. Empty unless wanted.
    pub hidden: &'a [f32],
    /// There if a predictor wants it.
    pub ahead: Option<Ahead<'a>>,
}

#[derive(Clone, Copy, Debug)]
pub struct PromptRouted<'a> {
    pub request: u32,
    pub layer: u32,
    pub n_tokens: u32,
    /// Tokens that chose each of the layer's experts.
    pub counts: &'a [u32],
    /// Of all the layer's experts, the mean over the tokens.
    pub probs: &'a [f32],
}

/// A guess at a layer that comes later: its router, applied to the present layer's activation.
#[derive(Clone, Copy, Debug)]
pub struct Ahead<'a> {
    pub layer: u32,
    /// Of all experts of that layer.
    pub probs: &'a [f32],
}

/// How long a forward pass took, ns. Policies read no clock; they are told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// All of it, waits included.
    pub wall_ns: u64,
    /// Waiting for experts.
    pub stall_ns: u64,
    /// Computing routed experts.
    pub experts_ns: u64,
    /// Output norm and head.
    pub head_ns: u64,
}

impl Timing {
    /// A layer's routed experts have taken `wall_ns`, of which `stall_ns` were waiting.
    pub fn add_experts(&mut self, wall_ns: u64, stall_ns: u64) {
        self.stall_ns += stall_ns;
        self.experts_ns += wall_ns.saturating_sub(stall_ns);
    }

    /// The part that `n` of a pass's `n_rows` rows have in it.
    pub fn part(self, n: usize, n_rows: usize) -> Timing {
        let part = |ns: u64| (u128::from(ns) * n as u128 / n_rows as u128) as u64;
        Timing {
            wall_ns: part(self.wall_ns),
            stall_ns: part(self.stall_ns),
            experts_ns: part(self.experts_ns),
            head_ns: part(self.head_ns),
        }
    }
}

/// What to drop.
pub trait Eviction: Send {
    fn observe(&mut self, event: &Event<'_>);

    /// Who has the lowest goes first. Holds until the next event; of equals any may go. Never NaN.
    fn priority(&self, expert: Expert) -> f64;

    /// Puts what is worth keeping beyond the run into the profile.
    fn save(&self, _profile: &mut Profile) {}
}

/// What to bring.
pub trait Predictor: Send {
    fn observe(&mut self, event: &Event<'_>);

    /// Replaces the contents of `out` by everything that should be prefetched now, most urgent
    /// first: what was predicted before and is not among it is not wanted any more. Asked after
    /// `IterationStart` and `Routed` of a decode step.
    fn predict(&mut self, out: &mut Vec<Prediction>);

    /// What `Routed` should carry.
    fn wants(&self) -> Wants {
        Wants::default()
    }

    /// Whether an event may take it longer than some microseconds: then it runs beside the layer
    /// loop, on a thread of its own, and is told of events a little late.
    fn is_slow(&self) -> bool {
        false
    }

    /// What it has decided and why, for the user.
    fn verdict(&self) -> Option<String> {
        None
    }

    /// Hands on what it found out by the last event and others may use: `Event::Foreseen`.
    fn tell(&self, _listener: &mut dyn FnMut(&Event<'_>)) {}

    /// Puts what is worth keeping beyond the run into the profile.
    fn save(&self, _profile: &mut Profile) {}
}

/// What a predictor wants to see, as it costs something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// `Routed::ahead`: the product with a router.
    pub ahead: bool,
    /// `Routed::hidden`.
    pub hidden: bool,
}

/// An expert that will be asked for, probably.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    pub expert: Expert,
    /// How much it is worth to have it: a probability, weighed by nearness where several layers
    /// are predicted. Finite and not negative.
    pub priority: f32,
}

/// How much of each layer's experts to keep.
pub trait Splitter: Send {
    fn observe(&mut self, event: &Event<'_>);

    /// New shares for all layers, of whom those of one class together have as much as before;
    /// `None` leaves them. May take long: asked when nobody waits.
    fn plan(&mut self, costs: &Costs) -> Option<Vec<LayerShare>>;

    /// Puts what is worth keeping beyond the run into the profile.
    fn save(&self, _profile: &mut Profile) {}
}

/// A layer's part of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerShare {
    /// Granules that the layer's experts may keep, together.
    pub n_slots: usize,
    /// Leading granules that an expert keeps, its top segment: θ = keep ÷ granules of an expert.
    pub keep: usize,
}

/// What things take on this machine, ns: the Timer's figures.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Costs {
    /// One token through a layer without its routed experts.
    pub attention_ns: f64,
    /// The routed experts of one token in a layer.
    pub experts_ns: f64,
    /// Output norm and head.
    pub head_ns: f64,
    /// Bringing one whole expert.
    pub load_ns: f64,
}

/// What a policy must know of a model and of the tier it works for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Experts of each layer; 0 where it is dense.
    pub n_experts: Vec<usize>,
    /// Experts a token uses in each MoE layer.
    pub k: usize,
    /// Granules of an expert of each layer; 0 where it is dense.
    pub n_granules: Vec<usize>,
    /// Which size class each layer's granules are in: slots are exchanged within a class only.
    pub class: Vec<usize>,
    /// Granules that each class may keep for decode.
    pub n_slots: Vec<usize>,
}

impl Shape {
    /// For policies that need not know the tier.
    pub fn of_model(n_experts: Vec<usize>, k: usize) -> Shape {
        Shape { n_experts, k, ..Shape::default() }
    }

    pub fn n_layers(&self) -> usize {
        self.n_experts.len()
    }

    /// For each layer the next with routed experts, around the end to the next token's first;
    /// itself if there is no other.
    pub fn next_moe_layers(&self) -> Vec<usize> {
        let n = self.n_layers();
        let next = |l: usize| (1..=n).map(|d| (l + d) % n).find(|next| self.n_experts[*next] > 0);
        (0..n).map(|l| next(l).unwrap_or(l)).collect()
    }

    /// Layers that have routed experts.
    pub fn moe_layers(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        (0..self.n_layers()).filter(|layer| self.n_experts[*layer] > 0)
    }
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
