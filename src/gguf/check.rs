//! The slow part of checking a file: reading every weight for NaN and infinity. Of quantised
//! blocks only the scales can be either.

use super::{Gguf, TensorInfo, TensorType as T};
use crate::{Error, Result, interrupt};
use byteorder::{ByteOrder, LittleEndian as LE};
use half::{bf16, f16};
use rayon::prelude::*;

/// How a block's floating-point fields are stored.
#[derive(Clone, Copy)]
enum Field {
    F16,
    BF16,
    F32,
    F64,
    /// An exponent alone; 255 is NaN.
    E8M0,
    /// Eight bits without infinities; all ones but for the sign are NaN.
    E4M3,
    /// An f16 in the top four bits of four 16-bit words.
    Spread,
}

impl Field {
    fn read(self, bytes: &[u8]) -> f64 {
        match self {
            Field::F16 => f16::from_bits(LE::read_u16(bytes)).into(),
            Field::BF16 => bf16::from_bits(LE::read_u16(bytes)).into(),
            Field::F32 => LE::read_f32(bytes).into(),
            Field::F64 => LE::read_f64(bytes),
            Field::E8M0 if bytes[0] == u8::MAX => f64::NAN,
            Field::E8M0 => f64::from(bytes[0]) - 127.0,
            Field::E4M3 if bytes[0] & 0x7f == 0x7f => f64::NAN,
            // Every other number is finite.
            Field::E4M3 => 0.0,
            Field::Spread => {
                let top = |i: usize| LE::read_u16(&bytes[2 * i..]) >> 12;
                f16::from_bits(top(0) | top(1) << 4 | top(2) << 8 | top(3) << 12).into()
            }
        }
    }
}

/// The floating-point fields of a block, with their byte positions. Integers have none; NVFP4's
/// scales are read as finite numbers whatever their bits.
fn fields(ty: T) -> &'static [(usize, Field)] {
    use Field::*;
    match ty {
        T::F32 | T::Q8_K => &[(0, F32)],
        T::F16 => &[(0, F16)],
        T::BF16 => &[(0, BF16)],
        T::F64 => &[(0, F64)],
        T::Q1_0 | T::Q2_0 | T::Q4_0 | T::Q5_0 | T::Q8_0 | T::IQ4_NL => &[(0, F16)],
        T::Q4_1 | T::Q5_1 | T::Q8_1 | T::Q4_K | T::Q5_K => &[(0, F16), (2, F16)],
        T::Q2_K => &[(80, F16), (82, F16)],
        T::Q3_K => &[(108, F16)],
        T::Q6_K => &[(208, F16)],
        T::IQ2_XXS | T::IQ2_XS | T::IQ2_S | T::IQ3_XXS | T::IQ3_S | T::IQ1_S | T::IQ4_XS => {
            &[(0, F16)]
        }
        T::IQ1_M => &[(48, Spread)],
        T::TQ1_0 => &[(52, F16)],
        T::TQ2_0 => &[(64, F16)],
        T::MXFP4 => &[(0, E8M0)],
        T::F8_E4M3 => &[(0, E4M3)],
        T::I8 | T::I16 | T::I32 | T::I64 | T::NVFP4 => &[],
    }
}

/// The first block with a field that is NaN or infinite, and that field's value.
pub fn first_non_finite(ty: T, bytes: &[u8]) -> Option<(usize, f64)> {
    bytes.chunks_exact(ty.block_bytes()).enumerate().find_map(|(i, block)| {
        let values = fields(ty).iter().map(|&(at, field)| field.read(&block[at..]));
        values.into_iter().find(|v| !v.is_finite()).map(|v| (i, v))
    })
}

/// Blocks that one thread checks at a time.
const BLOCKS_PER_TASK: usize = 1 << 16;

impl Gguf {
    /// Reads a whole tensor; the first NaN or infinity in it is an error that names the element
    /// (the first one of the block, where the type has blocks).
    pub fn check_finite(&self, tensor: &TensorInfo) -> Result<()> {
        let ty = tensor.ty;
        if fields(ty).is_empty() {
            return Ok(());
        }
        let found = self
            .bytes(tensor)
            .par_chunks(BLOCKS_PER_TASK * ty.block_bytes())
            .enumerate()
            .find_map_first(|(task, bytes)| {
                if interrupt::is_set() {
                    return Some(Err(Error::Interrupted));
                }
                let (i, value) = first_non_finite(ty, bytes)?;
                Some(Ok((task * BLOCKS_PER_TASK + i, value)))
            });
        let Some(found) = found else { return Ok(()) };
        let (block, value) = found?;
        let element = block * ty.block_len();
        let (field, what) = match ty.block_len() {
            1 => (format!("element {element}"), "a finite number"),
            n => (format!("elements {element} to {}", element + n - 1), "a finite scale"),
        };
        let path = self.shards()[tensor.shard].path();
        Err(Error::format(
            path,
            format!("tensor {}: {field}", tensor.name),
            what,
            value.to_string(),
        ))
    }

    /// `check_finite` of all tensors, in file order; `progress` is told the bytes of each done.
    pub fn check_all_finite(&self, mut progress: impl FnMut(u64)) -> Result<()> {
        for tensor in self.tensors() {
            self.check_finite(tensor)?;
            progress(tensor.n_bytes);
        }
        Ok(())
    }
}
