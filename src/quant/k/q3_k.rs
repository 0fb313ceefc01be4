//! Q3_K: 256 values in sixteen sub-blocks of 16 with 6-bit scales around 32; 3.4375 bits a weight.
//! `x = d·(sc_j − 32)·(q − 4)`. The low two bits of code k are in `qs`, its top bit is bit k / 32
//! of `hmask[k mod 32]`. Of scale j, the low four bits are half j / 8 of `scales[j mod 8]` and the
//! top two are bits 2·(j / 4) and the next of `scales[8 + j mod 4]`.

use super::symmetric;
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use crate::quant::packing::{pack_two_bits, two_bits};
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ3K {
    pub hmask: [u8; 32],
    pub qs: [u8; 64],
    pub scales: [u8; 12],
    pub d: Half,
}

const _: () = assert!(size_of::<BlockQ3K>() == 110);

impl BlockQ3K {
    /// Value k of the block, −4 to 3.
    #[inline]
    fn value(&self, k: usize) -> i32 {
        let top = self.hmask[k % 32] >> (k / 32) & 1;
        (two_bits(&self.qs, k) | top << 2) as i32 - 4
    }

    /// Scale j, −32 to 31.
    fn sub_scale(&self, j: usize) -> i32 {
        let low = self.scales[j % 8] >> (4 * (j / 8)) & 15;
        let top = self.scales[8 + j % 4] >> (2 * (j / 4)) & 3;
        (low | top << 4) as i32 - 32
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ3K {
    const TYPE: TensorType = TensorType::Q3_K;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let k = symmetric::quantize(x, importance, 4.0, 32.0);
        let codes = k.codes.map(|q| (q + 4) as u8);
        let (mut hmask, mut scales) = ([0; 32], [0; 12]);
        for (k, code) in codes.iter().enumerate() {
            hmask[k % 32] |= (code >> 2) << (k / 32);
        }
        for (j, scale) in k.scales.into_iter().enumerate() {
            let scale = (scale + 32) as u8;
            scales[j % 8] |= (scale & 15) << (4 * (j / 8));
            scales[8 + j % 4] |= (scale >> 4) << (2 * (j / 4));
        }
        BlockQ3K { hmask, qs: pack_two_bits(&codes), scales, d: k.d }
    }

    fn dequantize(&self, out: &mut [f32]) {
        symmetric::dequantize(self.d.get(), |j| self.sub_scale(j), |k| self.value(k), out);
    }
}

impl IntBlock for BlockQ3K {
    const MINS: bool = false;
    const SUB: usize = 16;
    const LARGEST: usize = 4;
    const SIGNED: bool = true;
    type Stored = f16;

    #[inline]
    fn stored(&self) -> (f16, f16) {
        (self.d.to_f16(), f16::ZERO)
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (symmetric::int_dot(|j| self.sub_scale(j), |k| self.value(k), a), 0)
    }
}
