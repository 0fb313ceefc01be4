//! The one exponential, and what is built on it; vector and CUDA versions repeat these steps.
//!
//! `x = n·ln 2 + r` with |r| ≤ ln 2/2 and n found by adding 1.5·2²³ (rounds to nearest, ties to
//! even, and leaves n in the low bits); `e^r = 1 + r + r²·q(r)` with q of degree 4, fitted for the
//! least relative error (3·10⁻⁹); `2^n` in two factors, so that overflow and subnormal results
//! come out right. Measured from −87 to 88.7: at most 0.98 ulp. Below −87.33 the
//! subnormal result is rounded a second time.

pub const LOWEST: f32 = -104.0;
pub const HIGHEST: f32 = 89.0;
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;
pub const ROUNDER: f32 = 12_582_912.0;
/// The upper 12 bits of ln 2, and the rest.
pub const LN2_HI: f32 = 0.693_115_23;
pub const LN2_LO: f32 = 3.194_618_3e-5;
/// q, constant term first.
pub const Q: [f32; 5] = [0.499_999_94, 0.166_665_21, 0.041_668_39, 0.008_368_717, 0.001_381_459_9];

pub fn exp(x: f32) -> f32 {
    // Written so that NaN passes, as the vector min and max do with this operand order.
    let x = if x < LOWEST { LOWEST } else { x };
    let x = if x > HIGHEST { HIGHEST } else { x };
    let shifted = x.mul_add(LOG2_E, ROUNDER);
    let n = shifted - ROUNDER;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    let q = Q[4].mul_add(r, Q[3]).mul_add(r, Q[2]).mul_add(r, Q[1]).mul_add(r, Q[0]);
    let p = (r * r).mul_add(q, r) + 1.0;
    let n = shifted.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// 2^n for −126 ≤ n ≤ 127 (any other n is the garbage that a NaN left, and NaN absorbs it).
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

pub fn swiglu(gate: f32, up: f32) -> f32 {
    gate / (1.0 + exp(-gate)) * up
}
