//! Seeded numbers and weights.

use crate::gguf::TensorType;
use crate::quant::quantize;

/// A fixed sequence (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    /// −1 to 1, with a size that varies from value to value.
    pub fn float(&mut self) -> f32 {
        let bits = self.next();
        let unit = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        unit * [1.0, 1.0, 0.1, 3.0][bits as usize % 4]
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// Vectors of these lengths.
    pub fn vectors<const N: usize>(&mut self, lengths: [usize; N]) -> [Vec<f32>; N] {
        lengths.map(|n| self.floats(n))
    }
}

/// The number of values that are quantised for a matrix, which takes time: its blocks are drawn
/// from theirs.
const POOL: usize = 2048;

/// Dense rows of quantised blocks in any order.
pub fn weights(ty: TensorType, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let mut pool = vec![0; POOL / ty.block_len() * ty.block_bytes()];
    quantize(ty, &random.floats(POOL), &mut pool);
    let row = ty.row_bytes(cols as u64).expect("whole blocks") as usize;
    let mut bytes = vec![0; rows * row];
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        let drawn = random.below(POOL / ty.block_len());
        block.copy_from_slice(&pool[drawn * ty.block_bytes()..][..ty.block_bytes()]);
    }
    bytes
}

/// Replaces every second block by one of any bits: no quantiser writes some codes and sub-block
/// scales that a format allows.
pub fn mix_in_any_bits(ty: TensorType, bytes: &mut [u8], random: &mut Random) {
    if ty.block_len() > 1 {
        let blocks = bytes.chunks_exact_mut(ty.block_bytes());
        blocks.step_by(2).for_each(|block| any_bits(ty, block, random));
    }
}

/// The offsets of a block's f16 scales.
pub fn scales(ty: TensorType) -> &'static [usize] {
    use TensorType::*;
    match ty {
        Q1_0 | Q2_0 | Q4_0 | Q5_0 | Q8_0 | Q8_1 | IQ4_NL | IQ4_XS => &[0],
        Q4_1 | Q5_1 | Q4_K | Q5_K => &[0, 2],
        Q2_K => &[80, 82],
        Q3_K => &[108],
        IQ1_S | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S => &[0],
        Q6_K => &[208],
        TQ1_0 => &[52],
        TQ2_0 => &[64],
        F32 | F16 | BF16 | F8_E4M3 | IQ1_M | MXFP4 | NVFP4 => &[],
        other => panic!("{other}: where are its scales?"),
    }
}

/// A block of any bits that the format allows, with finite scales.
pub fn any_bits(ty: TensorType, block: &mut [u8], random: &mut Random) {
    block.iter_mut().for_each(|byte| *byte = random.next() as u8);
    for at in scales(ty) {
        let scale = half::f16::from_f32(0.05 * random.float());
        block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
    }
    if ty == TensorType::IQ1_M {
        // Its f16 is spread over four bytes; without the exponent's top bit it is below 2.
        block[55] &= 0xbf;
    }
    if ty == TensorType::MXFP4 {
        // Powers of two that a product can take; the first two bytes are subnormal.
        block[0] = [0, 1, 2, 3, 90, 120, 125, 126, 127, 128, 200][random.below(11)];
    }
}
