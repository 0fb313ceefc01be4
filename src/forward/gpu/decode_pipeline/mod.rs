//! Decode without a device that waits for the host at each layer. The device resolves the router's
//! choice against a slot table in its own memory and continues if every expert is resident. By then
//! the host has queued the next layer's attention; it reads the routing asynchronously and handles
//! only misses: it loads or computes them, then releases the device.
//!
//! A layer's slots are pinned as late as the device lets the host: while it computes the layer
//! before, whose misses have been handled, and the attention between. So what was prefetched until
//! then is found. They stay pinned until the device has finished the layer. Their addresses are in
//! the slot table, which is kept from token to token and uploaded if it has changed. If the table
//! lacks some experts, the layer gets a number, and between the resident experts and the sum the
//! device waits until the word `go` has reached that number. The look-up writes the number there if
//! nothing is missing; the stream of the misses writes it after them. What runs before the look-up,
//! before the wait and behind it are captured graphs.
//!
//! No copy stands behind a wait for the host: a device has few queues for copies, and the copy
//! would hold up those that the misses need. Slot tables have a stream of their own; kernels store
//! the routing into mapped memory, where `go` and the layer's number are, too. Where streams must
//! not wait (`DeviceInfo::no_waits`), the host holds the sum of such a layer back until it has
//! handled the misses.
//!
//! Policies hear of a layer's routing when the next layer is queued, so a prefetch has one layer's
//! time to come before the layer after the next is pinned: predictors look two layers ahead.

pub mod queue;
pub mod slot;

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::expert::{Chosen, ExpertShape as DeviceShape};
use crate::backend::gpu::slots::Lookup;
use crate::backend::ops::NO_EXPERT;
use crate::experts::vram::{Fence, VramTiers};
use crate::forward::gpu::decode_pipeline::queue::{
    DecodePipeline, ExpertGraphs, PendingLayer, PinnedLayer,
};
use crate::forward::gpu::decode_pipeline::slot::PARTS;
use crate::forward::gpu::devices::PassState;
use crate::forward::gpu::expert_parallel::share::DeviceShare;
use crate::forward::gpu::expert_parallel::workspace::RoutedLayer;
use crate::forward::gpu::experts::{DecodePairs, ExpertContext};
use crate::forward::gpu::hybrid_moe::call::LayerCall;
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::upload::floats;

impl<'a> GpuPass<'a> {
    /// Whether a look-up follows the layer's router: in passes of one row and in steps of decode,
    /// but not where experts are computed as in longer parts of the prompt.
    pub fn looks_up(&self, l: usize) -> bool {
        self.is_step() && self.tiers(l).is_some() && !self.routes_halves(l)
    }

    /// Pairs of a row and an expert.
    fn n_pairs(&self) -> usize {
        self.n() * self.hyper().routing.k
    }

    /// Pins the layer's resident experts and uploads its slot table.
    pub fn pin_layer(&mut self, l: usize, tiers: &VramTiers) -> Result<PinnedLayer> {
        let pipeline = &self.state.pipeline;
        let index = pipeline.layer(l).slot;
        assert!(pipeline.pending.as_ref().is_none_or(|before| before.pinned.slot != index));
        let is_whole = self.pin_table(l, tiers);
        self.upload_table(l)?;
        let DecodePipeline { slots, number, .. } = &mut self.state.pipeline;
        if !is_whole {
            *number = number.wrapping_add(1);
        }
        slots[index].set_number(*number);
        Ok(PinnedLayer { slot: index, number: (!is_whole).then_some(*number) })
    }

    /// Pins the layer's resident experts. Returns whether they are all of it.
    pub fn pin_table(&mut self, l: usize, tiers: &VramTiers) -> bool {
        let PassState { pipeline: DecodePipeline { layers, pinned, .. }, peers, .. } =
            &mut *self.state;
        let layer = layers[l].as_mut().expect("a layer with routed experts");
        let mut is_changed = match tiers.get(0).filter(|vram| vram.has(l)) {
            Some(vram) => vram.pin_layer(l, &mut layer.own),
            None => false,
        };
        for peer in peers.iter_mut() {
            is_changed |= peer.pin_layer(tiers.get(peer.device()), l);
        }
        pinned.push(l);
        if is_changed {
            layer.combine(l, peers);
        }
        layer.n_absent == 0
    }

    /// Uploads the layer's slot table, unless the device has it. Returns whether it did.
    pub fn upload_table(&mut self, l: usize) -> Result<bool> {
        let (stream, table) = (self.stream(), self.slot_table(l));
        let DecodePipeline { slots, layers, table_stream, .. } = &mut self.state.pipeline;
        let layer = layers[l].as_mut().expect("a layer with routed experts");
        if layer.is_uploaded {
            return Ok(false);
        }
        // The last look-up in it is done: the host has read its result.
        slots[layer.slot].upload_table(table_stream, table, &layer.table)?;
        table_stream.then(stream)?;
        layer.is_uploaded = true;
        Ok(true)
    }

    /// The layer's slot table on the device: u64 [experts, granules].
    pub fn slot_table(&self, l: usize) -> DeviceSlice<'a> {
        let all = self.slice(&self.layout().ffn.lookup.tables);
        let (layer_bytes, n) = (all.len() / self.dev.layers.len(), self.hyper().routing.n_experts);
        all.slice(layer_bytes * l..layer_bytes * l + 8 * n * self.n_granules(l))
    }

    fn n_granules(&self, l: usize) -> usize {
        self.dev.layouts[l].expect("a layer with routed experts").n_granules
    }

    /// The look-up of the chosen experts in the slot table.
    fn lookup(&self, l: usize) -> Lookup<'_> {
        let (f, route) = (&self.layout().ffn, self.device_route());
        let pipeline = &self.state.pipeline;
        let [missing, ..] = self.route_parts().ranges();
        Lookup {
            chosen: route.chosen,
            table: self.slot_table(l),
            n_experts: route.n_experts,
            n_granules: self.n_granules(l),
            granules: self.granule_table(l),
            homes: (!f.homes.is_empty()).then(|| self.words(&f.homes, self.n_pairs())),
            missing: self.route_bytes().slice(missing),
            pass: pipeline.slots[pipeline.layer(l).slot].number(),
            go: pipeline.go(),
        }
    }

    /// u64 [pairs, granules]: the result of a look-up
    fn granule_table(&self, l: usize) -> DeviceSlice<'a> {
        let all = self.slice(&self.layout().ffn.experts.granules);
        all.slice(0..8 * self.n_pairs() * self.n_granules(l))
    }

    /// The graphs of what follows the look-up.
    fn expert_graphs(&self, l: usize) -> Option<&ExpertGraphs> {
        self.state.pipeline.layer(l).graphs[self.n() - 1].as_ref()
    }

    /// Captures the graphs of what follows the look-up, if there are none for so many rows.
    pub fn capture_experts(&mut self, l: usize) -> Result<()> {
        if self.expert_graphs(l).is_none() {
            let resident = self.stream().capture(|| self.resident_experts(l))?;
            let sum = self.stream().capture(|| self.sum_experts(l))?;
            let (n, PassState { pipeline, graph_counts, .. }) = (self.n(), &mut *self.state);
            if n == 1 {
                graph_counts.nodes[l][1] = resident.n_nodes() + sum.n_nodes();
            }
            pipeline.layer_mut(l).graphs[n - 1] = Some(ExpertGraphs { resident, sum });
        }
        Ok(())
    }

    /// Reads the routing of the layer before and handles its misses. Then pins the layer's resident
    /// experts and queues them, their sum and the residual. What comes before is queued already.
    pub fn pipelined_experts(&mut self, l: usize, tiers: &VramTiers) -> Result<()> {
        let answered = self.answer_pending()?;
        let pinned = self.pin_layer(l, tiers)?;
        self.state.graph_counts.n_looked_up += usize::from(self.n() > 1);
        // Posted before the experts run, so that the host can handle misses meanwhile.
        let sizes = self.look_up(l, pinned)?;
        self.queue_experts(l, pinned, sizes)?;
        self.publish_answered(answered);
        if self.state.pipeline.is_sum_held() {
            // What comes next reads the sum.
            return self.finish_pending();
        }
        Ok(())
    }

    /// Queues what follows the look-up, which posts parts of these sizes.
    fn queue_experts(
        &mut self,
        l: usize,
        pinned: PinnedLayer,
        sizes: [usize; PARTS],
    ) -> Result<()> {
        let (stream, shape) = (self.stream(), self.routed_shape(l));
        let routed = self.routed_layer(l);
        let mut helping = Vec::new();
        for (i, peer) in self.state.peers.iter_mut().enumerate() {
            if peer.compute(pinned.slot, routed, &shape)? {
                helping.push(i);
            }
        }
        // A session whose first text was one token has captured no graphs.
        let n_graphs = usize::from(self.expert_graphs(l).is_some());
        match self.expert_graphs(l) {
            // SAFETY: the graph uses memory of the model, which owns the graph. The table holds 0
            // or the addresses of granules of this layer, which are pinned.
            Some(graphs) => unsafe { stream.run(&graphs.resident)? },
            None => self.resident_experts(l)?,
        }
        self.state.graph_counts.n_launches += n_graphs;
        self.place_peer_sums(&shape, &helping)?;
        let pipeline = &mut self.state.pipeline;
        let end = match pinned.number {
            Some(_) if !pipeline.may_wait => None,
            number => {
                if let Some(number) = number {
                    pipeline.wait_for_misses(stream, number, pinned.slot)?;
                }
                Some(self.queue_sum(l)?)
            }
        };
        self.state.pipeline.pending = Some(PendingLayer { l, pinned, sizes, end });
        Ok(())
    }

    /// Queues the sum of a layer's experts and the residual. Returns a fence behind them.
    fn queue_sum(&mut self, l: usize) -> Result<Fence> {
        let n_graphs = usize::from(self.expert_graphs(l).is_some());
        match self.expert_graphs(l) {
            // SAFETY: the graph uses memory of the model, which owns the graph.
            Some(graphs) => unsafe { self.stream().run(&graphs.sum)? },
            None => self.sum_experts(l)?,
        }
        self.state.graph_counts.n_launches += n_graphs;
        Fence::after(self.stream())
    }

    /// Queues the look-up and what the host gets of a layer: the route, and h, the residual stream
    /// and the experts' input, if it is not h, if the host may want them. Returns the sizes of all
    /// parts.
    fn look_up(&self, l: usize, pinned: PinnedLayer) -> Result<[usize; PARTS]> {
        let (stream, slot) = (self.stream(), &self.state.pipeline.slots[pinned.slot]);
        let wants_rows = pinned.number.is_some() || self.b.events.want_activation();
        let rows = wants_rows.then(|| [self.h(), self.x()]);
        let is_own = self.ffn_weights(l).has_own_input() && pinned.number.is_some();
        let latent = is_own.then(|| self.expert_input(l));
        let (post, sizes) = slot.post(self.route_bytes(), rows, latent);
        // SAFETY: the router chooses among the layer's experts.
        unsafe { self.dev.ops.resolve.launch(stream, &self.lookup(l), Some(&post))? };
        stream.record(&slot.routed)?;
        Ok(sizes)
    }

    /// Computes the experts that the look-up has found.
    fn resident_experts(&self, l: usize) -> Result<()> {
        let (shape, granules) = (self.routed_shape(l), self.granule_table(l));
        let experts = self.device_route().chosen;
        let chosen = Chosen { n_pairs: self.n_pairs(), granules, apart: None, experts };
        let (pairs, form) = (DecodePairs { shape: &shape, chosen }, self.expert_form(l));
        let acts = self.ffn_acts(l);
        // SAFETY: the look-up has written 0 or the addresses of granules of this layer, which are
        // pinned.
        unsafe { self.expert_context().compute_pairs(&pairs, form, &acts) }
    }

    /// The experts' sum and the residual.
    fn sum_experts(&self, l: usize) -> Result<()> {
        self.routed_sum(l, self.n_pairs(), false)
    }

    /// The look-up of experts that are all there, which posts the route; these, and their sum.
    pub fn whole_experts(&self, l: usize) -> Result<()> {
        let post = self.state.pipeline.routes.post(l, self.route_bytes());
        // SAFETY: the router chooses among the layer's experts.
        unsafe { self.dev.ops.resolve.launch(self.stream(), &self.lookup(l), Some(&post))? };
        self.resident_experts(l)?;
        self.sum_experts(l)
    }

    /// Copies the sums of peers into the rows of the first device's `partial`.
    fn place_peer_sums(&mut self, shape: &DeviceShape, helping: &[usize]) -> Result<()> {
        if helping.is_empty() {
            return Ok(());
        }
        let (f, stream) = (&self.layout().ffn, self.stream());
        let n_pairs = self.n_pairs();
        let (n_peers, rows) = (self.state.peers.len(), 4 * n_pairs * shape.n_embd);
        let all = self.slice(&f.rows).slice(0..n_peers * rows);
        for i in helping {
            let peer = &mut self.state.peers[*i];
            let end = peer.device() * rows;
            peer.return_sums(stream, all.slice(end - rows..end))?;
        }
        let homes = self.words(&f.homes, n_pairs);
        let partial = self.expert_context().partial(shape, n_pairs);
        // SAFETY: `homes` holds 0 or numbers of devices, which the look-up has read in the table.
        unsafe { self.dev.ops.resolve.place_rows(stream, homes, all, shape.n_embd, partial) }
    }

    /// Reads the routing of the last layer, handles its misses and tells policies. To be called
    /// before any wait for the stream of the layers.
    pub fn finish_pending(&mut self) -> Result<()> {
        self.answer_grouped()?;
        let answered = self.answer_pending()?;
        self.publish_answered(answered);
        Ok(())
    }

    /// Tells predictors of a layer whose routing is in `b`.
    pub fn publish_answered(&mut self, answered: Option<usize>) {
        if let Some(l) = answered {
            self.model.publish_look_ahead(self.cpu, self.batch, l, &mut self.b.routing());
        }
    }

    /// Reads the routing of the last layer, loads or computes its misses, and releases the device.
    /// Returns the layer, if there is one.
    fn answer_pending(&mut self) -> Result<Option<usize>> {
        let Some(pending) = self.state.pipeline.pending.take() else { return Ok(None) };
        let tiers = self.dev.tiers.as_deref().expect("experts in VRAM");
        let PendingLayer { l, pinned: PinnedLayer { slot, number }, sizes, end } = pending;
        // If this fails the layer stays pinned until the pass is abandoned: what is queued of it
        // still runs.
        let n_missing = self.read_route(l, slot, &sizes)?;
        self.state.hybrid.end_attention(Some(tiers));
        // Evictions hear of it before its misses and its hits make them name victims.
        self.model.publish_choice(self.batch, l, &mut self.b.routing());
        if n_missing > 0 {
            self.missed_experts(l)?;
        }
        let pipeline = &mut self.state.pipeline;
        let end = match end {
            Some(end) => {
                if n_missing > 0 {
                    pipeline.go_on(number.expect("a layer without a number misses nothing"))?;
                }
                end
            }
            None => {
                if n_missing > 0 {
                    pipeline.miss_stream.then(&self.dev.stream)?;
                }
                self.queue_sum(l)?
            }
        };
        self.state.pipeline.waits.retain(|wait| Some(wait.number) != number);
        self.state.hybrid.begin_attention();
        self.unpin_layer(l, tiers, Some(&end));
        Ok(Some(l))
    }

    /// Unpins a layer, whose routing is in `b`. Its slots are in use until `end`, if not over.
    pub fn unpin_layer(&mut self, l: usize, tiers: &VramTiers, end: Option<&Fence>) {
        let DecodePipeline { pinned, used, .. } = &mut self.state.pipeline;
        pinned.retain(|pinned| *pinned != l);
        used.clear();
        used.extend(self.b.ffn.route.chosen.iter().filter(|expert| **expert != NO_EXPERT));
        used.sort_unstable();
        used.dedup();
        tiers.unpin_layer(l, used, end);
    }

    /// Reads what was posted of a layer. Returns the number of pairs that it misses.
    fn read_route(&mut self, l: usize, slot: usize, sizes: &[usize; PARTS]) -> Result<u32> {
        let route_parts = self.route_parts();
        let [route, hidden, stream, latent] = self.state.pipeline.slots[slot].wait(sizes)?;
        route_parts.read(route, &mut self.b.ffn.route);
        let n_missing = route_parts.n_missing(route);
        if !hidden.is_empty() {
            floats(hidden, &mut self.b.h);
            floats(stream, &mut self.b.x);
        }
        if !latent.is_empty() {
            floats(latent, &mut self.b.ffn.latent);
        }
        self.model.record_routed(self.cpu, self.batch, l, &mut self.b.routing(), self.outputs);
        Ok(n_missing)
    }

    /// Computes the experts that a look-up missed: those that are not in the layer's table. Runs
    /// beside the stream of the layers. The router's input is in `b.h`, the route in `b.ffn.route`.
    fn missed_experts(&mut self, l: usize) -> Result<()> {
        let (k, n_experts) = (self.hyper().routing.k, self.hyper().routing.n_experts);
        let (layer, context, miss_layout) =
            (self.routed_layer(l), self.expert_context(), &self.layout().ffn.miss);
        let (model, tiers, shape) = (self.model, self.tiers(l), self.routed_shape(l));
        let (acts, form) = (self.ffn_acts(l), self.expert_form(l));
        let PassState { pipeline, hybrid, peers, graph_counts, .. } = &mut *self.state;
        let DecodePipeline { layers, miss_stream, miss_staging, .. } = pipeline;
        let stream = &*miss_stream;
        miss_staging.wait(stream)?;
        let addresses = &layers[l].as_ref().expect("a layer with routed experts").table;
        let n_granules = addresses.len() / n_experts;
        let is_missed = |expert: &u32| {
            let row = addresses.chunks_exact(n_granules).nth(*expert as usize);
            row.is_some_and(|row| row.contains(&0))
        };
        let chosen = self.b.ffn.route.chosen.iter();
        let missed = chosen.map(|e| if is_missed(e) { *e } else { NO_EXPERT });
        let routed = RoutedLayer { stream, ..layer };
        let (n_decode, n_pairs) = (layer.n_tokens, layer.n_tokens * k);
        let call = LayerCall {
            model,
            tiers,
            routed,
            shape,
            is_grouped: false,
            with_cpu: true,
            n_pairs,
            n_decode,
            is_miss: true,
        };
        hybrid.group(layer.w, missed, k, n_experts);
        hybrid.divide(call.division());
        let context = ExpertContext { stream, layout: miss_layout, ..context };
        let (chosen, staging) = (routed.chosen, miss_staging);
        let first = DeviceShare { device: 0, context, acts, chosen, form, staging, to_first: None };
        hybrid.compute(&call, first, peers, self.cpu, self.b)?;
        // Experts that were computed elsewhere may be worth loading for the next token.
        if let Some(tiers) = tiers {
            tiers.admit(l, &hybrid.cpu);
            tiers.admit(l, &hybrid.in_place.experts);
        }
        graph_counts.n_in_place += hybrid.in_place.experts.len();
        Ok(())
    }

    /// Releases a device that waits for a host that has failed, and waits for it.
    pub fn abandon(&mut self) -> Result<()> {
        let released = self.release_waits();
        self.state.pipeline.drain(&self.dev.stream)?;
        released
    }

    fn release_waits(&self) -> Result<()> {
        let pipeline = &self.state.pipeline;
        for wait in &pipeline.waits {
            // Where nothing is missing the look-up writes the word, and no one else may.
            let sizes = [self.route_bytes().len(), 0, 0, 0];
            let [route, ..] = pipeline.slots[wait.slot].wait(&sizes)?;
            if self.route_parts().n_missing(route) > 0 {
                // What is queued behind the wait writes what the misses read.
                let waited = pipeline.miss_stream.synchronize_watched();
                pipeline.release(wait.number);
                waited?;
            }
        }
        Ok(())
    }
}
