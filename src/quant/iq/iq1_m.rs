//! IQ1_M: as IQ1_S with a 3-bit scale for each 16 values and a shift for each point; 1.75 bits a
//! weight. Half byte k of `qh[j]` (low halves first) has the top three bits of the number of point
//! k of group j and then, in its top bit, whether the shift is down. `scales` are four
//! little-endian u16, three bits for each 16 values in turn; the top four bits of the four are the
//! four hexadecimal digits of the f16 d, last digit first.

use super::grids::{self, Group};
use super::search::{self, Codes, Format, Grid};
use crate::gguf::TensorType;
use crate::quant::block::{Block, IntBlock, Over};
use half::f16;
use std::sync::LazyLock;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockIQ1M {
    pub qs: [[u8; 4]; 8],
    pub qh: [[u8; 2]; 8],
    pub scales: [[u8; 2]; 4],
}

const _: () = assert!(size_of::<BlockIQ1M>() == 56);

static SEARCH: LazyLock<Format<8>> = LazyLock::new(|| Format {
    grid: Grid::new(&grids::IQ1, &[-1, 0, 1]),
    n_sub: 16,
    n_max: 7,
    unit: 1.0,
    shift: 0.125,
    n_span: 1,
    rungs: (0.9, 8),
});

impl BlockIQ1M {
    #[inline]
    fn d(&self) -> f16 {
        let digit = |k: usize| (self.scales[k][1] as u16 >> 4) << (4 * k);
        f16::from_bits(digit(0) | digit(1) | digit(2) | digit(3))
    }

    /// The points of group j, and in bit k whether point k is shifted down.
    #[inline]
    pub fn points(&self, j: usize) -> ([&'static [i8; 8]; 4], u8) {
        let qh = u16::from_le_bytes(self.qh[j]);
        let point = |k: usize| {
            let high = (qh >> (4 * k) & 7) as usize;
            &grids::IQ1[self.qs[j][k] as usize | high << 8]
        };
        let down = |k: usize| (qh >> (4 * k + 3) & 1) << k;
        ([0, 1, 2, 3].map(point), (down(0) | down(1) | down(2) | down(3)) as u8)
    }

    fn group(&self, j: usize) -> Group {
        let scales = u16::from_le_bytes(self.scales[j / 2]) >> (6 * (j % 2));
        let scales = [scales & 7, scales >> 3 & 7].map(|s| 2 * s as i8 + 1);
        let (points, down) = self.points(j);
        Group::shifted(scales, points, down)
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockIQ1M {
    const TYPE: TensorType = TensorType::IQ1_M;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let weights = search::weights(x, importance);
        let Codes { d, scales, points, down } = SEARCH.quantize(x, &weights);
        let half_byte = |k: usize| points[k] >> 8 | ((down >> k & 1) as u16) << 3;
        let high = |j: usize| (0..4).rev().fold(0, |all, k| all << 4 | half_byte(4 * j + k));
        let word = |i: usize| {
            let low = (0..4).rev().fold(0, |all, k| all << 3 | u16::from(scales[4 * i + k]));
            low | (d.to_f16().to_bits() >> (4 * i) & 15) << 12
        };
        BlockIQ1M {
            qs: std::array::from_fn(|j| [0, 1, 2, 3].map(|k| points[4 * j + k] as u8)),
            qh: std::array::from_fn(|j| high(j).to_le_bytes()),
            scales: std::array::from_fn(|i| word(i).to_le_bytes()),
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        grids::dequantize(self.scales().0, |j| self.group(j), out);
    }
}

impl IntBlock for BlockIQ1M {
    const MINS: bool = false;
    const SUB: usize = 16;
    const LARGEST: usize = 9;
    const SIGNED: bool = true;
    type Stored = Over<8>;

    #[inline]
    fn stored(&self) -> (Over<8>, Over<8>) {
        (Over(self.d()), Over(f16::ZERO))
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (grids::int_dot(|j| self.group(j), a), 0)
    }
}
