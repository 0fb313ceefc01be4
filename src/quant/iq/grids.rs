//! Shared by the grid formats (IQ1, IQ2 and IQ3). They store indices of points, not integers:
//! eight (IQ3: four) neighbouring values are together one point of a grid of 256 to 2048, so that
//! a value costs less than the bits of its range. The grids of IQ2 and IQ3 hold magnitudes, and
//! signs stand beside them; those of IQ1 hold −1, 0 and 1, and a shift of an eighth stands beside.
//!
//! Every value of a block is `d·2⁻ᵏ·s·c` with an odd integer s for each 16 or 32 values and a
//! small integer c: the scales that the formats write as s + ½ are odd halves, and the shift makes
//! IQ1's values odd eighths (8·point ± 1). So `IntBlock::scales` gives `d·2⁻ᵏ`, and the exact
//! integer dot product and the values follow from [`Group`]s. Products of d, s and c have at most
//! 22 significant bits: a value is exact in f32, in whatever order it is computed.

use super::grid_points as packed;

/// The points of IQ1_S and IQ1_M, −1 to 1.
pub static IQ1: [[i8; 8]; 2048] = unpack(&packed::IQ1, 2, &[-1, 0, 1]);
/// The points of IQ2, magnitudes.
pub static IQ2_XXS: [[i8; 8]; 256] = unpack(&packed::IQ2_XXS, 2, &[8, 25, 43]);
pub static IQ2_XS: [[i8; 8]; 512] = unpack(&packed::IQ2_XS, 2, &[8, 25, 43]);
pub static IQ2_S: [[i8; 8]; 1024] = unpack(&packed::IQ2_S, 2, &[8, 25, 43]);
/// The points of IQ3, magnitudes.
pub static IQ3_XXS: [[i8; 4]; 256] = unpack(&packed::IQ3_XXS, 3, &[4, 12, 20, 28, 36, 44, 52, 62]);
pub static IQ3_S: [[i8; 4]; 512] = unpack(&packed::IQ3_S, 3, &[1, 3, 5, 7, 9, 11, 13, 15]);

/// Value i of a point is `values[field i]`, fields of `bits` bits from the lowest on.
const fn unpack<const W: usize, const N: usize>(
    packed: &[u16; N],
    bits: usize,
    values: &[i8],
) -> [[i8; W]; N] {
    let mut points = [[0; W]; N];
    let mut n = 0;
    while n < N {
        let mut i = 0;
        while i < W {
            points[n][i] = values[(packed[n] >> (bits * i)) as usize & ((1 << bits) - 1)];
            i += 1;
        }
        n += 1;
    }
    points
}

/// 32 neighbouring values: value i is `d·2⁻ᵏ·scales[i / 16]·codes[i]`.
pub struct Group {
    pub scales: [i8; 2],
    pub codes: [i8; 32],
}

impl Group {
    /// Points in their order; bit i of `signs` negates value i.
    pub fn signed<const W: usize, const N: usize>(
        scales: [i8; 2],
        points: [&[i8; W]; N],
        signs: u32,
    ) -> Self {
        let mut codes = [0; 32];
        for (i, code) in codes.iter_mut().enumerate() {
            let magnitude = points[i / W][i % W];
            *code = if signs >> i & 1 == 1 { -magnitude } else { magnitude };
        }
        Group { scales, codes }
    }

    /// IQ1's points in their order, in eighths, shifted by an eighth: down where bit k of `down`
    /// says so for point k, up elsewhere.
    pub fn shifted(scales: [i8; 2], points: [&[i8; 8]; 4], down: u8) -> Self {
        let mut codes = [0; 32];
        for (i, code) in codes.iter_mut().enumerate() {
            let shift = if down >> (i / 8) & 1 == 1 { -1 } else { 1 };
            *code = 8 * points[i / 8][i % 8] + shift;
        }
        Group { scales, codes }
    }
}

/// The 32 signs that four fields of seven bits say: the eighth of each makes the number of minus
/// signs even.
#[inline]
pub fn even_signs(fields: u32) -> u32 {
    let byte = |k: u32| {
        let seven = fields >> (7 * k) & 127;
        (seven | (seven.count_ones() & 1) << 7) << (8 * k)
    };
    byte(0) | byte(1) | byte(2) | byte(3)
}

/// `2n + 1`, twice: the scale n + ½ of a whole group, in halves.
#[inline]
pub fn one_odd(n: u8) -> [i8; 2] {
    [2 * n as i8 + 1; 2]
}

/// `2n + 1` of the two halves of a byte: a scale for each 16 values of a group.
#[inline]
pub fn two_odd(byte: u8) -> [i8; 2] {
    [2 * (byte & 15) as i8 + 1, 2 * (byte >> 4) as i8 + 1]
}

/// `Block::dequantize` of a block of groups.
pub fn dequantize(scale: f32, group: impl Fn(usize) -> Group, out: &mut [f32]) {
    for (j, out) in out.chunks_exact_mut(32).enumerate() {
        let Group { scales, codes } = group(j);
        for (i, o) in out.iter_mut().enumerate() {
            *o = scale * scales[i / 16] as f32 * codes[i] as f32;
        }
    }
}

/// `isum` of a block of groups.
pub fn int_dot(group: impl Fn(usize) -> Group, a: &[i8]) -> i32 {
    let mut isum = 0;
    for (j, a) in a.chunks_exact(32).enumerate() {
        let Group { scales, codes } = group(j);
        for (i, a) in a.iter().enumerate() {
            isum += scales[i / 16] as i32 * codes[i] as i32 * *a as i32;
        }
    }
    isum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_ascend_and_have_no_field_out_of_range() {
        // `unpack` would not compile with one; ascending lists have no point twice.
        for list in [&packed::IQ1[..], &packed::IQ2_XXS, &packed::IQ2_XS, &packed::IQ2_S] {
            assert!(list.is_sorted_by(|a, b| a < b));
        }
        for list in [&packed::IQ3_XXS[..], &packed::IQ3_S] {
            assert!(list.is_sorted_by(|a, b| a < b) && list[list.len() - 1] < 1 << 12);
        }
    }

    #[test]
    fn signs_are_even() {
        for fields in 0..1u32 << 14 {
            let signs = even_signs(fields | fields << 14);
            for byte in signs.to_le_bytes() {
                assert_eq!(byte.count_ones() % 2, 0);
            }
            assert_eq!(signs & 127, fields & 127);
            assert_eq!(signs >> 24 & 127, fields >> 7);
        }
    }
}
