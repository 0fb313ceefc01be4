//! IQ1_M: as IQ1_S with a 3-bit scale for each 16 values and a shift for each point; 1.75 bits a
//! weight. Half byte k of `qh[j]` (low halves first) has the top three bits of the number of point
//! k of group j and then, in its top bit, whether the shift is down. `scales` are four
//! little-endian u16, three bits for each 16 values in turn; the top four bits of the four are the
//! four hexadecimal digits of the f16 d, last digit first.

use super::grids::{self, Group};
use crate::gguf::TensorType;
use crate::quant::block::{Block, IntBlock, Over};
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockIQ1M {
    pub qs: [[u8; 4]; 8],
    pub qh: [[u8; 2]; 8],
    pub scales: [[u8; 2]; 4],
}

const _: () = assert!(size_of::<BlockIQ1M>() == 56);

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
