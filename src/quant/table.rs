//! The search for formats whose codes index a table of sixteen integers.

use super::search::{self, Fit};

/// The index of the entry nearest to `v`; the table ascends.
#[inline]
pub fn nearest(table: &[i8; 16], v: f32) -> u8 {
    let above = table.windows(2).filter(|pair| v > 0.5 * (pair[0] as f32 + pair[1] as f32));
    above.count() as u8
}

/// The best scale for `x` under `weights`: the value of largest magnitude is put near either end
/// of the table, on 15 rungs around it.
pub fn scale(table: &[i8; 16], x: &[f32], weights: &[f32]) -> f32 {
    let extreme = search::extreme(x);
    if extreme.abs() < super::SMALLEST_BLOCK {
        return 0.0;
    }
    let mut best = Fit::default();
    for end in [table[0], table[15]] {
        for rung in -7..=7 {
            let inverse = (end as f32 + rung as f32) / extreme;
            let (mut wqx, mut wqq) = (0f64, 0f64);
            for (x, w) in x.iter().zip(weights) {
                let q = table[nearest(table, x * inverse) as usize] as f32;
                // In units of the extreme, so that products stay in range.
                wqx += (w * q * (x / extreme)) as f64;
                wqq += (w * q * q) as f64;
            }
            best.improve(wqx, wqq);
        }
    }
    best.scale as f32 * extreme
}
