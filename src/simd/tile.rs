//! The loops of attention over tiles (`backend::cpu::attention`): products of a few queries with a
//! run of keys, sums of values, the step of the online softmax between them, and what turns cached
//! rows of any type into f32. The scalar versions here are the specification.

use super::{Kernels, exp, scalar};
use crate::quant::{BlockQ8_0, Half, blocks_of, blocks_of_mut, tree8};
use half::{bf16, f16};

/// Rows of `dim` elements that begin `stride` apart.
#[derive(Clone, Copy)]
pub struct Tile<'a> {
    data: &'a [f32],
    rows: usize,
    dim: usize,
    stride: usize,
}

/// The same, to write.
pub struct TileMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    dim: usize,
    stride: usize,
}

/// # Panics
/// If rows would overlap or reach past `len`.
fn check(len: usize, rows: usize, dim: usize, stride: usize) {
    assert!(dim <= stride, "rows of {dim} overlap {stride} apart");
    assert!(rows == 0 || (rows - 1) * stride + dim <= len, "{rows} rows of {dim} by {stride}");
}

impl<'a> Tile<'a> {
    /// # Panics
    /// If rows would overlap or reach past the data.
    pub fn new(data: &'a [f32], rows: usize, dim: usize, stride: usize) -> Self {
        check(data.len(), rows, dim, stride);
        Tile { data, rows, dim, stride }
    }

    /// Rows `first..first + n`.
    pub fn rows_from(self, first: usize, n: usize) -> Self {
        assert!(first + n <= self.rows);
        Tile::new(
            &self.data[(first * self.stride).min(self.data.len())..],
            n,
            self.dim,
            self.stride,
        )
    }

    pub fn n_rows(&self) -> usize {
        self.rows
    }

    pub fn dim(&self) -> usize {
        self.dim
    }

    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    pub(super) fn as_ptr(&self) -> *const f32 {
        self.data.as_ptr()
    }

    fn row(&self, r: usize) -> &'a [f32] {
        &self.data[r * self.stride..][..self.dim]
    }
}

impl<'a> TileMut<'a> {
    /// # Panics
    /// If rows would overlap or reach past the data.
    pub fn new(data: &'a mut [f32], rows: usize, dim: usize, stride: usize) -> Self {
        check(data.len(), rows, dim, stride);
        TileMut { data, rows, dim, stride }
    }

    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.data.as_mut_ptr()
    }

    fn row(&mut self, r: usize) -> &mut [f32] {
        &mut self.data[r * self.stride..][..self.dim]
    }
}

/// What a tile's scores do to the softmax so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftmaxStep {
    /// The largest score so far.
    pub max: f32,
    /// By what sums made with the former maximum are multiplied.
    pub factor: f32,
    /// Σ of the tile's exponentials.
    pub sum: f32,
}

pub(super) type TileDot = unsafe fn(Tile, Tile, TileMut);
pub(super) type TileAxpy = unsafe fn(Tile, Tile, TileMut);
pub(super) type TileSoftmax = unsafe fn(&mut [f32], f32, f32) -> SoftmaxStep;

impl Kernels {
    /// `out[r, i] = dot(q[r], k[i])`, the float dot product of "One arithmetic" (`quant`); rows are
    /// a multiple of eight long.
    pub fn tile_dot(&self, q: Tile, k: Tile, out: TileMut) {
        assert!(q.dim == k.dim && q.dim.is_multiple_of(8), "rows of {} and {}", q.dim, k.dim);
        assert!(out.rows == q.rows && out.dim == k.rows);
        // SAFETY: the vector unit exists or this table could not be had; sizes are checked here
        // and in the tiles' constructors.
        unsafe { (self.tile_dot)(q, k, out) }
    }

    /// `acc[r] = fma(p[r, i], v[i], acc[r])` for i ascending; rows of v are a multiple of eight
    /// long.
    pub fn tile_axpy(&self, p: Tile, v: Tile, acc: TileMut) {
        assert!(acc.dim == v.dim && v.dim.is_multiple_of(8), "rows of {} and {}", acc.dim, v.dim);
        assert!(p.rows == acc.rows && p.dim == v.rows);
        // SAFETY: as above.
        unsafe { (self.tile_axpy)(p, v, acc) }
    }

    /// One step of an online softmax: `x = scale·x`, `max' = max(max, x…)`, `x = e^(x − max')`.
    /// The sum is taken in eight lanes and a tree. As long as all scores are −∞, exponentials are
    /// 0; a NaN or +∞ among them makes the sum NaN.
    pub fn tile_softmax(&self, x: &mut [f32], scale: f32, max: f32) -> SoftmaxStep {
        // SAFETY: the vector unit exists or this table could not be had.
        unsafe { (self.tile_softmax)(x, scale, max) }
    }

    pub fn f16_to_f32(&self, x: &[u16], out: &mut [f32]) {
        assert_eq!(x.len(), out.len());
        // SAFETY: the vector unit exists or this table could not be had; sizes are checked.
        unsafe { (self.f16_to_f32)(x, out) }
    }

    pub fn bf16_to_f32(&self, x: &[u16], out: &mut [f32]) {
        assert_eq!(x.len(), out.len());
        // SAFETY: the vector unit exists or this table could not be had; sizes are checked.
        unsafe { (self.bf16_to_f32)(x, out) }
    }

    /// `x` holds Q8_0 blocks of 32 values.
    pub fn q8_0_to_f32(&self, x: &[u8], out: &mut [f32]) {
        assert_eq!(32 * blocks_of::<BlockQ8_0>(x).len(), out.len());
        // SAFETY: the vector unit exists or this table could not be had; sizes are checked.
        unsafe { (self.q8_0_to_f32)(x, out) }
    }

    /// Rounds to nearest, ties to even.
    pub fn f32_to_bf16(&self, x: &[f32], out: &mut [u16]) {
        assert_eq!(x.len(), out.len());
        out.iter_mut().zip(x).for_each(|(o, x)| *o = bf16::from_f32(*x).to_bits());
    }

    /// Blocks of 32 values as activations are quantised: one with a NaN or an infinity comes back
    /// as NaN (`quant::q8_0::quantize_activations`).
    pub fn f32_to_q8_0(&self, x: &[f32], out: &mut [u8]) {
        let blocks = blocks_of_mut::<BlockQ8_0>(out);
        assert_eq!(x.len(), 32 * blocks.len());
        for (block, x) in blocks.iter_mut().zip(x.chunks_exact(32)) {
            let (mut scale, mut sum) = ([0.0], [0]);
            self.quantize_q8_0(x, &mut block.qs, &mut scale, &mut sum);
            block.d = Half::new(scale[0]);
        }
    }
}

pub(super) fn tile_dot(q: Tile, k: Tile, mut out: TileMut) {
    for r in 0..q.rows {
        for (i, o) in out.row(r).iter_mut().enumerate() {
            *o = scalar::dot_float(q.row(r), k.row(i).iter().copied());
        }
    }
}

pub(super) fn tile_axpy(p: Tile, v: Tile, mut acc: TileMut) {
    for r in 0..p.rows {
        for (i, p) in p.row(r).iter().enumerate() {
            let pairs = acc.row(r).iter_mut().zip(v.row(i));
            pairs.for_each(|(acc, v)| *acc = p.mul_add(*v, *acc));
        }
    }
}

pub(super) fn tile_softmax(x: &mut [f32], scale: f32, max: f32) -> SoftmaxStep {
    let mut new = max;
    for x in x.iter_mut() {
        *x *= scale;
        new = if *x > new { *x } else { new };
    }
    let shift = shift(new);
    let mut lanes = [0f32; 8];
    for (i, x) in x.iter_mut().enumerate() {
        *x = exp::exp(*x - shift);
        lanes[i % 8] += *x;
    }
    SoftmaxStep { max: new, factor: exp::exp(max - shift), sum: tree8(lanes) }
}

/// What is taken off scores whose maximum is `max`: −∞ − −∞ would be NaN.
pub fn shift(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

pub(super) fn f16_to_f32(x: &[u16], out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o = f16::from_bits(*x).to_f32());
}

pub(super) fn bf16_to_f32(x: &[u16], out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o = f32::from_bits((*x as u32) << 16));
}

pub(super) fn q8_0_to_f32(x: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_of::<BlockQ8_0>(x).iter().zip(out.chunks_exact_mut(32)) {
        let d = block.d.get();
        out.iter_mut().zip(block.qs).for_each(|(o, q)| *o = q as f32 * d);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::by_name;

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    fn wave(n: usize, step: f32) -> Vec<f32> {
        (0..n).map(|i| 4.0 * (i as f32 * step).sin()).collect()
    }

    fn both() -> Option<[&'static Kernels; 2]> {
        Some([by_name("scalar")?, by_name("avx2").or(by_name("neon"))?])
    }

    /// All 65,536 of them; a NaN may become a quiet one, in either version alike.
    #[test]
    fn halves_widen_alike() {
        let Some(both) = both() else { return };
        let x: Vec<u16> = (0..=u16::MAX).collect();
        for n in [x.len(), x.len() - 3] {
            let widened = both.map(|k| {
                let mut out = [vec![0.0; n], vec![0.0; n]];
                k.f16_to_f32(&x[..n], &mut out[0]);
                k.bf16_to_f32(&x[..n], &mut out[1]);
                out.map(|out| bits(&out))
            });
            assert!(widened[0] == widened[1]);
            assert_eq!(widened[0][0][0x3c00], 1f32.to_bits());
            assert_eq!(widened[0][1][0x3f80], 1f32.to_bits());
        }
    }

    #[test]
    fn q8_0_comes_back_within_half_a_step() {
        let mut x = wave(96, 0.37);
        x[32..64].fill(0.0);
        x[64] = f32::NAN;
        for k in [by_name("scalar"), by_name("avx2"), by_name("neon")].into_iter().flatten() {
            let (mut blocks, mut back) = (vec![0; 3 * 34], vec![0.0; 96]);
            k.f32_to_q8_0(&x, &mut blocks);
            k.q8_0_to_f32(&blocks, &mut back);
            // Half a step of 4/127, and the scale's rounding to f16 of up to 127 steps.
            let step = 4.0 / 127.0;
            let bound = step * (0.5 + 127.0 / 2048.0);
            assert!(x[..64].iter().zip(&back).all(|(x, b)| (x - b).abs() <= bound));
            assert!(back[64..].iter().all(|b| b.is_nan()), "a NaN was lost");
            assert_eq!(back[32..64], [0.0; 32]);
        }
    }

    /// Every number of rows and positions up to two vectors, at strides that are no multiples.
    #[test]
    fn tiles_agree_to_the_bit() {
        let Some(both) = both() else { return };
        for (rows, n, dim) in (1..8).flat_map(|r| (1..18).map(move |n| (r, n, 8 * (n % 13 + 1)))) {
            let (q, k) = (wave(rows * (dim + 3), 0.7), wave(n * (dim + 5), 0.9));
            let (q, k) = (Tile::new(&q, rows, dim, dim + 3), Tile::new(&k, n, dim, dim + 5));
            let [a, b] = both.map(|kernels| {
                let (mut p, mut acc) = (vec![-7.0; rows * 20], wave(rows * (dim + 1), 0.3));
                kernels.tile_dot(q, k, TileMut::new(&mut p, rows, n, 20));
                let to = TileMut::new(&mut acc, rows, dim, dim + 1);
                kernels.tile_axpy(Tile::new(&p, rows, n, 20), k, to);
                (bits(&p), bits(&acc))
            });
            assert!(a == b, "{rows} rows, {n} positions, {dim} elements");
            assert_eq!(f32::from_bits(a.0[n]), -7.0, "written past the last position");
        }
    }

    #[test]
    fn a_step_of_the_softmax_agrees_and_keeps_the_sum() {
        let Some(both) = both() else { return };
        for n in 1..70 {
            for max in [f32::NEG_INFINITY, 0.5, 9.0] {
                let steps = both.map(|k| {
                    let mut x = wave(n, 0.7);
                    let step = k.tile_softmax(&mut x, 0.5, max);
                    (step, bits(&x))
                });
                assert_eq!(steps[0], steps[1], "{n} scores after {max}");
                let SoftmaxStep { max: new, factor, sum } = steps[0].0;
                let wanted: f32 = wave(n, 0.7).iter().map(|x| (0.5 * x - new).exp()).sum();
                assert!((sum / wanted - 1.0).abs() < 1e-5, "{sum} {wanted}");
                assert!((factor - (max - new).exp()).abs() < 1e-6);
            }
        }
        for k in both {
            let mut x = [f32::NEG_INFINITY; 5];
            let step = k.tile_softmax(&mut x, 1.0, f32::NEG_INFINITY);
            assert_eq!((x, step.sum), ([0.0; 5], 0.0));
            x[4] = f32::NAN;
            assert!(k.tile_softmax(&mut x, 1.0, 1.0).sum.is_nan());
        }
    }
}
