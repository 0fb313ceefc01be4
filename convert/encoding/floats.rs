//! Floats of 4 and 8 bits, by value.

use std::sync::{Arc, LazyLock};

/// The bit layouts of 8-bit floats (Micikevicius et al., "FP8 Formats for Deep Learning", 2022).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8 {
    /// Bias 7, no infinities; a magnitude of all ones is NaN.
    E4M3,
    /// Bias 15, the upper half of an F16.
    E5M2,
}

/// The magnitudes of a 4-bit float (E2M1); the fourth bit is the sign.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// A power of two with bias 127; the smallest is a subnormal f32.
pub fn e8m0(bits: u8) -> f32 {
    match bits {
        0 => f32::from_bits(1 << 22),
        n => f32::from_bits(u32::from(n) << 23),
    }
}

fn e2m1(code: u8) -> f32 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

pub fn fp8_table(kind: Fp8) -> [f32; 256] {
    std::array::from_fn(|byte| {
        let byte = byte as u8;
        let magnitude = match kind {
            Fp8::E4M3 => e4m3(byte & 0x7f),
            Fp8::E5M2 => e5m2(byte & 0x7f),
        };
        if byte & 0x80 == 0 { magnitude } else { -magnitude }
    })
}

fn e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3), f32::from(bits & 7));
    match (exponent, bits) {
        (_, 0x7f) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    }
}

fn e5m2(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 2), f32::from(bits & 3));
    match (exponent, bits & 3) {
        (31, 0) => f32::INFINITY,
        (31, _) => f32::NAN,
        (0, _) => mantissa / 65536.0,
        _ => (1.0 + mantissa / 4.0) * 2f32.powi(exponent - 15),
    }
}

/// The value of every byte.
pub type Table = Arc<[f32]>;

/// The values of the bytes of an 8-bit float.
pub fn of_fp8(kind: Fp8) -> Table {
    static E4M3: LazyLock<Table> = LazyLock::new(|| Arc::new(fp8_table(Fp8::E4M3)));
    static E5M2: LazyLock<Table> = LazyLock::new(|| Arc::new(fp8_table(Fp8::E5M2)));
    match kind {
        Fp8::E4M3 => E4M3.clone(),
        Fp8::E5M2 => E5M2.clone(),
    }
}

/// The values of signed bytes.
pub fn of_i8() -> Table {
    static I8: LazyLock<Table> =
        LazyLock::new(|| (0..=255u8).map(|b| f32::from(b as i8)).collect());
    I8.clone()
}

/// The sixteen values of 4-bit floats (E2M1).
pub fn of_e2m1() -> Table {
    static E2M1: LazyLock<Table> = LazyLock::new(|| (0..16).map(e2m1).collect());
    E2M1.clone()
}

/// The values of 4-bit floats for a library that has one zero only.
pub fn of_e2m1_with_one_zero() -> Table {
    of_e2m1().iter().map(|x| x + 0.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::TensorType;
    use crate::quant;

    /// Values that torch gives for `torch.tensor([…], dtype=torch.uint8).view(dtype).float()`.
    #[test]
    fn eight_bit_floats_are_those_of_torch() {
        let e4m3 = fp8_table(Fp8::E4M3);
        let known = [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x07, 0.013671875),
            (0x08, 0.015625),
            (0x38, 1.0),
            (0x3f, 1.875),
            (0x7e, 448.0),
            (0x81, -0.001953125),
            (0xc5, -3.25),
            (0xfe, -448.0),
        ];
        for (bits, value) in known {
            assert_eq!(e4m3[bits], value, "{bits:#x}");
        }
        assert!(e4m3[0x7f].is_nan() && e4m3[0xff].is_nan());
        let e5m2 = fp8_table(Fp8::E5M2);
        // It is the upper half of an F16.
        for (bits, value) in e5m2.iter().enumerate() {
            let mut half = [0.0];
            quant::dequantize(TensorType::F16, &[0, bits as u8], &mut half);
            assert!(half[0] == *value || (half[0].is_nan() && value.is_nan()), "{bits:#x}");
        }
    }

    #[test]
    fn powers_of_two() {
        assert_eq!(e8m0(127), 1.0);
        assert_eq!(e8m0(0), 2f32.powi(-127));
        assert_eq!(e8m0(254), 2f32.powi(127));
    }
}
