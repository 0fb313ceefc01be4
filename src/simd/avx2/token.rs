//! The activations of one token, as matrix–vector products read them.

use super::ints::{ActBlock, Ints};
use crate::simd::ActView;

/// One token's activations.
#[derive(Clone, Copy)]
pub(in crate::simd) struct Token {
    qs: *const i8,
    pub scales: *const f32,
    sums: *const i16,
}

impl Token {
    pub fn new<B: Ints>(acts: ActView, t: usize) -> Self {
        let sums = if B::SUMS == 16 { acts.sums16(t) } else { acts.sums32(t) };
        Token { qs: acts.qs(t).as_ptr(), scales: acts.scales(t).as_ptr(), sums: sums.as_ptr() }
    }

    /// The token with other values, as many, in any order that the loop expects.
    pub fn with_values(self, qs: *const i8) -> Self {
        Token { qs, ..self }
    }

    /// From block `b` on, which the row has or which would follow its last.
    pub fn behind<B: Ints>(self, b: usize) -> Self {
        Token {
            qs: self.qs.wrapping_add(b * B::LEN),
            scales: self.scales.wrapping_add(b),
            sums: self.sums.wrapping_add(b * (B::LEN / B::SUMS)),
        }
    }

    /// # Safety
    /// The row has more than `b` blocks.
    #[inline]
    pub unsafe fn block<B: Ints>(self, b: usize) -> ActBlock {
        // SAFETY: within the row.
        unsafe {
            ActBlock { qs: self.qs.add(b * B::LEN), sums: self.sums.add(b * (B::LEN / B::SUMS)) }
        }
    }
}
