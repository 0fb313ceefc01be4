//! The owners of experts if several devices hold experts: each expert has one device, for good, as
//! MoE-Infinity (section 5) places them. So every device's memory holds other experts, a load goes
//! over the owner's link alone, and the place of an expert is known without asking.
//!
//! Devices get experts in proportion to their budgets: each then holds about the same part of its
//! own experts, and so misses about as often as the others. Within a layer the experts are dealt
//! out one by one, so that every layer's, and those of every group that a router chooses within,
//! are spread. The remainder of one layer's division goes into the next one's.

use std::sync::Arc;

/// A layer's experts: how many there are, and the bytes of one.
#[derive(Clone, Copy, Debug)]
pub struct Dealt {
    pub n_experts: usize,
    pub expert_bytes: u64,
}

#[derive(Debug)]
pub struct Owners {
    /// By layer and expert: the number of a device.
    of: Vec<Vec<u8>>,
}

impl Owners {
    /// Deals out the layers' experts to devices with such budgets; one with a budget of 0 gets
    /// none.
    ///
    /// # Panics
    /// If no device has a budget, or there are more than 256.
    pub fn new(layers: &[Option<Dealt>], budgets: &[u64]) -> Owners {
        assert!(budgets.len() <= 256 && budgets.iter().any(|budget| *budget > 0), "{budgets:?}");
        let mut taken = vec![0u64; budgets.len()];
        let mut next = |bytes: u64| {
            // Whose budget is the least full with one more, by cross-multiplication.
            let filled =
                |d: usize, of: usize| u128::from(taken[d] + bytes) * u128::from(budgets[of]);
            let mut devices = (0..budgets.len()).filter(|d| budgets[*d] > 0);
            let first = devices.next().expect("a device with a budget");
            let least = |best, d| if filled(d, best) < filled(best, d) { d } else { best };
            let device = devices.fold(first, least);
            taken[device] += bytes;
            device as u8
        };
        let mut layer = |layer: &Option<Dealt>| match layer {
            Some(Dealt { n_experts, expert_bytes }) => {
                (0..*n_experts).map(|_| next(*expert_bytes)).collect()
            }
            None => Vec::new(),
        };
        Owners { of: layers.iter().map(&mut layer).collect() }
    }

    pub fn device(&self, layer: usize, expert: u32) -> usize {
        self.of[layer][expert as usize].into()
    }
}

/// A device's own experts.
#[derive(Clone, Debug)]
pub struct Own {
    pub owners: Arc<Owners>,
    pub device: usize,
}

impl Own {
    pub fn has(&self, layer: usize, expert: u32) -> bool {
        self.owners.device(layer, expert) == self.device
    }

    /// The number of a layer's experts that the device owns.
    pub fn n_of(&self, layer: usize) -> usize {
        let of_layer = self.owners.of[layer].iter();
        of_layer.filter(|device| usize::from(**device) == self.device).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counts(owners: &Owners, layer: usize, n_devices: usize) -> Vec<usize> {
        let count = |d: usize| owners.of[layer].iter().filter(|of| usize::from(**of) == d).count();
        (0..n_devices).map(count).collect()
    }

    fn layer(n_experts: usize) -> Option<Dealt> {
        Some(Dealt { n_experts, expert_bytes: 100 })
    }

    #[test]
    fn equal_devices_take_turns() {
        let owners = Owners::new(&[layer(4), None, layer(3), layer(3)], &[7, 7]);
        assert_eq!(owners.of, [vec![0, 1, 0, 1], vec![], vec![0, 1, 0], vec![1, 0, 1]]);
        let owners = Owners::new(&[layer(5)], &[9, 0, 9]);
        assert_eq!(owners.of, [[0, 2, 0, 2, 0]]);
        assert_eq!(Owners::new(&[layer(3)], &[0, 1]).of, [[1, 1, 1]]);
    }

    #[test]
    fn a_larger_budget_has_more_of_every_layer() {
        let owners = Owners::new(&[layer(64), layer(64)], &[24 << 30, 8 << 30]);
        for l in 0..2 {
            assert_eq!(counts(&owners, l, 2), [48, 16]);
            // And of every group of consecutive ones.
            for group in owners.of[l].chunks(8) {
                assert_eq!(group.iter().filter(|d| **d == 1).count(), 2, "{group:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn every_expert_has_one_owner_and_shares_are_as_budgets(
            sizes in prop::collection::vec((1usize..40, 1u64..1000), 1..6),
            budgets in prop::collection::vec(prop_oneof![Just(0u64), 1..1u64 << 40], 1..5),
        ) {
            prop_assume!(budgets.iter().any(|budget| *budget > 0));
            let dealt = |(n_experts, expert_bytes)| Some(Dealt { n_experts, expert_bytes });
            let layers: Vec<_> = sizes.iter().copied().map(dealt).collect();
            let owners = Arc::new(Owners::new(&layers, &budgets));
            let mut bytes = vec![0u64; budgets.len()];
            for (l, (n_experts, size)) in sizes.iter().enumerate() {
                let own = |device| Own { owners: owners.clone(), device };
                let n: Vec<usize> = (0..budgets.len()).map(|d| own(d).n_of(l)).collect();
                prop_assert_eq!(n.iter().sum::<usize>(), *n_experts);
                for (d, n) in n.iter().enumerate() {
                    bytes[d] += *n as u64 * size;
                }
            }
            // Where the budgets have room for all and for an expert more of each device but one,
            // each has room for what is its own.
            let there = |of: &[u64]| of.iter().map(|n| u128::from(*n)).sum::<u128>();
            let largest = sizes.iter().map(|(_, bytes)| u128::from(*bytes)).max().unwrap();
            let room = there(&bytes) + (budgets.len() as u128 - 1) * largest;
            for (bytes, budget) in bytes.iter().zip(&budgets) {
                let (bytes, budget) = (u128::from(*bytes), u128::from(*budget));
                prop_assert!(bytes * there(&budgets) <= budget * room, "{} of {}", bytes, room);
            }
        }
    }
}
