//! The searches behind the K-quant quantisers. Rounding to a grid has no closed optimum, so each
//! search tries a ladder of grid spacings, solves for the best scale (and offset) of the integers
//! that each spacing gives, and keeps the one with the least weighted squared error.

/// A grid `scale·q − min` with `q` in `0..=max_q` and `min ≥ 0`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Affine {
    pub scale: f32,
    pub min: f32,
}

/// How the ladder of spacings runs: `max_q + first + step·i` levels over the range, `i ≤ count`.
pub struct Ladder {
    pub first: f32,
    pub step: f32,
    pub count: usize,
}

/// The best affine grid for `x` under `weights`: least squares for (scale, min) on each rung.
pub fn affine(x: &[f32], weights: &[f32], max_q: f32, ladder: &Ladder) -> Affine {
    let lowest = x.iter().fold(0f32, |m, v| m.min(*v));
    let highest = x.iter().fold(f32::MIN, |m, v| m.max(*v));
    if highest <= lowest {
        // All values are equal and not positive: the offset alone says it.
        return Affine { scale: 0.0, min: -lowest };
    }
    let range = highest - lowest;
    let mut best = Affine { scale: range / max_q, min: -lowest };
    let mut best_error = affine_error(x, weights, max_q, best);
    for i in 0..=ladder.count {
        let levels = max_q + ladder.first + ladder.step * i as f32;
        let Some(grid) = solve(x, weights, max_q, levels / range, lowest) else { continue };
        let error = affine_error(x, weights, max_q, grid);
        if error < best_error {
            (best, best_error) = (grid, error);
        }
    }
    best
}

/// Least squares for (scale, min) with the integers that `inverse` and `lowest` give.
fn solve(x: &[f32], weights: &[f32], max_q: f32, inverse: f32, lowest: f32) -> Option<Affine> {
    let (mut w, mut wx, mut wq, mut wqq, mut wqx) = (0f64, 0f64, 0f64, 0f64, 0f64);
    for (x, weight) in x.iter().zip(weights) {
        let q = (inverse * (x - lowest)).round_ties_even().clamp(0.0, max_q) as f64;
        let (x, weight) = (*x as f64, *weight as f64);
        w += weight;
        wx += weight * x;
        wq += weight * q;
        wqq += weight * q * q;
        wqx += weight * q * x;
    }
    let determinant = w * wqq - wq * wq;
    if determinant <= 0.0 {
        return None;
    }
    let mut scale = (w * wqx - wx * wq) / determinant;
    let mut min = (wq * wqx - wqq * wx) / determinant;
    if min < 0.0 {
        // The format cannot add: the best grid through zero.
        (scale, min) = (wqx / wqq, 0.0);
    }
    let grid = Affine { scale: scale as f32, min: min as f32 };
    (grid.scale > 0.0 && grid.scale.is_finite() && grid.min.is_finite()).then_some(grid)
}

fn affine_error(x: &[f32], weights: &[f32], max_q: f32, grid: Affine) -> f32 {
    let inverse = super::finite_inverse(grid.scale);
    let error = |x: &f32| {
        let q = ((x + grid.min) * inverse).round_ties_even().clamp(0.0, max_q);
        grid.scale * q - grid.min - x
    };
    x.iter().zip(weights).map(|(x, w)| w * error(x) * error(x)).sum()
}

/// The best scale for integers in `−levels..levels`, errors weighted by x²: the value of largest
/// magnitude is put near the end of the range, on 19 rungs of a tenth of a level around it.
pub fn symmetric(x: &[f32], levels: f32) -> f32 {
    let extreme = x.iter().fold(0f32, |m, v| if v.abs() > m.abs() { *v } else { m });
    if extreme.abs() < super::SMALLEST_BLOCK {
        return 0.0;
    }
    let mut best = (0f64, 0f64);
    for rung in -9..=9 {
        let inverse = -(levels + 0.1 * rung as f32) / extreme;
        let (mut wqx, mut wqq) = (0f64, 0f64);
        for x in x {
            let q = (inverse * x).round_ties_even().clamp(-levels, levels - 1.0) as f64;
            let x = *x as f64;
            wqx += x * x * q * x;
            wqq += x * x * q * q;
        }
        // The error of the best scale wqx/wqq is Σwx² − wqx²/wqq: the larger the last, the better.
        if wqq > 0.0 && wqx * wqx / wqq > best.0 {
            best = (wqx * wqx / wqq, wqx / wqq);
        }
    }
    best.1 as f32
}
