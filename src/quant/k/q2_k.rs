//! Q2_K: 256 values in sixteen sub-blocks of 16, each with a 4-bit scale and a 4-bit min; 2.625
//! bits a weight. `x = d·sc_j·q − dmin·m_j` with q 0 to 3; byte j of `scales` is sc_j in its low
//! half and m_j in its high half.

use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use crate::quant::packing::{pack_two_bits, two_bits};
use crate::quant::search::Ladder;
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ2K {
    pub scales: [u8; 16],
    pub qs: [u8; 64],
    pub d: Half,
    pub dmin: Half,
}

const _: () = assert!(size_of::<BlockQ2K>() == 84);

const LADDER: Ladder = Ladder { first: -0.5, step: 0.1, count: 15, mins_only: true };

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ2K {
    const TYPE: TensorType = TensorType::Q2_K;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let mut codes = [0u8; 256];
        let k = super::affine::quantize::<16>(x, importance, 3.0, 15.0, &LADDER, &mut codes);
        let scales = std::array::from_fn(|j| k.scales[j] | k.mins[j] << 4);
        BlockQ2K { scales, qs: pack_two_bits(&codes), d: k.d, dmin: k.dmin }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let (d, dmin) = IntBlock::scales(self);
        for (j, out) in out.chunks_exact_mut(16).enumerate() {
            let (scale, min) = (self.scales[j] & 15, self.scales[j] >> 4);
            let (scale, min) = (d * scale as f32, dmin * min as f32);
            for (i, o) in out.iter_mut().enumerate() {
                *o = scale * two_bits(&self.qs, 16 * j + i) as f32 - min;
            }
        }
    }
}

impl IntBlock for BlockQ2K {
    const MINS: bool = true;
    const SUB: usize = 16;
    const LARGEST: usize = 3;
    const SIGNED: bool = false;
    type Stored = f16;

    #[inline]
    fn stored(&self) -> (f16, f16) {
        (self.d.to_f16(), self.dmin.to_f16())
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        let (mut isum, mut imins) = (0, 0);
        for (j, a) in a.chunks_exact(16).enumerate() {
            let code = |i| two_bits(&self.qs, 16 * j + i) as i32;
            let dot: i32 = (0..16).map(|i| code(i) * a[i] as i32).sum();
            isum += (self.scales[j] & 15) as i32 * dot;
            imins += (self.scales[j] >> 4) as i32 * a.iter().map(|a| *a as i32).sum::<i32>();
        }
        (isum, imins)
    }
}
