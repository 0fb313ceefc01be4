//! The networks against their formulas, the predictor over whole and broken streams of events.

use super::*;
use crate::policy::{Event, Expert, Phase, Prediction, Predictor, Profile, Routed, Shape, Timing};
use proptest::prelude::*;

/// Layers 0 and 3 are dense; 2 is the only one in the middle group of four.
const N_EXPERTS: [usize; 6] = [0, 4, 6, 0, 5, 4];
const N_EMBD: usize = 7;
const K: usize = 2;

fn shape() -> Shape {
    Shape::of_model(N_EXPERTS.to_vec(), K)
}

/// Numbers from −1 to 1 (Knuth's linear congruence).
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    fn list(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }

    fn linear(&mut self, n_out: usize, n_in: usize) -> Linear {
        Linear::new(self.list(n_out * n_in), self.list(n_out), n_in)
    }

    fn layer(&mut self, group: Group, [n_embd, n_source, n_experts]: [usize; 3]) -> LayerModel {
        let (n_pca, width) = (5, 40);
        let residual = (group == Group::Middle).then(|| Residual {
            blocks: [self.linear(width, width), self.linear(width, width)],
            gate: self.linear(width, n_pca),
        });
        LayerModel {
            compress: self.linear(n_pca, n_embd),
            input: self.linear(width, n_pca + 2 * n_source),
            residual,
            output: self.linear(n_experts, width),
            loss: Loss { lambda: 0.5, gamma: 2.0, balance: vec![1.0; n_experts] },
        }
    }

    fn layers(&mut self, distance: usize) -> Vec<Option<LayerModel>> {
        let mut layers = vec![None; N_EXPERTS.len()];
        let moe: Vec<usize> = shape().moe_layers().collect();
        for (at, &layer) in moe.iter().enumerate() {
            let source = N_EXPERTS[moe[(at + moe.len() - distance) % moe.len()]];
            let dims = [N_EMBD, source, N_EXPERTS[layer]];
            layers[layer] = Some(self.layer(Group::of(at, moe.len()), dims));
        }
        layers
    }
}

/// Looks one layer ahead.
fn model(seed: u64) -> LlaporModel {
    LlaporModel { layers: Draws(seed).layers(1), second: vec![None; N_EXPERTS.len()] }
}

/// Looks two layers ahead.
fn far_model(seed: u64) -> LlaporModel {
    let mut draws = Draws(seed);
    LlaporModel { layers: draws.layers(1), second: draws.layers(2) }
}

/// The module's formulas, term by term.
fn naive(layer: &LayerModel, h: &[f32], chosen: &[u32], probs: &[f32]) -> Vec<f64> {
    let map = |linear: &Linear, x: &[f64]| -> Vec<f64> {
        let row = |at| &linear.weight()[at * x.len()..][..x.len()];
        let product = |at| row(at).iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
        (0..linear.n_out()).map(|at| product(at) + f64::from(linear.bias()[at])).collect()
    };
    let gelu = |x: Vec<f64>| -> Vec<f64> {
        let u = |x: f64| (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        x.into_iter().map(|x| 0.5 * x * (1.0 + u(x).tanh())).collect()
    };
    let z = map(&layer.compress, &h.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
    let mut x = z.clone();
    let sum: f64 = chosen.iter().map(|e| f64::from(probs[*e as usize])).sum();
    let is_chosen = |e: usize| chosen.contains(&(e as u32));
    x.extend((0..probs.len()).map(|e| if is_chosen(e) { 1.0 } else { 0.0 }));
    x.extend((0..probs.len()).map(|e| if is_chosen(e) { f64::from(probs[e]) / sum } else { 0.0 }));
    let mut y = gelu(map(&layer.input, &x));
    if let Some(residual) = &layer.residual {
        let r = gelu(map(&residual.blocks[1], &gelu(map(&residual.blocks[0], &y))));
        let gate = map(&residual.gate, &z);
        for (y, (r, g)) in y.iter_mut().zip(r.iter().zip(gate)) {
            *y += r / (1.0 + (-g).exp());
        }
    }
    map(&layer.output, &y)
}

proptest! {
    #[test]
    fn networks_compute_their_formulas(seed: u64, middle: bool, a in 0u32..6, b in 0u32..5) {
        let mut draws = Draws(seed);
        let group = if middle { Group::Middle } else { Group::Outer };
        // Longer than a dot product's lanes, and no multiple of them.
        let layer = draws.layer(group, [71, 6, 3]);
        let h = draws.list(71);
        let probs: Vec<f32> = draws.list(6).iter().map(|x| 0.6 + 0.5 * x).collect();
        let chosen = [a, if b < a { b } else { b + 1 }];
        let mut work = Workspace::default();
        layer.forward(&h, &chosen, &probs, &mut work);
        for (logit, exact) in work.logits.iter().zip(naive(&layer, &h, &chosen, &probs)) {
            prop_assert!((f64::from(*logit) - exact).abs() < 1e-4 * exact.abs().max(10.0));
        }
    }

    #[test]
    fn a_model_comes_back_as_it_was(seed: u64, far: bool) {
        let model = if far { far_model(seed) } else { model(seed) };
        prop_assert_eq!(LlaporModel::decode(&shape(), &model.encode()).unwrap(), model);
    }

    #[test]
    fn damage_is_refused_or_harmless(
        at in any::<prop::sample::Index>(),
        byte: u8,
        seed: u64,
    ) {
        let mut bytes = far_model(1).encode();
        let at = at.index(bytes.len());
        prop_assert!(LlaporModel::decode(&shape(), &bytes[..at]).is_err());
        bytes[at] = byte;
        if let Ok(model) = LlaporModel::decode(&shape(), &bytes) {
            let mut llapor = LlaPor::new(&shape(), model, true).unwrap();
            run(&mut llapor, &token(seed, 0));
        }
        // The header is where damage can do most.
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()).min(4000) as usize;
        let at = 8 + at % header.max(1);
        bytes[at] = bytes[at].wrapping_add(byte);
        let _ = LlaporModel::decode(&shape(), &bytes);
    }
}

#[test]
fn another_shape_is_refused() {
    let bytes = model(1).encode();
    let refused = |n_experts: &[usize]| {
        LlaporModel::decode(&Shape::of_model(n_experts.to_vec(), K), &bytes).unwrap_err()
    };
    assert!(refused(&[0, 4, 6, 0, 5, 8]).contains("4 experts"));
    assert!(refused(&[0, 4, 6, 5, 5, 4]).contains("layer.3"));
    assert!(refused(&[4, 6, 5, 4]).contains("layer.0"));
    assert!(LlaPor::new(&Shape::of_model(vec![0, 4, 6], K), model(1), false).is_err());
}

#[test]
fn bad_values_are_refused() {
    let refused = |spoil: &dyn Fn(&mut LayerModel)| {
        let mut model = model(1);
        spoil(model.layers[2].as_mut().unwrap());
        LlaporModel::decode(&shape(), &model.encode()).unwrap_err()
    };
    let nan = |layer: &mut LayerModel| {
        layer.output = Linear::new(vec![f32::NAN; 6 * 40], vec![0.0; 6], 40);
    };
    assert!(refused(&nan).contains("not finite"));
    assert!(refused(&|layer| layer.loss.lambda = 1.5).contains("out of range"));
    assert!(refused(&|layer| layer.residual = None).contains("no tensor layer.2.block.0"));
    assert!(refused(&|layer| layer.input = Draws(1).linear(40, 3)).contains("does not fit"));
    assert!(refused(&|layer| layer.output = Draws(1).linear(6, 39)).contains("do not fit"));
    assert!(refused(&|layer| layer.compress = Draws(1).linear(5, 8)).contains("another length"));
}

#[test]
fn without_training_the_user_is_told_how_to() {
    let Err(message) = LlaPor::from_profile(&shape(), &Profile::default(), true) else { panic!() };
    assert!(message.contains("moeba trace train"));
    let mut profile = Profile::default();
    LlaPor::new(&shape(), model(3), true).unwrap().save(&mut profile);
    assert_eq!(LlaPor::from_profile(&shape(), &profile, true).unwrap().model(), &model(3));
    profile.set("prescope.llapor", vec![0; 100]);
    assert!(LlaPor::from_profile(&shape(), &profile, true).is_err());
}

/// A layer's routing in a test.
#[derive(Clone, Debug)]
struct Step {
    request: u32,
    layer: u32,
    hidden: Vec<f32>,
    probs: Vec<f32>,
    chosen: Vec<u32>,
}

impl Step {
    fn event(&self) -> Event<'_> {
        let Step { request, layer, hidden, probs, chosen } = self;
        let (request, layer) = (*request, *layer);
        Event::Routed(Routed { request, layer, chosen, probs, hidden, ahead: None })
    }
}

/// All layers of a token.
fn token(seed: u64, request: u32) -> Vec<Step> {
    let mut draws = Draws(seed);
    let step = |layer: usize| {
        let n = N_EXPERTS[layer];
        let probs: Vec<f32> = draws.list(n).iter().map(|x| 0.6 + 0.5 * x).collect();
        let first = (probs[0] * 1e4) as u32;
        let chosen = vec![first % n as u32, (first + 1) % n as u32];
        Step { request, layer: layer as u32, hidden: draws.list(N_EMBD), probs, chosen }
    };
    shape().moe_layers().map(step).collect()
}

fn run(llapor: &mut LlaPor, steps: &[Step]) -> Vec<Prediction> {
    steps.iter().for_each(|step| llapor.observe(&step.event()));
    predictions(llapor)
}

fn predictions(llapor: &mut LlaPor) -> Vec<Prediction> {
    let mut out = vec![Prediction { expert: Expert { layer: 99, expert: 99 }, priority: 1.0 }];
    llapor.predict(&mut out);
    out
}

fn llapor(online: bool) -> LlaPor {
    LlaPor::new(&shape(), model(5), online).unwrap()
}

/// The layer's k best by the formulas, and whatever is likelier than not up to 2k.
fn expected(layer: usize, from: &Step) -> Vec<(u32, f64)> {
    let model = model(5);
    let logits =
        naive(model.layers[layer].as_ref().unwrap(), &from.hidden, &from.chosen, &from.probs);
    let mut all: Vec<(u32, f64)> = (0..).zip(logits).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    let likely = all.iter().filter(|(_, logit)| *logit > 0.0).count();
    all.truncate(likely.clamp(K, 2 * K));
    all.into_iter().map(|(expert, x)| (expert, 1.0 / (1.0 + (-x).exp()))).collect()
}

#[test]
fn each_layer_is_predicted_from_the_one_before() {
    let mut llapor = llapor(false);
    assert!(predictions(&mut llapor).is_empty());
    for (step, next) in token(8, 0).iter().zip([2, 4, 5, 1]) {
        let found = run(&mut llapor, std::slice::from_ref(step));
        let expected = expected(next, step);
        assert_eq!(found.len(), expected.len());
        for (found, (expert, p)) in found.iter().zip(expected) {
            assert_eq!(found.expert, Expert { layer: next as u32, expert });
            assert!((f64::from(found.priority) - p).abs() < 1e-4);
        }
        let mut heard = Vec::new();
        llapor.emit(&mut |event| match event {
            Event::Predicted { layer, probs } => heard.push((*layer, probs.to_vec())),
            other => panic!("{other:?}"),
        });
        assert_eq!((heard.len(), heard[0].0), (1, next as u32));
        assert_eq!(heard[0].1.len(), N_EXPERTS[next]);
        assert_eq!(heard[0].1[found[0].expert.expert as usize], found[0].priority);
    }
    // The next token's first layer is expected until it comes.
    let before = predictions(&mut llapor);
    let timing = Timing::default();
    llapor.observe(&Event::IterationEnd { request: 0, phase: Phase::Decode, timing });
    llapor.observe(&Event::IterationStart {
        request: 0,
        phase: Phase::Decode,
        token: None,
        embedding: &[],
    });
    assert_eq!(predictions(&mut llapor), before);
    llapor.emit(&mut |event| panic!("told twice: {event:?}"));
    // A prompt in between makes it void.
    llapor.observe(&Event::IterationStart {
        request: 0,
        phase: Phase::Prompt,
        token: None,
        embedding: &[],
    });
    assert!(predictions(&mut llapor).is_empty());
}

/// Each layer is predicted from the two before it, the nearer one first.
#[test]
fn the_layer_after_the_next_is_predicted_too() {
    let mut llapor = LlaPor::new(&shape(), far_model(5), true).unwrap();
    for (step, [next, second]) in token(8, 0).iter().zip([[2, 4], [4, 5], [5, 1], [1, 2]]) {
        let found = run(&mut llapor, std::slice::from_ref(step));
        let n_next = found.iter().take_while(|p| p.expert.layer == next).count();
        assert!((K..=2 * K).contains(&n_next) && (K..=2 * K).contains(&(found.len() - n_next)));
        assert!(found[n_next..].iter().all(|p| p.expert.layer == second), "{found:?}");
    }
    // Networks of the first version alone say what they said.
    let mut first = LlaPor::new(&shape(), model(5), true).unwrap();
    assert!(run(&mut first, &token(8, 0)[..1]).iter().all(|p| p.expert.layer == 2));
}

/// Each network learns from its own layer's choice alone.
#[test]
fn both_networks_of_a_layer_learn_from_it() {
    let changed = |n_layers: usize| {
        let mut llapor = LlaPor::new(&shape(), far_model(5), true).unwrap();
        run(&mut llapor, &token(8, 0)[..n_layers]);
        let (was, is) = (far_model(5), llapor.model().clone());
        let differ = |was: &[Option<LayerModel>], is: &[Option<LayerModel>]| -> Vec<usize> {
            (0..N_EXPERTS.len()).filter(|layer| was[*layer] != is[*layer]).collect()
        };
        (differ(&was.layers, &is.layers), differ(&was.second, &is.second))
    };
    assert_eq!(changed(1), (vec![], vec![]));
    assert_eq!(changed(2), (vec![2], vec![]));
    assert_eq!(changed(3), (vec![2, 4], vec![4]));
    assert_eq!(changed(4), (vec![2, 4, 5], vec![4, 5]));
}

#[test]
fn requests_are_predicted_together() {
    let (a, b) = (token(1, 7), token(2, 9));
    let (alone_a, alone_b) = (run(&mut llapor(false), &a[..1]), run(&mut llapor(false), &b[..1]));
    let mut llapor = llapor(false);
    let both = run(&mut llapor, &[a[0].clone(), b[0].clone()]);
    for expert in (0..6).map(|expert| Expert { layer: 2, expert }) {
        let p = |list: &[Prediction]| list.iter().find(|p| p.expert == expert).map(|p| p.priority);
        let (a, b) = (p(&alone_a), p(&alone_b));
        let none = (1.0 - a.unwrap_or(0.0)) * (1.0 - b.unwrap_or(0.0));
        let either = a.or(b).map(|_| 1.0 - none);
        assert!(match (p(&both), either) {
            (Some(found), Some(expected)) => (found - expected).abs() < 1e-6,
            (found, expected) => found == expected,
        });
    }
    llapor.observe(&Event::RequestEnd { request: 9 });
    assert_eq!(predictions(&mut llapor), alone_a);
    llapor.observe(&Event::RequestStart { request: 7 });
    assert!(predictions(&mut llapor).is_empty());
}

/// Two requests of four layers: after eight steps of the one the other has missed its turn.
#[test]
fn a_request_that_pauses_is_not_prefetched_for() {
    let mut llapor = llapor(false);
    run(&mut llapor, &token(1, 7)[..1]);
    let layers = |found: Vec<Prediction>| {
        let mut layers: Vec<u32> = found.iter().map(|p| p.expert.layer).collect();
        layers.sort();
        layers.dedup();
        layers
    };
    assert_eq!(layers(run(&mut llapor, &token(2, 9))), [1, 2]);
    assert_eq!(layers(run(&mut llapor, &token(3, 9))), [1, 2]);
    assert_eq!(layers(run(&mut llapor, &token(4, 9)[..1])), [2]);
    assert_eq!(layers(run(&mut llapor, &token(4, 9)[1..2])), [4]);
}

/// Any event, also ones that a sound engine never sends.
fn events() -> impl Strategy<Value = Vec<(u8, u32, u32, u64)>> {
    prop::collection::vec((0u8..12, 0u32..4, 0u32..7, any::<u64>()), 0..120)
}

proptest! {
    #[test]
    fn gaps_and_nonsense_do_no_harm(events in events(), online: bool) {
        let mut llapor = LlaPor::new(&shape(), far_model(5), online).unwrap();
        for (kind, request, layer, seed) in events {
            let mut step = token(seed, request)[layer as usize % 4].clone();
            match kind {
                0 => step.hidden.clear(),
                1 => step.hidden[3] = f32::NAN,
                2 => drop(step.probs.pop()),
                3 => step.chosen[1] = 70,
                4 => step.layer = layer,
                5 => step.probs.fill(0.0),
                _ => {}
            }
            let phase = if seed % 2 == 0 { Phase::Decode } else { Phase::Prompt };
            match kind {
                9 => llapor.observe(&Event::RequestStart { request }),
                10 => {
                    let (token, embedding) = (None, &[][..]);
                    llapor.observe(&Event::IterationStart { request, phase, token, embedding });
                }
                11 => llapor.observe(&Event::RequestEnd { request }),
                _ => llapor.observe(&step.event()),
            }
            let found = predictions(&mut llapor);
            let mut experts: Vec<Expert> = found.iter().map(|p| p.expert).collect();
            experts.sort();
            experts.dedup();
            prop_assert_eq!(experts.len(), found.len());
            for p in &found {
                prop_assert!((0.0..=1.0).contains(&p.priority));
                prop_assert!((p.expert.expert as usize) < N_EXPERTS[p.expert.layer as usize]);
            }
            prop_assert!(found.is_sorted_by(|a, b| a.priority >= b.priority));
        }
    }
}

/// A world of four kinds of activations, of which each has its own two experts of layer 2. Then
/// they change places.
#[test]
fn online_updates_follow_a_drift() {
    let n_tokens = 6000;
    let accuracy = |online: bool| -> Vec<f64> {
        let mut learner = llapor(true);
        let mut hits = [0, 0, 0];
        let phase = |llapor: &mut LlaPor, shift: u32, hits: &mut usize| {
            for at in 0..n_tokens {
                let kind = (at * 7 / 3) as u32 % 4;
                let mut step = token(0, 0).swap_remove(0);
                step.hidden = Draws(at as u64).list(N_EMBD);
                step.hidden.iter_mut().for_each(|x| *x *= 0.2);
                step.hidden[kind as usize] += 4.0;
                let mut next = token(0, 0).swap_remove(1);
                next.chosen = vec![(kind + shift) % 6, (kind + shift + 1) % 6];
                let found = run(llapor, &[step]);
                let right = |p: &&Prediction| next.chosen.contains(&p.expert.expert);
                if at >= n_tokens / 2 {
                    *hits += found.iter().take(K).filter(right).count();
                }
                llapor.observe(&next.event());
            }
        };
        // Online learning makes the model, so that it has something to forget.
        phase(&mut learner, 0, &mut hits[0]);
        let mut llapor = LlaPor::new(&shape(), learner.model().clone(), online).unwrap();
        phase(&mut llapor, 0, &mut hits[1]);
        phase(&mut llapor, 3, &mut hits[2]);
        hits.iter().map(|hits| *hits as f64 / (n_tokens / 2 * K) as f64).collect()
    };
    let (frozen, online) = (accuracy(false), accuracy(true));
    assert!(frozen[1] > 0.9 && online[1] > 0.9, "{frozen:?} {online:?}");
    assert!(frozen[2] < 0.5 && online[2] > 0.9, "{frozen:?} {online:?}");
}

#[test]
fn groups_are_at_the_ends() {
    let outer = |n: usize| (0..n).filter(|at| Group::of(*at, n) == Group::Outer).count();
    assert_eq!([1, 2, 3, 4, 12, 32, 48].map(outer), [1, 2, 2, 2, 4, 12, 16]);
    assert_eq!(Group::of(5, 32), Group::Outer);
    assert_eq!([Group::of(6, 32), Group::of(25, 32)], [Group::Middle; 2]);
    assert_eq!(Group::of(26, 32), Group::Outer);
}
