//! TQ1_0: 256 values −1, 0 and 1, five to a byte, with one f16 scale; 1.6875 bits a weight.
//!
//! A byte is a fraction in base 3: the five digits t_0 to t_4 are those of `byte / 256`, rounded
//! up so that cutting off gives them back, and digit n is the integer part of
//! `3·frac(3ⁿ·byte / 256)`. `x = d·(t − 1)`. Values 0 to 159 are digits n of bytes 0–31 (value
//! 32n + i is digit n of byte i), 160 to 239 of bytes 32–47 (16 apart) and 240 to 255 of the four
//! bytes `qh` (4 apart, four digits each).

use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockTQ1_0 {
    pub qs: [u8; 48],
    pub qh: [u8; 4],
    pub d: Half,
}

const _: () = assert!(size_of::<BlockTQ1_0>() == 54);

const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

/// (byte among `qs` and then `qh`, digit) of value k.
#[inline]
fn place(k: usize) -> (usize, usize) {
    match k {
        0..160 => (k % 32, k / 32),
        160..240 => (32 + k % 16, (k - 160) / 16),
        _ => (48 + k % 4, (k - 240) / 4),
    }
}

impl BlockTQ1_0 {
    /// Value k of the block, −1 to 1.
    #[inline]
    fn value(&self, k: usize) -> i32 {
        let (at, digit) = place(k);
        let byte = if at < 48 { self.qs[at] } else { self.qh[at - 48] };
        let fraction = byte.wrapping_mul(POWERS[digit]);
        (3 * fraction as i32) / 256 - 1
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockTQ1_0 {
    const TYPE: TensorType = TensorType::TQ1_0;
    const LEN: usize = 256;

    fn quantize(x: &[f32], _importance: Option<&[f32]>) -> Self {
        let (d, trits) = super::tq2_0::trits::<256>(x);
        let mut numbers = [0u32; 52];
        for (k, trit) in trits.into_iter().enumerate() {
            let (at, digit) = place(k);
            numbers[at] += (trit * POWERS[4 - digit]) as u32;
        }
        let bytes = numbers.map(|n| (256 * n).div_ceil(243) as u8);
        let mut block = BlockTQ1_0 { qs: [0; 48], qh: [0; 4], d };
        block.qs.copy_from_slice(&bytes[..48]);
        block.qh.copy_from_slice(&bytes[48..]);
        block
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.get();
        for (k, o) in out.iter_mut().enumerate() {
            *o = d * self.value(k) as f32;
        }
    }
}

impl IntBlock for BlockTQ1_0 {
    const MINS: bool = false;
    const SUB: usize = 32;
    const LARGEST: usize = 1;
    const SIGNED: bool = true;
    type Stored = f16;

    #[inline]
    fn stored(&self) -> (f16, f16) {
        (self.d.to_f16(), f16::ZERO)
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (a.iter().enumerate().map(|(k, a)| self.value(k) * *a as i32).sum(), 0)
    }
}
