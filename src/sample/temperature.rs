//! The temperature, and one that follows the entropy.

use super::candidates::{Candidates, Stage};
use super::math::{ln, power};

/// From `temp − range`, where the model is sure, to `temp + range`, where all tokens are alike.
#[derive(Clone, Debug, PartialEq)]
pub struct DynamicTemp {
    /// 0 or less: the temperature is fixed.
    pub range: f32,
    /// The entropy, as a part of the greatest possible one, counts to this power.
    pub exponent: f32,
}

impl Default for DynamicTemp {
    fn default() -> Self {
        Self { range: 0.0, exponent: 1.0 }
    }
}

pub struct Temperature {
    temp: f32,
    dynamic: Option<DynamicTemp>,
}

impl Temperature {
    pub fn new(temp: f32, dynamic: &DynamicTemp) -> Self {
        Self { temp, dynamic: (dynamic.range > 0.0).then(|| dynamic.clone()) }
    }

    pub fn fixed(temp: f32) -> Self {
        Self { temp, dynamic: None }
    }
}

impl Stage for Temperature {
    fn apply(&mut self, candidates: &mut Candidates) {
        let mut temp = f64::from(self.temp);
        if let Some(dynamic) = &self.dynamic {
            let n = candidates.list.len();
            if n < 2 {
                return;
            }
            let range = f64::from(dynamic.range);
            let (coolest, hottest) = ((temp - range).max(0.0), temp + range);
            // Rounding must not lead below 0.
            let entropy = (candidates.entropy().nats / ln(n as f64)).max(0.0);
            temp = coolest + (hottest - coolest) * power(entropy, f64::from(dynamic.exponent));
        }
        match temp > 0.0 {
            true => candidates.scale(temp),
            false => candidates.keep_best(1),
        }
    }

    fn enough(&self, best: Option<usize>) -> Option<usize> {
        match self.dynamic {
            None if self.temp <= 0.0 => Some(1),
            None => best,
            // The entropy is of all, but the best stays the best.
            Some(_) => best.filter(|best| *best == 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::testing::{after, assert_near, of};
    use super::*;

    const TENTHS: [f32; 4] = [0.1, 0.2, 0.3, 0.4];

    fn dynamic(temp: f32, range: f32, exponent: f32) -> Temperature {
        Temperature::new(temp, &DynamicTemp { range, exponent })
    }

    #[test]
    fn probabilities_are_raised_to_its_inverse() {
        let same = [(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4)];
        assert_near(&after(of(&TENTHS), &mut Temperature::fixed(1.0)), &same);
        let squares = [(0, 1.0 / 30.0), (1, 4.0 / 30.0), (2, 9.0 / 30.0), (3, 16.0 / 30.0)];
        assert_near(&after(of(&TENTHS), &mut Temperature::fixed(0.5)), &squares);
        for temp in [0.0, -1.0] {
            assert_near(&after(of(&TENTHS), &mut Temperature::fixed(temp)), &[(3, 1.0)]);
        }
    }

    /// An entropy of 1.279854 nats, of at most ln 4, is 0.923220 of it.
    #[test]
    fn a_dynamic_one_follows_the_entropy() {
        let expected = |temp: f64| {
            let p: Vec<f64> = TENTHS.iter().map(|p| f64::from(*p).powf(1.0 / temp)).collect();
            let total: f64 = p.iter().sum();
            (0..).zip(p.iter().map(|p| p / total)).collect::<Vec<(u32, f64)>>()
        };
        let got = after(of(&TENTHS), &mut dynamic(1.0, 0.5, 1.0));
        assert_near(&got, &expected(0.5 + 0.923220));
        let got = after(of(&TENTHS), &mut dynamic(1.0, 0.5, 2.0));
        assert_near(&got, &expected(0.5 + 0.923220 * 0.923220));
        // Below 0 it ends at 0, and all alike are as hot as can be.
        let got = after(of(&TENTHS), &mut dynamic(0.2, 0.8, 1.0));
        assert_near(&got, &expected(0.923220));
        let got = after(of(&[0.25; 4]), &mut dynamic(1.0, 0.5, 3.0));
        assert_near(&got, &[(0, 0.25), (1, 0.25), (2, 0.25), (3, 0.25)]);
    }
}
