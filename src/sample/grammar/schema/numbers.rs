//! Numbers of a schema: which of them llguidance takes and keeps the meaning of.

use serde_json::Value;

/// Whole numbers up to here are exact in llguidance, which computes with `f64`.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// Counts up to here are enforced.
const MAX_COUNT: f64 = 1_000_000.0;

/// The bounds of `f64` are bounds of every number there is.
const NO_BOUND: f64 = 1.797e308;

/// A bound of a number.
#[derive(Debug, PartialEq)]
pub enum Bound {
    At(Value),
    /// All numbers are within it.
    None,
    TooLarge,
    NotNumber,
}

pub fn bound(value: &Value, is_minimum: bool) -> Bound {
    let Some(number) = value.as_f64() else { return Bound::NotNumber };
    let outward = if is_minimum { -number } else { number };
    match number.abs() {
        _ if outward >= NO_BOUND => Bound::None,
        size if size <= MAX_EXACT => Bound::At(value.clone()),
        _ => Bound::TooLarge,
    }
}

/// A count, also one that is written `1.0`: the count, or why it is none.
pub fn count(value: &Value) -> Result<u64, &'static str> {
    match value.as_f64() {
        Some(n) if n >= 0.0 && n.fract() == 0.0 && n <= MAX_COUNT => Ok(n as u64),
        Some(n) if n >= 0.0 && n.fract() == 0.0 => Err("the number is too large"),
        _ => Err("it is no count"),
    }
}

/// Whether llguidance writes the number, and those in an array or an object, as they are.
pub fn is_exact(value: &Value) -> bool {
    match value {
        Value::Number(number) => {
            let is_small = number.as_f64().is_some_and(|n| n.abs() <= MAX_EXACT);
            is_small || number.is_f64()
        }
        Value::Array(items) => items.iter().all(is_exact),
        Value::Object(fields) => fields.values().all(is_exact),
        _ => true,
    }
}

/// A divisor as llguidance keeps it: a whole number, and how often ten divides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divisor {
    coefficient: u32,
    exponent: u32,
}

impl Divisor {
    /// `None` for a number that llguidance does not take.
    pub fn new(value: &Value) -> Option<Divisor> {
        let mut number = value.as_f64().filter(|n| *n > 0.0)?;
        let mut exponent = 0;
        while number.fract() != 0.0 {
            number *= 10.0;
            exponent += 1;
            if exponent > 9 {
                return None;
            }
        }
        let coefficient = (number <= f64::from(u32::MAX)).then_some(number as u32)?;
        Some(Divisor { coefficient, exponent })
    }

    /// The least common multiple; `None` where llguidance's numbers overflow on the way.
    pub fn with(self, other: Divisor) -> Option<Divisor> {
        let exponent = self.exponent.max(other.exponent);
        let scaled =
            |one: Divisor| one.coefficient.checked_mul(10u32.checked_pow(exponent - one.exponent)?);
        let (a, b) = (scaled(self)?, scaled(other)?);
        let (mut x, mut y) = (a, b);
        while y != 0 {
            (x, y) = (y, x % y);
        }
        Some(Divisor { coefficient: a.checked_mul(b)? / x, exponent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn bounds_are_sorted_by_what_they_mean() {
        for (value, is_minimum, expected) in [
            (json!(3), true, Bound::At(json!(3))),
            (json!(-9007199254740991i64), true, Bound::At(json!(-9007199254740991i64))),
            (json!(i64::MAX), false, Bound::TooLarge),
            (json!(u64::MAX), false, Bound::TooLarge),
            (json!(1e30), false, Bound::TooLarge),
            (json!(f64::MAX), false, Bound::None),
            (json!(f64::MAX), true, Bound::TooLarge),
            (json!(f64::MIN), true, Bound::None),
            (json!("1"), true, Bound::NotNumber),
        ] {
            assert_eq!(bound(&value, is_minimum), expected, "{value}");
        }
        assert_eq!(count(&json!(2.0)), Ok(2));
        assert!([json!(-1), json!(1.5), json!("2"), json!(1e12)].iter().all(|n| count(n).is_err()));
        assert!(is_exact(&json!([1, 0.1, { "a": 1e300 }])) && !is_exact(&json!([[i64::MAX]])));
    }

    #[test]
    fn divisors_do_not_overflow() {
        let of = |value: Value| Divisor::new(&value);
        assert_eq!(of(json!(0.25)), Some(Divisor { coefficient: 25, exponent: 2 }));
        assert!(
            [json!(0), json!(-1), json!(1e-300), json!(1e10)].into_iter().all(|n| of(n).is_none())
        );
        let (cent, million) = (of(json!(0.01)).unwrap(), of(json!(1_000_000)).unwrap());
        assert!(cent.with(million).is_some());
        assert!(of(json!(4_000_000_007u32)).unwrap().with(of(json!(3)).unwrap()).is_none());
    }
}
