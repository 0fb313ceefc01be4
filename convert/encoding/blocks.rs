//! Floats of 4 bits in blocks and of 8 bits that GGUF has too: bits move, no value changes.

use super::Encoding;
use std::sync::Arc;

use super::floats::{Fp8, of_e2m1, of_fp8};
use super::scaled::{Codes, Factors, Scaled, Then};
use crate::convert::checkpoint::{Checkpoint, HfTensor};
use crate::gguf::TensorType;
use crate::{Error, Result};

/// A block of MXFP4: elements of a scale and scales of a block.
const MXFP4: (u64, u64) = (32, 1);

/// A block of NVFP4, likewise.
const NVFP4: (u64, u64) = (16, 4);

/// Elements that share a scale, and scales of a block of the type.
fn parts(ty: TensorType) -> (u64, u64) {
    if ty == TensorType::NVFP4 { NVFP4 } else { MXFP4 }
}

impl Scaled {
    /// The GGUF type whose blocks hold these, up to a factor of a matrix in NVFP4 and F8_E4M3.
    pub fn kept_type(&self) -> Option<TensorType> {
        if self.is_f8_e4m3() {
            return Some(TensorType::F8_E4M3);
        }
        let Codes::Nibbles { values, high_first: false } = &self.codes else { return None };
        let plain = **values == *of_e2m1() && self.zeros.is_none() && !self.factors.transposed;
        let in_rows = self.grid.height == 1 && self.factors.order.is_none();
        let encoding = self.factors.tensor.encoding.as_ref()?;
        let ty = match (encoding, self.grid.width, &self.factors.of_matrix) {
            (Encoding::Exponents, 32, None) => TensorType::MXFP4,
            (Encoding::Fp8(Fp8::E4M3), 16, _) => TensorType::NVFP4,
            _ => return None,
        };
        let (elements, scales) = parts(ty);
        let whole = self.grid.columns.is_multiple_of(elements * scales);
        (plain && in_rows && whole).then_some(ty)
    }

    /// Whether these are floats of 8 bits with one factor a matrix.
    fn is_f8_e4m3(&self) -> bool {
        let Codes::Bytes(values) = &self.codes else { return false };
        let is_plain = self.zeros.is_none() && self.then == Then::Nothing;
        let Factors { order, of_matrix, .. } = &self.factors;
        Arc::ptr_eq(values, &of_fp8(Fp8::E4M3))
            && (self.grid.down(), self.grid.across()) == (1, 1)
            && is_plain
            && order.is_none()
            && of_matrix.is_none()
    }
}

impl Checkpoint {
    /// The factors of matrices as ones to multiply by, of what is kept.
    pub fn matrix_factors(&self, scaled: &Scaled) -> Result<Vec<f32>> {
        match scaled.is_f8_e4m3() {
            true => self.read_whole(&scaled.factors.tensor),
            false => Ok(scaled.factors.matrix_factors()),
        }
    }

    /// Fills `out` with whole blocks of a type as GGUF has them, from a block of the tensor on: the
    /// scales, then the codes of each scale's elements, the first half of them in low halves of
    /// bytes and the second in high halves.
    pub fn read_blocks(
        &self,
        tensor: &HfTensor,
        ty: TensorType,
        first: u64,
        out: &mut [u8],
    ) -> Result<()> {
        if ty == TensorType::F8_E4M3 {
            return self.read_bytes(tensor, first, out);
        }
        let Some(Encoding::Scaled(scaled)) = &tensor.encoding else {
            return Err(self.bad_type(tensor));
        };
        let (elements, scales) = parts(ty);
        let n = (out.len() / ty.block_bytes()) as u64;
        let (half, n_scales) = (elements as usize / 2, scales as usize);
        let mut factors = vec![0; (n * scales) as usize];
        let mut codes = vec![0; factors.len() * half];
        self.read_bytes(tensor, first * scales * half as u64, &mut codes)?;
        self.read_bytes(&scaled.factors.tensor, first * scales, &mut factors)?;
        // A scale of GGUF's NVFP4 has no sign, and what would be NaN is 0.
        if let Some(odd) = factors.iter().find(|f| ty == TensorType::NVFP4 && **f > 0x7e) {
            let factors = &scaled.factors.tensor;
            let field = format!("tensor {}", factors.name);
            let got = format!("the byte {odd:#x}");
            return Err(Error::format(self.path_of(factors), field, "positive scales", got));
        }
        let blocks = out.chunks_exact_mut(ty.block_bytes());
        let codes = codes.chunks_exact(n_scales * half);
        for ((out, codes), factors) in blocks.zip(codes).zip(factors.chunks_exact(n_scales)) {
            let (scales, out) = out.split_at_mut(n_scales);
            scales.copy_from_slice(factors);
            for (out, codes) in out.chunks_exact_mut(half).zip(codes.chunks_exact(half)) {
                // The checkpoint has elements 2i and 2i + 1 in byte i, low half first.
                let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 0xf;
                for (j, byte) in out.iter_mut().enumerate() {
                    *byte = code(j) | code(j + half) << 4;
                }
            }
        }
        Ok(())
    }
}
