//! Weights, activations and bits that tests of products compare.

pub use moeba::backend::selftest::data::Random;
use moeba::gguf::TensorType;
use moeba::quant::{self, quantize};

/// Every type that is computed with.
pub fn types() -> Vec<TensorType> {
    TensorType::all().filter(|ty| quant::is_supported(*ty)).collect()
}

/// The bytes of a block where its f16 scales are.
pub fn halves(ty: TensorType) -> &'static [usize] {
    use TensorType::*;
    match ty {
        Q4_0 | Q5_0 | Q8_0 | Q8_1 | IQ4_NL | IQ4_XS => &[0],
        Q4_1 | Q5_1 | Q4_K | Q5_K => &[0, 2],
        Q2_K => &[80, 82],
        Q3_K => &[108],
        IQ1_S | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S => &[0],
        Q6_K => &[208],
        TQ1_0 => &[52],
        TQ2_0 => &[64],
        F32 | F16 | BF16 | IQ1_M | MXFP4 | NVFP4 => &[],
        other => panic!("{other}: where are its scales?"),
    }
}

/// A block of any bits that the format allows, with finite scales: codes and sub-block scales
/// that no quantiser writes are legal too.
pub fn random_block(ty: TensorType, block: &mut [u8], random: &mut Random) {
    block.iter_mut().for_each(|b| *b = random.next() as u8);
    for at in halves(ty) {
        let scale = half::f16::from_f32(0.05 * random.float());
        block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
    }
    if ty == TensorType::IQ1_M {
        // Its f16 is spread over four bytes; without the exponent's top bit it is below 2.
        block[55] &= 0xbf;
    }
    if ty == TensorType::MXFP4 {
        // Powers of two that a product can take; the first two bytes are subnormal.
        block[0] = [0, 1, 2, 3, 90, 120, 125, 126, 127, 128, 200][random.next() as usize % 11];
    }
}

/// Rows of quantised and of random blocks, by turns of a coin; `gap` bytes between rows.
pub fn weights(
    ty: TensorType,
    rows: usize,
    cols: usize,
    gap: usize,
    random: &mut Random,
) -> Vec<u8> {
    let row = ty.row_bytes(cols as u64).unwrap() as usize;
    let mut bytes = vec![0xff; rows * (row + gap)];
    for chunk in bytes.chunks_exact_mut(row + gap) {
        if quant::can_quantize(ty) {
            quantize(ty, &random.floats(cols), &mut chunk[..row]);
        }
        if ty.block_len() > 1 {
            for block in chunk[..row].chunks_exact_mut(ty.block_bytes()) {
                if !quant::can_quantize(ty) || random.next().is_multiple_of(2) {
                    random_block(ty, block, random);
                }
            }
        }
    }
    bytes.truncate(bytes.len() - if rows > 0 { gap } else { 0 });
    bytes
}

/// Bits; every NaN is the same.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}
