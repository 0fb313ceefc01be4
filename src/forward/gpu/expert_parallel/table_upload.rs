//! The upload of layers' slot tables to a peer.

use crate::Result;
use crate::backend::gpu::{Device, DeviceSlice, Event, Pinned, PinnedKind, Stream};
use crate::experts::vram::{GranuleLayout, SlotTable, VramTier};
use crate::model::Model;

/// A layer's slot table in a peer's memory.
#[derive(Clone, Default)]
pub struct PeerTable {
    pub table: SlotTable,
    /// Whether it has any expert.
    pub has_any: bool,
    is_uploaded: bool,
}

impl PeerTable {
    /// Pins the experts of layer `l` that `vram` holds. Returns whether the table is another.
    pub fn pin_layer(&mut self, vram: &VramTier, l: usize) -> bool {
        let is_changed = vram.pin_layer(l, &mut self.table);
        if is_changed {
            self.has_any = self.table.addresses.iter().any(|at| *at != 0);
            self.is_uploaded = false;
        }
        is_changed
    }
}

/// A table on its way to a peer. Two of these are used in turn, so that one layer's table can be
/// written while the last layer's is being copied.
pub struct TableUpload {
    up: Pinned,
    /// Recorded after the copy of the last table.
    copied: Event,
}

impl TableUpload {
    pub fn new(gpu: &Device, model: &Model) -> Result<TableUpload> {
        let layouts = model.weights.routed.iter().flatten().map(GranuleLayout::new);
        let n_granules = layouts.map(|layout| layout.n_granules).max().unwrap_or(0);
        let bytes = 8 * n_granules * model.hyper.routing.n_experts;
        let up = Pinned::of(gpu, bytes, PinnedKind::Cached, "a token's routing")?;
        Ok(TableUpload { up, copied: Event::new(gpu)? })
    }

    /// Queues the upload of a table, if it has changed since the last one of its layer.
    pub fn upload(&self, stream: &Stream, of: &mut PeerTable, to: DeviceSlice) -> Result<()> {
        if of.is_uploaded {
            return Ok(());
        }
        // The copy belongs to a layer before the last, which does not wait for the host any more.
        self.copied.synchronize()?;
        let addresses = &of.table.addresses;
        // SAFETY: the last copy out of this memory is done, as was just waited for, and nothing
        // writes here before the next copy is waited for.
        unsafe {
            let table = self.up.bytes_mut(0..8 * addresses.len());
            for (bytes, address) in table.chunks_exact_mut(8).zip(addresses) {
                bytes.copy_from_slice(&address.to_le_bytes());
            }
            stream.upload(to, table)?;
        }
        stream.record(&self.copied)?;
        of.is_uploaded = true;
        Ok(())
    }
}
