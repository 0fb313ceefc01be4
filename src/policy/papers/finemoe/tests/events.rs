//! The predictor against one that keeps everything and recomputes every similarity, over random
//! streams of several requests with events missing. The inputs make compression exact: few experts,
//! and values that are levels already.

use super::*;
use std::collections::BTreeMap;

const N_EXPERTS: [usize; 7] = [0, 6, 12, 0, 9, 5, 7];
const MOE_LAYERS: [u32; 5] = [1, 2, 4, 5, 6];
const L: usize = MOE_LAYERS.len();

type Row = Vec<f64>;
type Picks = Vec<(usize, f64)>;

#[derive(Clone, Default)]
struct Plain {
    embedding: Option<Row>,
    rows: [Option<Row>; L],
}

#[derive(Default)]
struct Request {
    now: Option<Plain>,
    reached: usize,
    asked: usize,
    /// The map that the embedding has found, and the probability above which all experts are
    /// picked, once the length of a prompt is known.
    found: Option<(usize, f64)>,
    floor: Option<f64>,
    /// By ordinal.
    pending: BTreeMap<usize, (Picks, Row)>,
}

struct Naive {
    options: FineMoeOptions,
    store: Vec<Plain>,
    requests: BTreeMap<u32, Request>,
    /// By ordinal.
    told: BTreeMap<usize, Row>,
}

fn wide(values: &[f32]) -> Row {
    values.iter().map(|x| f64::from(*x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn semantic(new: &Plain, old: &Plain) -> f64 {
    let (a, b) = (new.embedding.as_ref().unwrap(), old.embedding.as_ref().unwrap());
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Over the layers that the new one has.
fn trajectory(new: &Plain, old: &Plain) -> f64 {
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (a, b) in new.rows.iter().zip(&old.rows) {
        let (Some(a), Some(b)) = (a, b) else { continue };
        ab += dot(a, b);
        aa += dot(a, a);
        bb += dot(b, b);
    }
    ab / (aa * bb).sqrt()
}

/// The first of those that are the highest but for rounding.
fn first_best(scores: impl Iterator<Item = f64> + Clone) -> Option<(usize, f64)> {
    let max = scores.clone().fold(f64::MIN, f64::max);
    scores.enumerate().find(|(_, score)| *score >= max - 1e-6)
}

impl Naive {
    fn find(&self, request: u32, is_semantic: bool) -> Option<(usize, f64)> {
        let new = self.requests[&request].now.as_ref().unwrap();
        let similarity = if is_semantic { semantic } else { trajectory };
        first_best(self.store.iter().map(|old| similarity(new, old)))
    }

    fn predict_layers(
        &mut self,
        request: u32,
        targets: std::ops::Range<usize>,
        found: Option<(usize, f64)>,
        is_told: bool,
    ) {
        let Some((index, score)) = found else { return };
        for ordinal in targets {
            let row = self.store[index].rows[ordinal].clone().unwrap();
            let mut order: Picks = row.iter().copied().enumerate().collect();
            order.sort_by(|a, b| b.1.total_cmp(&a.1));
            let delta = if self.options.use_delta { (1.0 - score).clamp(0.0, 1.0) } else { 0.0 };
            let own = self.requests.get_mut(&request).unwrap();
            let floor = own.floor.unwrap_or(f64::INFINITY);
            let enough = |n: &usize| {
                let (in_it, left) = order.split_at(*n);
                let sum = in_it.iter().map(|p| p.1).sum::<f64>();
                *n >= K && sum >= delta && left.iter().all(|p| p.1 <= floor)
            };
            let n = (0..order.len()).find(enough).unwrap_or(order.len());
            order.truncate(n);
            own.pending.insert(ordinal, (order, row.clone()));
            let mut merged = row;
            for other in self.requests.values() {
                if let Some((_, row)) = other.pending.get(&ordinal) {
                    merged.iter_mut().zip(row).for_each(|(max, p)| *max = max.max(*p));
                }
            }
            if is_told {
                self.told.insert(ordinal, merged);
            }
        }
    }

    fn start(&mut self, request: u32, embedding: Option<&[f32]>) {
        let now = Plain { embedding: embedding.map(wide), ..Plain::default() };
        let asked = self.options.distance;
        let fresh = Request { now: Some(now), asked, ..Request::default() };
        self.requests.insert(request, fresh);
    }

    fn step(&mut self, request: u32, layer: u32, probs: &[f32], n_prompt: Option<u32>) {
        let ordinal = MOE_LAYERS.iter().position(|l| *l == layer).unwrap();
        let known = self.requests.get(&request).is_some_and(|r| r.now.is_some());
        if !known || ordinal < self.requests[&request].reached {
            self.start(request, None);
        }
        let own = self.requests.get_mut(&request).unwrap();
        let sum: f64 = wide(probs).iter().sum();
        let row = wide(probs).iter().map(|p| p / sum).collect();
        own.now.as_mut().unwrap().rows[ordinal] = Some(row);
        own.reached = ordinal + 1;
        own.pending = own.pending.split_off(&own.reached);
        let (reached, asked) = (own.reached, own.asked);
        if let Some(n_tokens) = n_prompt.filter(|_| own.floor.is_none()) {
            // Used by one of the tokens with a probability of a half.
            own.floor = Some((1.0 - 0.5f64.powf(1.0 / f64::from(n_tokens))) / K as f64);
            let found = own.found;
            self.predict_layers(request, reached..asked, found, false);
        }
        let end = (reached + self.options.distance).min(L);
        let targets = asked.max(reached)..end;
        if !targets.is_empty() {
            self.requests.get_mut(&request).unwrap().asked = end;
            let found = self.find(request, false);
            self.predict_layers(request, targets, found, n_prompt.is_none());
        }
    }

    fn end(&mut self, request: u32) {
        let Some(own) = self.requests.remove(&request) else { return };
        let Some(new) = own.now else { return };
        if new.embedding.is_none() || new.rows.contains(&None) {
            return;
        }
        if self.store.len() < self.options.capacity {
            self.store.push(new);
            return;
        }
        let share = self.options.distance as f64 / L as f64;
        let rdy = |old: &Plain| share * semantic(&new, old) + (1.0 - share) * trajectory(&new, old);
        let (at, _) = first_best(self.store.iter().map(rdy)).unwrap();
        self.store[at] = new;
    }

    fn observe(&mut self, event: &Event<'_>) {
        self.told.clear();
        match *event {
            Event::RequestStart { request } | Event::RequestEnd { request } => {
                self.requests.remove(&request);
            }
            Event::IterationStart { request, phase, embedding, .. } => {
                self.start(request, Some(embedding));
                if self.options.use_semantic {
                    let found = self.find(request, true);
                    self.requests.get_mut(&request).unwrap().found = found;
                    let is_told = phase == Phase::Decode;
                    self.predict_layers(request, 0..self.options.distance, found, is_told);
                }
            }
            Event::Routed(Routed { request, layer, probs, .. }) => {
                self.step(request, layer, probs, None);
            }
            Event::PromptRouted(PromptRouted { request, layer, n_tokens, probs, .. }) => {
                self.step(request, layer, probs, Some(n_tokens));
            }
            Event::IterationEnd { request, .. } => self.end(request),
            Event::NextToken { .. } | Event::Predicted { .. } | Event::Expected { .. } => {}
        }
    }

    fn predict(&self) -> BTreeMap<Expert, f64> {
        let mut out = BTreeMap::new();
        for own in self.requests.values() {
            for (ordinal, (picks, _)) in &own.pending {
                for (expert, p) in picks {
                    let layer = MOE_LAYERS[*ordinal];
                    let priority = p / (ordinal + 1 - own.reached) as f64;
                    let max = out.entry(Expert { layer, expert: *expert as u32 }).or_insert(0.0f64);
                    *max = max.max(priority);
                }
            }
        }
        out
    }
}

/// Levels 1 to 255, one of them 255: what a row is compressed to.
fn levels(seed: u64, layer: u32) -> Vec<f32> {
    let n_experts = N_EXPERTS[layer as usize];
    let level = |expert: usize| {
        (1.0 + 254.0 * draw(seed, (expert as u64) << 8 | u64::from(layer)).powi(4)).floor()
    };
    let mut row: Vec<f32> = (0..n_experts).map(level).collect();
    row[(seed as usize * 7 + layer as usize) % n_experts] = 255.0;
    row
}

/// -127 to 127, the first 127.
fn whole_embedding(seed: u64) -> Vec<f32> {
    let rest = (1..16).map(|i| (254.0 * draw(seed, 1 << 50 | i) - 127.0).round());
    std::iter::once(127.0).chain(rest).collect()
}

/// A step of one of the requests: on in its iteration, and from the last layer to the next one.
#[derive(Clone, Debug)]
struct Step {
    request: u32,
    seed: u64,
    is_lost: bool,
    is_prompt: bool,
    ends: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let rare = |p| prop::bool::weighted(p);
    let step = (0u32..3, 0u64..5, rare(0.05), rare(0.1), rare(0.02));
    let step = step.prop_map(|(request, seed, is_lost, is_prompt, ends)| Step {
        request,
        seed,
        is_lost,
        is_prompt,
        ends,
    });
    prop::collection::vec(step, 0..250)
}

/// The next layer of each request's iteration, and its phase.
type Cursors = [(usize, Phase); 3];

fn tell(step: &Step, cursors: &mut Cursors, listener: &mut dyn FnMut(&Event<'_>)) {
    let request = step.request;
    let (at, phase) = &mut cursors[request as usize];
    let probs = MOE_LAYERS.get(at.wrapping_sub(1)).map(|&layer| levels(step.seed, layer));
    let embedding = whole_embedding(step.seed);
    if *at == 0 {
        *phase = if step.is_prompt { Phase::Prompt } else { Phase::Decode };
    }
    let timing = Timing::default();
    let event = match (*at, &probs) {
        (_, _) if step.ends => Event::RequestEnd { request },
        (0, _) => {
            Event::IterationStart { request, phase: *phase, token: None, embedding: &embedding }
        }
        (at, Some(probs)) if *phase == Phase::Prompt => Event::PromptRouted(PromptRouted {
            request,
            layer: MOE_LAYERS[at - 1],
            n_tokens: 3,
            counts: &[],
            probs,
            chosen: &[],
        }),
        (at, Some(probs)) => routed(request, MOE_LAYERS[at - 1], probs),
        (_, None) => Event::IterationEnd { request, phase: *phase, timing },
    };
    *at = if step.ends { 0 } else { (*at + 1) % (L + 2) };
    if !step.is_lost {
        listener(&event);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn the_predictor_is_the_papers(
        steps in steps(),
        distance in 1usize..=L,
        capacity in 1usize..8,
        use_semantic in any::<bool>(),
        use_delta in any::<bool>(),
    ) {
        let options = FineMoeOptions { capacity, distance, use_semantic, use_delta };
        let (store, requests, told) = Default::default();
        let mut naive = Naive { options, store, requests, told };
        let mut predictor = FineMoe::new(&Shape::of_model(N_EXPERTS.to_vec(), K), options);
        let mut cursors = [(0, Phase::Decode); 3];
        let mut events = 0;
        for step in &steps {
            let mut fault = None;
            tell(step, &mut cursors, &mut |event| {
                naive.observe(event);
                predictor.observe(event);
                fault = difference(&naive, &mut predictor);
                events += 1;
            });
            prop_assert_eq!(fault, None, "after {} events", events);
        }
    }
}

/// The first difference between the two predictors.
fn difference(naive: &Naive, predictor: &mut FineMoe) -> Option<String> {
    let (mut out, expected) = (Vec::new(), naive.predict());
    predictor.predict(&mut out);
    let near = |a: f64, b: f64| (a - b).abs() < 1e-5;
    let same = out.len() == expected.len()
        && out.iter().all(|p| expected.get(&p.expert).is_some_and(|e| near(*e, p.priority.into())));
    if !same || !out.is_sorted_by(|a, b| a.priority >= b.priority) {
        return Some(format!("predicted {out:?}, not {expected:?}"));
    }
    let mut told = BTreeMap::new();
    predictor.emit(&mut |event| {
        let Event::Predicted { layer, probs } = *event else { panic!("{event:?}") };
        told.insert(MOE_LAYERS.iter().position(|l| *l == layer).unwrap(), wide(probs));
    });
    let same = told.len() == naive.told.len()
        && told.iter().zip(&naive.told).all(|((a, row), (b, expected))| {
            a == b
                && row.len() == expected.len()
                && row.iter().zip(expected).all(|(p, e)| near(*p, *e))
        });
    (!same).then(|| format!("told {told:?}, not {:?}", naive.told))
}
