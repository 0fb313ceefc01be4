//! The traits of block formats, and the cast from a file's bytes to blocks.

use super::BlockQ4_0;
use crate::gguf::TensorType;
use half::f16;

/// An f16 as the file stores it: two little-endian bytes, so that blocks need no alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Half([u8; 2]);

impl Half {
    pub const ZERO: Half = Half([0; 2]);

    #[inline]
    pub fn new(x: f32) -> Self {
        Half(f16::from_f32(x).to_le_bytes())
    }

    #[inline]
    pub fn to_f16(self) -> f16 {
        f16::from_le_bytes(self.0)
    }

    #[inline]
    pub fn get(self) -> f32 {
        self.to_f16().to_f32()
    }
}

/// The type of a block's scales.
pub trait Stored: Copy + Default {
    fn get(self) -> f32;
}

impl Stored for f32 {
    #[inline]
    fn get(self) -> f32 {
        self
    }
}

impl Stored for f16 {
    #[inline]
    fn get(self) -> f32 {
        self.to_f32()
    }
}

/// A scale in units of 1/N, N a power of two.
#[derive(Clone, Copy, Debug, Default)]
pub struct Over<const N: u32>(pub f16);

impl<const N: u32> Stored for Over<N> {
    #[inline]
    fn get(self) -> f32 {
        self.0.to_f32() / N as f32
    }
}

/// A quantised block as a file stores it: scales and packed integers.
///
/// # Safety
/// The type is `repr(C)`, every bit pattern of its bytes is a value, it has no padding and its
/// alignment is 1: a file's bytes are cast to it in place.
pub unsafe trait Block: Copy + 'static {
    const TYPE: TensorType;
    /// Elements a block.
    const LEN: usize;

    /// The nearest block that the format's search finds for `x` (finite values, `LEN` of them),
    /// where an error of value i counts `importance[i]` times, if that is known.
    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self;

    fn dequantize(&self, out: &mut [f32]);
}

/// A block whose dot product with activations is two exact integers and two scales: all of them
/// but NVFP4 ([`super::nvfp4`]) and [`Parts`].
pub trait IntBlock: Block {
    /// Whether a value is `d·sc·q − dmin·m` and not just `d·sc·q`.
    const MINS: bool;
    /// Codes that share an integer scale, 16 or 32 (32 if there is none).
    const SUB: usize;
    /// The largest magnitude of a code, at most 128.
    const LARGEST: usize;
    /// Whether codes can be negative.
    const SIGNED: bool;
    /// The type of d and dmin.
    type Stored: Stored;

    /// (d, dmin); dmin is 0 if there are no mins.
    fn stored(&self) -> (Self::Stored, Self::Stored);

    /// [`IntBlock::stored`] as numbers.
    #[inline]
    fn scales(&self) -> (f32, f32) {
        let (d, dmin) = self.stored();
        (d.get(), dmin.get())
    }

    /// The exact integers of the dot product with `a`: `Σ_j sc_j·Σ_i q_i·a_i` over the
    /// sub-blocks j, and `Σ_j m_j·Σ_i a_i` (0 where there are no mins).
    fn int_dot(&self, a: &[i8]) -> (i32, i32);
}

/// A block of several parts of 32 values (`quant::bits`).
pub trait Parts: Block {
    const PARTS: usize = Self::LEN / 32;

    fn scale(&self) -> Half;

    /// Values 32j to 32j + 31 with their scale.
    fn part(&self, j: usize) -> BlockQ4_0;

    fn dequantize_parts(&self, out: &mut [f32]) {
        for (j, out) in out.chunks_exact_mut(32).enumerate() {
            self.part(j).dequantize(out);
        }
    }
}

/// The blocks that `bytes` hold.
///
/// # Panics
/// If the bytes are no whole number of blocks.
pub fn blocks_of<B: Block>(bytes: &[u8]) -> &[B] {
    let size = size_of::<B>();
    assert_eq!(bytes.len() % size, 0, "{} bytes are no whole {} blocks", bytes.len(), B::TYPE);
    const { assert!(align_of::<B>() == 1) };
    // SAFETY: the length is checked, the alignment is 1 and `Block` promises plain bytes.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size) }
}

/// [`blocks_of`], to write.
pub fn blocks_of_mut<B: Block>(bytes: &mut [u8]) -> &mut [B] {
    let size = size_of::<B>();
    assert_eq!(bytes.len() % size, 0, "{} bytes are no whole {} blocks", bytes.len(), B::TYPE);
    const { assert!(align_of::<B>() == 1) };
    // SAFETY: the length is checked, the alignment is 1 and `Block` promises plain bytes.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size) }
}
