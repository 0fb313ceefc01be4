//! The way of a token's layer up and down.

use crate::Result;
use crate::backend::gpu::{Device, DeviceSlice, Event, Pinned, PinnedKind, Stream};
use crate::forward::gpu::upload::starts;

/// What comes down of a layer: the route, and where somebody wants them, h and the stream.
pub const PARTS: usize = 3;

/// Where the table begins in what goes up; the layer's number is before it.
const TABLE_AT: usize = 64;

/// Room for what goes up and comes down of every other layer. What a lane's last layer had there
/// has been copied when the host has heard of it.
pub struct PipelineSlot {
    up: Pinned,
    down: Pinned,
    /// After what comes down.
    pub routed: Event,
    /// u64 [experts, granules]: what the device may rely on
    pub addresses: Vec<u64>,
}

impl PipelineSlot {
    /// For tables of so many bytes, and so many that come down.
    pub fn new(gpu: &Device, table_bytes: usize, down_bytes: usize) -> Result<PipelineSlot> {
        let pinned = |bytes| Pinned::of(gpu, bytes, PinnedKind::Cached, "a token's routing");
        let (up, down) = (pinned(TABLE_AT + table_bytes)?, pinned(down_bytes + 64 * PARTS)?);
        Ok(PipelineSlot { up, down, routed: Event::new(gpu)?, addresses: Vec::new() })
    }

    /// Queues the upload of `addresses`.
    pub fn upload_table(&self, stream: &Stream, to: DeviceSlice) -> Result<()> {
        let end = TABLE_AT + 8 * self.addresses.len();
        // SAFETY: what the lane's last layer copied from here has been copied, as the host has
        // heard of it since, and nothing writes here before it hears of this one.
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
        // SAFETY: as above.
        unsafe {
            let word = self.up.bytes_mut(0..4);
            word.copy_from_slice(&number.to_le_bytes());
            stream.upload(to, word)
        }
    }

    /// Queues a part's way down to where it begins.
    pub fn download(&self, stream: &Stream, at: usize, part: DeviceSlice) -> Result<()> {
        assert!(at + part.len() <= self.down.len());
        // SAFETY: in the buffer, by the assertion; nobody uses it until `routed`, which is recorded
        // after it, has been waited for.
        unsafe { stream.download(self.down.as_ptr().add(at), part) }
    }

    /// What has come down, part by part.
    pub fn wait(&self, sizes: &[usize; PARTS]) -> Result<[&[u8]; PARTS]> {
        self.routed.synchronize()?;
        let mut parts = [&[][..]; PARTS];
        for ((part, at), size) in parts.iter_mut().zip(starts(sizes)).zip(sizes) {
            // SAFETY: the copies have been waited for, and the lane's next ones are queued after
            // this pass is done with these.
            *part = unsafe { self.down.bytes(at..at + size) };
        }
        Ok(parts)
    }
}
