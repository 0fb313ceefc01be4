//! IQ2_XS: 256 values as points of eight magnitudes (a grid of 512) with an even number of minus
//! signs and a 4-bit scale for each 16; 2.3125 bits a weight. `x = d/8·(2s + 1)·point·sign`.
//! Each point is a little-endian u16: its number in the low nine bits, then seven signs. The
//! scales of group j are the halves of `scales[j]`, low first.

use super::grids::{self, Group};
use super::search::{self, Codes, Format, Grid, Signed};
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock, Over};
use half::f16;
use std::sync::LazyLock;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockIQ2XS {
    pub d: Half,
    pub qs: [[u8; 2]; 32],
    pub scales: [u8; 8],
}

const _: () = assert!(size_of::<BlockIQ2XS>() == 74);

static SEARCH: LazyLock<Format<8>> = LazyLock::new(|| Format {
    grid: Grid::new(&grids::IQ2_XS, &[8, 25, 43]),
    n_sub: 16,
    n_max: 15,
    unit: 0.125,
    shift: 0.0,
    n_span: 1,
    rungs: (0.7, 6),
});

impl BlockIQ2XS {
    /// The points of group j and its 32 signs.
    #[inline]
    pub fn points(&self, j: usize) -> ([&'static [i8; 8]; 4], u32) {
        let words = [0, 1, 2, 3].map(|k| u16::from_le_bytes(self.qs[4 * j + k]) as usize);
        let fields = words.iter().rev().fold(0, |fields, word| fields << 7 | *word as u32 >> 9);
        (words.map(|word| &grids::IQ2_XS[word & 511]), grids::even_signs(fields))
    }

    fn group(&self, j: usize) -> Group {
        let (points, signs) = self.points(j);
        Group::signed(grids::two_odd(self.scales[j]), points, signs)
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockIQ2XS {
    const TYPE: TensorType = TensorType::IQ2_XS;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let weights = search::weights(x, importance);
        let signed = Signed::new(x, &weights, true);
        let Codes { d, scales, points, .. } = SEARCH.quantize(&signed.magnitudes, &weights);
        let word = |k: usize| points[k] | u16::from(signed.signs[k] & 127) << 9;
        BlockIQ2XS {
            d,
            qs: std::array::from_fn(|k| word(k).to_le_bytes()),
            scales: std::array::from_fn(|j| scales[2 * j] | scales[2 * j + 1] << 4),
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        grids::dequantize(self.scales().0, |j| self.group(j), out);
    }
}

impl IntBlock for BlockIQ2XS {
    const MINS: bool = false;
    const SUB: usize = 16;
    const LARGEST: usize = 43;
    const SIGNED: bool = true;
    type Stored = Over<8>;

    #[inline]
    fn stored(&self) -> (Over<8>, Over<8>) {
        (Over(self.d.to_f16()), Over(f16::ZERO))
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (grids::int_dot(|j| self.group(j), a), 0)
    }
}
