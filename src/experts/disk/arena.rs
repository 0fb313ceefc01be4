//! The slots of one size class, spread over nodes of memory by their numbers.

use crate::experts::HostMemory;
use crate::experts::memory::Region;
use crate::experts::numa::Node;
use std::io;
use std::ptr::NonNull;

/// Slots in one region for each node, or in a single one.
#[derive(Debug)]
pub struct Arena {
    parts: Vec<Region>,
    slot_bytes: usize,
}

impl Arena {
    /// Slots with numbers that follow each other are on different nodes, so that each node has as
    /// many of those that are taken, and of an expert's granules.
    pub fn new(n_slots: usize, slot_bytes: usize, nodes: &[Node]) -> io::Result<Arena> {
        let n_parts = nodes.len().max(1);
        let n_slots = |part: usize| n_slots / n_parts + usize::from(part < n_slots % n_parts);
        let parts = (0..n_parts).map(|part| Region::new(n_slots(part) * slot_bytes));
        let parts = parts.collect::<io::Result<Vec<_>>>()?;
        nodes.iter().zip(&parts).for_each(|(node, part)| node.hold(part));
        Ok(Arena { parts, slot_bytes })
    }

    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        self.parts.iter()
    }

    /// The parts as memory that a device can copy from.
    pub fn memory(&self) -> impl Iterator<Item = HostMemory> {
        let slot_bytes = self.slot_bytes;
        self.parts.iter().filter(|part| !part.is_empty()).map(move |part| {
            let start = NonNull::new(part.ptr()).expect("a mapped region");
            HostMemory { start, bytes: part.len(), slot_bytes }
        })
    }

    /// The number of a slot's node.
    pub fn part(&self, slot: u32) -> usize {
        slot as usize % self.parts.len()
    }

    pub fn slot(&self, slot: u32) -> *mut u8 {
        let part = &self.parts[self.part(slot)];
        let at = slot as usize / self.parts.len() * self.slot_bytes;
        assert!(at + self.slot_bytes <= part.len());
        // SAFETY: in the region, by the assertion.
        unsafe { part.ptr().add(at) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Makes up this number of nodes; the system need not have them.
    fn nodes(n: usize) -> Vec<Node> {
        let node = |number| Node { number, processors: vec![0], memory_bytes: 1 };
        (0..n).map(node).collect()
    }

    #[test]
    fn slots_do_not_overlap_and_every_node_has_as_many() {
        for (n_slots, n_nodes) in [(1, 0), (7, 0), (7, 2), (8, 3), (2, 3)] {
            let arena = Arena::new(n_slots, 4096, &nodes(n_nodes)).unwrap();
            let mut starts: Vec<_> = (0..n_slots as u32).map(|i| arena.slot(i).addr()).collect();
            starts.sort_unstable();
            assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 4096));
            let mut of_node = BTreeMap::new();
            (0..n_slots as u32).for_each(|i| *of_node.entry(arena.part(i)).or_insert(0) += 1);
            let counts: Vec<usize> = of_node.into_values().collect();
            assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
            assert_eq!(counts.len(), n_nodes.clamp(1, n_slots));
        }
    }

    #[test]
    #[should_panic(expected = "slot_bytes")]
    fn a_slot_that_is_not_there_is_refused() {
        Arena::new(3, 4096, &nodes(2)).unwrap().slot(3);
    }
}
