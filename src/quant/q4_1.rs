//! Q4_1: 32 values as 4-bit integers with an f16 scale and an f16 offset; 5 bits a weight.
//! `x = d·q + m`, so `dmin = −m`. Byte i holds value i in its low half and value i + 16 in its
//! high half.

use super::block::{Block, Half, IntBlock};
use crate::gguf::TensorType;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ4_1 {
    pub d: Half,
    pub m: Half,
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ4_1>() == 20);

impl BlockQ4_1 {
    fn values(&self) -> impl Iterator<Item = i32> + '_ {
        let low = self.qs.iter().map(|q| (q & 15) as i32);
        low.chain(self.qs.iter().map(|q| (q >> 4) as i32))
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ4_1 {
    const TYPE: TensorType = TensorType::Q4_1;
    const LEN: usize = 32;

    fn quantize(x: &[f32], _importance: Option<&[f32]>) -> Self {
        let lowest = x.iter().fold(f32::INFINITY, |m, v| m.min(*v));
        let highest = x.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
        let d = (highest - lowest) / 15.0;
        let inverse = super::finite_inverse(d);
        let code = |v: f32| (((v - lowest) * inverse + 0.5) as u8).min(15);
        let mut qs = [0u8; 16];
        for (i, q) in qs.iter_mut().enumerate() {
            *q = code(x[i]) | code(x[i + 16]) << 4;
        }
        BlockQ4_1 { d: Half::new(d), m: Half::new(lowest), qs }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let (d, m) = (self.d.get(), self.m.get());
        for (o, q) in out.iter_mut().zip(self.values()) {
            *o = d * q as f32 + m;
        }
    }
}

impl IntBlock for BlockQ4_1 {
    const MINS: bool = true;

    fn scales(&self) -> (f32, f32) {
        (self.d.get(), -self.m.get())
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        let isum = self.values().zip(a).map(|(q, a)| q * *a as i32).sum();
        (isum, a.iter().map(|a| *a as i32).sum())
    }
}
