//! The searches behind the K-quant quantisers. Rounding to a grid has no closed optimum, so each
//! search tries a ladder of grid spacings, solves for the best scale (and offset) of the integers
//! that each spacing gives, and keeps the one with the least weighted squared error.

/// The nearest integer, ties to even, of magnitudes below 2²²; above, near enough for a clamp.
/// Where the target has no rounding instruction, `round_ties_even` is a call and this is not.
#[inline]
pub fn nearest(x: f32) -> f32 {
    const ROUNDER: f32 = 12_582_912.0;
    (x + ROUNDER) - ROUNDER
}

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

/// Eight sums at once, so that the compiler can use vectors: it never reorders float sums itself.
type Lanes = [f32; 8];

fn total(lanes: Lanes) -> f64 {
    lanes.iter().map(|x| *x as f64).sum()
}

/// Least squares for (scale, min) with the integers that `inverse` and `lowest` give.
fn solve(x: &[f32], weights: &[f32], max_q: f32, inverse: f32, lowest: f32) -> Option<Affine> {
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
    if min < 0.0 {
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
        let (mut wqx, mut wqq) = (Lanes::default(), Lanes::default());
        for x in x.as_chunks::<8>().0 {
            for i in 0..8 {
                // In units of the extreme, so that the fourth powers stay in range.
                let (x, q) = (x[i] / extreme, nearest(inverse * x[i]));
                let q = q.clamp(-levels, levels - 1.0);
                wqx[i] += x * x * q * x;
                wqq[i] += x * x * q * q;
            }
        }
        let (wqx, wqq) = (total(wqx), total(wqq));
        // The error of the best scale wqx/wqq is Σwx² − wqx²/wqq: the larger the last, the better.
        if wqq > 0.0 && wqx * wqx / wqq > best.0 {
            best = (wqx * wqx / wqq, wqx / wqq);
        }
    }
    best.1 as f32 * extreme
}
