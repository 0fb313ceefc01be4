//! A small world in which each layer's activations are the earlier one's, turned.

use super::*;

const N_EMBD: usize = 12;
const N_EXPERTS: [usize; 4] = [8, 0, 6, 8];
const K: usize = 2;

fn shape() -> Shape {
    Shape::of_model(N_EXPERTS.to_vec(), K)
}

/// h ← R h + noise from layer to layer and from token to token, R a permutation with signs; a
/// router is a random matrix. The gate is wrong here, as it knows nothing of R.
fn samples(n: usize) -> Samples {
    let mut noise = Noise::new(11, 0);
    let moe: Vec<usize> = shape().moe_layers().collect();
    let mut draw = |n: usize, deviation: f32| {
        let mut out = vec![0.0; n];
        noise.blur(&mut out, deviation);
        out
    };
    let routers: Vec<Vec<f32>> =
        moe.iter().map(|layer| draw(N_EXPERTS[*layer] * N_EMBD, 0.7)).collect();
    let softmax = |router: &[f32], h: &[f32]| -> Vec<f32> {
        let logit = |row: &[f32]| row.iter().zip(h).map(|(w, x)| w * x).sum::<f32>();
        let e: Vec<f32> = router.chunks_exact(N_EMBD).map(|row| logit(row).exp()).collect();
        e.iter().map(|x| x / e.iter().sum::<f32>()).collect()
    };
    let mut samples = Samples { n_embd: N_EMBD, ..Samples::default() };
    samples.layers = vec![LayerSamples { ahead: Some(Vec::new()), ..Default::default() }; 3];
    for token in 0..n {
        samples.follows.push(token % 50 != 0);
        let mut h = draw(N_EMBD, 1.0);
        for (at, layer) in samples.layers.iter_mut().enumerate() {
            let probs = softmax(&routers[at], &h);
            let mut order: Vec<u32> = (0..probs.len() as u32).collect();
            order.sort_by(|a, b| probs[*b as usize].total_cmp(&probs[*a as usize]));
            layer.chosen.extend(&order[..K]);
            layer.probs.extend(probs);
            layer.hidden.extend(&h);
            layer.ahead.as_mut().unwrap().extend(softmax(&routers[(at + 1) % 3], &h));
            let blur = draw(N_EMBD, 0.1);
            h = (0..N_EMBD).map(|i| blur[i] - h[(i * 5 + 1) % N_EMBD]).collect();
        }
    }
    samples
}

fn options() -> TrainOptions {
    let mut options = TrainOptions { epochs: 8, warm_up: 1, batch: 32, ..Default::default() };
    (options.width, options.held_out) = (32, 0.25);
    (options.outer.rate, options.middle.rate) = (1e-2, 1e-2);
    // All directions of this world's activations matter.
    (options.outer.compression, options.middle.compression) = (1, 1);
    options
}

/// The paper's 4096 become 256 and 512, and every model's activations become shorter.
#[test]
fn activations_are_compressed() {
    let options = TrainOptions::default();
    let n_pca = |n_embd| [Group::Outer, Group::Middle].map(|group| options.n_pca(group, n_embd));
    assert_eq!(n_pca(4096), [256, 512]);
    assert_eq!(n_pca(2048), [256, 256]);
    assert_eq!([n_pca(256), n_pca(2), n_pca(1)], [[128, 128], [1, 1], [1, 1]]);
}

fn trained(n: usize, options: &TrainOptions) -> Trained {
    train(&shape(), &samples(n), options, &mut |_| Ok(())).unwrap()
}

#[test]
fn what_can_be_learned_is() {
    let mut heard = Vec::new();
    let Trained { model, report } = train(&shape(), &samples(1200), &options(), &mut |p| {
        heard.push(p);
        Ok(())
    })
    .unwrap();
    model.check(&shape()).unwrap();
    let of = |accuracy: &Accuracy| *accuracy.top.last().unwrap();
    for layer in &report.layers[1..] {
        let rivals = [of(layer.gate.as_ref().unwrap()), of(&layer.statistics)];
        assert!(of(&layer.llapor) > 0.75, "{layer:?}");
        assert!(rivals.iter().all(|rival| of(&layer.llapor) > rival + 0.2), "{layer:?}");
        assert!(layer.llapor.top[0] > 0.85 && layer.llapor.hot.tokens > 0.85, "{layer:?}");
        assert_eq!(layer.n_tokens, 300);
    }
    // A text's first token follows nothing; the rest follow tokens that say nothing of them.
    assert_eq!((report.layers[0].n_tokens, report.layers[0].layer), (294, 0));
    assert!(of(&report.layers[0].llapor) < 0.6, "{report:?}");
    // From two layers before nearly as much: the same turns, and noise twice.
    for layer in &report.second[2..] {
        assert!(of(&layer.llapor) > 0.65 && layer.gate.is_none(), "{layer:?}");
        assert!(of(&layer.llapor) > of(&layer.statistics) + 0.2, "{layer:?}");
    }
    // The first two follow tokens that say nothing of them.
    assert_eq!([0, 1, 2].map(|at| report.second[at].n_tokens), [294, 294, 300]);
    assert!(report.second[..2].iter().all(|layer| of(&layer.llapor) < 0.6), "{report:?}");
    assert_eq!(heard.len(), 2 * 3 * 8);
    assert!(heard[23].loss < 0.7 * heard[16].loss, "{heard:?}");
    assert_eq!((heard[23].layer, heard[23].n_done, heard[23].epoch), (3, 2, 7));
    assert_eq!((heard[47].layer, heard[47].n_done, heard[47].n_networks), (3, 5, 6));
}

#[test]
fn a_seed_makes_one_model() {
    let with = |seed| trained(200, &TrainOptions { epochs: 2, seed, ..options() }).model;
    assert_eq!(with(1), with(1));
    assert_ne!(with(1), with(2));
}

/// A trained model goes through the profile into the predictor.
#[test]
fn a_trained_model_predicts() {
    use crate::policy::{Event, LlaPor, Predictor, Profile, Routed};
    let Trained { model, .. } = trained(200, &TrainOptions { epochs: 2, ..options() });
    let mut profile = Profile::default();
    LlaPor::new(&shape(), model, false).unwrap().save(&mut profile);
    let mut llapor = LlaPor::from_profile(&shape(), &profile, false).unwrap();
    let samples = samples(1);
    let LayerSamples { hidden, probs, chosen, .. } = &samples.layers[0];
    let (request, layer) = (0, 0);
    llapor.observe(&Event::Routed(Routed { request, layer, chosen, probs, hidden, ahead: None }));
    let mut out = Vec::new();
    llapor.predict(&mut out);
    let layers: Vec<u32> = out.iter().map(|p| p.expert.layer).collect();
    assert!(layers.is_sorted() && layers.contains(&2) && layers.contains(&3), "{layers:?}");
}

#[test]
fn bad_samples_and_options_are_refused() {
    let refused = |spoil: &dyn Fn(&mut Samples, &mut TrainOptions)| {
        let (mut samples, mut options) = (samples(20), options());
        spoil(&mut samples, &mut options);
        train(&shape(), &samples, &options, &mut |_| Ok(())).unwrap_err().to_string()
    };
    assert!(refused(&|samples, _| drop(samples.layers.pop())).contains("2 layers"));
    assert!(refused(&|samples, _| samples.follows.truncate(19)).contains("not have 19 tokens"));
    assert!(refused(&|samples, _| samples.layers[1].chosen[3] = 6).contains("6 experts"));
    assert!(refused(&|samples, _| samples.layers[2].hidden[0] = f32::NAN).contains("finite"));
    assert!(refused(&|_, options| options.dropout = 1.0).contains("out of range"));
    assert!(refused(&|_, options| options.held_out = 0.96).contains("too few"));
}

#[test]
fn an_error_ends_the_training() {
    let mut n_heard = 0;
    let ended = train(&shape(), &samples(200), &options(), &mut |progress| {
        n_heard += 1;
        if progress.n_done == 1 { Err(Error::Interrupted) } else { Ok(()) }
    });
    assert!(matches!(ended, Err(Error::Interrupted)));
    assert_eq!(n_heard, 8 + 1);
}
