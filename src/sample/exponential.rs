//! exp for arguments up to zero, the same bits on every platform: only IEEE 754 sums and products.

/// e^x for x ≤ 0, within 2 units in the last place; 0 below −708 and for −∞.
pub fn exp(x: f64) -> f64 {
    if x < -708.0 {
        return 0.0;
    }
    // x = n·ln 2 + r with |r| ≤ ln 2 / 2; ln 2 in two parts, so that n times the first is exact.
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let n = (x * std::f64::consts::LOG2_E).round();
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    // The Taylor series up to r^13/13!: the next term is below 2^-57 for these r.
    let mut sum = 1.0;
    for i in (1..=13).rev() {
        sum = 1.0 + sum * r / f64::from(i);
    }
    sum * f64::from_bits(((1023 + n as i64) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn agrees_with_the_system() {
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
}
