//! IQ3_S: 256 values as points of four magnitudes (a grid of 512), a sign each, and a 4-bit scale
//! for each 32; 3.4375 bits a weight. `x = d·(2s + 1)·point·sign`.
//! Point k of group j has the low eight bits of its number in `qs[j][k]` and the ninth in bit k of
//! `qh[j]`; bit i of the bytes `signs[j]` is the sign of value i. The scale of group j is a half
//! of `scales[j / 2]`, low first.

use super::grids::{self, Group};
use super::search::{self, Codes, Format, Grid, Signed};
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use half::f16;
use std::sync::LazyLock;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockIQ3S {
    pub d: Half,
    pub qs: [[u8; 8]; 8],
    pub qh: [u8; 8],
    pub signs: [[u8; 4]; 8],
    pub scales: [u8; 4],
}

const _: () = assert!(size_of::<BlockIQ3S>() == 110);

static SEARCH: LazyLock<Format<4>> = LazyLock::new(|| Format {
    grid: Grid::new(&grids::IQ3_S, &[1, 3, 5, 7, 9, 11, 13, 15]),
    n_sub: 32,
    n_max: 15,
    unit: 1.0,
    shift: 0.0,
    n_span: 1,
    rungs: (0.75, 5),
});

impl BlockIQ3S {
    /// The points of group j and its 32 signs.
    #[inline]
    pub fn points(&self, j: usize) -> ([&'static [i8; 4]; 8], u32) {
        let point = |k: usize| {
            let high = (self.qh[j] >> k & 1) as usize;
            &grids::IQ3_S[self.qs[j][k] as usize | high << 8]
        };
        ([0, 1, 2, 3, 4, 5, 6, 7].map(point), u32::from_le_bytes(self.signs[j]))
    }

    fn group(&self, j: usize) -> Group {
        let scale = self.scales[j / 2] >> (4 * (j % 2)) & 15;
        let (points, signs) = self.points(j);
        Group::signed(grids::one_odd(scale), points, signs)
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockIQ3S {
    const TYPE: TensorType = TensorType::IQ3_S;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let weights = search::weights(x, importance);
        let signed = Signed::new(x, &weights, false);
        let Codes { d, scales, points, .. } = SEARCH.quantize(&signed.magnitudes, &weights);
        let of_group = |j: usize| &points[8 * j..][..8];
        let high = |j: usize| of_group(j).iter().rev().fold(0, |all, p| all << 1 | (p >> 8) as u8);
        BlockIQ3S {
            d,
            qs: std::array::from_fn(|j| std::array::from_fn(|k| of_group(j)[k] as u8)),
            qh: std::array::from_fn(high),
            signs: std::array::from_fn(|j| [0, 1, 2, 3].map(|k| signed.signs[4 * j + k])),
            scales: std::array::from_fn(|i| scales[2 * i] | scales[2 * i + 1] << 4),
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        grids::dequantize(self.scales().0, |j| self.group(j), out);
    }
}

impl IntBlock for BlockIQ3S {
    const MINS: bool = false;
    const SUB: usize = 32;
    const LARGEST: usize = 15;
    const SIGNED: bool = true;
    type Stored = f16;

    #[inline]
    fn stored(&self) -> (f16, f16) {
        (self.d.to_f16(), f16::ZERO)
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (grids::int_dot(|j| self.group(j), a), 0)
    }
}
