//! F8_E4M3: floats of eight bits (OCP E4M3FN), a byte a value: a sign, four bits of exponent with
//! bias 7, three of mantissa. There are no infinities; 0x7f and 0xff are NaN, and 448 is the
//! largest number. A product may be multiplied by a factor of the matrix, a tensor of its own.

/// 448.
const LARGEST: u8 = 0x7e;

/// 2¹²⁰: what exponent and mantissa lack where an f32 has them, of subnormal numbers too.
const OVER_F32: f32 = f32::from_bits((127 + 120) << 23);

/// The factor that exponent and mantissa lack where an f16 has them. Vector code goes by way of
/// f16: it meets no subnormal f32, which costs some processors a hundred cycles.
pub const OVER_F16: f32 = 256.0;

/// Every number as a bf16 of a file: exact.
pub static AS_BF16: [[u8; 2]; 256] = {
    let mut all = [[0; 2]; 256];
    let mut x = 0;
    while x < 256 {
        all[x] = ((to_f32(x as u8).to_bits() >> 16) as u16).to_le_bytes();
        x += 1;
    }
    all
};

/// Exact.
#[inline]
pub const fn to_f32(x: u8) -> f32 {
    if x & 0x7f == 0x7f {
        return f32::NAN;
    }
    f32::from_bits((x as u32 & 0x80) << 24 | (x as u32 & 0x7f) << 20) * OVER_F32
}

/// The nearest number, of two the even one; beyond ±448 that, and NaN stays NaN.
pub fn nearest(x: f32) -> u8 {
    let (sign, magnitude) = ((x.to_bits() >> 24) as u8 & 0x80, x.abs());
    if x.is_nan() {
        return sign | 0x7f;
    }
    if magnitude >= 448.0 {
        return sign | LARGEST;
    }
    if magnitude < 1.0 / 64.0 {
        // Subnormal numbers are multiples of 2⁻⁹; 8 of them are the first normal one.
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits();
    let rounded = (bits + (1 << 19) - 1 + (bits >> 20 & 1)) >> 20;
    sign | ((rounded - (120 << 3)) as u8).min(LARGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number comes back, and what lies between two goes to the nearer one.
    #[test]
    fn the_nearest_number_is_found() {
        for x in 0..=LARGEST {
            for sign in [0, 0x80] {
                assert_eq!(nearest(to_f32(sign | x)), sign | x);
            }
        }
        for x in 0..LARGEST {
            let (low, high) = (to_f32(x), to_f32(x + 1));
            let middle = (low + high) / 2.0;
            let even = if x.is_multiple_of(2) { x } else { x + 1 };
            assert_eq!(
                [middle.next_down(), middle, middle.next_up()].map(nearest),
                [x, even, x + 1]
            );
        }
        assert_eq!([448.1, 464.0, 1e9, f32::INFINITY].map(nearest), [LARGEST; 4]);
        assert!(to_f32(nearest(f32::NAN)).is_nan() && to_f32(nearest(-f32::NAN)).is_nan());
        assert_eq!(
            [nearest(0.0), nearest(-0.0), nearest(1e-9), nearest(-1e-9)],
            [0, 0x80, 0, 0x80]
        );
    }

    #[test]
    fn numbers_are_those_of_the_standard() {
        for x in 0..=LARGEST {
            let (exponent, mantissa) = (i32::from(x >> 3), f64::from(x & 7) / 8.0);
            let want = match exponent {
                0 => mantissa * 2f64.powi(-6),
                _ => (1.0 + mantissa) * 2f64.powi(exponent - 7),
            };
            assert_eq!(f64::from(to_f32(x)), want);
            assert_eq!(f64::from(to_f32(x | 0x80)), -want);
            let bf16 = half::bf16::from_le_bytes(AS_BF16[usize::from(x)]);
            assert_eq!(bf16.to_f64(), want);
        }
        assert!(half::bf16::from_le_bytes(AS_BF16[0x7f]).is_nan());
        assert!(to_f32(0x7f).is_nan() && to_f32(0xff).is_nan());
    }
}
