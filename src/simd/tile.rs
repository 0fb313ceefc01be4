//! The loops of attention over tiles (`backend::cpu::attention`): products of a few queries with a
//! run of keys, sums of values, the step of the online softmax between them, and what turns cached
//! rows of any type into f32. The scalar versions here are the specification.

use super::{Kernels, exp, scalar};
use crate::gguf::TensorType;
use crate::quant::{BlockQ8_0, Half, blocks_of_mut, tree8};
use half::{bf16, f16};

/// Rows of `dim` elements that begin `stride` apart.
#[derive(Clone, Copy)]
pub struct Tile<'a> {
    data: &'a [f32],
    rows: usize,
    dim: usize,
    stride: usize,
}

/// A tile to write.
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

    pub fn row(&self, r: usize) -> &'a [f32] {
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

    pub fn dim(&self) -> usize {
        self.dim
    }

    pub(super) fn row(&mut self, r: usize) -> &mut [f32] {
        &mut self.data[r * self.stride..][..self.dim]
    }
}

/// The effect of a tile's scores on the softmax so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftmaxStep {
    /// The largest score so far.
    pub max: f32,
    /// The factor for sums made with the former maximum.
    pub factor: f32,
    /// Σ of the tile's exponentials.
    pub sum: f32,
}

pub(super) type TileDot = unsafe fn(Tile, Tile, TileMut);
pub(super) type TileAxpy = unsafe fn(Tile, Tile, TileMut);
pub(super) type TileSoftmax = unsafe fn(TileMut, f32, &mut [SoftmaxStep]);

impl SoftmaxStep {
    /// Behind a maximum.
    pub fn after(max: f32) -> Self {
        SoftmaxStep { max, factor: 1.0, sum: 0.0 }
    }
}

impl Kernels {
    /// `out[r, i] = dot(q[r], k[i])`, the float dot product of "One arithmetic" (`quant`); rows are
    /// a multiple of eight long.
    pub fn tile_dot(&self, q: Tile, k: Tile, out: TileMut) {
        assert!(q.dim == k.dim && q.dim.is_multiple_of(8), "rows of {} and {}", q.dim, k.dim);
        assert!(out.rows == q.rows && out.dim == k.rows);
        // SAFETY: tables exist only for features that the processor has; sizes are checked here
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

    /// One step of an online softmax in each row: `x = scale·x`, `max' = max(max, x…)`,
    /// `x = e^(x − max')`, with the maximum so far from the row's step, which comes back as the new
    /// one. The sum is taken in eight lanes and a tree. As long as all scores are −∞, exponentials
    /// are 0; a NaN or +∞ among them makes the sum NaN.
    pub fn tile_softmax(&self, x: TileMut, scale: f32, steps: &mut [SoftmaxStep]) {
        assert_eq!(x.rows, steps.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked here
        // and in the tile's constructor.
        unsafe { (self.tile_softmax)(x, scale, steps) }
    }

    pub fn f16_to_f32(&self, x: &[u16], out: &mut [f32]) {
        assert_eq!(x.len(), out.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.f16_to_f32)(x, out) }
    }

    pub fn bf16_to_f32(&self, x: &[u16], out: &mut [f32]) {
        assert_eq!(x.len(), out.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.bf16_to_f32)(x, out) }
    }

    /// [`quant::dequantize`](crate::quant::dequantize); that of the KV cache's formats is as fast
    /// as the vector unit allows.
    pub fn dequantize(&self, ty: TensorType, x: &[u8], out: &mut [f32]) {
        assert_eq!(ty.row_bytes(out.len() as u64), Some(x.len() as u64), "{} of {ty}", out.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.dequantize)(ty, x, out) }
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

pub(super) fn tile_softmax(mut x: TileMut, scale: f32, steps: &mut [SoftmaxStep]) {
    for (r, step) in steps.iter_mut().enumerate() {
        *step = softmax_row(x.row(r), scale, step.max);
    }
}

fn softmax_row(x: &mut [f32], scale: f32, max: f32) -> SoftmaxStep {
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

/// The shift of scores whose maximum is `max`: −∞ − −∞ would be NaN.
pub fn shift(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

pub(super) fn f16_to_f32(x: &[u16], out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o = f16::from_bits(*x).to_f32());
}

pub(super) fn bf16_to_f32(x: &[u16], out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o = f32::from_bits((*x as u32) << 16));
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

    /// The specification and each version of this processor.
    fn both() -> impl Iterator<Item = (&'static Kernels, &'static Kernels)> {
        let scalar = by_name("scalar").unwrap();
        ["avx2", "avx512", "neon"].into_iter().filter_map(by_name).map(move |k| (scalar, k))
    }

    /// All 65,536 of them; a NaN may become a quiet one, in either version alike.
    #[test]
    fn halves_widen_alike() {
        let x: Vec<u16> = (0..=u16::MAX).collect();
        let lengths = [x.len(), x.len() - 3];
        for (n, (scalar, other)) in lengths.iter().flat_map(|n| both().map(move |b| (*n, b))) {
            let widened = [scalar, other].map(|k| {
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
        for (scalar, other) in both() {
            let (mut blocks, mut back) = (vec![0; 3 * 34], vec![0.0; 96]);
            other.f32_to_q8_0(&x, &mut blocks);
            other.dequantize(TensorType::Q8_0, &blocks, &mut back);
            let mut wanted = vec![0.0; 96];
            scalar.dequantize(TensorType::Q8_0, &blocks, &mut wanted);
            assert_eq!(bits(&back[..64]), bits(&wanted[..64]));
            // Half a step of 4/127, and the scale's rounding to f16 of up to 127 steps.
            let step = 4.0 / 127.0;
            let bound = step * (0.5 + 127.0 / 2048.0);
            assert!(x[..64].iter().zip(&back).all(|(x, b)| (x - b).abs() <= bound));
            assert!(back[64..].iter().all(|b| b.is_nan()), "a NaN was lost");
            assert_eq!(back[32..64], [0.0; 32]);
        }
    }

    /// Blocks of any bytes but for scales that are no numbers: signs of zeros too.
    #[test]
    fn blocks_are_dequantised_alike() {
        use TensorType::*;
        let mut state = 1u32;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        for ty in [Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, Q8_1, MXFP4] {
            let mut blocks: Vec<u8> = (0..40 * ty.block_bytes()).map(|_| byte()).collect();
            for (i, block) in blocks.chunks_exact_mut(ty.block_bytes()).enumerate() {
                // Subnormal halves, zeros and their negatives among them.
                let mask = [0xbb, 0x80, 0x83][i % 3];
                (block[1], block[3]) = (block[1] & mask, block[3] & mask);
                (0..[0, 1, 0, 3][i % 4]).for_each(|j| block[j] = 0);
            }
            for (scalar, other) in both() {
                let [a, b] = [scalar, other].map(|kernels| {
                    let mut out = vec![f32::NAN; 40 * 32];
                    kernels.dequantize(ty, &blocks, &mut out);
                    bits(&out)
                });
                assert!(a == b, "{ty} of {}", other.name);
            }
        }
    }

    #[test]
    fn rows_are_scaled_and_blended_alike() {
        for (n, (scalar, other)) in (0..70).flat_map(|n| both().map(move |b| (n, b))) {
            let [a, b] = [scalar, other].map(|kernels| {
                let mut acc = wave(n, 0.7);
                kernels.scale(&mut acc, 0.3);
                kernels.blend(&mut acc, 1.7, &wave(n, 0.9), -0.6);
                bits(&acc)
            });
            assert!(a == b, "{n} elements");
            let one = |i| 0.3 * wave(n, 0.7)[i] * 1.7 + wave(n, 0.9)[i] * -0.6;
            assert_eq!(a, bits(&(0..n).map(one).collect::<Vec<f32>>()));
        }
    }

    /// Every number of rows and positions up to two vectors, at strides that are no multiples.
    #[test]
    fn tiles_agree_to_the_bit() {
        let small = (1..10).flat_map(|r| (1..35).map(move |n| (r, n, 8 * (n % 13 + 1))));
        // Longer than there is room for in the fastest loop.
        let shapes = small.chain([(3, 5, 1032), (64, 64, 128), (31, 17, 200)]);
        for ((rows, n, dim), (scalar, other)) in shapes.flat_map(|s| both().map(move |b| (s, b))) {
            let (q, k) = (wave(rows * (dim + 3), 0.7), wave(n * (dim + 5), 0.9));
            let (q, k) = (Tile::new(&q, rows, dim, dim + 3), Tile::new(&k, n, dim, dim + 5));
            let [a, b] = [scalar, other].map(|kernels| {
                let (mut p, mut acc) = (vec![-7.0; rows * 67], wave(rows * (dim + 1), 0.3));
                kernels.tile_dot(q, k, TileMut::new(&mut p, rows, n, 67));
                let to = TileMut::new(&mut acc, rows, dim, dim + 1);
                kernels.tile_axpy(Tile::new(&p, rows, n, 67), k, to);
                (bits(&p), bits(&acc))
            });
            assert!(a == b, "{rows} rows, {n} positions, {dim} elements");
            assert_eq!(f32::from_bits(a.0[n]), -7.0, "written past the last position");
        }
    }

    /// Rows of up to two vectors and more, up to eleven at a time; no place behind a row changes.
    #[test]
    fn a_step_of_the_softmax_agrees_and_keeps_the_sum() {
        let shapes = (1..70).map(|n| (n % 11 + 1, n)).chain([(16, 64), (15, 65)]);
        for ((rows, n), (scalar, other)) in shapes.flat_map(|s| both().map(move |b| (s, b))) {
            for max in [f32::NEG_INFINITY, 0.5, 9.0] {
                let steps = [scalar, other].map(|k| {
                    let (mut x, mut steps) = (wave(rows * (n + 3), 0.7), Vec::new());
                    steps.extend((0..rows).map(|r| SoftmaxStep::after(max + r as f32)));
                    k.tile_softmax(TileMut::new(&mut x, rows, n, n + 3), 0.5, &mut steps);
                    (steps, bits(&x))
                });
                assert_eq!(steps[0], steps[1], "{rows} rows of {n} scores after {max}");
                let x = wave(rows * (n + 3), 0.7);
                for (r, step) in steps[0].0.iter().enumerate() {
                    let SoftmaxStep { max: new, factor, sum } = *step;
                    let scores = x[r * (n + 3)..][..n].iter();
                    let wanted: f32 = scores.map(|x| (0.5 * x - new).exp()).sum();
                    assert!((sum / wanted - 1.0).abs() < 1e-5, "{sum} {wanted}");
                    assert!((factor - (max + r as f32 - new).exp()).abs() < 1e-6);
                }
                assert_eq!(steps[0].1[n..n + 3], bits(&x[n..n + 3]), "written past the last");
            }
        }
    }

    /// Scores so low that their exponentials are subnormal or 0, and those that are no numbers.
    #[test]
    fn scores_far_from_the_largest_agree() {
        for (scalar, other) in both() {
            let steps = [scalar, other].map(|k| {
                let mut x: Vec<f32> = (0..1100).map(|i| i as f32 * -0.1).collect();
                let mut step = [SoftmaxStep::after(0.0)];
                k.tile_softmax(TileMut::new(&mut x, 1, 1100, 1100), 1.0, &mut step);
                (step, bits(&x))
            });
            assert!(steps[0] == steps[1]);
            assert!(steps[0].1.iter().any(|x| (1..0x80_0000).contains(x)), "nothing is subnormal");
            let mut x = [f32::NEG_INFINITY; 5];
            let step_of = |x: &mut [f32], max: f32| {
                let mut step = [SoftmaxStep::after(max)];
                let n = x.len();
                other.tile_softmax(TileMut::new(x, 1, n, n), 1.0, &mut step);
                step[0].sum
            };
            assert_eq!((step_of(&mut x, f32::NEG_INFINITY), x), (0.0, [0.0; 5]));
            x[4] = f32::NAN;
            assert!(step_of(&mut x, 1.0).is_nan());
            x[4] = f32::INFINITY;
            assert!(step_of(&mut x, 1.0).is_nan());
        }
    }
}
