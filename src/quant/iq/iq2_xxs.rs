//! IQ2_XXS: 256 values as points of eight magnitudes (a grid of 256) with an even number of minus
//! signs and a 4-bit scale for each 32; 2.0625 bits a weight. `x = d/8·(2s + 1)·point·sign`.
//! The first four of the eight bytes of group j are its points; the rest, a little-endian word,
//! has the signs of point k in bits 7k to 7k + 6 (see `grids::even_signs`) and s in the top four.

use super::grids::{self, Group};
use super::search::{self, Codes, Format, Grid, Signed};
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock, Over};
use half::f16;
use std::sync::LazyLock;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockIQ2XXS {
    pub d: Half,
    pub groups: [[u8; 8]; 8],
}

const _: () = assert!(size_of::<BlockIQ2XXS>() == 66);

static SEARCH: LazyLock<Format<8>> = LazyLock::new(|| Format {
    grid: Grid::new(&grids::IQ2_XXS, &[8, 25, 43]),
    n_sub: 32,
    n_max: 15,
    unit: 0.125,
    shift: 0.0,
    n_span: 1,
    rungs: (0.7, 6),
});

impl BlockIQ2XXS {
    /// The points of group j and its 32 signs.
    #[inline]
    pub fn points(&self, j: usize) -> ([&'static [i8; 8]; 4], u32) {
        let [points @ .., a, b, c, d] = self.groups[j];
        let points: [u8; 4] = points;
        let signs = grids::even_signs(u32::from_le_bytes([a, b, c, d]));
        (points.map(|p| &grids::IQ2_XXS[p as usize]), signs)
    }

    fn group(&self, j: usize) -> Group {
        let (points, signs) = self.points(j);
        Group::signed(grids::one_odd(self.groups[j][7] >> 4), points, signs)
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockIQ2XXS {
    const TYPE: TensorType = TensorType::IQ2_XXS;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let weights = search::weights(x, importance);
        let signed = Signed::new(x, &weights, true);
        let Codes { d, scales, points, .. } = SEARCH.quantize(&signed.magnitudes, &weights);
        let group = |j: usize| {
            let [p, q, r, s] = [0, 1, 2, 3].map(|k| points[4 * j + k] as u8);
            let word = signed.fields(j) | u32::from(scales[j]) << 28;
            let [a, b, c, d] = word.to_le_bytes();
            [p, q, r, s, a, b, c, d]
        };
        BlockIQ2XXS { d, groups: std::array::from_fn(group) }
    }

    fn dequantize(&self, out: &mut [f32]) {
        grids::dequantize(self.scales().0, |j| self.group(j), out);
    }
}

impl IntBlock for BlockIQ2XXS {
    const MINS: bool = false;
    const SUB: usize = 32;
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
