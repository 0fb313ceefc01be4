//! Requests that are known beforehand, and new ones.

use moeba::policy::{
    EamcPredictor, Event, FineMoe, FineMoeOptions, InfinityOptions, Phase, Predictor, Profile,
    PromptRouted, Routed, Shape, Timing, papers::finemoe,
};
use moeba::trace::format::Trace;
use moeba::trace::{Pass, Routing, in_turn};
use std::collections::BTreeMap;

/// Known requests in ten of a kind: 70 % (§6.1).
const KNOWN_OF_TEN: usize = 7;

/// Requests that fill caches, if there are enough.
pub const N_WARM_UP: usize = 6;

/// Requests by number, the kinds in turn, so that a part from the start has something of each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Split {
    pub known: Vec<usize>,
    pub new: Vec<usize>,
}

impl Split {
    pub fn of(trace: &Trace) -> Split {
        let mut kinds: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (number, request) in trace.requests().iter().enumerate() {
            kinds.entry(&request.kind).or_default().push(number);
        }
        let parts = kinds
            .values()
            .map(|requests| requests.split_at((KNOWN_OF_TEN * requests.len()).div_ceil(10)));
        let (known, new): (Vec<_>, Vec<_>) = parts.unzip();
        Split { known: in_turn(&known, 1), new: in_turn(&new, 1) }
    }

    /// New requests that fill caches before anything is counted: six, or a third of a few.
    pub fn n_warm_up(&self) -> usize {
        N_WARM_UP.min(self.new.len() / 3)
    }

    /// No more than so many of either.
    pub fn at_most(mut self, n_known: usize, n_new: usize) -> Split {
        self.known.truncate(n_known);
        self.new.truncate(n_new);
        self
    }
}

/// The decode steps of some requests.
pub fn steps(routing: &dyn Routing, requests: &[usize]) -> Vec<usize> {
    let passes = requests.iter().flat_map(|request| routing.passes(*request));
    let steps = passes.filter(|pass| !pass.is_prompt);
    steps.map(|pass| pass.tokens.start).collect()
}

/// A decode step as FineMoE stores it.
pub fn iteration(routing: &dyn Routing, step: usize) -> finemoe::Iteration {
    let mut iteration = finemoe::Iteration::default();
    routing.embedding(step, &mut iteration.embedding);
    let probs = |layer| {
        let mut probs = Vec::new();
        routing.probs(step, layer, &mut probs);
        probs
    };
    iteration.map = shape(routing).moe_layers().map(probs).collect();
    iteration
}

pub fn iterations(routing: &dyn Routing, requests: &[usize]) -> Vec<finemoe::Iteration> {
    steps(routing, requests).into_iter().map(|step| iteration(routing, step)).collect()
}

pub fn shape(routing: &dyn Routing) -> Shape {
    Shape::of_model(routing.n_experts().to_vec(), routing.k())
}

/// The profile of FineMoE and MoE-Infinity after these requests.
pub fn profile(routing: &dyn Routing, requests: &[usize]) -> Profile {
    let shape = shape(routing);
    let mut profile = Profile::default();
    let mut map = FineMoe::new(&shape, FineMoeOptions::default());
    let mut eamc = EamcPredictor::new(&shape, InfinityOptions::default());
    let predictors: [&mut dyn Predictor; 2] = [&mut map, &mut eamc];
    for predictor in predictors {
        requests.iter().for_each(|request| teach(routing, *request, predictor));
        predictor.save(&mut profile);
    }
    profile
}

/// Tells a predictor of a request what a run would.
fn teach(routing: &dyn Routing, request: usize, predictor: &mut dyn Predictor) {
    let (mut row, mut embedding, mut probs) = (Vec::new(), Vec::new(), Vec::new());
    let n_experts = routing.n_experts();
    predictor.observe(&Event::RequestStart { request: 0 });
    for pass in routing.passes(request) {
        let phase = pass.phase();
        pass.mean(&mut row, &mut embedding, |token, out| routing.embedding(token, out));
        predictor.observe(&Event::IterationStart {
            request: 0,
            phase,
            token: None,
            embedding: &embedding,
        });
        for layer in (0..n_experts.len()).filter(|layer| n_experts[*layer] > 0) {
            pass.mean(&mut row, &mut probs, |token, out| routing.probs(token, layer, out));
            let chosen = chosen(routing, &pass, layer);
            let (request, layer) = (0, layer as u32);
            match phase {
                Phase::Decode => {
                    let (chosen, probs, hidden) = (&chosen[..], &probs[..], &[][..]);
                    let routed = Routed { request, layer, chosen, probs, hidden, ahead: None };
                    predictor.observe(&Event::Routed(routed));
                }
                Phase::Prompt => {
                    let mut counts = vec![0; n_experts[layer as usize]];
                    chosen.iter().for_each(|expert| counts[*expert as usize] += 1);
                    let (n_tokens, counts, probs) = (pass.tokens.len() as u32, &counts, &probs);
                    let chosen = &chosen[..];
                    let routed = PromptRouted { request, layer, n_tokens, counts, probs, chosen };
                    predictor.observe(&Event::PromptRouted(routed));
                }
            }
        }
        let timing = Timing::default();
        predictor.observe(&Event::IterationEnd { request: 0, phase, timing });
    }
    predictor.observe(&Event::RequestEnd { request: 0 });
}

/// The experts of all tokens of a pass.
pub fn chosen(routing: &dyn Routing, pass: &Pass, layer: usize) -> Vec<u32> {
    let mut chosen = Vec::new();
    let of = |token| {
        routing.chosen(token, layer, &mut chosen);
        chosen.clone()
    };
    pass.tokens.clone().flat_map(of).collect()
}
