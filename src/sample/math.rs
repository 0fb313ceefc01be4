//! Exponentials and logarithms, the same bits on every platform: only IEEE 754 sums, products and
//! quotients.

/// ln 2 in two parts, so that a small whole number times the first is exact.
const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// e^x for x ≤ 0, within 2 units in the last place; 0 below −708 and for −∞.
pub fn exp(x: f64) -> f64 {
    if x < -708.0 {
        return 0.0;
    }
    // x = n·ln 2 + r with |r| ≤ ln 2 / 2.
    let n = (x * std::f64::consts::LOG2_E).round();
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    // The Taylor series up to r^13/13!: the next term is below 2^-57 for these r.
    let mut sum = 1.0;
    for i in (1..=13).rev() {
        sum = 1.0 + sum * r / f64::from(i);
    }
    sum * f64::from_bits(((1023 + n as i64) as u64) << 52)
}

/// The natural logarithm of a normal positive number.
pub fn ln(x: f64) -> f64 {
    debug_assert!(x >= f64::MIN_POSITIVE && x.is_finite(), "{x}");
    // x = 2^n·m with m from 0.71 to 1.41.
    let bits = x.to_bits();
    let mut n = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if m > std::f64::consts::SQRT_2 {
        (m, n) = (m / 2.0, n + 1);
    }
    // ln m = 2·(s + s³/3 + s⁵/5 + …) with |s| < 0.172.
    let s = (m - 1.0) / (m + 1.0);
    let mut sum = 0.0;
    for i in (0..=11).rev() {
        sum = sum * s * s + 1.0 / f64::from(2 * i + 1);
    }
    let n = n as f64;
    n * LN2_HIGH + (2.0 * s * sum + n * LN2_LOW)
}

/// base^exponent for a base from 0, at most `f64::MAX`; 0^0 is 1.
pub fn power(base: f64, exponent: f64) -> f64 {
    if exponent == 0.0 {
        return 1.0;
    }
    if base < f64::MIN_POSITIVE {
        return if exponent > 0.0 { 0.0 } else { f64::MAX };
    }
    let x = exponent * ln(base.min(f64::MAX));
    if x <= 0.0 { exp(x) } else { (1.0 / exp(-x)).min(f64::MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_system() {
        for i in 0..70_000 {
            let x = -f64::from(i) / 100.0;
            let (got, expected) = (exp(x), x.exp());
            assert!((got - expected).abs() <= 1e-15 * expected, "{x}: {got} {expected}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e300), 0.0);
        assert!(exp(-708.0) > 0.0);
    }

    #[test]
    fn ln_agrees_with_the_system() {
        for i in 1..70_000 {
            for x in [f64::from(i) / 1000.0, f64::from(i) * 1e30, f64::from(i) * 1e-300] {
                let (got, expected) = (ln(x), x.ln());
                let error = (got - expected).abs();
                assert!(error <= 1e-15 * expected.abs().max(0.01), "{x}: {got} {expected}");
            }
        }
        assert_eq!(ln(1.0), 0.0);
    }

    #[test]
    fn powers_agree_with_the_system() {
        for (base, exponent) in [(1.75, 7.0), (1.1, 40.0), (0.3, 2.5), (0.3, -2.5), (2.0, 10.0)] {
            let (got, expected) = (power(base, exponent), f64::powf(base, exponent));
            assert!((got - expected).abs() <= 1e-13 * expected, "{base} {exponent}: {got}");
        }
        assert_eq!([power(0.0, 0.0), power(0.0, 2.0), power(0.0, -1.0)], [1.0, 0.0, f64::MAX]);
        assert_eq!(power(1e6, 1e6), f64::MAX);
    }
}
