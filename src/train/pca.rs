//! Principal components by subspace iteration (Halko, Martinsson and Tropp, 2011, algorithm 4.4):
//! the covariance is applied to random directions again and again, which turns them towards those
//! of the greatest variance.

use super::augment::Noise;
use super::matrix::{View, product};
use crate::policy::papers::prescope::llapor::Linear;

/// Tokens that the covariance is taken of, at most: so many for each dimension, or so many if that
/// is more. Further ones tell little that is new.
const TOKENS_PER_DIMENSION: usize = 8;
const TOKENS: usize = 16 << 10;

/// Each one multiplies what is wanted, against what is not, by the ratio of their variances.
const ITERATIONS: usize = 8;

/// Components are scaled as if each had at least this part of their mean variance: what is weaker
/// is noise and should stay small.
const FLOOR: f32 = 0.01;

/// The map from activations to their `n_pca` strongest components, each of mean 0 and variance 1.
/// `hidden`: [n, n_embd].
pub fn fit(hidden: &[f32], n_embd: usize, n_pca: usize, noise: &mut Noise) -> Linear {
    let n_max = TOKENS.max(n_embd * TOKENS_PER_DIMENSION);
    let every = (hidden.len() / n_embd).div_ceil(n_max);
    let rows = hidden.chunks_exact(n_embd).step_by(every.max(1));
    let n = rows.len();
    let mut rows: Vec<f32> = rows.flatten().copied().collect();
    let mean: Vec<f32> = (0..n_embd)
        .map(|at| rows.iter().skip(at).step_by(n_embd).sum::<f32>() / n as f32)
        .collect();
    for row in rows.chunks_exact_mut(n_embd) {
        row.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
    }
    let rows = View::new(&rows, n_embd);
    let mut covariance = product(rows.transposed(), rows);
    covariance.iter_mut().for_each(|x| *x /= n as f32);
    let covariance = View::new(&covariance, n_embd);

    let mut components = vec![0.0; n_pca * n_embd];
    noise.blur(&mut components, 1.0);
    orthonormalize(&mut components, n_embd);
    for _ in 0..ITERATIONS {
        components = product(View::new(&components, n_embd), covariance);
        orthonormalize(&mut components, n_embd);
    }
    let turned = product(View::new(&components, n_embd), covariance);
    let pairs = components.chunks_exact(n_embd).zip(turned.chunks_exact(n_embd));
    let variances: Vec<f32> = pairs.map(|(component, turned)| dot(component, turned)).collect();
    let floor = FLOOR * variances.iter().sum::<f32>() / n_pca as f32;
    for (component, variance) in components.chunks_exact_mut(n_embd).zip(&variances) {
        let scale = 1.0 / variance.max(floor).max(1e-12).sqrt();
        component.iter_mut().for_each(|x| *x *= scale);
    }
    let bias = components.chunks_exact(n_embd).map(|component| -dot(component, &mean)).collect();
    Linear::new(components, bias, n_embd)
}

/// Gram and Schmidt's process on vectors of length `n`, twice each, as once leaves rounding errors.
/// Vectors that depend on those before them become 0.
fn orthonormalize(vectors: &mut [f32], n: usize) {
    for at in 0..vectors.len() / n {
        let (before, rest) = vectors.split_at_mut(at * n);
        let vector = &mut rest[..n];
        let length = dot(vector, vector).sqrt();
        for other in before.chunks_exact(n).chain(before.chunks_exact(n)) {
            let along = dot(vector, other);
            vector.iter_mut().zip(other).for_each(|(x, y)| *x -= along * y);
        }
        let left = dot(vector, vector).sqrt();
        let scale = if left > 1e-5 * length { 1.0 / left } else { 0.0 };
        vector.iter_mut().for_each(|x| *x *= scale);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 16];
    for (a, b) in a.chunks(16).zip(b.chunks(16)) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Activations that vary along three directions, 5, 3 and 2 wide, and 0.1 along all others.
    #[test]
    fn the_strongest_directions_are_found_and_scaled() {
        let (n, n_embd) = (4000, 24);
        let mut noise = Noise::new(1, 0);
        let mut axes = vec![0.0; 3 * n_embd];
        noise.blur(&mut axes, 1.0);
        orthonormalize(&mut axes, n_embd);
        let mut hidden = vec![0.7; n * n_embd];
        noise.blur(&mut hidden, 0.1);
        for row in hidden.chunks_exact_mut(n_embd) {
            for (axis, width) in axes.chunks_exact(n_embd).zip([5.0, 3.0, 2.0]) {
                let along = width * noise.normal()[0];
                row.iter_mut().zip(axis).for_each(|(x, a)| *x += along * a);
            }
        }
        let map = fit(&hidden, n_embd, 3, &mut noise);
        let (mut z, mut moments) = (Vec::new(), [[0.0; 2]; 3]);
        for row in hidden.chunks_exact(n_embd) {
            map.apply(row, &mut z);
            for (moments, z) in moments.iter_mut().zip(&z) {
                moments[0] += z / n as f32;
                moments[1] += z * z / n as f32;
            }
        }
        for [mean, square] in moments {
            assert!(mean.abs() < 0.05 && (square - 1.0).abs() < 0.1, "{moments:?}");
        }
        // Each component lies in the plane of the axes.
        for component in map.weight().chunks_exact(n_embd) {
            let length = dot(component, component);
            let inside: f32 = axes.chunks_exact(n_embd).map(|a| dot(a, component).powi(2)).sum();
            assert!(inside > 0.999 * length, "{inside} of {length}");
        }
    }

    #[test]
    fn what_does_not_vary_is_no_component() {
        let hidden: Vec<f32> = (0..100).flat_map(|i| [i as f32, 1.0, 2.0, 3.0]).collect();
        let map = fit(&hidden, 4, 2, &mut Noise::new(0, 0));
        assert!(map.weight().iter().chain(map.bias()).all(|x| x.is_finite()));
        let mut z = Vec::new();
        map.apply(&hidden[..4], &mut z);
        assert!((z[0].abs() - 1.71).abs() < 0.02 && z[1].abs() < 0.01, "{z:?}");
    }
}
