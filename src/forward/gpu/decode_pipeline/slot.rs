//! A pipeline slot: the pinned host memory through which a layer's slot table is uploaded, and
//! which kernels read and write in place: the layer's number, and its routing.

use crate::Result;
use crate::backend::gpu::slots::Post;
use crate::backend::gpu::{Device, DeviceSlice, Event, Pinned, PinnedKind, Stream};
use crate::forward::gpu::upload::starts;
use std::ops::Range;

/// The parts that the host gets: the route, h and the residual stream if they are wanted, and what
/// experts read if it is not h.
pub const PARTS: usize = 4;

/// The table's offset in the memory for the device, behind the layer's number.
const TABLE_AT: usize = 64;

/// Layers use the slots in turn. When a layer begins to use a slot, the host has read the routing
/// of the layer that used it before, so what that layer read and wrote here is done.
pub struct PipelineSlot {
    up: Pinned,
    down: Pinned,
    /// Recorded behind the look-up, which posts.
    pub routed: Event,
}

impl PipelineSlot {
    /// For tables and routings of up to these sizes.
    pub fn new(gpu: &Device, table_bytes: usize, down_bytes: usize) -> Result<PipelineSlot> {
        let pinned = |bytes| Pinned::of(gpu, bytes, PinnedKind::Mapped, "a token's routing");
        let (up, down) = (pinned(TABLE_AT + table_bytes)?, pinned(down_bytes + 64 * PARTS)?);
        Ok(PipelineSlot { up, down, routed: Event::new(gpu)? })
    }

    /// Queues the upload of a slot table.
    pub fn upload_table(&self, stream: &Stream, to: DeviceSlice, addresses: &[u64]) -> Result<()> {
        let end = TABLE_AT + 8 * addresses.len();
        // SAFETY: the last copy out of this memory is done, as the host has since read the routing
        // of that layer, and nothing writes here before it has read this layer's.
        unsafe {
            let table = self.up.bytes_mut(TABLE_AT..end);
            for (bytes, address) in table.as_chunks_mut::<8>().0.iter_mut().zip(addresses) {
                *bytes = address.to_le_bytes();
            }
            stream.upload(to, table)
        }
    }

    /// Sets the layer's number for the look-up, which is queued afterwards.
    pub fn set_number(&self, number: u32) {
        // SAFETY: as in `upload_table`: the last look-up that read it is done.
        unsafe { self.up.bytes_mut(0..4) }.copy_from_slice(&number.to_le_bytes());
    }

    /// u32 [1]: the layer's number, as the look-up sees it
    pub fn number(&self) -> DeviceSlice<'_> {
        self.up.slice(0..4)
    }

    /// The parts of a layer that the host gets, and their sizes.
    pub fn post<'a>(
        &'a self,
        route: DeviceSlice<'a>,
        rows: Option<[DeviceSlice<'a>; 2]>,
        latent: Option<DeviceSlice<'a>>,
    ) -> (Post<'a>, [usize; PARTS]) {
        let row_bytes = rows.map_or(0, |[h, _]| h.len());
        let latent_bytes = latent.map_or(0, DeviceSlice::len);
        let sizes = [route.len(), row_bytes, row_bytes, latent_bytes];
        let mut at = starts(&sizes).skip(1);
        let mut next = || at.next().expect("four parts");
        let (at, to) = ([next(), next(), next()], self.down.slice(0..self.down.len()));
        (Post { route, rows, latent, to, at }, sizes)
    }

    /// Waits for what was posted and returns the parts.
    pub fn wait(&self, sizes: &[usize; PARTS]) -> Result<[&[u8]; PARTS]> {
        self.routed.synchronize_watched()?;
        let mut parts = [&[][..]; PARTS];
        for ((part, at), size) in parts.iter_mut().zip(starts(sizes)).zip(sizes) {
            // SAFETY: it is written, and the slot's next kernels are queued after the pass has read
            // these parts.
            *part = unsafe { self.down.bytes(at..at + size) };
        }
        Ok(parts)
    }
}

/// Mapped memory for the routing of all layers of a token at once.
pub struct TokenRoutes {
    down: Pinned,
    route_bytes: usize,
    layer_bytes: usize,
}

impl TokenRoutes {
    /// For so many layers with a route of this size each.
    pub fn new(gpu: &Device, n_layers: usize, route_bytes: usize) -> Result<TokenRoutes> {
        let layer_bytes = route_bytes.next_multiple_of(64);
        let bytes = (n_layers * layer_bytes).max(64);
        let down = Pinned::of(gpu, bytes, PinnedKind::Mapped, "a token's routing")?;
        Ok(TokenRoutes { down, route_bytes, layer_bytes })
    }

    /// The place of a layer's route.
    pub fn post<'a>(&'a self, l: usize, route: DeviceSlice<'a>) -> Post<'a> {
        let to = self.down.slice(self.range(l));
        Post { route, rows: None, latent: None, to, at: [0; 3] }
    }

    /// A layer's route. The caller has waited for the token.
    pub fn route(&self, l: usize) -> &[u8] {
        // SAFETY: it is written, and no graph of a token is launched before the pass has read it.
        unsafe { self.down.bytes(self.range(l)) }
    }

    fn range(&self, l: usize) -> Range<usize> {
        let start = l * self.layer_bytes;
        start..start + self.route_bytes
    }
}
