//! Q2_0: 64 values −1, 0, 1 and 2 as 2-bit integers with one f16 scale; 2.25 bits a weight.
//! `x = d·(q − 1)`, q of value k in bits 2·(k mod 4) and above of byte k/4; no quantiser writes
//! q = 3, which is 2.

use crate::gguf::TensorType;
use crate::quant::BlockQ4_0;
use crate::quant::block::{Block, Half, Parts};
use crate::quant::packing::eight_two_bits;
use crate::quant::ternary::tq2_0::trits;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ2_0 {
    pub d: Half,
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ2_0>() == 18);

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ2_0 {
    const TYPE: TensorType = TensorType::Q2_0;
    const LEN: usize = 64;

    fn quantize(x: &[f32], _importance: Option<&[f32]>) -> Self {
        let (d, trits) = trits::<64>(x);
        let byte = |i: usize| (0..4).fold(0, |byte, k| byte | trits[4 * i + k] << (2 * k));
        BlockQ2_0 { d, qs: std::array::from_fn(byte) }
    }

    fn dequantize(&self, out: &mut [f32]) {
        self.dequantize_parts(out);
    }
}

impl Parts for BlockQ2_0 {
    #[inline]
    fn scale(&self) -> Half {
        self.d
    }

    #[inline]
    fn part(&self, j: usize) -> BlockQ4_0 {
        let codes = |i: usize| {
            let at = 8 * j + 2 * i;
            eight_two_bits(u16::from_le_bytes([self.qs[at], self.qs[at + 1]]))
        };
        // 7 is −1.
        let eight = |i: usize| 0x7777_7777_7777_7777 + codes(i) + (codes(i + 2) << 4);
        BlockQ4_0::of_halves(self.d, [eight(0), eight(1)])
    }
}
