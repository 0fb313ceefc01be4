//! The searches behind the K-quant quantisers. Rounding to a grid has no closed optimum, so each
//! search tries a ladder of grid spacings, solves for the best scale (and offset) of the integers
//! that each spacing gives, and keeps the one with the least weighted squared error.

/// The nearest integer, ties to even, of magnitudes below 2²²; above, near enough for a clamp.
/// Rounds to the nearest integer. `round_ties_even` is a call if the target has no rounding
/// instruction; this is not.
#[inline]
pub fn nearest(x: f32) -> f32 {
    const ROUNDER: f32 = 12_582_912.0;
    (x + ROUNDER) - ROUNDER
}

/// The weight of each value's squared error: the importance if it is known, so that the sum is
/// that of a dot product with activations of those mean squares. Otherwise large values count more,
/// as they matter more to a dot product, and the root mean square keeps small ones in.
pub fn weights(x: &[f32], importance: Option<&[f32]>, out: &mut [f32]) {
    if !importances(importance, out) {
        let rms = (x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32).sqrt();
        for (w, v) in out.iter_mut().zip(x) {
            *w = rms + v.abs();
        }
    }
}

/// The importances in units of the largest, so that nothing overflows; false if they are not known
/// or nowhere positive and finite.
pub fn importances(importance: Option<&[f32]>, out: &mut [f32]) -> bool {
    let Some(importance) = importance else { return false };
    let counts = |v: f32| if v.is_finite() { v.max(0.0) } else { 0.0 };
    let largest = importance.iter().fold(0f32, |m, v| m.max(counts(*v)));
    if largest > 0.0 {
        for (w, v) in out.iter_mut().zip(importance) {
            *w = counts(*v) / largest;
        }
    }
    largest > 0.0
}

/// A grid `scale·q − min` with `q` in `0..=max_q`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Affine {
    pub scale: f32,
    pub min: f32,
}

/// How the ladder of spacings runs: `max_q + first + step·i` levels over the range, `i ≤ count`;
/// and whether the min must not be negative (the K-quants cannot add).
pub struct Ladder {
    pub first: f32,
    pub step: f32,
    pub count: usize,
    pub mins_only: bool,
}

/// The best affine grid for `x` under `weights`: least squares for (scale, min) on each rung.
pub fn affine(x: &[f32], weights: &[f32], max_q: f32, ladder: &Ladder) -> Affine {
    let start = if ladder.mins_only { 0.0 } else { f32::INFINITY };
    let lowest = x.iter().fold(start, |m, v| m.min(*v));
    let highest = x.iter().fold(f32::MIN, |m, v| m.max(*v));
    if highest <= lowest {
        // All values are equal: the offset alone says it.
        return Affine { scale: 0.0, min: -lowest };
    }
    let range = highest - lowest;
    let mut best = Affine { scale: range / max_q, min: -lowest };
    let mut best_error = affine_error(x, weights, max_q, best);
    for i in 0..=ladder.count {
        let levels = max_q + ladder.first + ladder.step * i as f32;
        let solved = solve(x, weights, max_q, levels / range, lowest, ladder.mins_only);
        let Some(grid) = solved else { continue };
        let error = affine_error(x, weights, max_q, grid);
        if error < best_error {
            (best, best_error) = (grid, error);
        }
    }
    best
}

/// Eight sums at once, so that the compiler can use vectors: it never reorders float sums itself.
type Lanes = [f32; 8];

pub fn total(lanes: Lanes) -> f64 {
    lanes.iter().map(|x| *x as f64).sum()
}

/// Least squares for (scale, min) with the integers that `inverse` and `lowest` give.
fn solve(
    x: &[f32],
    weights: &[f32],
    max_q: f32,
    inverse: f32,
    lowest: f32,
    mins_only: bool,
) -> Option<Affine> {
    let mut sums = [Lanes::default(); 5];
    for (x, weights) in x.as_chunks::<8>().0.iter().zip(weights.as_chunks::<8>().0) {
        for i in 0..8 {
            let (x, w) = (x[i], weights[i]);
            let q = nearest(inverse * (x - lowest)).clamp(0.0, max_q);
            sums[0][i] += w;
            sums[1][i] += w * x;
            sums[2][i] += w * q;
            sums[3][i] += w * q * q;
            sums[4][i] += w * q * x;
        }
    }
    let [w, wx, wq, wqq, wqx] = sums.map(total);
    let determinant = w * wqq - wq * wq;
    if determinant <= 0.0 {
        return None;
    }
    let mut scale = (w * wqx - wx * wq) / determinant;
    let mut min = (wq * wqx - wqq * wx) / determinant;
    if mins_only && min < 0.0 {
        // The format cannot add: the best grid through zero.
        (scale, min) = (wqx / wqq, 0.0);
    }
    let grid = Affine { scale: scale as f32, min: min as f32 };
    (grid.scale > 0.0 && grid.scale.is_finite() && grid.min.is_finite()).then_some(grid)
}

/// The weighted squared error of `x` on a grid.
pub fn affine_error(x: &[f32], weights: &[f32], max_q: f32, grid: Affine) -> f32 {
    let inverse = super::finite_inverse(grid.scale);
    let mut sums = Lanes::default();
    for (x, weights) in x.as_chunks::<8>().0.iter().zip(weights.as_chunks::<8>().0) {
        for i in 0..8 {
            let q = nearest((x[i] + grid.min) * inverse).clamp(0.0, max_q);
            let error = grid.scale * q - grid.min - x[i];
            sums[i] += weights[i] * error * error;
        }
    }
    total(sums) as f32
}

/// The best scale for integers in `−levels..levels`: the value of largest magnitude is put near
/// the end of the range, on 19 rungs of a tenth of a level around it.
pub fn symmetric(x: &[f32], weights: &[f32], levels: f32) -> f32 {
    let extreme = extreme(x);
    if extreme.abs() < super::SMALLEST_BLOCK {
        return 0.0;
    }
    let mut best = Fit::default();
    for rung in -9..=9 {
        let inverse = -(levels + 0.1 * rung as f32) / extreme;
        let (mut wqx, mut wqq) = (Lanes::default(), Lanes::default());
        for (x, weights) in x.as_chunks::<8>().0.iter().zip(weights.as_chunks::<8>().0) {
            for i in 0..8 {
                let q = nearest(inverse * x[i]).clamp(-levels, levels - 1.0);
                // In units of the extreme, so that products stay in range.
                wqx[i] += weights[i] * q * (x[i] / extreme);
                wqq[i] += weights[i] * q * q;
            }
        }
        best.improve(total(wqx), total(wqq));
    }
    best.scale as f32 * extreme
}

/// The weighted squared error of `x` on the integers `−levels..levels` times `scale`.
pub fn symmetric_error(x: &[f32], weights: &[f32], levels: f32, scale: f32) -> f32 {
    let inverse = super::finite_inverse(scale);
    let mut sums = Lanes::default();
    for (x, weights) in x.as_chunks::<8>().0.iter().zip(weights.as_chunks::<8>().0) {
        for i in 0..8 {
            let q = nearest(x[i] * inverse).clamp(-levels, levels - 1.0);
            let error = scale * q - x[i];
            sums[i] += weights[i] * error * error;
        }
    }
    total(sums) as f32
}

/// The value of largest magnitude.
pub fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0f32, |m, v| if v.abs() > m.abs() { *v } else { m })
}

/// The best scale so far for values x and some integers q: it is Σwqx/Σwq².
#[derive(Default)]
pub struct Fit {
    pub scale: f64,
    gain: f64,
}

impl Fit {
    /// Takes the scale of other integers if it is better.
    pub fn improve(&mut self, wqx: f64, wqq: f64) {
        // The error is Σwx² − (Σwqx)²/Σwq²: the larger the last, the better.
        if wqq > 0.0 && wqx * wqx / wqq > self.gain {
            *self = Fit { scale: wqx / wqq, gain: wqx * wqx / wqq };
        }
    }
}
