//! Q4_0: 32 values as 4-bit integers around 8 with one f16 scale; 4.5 bits a weight.
//! Byte i holds value i in its low half and value i + 16 in its high half.

use super::block::{Block, Half, IntBlock};
use crate::gguf::TensorType;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ4_0 {
    pub d: Half,
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ4_0>() == 18);

impl BlockQ4_0 {
    fn values(&self) -> impl Iterator<Item = i32> + '_ {
        let low = self.qs.iter().map(|q| (q & 15) as i32 - 8);
        low.chain(self.qs.iter().map(|q| (q >> 4) as i32 - 8))
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ4_0 {
    const TYPE: TensorType = TensorType::Q4_0;
    const LEN: usize = 32;

    fn quantize(x: &[f32], _importance: Option<&[f32]>) -> Self {
        // The value of largest magnitude becomes −8, the end of the range that has no twin.
        let mut extreme = 0f32;
        for v in x {
            if v.abs() > extreme.abs() {
                extreme = *v;
            }
        }
        let d = extreme / -8.0;
        let inverse = super::finite_inverse(d);
        let code = |v: f32| ((v * inverse + 8.5) as u8).min(15);
        let mut qs = [0u8; 16];
        for (i, q) in qs.iter_mut().enumerate() {
            *q = code(x[i]) | code(x[i + 16]) << 4;
        }
        BlockQ4_0 { d: Half::new(d), qs }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.get();
        for (o, q) in out.iter_mut().zip(self.values()) {
            *o = d * q as f32;
        }
    }
}

impl IntBlock for BlockQ4_0 {
    const MINS: bool = false;

    fn scales(&self) -> (f32, f32) {
        (self.d.get(), 0.0)
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (self.values().zip(a).map(|(q, a)| q * *a as i32).sum(), 0)
    }
}
