//! A token's layers without a stop. The device looks up by itself where the experts are that a
//! router chose, and goes on if all are there; the host has queued the next layer by then, hears of
//! the routing later, and acts on what is missing alone: it has it brought or computes it, and
//! lets the device go on.
//!
//! A layer's places are pinned (`vram`) from before it is queued until the device is through with
//! it. They stand in a table in the device's memory, which is written where it has changed since
//! the last token. Where it has not every expert, the device waits between those that are there and
//! their sum for a word in its memory, `go`, that holds the number of the last such layer whose
//! experts are computed: the look-up writes it where nothing is missing, the host where something
//! was. What is before the wait and behind it are graphs.

mod slot;

use super::acts::GpuActs;
use super::experts::{DecodePairs, device_shape};
use super::pass::Pass;
use crate::Result;
use crate::backend::gpu::expert::{Chosen, ExpertShape as DeviceShape};
use crate::backend::gpu::slots::Lookup;
use crate::backend::gpu::{Device, DeviceSlice, Graph, Stream};
use crate::experts::vram::{Fence, GranuleLayout, VramTiers};
use crate::forward::gpu::decode_pipeline::slot::{PARTS, PipelineSlot};
use crate::forward::gpu::expert_parallel::{Peer, Routed};
use crate::forward::gpu::layer::Tools;
use crate::forward::gpu::upload::{Staging, floats, starts};
use crate::forward::gpu::workspace::RouteParts;
use crate::forward::{Buffers, Observer};
use crate::model::Model;

/// Layers in the queue at most: the one that runs and the next.
const SLOTS: usize = 2;

/// What the host keeps of a layer from token to token.
struct Layer {
    slot: usize,
    /// u64 [experts, granules]: what stands in the device's table.
    table: Vec<u64>,
    /// What follows the look-up: the experts that are there, and the sum with the residual.
    graphs: Option<[Graph; 2]>,
}

/// The layers of a token that are queued.
pub struct DecodePipeline {
    pub slots: [PipelineSlot; SLOTS],
    /// None where there are no experts to choose from.
    layers: Vec<Option<Layer>>,
    pending: Option<Pending>,
    /// Layers whose places are pinned, heard of or not.
    pinned: Vec<usize>,
    /// Numbers and lanes of layers at which the device may wait for the host, the earliest first.
    waits: Vec<(u32, usize)>,
    /// What the host computes or brings goes up beside what waits for it.
    pub miss_stream: Stream,
    /// Through which that goes: nothing here may wait for the stream of the layers, which may wait
    /// for the host.
    pub miss_staging: Staging,
    /// Of the last layer that lacked something.
    number: u32,
}

/// A layer whose places are pinned.
#[derive(Clone, Copy)]
pub struct PinnedLayer {
    slot: usize,
    /// Its number, if the devices lack some of its experts.
    number: Option<u32>,
}

/// A layer that is queued and of which the host has not heard.
struct Pending {
    l: usize,
    pinned: PinnedLayer,
    /// Bytes of each part that comes down.
    sizes: [usize; PARTS],
    /// After its sum: it comes to pass once `go` is written.
    end: Fence,
}

impl DecodePipeline {
    /// For passes of one token.
    pub fn new(gpu: &Device, model: &Model) -> Result<DecodePipeline> {
        let (hyper, routing) = (&model.hyper, &model.hyper.routing);
        let n_experts = routing.n_experts;
        let mut n_routed = 0;
        let mut layer = |n_granules: usize| {
            n_routed += 1;
            Layer { slot: n_routed % SLOTS, table: vec![0; n_experts * n_granules], graphs: None }
        };
        let layouts = model.weights.routed.iter().map(|l| l.as_ref().map(GranuleLayout::new));
        let n_granules = layouts.map(|layout| layout.map(|l| l.n_granules)).collect::<Vec<_>>();
        let layers = n_granules.iter().map(|n| n.map(&mut layer)).collect();
        let n_granules = n_granules.into_iter().flatten().max().unwrap_or(0);
        let down =
            RouteParts::new(1, routing.k, n_experts).n_bytes() + 4 * (PARTS - 1) * hyper.n_embd;
        let table = 8 * n_experts * n_granules;
        let slots = [PipelineSlot::new(gpu, table, down)?, PipelineSlot::new(gpu, table, down)?];
        // Sums of all of a token's experts, and a table a granule as they land.
        let miss_bytes =
            4 * routing.k * hyper.n_embd + 8 * routing.k * n_granules * (n_granules + 1);
        let (miss_staging, miss_stream) =
            (Staging::new(gpu, miss_bytes + (4 << 10), 0)?, Stream::urgent(gpu)?);
        let (pinned, waits) = (Vec::with_capacity(SLOTS), Vec::with_capacity(SLOTS));
        Ok(DecodePipeline {
            slots,
            layers,
            pending: None,
            pinned,
            waits,
            miss_stream,
            miss_staging,
            number: 0,
        })
    }

    /// Forgets what a pass that failed had queued; the devices have been waited for.
    pub fn release_all(&mut self, tiers: &VramTiers) {
        self.pending = None;
        self.waits.clear();
        self.pinned.drain(..).for_each(|l| tiers.unpin_layer(l, &[], None));
    }

    /// Lets a device go on that waits for a host that has failed.
    pub fn abandon(&self, pass: &Pass) -> Result<()> {
        let go = pass.slice(&pass.layout().ffn.lookup.go);
        for (number, slot) in &self.waits {
            // Where nothing is missing the look-up writes the word by itself, and nobody else may.
            let [route, ..] = self.slots[*slot].wait(&[pass.route_bytes().len(), 0, 0])?;
            if pass.missing_in(route) > 0 {
                self.miss_stream.upload_now(go, &number.to_le_bytes())?;
            }
        }
        Ok(())
    }
}

impl Pass<'_> {
    /// Whether the layer's router is followed by a look-up.
    pub fn looks_up(&self, l: usize) -> bool {
        self.n == 1 && self.tiers(l).is_some()
    }

    /// Settles where the layer will find its experts, and tells the device: before anything of it
    /// is queued.
    pub fn pin_layer(&self, tools: &mut Tools, l: usize, tiers: &VramTiers) -> Result<PinnedLayer> {
        let DecodePipeline { slots, layers, pending, pinned, number, .. } = &mut *tools.pipeline;
        let (layer, stream) = (layers[l].as_mut().expect("a layer with experts"), self.stream());
        let index = layer.slot;
        assert!(pending.as_ref().is_none_or(|before| before.pinned.slot != index));
        let slot = &mut slots[index];
        slot.addresses.resize(layer.table.len(), 0);
        match tiers.get(0).filter(|vram| vram.has(l)) {
            Some(vram) => vram.pin_layer(l, &mut slot.addresses),
            None => slot.addresses.fill(0),
        }
        for peer in &mut *tools.peers {
            peer.pin_layer(tiers.get(peer.device()), l, index, &mut slot.addresses);
        }
        pinned.push(l);
        if slot.addresses != layer.table {
            slot.upload_table(stream, self.table(l))?;
            layer.table.clone_from(&slot.addresses);
        }
        if slot.addresses.iter().all(|at| *at != 0) {
            return Ok(PinnedLayer { slot: index, number: None });
        }
        *number = number.wrapping_add(1);
        slot.upload_number(stream, self.slice(&self.layout().ffn.lookup.pass), *number)?;
        Ok(PinnedLayer { slot: index, number: Some(*number) })
    }

    /// u64 [experts, granules]
    fn table(&self, l: usize) -> DeviceSlice<'_> {
        let all = self.slice(&self.layout().ffn.lookup.tables);
        let (of_layer, n) = (all.len() / self.dev.layers.len(), self.hyper().routing.n_experts);
        all.slice(of_layer * l..of_layer * l + 8 * n * self.n_granules(l))
    }

    fn n_granules(&self, l: usize) -> usize {
        self.dev.layouts[l].expect("a layer with experts").n_granules
    }

    /// Behind the router: where the experts lie that it chose. The host hears of them.
    pub fn look_up(&self, pipeline: &DecodePipeline, l: usize) -> Result<()> {
        let layer = pipeline.layers[l].as_ref().expect("a layer with experts");
        // SAFETY: the router chooses among the layer's experts.
        unsafe { self.dev.ops.resolve.launch(self.stream(), &self.lookup(l))? };
        pipeline.slots[layer.slot].download(self.stream(), 0, self.route_bytes())
    }

    fn lookup(&self, l: usize) -> Lookup<'_> {
        let (f, route) = (&self.layout().ffn, self.route());
        Lookup {
            chosen: route.chosen,
            table: self.table(l),
            n_experts: route.n_experts,
            n_granules: self.n_granules(l),
            granules: self.slice(&f.experts.granules).slice(0..8 * route.k * self.n_granules(l)),
            homes: (!f.homes.is_empty()).then(|| self.words(&f.homes, route.k)),
            missing: self.missing(),
            pass: self.slice(&f.lookup.pass),
            go: self.slice(&f.lookup.go),
        }
    }

    /// Makes the graphs of what follows the look-up, if there are none.
    pub fn make_rest(&self, pipeline: &mut DecodePipeline, l: usize) -> Result<()> {
        let layer = pipeline.layers[l].as_mut().expect("a layer with experts");
        if layer.graphs.is_none() {
            let stream = self.stream();
            let decode_pairs = stream.capture(|| self.few_there(l))?;
            layer.graphs = Some([decode_pairs, stream.capture(|| self.sum_up(l))?]);
        }
        Ok(())
    }

    /// Queues a layer's experts, their sum and the residual, and hears of the layer before.
    pub fn queue_experts(
        &self,
        tools: &mut Tools,
        l: usize,
        pinned: PinnedLayer,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (stream, Tools { pipeline, peers, .. }) = (self.stream(), &mut *tools);
        let slot = &pipeline.slots[pinned.slot];
        // What the host hears, before the experts: it can act while they are computed.
        let mut sizes = [self.route_bytes().len(), 0, 0];
        if pinned.number.is_some() || self.model.wants_activation(l) {
            let parts = [self.h(), self.x()];
            sizes[1..].copy_from_slice(&parts.map(|part| part.len()));
            for (at, part) in starts(&sizes).skip(1).zip(parts) {
                slot.download(stream, at, part)?;
            }
        }
        stream.record(&slot.routed)?;
        let (mut helping, shape) = (Vec::new(), self.shape(l));
        let routed = Routed { stream, h: self.h(), chosen: self.route().chosen };
        for peer in &mut **peers {
            if peer.compute(pinned.slot, routed, (l, self.weights(l)), &shape)? {
                helping.push(peer);
            }
        }
        // None where the first text was of one token.
        let graphs = pipeline.layers[l].as_ref().and_then(|layer| layer.graphs.as_ref());
        match graphs {
            // SAFETY: its memory is the model's, which has the graph; the table has 0 or places of
            // granules of this layer, which are pinned.
            Some([decode_pairs, _]) => unsafe { stream.run(decode_pairs)? },
            None => self.few_there(l)?,
        }
        self.place_rows(&shape, helping)?;
        if let Some(number) = pinned.number {
            pipeline.waits.push((number, pinned.slot));
            stream.wait_value(self.slice(&self.layout().ffn.lookup.go), number)?;
        }
        match graphs {
            // SAFETY: as above.
            Some([_, sum]) => unsafe { stream.run(sum)? },
            None => self.sum_up(l)?,
        }
        let end = Fence::after(stream)?;
        let before = pipeline.pending.replace(Pending { l, pinned, sizes, end });
        self.on_routed(tools, before, observer)
    }

    fn shape(&self, l: usize) -> DeviceShape {
        let layout = self.dev.layouts[l].expect("a layer with experts");
        device_shape(&layout, &self.weights(l).expert, self.hyper().routing.k)
    }

    /// Computes what the look-up has found.
    fn few_there(&self, l: usize) -> Result<()> {
        let (shape, Lookup { chosen, granules, .. }) = (self.shape(l), self.lookup(l));
        let chosen = Chosen { n_pairs: shape.k, granules, experts: chosen };
        let acts: GpuActs = self.acts_at(l);
        // SAFETY: the table that was looked up in has 0 or places of granules of this layer, which
        // are pinned.
        unsafe {
            let decode_pairs = DecodePairs { shape: &shape, chosen };
            self.expert_context().decode_pairs(&decode_pairs, self.biases(l).as_ref(), &acts)
        }
    }

    /// The experts' sum, and the residual.
    fn sum_up(&self, l: usize) -> Result<()> {
        self.sum(&self.shape(l), self.hyper().routing.k, false)?;
        self.add_residual()
    }

    /// The sums of peers come, and go among the first device's.
    fn place_rows(&self, shape: &DeviceShape, peers: Vec<&mut Peer>) -> Result<()> {
        if peers.is_empty() {
            return Ok(());
        }
        let (f, stream) = (&self.layout().ffn, self.stream());
        let (all, row) = (self.slice(&f.rows), 4 * shape.k * shape.n_embd);
        for peer in peers {
            let end = peer.device() * row;
            peer.return_sums(stream, all.slice(end - row..end))?;
        }
        let (homes, partial) =
            (self.words(&f.homes, shape.k), self.expert_context().partial(shape, shape.k));
        // SAFETY: the look-up has written devices' numbers out of the table.
        unsafe { self.dev.ops.resolve.place_rows(stream, homes, all, shape.n_embd, partial) }
    }

    /// Hears of all that is queued: whoever waits for the stream must do this before.
    pub fn finish_pending(&self, tools: &mut Tools, observer: &mut dyn Observer) -> Result<()> {
        let pending = tools.pipeline.pending.take();
        self.on_routed(tools, pending, observer)
    }

    /// Hears of a layer, and computes or brings what it lacks.
    fn on_routed(
        &self,
        tools: &mut Tools,
        pending: Option<Pending>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Some(pending) = pending else { return Ok(()) };
        let tiers = self.dev.tiers.as_deref().expect("experts in VRAM");
        let Pending { l, pinned: PinnedLayer { slot, number }, sizes, end } = pending;
        // After an error the layer stays pinned until the pass is given up: what is queued of it
        // still runs.
        if self.take_routed(tools, l, slot, &sizes, observer)? > 0 {
            self.missing_experts(tools, l, slot)?;
            let number = number.expect("what is whole lacks nothing");
            let go = self.slice(&self.layout().ffn.lookup.go);
            let DecodePipeline { miss_stream, miss_staging, .. } = &mut *tools.pipeline;
            miss_staging.upload(miss_stream, go, &[number], u32::to_le_bytes)?;
            // Some drivers hold back what is queued until somebody asks.
            miss_stream.is_done()?;
        }
        tools.pipeline.waits.retain(|(waits, _)| Some(*waits) != number);
        tools.pipeline.pinned.retain(|pinned| *pinned != l);
        tiers.unpin_layer(l, &tools.b.route.chosen, Some(&end));
        self.model.publish_routed(tools.cpu, self.batch, tools.b, l);
        Ok(())
    }

    /// Takes in what came down of a layer; answers how many of its pairs are missing.
    fn take_routed(
        &self,
        tools: &mut Tools,
        l: usize,
        slot: usize,
        sizes: &[usize; PARTS],
        observer: &mut dyn Observer,
    ) -> Result<u32> {
        let Buffers { route, h, x, .. } = &mut *tools.b;
        let [routed, hidden, stream] = tools.pipeline.slots[slot].wait(sizes)?;
        self.take_route(routed, route);
        let missing = self.missing_in(routed);
        if !hidden.is_empty() {
            floats(hidden, h);
            floats(stream, x);
        }
        self.model.record_routed(tools.cpu, self.batch, tools.b, l, observer);
        Ok(missing)
    }
}
