//! A replay: the requests one after the other, pass by pass, layer by layer, with the calls in the
//! order of the engine's layer loop (`model::forward`, `model::publish`).

use super::costs::CostModel;
use super::machine::{Machine, Mode};
use super::options::{Caching, SimOptions, Tiers};
use super::predictor::TimedPredictor;
use super::report::{Iteration, Report};
use super::routing::{Pass, Routing};
use crate::Result;
use crate::experts::{Access, Acquisition, Counters, LayerPart, State, prefetch_pays};
use crate::policy::{Costs, Event, LookAhead, Phase, Policy, PromptRouted, Routed, Shape, Timing};

/// Replays all requests.
pub fn simulate(routing: &dyn Routing, options: &SimOptions) -> Result<Report> {
    let build = |shape: &Shape| options.policy.build(shape, &options.profile);
    simulate_policy(routing, options, Tiers::of(routing, options)?, build)
}

/// Simulates with slots, reads and a policy of the caller's.
pub fn simulate_policy(
    routing: &dyn Routing,
    options: &SimOptions,
    tiers: Tiers,
    build: impl FnOnce(&Shape) -> Policy,
) -> Result<Report> {
    let plan_bytes = tiers.plan.n_bytes();
    let mut run = Run::new(routing, options, tiers, build);
    let mut timeline = Vec::new();
    let mut before = Counters::default();
    for request in 0..routing.n_requests() {
        if request == options.n_warm_up {
            before = run.machine.counters();
        }
        run.request(request, &mut timeline);
    }
    run.machine.finish();
    timeline.retain(|iteration| iteration.request >= options.n_warm_up);
    Ok(Report::new(timeline, run.machine.counters().since(&before), plan_bytes))
}

struct Run<'a> {
    routing: &'a dyn Routing,
    costs: &'a CostModel,
    machine: Machine,
    /// Granules of an expert of each layer.
    n_granules: Vec<usize>,
    next_layer: Vec<usize>,
    /// How decode demands.
    decode: Access,
    work: Acquisition,
    buffers: Buffers,
    timing: Timing,
}

/// Room for what is published; `sum` takes what is averaged.
#[derive(Default)]
struct Buffers {
    demand: Vec<u32>, // experts, in the order in which tokens name them
    counts: Vec<u32>, // [experts], tokens of each
    chosen: Vec<u32>, // [tokens, k]
    row: Vec<u32>,    // [k], of one token
    probs: Vec<f32>,
    ahead: Vec<f32>,
    hidden: Vec<f32>,
    sum: Vec<f32>,
}

/// Requests come one after the other, so they all have the number of the one session.
const REQUEST: u32 = 0;

/// Works belong to a store; there is one.
const OWNER: usize = 1;

impl<'a> Run<'a> {
    fn new(
        routing: &'a dyn Routing,
        options: &'a SimOptions,
        tiers: Tiers,
        build: impl FnOnce(&Shape) -> Policy,
    ) -> Run<'a> {
        let Tiers { plan, layout } = tiers;
        assert!(plan.layers.iter().map(|l| l.n_experts).eq(routing.n_experts().iter().copied()));
        let shape = plan.shape(routing.k());
        let Policy { eviction, predictor, splitter, .. } = build(&shape);
        let n_granules = plan.layers.iter().map(|l| l.n_granules).collect();
        let search_ns = match options.mode {
            Mode::Timed => options.costs.search_ns,
            Mode::Lockstep => 0,
        };
        let predictor = predictor.map(|p| TimedPredictor::new(p, search_ns));
        let state = State::new(plan, layout, eviction);
        let timer = match options.mode {
            Mode::Timed => options.costs.timer(&options.geometry, routing.k()),
            Mode::Lockstep => Costs::LOCKSTEP,
        };
        Run {
            routing,
            costs: &options.costs,
            machine: Machine::new(state, predictor, options.costs.link, options.mode)
                .with_splitter(splitter, timer)
                .with_planner(options.policy.prefetch_planner(&shape)),
            n_granules,
            next_layer: shape.next_moe_layers(),
            decode: match options.caching {
                Caching::Keep => Access::Decode,
                Caching::Release => Access::Prompt,
            },
            work: Acquisition::default(),
            buffers: Buffers::default(),
            timing: Timing::default(),
        }
    }

    fn request(&mut self, request: usize, timeline: &mut Vec<Iteration>) {
        self.machine.observe(&Event::RequestStart { request: REQUEST });
        for pass in self.routing.passes(request) {
            let before = self.machine.counters();
            let start_ns = self.machine.now();
            self.pass(&pass);
            timeline.push(Iteration {
                request,
                is_prompt: pass.is_prompt,
                n_tokens: pass.tokens.len(),
                start_ns,
                timing: self.timing,
                counters: self.machine.counters().since(&before),
            });
        }
        self.machine.observe(&Event::RequestEnd { request: REQUEST });
    }

    fn pass(&mut self, pass: &Pass) {
        let (start, n) = (self.machine.now(), pass.tokens.len());
        let phase = pass.phase();
        self.timing = Timing::default();
        // embedding
        let Buffers { hidden, sum, .. } = &mut self.buffers;
        pass.mean(hidden, sum, |token, out| self.routing.embedding(token, out));
        let embedding = &self.buffers.sum;
        let token = (phase == Phase::Decode).then(|| self.routing.id(pass.tokens.start)).flatten();
        let request = REQUEST;
        self.machine.observe(&Event::IterationStart { request, phase, token, embedding });
        for layer in 0..self.routing.n_experts().len() {
            // attention, router
            self.machine.compute(self.costs.attention.of(n));
            if self.routing.n_experts()[layer] > 0 {
                self.experts(pass, layer);
            }
        }
        // output head, for the last token
        let before = self.machine.now();
        self.machine.compute(self.costs.head.of(1));
        self.timing.head_ns = self.machine.now() - before;
        self.timing.wall_ns = self.machine.now() - start;
        let timing = self.timing;
        self.machine.observe(&Event::IterationEnd { request: REQUEST, phase, timing });
    }

    fn experts(&mut self, pass: &Pass, layer: usize) {
        // demand; the eviction hears of the choice before it names victims
        self.group(pass, layer);
        self.publish(pass, layer, Machine::observe_by_eviction);
        let access = match pass.phase() {
            Phase::Prompt => Access::Prompt,
            Phase::Decode => self.decode,
        };
        self.work.start(OWNER, layer, LayerPart::whole(&self.buffers.demand), access);
        self.machine.acquire(&mut self.work);
        if pass.phase() == Phase::Prompt {
            self.prefetch_after(layer);
        }
        // shared expert
        self.machine.compute(self.costs.shared.of(pass.tokens.len()));
        self.publish(pass, layer, Machine::observe_by_predictor);
        // granules: resident ones first, then as they land
        while let Some(stall_ns) = self.machine.next_ready(&mut self.work) {
            let start = self.machine.now();
            self.machine.compute(self.granules_ns(layer));
            self.timing.stall_ns += stall_ns;
            self.timing.experts_ns += self.machine.now() - start;
        }
        self.machine.release(&mut self.work);
    }

    /// See `Model::prefetch_after`.
    fn prefetch_after(&mut self, layer: usize) {
        let n_experts = self.routing.n_experts();
        let next = (layer + 1..n_experts.len()).find(|l| n_experts[*l] > 0);
        let pays = prefetch_pays(self.buffers.demand.len(), n_experts[layer]);
        self.machine.prefetch_layer(next.filter(|_| pays));
    }

    /// The time of the granules that are ready together: one launch, and each granule's part of its
    /// expert's work.
    fn granules_ns(&self, layer: usize) -> f64 {
        let expert = &self.costs.expert;
        let work = |e: u32| expert.work(self.buffers.counts[e as usize] as usize);
        let work: f64 = self.work.handed.iter().map(|handed| work(handed.expert)).sum();
        expert.launch_ns + work / self.n_granules[layer] as f64
    }

    /// The experts of a pass's tokens, each once.
    fn group(&mut self, pass: &Pass, layer: usize) {
        let Buffers { demand, counts, chosen, row, .. } = &mut self.buffers;
        demand.clear();
        chosen.clear();
        counts.clear();
        counts.resize(self.routing.n_experts()[layer], 0);
        for token in pass.tokens.clone() {
            self.routing.chosen(token, layer, row);
            chosen.extend(&*row);
            for &expert in row.iter() {
                let count = &mut counts[expert as usize];
                *count += 1;
                if *count == 1 {
                    demand.push(expert);
                }
            }
        }
    }

    /// Tells a part of the policy what a layer's router chose.
    fn publish(&mut self, pass: &Pass, layer: usize, observe: fn(&mut Machine, &Event)) {
        match pass.phase() {
            Phase::Decode => self.publish_token(pass.tokens.start, layer, observe),
            Phase::Prompt => {
                let Buffers { counts, chosen, probs, sum, .. } = &mut self.buffers;
                pass.mean(probs, sum, |token, out| self.routing.probs(token, layer, out));
                let routed = PromptRouted {
                    request: REQUEST,
                    layer: layer as u32,
                    n_tokens: pass.tokens.len() as u32,
                    counts,
                    probs: sum,
                    chosen,
                };
                observe(&mut self.machine, &Event::PromptRouted(routed));
            }
        }
    }

    fn publish_token(&mut self, token: usize, layer: usize, observe: fn(&mut Machine, &Event)) {
        let Buffers { chosen, probs, ahead, hidden, .. } = &mut self.buffers;
        let wants = self.machine.wants();
        ahead.clear();
        hidden.clear();
        self.routing.probs(token, layer, probs);
        if wants.ahead {
            self.routing.ahead(token, layer, 1, ahead);
        }
        if wants.hidden {
            self.routing.hidden(token, layer, hidden);
        }
        let next = self.next_layer[layer] as u32;
        let ahead = (!ahead.is_empty()).then_some(LookAhead { layer: next, probs: ahead });
        let (request, layer) = (REQUEST, layer as u32);
        let routed = Routed { request, layer, chosen, probs, hidden, ahead };
        observe(&mut self.machine, &Event::Routed(routed));
    }
}
