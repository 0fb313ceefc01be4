//! The search for the formats of grids. For values and a scale it finds the nearest points; for 16
//! or 32 values a scale, on a ladder of scales, whose points leave the least weighted squared
//! error; for a block a step d, of which the scales are odd multiples.
//!
//! A grid has too few points for each value to be rounded by itself, and too many to try all. So
//! values are rounded to levels first, and each combination of levels, a cell, has a list of the
//! points nearest to it. The best one of these by the values themselves and their weights is
//! taken. Where a cell is a point, nothing can be nearer.

use crate::quant::block::Half;
use crate::quant::search::{self, Fit};

/// Points that are tried for a cell.
const N_NEAR: usize = 24;

/// Points that are tried while a scale is looked for.
const N_NEAREST: usize = 6;

/// From one scale that is tried to the next.
const RUNG: f32 = 1.2;

/// A grid of points of `W` coordinates.
pub struct Grid<const W: usize> {
    points: Vec<[f32; W]>,
    /// The values of a coordinate, ascending, and the middles between them.
    levels: &'static [i8],
    middles: Vec<f32>,
    /// [cells, N_NEAR]
    near: Vec<u16>,
    /// Whether a cell is a point, which is the first of its list.
    is_point: Vec<bool>,
}

impl<const W: usize> Grid<W> {
    pub fn new(points: &[[i8; W]], levels: &'static [i8]) -> Grid<W> {
        let middle = |pair: &[i8]| 0.5 * (f32::from(pair[0]) + f32::from(pair[1]));
        let n_cells = levels.len().pow(W as u32);
        let (mut near, mut is_point) = (Vec::with_capacity(n_cells * N_NEAR), Vec::new());
        let mut distances: Vec<(u32, u16)> = Vec::with_capacity(points.len());
        for cell in 0..n_cells {
            let coordinate = |i: usize| levels[cell / levels.len().pow(i as u32) % levels.len()];
            let middle: [i8; W] = std::array::from_fn(coordinate);
            distances.clear();
            distances.extend(points.iter().zip(0..).map(|(point, number)| {
                let pairs = point.iter().zip(&middle);
                (pairs.map(|(a, b)| u32::from(a.abs_diff(*b)).pow(2)).sum(), number)
            }));
            distances.select_nth_unstable(N_NEAR - 1);
            distances[..N_NEAR].sort_unstable();
            is_point.push(distances[0].0 == 0);
            near.extend(distances[..N_NEAR].iter().map(|(_, number)| *number));
        }
        Grid {
            points: points.iter().map(|point| point.map(f32::from)).collect(),
            levels,
            middles: levels.windows(2).map(middle).collect(),
            near,
            is_point,
        }
    }

    /// The nearest of `n` points and its weighted squared distance.
    #[inline]
    fn nearest(&self, x: &[f32; W], weights: &[f32; W], n: usize) -> (u16, f32) {
        let mut cells = [0u32; W];
        for middle in &self.middles {
            for (cell, x) in cells.iter_mut().zip(x) {
                *cell += u32::from(x > middle);
            }
        }
        let cell = cells.iter().rev().fold(0, |all, cell| all * self.levels.len() + *cell as usize);
        let near = &self.near[cell * N_NEAR..][..N_NEAR];
        let near = if self.is_point[cell] { &near[..1] } else { &near[..n] };
        let mut best = (0, f32::INFINITY);
        for number in near {
            let point = &self.points[*number as usize];
            let mut distance = 0.0;
            for i in 0..W {
                let error = point[i] - x[i];
                distance += weights[i] * error * error;
            }
            if distance < best.1 {
                best = (*number, distance);
            }
        }
        best
    }
}

/// How a format uses its grid: `x = d·unit·(2n + 1)·(point ± shift)`.
pub struct Format<const W: usize> {
    pub grid: Grid<W>,
    /// Values that share a scale.
    pub n_sub: usize,
    /// The largest n of a scale.
    pub n_max: u8,
    pub unit: f32,
    pub shift: f32,
    /// Points that share the sign of their shift.
    pub n_span: usize,
    /// The largest value of a sub-block is put at these multiples of the largest level: the first
    /// and how many, each [`RUNG`] times the one before.
    pub rungs: (f32, usize),
}

/// Points of 256 values in the formats' terms.
pub struct Codes {
    pub d: Half,
    /// n of each scale.
    pub scales: [u8; 16],
    /// The numbers of the points.
    pub points: [u16; 64],
    /// Bit k: point k is shifted down.
    pub down: u32,
}

/// Points of some values, at most 32.
#[derive(Clone, Copy, Default)]
struct Coded {
    points: [u16; 8],
    down: u32,
    /// Sums over codes q and values x: Σwqx, Σwq².
    wqx: f64,
    wqq: f64,
}

impl<const W: usize> Format<W> {
    /// The points for `x` in units of `1 / inverse`, each the best of `n`.
    fn code(&self, x: &[f32], weights: &[f32], inverse: f32, n: usize) -> Coded {
        let mut coded = Coded::default();
        let points = x.as_chunks::<W>().0.iter().zip(weights.as_chunks::<W>().0);
        let shifts = [self.shift, -self.shift];
        let shifts = if self.shift == 0.0 { &shifts[..1] } else { &shifts };
        for span in 0..x.len() / W / self.n_span {
            let (mut best, mut least) = (Coded::default(), f32::INFINITY);
            for (down, shift) in shifts.iter().enumerate() {
                let (mut tried, mut error) = (Coded::default(), 0.0);
                for (k, (x, weights)) in
                    points.clone().enumerate().skip(span * self.n_span).take(self.n_span)
                {
                    let (number, distance) =
                        self.grid.nearest(&x.map(|x| x * inverse - shift), weights, n);
                    error += distance;
                    tried.points[k] = number;
                    tried.down |= (down as u32) << k;
                    let point = &self.grid.points[number as usize];
                    let (mut wqx, mut wqq) = (0.0, 0.0);
                    for i in 0..W {
                        let q = point[i] + shift;
                        wqx += weights[i] * q * x[i];
                        wqq += weights[i] * q * q;
                    }
                    tried.wqx += f64::from(wqx);
                    tried.wqq += f64::from(wqq);
                }
                if error < least {
                    (best, least) = (tried, error);
                }
            }
            let own = span * self.n_span..(span + 1) * self.n_span;
            coded.points[own.clone()].copy_from_slice(&best.points[own]);
            coded.down |= best.down;
            coded.wqx += best.wqx;
            coded.wqq += best.wqq;
        }
        coded
    }

    /// The best scale for the values of a sub-block.
    fn scale(&self, x: &[f32], weights: &[f32]) -> f32 {
        let extreme = search::extreme(x).abs();
        if extreme < crate::quant::SMALLEST_BLOCK {
            return 0.0;
        }
        let largest = f32::from(*self.grid.levels.last().expect("a grid has levels"));
        let mut best = Fit::default();
        let mut inverse = largest / extreme * self.rungs.0;
        for _ in 0..self.rungs.1 {
            let coded = self.code(x, weights, inverse, N_NEAREST);
            best.improve(coded.wqx, coded.wqq);
            inverse *= RUNG;
        }
        // The points of the best scale give the next one.
        for _ in 0..2 {
            let coded = self.code(x, weights, (1.0 / best.scale) as f32, N_NEAREST);
            best.improve(coded.wqx, coded.wqq);
        }
        best.scale as f32
    }

    /// The codes of 256 values.
    pub fn quantize(&self, x: &[f32], weights: &[f32]) -> Codes {
        let subs = || x.chunks_exact(self.n_sub).zip(weights.chunks_exact(self.n_sub));
        let mut scales = [0f32; 16];
        for (scale, (x, weights)) in scales.iter_mut().zip(subs()) {
            *scale = self.scale(x, weights);
        }
        let mut codes = Codes { d: Half::ZERO, scales: [0; 16], points: [0; 64], down: 0 };
        let largest = scales.iter().fold(0f32, |m, s| m.max(*s));
        let wanted = largest / self.unit / f32::from(2 * self.n_max + 1);
        let mut d = Half::new(wanted.min(LARGEST_STEP));
        if d.get() == 0.0 {
            return codes;
        }
        let n_points = self.n_sub / W;
        for _ in 0..ROUNDS {
            let step = d.get() * self.unit;
            let (mut wqx, mut wqq) = (0.0, 0.0);
            for (j, (x, weights)) in subs().enumerate() {
                let (n, coded) = self.sub_block(x, weights, scales[j], step);
                codes.scales[j] = n;
                let odd = f64::from(2 * n + 1);
                wqx += odd * coded.wqx;
                wqq += odd * odd * coded.wqq;
                let first = j * n_points;
                codes.points[first..][..n_points].copy_from_slice(&coded.points[..n_points]);
                if self.shift != 0.0 {
                    let own = (1u32 << n_points) - 1;
                    codes.down = codes.down & !(own << first) | coded.down << first;
                }
            }
            // The best step for these codes.
            let best = (wqx / wqq) as f32 / self.unit;
            if best > 0.0 {
                d = Half::new(best.min(LARGEST_STEP));
            }
            codes.d = d;
        }
        codes
    }

    /// The best scale near the wanted one, of the odd multiples of `step`, and its points.
    fn sub_block(&self, x: &[f32], weights: &[f32], wanted: f32, step: f32) -> (u8, Coded) {
        let middle = search::nearest((wanted / step - 1.0) * 0.5).clamp(0.0, f32::from(self.n_max));
        let mut best = (0, Coded::default(), f64::INFINITY);
        for n in [middle, middle - 1.0, middle + 1.0] {
            if !(0.0..=f32::from(self.n_max)).contains(&n) {
                continue;
            }
            let scale = step * (2.0 * n + 1.0);
            let coded = self.code(x, weights, 1.0 / scale, N_NEAR);
            // Σw(x − scale·q)² without Σwx².
            let scale = f64::from(scale);
            let error = scale * (scale * coded.wqq - 2.0 * coded.wqx);
            if error < best.2 {
                best = (n as u8, coded, error);
            }
        }
        (best.0, best.1)
    }
}

/// The largest finite f16.
const LARGEST_STEP: f32 = 65504.0;

/// Times that a step is found and the codes for it.
const ROUNDS: usize = 2;

/// Magnitudes, and the signs that stand beside them, a bit a value.
pub struct Signed {
    pub magnitudes: [f32; 256],
    pub signs: [u8; 32],
}

impl Signed {
    /// Takes the signs off. If they must be even, of eight values with an odd number of minus signs
    /// the one that loses least by it gets the other sign; its magnitude is negative.
    pub fn new(x: &[f32], weights: &[f32], is_even: bool) -> Signed {
        let mut signed = Signed { magnitudes: [0.0; 256], signs: [0; 32] };
        for (k, magnitudes) in signed.magnitudes.chunks_exact_mut(8).enumerate() {
            let (x, weights) = (&x[8 * k..][..8], &weights[8 * k..][..8]);
            let signs = &mut signed.signs[k];
            for (i, (magnitude, x)) in magnitudes.iter_mut().zip(x).enumerate() {
                *magnitude = x.abs();
                *signs |= u8::from(*x < 0.0) << i;
            }
            if is_even && signs.count_ones() % 2 == 1 {
                let loss = |i: &usize| weights[*i] * x[*i].abs();
                let order = |a: &usize, b: &usize| loss(a).total_cmp(&loss(b));
                let i = (0..8).min_by(order).expect("eight values");
                magnitudes[i] = -magnitudes[i];
                *signs ^= 1 << i;
            }
        }
        signed
    }

    /// Seven signs of each of the four eights of group j, a field each, as `grids::even_signs`
    /// takes them.
    pub fn fields(&self, j: usize) -> u32 {
        let of_group = self.signs[4 * j..][..4].iter().enumerate();
        of_group.fold(0, |fields, (k, signs)| fields | u32::from(signs & 127) << (7 * k))
    }
}

/// The weights of 256 values' errors.
pub fn weights(x: &[f32], importance: Option<&[f32]>) -> [f32; 256] {
    let mut weights = [0.0; 256];
    search::weights(x, importance, &mut weights);
    weights
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::grids;

    /// The best of all points.
    fn by_trial<const W: usize>(grid: &Grid<W>, x: &[f32; W], weights: &[f32; W]) -> f32 {
        let distance =
            |point: &[f32; W]| (0..W).map(|i| weights[i] * (point[i] - x[i]).powi(2)).sum::<f32>();
        grid.points.iter().map(distance).fold(f32::INFINITY, f32::min)
    }

    #[test]
    fn the_point_that_is_found_is_hardly_further_than_the_nearest() {
        let grid = Grid::new(&grids::IQ2_XXS, &[8, 25, 43]);
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        let (mut found, mut least) = (0.0, 0.0);
        for _ in 0..500 {
            let x: [f32; 8] = std::array::from_fn(|_| 50.0 * random());
            let weights = std::array::from_fn(|_| 0.2 + random());
            found += grid.nearest(&x, &weights, N_NEAR).1;
            least += by_trial(&grid, &x, &weights);
        }
        assert!(found >= least && found < 1.02 * least, "{found} {least}");
    }

    #[test]
    fn signs_are_made_even_where_it_costs_least() {
        let mut x = [1.0f32; 256];
        (x[3], x[5]) = (-2.0, 0.25);
        let signed = Signed::new(&x, &[1.0; 256], true);
        assert_eq!((signed.signs[0], signed.signs[1]), (1 << 3 | 1 << 5, 0));
        assert_eq!((signed.magnitudes[3], signed.magnitudes[5]), (2.0, -0.25));
        assert_eq!(signed.fields(0), 1 << 3 | 1 << 5);
        assert_eq!(Signed::new(&x, &[1.0; 256], false).signs[0], 1 << 3);
    }
}
