//! Weights, activations and bits that tests of products compare.

pub use moeba::backend::selftest::data::{Random, any_bits, scales};
use moeba::gguf::TensorType;
use moeba::quant::{self, quantize};

/// Every type that is computed with.
pub fn types() -> Vec<TensorType> {
    TensorType::all().filter(|ty| quant::is_supported(*ty)).collect()
}

/// Whether a format is one of grids, whose search takes long.
fn is_of_grid(ty: TensorType) -> bool {
    use TensorType::*;
    matches!(ty, IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S)
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
        if !is_of_grid(ty) {
            quantize(ty, &random.floats(cols), &mut chunk[..row]);
        }
        if ty.block_len() > 1 {
            for block in chunk[..row].chunks_exact_mut(ty.block_bytes()) {
                if is_of_grid(ty) || random.next().is_multiple_of(2) {
                    any_bits(ty, block, random);
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
