//! Policies: which experts to prefetch, and which to evict. They are pure state machines: they take
//! events and answer requests for predictions and priorities. They do no I/O and read no clock, so
//! that the engine and the simulator (`crate::trace`) drive the same code and equal events give
//! equal answers.

mod all_next;
mod counts;
mod forecast;
mod grid;
mod hot_table;
mod lcp;
mod lfu;
mod lru;
mod measured;
mod next_layer;
mod next_token;
pub mod papers;
pub mod placement;
mod prefetch_planner;
mod profile;
mod random;
mod ranks;
mod rates;
mod registry;
mod running;
mod scan_resistant;
mod spec;
mod trajectory;

pub use all_next::AllNext;
pub use counts::Counts;
pub use hot_table::HotTable;
pub use lcp::Lcp;
pub use lfu::Lfu;
pub use lru::Lru;
pub use measured::Measured;
pub use next_layer::NextLayer;
pub use next_token::NextToken;
pub use papers::finemoe::{FineMoe, FineMoeOptions, MapEviction};
pub use papers::moe_infinity::{EamcPredictor, InfinityOptions, RequestEam};
pub use papers::moepic::{Moepic, MoepicOptions};
pub use papers::prescope::{Hot, LlaPor, LlaporModel, PreSched};
pub use placement::{Missing, Placement, PredictedLayer, Schedule, Timer, View};
pub use prefetch_planner::PrefetchPlanner;
pub use profile::{ModelKey, Profile};
pub use random::{Random, mix};
pub use registry::{Builder, EvictionEntry, Names, PredictorEntry, register};
pub use running::{is_asked, is_time_to_split};
pub use scan_resistant::ScanResistant;
pub use spec::{PlacementKind, Policy, PolicySpec, SplitKind};
pub use trajectory::TrajectoryPredictor;

use std::ops::{Index, IndexMut};

/// One routed expert of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Expert {
    pub layer: u32,
    pub expert: u32,
}

/// The kind of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Some tokens of a prompt at once.
    Prompt,
    /// One token of one timeline.
    Decode,
}

/// An event of the engine. `request` numbers the request; a number is reused after its request has
/// ended.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A new text begins. It ends an earlier request of the same number.
    RequestStart {
        request: u32,
    },
    /// A forward pass begins. `token` is its number in the vocabulary, if it is one token and its
    /// number is known; `embedding` is the token's row of the embedding table, for a prompt the
    /// mean over its tokens.
    IterationStart {
        request: u32,
        phase: Phase,
        token: Option<u32>,
        embedding: &'a [f32],
    },
    /// The router of a layer has chosen experts for a decode step's token.
    Routed(Routed<'a>),
    /// The router of a layer has chosen experts for tokens of a prompt.
    PromptRouted(PromptRouted<'a>),
    /// The model's layer that predicts the token after the next has computed a state for a text's
    /// next token, and a layer's router was applied to it. Between two forward passes, once for
    /// each layer.
    NextToken {
        request: u32,
        ahead: LookAhead<'a>,
    },
    /// A predictor's estimate of a layer's router, for the eviction: probabilities of all the
    /// layer's experts.
    Predicted {
        layer: u32,
        probs: &'a [f32],
    },
    /// A predictor's estimate of a layer's next coming, whichever token brings it, for the
    /// eviction: the probability that each of the layer's experts is used. `later`: how much more
    /// often than of late tokens behind that one use each, from -1 to 1; empty if it does not know.
    Expected {
        layer: u32,
        used: &'a [f32],
        later: &'a [f32],
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
    /// Whether a decode step has advanced, so that predictors may predict something new.
    pub fn is_step(&self) -> bool {
        matches!(self, Event::Routed(_) | Event::IterationStart { phase: Phase::Decode, .. })
    }

    /// Whether the event is a step of a prompt.
    pub fn is_prompt_step(&self) -> bool {
        matches!(self, Event::PromptRouted(_) | Event::IterationStart { phase: Phase::Prompt, .. })
    }
}

impl<'a> Event<'a> {
    /// The event as it is told in lockstep, where times must not matter.
    pub fn in_lockstep(self) -> Event<'a> {
        match self {
            Event::IterationEnd { request, phase, .. } => {
                Event::IterationEnd { request, phase, timing: Timing::LOCKSTEP }
            }
            other => other,
        }
    }

    /// The event as a tier sees that holds experts of some layers only; `None` if it concerns none
    /// of them.
    pub fn of_layers(&self, has: &dyn Fn(u32) -> bool) -> Option<Event<'a>> {
        match *self {
            Event::Routed(routed) => has(routed.layer).then(|| {
                let ahead = routed.ahead.filter(|ahead| has(ahead.layer));
                Event::Routed(Routed { ahead, ..routed })
            }),
            Event::PromptRouted(PromptRouted { layer, .. })
            | Event::NextToken { ahead: LookAhead { layer, .. }, .. }
            | Event::Predicted { layer, .. }
            | Event::Expected { layer, .. } => has(layer).then_some(*self),
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
    /// Probabilities of all the layer's experts.
    pub probs: &'a [f32],
    /// The router's input, which is the normalised input of the experts. Empty unless wanted.
    pub hidden: &'a [f32],
    /// Present if a predictor wants it.
    pub ahead: Option<LookAhead<'a>>,
}

#[derive(Clone, Copy, Debug)]
pub struct PromptRouted<'a> {
    pub request: u32,
    pub layer: u32,
    pub n_tokens: u32,
    /// Tokens that chose each of the layer's experts.
    pub counts: &'a [u32],
    /// Probabilities of all the layer's experts, the mean over the tokens.
    pub probs: &'a [f32],
    /// The experts that each token chose, in order: [n_tokens, k], best first. An id that is none
    /// of the layer's where a chosen expert was full.
    pub chosen: &'a [u32],
}

impl PromptRouted<'_> {
    /// Experts that a token has chosen in this layer: fewer than in others where they make values.
    pub fn k(&self) -> usize {
        self.chosen.len() / self.n_tokens.max(1) as usize
    }
}

/// A look-ahead: a layer's router, applied to another layer's activation.
#[derive(Clone, Copy, Debug)]
pub struct LookAhead<'a> {
    pub layer: u32,
    /// Probabilities of all experts of the layer.
    pub probs: &'a [f32],
}

/// Times of a forward pass, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// The whole pass, waits included.
    pub wall_ns: u64,
    /// Waiting for experts.
    pub stall_ns: u64,
    /// Computing routed experts.
    pub experts_ns: u64,
    /// Output norm and head.
    pub head_ns: u64,
}

impl Timing {
    /// Every pass's in lockstep.
    const LOCKSTEP: Timing = Timing {
        wall_ns: 4_000_000,
        stall_ns: 1_000_000,
        experts_ns: 1_000_000,
        head_ns: 1_000_000,
    };

    /// Adds a layer's routed experts: `wall_ns` in all, of which `stall_ns` were waiting.
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

/// Decides which experts to evict.
pub trait Eviction: Send {
    fn observe(&mut self, event: &Event<'_>);

    /// The expert with the lowest priority is evicted first; any among equals. Valid until the next
    /// event. Never NaN.
    fn priority(&self, expert: Expert) -> f64;

    /// The priority of an expert, in memory or not, of whose layer's next coming a predictor has
    /// told what it expects. `None`: priorities say nothing of what is not in memory.
    fn expected_priority(&self, _expert: Expert) -> Option<f64> {
        None
    }

    /// Whether its priorities are up to date when a prompt's experts of a layer are computed.
    fn hears_of_prompts(&self) -> bool {
        false
    }

    /// Stores what later runs can use in the profile.
    fn save(&self, _profile: &mut Profile) {}
}

/// Decides which experts to prefetch.
pub trait Predictor: Send {
    fn observe(&mut self, event: &Event<'_>);

    /// Replaces the contents of `out` by everything that should be prefetched now, most urgent
    /// first. An earlier prediction that is not in `out` is withdrawn. Called after
    /// `IterationStart` and `Routed` of a decode step, and if it predicts prompts, after
    /// `IterationStart` and `PromptRouted` of a prompt.
    fn predict(&mut self, out: &mut Vec<Prediction>);

    /// The optional events and parts of `Routed` that it needs now; may change with events.
    fn wants(&self) -> Wants {
        Wants::default()
    }

    /// Whether an event may take it longer than some microseconds. It then runs on its own thread
    /// beside the layer loop and receives events a little late.
    fn is_slow(&self) -> bool {
        false
    }

    /// Whether it predicts for prompts.
    fn predicts_prompts(&self) -> bool {
        false
    }

    /// Its decision and the reason, for the user.
    fn verdict(&self) -> Option<String> {
        None
    }

    /// Passes on what the last event let it predict and evictions can use: `Event::Predicted`,
    /// `Event::Expected`.
    fn emit(&self, _listener: &mut dyn FnMut(&Event<'_>)) {}

    /// Puts what is worth keeping beyond the run into the profile.
    fn save(&self, _profile: &mut Profile) {}
}

/// Optional events and parts of `Routed`, which cost time to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// `Routed::ahead`: the product with a router.
    pub ahead: bool,
    /// `Routed::hidden`.
    pub hidden: bool,
    /// `Event::NextToken`: the model's layer that predicts the token after the next, and the
    /// product with every router.
    pub next_token: bool,
}

impl Wants {
    /// Everything that one of both wants.
    pub fn or(self, other: Wants) -> Wants {
        Wants {
            ahead: self.ahead || other.ahead,
            hidden: self.hidden || other.hidden,
            next_token: self.next_token || other.next_token,
        }
    }

    /// Whether it wants optional parts of `Routed`.
    pub fn is_of_routed(self) -> bool {
        self.ahead || self.hidden
    }
}

/// An expert that a layer will probably use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    pub expert: Expert,
    /// The value of having it: a probability, weighted by nearness where several layers are
    /// predicted. Finite and not negative.
    pub priority: f32,
}

/// Decides how much of each layer's experts to keep.
pub trait Splitter: Send {
    fn observe(&mut self, event: &Event<'_>);

    /// Whether there is something new to plan from. Asked when a request starts and after each
    /// token; the layer loop does not wait for it.
    fn is_due(&self) -> bool;

    /// New shares for all layers; the layers of a class keep their total. `None` keeps the present
    /// shares. May take some milliseconds.
    fn plan(&mut self, costs: &Costs) -> Option<Vec<LayerShare>>;

    /// Puts what is worth keeping beyond the run into the profile.
    fn save(&self, _profile: &mut Profile) {}
}

/// A layer's part of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerShare {
    /// Granules that all the layer's experts may keep together.
    pub n_slots: usize,
    /// Leading granules that an expert keeps (MoEpic's top segment): θ = keep ÷ granules of an
    /// expert.
    pub keep: usize,
}

/// Durations on this machine, ns, as the driver's timer measures them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Costs {
    /// One token through a layer without its routed experts.
    pub attention_ns: f64,
    /// The routed experts of one token in a layer.
    pub experts_ns: f64,
    /// Output norm and head.
    pub head_ns: f64,
    /// Loading one whole expert.
    pub load_ns: f64,
}

impl Costs {
    /// In lockstep, where times must not matter: everything takes as long.
    pub const LOCKSTEP: Costs =
        Costs { attention_ns: 1e6, experts_ns: 1e6, head_ns: 1e6, load_ns: 1e6 };
}

/// The model and the tier as a policy sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Experts of each layer; 0 where it is dense.
    pub n_experts: Vec<usize>,
    /// Experts a token uses in each MoE layer.
    pub k: usize,
    /// Granules of an expert of each layer; 0 where it is dense.
    pub n_granules: Vec<usize>,
    /// The size class of each layer's granules. Slots are exchanged within a class only.
    pub class: Vec<usize>,
    /// Granules that each class can keep for decode.
    pub n_slots: Vec<usize>,
}

impl Shape {
    /// A shape without a tier, for policies that do not need it.
    pub fn of_model(n_experts: Vec<usize>, k: usize) -> Shape {
        Shape { n_experts, k, ..Shape::default() }
    }

    pub fn n_layers(&self) -> usize {
        self.n_experts.len()
    }

    /// For each layer the next layer with routed experts. After the last one comes the first one,
    /// of the next token. A layer that is alone is its own successor.
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
    /// The first index of each layer in `values`.
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
