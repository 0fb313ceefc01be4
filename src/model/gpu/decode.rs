//! A token's layers without a stop. The device looks up by itself where the experts are that a
//! router chose, and goes on if all are there; the host has queued the next layer by then, hears of
//! the routing later, and acts on what is missing alone: it has it brought or computes it, and
//! lets the device go on.
//!
//! A layer's places are frozen (`vram`) from when it is queued until the device is through with it.
//! What it waits for is a word in its memory, `go`, that holds the number of the last layer whose
//! experts are computed: the look-up writes it where nothing is missing, the host where something
//! was.

use super::acts::GpuActs;
use super::experts::{Few, device_shape};
use super::forward::Tools;
use super::pass::Pass;
use super::peers::{Peer, Routed};
use super::staging::{Staging, floats, integers, starts};
use super::vram::{Fence, GranuleLayout, Tiers};
use crate::Result;
use crate::backend::gpu::expert::{Chosen, ExpertShape as DeviceShape};
use crate::backend::gpu::slots::Lookup;
use crate::backend::gpu::{Device, DeviceSlice, Event, Pinned, PinnedKind, Stream};
use crate::model::Model;
use crate::model::forward::{Buffers, Listener};
use crate::model::publish::Pass as Timeline;

/// Layers in the queue at most: the one that runs and the next.
const LANES: usize = 2;

/// What comes down of a layer, in this order; the last two where somebody wants them.
const PARTS: usize = 6;

/// Where the numbers of a layer's passage begin in what goes up: its number, then its table.
const TABLE_AT: usize = 64;

/// Room for what goes up and comes down of a layer. What a lane's last layer had there has been
/// copied when the host has heard of it.
pub struct Lane {
    up: Pinned,
    down: Pinned,
    routed: Event,
    /// u64 [experts, granules]: what the device may rely on
    pub addresses: Vec<u64>,
}

/// The layers of a token that are queued.
pub struct Ahead {
    pub lanes: [Lane; LANES],
    pending: Option<Pending>,
    /// Layers whose places are frozen, heard of or not.
    frozen: Vec<usize>,
    /// Numbers of layers at which the device may wait for the host, the earliest first.
    waits: Vec<u32>,
    /// What the host computes or brings goes up beside what waits for it.
    pub late: Stream,
    /// Through which that goes: nothing here may wait for the stream of the layers, which may wait
    /// for the host.
    pub late_up: Staging,
    /// Of the last layer queued.
    number: u32,
}

/// A layer that is queued and of which the host has not heard.
struct Pending {
    l: usize,
    lane: usize,
    number: u32,
    /// Bytes of each part that comes down.
    sizes: [usize; PARTS],
    /// After its sum: it comes to pass once `go` is written.
    end: Fence,
}

impl Lane {
    fn new(gpu: &Device, table_bytes: usize, down_bytes: usize) -> Result<Lane> {
        let up = Pinned::of(gpu, TABLE_AT + table_bytes, PinnedKind::Cached, "a token's routing")?;
        let down = Pinned::of(gpu, down_bytes, PinnedKind::Cached, "a token's routing")?;
        Ok(Lane { up, down, routed: Event::new(gpu)?, addresses: Vec::new() })
    }

    /// Queues the upload of the layer's number and table.
    fn upload(
        &self,
        stream: &Stream,
        pass: DeviceSlice,
        number: u32,
        to: DeviceSlice,
    ) -> Result<()> {
        let end = TABLE_AT + 8 * self.addresses.len();
        // SAFETY: what the lane's last layer copied from here has been copied, as the host has
        // heard of it since, and nothing writes here before it hears of this one.
        unsafe {
            let head = self.up.bytes_mut(0..4);
            head.copy_from_slice(&number.to_le_bytes());
            stream.upload(pass, head)?;
            let table = self.up.bytes_mut(TABLE_AT..end);
            for (bytes, address) in table.chunks_exact_mut(8).zip(&self.addresses) {
                bytes.copy_from_slice(&address.to_le_bytes());
            }
            stream.upload(to, table)
        }
    }

    fn queue(&self, stream: &Stream, parts: &[DeviceSlice], sizes: &[usize; PARTS]) -> Result<()> {
        for (part, at) in parts.iter().zip(starts(sizes)) {
            assert!(at + part.len() <= self.down.len());
            // SAFETY: in the buffer, by the assertion; nobody uses it until `routed`, which is
            // recorded after it, has been waited for.
            unsafe { stream.download(self.down.as_ptr().add(at), *part)? };
        }
        stream.record(&self.routed)
    }

    /// What has come down, part by part.
    fn wait(&self, sizes: &[usize; PARTS]) -> Result<[&[u8]; PARTS]> {
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

impl Ahead {
    /// For passes of one token.
    pub fn new(gpu: &Device, model: &Model) -> Result<Ahead> {
        let (hyper, routing) = (&model.hyper, &model.hyper.routing);
        let words = [2 * routing.k, 1, routing.n_experts, 2 * hyper.n_embd];
        let bytes = 4 * words.into_iter().sum::<usize>() + 64 * PARTS;
        let layouts = model.weights.routed.iter().flatten().map(GranuleLayout::new);
        let n_granules = layouts.map(|layout| layout.n_granules).max().unwrap_or(0);
        let table = 8 * routing.n_experts * n_granules;
        let lanes = [Lane::new(gpu, table, bytes)?, Lane::new(gpu, table, bytes)?];
        // Sums of all of a token's experts, and a table a granule as they land.
        let late = 4 * routing.k * hyper.n_embd + 8 * routing.k * n_granules * (n_granules + 1);
        let (late_up, late) = (Staging::new(gpu, late + (4 << 10), 0)?, Stream::urgent(gpu)?);
        let (frozen, waits) = (Vec::with_capacity(LANES), Vec::with_capacity(LANES));
        Ok(Ahead { lanes, pending: None, frozen, waits, late, late_up, number: 0 })
    }

    /// Forgets what a pass that failed had queued; the devices have been waited for.
    pub fn give_up(&mut self, tiers: &Tiers) {
        self.pending = None;
        self.waits.clear();
        self.frozen.drain(..).for_each(|l| tiers.thaw(l, &[], None));
    }

    /// Lets a device go on that waits for a host that has failed.
    pub fn let_go(&self, pass: &Pass) -> Result<()> {
        let (Some(first), Some(last)) = (self.waits.first(), self.waits.last()) else {
            return Ok(());
        };
        // Where the host has not heard of the layer, its look-up may be about to write the word by
        // itself: nobody else may then.
        if let Some(layer) = self.pending.as_ref().filter(|layer| layer.number == *first) {
            let [missing, ..] = self.lanes[layer.lane].wait(&layer.sizes)?;
            if missing.iter().all(|byte| *byte == 0) {
                return Ok(());
            }
        }
        let go = pass.slice(&pass.places().ffn.lookup.go);
        self.late.upload_now(go, &last.to_le_bytes())
    }
}

impl Pass<'_> {
    /// Queues a layer's experts, their sum and the residual, and hears of the layer before.
    pub fn queue_experts(
        &self,
        tools: &mut Tools,
        l: usize,
        (acts, tiers): (&GpuActs, &Tiers),
        timeline: Timeline,
        listener: &mut dyn Listener,
    ) -> Result<()> {
        let w = self.weights(l);
        let (f, stream, ahead) = (&self.places().ffn, self.stream(), &mut *tools.ahead);
        let k = self.hyper().routing.k;
        let layout = self.g.layouts[l].expect("a layer with experts");
        let shape = device_shape(&layout, &w.expert, k);
        ahead.number = ahead.number.wrapping_add(1);
        let number = ahead.number;
        let index = number as usize % LANES;
        let lane = &mut ahead.lanes[index];
        // What the devices may rely on.
        lane.addresses.resize(self.hyper().routing.n_experts * layout.n_granules, 0);
        match tiers.get(0).filter(|vram| vram.has(l)) {
            Some(vram) => vram.freeze(l, &mut lane.addresses),
            None => lane.addresses.fill(0),
        }
        for peer in &mut *tools.peers {
            peer.freeze(tiers.get(peer.device()), l, index, &mut lane.addresses);
        }
        ahead.frozen.push(l);
        let (table, route) = (self.upload_table(lane, number)?, self.route());
        let lookup = self.lookup(table, layout.n_granules, !tools.peers.is_empty());
        // SAFETY: the router chooses among the layer's experts.
        unsafe { self.g.ops.resolve.launch(stream, &lookup)? };
        // What the host hears, before the experts: it can act while they are computed.
        let mut parts = vec![lookup.missing, route.chosen, route.weights, route.probs];
        let is_whole = lane.addresses.iter().all(|at| *at != 0);
        if !is_whole || self.model.wants_activation(l) {
            parts.extend([self.h(), self.x()]);
        }
        let mut sizes = [0; PARTS];
        sizes.iter_mut().zip(&parts).for_each(|(size, part)| *size = part.len());
        lane.queue(stream, &parts, &sizes)?;
        let routed = Routed { stream, h: self.h(), chosen: route.chosen };
        let mut helping = Vec::new();
        for peer in &mut *tools.peers {
            if peer.compute(index, routed, (l, w), &shape)? {
                helping.push(peer);
            }
        }
        let chosen = Chosen { n_pairs: k, granules: lookup.granules, experts: route.chosen };
        let few = Few { shape: &shape, chosen };
        // SAFETY: the table has 0 or places of granules of this layer, which are frozen.
        unsafe { self.site().few(&few, self.biases(l).as_ref(), acts)? };
        self.place_rows(&shape, helping)?;
        if !is_whole {
            ahead.waits.push(number);
            stream.wait_value(self.slice(&f.lookup.go), number)?;
        }
        self.sum(&shape, k, false)?;
        let end = Fence::after(stream)?;
        let before = ahead.pending.replace(Pending { l, lane: index, number, sizes, end });
        self.add_residual()?;
        self.hear_of(tools, before, timeline, listener)
    }

    fn upload_table(&self, lane: &Lane, number: u32) -> Result<DeviceSlice<'_>> {
        let places = &self.places().ffn.lookup;
        let table = self.slice(&places.table).slice(0..8 * lane.addresses.len());
        lane.upload(self.stream(), self.slice(&places.pass), number, table)?;
        Ok(table)
    }

    fn lookup<'b>(
        &'b self,
        table: DeviceSlice<'b>,
        n_granules: usize,
        has_peers: bool,
    ) -> Lookup<'b> {
        let (f, route) = (&self.places().ffn, self.route());
        let [missing, pass, go] =
            [&f.lookup.missing, &f.lookup.pass, &f.lookup.go].map(|word| self.slice(word));
        Lookup {
            chosen: route.chosen,
            table,
            n_experts: route.n_experts,
            n_granules,
            granules: self.slice(&f.experts.granules).slice(0..8 * route.k * n_granules),
            homes: has_peers.then(|| self.words(&f.homes, route.k)),
            missing,
            pass,
            go,
        }
    }

    /// The sums of peers come, and go among the first device's.
    fn place_rows(&self, shape: &DeviceShape, peers: Vec<&mut Peer>) -> Result<()> {
        if peers.is_empty() {
            return Ok(());
        }
        let (f, stream) = (&self.places().ffn, self.stream());
        let (all, row) = (self.slice(&f.rows), 4 * shape.k * shape.n_embd);
        for peer in peers {
            let end = peer.device() * row;
            peer.give_back(stream, all.slice(end - row..end))?;
        }
        let (homes, partial) = (self.words(&f.homes, shape.k), self.site().partial(shape, shape.k));
        // SAFETY: the look-up has written devices' numbers out of the table.
        unsafe { self.g.ops.resolve.place_rows(stream, homes, all, shape.n_embd, partial) }
    }

    /// Hears of all that is queued: whoever waits for the stream must do this before.
    pub fn catch_up(
        &self,
        tools: &mut Tools,
        timeline: Timeline,
        listener: &mut dyn Listener,
    ) -> Result<()> {
        let pending = tools.ahead.pending.take();
        self.hear_of(tools, pending, timeline, listener)
    }

    /// Hears of a layer, and computes or brings what it lacks.
    fn hear_of(
        &self,
        tools: &mut Tools,
        pending: Option<Pending>,
        timeline: Timeline,
        listener: &mut dyn Listener,
    ) -> Result<()> {
        let Some(pending) = pending else { return Ok(()) };
        let tiers = self.g.tiers.as_deref().expect("experts in VRAM");
        let Pending { l, lane, number, sizes, end } = pending;
        // After an error the layer stays frozen until the pass is given up: what is queued of it
        // still runs.
        if self.hear(tools, l, lane, &sizes, listener)? > 0 {
            self.late_experts(tools, l, lane)?;
            let go = self.slice(&self.places().ffn.lookup.go);
            let Ahead { late, late_up, .. } = &mut *tools.ahead;
            late_up.upload(late, go, &[number], u32::to_le_bytes)?;
            // Some drivers hold back what is queued until somebody asks.
            late.is_done()?;
        }
        tools.ahead.waits.retain(|waits| *waits != number);
        tools.ahead.frozen.retain(|frozen| *frozen != l);
        tiers.thaw(l, &tools.b.route.chosen, Some(&end));
        self.model.publish_routed(tools.cpu, tools.b, l, timeline);
        Ok(())
    }

    /// Takes in what came down of a layer; answers how many of its pairs are missing.
    fn hear(
        &self,
        tools: &mut Tools,
        l: usize,
        lane: usize,
        sizes: &[usize; PARTS],
        listener: &mut dyn Listener,
    ) -> Result<u32> {
        let Buffers { route, h, x, .. } = &mut *tools.b;
        let [missing, chosen, weights, probs, hidden, stream] =
            tools.ahead.lanes[lane].wait(sizes)?;
        (route.k, route.n_experts) = (self.hyper().routing.k, self.hyper().routing.n_experts);
        integers(chosen, &mut route.chosen);
        floats(weights, &mut route.weights);
        floats(probs, &mut route.probs);
        if !hidden.is_empty() {
            floats(hidden, h);
            floats(stream, x);
        }
        let missing = missing.try_into().expect("one word");
        self.model.record_routed(tools.cpu, tools.b, l, listener);
        Ok(u32::from_le_bytes(missing))
    }
}
