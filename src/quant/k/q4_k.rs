//! Q4_K: 256 values in eight sub-blocks of 32, each with a 6-bit scale and a 6-bit min; 4.5 bits a
//! weight. `x = d·sc_j·q − dmin·m_j`. Bytes 32c … 32c+31 hold sub-block 2c in their low halves and
//! sub-block 2c + 1 in their high halves.

use super::scales;
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use crate::quant::search::Ladder;
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ4K {
    pub d: Half,
    pub dmin: Half,
    pub scales: [u8; 12],
    pub qs: [u8; 128],
}

const _: () = assert!(size_of::<BlockQ4K>() == 144);

const LADDER: Ladder = Ladder { first: -1.0, step: 0.1, count: 20, mins_only: true };

impl BlockQ4K {
    /// Value i of sub-block j, 0 to 15.
    #[inline]
    fn value(&self, j: usize, i: usize) -> u8 {
        self.qs[32 * (j / 2) + i] >> (4 * (j % 2)) & 15
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ4K {
    const TYPE: TensorType = TensorType::Q4_K;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let mut codes = [0u8; 256];
        let k = super::affine::quantize::<8>(x, importance, 15.0, 63.0, &LADDER, &mut codes);
        let mut qs = [0u8; 128];
        for (c, bytes) in qs.chunks_exact_mut(32).enumerate() {
            for (i, byte) in bytes.iter_mut().enumerate() {
                *byte = codes[64 * c + i] | codes[64 * c + 32 + i] << 4;
            }
        }
        BlockQ4K { d: k.d, dmin: k.dmin, scales: scales::pack(&k.scales, &k.mins), qs }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let (d, dmin) = self.scales();
        let (scales, mins) = scales::unpack(&self.scales);
        for (j, out) in out.chunks_exact_mut(32).enumerate() {
            let (scale, min) = (d * scales[j] as f32, dmin * mins[j] as f32);
            for (i, o) in out.iter_mut().enumerate() {
                *o = scale * self.value(j, i) as f32 - min;
            }
        }
    }
}

impl IntBlock for BlockQ4K {
    const MINS: bool = true;
    const SUB: usize = 32;
    const LARGEST: usize = 15;
    const SIGNED: bool = false;
    type Stored = f16;

    #[inline]
    fn stored(&self) -> (f16, f16) {
        (self.d.to_f16(), self.dmin.to_f16())
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        let (scales, mins) = scales::unpack(&self.scales);
        let (mut isum, mut imins) = (0, 0);
        for (j, a) in a.chunks_exact(32).enumerate() {
            let dot: i32 = (0..32).map(|i| self.value(j, i) as i32 * a[i] as i32).sum();
            isum += scales[j] as i32 * dot;
            imins += mins[j] as i32 * a.iter().map(|a| *a as i32).sum::<i32>();
        }
        (isum, imins)
    }
}
