//! The paper's measures on whole iterations, uncompressed: for tables and for tests.

/// An iteration as it was: its embedding, and the probabilities of each MoE layer in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Iteration {
    pub embedding: Vec<f32>,
    pub map: Vec<Vec<f32>>,
}

/// 0 where either has no direction.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    cosine_of(a.iter().zip(b).map(|(a, b)| (f64::from(*a), f64::from(*b))))
}

/// Eq. 4.
pub fn semantic_similarity(a: &Iteration, b: &Iteration) -> f64 {
    cosine(&a.embedding, &b.embedding)
}

/// Eq. 5 over the first `n_layers` MoE layers.
pub fn trajectory_similarity(a: &Iteration, b: &Iteration, n_layers: usize) -> f64 {
    let rows = a.map.iter().zip(&b.map).take(n_layers);
    cosine_of(rows.flat_map(|(a, b)| a.iter().zip(b).map(|(a, b)| (f64::from(*a), f64::from(*b)))))
}

fn cosine_of(pairs: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (mut dot, mut a2, mut b2) = (0.0, 0.0, 0.0);
    for (a, b) in pairs {
        dot += a * b;
        a2 += a * a;
        b2 += b * b;
    }
    if a2 * b2 > 0.0 { dot / (a2 * b2).sqrt() } else { 0.0 }
}

/// The `k` most probable experts, most probable first, of equals the lower id.
pub fn top_k(probs: &[f32], k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..probs.len() as u32).collect();
    let p = |expert: u32| probs[expert as usize];
    order.sort_by(|a, b| p(*b).total_cmp(&p(*a)));
    order.truncate(k);
    order
}

/// The share of the experts that `actual` chooses which `predicted` would have chosen, mean over
/// the layers: the expert hit rate of §4.2.3.
pub fn top_k_overlap(predicted: &Iteration, actual: &Iteration, k: usize) -> f64 {
    let layers = predicted.map.iter().zip(&actual.map);
    let n_layers = layers.len();
    let shares = layers.map(|(predicted, actual)| {
        let (predicted, actual) = (top_k(predicted, k), top_k(actual, k));
        let hits = actual.iter().filter(|expert| predicted.contains(expert)).count();
        hits as f64 / actual.len().max(1) as f64
    });
    shares.sum::<f64>() / n_layers.max(1) as f64
}
