//! IQ2_S: 256 values as points of eight magnitudes (a grid of 1024), eight signs each, and a 4-bit
//! scale for each 16; 2.5625 bits a weight. `x = d/8·(2s + 1)·point·sign`.
//! Point k of group j has the low eight bits of its number in `qs[j][k]`, the top two in bits 2k
//! and 2k + 1 of `qh[j]`, its signs in `signs[j][k]`; the scales are the halves of `scales[j]`.

use super::grids::{self, Group};
use super::search::{self, Codes, Format, Grid, Signed};
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock, Over};
use half::f16;
use std::sync::LazyLock;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockIQ2S {
    pub d: Half,
    pub qs: [[u8; 4]; 8],
    pub signs: [[u8; 4]; 8],
    pub qh: [u8; 8],
    pub scales: [u8; 8],
}

const _: () = assert!(size_of::<BlockIQ2S>() == 82);

static SEARCH: LazyLock<Format<8>> = LazyLock::new(|| Format {
    grid: Grid::new(&grids::IQ2_S, &[8, 25, 43]),
    n_sub: 16,
    n_max: 15,
    unit: 0.125,
    shift: 0.0,
    n_span: 1,
    rungs: (0.7, 6),
});

impl BlockIQ2S {
    /// The points of group j and its 32 signs.
    #[inline]
    pub fn points(&self, j: usize) -> ([&'static [i8; 8]; 4], u32) {
        let point = |k: usize| {
            let high = (self.qh[j] >> (2 * k) & 3) as usize;
            &grids::IQ2_S[self.qs[j][k] as usize | high << 8]
        };
        ([0, 1, 2, 3].map(point), u32::from_le_bytes(self.signs[j]))
    }

    fn group(&self, j: usize) -> Group {
        let (points, signs) = self.points(j);
        Group::signed(grids::two_odd(self.scales[j]), points, signs)
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockIQ2S {
    const TYPE: TensorType = TensorType::IQ2_S;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let weights = search::weights(x, importance);
        let signed = Signed::new(x, &weights, false);
        let Codes { d, scales, points, .. } = SEARCH.quantize(&signed.magnitudes, &weights);
        let of_group = |j: usize| [0, 1, 2, 3].map(|k| points[4 * j + k]);
        let high = |j: usize| of_group(j).iter().rev().fold(0, |all, p| all << 2 | (p >> 8) as u8);
        BlockIQ2S {
            d,
            qs: std::array::from_fn(|j| of_group(j).map(|p| p as u8)),
            signs: std::array::from_fn(|j| [0, 1, 2, 3].map(|k| signed.signs[4 * j + k])),
            qh: std::array::from_fn(high),
            scales: std::array::from_fn(|j| scales[2 * j] | scales[2 * j + 1] << 4),
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        grids::dequantize(self.scales().0, |j| self.group(j), out);
    }
}

impl IntBlock for BlockIQ2S {
    const MINS: bool = false;
    const SUB: usize = 16;
    const LARGEST: usize = 43;
    const SIGNED: bool = true;
    type Stored = Over<8>;

    #[inline]
    fn stored(&self) -> (Over<8>, Over<8>) {
        (Over(self.d.to_f16()), Over(f16::ZERO))
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (grids::int_dot(|j| self.group(j), a), 0)
    }
}
