//! The predictor and the eviction against naive models, which keep dense matrices and compare all
//! of them at each event, over random events of several requests with gaps in between.

use super::eam::Eam;
use super::eamc::{Eamc, nearest};
use super::*;
use crate::policy::grid::Grid;
use crate::policy::{
    Event, Eviction, Expert, Phase, Prediction, Predictor, Profile, PromptRouted, Routed, Shape,
    Timing,
};
use proptest::prelude::*;

/// Layers 0 and 3 are dense.
const N_EXPERTS: [usize; 5] = [0, 6, 9, 0, 4];
const MOE_LAYERS: [u32; 3] = [1, 2, 4];
const K: usize = 2;

fn shape() -> Shape {
    Shape::of_model(N_EXPERTS.to_vec(), K)
}

#[derive(Clone, Debug)]
enum Act {
    Start(u32),
    Begin(u32, Phase),
    Prompt(u32, u32, Vec<u32>),
    Routed(u32, u32, Vec<u32>),
    Finish(u32),
    End(u32),
}

impl Act {
    fn event(&self) -> Event<'_> {
        match *self {
            Act::Start(request) => Event::RequestStart { request },
            Act::Begin(request, phase) => {
                Event::IterationStart { request, phase, token: None, embedding: &[] }
            }
            Act::Prompt(request, layer, ref counts) => Event::PromptRouted(PromptRouted {
                request,
                layer,
                n_tokens: counts.iter().sum(),
                counts,
                probs: &[],
                chosen: &[],
            }),
            Act::Routed(request, layer, ref chosen) => routed(request, layer, chosen),
            Act::Finish(request) => {
                Event::IterationEnd { request, phase: Phase::Decode, timing: Timing::default() }
            }
            Act::End(request) => Event::RequestEnd { request },
        }
    }
}

fn routed(request: u32, layer: u32, chosen: &[u32]) -> Event<'_> {
    Event::Routed(Routed { request, layer, chosen, probs: &[], hidden: &[], ahead: None })
}

fn choice(layer: u32) -> impl Strategy<Value = Vec<u32>> {
    let n = N_EXPERTS[layer as usize] as u32;
    // Squared, so that some experts are more frequent than others.
    (0..n * n, 1..n).prop_map(move |(at, by)| {
        let first = (at / n) * (at % n) / n;
        vec![first, (first + by) % n]
    })
}

/// Single events, of which gaps come, and whole steps.
fn acts() -> impl Strategy<Value = Vec<Act>> {
    let request = 0u32..3;
    let layer = prop::sample::select(&MOE_LAYERS[..]);
    let one = (request.clone(), layer).prop_flat_map(|(request, layer)| {
        let counts = prop::collection::vec(0u32..4, N_EXPERTS[layer as usize]);
        prop_oneof![
            1 => Just(Act::Start(request)),
            1 => Just(Act::Begin(request, Phase::Prompt)),
            1 => Just(Act::Begin(request, Phase::Decode)),
            2 => counts.prop_map(move |counts| Act::Prompt(request, layer, counts)),
            3 => choice(layer).prop_map(move |chosen| Act::Routed(request, layer, chosen)),
            1 => Just(Act::Finish(request)),
            1 => Just(Act::End(request)),
        ]
    });
    let step = (request, choice(1), choice(2), choice(4)).prop_map(|(request, a, b, c)| {
        let rows = MOE_LAYERS.into_iter().zip([a, b, c]);
        let rows = rows.map(|(layer, chosen)| Act::Routed(request, layer, chosen));
        let start = std::iter::once(Act::Begin(request, Phase::Decode));
        start.chain(rows).chain([Act::Finish(request)]).collect()
    });
    let some = prop_oneof![one.prop_map(|act| vec![act]), step];
    prop::collection::vec(some, 0..40).prop_map(|acts| acts.concat())
}

fn options() -> impl Strategy<Value = InfinityOptions> {
    let switches = (any::<bool>(), any::<bool>(), any::<bool>());
    (1usize..5, 1usize..4, switches).prop_map(|(capacity, n_matches, switches)| {
        let (request_level, multi_layer, layer_proximity) = switches;
        // Mostly on: that is where most can go wrong.
        let request_level = request_level || capacity != 2;
        InfinityOptions { capacity, n_matches, request_level, multi_layer, layer_proximity }
    })
}

/// [layers][experts]
type Matrix = Vec<Vec<u64>>;

fn zeros() -> Matrix {
    N_EXPERTS.iter().map(|n| vec![0; *n]).collect()
}

fn total(matrix: &Matrix) -> u64 {
    matrix.iter().flatten().sum()
}

#[derive(Clone)]
struct NaiveTrace {
    request: u32,
    prefill: Matrix,
    decode: Matrix,
    step: Vec<(u32, Vec<u32>)>,
    list: Vec<Prediction>,
}

struct Naive {
    options: InfinityOptions,
    traces: Vec<NaiveTrace>,
    past: Vec<(Matrix, Matrix)>,
    lifetime: Matrix,
}

/// Places of the nearest, nearest first; only rows of these layers count.
fn naive_nearest(of: &Matrix, among: &[&Matrix], layers: &[u32], n: usize) -> Vec<usize> {
    let dot = |a: &Matrix, b: &Matrix| -> f32 {
        let rows = layers.iter().map(|layer| a[*layer as usize].iter().zip(&b[*layer as usize]));
        rows.flatten().map(|(a, b)| a * b).sum::<u64>() as f32
    };
    let likeness = |at: usize| dot(of, among[at]).powi(2) / dot(among[at], among[at]);
    let mut near: Vec<usize> = (0..among.len()).filter(|at| dot(of, among[*at]) > 0.0).collect();
    near.sort_by(|a, b| likeness(*b).total_cmp(&likeness(*a)));
    near.truncate(n);
    near
}

impl Naive {
    fn new(options: InfinityOptions) -> Naive {
        Naive { options, traces: Vec::new(), past: Vec::new(), lifetime: zeros() }
    }

    fn find(&mut self, request: u32) -> usize {
        if let Some(at) = self.traces.iter().position(|t| t.request == request) {
            return at;
        }
        let (prefill, decode, step, list) = (zeros(), zeros(), Vec::new(), Vec::new());
        self.traces.push(NaiveTrace { request, prefill, decode, step, list });
        self.traces.len() - 1
    }

    fn close_step(&mut self, at: usize) {
        let trace = &mut self.traces[at];
        for (layer, chosen) in std::mem::take(&mut trace.step) {
            chosen.iter().for_each(|e| trace.decode[layer as usize][*e as usize] += 1);
        }
    }

    fn end(&mut self, request: u32) {
        let Some(at) = self.traces.iter().position(|t| t.request == request) else { return };
        self.close_step(at);
        let NaiveTrace { prefill, decode, .. } = self.traces.remove(at);
        if total(&decode) == 0 {
            return;
        }
        if self.past.len() < self.options.capacity {
            self.past.push((prefill, decode));
        } else {
            let among: Vec<&Matrix> = self.past.iter().map(|past| &past.1).collect();
            let near = naive_nearest(&decode, &among, &MOE_LAYERS, 1);
            self.past[near.first().copied().unwrap_or(0)] = (prefill, decode);
        }
    }

    fn observe(&mut self, act: &Act) {
        match act {
            Act::Start(request) => {
                self.end(*request);
                self.find(*request);
            }
            Act::Begin(request, phase) => {
                let at = self.find(*request);
                self.close_step(at);
                self.traces[at].list.clear();
                if *phase == Phase::Decode {
                    self.predict_for(at);
                }
            }
            Act::Prompt(request, layer, counts) => {
                let at = self.find(*request);
                let row = &mut self.traces[at].prefill[*layer as usize];
                row.iter_mut().zip(counts).for_each(|(sum, n)| *sum += u64::from(*n));
            }
            Act::Routed(request, layer, chosen) => {
                let at = self.find(*request);
                if self.traces[at].step.last().is_some_and(|last| last.0 >= *layer) {
                    self.close_step(at);
                }
                self.traces[at].step.push((*layer, chosen.clone()));
                let row = &mut self.lifetime[*layer as usize];
                chosen.iter().for_each(|e| row[*e as usize] += 1);
                if *layer == MOE_LAYERS[2] {
                    self.close_step(at);
                }
                self.predict_for(at);
            }
            Act::Finish(request) => {
                if let Some(at) = self.traces.iter().position(|t| t.request == *request) {
                    self.close_step(at);
                }
            }
            Act::End(request) => self.end(*request),
        }
    }

    /// The counts that a prediction is made of.
    fn evidence(&self, trace: &NaiveTrace) -> Matrix {
        if !self.options.request_level {
            return self.lifetime.clone();
        }
        let prompts: Vec<&Matrix> = self.past.iter().map(|past| &past.0).collect();
        let decodes: Vec<&Matrix> = self.past.iter().map(|past| &past.1).collect();
        let n = self.options.n_matches;
        let near = if !trace.step.is_empty() {
            let mut step = zeros();
            for (layer, chosen) in &trace.step {
                chosen.iter().for_each(|e| step[*layer as usize][*e as usize] += 1);
            }
            let layers: Vec<u32> = trace.step.iter().map(|row| row.0).collect();
            naive_nearest(&step, &decodes, &layers, n)
        } else if total(&trace.decode) > 0 {
            naive_nearest(&trace.decode, &decodes, &MOE_LAYERS, n)
        } else {
            naive_nearest(&trace.prefill, &prompts, &MOE_LAYERS, n)
        };
        if near.is_empty() {
            let own = if total(&trace.decode) > 0 { &trace.decode } else { &trace.prefill };
            return own.clone();
        }
        let mut sum = zeros();
        for (layer, row) in sum.iter_mut().enumerate() {
            for (expert, cell) in row.iter_mut().enumerate() {
                *cell = near.iter().map(|at| decodes[*at][layer][expert]).sum();
            }
        }
        sum
    }

    fn predict_for(&mut self, at: usize) {
        let trace = &self.traces[at];
        let evidence = self.evidence(trace);
        let reached = trace.step.last().map(|row| row.0);
        let next = MOE_LAYERS.iter().position(|l| Some(*l) > reached).unwrap();
        let mut list = Vec::new();
        for (i, layer) in MOE_LAYERS.into_iter().enumerate().skip(next) {
            let row = &evidence[layer as usize];
            let p = K as f32 / row.iter().sum::<u64>() as f32;
            let mut best: Vec<usize> = (0..row.len()).filter(|e| row[*e] > 0).collect();
            best.sort_by_key(|e| std::cmp::Reverse(row[*e]));
            best.truncate(2 * K);
            let near = 1.0 - (i + 1 - next) as f32 / MOE_LAYERS.len() as f32;
            let near = if self.options.layer_proximity { near } else { 1.0 };
            list.extend(best.into_iter().filter(|_| near > 0.0).map(|e| Prediction {
                expert: Expert { layer, expert: e as u32 },
                priority: (row[e] as f32 * p).min(1.0) * near,
            }));
            if !self.options.multi_layer {
                break;
            }
        }
        list.sort_by(|a, b| b.priority.total_cmp(&a.priority));
        self.traces[at].list = list;
    }

    fn predict(&self) -> Vec<Prediction> {
        let mut all: Vec<Prediction> = self.traces.iter().flat_map(|t| t.list.clone()).collect();
        all.sort_by(|a, b| b.priority.total_cmp(&a.priority).then(a.expert.cmp(&b.expert)));
        let mut out: Vec<Prediction> = Vec::new();
        for prediction in all {
            if out.iter().all(|other| other.expert != prediction.expert) {
                out.push(prediction);
            }
        }
        out
    }
}

proptest! {
    #[test]
    fn predictions_are_those_of_a_naive_model(options in options(), acts in acts()) {
        let mut predictor = EamcPredictor::new(&shape(), options);
        let mut naive = Naive::new(options);
        let mut out = vec![Prediction { expert: Expert::default(), priority: 1.0 }];
        for act in &acts {
            predictor.observe(&act.event());
            naive.observe(act);
            if act.event().is_step() {
                predictor.predict(&mut out);
                prop_assert_eq!(&out, &naive.predict(), "after {:?}", act);
            }
        }
    }

    #[test]
    fn the_collection_survives_the_run(options in options(), acts in acts()) {
        let mut predictor = EamcPredictor::new(&shape(), options);
        let mut naive = Naive::new(options);
        for act in &acts {
            predictor.observe(&act.event());
            naive.observe(act);
        }
        let mut profile = Profile::default();
        predictor.save(&mut profile);
        let bytes = profile.get(EamcPredictor::SECTION).unwrap();
        while let Some(trace) = naive.traces.first() {
            naive.end(trace.request);
        }
        let grid = Grid::new(&shape());
        let mut expected = grid.header();
        expected.extend((naive.past.len() as u32).to_le_bytes());
        for (prefill, decode) in &naive.past {
            let counts = prefill.iter().chain(decode).flatten();
            expected.extend(counts.flat_map(|count| (*count as u16).to_le_bytes()));
        }
        prop_assert_eq!(bytes, &expected);

        // It predicts from it as from its own.
        let mut restored = EamcPredictor::restore(&shape(), options, bytes).unwrap();
        let mut again = Profile::default();
        restored.save(&mut again);
        prop_assert_eq!(&again, &profile);
        let act = Act::Routed(0, 1, vec![0, 1]);
        restored.observe(&act.event());
        naive.lifetime = zeros();
        naive.observe(&act);
        let mut out = Vec::new();
        restored.predict(&mut out);
        prop_assert_eq!(out, naive.predict());

        // Less room takes the last ones.
        let less = InfinityOptions { capacity: 1, ..options };
        let mut last = Profile::default();
        EamcPredictor::restore(&shape(), less, bytes).unwrap().save(&mut last);
        let last = last.get(EamcPredictor::SECTION).unwrap();
        let n_last = 2 * 2 * grid.n_cells().min(bytes.len() - grid.header().len() - 4);
        prop_assert!(bytes.ends_with(&last[last.len() - n_last..]));
    }

    #[test]
    fn what_is_malformed_is_refused(
        acts in acts(),
        cut in any::<prop::sample::Index>(),
        junk in any::<Vec<u8>>(),
    ) {
        let options = InfinityOptions::default();
        let mut predictor = EamcPredictor::new(&shape(), options);
        acts.iter().for_each(|act| predictor.observe(&act.event()));
        let mut profile = Profile::default();
        predictor.save(&mut profile);
        let bytes = profile.get(EamcPredictor::SECTION).unwrap();
        let restore = |bytes: &[u8]| EamcPredictor::restore(&shape(), options, bytes);
        prop_assert!(restore(&bytes[..cut.index(bytes.len())]).is_err());
        prop_assert!(restore(&[bytes, &[0]].concat()).is_err());
        let count = Grid::new(&shape()).header().len();
        let mut many = bytes.to_vec();
        many[count..count + 4].fill(0xff);
        prop_assert!(restore(&many).is_err());
        prop_assert!(restore(&junk).is_err());
        let other = Shape::of_model(vec![6, 9, 4], K);
        prop_assert!(EamcPredictor::restore(&other, options, bytes).is_err());
    }

    #[test]
    fn eviction_counts_decode_of_requests_in_progress(acts in acts()) {
        let mut policy = RequestEam::new(&shape());
        let mut counts: Vec<(u32, Matrix)> = Vec::new();
        for act in &acts {
            policy.observe(&act.event());
            match act {
                Act::Start(request) | Act::End(request) => counts.retain(|c| c.0 != *request),
                Act::Routed(request, layer, chosen) => {
                    let mut one = zeros();
                    chosen.iter().for_each(|e| one[*layer as usize][*e as usize] += 1);
                    counts.push((*request, one));
                }
                _ => {}
            }
        }
        for (i, layer) in MOE_LAYERS.into_iter().enumerate() {
            for e in 0..N_EXPERTS[layer as usize] {
                let n: u64 = counts.iter().map(|(_, one)| one[layer as usize][e]).sum();
                let expected = (n as f64 + 0.001) * (1.0 - i as f64 / 3.0);
                let found = policy.priority(Expert { layer, expert: e as u32 });
                prop_assert!((found - expected).abs() < 1e-9, "{} {}", found, expected);
            }
        }
    }

    /// Counts that do not fit into 16 bits are scaled: what is near stays near.
    #[test]
    fn large_counts_keep_their_direction(scale in 1u32..100_000, other in 0usize..19) {
        let grid = Grid::new(&shape());
        let mut eamc = Eamc::new(&grid, 2);
        let of = |scale: u32, skip: usize| {
            let mut eam = Eam::new(&grid);
            (0..grid.n_cells()).filter(|cell| *cell != skip).for_each(|cell| {
                eam.add(cell, (cell as u32 + 1) * scale);
            });
            eam
        };
        eamc.put(0, &of(1, other));
        eamc.put(1, &of(scale, usize::MAX));
        let mut out = Vec::new();
        let eam = of(7, usize::MAX);
        let products = [eamc.product(0, &eam), eamc.product(1, &eam)];
        nearest(&products, eamc.norms(), 2, &mut out);
        prop_assert_eq!(out[0].1, 1);
        // cos² · |M|² of equal directions is |M|².
        let square = products[1].powi(2) / eamc.norms()[1];
        let exact: f32 = eam.cells().iter().map(|c| (*c as f32).powi(2)).sum();
        prop_assert!((square / exact - 1.0).abs() < 1e-3, "{} {}", square, exact);
    }
}

/// A model of one expert a token in layers 0 to 3, as in Figures 6 to 8.
fn small() -> Shape {
    Shape::of_model(vec![2; 4], 1)
}

/// A request whose decode steps choose these experts.
fn request(predictor: &mut EamcPredictor, steps: &[[u32; 4]]) {
    predictor.observe(&Event::RequestStart { request: 0 });
    for step in steps {
        for (layer, expert) in step.iter().enumerate() {
            predictor.observe(&routed(0, layer as u32, &[*expert]));
        }
    }
    predictor.observe(&Event::RequestEnd { request: 0 });
}

fn after_layer_1(predictor: &mut EamcPredictor) -> Vec<(u32, u32, f32)> {
    predictor.observe(&routed(1, 0, &[0]));
    predictor.observe(&routed(1, 1, &[0]));
    let mut out = Vec::new();
    predictor.predict(&mut out);
    out.iter().map(|p| (p.expert.layer, p.expert.expert, p.priority)).collect()
}

/// Section 5.1's example: the nearer expert goes first though the farther one is more probable.
#[test]
fn proximity_puts_the_nearer_expert_first() {
    let options = InfinityOptions::default();
    let steps = [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1]];
    let mut predictor = EamcPredictor::new(&small(), options);
    request(&mut predictor, &steps);
    // One that does not resemble it at all.
    request(&mut predictor, &[[1, 1, 0, 0]; 5]);
    let expected = [(3, 1, 1.0 * 0.5), (2, 1, 0.6 * 0.75), (2, 0, 0.4 * 0.75)];
    let near = |found: Vec<(u32, u32, f32)>, expected: &[(u32, u32, f32)]| {
        let same = |(a, b): (&(u32, u32, f32), &(u32, u32, f32))| {
            (a.0, a.1) == (b.0, b.1) && (a.2 - b.2).abs() < 1e-6
        };
        assert!(found.len() == expected.len() && found.iter().zip(expected).all(same), "{found:?}");
    };
    near(after_layer_1(&mut predictor), &expected);

    let flat = InfinityOptions { layer_proximity: false, ..options };
    let steps = [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 1, 0]];
    let mut predictor = EamcPredictor::new(&small(), flat);
    request(&mut predictor, &steps);
    near(after_layer_1(&mut predictor), &[(2, 1, 0.8), (3, 1, 0.8), (2, 0, 0.2), (3, 0, 0.2)]);
    let next = InfinityOptions { multi_layer: false, ..options };
    let mut predictor = EamcPredictor::new(&small(), next);
    request(&mut predictor, &steps);
    near(after_layer_1(&mut predictor), &[(2, 1, 0.6), (2, 0, 0.15)]);
    let model = InfinityOptions { request_level: false, ..next };
    let mut predictor = EamcPredictor::new(&small(), model);
    request(&mut predictor, &steps);
    request(&mut predictor, &[[1, 1, 0, 0]; 5]);
    near(after_layer_1(&mut predictor), &[(2, 0, 0.45), (2, 1, 0.3)]);
}

/// Figure 5: the fourth request replaces the third, which is the most similar.
#[test]
fn the_most_similar_makes_room() {
    let options = InfinityOptions { capacity: 3, n_matches: 1, ..InfinityOptions::default() };
    let mut predictor = EamcPredictor::new(&small(), options);
    for steps in [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]] {
        request(&mut predictor, &[steps; 2]);
    }
    let saved = |predictor: &EamcPredictor| {
        let mut profile = Profile::default();
        predictor.save(&mut profile);
        profile.get(EamcPredictor::SECTION).unwrap().to_vec()
    };
    let before = saved(&predictor);
    request(&mut predictor, &[[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 0]]);
    let after = saved(&predictor);
    let third = before.len() - 2 * 2 * 8;
    assert_eq!((before.len(), &before[..third]), (after.len(), &after[..third]));
    assert_ne!(before[third..], after[third..]);
}

/// A prompt finds past requests by their prompts and expects what they decoded.
#[test]
fn before_the_first_step_the_prompt_is_compared() {
    let options = InfinityOptions { n_matches: 1, ..InfinityOptions::default() };
    let mut predictor = EamcPredictor::new(&small(), options);
    let prompt = |predictor: &mut EamcPredictor, request, counts: [u32; 2]| {
        predictor.observe(&Event::RequestStart { request });
        for layer in 0..4 {
            predictor.observe(&Act::Prompt(request, layer, counts.to_vec()).event());
        }
    };
    // What they decode is the opposite of what was in their prompts.
    for (number, counts, expert) in [(5, [9, 1], 1), (6, [1, 9], 0)] {
        prompt(&mut predictor, number, counts);
        (0..4).for_each(|layer| predictor.observe(&routed(number, layer, &[expert])));
        predictor.observe(&Event::RequestEnd { request: number });
    }
    prompt(&mut predictor, 7, [90, 20]);
    predictor.observe(&Act::Begin(7, Phase::Decode).event());
    let mut out = Vec::new();
    predictor.predict(&mut out);
    let expected: Vec<_> = (0..3).map(|layer| Expert { layer, expert: 1 }).collect();
    assert_eq!(out.iter().map(|p| p.expert).collect::<Vec<_>>(), expected);
    assert_eq!(out.iter().map(|p| p.priority).collect::<Vec<_>>(), [0.75, 0.5, 0.25]);
}

/// No more than the tier has room for.
#[test]
fn a_small_tier_is_not_flooded() {
    let mut shape = small();
    (shape.n_granules, shape.class, shape.n_slots) = (vec![4; 4], vec![0, 0, 1, 1], vec![8, 7]);
    let mut predictor = EamcPredictor::new(&shape, InfinityOptions::default());
    let steps = [[0, 0, 1, 1], [0, 0, 0, 0]];
    request(&mut predictor, &steps);
    predictor.observe(&Act::Begin(1, Phase::Decode).event());
    predictor.observe(&routed(1, 0, &[0]));
    let mut out = Vec::new();
    predictor.predict(&mut out);
    assert_eq!(out.len(), 3);
}

/// Requests that never end go in the end, and are remembered.
#[test]
fn requests_in_progress_are_bounded() {
    let options = InfinityOptions { capacity: 200, ..InfinityOptions::default() };
    let mut predictor = EamcPredictor::new(&small(), options);
    let mut eviction = RequestEam::new(&small());
    for request in 0..100 {
        predictor.observe(&routed(request, 0, &[0]));
        eviction.observe(&routed(request, 0, &[0]));
    }
    assert_eq!(eviction.priority(Expert { layer: 0, expert: 0 }).round(), 64.0);
    let mut profile = Profile::default();
    predictor.save(&mut profile);
    let header = Grid::new(&small()).header().len();
    let bytes = profile.get(EamcPredictor::SECTION).unwrap();
    assert_eq!(bytes[header..header + 4], 100u32.to_le_bytes());
}
