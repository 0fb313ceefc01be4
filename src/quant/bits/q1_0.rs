//! Q1_0: 128 values −1 and 1 as single bits with one f16 scale; 1.125 bits a weight.
//! Value k is d where bit k mod 8 of byte k/8 is set, else −d.

use crate::gguf::TensorType;
use crate::quant::BlockQ4_0;
use crate::quant::block::{Block, Half, Parts};
use crate::quant::packing::eight_bits;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ1_0 {
    pub d: Half,
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ1_0>() == 18);

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ1_0 {
    const TYPE: TensorType = TensorType::Q1_0;
    const LEN: usize = 128;

    /// The mean magnitude, and the signs: the nearest block of all, whatever the signs.
    fn quantize(x: &[f32], _importance: Option<&[f32]>) -> Self {
        let d = x.iter().fold(0.0, |sum, v| sum + v.abs()) / x.len() as f32;
        let is_set = |k: usize| (x[k] >= 0.0) as u8;
        let byte = |i: usize| (0..8).fold(0, |byte, k| byte | is_set(8 * i + k) << k);
        BlockQ1_0 { d: Half::new(d), qs: std::array::from_fn(byte) }
    }

    fn dequantize(&self, out: &mut [f32]) {
        self.dequantize_parts(out);
    }
}

impl Parts for BlockQ1_0 {
    #[inline]
    fn scale(&self) -> Half {
        self.d
    }

    #[inline]
    fn part(&self, j: usize) -> BlockQ4_0 {
        let bits = |i: usize| eight_bits(self.qs[4 * j + i]);
        // 7 is −1, 9 is 1.
        let eight = |i: usize| 0x7777_7777_7777_7777 + (bits(i) << 1) + (bits(i + 2) << 5);
        BlockQ4_0::of_halves(self.d, [eight(0), eight(1)])
    }
}
