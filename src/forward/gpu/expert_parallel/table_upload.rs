//! The upload of a layer's slot table to a peer.

use crate::Result;
use crate::backend::gpu::{Device, DeviceSlice, Event, Pinned, PinnedKind, Stream};
use crate::experts::vram::{GranuleLayout, VramTier};
use crate::model::Model;

/// A table on its way to a peer. Two of these are used in turn, so that one layer's table can be
/// written while the last layer's is being copied.
pub struct TableUpload {
    up: Pinned,
    /// Recorded after the copy of the last table.
    copied: Event,
    /// u64 [experts, granules]: the addresses of pinned slots, or 0
    pub addresses: Vec<u64>,
    /// Whether any address is not 0.
    pub has_any: bool,
}

impl TableUpload {
    pub fn new(gpu: &Device, model: &Model) -> Result<TableUpload> {
        let layouts = model.weights.routed.iter().flatten().map(GranuleLayout::new);
        let n_granules = layouts.map(|layout| layout.n_granules).max().unwrap_or(0);
        let bytes = 8 * n_granules * model.hyper.routing.n_experts;
        let up = Pinned::of(gpu, bytes, PinnedKind::Cached, "a token's routing")?;
        let copied = Event::new(gpu)?;
        Ok(TableUpload { up, copied, addresses: Vec::new(), has_any: false })
    }

    /// Pins the experts of layer `l` that `vram` holds, and replaces their entries in `table`, the
    /// first device's, by the number of this device.
    pub fn pin_layer(
        &mut self,
        vram: Option<&VramTier>,
        l: usize,
        device: usize,
        table: &mut [u64],
    ) {
        self.has_any = false;
        let Some(vram) = vram.filter(|vram| vram.has(l)) else { return };
        self.addresses.resize(table.len(), 0);
        vram.pin_layer(l, &mut self.addresses);
        for (home, _) in table.iter_mut().zip(&self.addresses).filter(|(_, at)| **at != 0) {
            *home = device as u64;
            self.has_any = true;
        }
    }

    /// Queues the upload of the table.
    pub fn upload(&self, stream: &Stream, to: DeviceSlice) -> Result<()> {
        // The copy belongs to the layer before the last, which does not wait for the host any more.
        self.copied.synchronize()?;
        // SAFETY: the last copy out of this memory is done, as was just waited for, and nothing
        // writes here before the next copy is waited for.
        unsafe {
            let table = self.up.bytes_mut(0..8 * self.addresses.len());
            for (bytes, address) in table.chunks_exact_mut(8).zip(&self.addresses) {
                bytes.copy_from_slice(&address.to_le_bytes());
            }
            stream.upload(to, table)?;
        }
        stream.record(&self.copied)
    }
}
