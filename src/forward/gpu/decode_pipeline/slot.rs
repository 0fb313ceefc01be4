//! A pipeline slot: the pinned host memory through which a layer's slot table is uploaded and its
//! routing is downloaded.

use crate::Result;
use crate::backend::gpu::{Device, DeviceSlice, Event, Pinned, PinnedKind, Stream};
use crate::forward::gpu::upload::starts;

/// The parts that are downloaded: the route, and h and the residual stream if they are wanted.
pub const PARTS: usize = 3;

/// The table's offset in the memory for uploads, behind the layer's number.
const TABLE_AT: usize = 64;

/// Layers use the slots in turn. When a layer begins to use a slot, the host has read the routing
/// of the layer that used it before, so that layer's copies are done.
pub struct PipelineSlot {
    up: Pinned,
    down: Pinned,
    /// Recorded behind the downloads.
    pub routed: Event,
    /// u64 [experts, granules]: the addresses of pinned slots, or 0
    pub addresses: Vec<u64>,
}

impl PipelineSlot {
    /// For tables and downloads of up to these sizes.
    pub fn new(gpu: &Device, table_bytes: usize, down_bytes: usize) -> Result<PipelineSlot> {
        let pinned = |bytes| Pinned::of(gpu, bytes, PinnedKind::Cached, "a token's routing");
        let (up, down) = (pinned(TABLE_AT + table_bytes)?, pinned(down_bytes + 64 * PARTS)?);
        Ok(PipelineSlot { up, down, routed: Event::new(gpu)?, addresses: Vec::new() })
    }

    /// Queues the upload of `addresses`.
    pub fn upload_table(&self, stream: &Stream, to: DeviceSlice) -> Result<()> {
        let end = TABLE_AT + 8 * self.addresses.len();
        // SAFETY: the last copy out of this memory is done, as the host has since read the routing
        // of that layer, and nothing writes here before it has read this layer's.
        unsafe {
            let table = self.up.bytes_mut(TABLE_AT..end);
            for (bytes, address) in table.as_chunks_mut::<8>().0.iter_mut().zip(&self.addresses) {
                *bytes = address.to_le_bytes();
            }
            stream.upload(to, table)
        }
    }

    /// Queues the upload of the layer's number.
    pub fn upload_number(&self, stream: &Stream, to: DeviceSlice, number: u32) -> Result<()> {
        // SAFETY: as in `upload_table`.
        unsafe {
            let word = self.up.bytes_mut(0..4);
            word.copy_from_slice(&number.to_le_bytes());
            stream.upload(to, word)
        }
    }

    /// Queues the download of a part to offset `at`.
    pub fn download(&self, stream: &Stream, at: usize, part: DeviceSlice) -> Result<()> {
        assert!(at + part.len() <= self.down.len());
        // SAFETY: the part fits the buffer, by the assertion. The buffer is not used until
        // `routed`, which is recorded behind the copy, has been waited for.
        unsafe { stream.download(self.down.as_ptr().add(at), part) }
    }

    /// Waits for the downloads and returns the parts.
    pub fn wait(&self, sizes: &[usize; PARTS]) -> Result<[&[u8]; PARTS]> {
        self.routed.synchronize()?;
        let mut parts = [&[][..]; PARTS];
        for ((part, at), size) in parts.iter_mut().zip(starts(sizes)).zip(sizes) {
            // SAFETY: the copies are done, and the slot's next copies are queued after the pass has
            // read these parts.
            *part = unsafe { self.down.bytes(at..at + size) };
        }
        Ok(parts)
    }
}
