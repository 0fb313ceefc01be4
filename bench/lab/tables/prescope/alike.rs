//! How alike the inputs of neighbouring layers' routers are (PreScope, Figure 2).

use moeba::trace::format::Trace;

/// Decode steps that are looked at, at even intervals.
const N_STEPS: usize = 500;

/// The mean cosine of a router's input and that of the MoE layer before, which for the first is the
/// last one's of the token before.
pub fn alike(trace: &Trace, layer: usize) -> f64 {
    let layers: Vec<usize> = trace.header().moe_layers().collect();
    let Some(at) = layers.iter().position(|moe| *moe == layer) else { return f64::NAN };
    let (before, back) = match at.checked_sub(1) {
        Some(before) => (layers[before], 0),
        None => (layers[layers.len() - 1], 1),
    };
    let (mut a, mut b) = (Vec::new(), Vec::new());
    let (mut n, mut sum) = (0, 0.0);
    for token in (back..trace.n_tokens()).step_by(trace.n_tokens().div_ceil(N_STEPS).max(1)) {
        trace.hidden(token, layer, &mut a);
        trace.hidden(token - back, before, &mut b);
        if !a.is_empty() && a.len() == b.len() {
            (n, sum) = (n + 1, sum + cosine(&a, &b));
        }
    }
    sum / f64::from(n)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Pearson's, of points that have both values.
pub fn correlation(points: &[(f64, f64)]) -> f64 {
    let points: Vec<_> = points.iter().filter(|(x, y)| (x + y).is_finite()).collect();
    let mean = |of: fn(&(f64, f64)) -> f64| {
        points.iter().map(|point| of(point)).sum::<f64>() / points.len() as f64
    };
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        points.iter().map(|point| of(point.0 - x, point.1 - y)).sum()
    };
    sum(&|dx, dy| dx * dy) / (sum(&|dx, _| dx * dx) * sum(&|_, dy| dy * dy)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_known_vectors() {
        assert!((cosine(&[3.0, 4.0], &[6.0, 8.0]) - 1.0).abs() < 1e-12);
        assert!(cosine(&[1.0, 0.0], &[0.0, 2.0]).abs() < 1e-12);
        let line = [(0.0, 1.0), (1.0, 3.0), (f64::NAN, 9.0), (2.0, 5.0)];
        assert!((correlation(&line) - 1.0).abs() < 1e-12);
        assert!((correlation(&[(0.0, 1.0), (1.0, 0.0)]) + 1.0).abs() < 1e-12);
    }
}
