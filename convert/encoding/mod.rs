//! How a checkpoint stores values: floats, integers, or small codes beside factors.
//!
//! The last kind is several tensors of the checkpoint. They appear as one here, in elements and
//! under the name of the weight that they make: `join` finds them by the checkpoint's own
//! description of how it is quantised.

mod bitsandbytes;
mod blocks;
mod floats;
mod grid;
mod integers;
mod join;
mod packed;
mod scaled;

pub use join::join;
pub use scaled::Scaled;

use std::sync::Arc;

use safetensors::Dtype;

use super::checkpoint::{Checkpoint, HfTensor};
use crate::Result;
use crate::gguf::TensorType;
use crate::quant;
use floats::{Fp8, e8m0, of_fp8};

#[derive(Clone, Debug)]
pub enum Encoding {
    Float(TensorType),
    /// Powers of two: E8M0, of scales.
    Exponents,
    /// Signed, of so many bytes, in tables: no weight is an integer.
    Integer {
        bytes: usize,
    },
    /// Without a scale.
    Fp8(Fp8),
    Scaled(Arc<Scaled>),
}

impl Encoding {
    /// The encoding of an ordinary tensor; `None` for types that weights do not have.
    pub fn of(dtype: Dtype) -> Option<Encoding> {
        match dtype {
            Dtype::F8_E8M0 => Some(Encoding::Exponents),
            Dtype::I32 => Some(Encoding::Integer { bytes: 4 }),
            Dtype::I64 => Some(Encoding::Integer { bytes: 8 }),
            Dtype::F32 => Some(Encoding::Float(TensorType::F32)),
            Dtype::F16 => Some(Encoding::Float(TensorType::F16)),
            Dtype::BF16 => Some(Encoding::Float(TensorType::BF16)),
            Dtype::F8_E4M3 => Some(Encoding::Fp8(Fp8::E4M3)),
            Dtype::F8_E5M2 => Some(Encoding::Fp8(Fp8::E5M2)),
            _ => None,
        }
    }

    /// The GGUF type that has these values as they are, up to a factor of a matrix.
    pub fn kept_type(&self) -> Option<TensorType> {
        match self {
            Encoding::Fp8(Fp8::E4M3) => Some(TensorType::F8_E4M3),
            Encoding::Scaled(scaled) => scaled.kept_type(),
            _ => None,
        }
    }

    /// The smallest GGUF float type that has all values, but for scaled ones: those are products
    /// rounded once.
    pub fn float_type(&self) -> TensorType {
        match self {
            Encoding::Float(ty) => *ty,
            Encoding::Integer { .. } => TensorType::I32,
            Encoding::Scaled(scaled) => scaled.float_type(),
            Encoding::Fp8(_) | Encoding::Exponents => TensorType::BF16,
        }
    }
}

impl Checkpoint {
    /// Reads `out.len()` elements from the tensor's element `first` on, as f32.
    pub fn read(&self, tensor: &HfTensor, first: u64, out: &mut [f32]) -> Result<()> {
        let bytes_of = |width: usize| {
            let mut bytes = vec![0; out.len() * width];
            self.read_bytes(tensor, first * width as u64, &mut bytes).map(|()| bytes)
        };
        match &tensor.encoding {
            None => return Err(self.bad_type(tensor)),
            Some(Encoding::Float(ty)) => {
                quant::dequantize(*ty, &bytes_of(ty.block_bytes())?, out);
            }
            Some(Encoding::Exponents) => {
                let bytes = bytes_of(1)?;
                out.iter_mut().zip(bytes).for_each(|(x, byte)| *x = e8m0(byte));
            }
            // Ids of experts: a float has them all.
            Some(Encoding::Integer { bytes: width }) => {
                let bytes = bytes_of(*width)?;
                for (x, bytes) in out.iter_mut().zip(bytes.chunks_exact(*width)) {
                    let mut wide = [if bytes[width - 1] & 0x80 == 0 { 0 } else { 0xff }; 8];
                    wide[..*width].copy_from_slice(bytes);
                    *x = i64::from_le_bytes(wide) as f32;
                }
            }
            Some(Encoding::Fp8(kind)) => {
                let (bytes, values) = (bytes_of(1)?, of_fp8(*kind));
                out.iter_mut().zip(bytes).for_each(|(x, byte)| *x = values[usize::from(byte)]);
            }
            Some(Encoding::Scaled(scaled)) => self.read_scaled(tensor, scaled, first, out)?,
        }
        Ok(())
    }
}
