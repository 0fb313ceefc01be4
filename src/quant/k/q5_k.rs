//! Q5_K: as Q4_K with a fifth bit a value; 5.5 bits a weight. Bit j of `qh[i]` is the top bit of
//! value i of sub-block j.

use super::scales;
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use crate::quant::search::Ladder;
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ5K {
    pub d: Half,
    pub dmin: Half,
    pub scales: [u8; 12],
    pub qh: [u8; 32],
    pub qs: [u8; 128],
}

const _: () = assert!(size_of::<BlockQ5K>() == 176);

const LADDER: Ladder = Ladder { first: -1.0, step: 0.1, count: 20, mins_only: true };

impl BlockQ5K {
    /// Value i of sub-block j, 0 to 31.
    #[inline]
    fn value(&self, j: usize, i: usize) -> u8 {
        let low = self.qs[32 * (j / 2) + i] >> (4 * (j % 2)) & 15;
        low | (self.qh[i] >> j & 1) << 4
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ5K {
    const TYPE: TensorType = TensorType::Q5_K;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let mut codes = [0u8; 256];
        let k = super::affine::quantize::<8>(x, importance, 31.0, 63.0, &LADDER, &mut codes);
        let (mut qs, mut qh) = ([0u8; 128], [0u8; 32]);
        for (j, codes) in codes.chunks_exact(32).enumerate() {
            for (i, code) in codes.iter().enumerate() {
                qs[32 * (j / 2) + i] |= (code & 15) << (4 * (j % 2));
                qh[i] |= (code >> 4) << j;
            }
        }
        BlockQ5K { d: k.d, dmin: k.dmin, scales: scales::pack(&k.scales, &k.mins), qh, qs }
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

impl IntBlock for BlockQ5K {
    const MINS: bool = true;
    const SUB: usize = 32;
    const LARGEST: usize = 31;
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
