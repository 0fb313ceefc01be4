//! Slot tables: where a layer's experts are in a device's memory. The tier keeps one for each layer
//! and changes the rows of experts that have come or gone. Callers have copies.

/// A layer's slot table, or a caller's copy of it.
#[derive(Clone, Debug, Default)]
pub struct SlotTable {
    /// u64 [experts, granules]: the addresses of slots, or 0 where the expert is not to be relied
    /// on
    pub addresses: Vec<u64>,
    /// The number of changes so far: tables of a layer with the same number are the same. 0 is a
    /// copy of none.
    version: u64,
}

impl SlotTable {
    /// Without any expert.
    pub(super) fn new(n_addresses: usize) -> SlotTable {
        SlotTable { addresses: vec![0; n_addresses], version: 1 }
    }

    /// Replaces an expert's row.
    pub(super) fn set(&mut self, at: usize, row: impl ExactSizeIterator<Item = u64> + Clone) {
        let to = &mut self.addresses[at..at + row.len()];
        if !to.iter().copied().eq(row.clone()) {
            to.iter_mut().zip(row).for_each(|(to, address)| *to = address);
            self.version += 1;
        }
    }

    /// Makes this a copy of `table`. Returns whether it was another.
    pub(super) fn update(&mut self, table: &SlotTable) -> bool {
        let is_changed = self.version != table.version;
        if is_changed {
            self.addresses.clone_from(&table.addresses);
            self.version = table.version;
        }
        is_changed
    }
}
