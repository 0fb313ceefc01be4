//! The epochs of one layer's network.

use super::TrainOptions;
use super::adamw::AdamW;
use super::augment::Noise;
use super::features::Set;
use super::network::{Dropout, Network};
use crate::policy::papers::prescope::llapor::{Group, LayerModel, Linear, Loss};

/// No expert counts for more than this many times the mean.
const BALANCE_MAX: f32 = 8.0;

/// `goes_on` gets each epoch and its mean loss; if it returns false, this is the last one.
pub fn fit(
    set: &Set,
    compress: Linear,
    group: Group,
    options: &TrainOptions,
    noise: &mut Noise,
    goes_on: &mut dyn FnMut(usize, f64) -> bool,
) -> LayerModel {
    let own = options.of(group);
    let balance = if own.balanced { balance(&set.counts()) } else { vec![1.0; set.n_experts] };
    let loss = Loss { lambda: own.lambda, gamma: own.gamma, balance };
    let dims = [set.n_pca, set.n_inputs(), options.width];
    let mut network = Network::new(group, dims, loss, noise);
    let mut adamw = AdamW::new(own.rate, own.weight_decay);
    let mut order: Vec<usize> = (0..set.len()).collect();
    for epoch in 0..options.epochs {
        noise.shuffle(&mut order);
        let mut sum = 0.0;
        for (step, examples) in order.chunks(options.batch).enumerate() {
            let now = epoch as f64 + (step * options.batch) as f64 / order.len() as f64;
            adamw.rate = own.rate * schedule(now, options);
            let (x, chosen) = batch(set, examples, options, noise);
            let mut dropout = Dropout { part: options.dropout, noise };
            let loss = network.step(&x, &chosen, &mut dropout, &mut adamw);
            sum += f64::from(loss) * examples.len() as f64;
        }
        if !goes_on(epoch, sum / order.len() as f64) {
            break;
        }
    }
    network.export(compress)
}

/// The rate at a time in epochs, in parts of the highest: a linear rise, then half a cosine.
fn schedule(now: f64, options: &TrainOptions) -> f64 {
    let (epochs, warm_up) = (options.epochs as f64, options.warm_up.min(options.epochs / 2) as f64);
    if now < warm_up {
        return now / warm_up;
    }
    let done = (now - warm_up) / (epochs - warm_up);
    0.5 * (1.0 + (std::f64::consts::PI * done).cos())
}

/// Inverse frequencies with a mean of 1. One more example of each expert keeps them finite.
fn balance(counts: &[u32]) -> Vec<f32> {
    let inverse: Vec<f32> = counts.iter().map(|n| 1.0 / (*n as f32 + 1.0)).collect();
    let mean = inverse.iter().sum::<f32>() / inverse.len() as f32;
    let mut weights: Vec<f32> = inverse.iter().map(|x| (x / mean).min(BALANCE_MAX)).collect();
    let mean = weights.iter().sum::<f32>() / weights.len() as f32;
    weights.iter_mut().for_each(|weight| *weight /= mean);
    weights
}

/// Inputs with noise and gaps, [n, n_inputs], and which experts are right, [n, n_experts].
fn batch(
    set: &Set,
    examples: &[usize],
    options: &TrainOptions,
    noise: &mut Noise,
) -> (Vec<f32>, Vec<bool>) {
    let mut inputs = Vec::with_capacity(examples.len() * set.n_inputs());
    let mut chosen = vec![false; examples.len() * set.n_experts];
    for (&example, chosen) in examples.iter().zip(chosen.chunks_exact_mut(set.n_experts)) {
        let start = inputs.len();
        inputs.extend_from_slice(set.input(example));
        let (z, choice) = inputs[start..].split_at_mut(set.n_pca);
        noise.blur(z, options.noise);
        let mask = noise.mask(set.n_pca + set.n_source, options.mask);
        let (z_mask, mask) = mask.split_at(set.n_pca);
        z.iter_mut().zip(z_mask).for_each(|(x, m)| *x *= m);
        // An expert is left out with its weight.
        for part in choice.chunks_exact_mut(set.n_source) {
            part.iter_mut().zip(mask).for_each(|(x, m)| *x *= m);
        }
        set.chosen(example).iter().for_each(|&expert| chosen[expert as usize] = true);
    }
    (inputs, chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_and_falls() {
        let options = TrainOptions { epochs: 30, warm_up: 5, ..TrainOptions::default() };
        let rates = [0.0, 2.5, 5.0, 17.5, 30.0].map(|now| schedule(now, &options));
        for (rate, expected) in rates.into_iter().zip([0.0, 0.5, 1.0, 0.5, 0.0]) {
            assert!((rate - expected).abs() < 1e-9, "{rates:?}");
        }
        // A short training warms up for half of it.
        let options = TrainOptions { epochs: 4, ..options };
        assert_eq!(schedule(2.0, &options), 1.0);
    }

    #[test]
    fn rare_experts_weigh_as_much_as_hot_ones() {
        let weights = balance(&[9, 19, 39]);
        assert!((weights.iter().sum::<f32>() - 3.0).abs() < 1e-5);
        assert!((weights[0] / weights[1] - 2.0).abs() < 1e-5);
        assert!((weights[0] / weights[2] - 4.0).abs() < 1e-5);
        // One that was never seen does not drown all others.
        let mut counts = vec![1000; 64];
        counts[7] = 0;
        let weights = balance(&counts);
        assert!(weights[7] / weights[0] < 600.0 && weights.iter().all(|w| *w > 0.0));
    }
}
