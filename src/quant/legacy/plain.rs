//! The quantisers of blocks of 32 with one scale. Without importances they are ggml's, to the
//! byte: the range is divided evenly. With importances the scale is searched for.

use crate::quant::block::Half;
use crate::quant::search::{self, Ladder, nearest};

const LADDER: Ladder = Ladder { first: -1.0, step: 0.1, count: 20, mins_only: false };

/// (d, codes) of `x = d·(q − levels)` with q in `0..2·levels`.
pub fn centred(x: &[f32], importance: Option<&[f32]>, levels: f32) -> (Half, [u8; 32]) {
    let top = 2.0 * levels - 1.0;
    if importance.is_none() {
        // The value of largest magnitude becomes code 0, the end of the range that has no twin.
        let d = search::extreme(x) / -levels;
        let inverse = crate::quant::finite_inverse(d);
        let code = |v: f32| ((v * inverse + (levels + 0.5)) as u8).min(top as u8);
        return (Half::new(d), std::array::from_fn(|i| code(x[i])));
    }
    let mut weights = [0f32; 32];
    search::weights(x, importance, &mut weights);
    let d = Half::new(search::symmetric(x, &weights, levels));
    let inverse = crate::quant::finite_inverse(d.get());
    let code = |v: f32| (nearest(v * inverse) + levels).clamp(0.0, top) as u8;
    (d, std::array::from_fn(|i| code(x[i])))
}

/// (d, m, codes) of `x = d·q + m` with q in `0..=max_q`.
pub fn offset(x: &[f32], importance: Option<&[f32]>, max_q: f32) -> (Half, Half, [u8; 32]) {
    if importance.is_none() {
        let lowest = x.iter().fold(f32::INFINITY, |m, v| m.min(*v));
        let highest = x.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
        let d = (highest - lowest) / max_q;
        let inverse = crate::quant::finite_inverse(d);
        let code = |v: f32| (((v - lowest) * inverse + 0.5) as u8).min(max_q as u8);
        return (Half::new(d), Half::new(lowest), std::array::from_fn(|i| code(x[i])));
    }
    let mut weights = [0f32; 32];
    search::weights(x, importance, &mut weights);
    let grid = search::affine(x, &weights, max_q, &LADDER);
    let (d, m) = (Half::new(grid.scale), Half::new(-grid.min));
    let inverse = crate::quant::finite_inverse(d.get());
    let code = |v: f32| nearest((v - m.get()) * inverse).clamp(0.0, max_q) as u8;
    (d, m, std::array::from_fn(|i| code(x[i])))
}
