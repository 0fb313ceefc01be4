//! Q6_K: 256 values in sixteen sub-blocks of 16 with i8 scales; 6.5625 bits a weight.
//! `x = d·sc_j·(q − 32)`. The halves of 128 values are alike: of value 32g + i (g 0–3, i 0–31) the
//! low four bits are in `ql[32·(g mod 2) + i]`, low half for g < 2 and high half otherwise, and
//! the top two in bits 2g, 2g+1 of `qh[i]`.

use super::symmetric;
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ6K {
    pub ql: [u8; 128],
    pub qh: [u8; 64],
    pub scales: [i8; 16],
    pub d: Half,
}

const _: () = assert!(size_of::<BlockQ6K>() == 210);

impl BlockQ6K {
    /// Value k of the block, −32 to 31.
    #[inline]
    fn value(&self, k: usize) -> i8 {
        let (half, g, i) = (k / 128, k % 128 / 32, k % 32);
        let low = self.ql[64 * half + 32 * (g % 2) + i] >> (4 * (g / 2)) & 15;
        let high = self.qh[32 * half + i] >> (2 * g) & 3;
        (low | high << 4) as i8 - 32
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ6K {
    const TYPE: TensorType = TensorType::Q6_K;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let k = symmetric::quantize(x, importance, 32.0, 128.0);
        let mut block = BlockQ6K { ql: [0; 128], qh: [0; 64], scales: k.scales, d: k.d };
        for (k, code) in k.codes.into_iter().enumerate() {
            let q = (code + 32) as u8;
            let (half, g, i) = (k / 128, k % 128 / 32, k % 32);
            block.ql[64 * half + 32 * (g % 2) + i] |= (q & 15) << (4 * (g / 2));
            block.qh[32 * half + i] |= (q >> 4) << (2 * g);
        }
        block
    }

    fn dequantize(&self, out: &mut [f32]) {
        symmetric::dequantize(
            self.d.get(),
            |j| self.scales[j].into(),
            |k| self.value(k).into(),
            out,
        );
    }
}

impl IntBlock for BlockQ6K {
    const MINS: bool = false;
    const SUB: usize = 16;
    const LARGEST: usize = 32;
    const SIGNED: bool = true;
    type Stored = f16;

    #[inline]
    fn stored(&self) -> (f16, f16) {
        (self.d.to_f16(), f16::ZERO)
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (symmetric::int_dot(|j| self.scales[j].into(), |k| self.value(k).into(), a), 0)
    }
}
