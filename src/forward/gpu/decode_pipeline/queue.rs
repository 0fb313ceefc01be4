//! The host's record of the layers that it has queued.

use crate::Result;
use crate::backend::gpu::host_waits::Waiting;
use crate::backend::gpu::matvec::MAX_TOKENS;
use crate::backend::gpu::{Device, DeviceSlice, Graph, Pinned, PinnedKind, Stream};
use crate::experts::vram::{Fence, GranuleLayout, SlotTable, VramTiers};
use crate::forward::gpu::decode_pipeline::slot::{PARTS, PipelineSlot, TokenRoutes};
use crate::forward::gpu::expert_parallel::peer::Peer;
use crate::forward::gpu::upload::Staging;
use crate::forward::gpu::workspace::{RouteParts, expert_width, n_input_floats};
use crate::model::Model;
use std::time::{Duration, Instant};

/// Layers use the slots in turn: one is filled while the copies of the other may still be read.
const SLOTS: usize = 2;

/// The time that a failed pass has to come to an end before its waits are taken for the reason.
const GRACE: Duration = Duration::from_secs(1);

/// The graphs that follow a layer's look-up.
pub struct ExpertGraphs {
    /// The resident experts.
    pub resident: Graph,
    /// The sum of all experts and the residual.
    pub sum: Graph,
}

/// The host's state of a layer, kept from token to token.
pub struct QueuedLayer {
    /// The pipeline slot that the layer uses.
    pub slot: usize,
    /// The slot table of the device's own experts.
    pub own: SlotTable,
    /// u64 [experts, granules]: the same with the numbers of peers instead of the addresses of
    /// their slots
    pub table: Vec<u64>,
    /// Granules that the table has no place of.
    pub n_absent: usize,
    /// Whether the device's memory has the table.
    pub is_uploaded: bool,
    /// By the number of rows, from one on.
    pub graphs: [Option<ExpertGraphs>; MAX_TOKENS],
}

impl QueuedLayer {
    fn new(slot: usize, n_addresses: usize) -> QueuedLayer {
        QueuedLayer {
            slot,
            own: SlotTable::default(),
            table: vec![0; n_addresses],
            n_absent: n_addresses,
            // Both are zero.
            is_uploaded: true,
            graphs: [const { None }; MAX_TOKENS],
        }
    }

    /// Combines the devices' own tables of layer `l`.
    pub fn combine(&mut self, l: usize, peers: &[Peer]) {
        self.table.fill(0);
        self.table[..self.own.addresses.len()].copy_from_slice(&self.own.addresses);
        for peer in peers {
            let of_peer = self.table.iter_mut().zip(peer.slot_table(l));
            of_peer.filter(|(_, at)| **at != 0).for_each(|(home, _)| *home = peer.device() as u64);
        }
        self.n_absent = self.table.iter().filter(|at| **at == 0).count();
        self.is_uploaded = false;
    }
}

/// The layers of a token, or of a step of several rows, that are queued.
pub struct DecodePipeline {
    pub slots: [PipelineSlot; SLOTS],
    /// The routing of a token that is one graph.
    pub routes: TokenRoutes,
    /// By layer; none if the layer has no routed experts.
    pub layers: Vec<Option<QueuedLayer>>,
    /// The layer that was queued last, whose routing the host has not read.
    pub pending: Option<PendingLayer>,
    /// Layers whose slots are pinned.
    pub pinned: Vec<usize>,
    /// Whether streams may wait for the host. If not, the sum of a layer with experts that are not
    /// resident is queued once the host has handled its misses.
    pub may_wait: bool,
    /// The layers at which the device may wait for the host, the earliest first.
    pub waits: Vec<LayerWait>,
    /// Mapped memory, u32 [1]: the number of the last layer whose misses were handled, or which had
    /// none.
    go: Pinned,
    /// The stream for slot tables. Its copies wait for nothing: a copy that stood behind a stream's
    /// wait for the host would hold up the copies that end the wait.
    pub table_stream: Stream,
    /// The stream for experts that a look-up missed, beside the stream of the layers, which waits
    /// for them.
    pub miss_stream: Stream,
    /// The staging buffer of `miss_stream`. It must never wait for the stream of the layers, which
    /// may wait for the host.
    pub miss_staging: Staging,
    /// The number of the last layer with experts that are not resident.
    pub number: u32,
    /// The experts that the last layer's rows have chosen, each once.
    pub used: Vec<u32>,
}

/// A wait for the host.
pub struct LayerWait {
    pub number: u32,
    /// The layer's pipeline slot.
    pub slot: usize,
    /// Dropped when what ends the wait is queued.
    _waiting: Waiting,
}

/// A layer whose slots are pinned.
#[derive(Clone, Copy)]
pub struct PinnedLayer {
    pub slot: usize,
    /// The layer's number, if some of its experts are not resident.
    pub number: Option<u32>,
}

/// A layer that is queued and whose routing the host has not read.
pub struct PendingLayer {
    pub l: usize,
    pub pinned: PinnedLayer,
    /// Bytes of each part that is downloaded.
    pub sizes: [usize; PARTS],
    /// Behind the layer's sum, which runs once `go` is written. None if the sum is not queued.
    pub end: Option<Fence>,
}

impl DecodePipeline {
    /// For passes of up to MAX_TOKENS rows.
    pub fn new(gpu: &Device, model: &Model) -> Result<DecodePipeline> {
        let (hyper, routing) = (&model.hyper, &model.hyper.routing);
        let (n_experts, width) = (routing.n_experts, expert_width(hyper, &model.weights));
        let mut n_routed = 0;
        let mut layer = |n_granules: usize| {
            n_routed += 1;
            QueuedLayer::new(n_routed % SLOTS, n_experts * n_granules)
        };
        let layouts = model.weights.routed.iter().map(|l| l.as_ref().map(GranuleLayout::new));
        let n_granules = layouts.map(|layout| layout.map(|l| l.n_granules)).collect::<Vec<_>>();
        let layers = n_granules.iter().map(|n| n.map(&mut layer)).collect();
        let n_granules = n_granules.into_iter().flatten().max().unwrap_or(0);
        let rows = 2 * MAX_TOKENS * width + n_input_floats(&model.weights, MAX_TOKENS, routing.k);
        let down = RouteParts::new(MAX_TOKENS, routing.k, n_experts).n_bytes() + 4 * rows;
        let table = 8 * n_experts * n_granules;
        let slots = [PipelineSlot::new(gpu, table, down)?, PipelineSlot::new(gpu, table, down)?];
        let route = RouteParts::new(1, routing.k, n_experts).n_bytes();
        let routes = TokenRoutes::new(gpu, hyper.n_layers, route)?;
        // The sums of all experts of the rows, and a table for each granule as it is loaded or for
        // each part of those that are read in place.
        let sums_bytes = 4 * MAX_TOKENS * routing.k * width;
        let tables_bytes = 8 * MAX_TOKENS * routing.k * n_granules * (n_granules + 4);
        let miss_staging = Staging::new(gpu, sums_bytes + tables_bytes + (4 << 10), 0)?;
        if let Some(why) = &gpu.info().no_waits {
            let index = gpu.info().index;
            log::info!("GPU {index} does not wait for the CPU within a layer: {why}");
        }
        let go = Pinned::of(gpu, 4, PinnedKind::Mapped, "a token's routing")?;
        go.store_word(0, 0);
        Ok(DecodePipeline {
            slots,
            routes,
            layers,
            pending: None,
            pinned: Vec::with_capacity(SLOTS),
            may_wait: gpu.info().no_waits.is_none(),
            waits: Vec::with_capacity(SLOTS),
            go,
            table_stream: Stream::urgent(gpu)?,
            miss_stream: Stream::urgent(gpu)?,
            miss_staging,
            number: 0,
            used: Vec::new(),
        })
    }

    /// All layers that are pinned get the number of the last one that was not whole, as a whole
    /// layer does.
    pub fn keep_number(&self) {
        self.slots.iter().for_each(|slot| slot.set_number(self.number));
    }

    /// Forgets the layers of a pass and unpins them. Devices do not use them.
    pub fn release_all(&mut self, tiers: &VramTiers) {
        self.pending = None;
        self.waits.clear();
        self.pinned.drain(..).for_each(|l| tiers.unpin_layer(l, &[], None));
    }

    /// u32 [1]: the word that the stream of the layers waits for
    pub fn go(&self) -> DeviceSlice<'_> {
        self.go.slice(0..4)
    }

    /// Lets the stream of the layers wait until the misses of a layer are handled.
    pub fn wait_for_misses(&mut self, stream: &Stream, number: u32, slot: usize) -> Result<()> {
        let _waiting = stream.wait_value(self.go.slice(0..4), number)?;
        self.waits.push(LayerWait { number, slot, _waiting });
        Ok(())
    }

    /// The misses of layer `number` are handled when what `miss_stream` has queued is done.
    pub fn go_on(&self, number: u32) -> Result<()> {
        self.miss_stream.write_value(self.go(), number)?;
        // Some drivers start queued work only when they are asked.
        self.miss_stream.is_done().map(drop)
    }

    /// Whether the sum of the pending layer is not queued.
    pub fn is_sum_held(&self) -> bool {
        self.pending.as_ref().is_some_and(|pending| pending.end.is_none())
    }

    /// Waits for the streams of a pass that has failed, that of slot tables among them: it may have
    /// failed before another stream was told to wait for a table. If they do not end, something
    /// stands behind a wait of theirs; then releases them from every wait, and lets them wait no
    /// more.
    pub fn drain(&mut self, stream: &Stream) -> Result<()> {
        let start = Instant::now();
        let are_done = |pipeline: &Self| -> Result<bool> {
            Ok(stream.is_done()?
                && pipeline.miss_stream.is_done()?
                && pipeline.table_stream.is_done()?)
        };
        while !are_done(self)? {
            if start.elapsed() > GRACE {
                self.may_wait = false;
                // Again and again: an earlier layer's write may come after it.
                self.release(self.number);
            }
            if start.elapsed() > 10 * GRACE {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Releases the device from a wait, at once.
    pub fn release(&self, number: u32) {
        self.go.store_word(0, number);
    }

    pub fn layer(&self, l: usize) -> &QueuedLayer {
        self.layers[l].as_ref().expect("a layer with routed experts")
    }

    pub fn layer_mut(&mut self, l: usize) -> &mut QueuedLayer {
        self.layers[l].as_mut().expect("a layer with routed experts")
    }
}
