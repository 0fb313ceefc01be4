//! IQ3_XXS: 256 values as points of four magnitudes (a grid of 256) with an even number of minus
//! signs in eight values and a 4-bit scale for each 32; 3.0625 bits a weight.
//! `x = d/4·(2s + 1)·point·sign`. Group j has its points in `qs[j]`; its signs and scale are a
//! little-endian word as in IQ2_XXS.

use super::grids::{self, Group};
use super::search::{self, Codes, Format, Grid, Signed};
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock, Over};
use half::f16;
use std::sync::LazyLock;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockIQ3XXS {
    pub d: Half,
    pub qs: [[u8; 8]; 8],
    pub words: [[u8; 4]; 8],
}

const _: () = assert!(size_of::<BlockIQ3XXS>() == 98);

static SEARCH: LazyLock<Format<4>> = LazyLock::new(|| Format {
    grid: Grid::new(&grids::IQ3_XXS, &[4, 12, 20, 28, 36, 44, 52, 62]),
    n_sub: 32,
    n_max: 15,
    unit: 0.25,
    shift: 0.0,
    n_span: 1,
    rungs: (0.75, 5),
});

impl BlockIQ3XXS {
    /// The points of group j and its 32 signs.
    #[inline]
    pub fn points(&self, j: usize) -> ([&'static [i8; 4]; 8], u32) {
        let signs = grids::even_signs(u32::from_le_bytes(self.words[j]));
        (self.qs[j].map(|p| &grids::IQ3_XXS[p as usize]), signs)
    }

    fn group(&self, j: usize) -> Group {
        let (points, signs) = self.points(j);
        Group::signed(grids::one_odd(self.words[j][3] >> 4), points, signs)
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockIQ3XXS {
    const TYPE: TensorType = TensorType::IQ3_XXS;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let weights = search::weights(x, importance);
        let signed = Signed::new(x, &weights, true);
        let Codes { d, scales, points, .. } = SEARCH.quantize(&signed.magnitudes, &weights);
        let word = |j: usize| signed.fields(j) | u32::from(scales[j]) << 28;
        BlockIQ3XXS {
            d,
            qs: std::array::from_fn(|j| std::array::from_fn(|k| points[8 * j + k] as u8)),
            words: std::array::from_fn(|j| word(j).to_le_bytes()),
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        grids::dequantize(self.scales().0, |j| self.group(j), out);
    }
}

impl IntBlock for BlockIQ3XXS {
    const MINS: bool = false;
    const SUB: usize = 32;
    const LARGEST: usize = 62;
    const SIGNED: bool = true;
    type Stored = Over<4>;

    #[inline]
    fn stored(&self) -> (Over<4>, Over<4>) {
        (Over(self.d.to_f16()), Over(f16::ZERO))
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (grids::int_dot(|j| self.group(j), a), 0)
    }
}
