//! IQ1_S: 256 values as points of eight of −1, 0 and 1 (a grid of 2048), a 3-bit scale and a shift
//! up or down for each 32; 1.5625 bits a weight. `x = d/8·(2s + 1)·(8·point ± 1)`.
//! Point k of group j has the low eight bits of its number in `qs[j][k]` and the top three in bits
//! 3k to 3k + 2 of the little-endian u16 `qh[j]`, whose bits 12 to 14 are s and whose top bit says
//! down.

use super::grids::{self, Group};
use super::search::{self, Codes, Format, Grid};
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock, Over};
use half::f16;
use std::sync::LazyLock;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockIQ1S {
    pub d: Half,
    pub qs: [[u8; 4]; 8],
    pub qh: [[u8; 2]; 8],
}

const _: () = assert!(size_of::<BlockIQ1S>() == 50);

static SEARCH: LazyLock<Format<8>> = LazyLock::new(|| Format {
    grid: Grid::new(&grids::IQ1, &[-1, 0, 1]),
    n_sub: 32,
    n_max: 7,
    unit: 1.0,
    shift: 0.125,
    n_span: 4,
    rungs: (0.9, 8),
});

impl BlockIQ1S {
    /// The points of group j, and in bit k whether point k is shifted down.
    #[inline]
    pub fn points(&self, j: usize) -> ([&'static [i8; 8]; 4], u8) {
        let qh = u16::from_le_bytes(self.qh[j]);
        let point = |k: usize| {
            let high = (qh >> (3 * k) & 7) as usize;
            &grids::IQ1[self.qs[j][k] as usize | high << 8]
        };
        ([0, 1, 2, 3].map(point), if qh >> 15 == 1 { 15 } else { 0 })
    }

    fn group(&self, j: usize) -> Group {
        let (points, down) = self.points(j);
        Group::shifted(grids::one_odd(self.qh[j][1] >> 4 & 7), points, down)
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockIQ1S {
    const TYPE: TensorType = TensorType::IQ1_S;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let weights = search::weights(x, importance);
        let Codes { d, scales, points, down } = SEARCH.quantize(x, &weights);
        let of_group = |j: usize| [0, 1, 2, 3].map(|k| points[4 * j + k]);
        let high = |j: usize| {
            let top = of_group(j).iter().rev().fold(0, |all, p| all << 3 | p >> 8);
            top | u16::from(scales[j]) << 12 | ((down >> (4 * j) & 1) as u16) << 15
        };
        BlockIQ1S {
            d,
            qs: std::array::from_fn(|j| of_group(j).map(|p| p as u8)),
            qh: std::array::from_fn(|j| high(j).to_le_bytes()),
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        grids::dequantize(self.scales().0, |j| self.group(j), out);
    }
}

impl IntBlock for BlockIQ1S {
    const MINS: bool = false;
    const SUB: usize = 32;
    const LARGEST: usize = 9;
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
