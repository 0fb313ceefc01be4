//! The best of a list, in order.

/// The indices of the `k` greatest values, greatest first, and the lower index first among equals.
/// Values may be any floats. `order` is room for them.
pub(super) fn best<'a>(order: &'a mut Vec<u32>, values: &[f32], k: usize) -> &'a [u32] {
    let value = |i: u32| values[i as usize];
    let by_value = |a: &u32, b: &u32| value(*b).total_cmp(&value(*a)).then(a.cmp(b));
    order.clear();
    order.extend(0..values.len() as u32);
    // Only the best few need be in order.
    if k < order.len() {
        order.select_nth_unstable_by(k, by_value);
        order.truncate(k);
    }
    order.sort_unstable_by(by_value);
    order
}

/// Values and ids. Both in one integer, as comparing those is several times faster than comparing
/// floats and then ids.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranks {
    keys: Vec<u64>,
}

impl Ranks {
    pub fn clear(&mut self) {
        self.keys.clear();
    }

    /// `value`: finite and not negative. The order of such floats is that of their bits.
    pub fn push(&mut self, value: f32, id: u32) {
        debug_assert!(value.is_finite() && value.is_sign_positive());
        self.keys.push(u64::from(value.to_bits()) << 32 | u64::from(!id));
    }

    /// The `n` greatest, greatest first, and the lower id first among equals.
    pub fn best(&mut self, n: usize) -> impl Iterator<Item = (f32, u32)> {
        if n < self.keys.len() {
            self.keys.select_nth_unstable_by(n, |a, b| b.cmp(a));
            self.keys.truncate(n);
        }
        self.keys.sort_unstable_by(|a, b| b.cmp(a));
        self.keys.iter().map(|key| (f32::from_bits((key >> 32) as u32), !(*key as u32)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_best_are_those_of_a_stable_sort(
            values in prop::collection::vec(0u8..9, 0..60),
            n in 0usize..70,
        ) {
            let values: Vec<f32> = values.iter().map(|v| f32::from(*v) / 7.0).collect();
            let mut expected: Vec<(f32, u32)> = values.iter().copied().zip(0..).collect();
            expected.sort_by(|a, b| b.0.total_cmp(&a.0));
            expected.truncate(n);
            let mut ranks = Ranks::default();
            values.iter().zip(0..).for_each(|(value, id)| ranks.push(*value, id));
            prop_assert_eq!(ranks.best(n).collect::<Vec<_>>(), expected);
        }
    }
}
