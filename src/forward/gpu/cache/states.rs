//! The states of a cache's layers: to keep in host memory and to put back. Their values are in the
//! order of `model::kv::States`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::ops::StateSize;
use crate::forward::gpu::cache::{GpuCache, SlotRanges};
use crate::model::kv::LayerShape;

impl GpuCache {
    /// A recurrence's past inputs and its state, of which either may be empty; or what is kept of a
    /// block that is not whole yet, and nothing.
    pub fn state(&self, slot: usize) -> [DeviceSlice<'_>; 2] {
        let ranges @ SlotRanges { shape, first, second, kept } = self.ranges(slot);
        let size = ranges.state_size().unwrap_or_else(|| panic!("slot {slot} has no state"));
        let past = if let LayerShape::State(_) = shape { first } else { kept };
        [(past, size.n_past), (second, size.n_state)]
            .map(|(range, n)| self.buffer.slice(range.start..range.start + 4 * n))
    }

    /// Whether some layer on the device has a state.
    pub fn has_state(&self) -> bool {
        self.recurrent().next().is_some()
    }

    /// Values of all states.
    pub fn n_state_values(&self) -> usize {
        self.n_values_of(|_| true)
    }

    /// Values of the states of these slots.
    pub fn n_values_of(&self, is_meant: impl Fn(usize) -> bool) -> usize {
        let meant = self.recurrent().filter(|(slot, _)| is_meant(*slot));
        meant.map(|(_, size)| size.n_past + size.n_state).sum()
    }

    /// Appends a slot's past inputs and its state to `values`.
    pub fn read_state(&self, slot: usize, values: &mut Vec<f32>) -> Result<()> {
        let parts = self.state(slot).into_iter().flat_map(|all| self.state_parts(all));
        self.copies.download(parts.map(|part| (part, ())), |(), bytes| {
            values.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
        })
    }

    /// Puts all states back.
    pub fn restore_states(&self, values: &[f32]) -> Result<()> {
        assert_eq!(values.len(), self.n_state_values());
        let mut values = values.iter();
        let states = self.recurrent().flat_map(|(slot, _)| self.state(slot));
        let parts = states.flat_map(|all| self.state_parts(all)).map(|part| (part, ()));
        self.copies.upload(parts, |(), bytes| {
            for (to, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(&mut values) {
                *to = value.to_le_bytes();
            }
        })
    }

    /// Copies the states of a cache with the same layers.
    pub fn copy_states(&self, other: &GpuCache) -> Result<()> {
        let stream = self.copies.stream();
        for (slot, _) in self.recurrent() {
            let parts = self.state(slot).into_iter().zip(other.state(slot));
            let mut parts = parts.filter(|(to, _)| !to.is_empty());
            parts.try_for_each(|(to, from)| stream.copy(to, from))?;
        }
        stream.synchronize()
    }

    /// Resets all states to zero.
    pub fn clear_states(&self) -> Result<()> {
        let stream = self.copies.stream();
        for (slot, _) in self.recurrent() {
            let mut parts = self.state(slot).into_iter().filter(|part| !part.is_empty());
            parts.try_for_each(|part| stream.fill(part, 0))?;
        }
        stream.synchronize()
    }

    fn state_parts<'a>(&self, all: DeviceSlice<'a>) -> impl Iterator<Item = DeviceSlice<'a>> {
        let most = self.copies.most_bytes();
        let starts = (0..all.len()).step_by(most);
        starts.map(move |start| all.slice(start..all.len().min(start + most)))
    }

    /// The slots with a state, in their order.
    fn recurrent(&self) -> impl Iterator<Item = (usize, StateSize)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(slot, ranges)| Some((slot, ranges.as_ref()?.state_size()?)))
    }
}

impl SlotRanges {
    /// `None` if the slot has no state.
    fn state_size(&self) -> Option<StateSize> {
        match self.shape {
            LayerShape::State(size) => Some(size),
            LayerShape::Latent { kept: n_past @ 1.., .. } => Some(StateSize { n_past, n_state: 0 }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::Emulated;
    use crate::backend::gpu::emulated::Config;
    use crate::forward::gpu::cache::CacheCopies;
    use crate::model::kv::CacheType;
    use std::sync::Arc;

    #[test]
    fn states_come_back_and_are_copied_and_cleared() {
        let state = |n_past, n_state| LayerShape::State(StateSize { n_past, n_state });
        let heads = LayerShape::Heads { n_head_kv: 1, k_dim: 8, v_dim: 8 };
        let gpu = Emulated::devices(&Config::default()).swap_remove(0);
        // No room for all of a state at once.
        let copies = Arc::new(CacheCopies::of_size(&gpu, 64).unwrap());
        let cache = || {
            let types = [CacheType::F32; 2];
            // The first layer is on the CPU.
            let on_device = |slot: usize| slot > 0;
            // Convolutions without a state, and states without a convolution.
            let latent = LayerShape::Latent { dim: 8, index: 2, kept: 12 };
            let shapes = [state(20, 24), heads, state(20, 24), state(20, 0), state(0, 24), latent];
            GpuCache::new(&copies, &shapes, &on_device, 4, types).unwrap()
        };
        let all = |cache: &GpuCache| {
            let mut values = Vec::new();
            [2, 3, 4, 5].iter().for_each(|slot| cache.read_state(*slot, &mut values).unwrap());
            values
        };
        let (first, second) = (cache(), cache());
        let n = first.n_state_values();
        assert!(first.has_state());
        assert_eq!(all(&first), vec![0.0; n]);
        let values: Vec<f32> = (0..n).map(|i| i as f32 - 7.5).collect();
        first.restore_states(&values).unwrap();
        assert_eq!(all(&first), values);
        second.copy_states(&first).unwrap();
        first.clear_states().unwrap();
        assert_eq!((all(&first), all(&second)), (vec![0.0; n], values));
    }
}
