//! A layer's routed experts, by devices and CPU together: what is in VRAM, or will be sooner than
//! the CPU is done, is computed there, the rest here. Sums are taken in one order, so who computed
//! an expert cannot be seen in a bit.

use super::acts::GpuActs;
use super::experts::{Biases, ExpertContext, device_shape, is_grouped};
use super::pass::Pass;
use super::placement::{PlacementInput, Placer};
use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::backend::gpu::expert::ExpertShape as DeviceShape;
use crate::backend::ops::{Demand, NO_EXPERT};
use crate::cancel::Cancel;
use crate::experts::vram::{Fence, VramGranule, VramTier, VramTiers};
use crate::experts::{Access, Acquisition};
use crate::forward::Buffers;
use crate::forward::gpu::decode_pipeline::DecodePipeline;
use crate::forward::gpu::expert_parallel::share::{DeviceShare, Pairs};
use crate::forward::gpu::expert_parallel::{Peer, Routed};
use crate::forward::gpu::layer::Tools;
use crate::forward::gpu::upload::floats;
use crate::forward::moe::granules;
use crate::model::weights::FfnWeights;
use crate::policy::{Missing, Schedule};
use std::ops::Range;
use std::time::Instant;

/// What a layer's division of work needs; reused from layer to layer.
#[derive(Default)]
pub struct Hybrid {
    /// Everything that this call is to compute, and the CPU's part of it.
    all: Demand,
    on_cpu: Demand,
    /// Those of each device, and the experts that the CPU computes.
    batches: Vec<DeviceBatch>,
    cpu: Vec<u32>,
    /// [tokens, k]: `NO_EXPERT` where it is not of this call, or not the CPU's.
    chosen: Vec<u32>,
    /// Pair of `all` → [token, rank]
    place_of: Vec<usize>,
    placer: Placer,
    missing: Vec<Missing>,
    schedule: Schedule,
}

/// What one device computes.
#[derive(Default)]
struct DeviceBatch {
    experts: Vec<u32>,
    table: Vec<u64>,
    work: Acquisition,
    /// Granules of `work` that have not been handed out.
    left: usize,
}

/// One layer's call.
struct LayerCall<'a> {
    l: usize,
    w: &'a FfnWeights,
    shape: DeviceShape,
    is_grouped: bool,
    n_pairs: usize,
    access: Access,
    tiers: Option<&'a VramTiers>,
}

impl Hybrid {
    /// `cpu_share`: see `GpuOptions`.
    pub fn new(cpu_share: Option<f32>, n_devices: usize) -> Hybrid {
        let batches = (0..n_devices).map(|_| DeviceBatch::default()).collect();
        Hybrid { placer: Placer::new(cpu_share), batches, ..Hybrid::default() }
    }

    /// Waits for experts end once `cancel` is set.
    pub fn set_cancel(&mut self, cancel: &Cancel) {
        self.batches.iter_mut().for_each(|batch| batch.work.cancel = cancel.clone());
    }

    /// Gives back what a pass that failed had acquired. The devices have been waited for.
    pub fn release_all(&mut self, tiers: &VramTiers) {
        for (device, batch) in self.batches.iter_mut().enumerate() {
            if let Some(vram) = tiers.get(device) {
                vram.release(&mut batch.work, None);
            }
        }
    }

    /// Takes in what is to be computed, in `self.chosen`.
    fn group(&mut self, k: usize, n_experts: usize) {
        self.all.group(&self.chosen, k, n_experts);
        self.place_of.resize(self.all.n_pairs(), 0);
        for (place, pair) in self.all.places().iter().enumerate() {
            if let Some(to) = self.place_of.get_mut(*pair as usize) {
                *to = place;
            }
        }
    }

    /// Who computes what: devices what they have, and of the rest what is there sooner.
    fn divide(&mut self, tiers: Option<&VramTiers>, l: usize) {
        for batch in &mut self.batches {
            batch.experts.clear();
            batch.left = 0;
        }
        self.cpu.clear();
        let Some(tiers) = tiers else {
            self.cpu.extend(&self.all.experts);
            return;
        };
        self.missing.clear();
        for (slot, &expert) in self.all.experts.iter().enumerate() {
            if tiers.is_whole(l, expert) {
                self.batches[tiers.device(l, expert)].experts.push(expert);
                continue;
            }
            let n_tokens = self.all.pairs(slot).len() as f64;
            self.missing.push(Missing { expert, n_tokens });
        }
        if self.missing.is_empty() {
            return;
        }
        let (load_ns, delay_ns) = link_ns(tiers, l, &self.missing);
        let input = PlacementInput { missing: &self.missing, load_ns, delay_ns };
        self.placer.place(&input, &mut self.schedule);
        for expert in &self.schedule.upload {
            self.batches[tiers.device(l, *expert)].experts.push(*expert);
        }
        self.cpu.extend(&self.schedule.cpu);
    }

    /// Rows of `partial` that a device's pairs have, in ascending order.
    fn runs(&self, device: usize, is_grouped: bool) -> Vec<Range<usize>> {
        let mut rows = Vec::new();
        for expert in &self.batches[device].experts {
            let pairs = self.all.pairs(self.all.slot(*expert));
            rows.extend(pairs.map(|pair| if is_grouped { pair } else { self.place_of[pair] }));
        }
        rows.sort_unstable();
        let mut runs: Vec<Range<usize>> = Vec::new();
        for row in rows {
            match runs.last_mut() {
                Some(run) if run.end == row => run.end = row + 1,
                _ => runs.push(row..row + 1),
            }
        }
        runs
    }
}

/// What bringing one of the missing experts takes, and what is left of the transfers that are
/// running. Their owners' links work side by side: of several, each brings its part of them.
fn link_ns(tiers: &VramTiers, l: usize, missing: &[Missing]) -> (Option<f64>, f64) {
    let lacks = |device| missing.iter().any(|m| tiers.device(l, m.expert) == device);
    let (mut n_links, mut load_ns, mut delay_ns) = (0.0, Some(0f64), 0f64);
    for (_, vram) in tiers.of_layer(l).filter(|(device, _)| lacks(*device)) {
        n_links += 1.0;
        load_ns = load_ns.zip(vram.load_ns(l)).map(|(a, b)| a.max(b));
        delay_ns = delay_ns.max(vram.delay_ns());
    }
    (load_ns.map(|ns| ns / n_links), delay_ns)
}

impl<'a> Pass<'a> {
    /// y += Σ weights · chosen experts; the route is in `b.route`.
    pub fn routed_experts(&self, tools: &mut Tools, l: usize, acts: &GpuActs) -> Result<()> {
        let Tools { staging, hybrid, peers, cpu, b, .. } = tools;
        let (w, f, routing) = (self.weights(l), &self.layout().ffn, &self.hyper().routing);
        hybrid.chosen.clone_from(&b.route.chosen);
        hybrid.group(routing.k, routing.n_experts);
        let access = if self.n > 1 { Access::Prompt } else { Access::Decode };
        let tiers = self.tiers(l);
        hybrid.divide(tiers, l);
        let is_grouped = is_grouped(&w.expert, self.n);
        if is_grouped {
            // In the order of the pairs, so that what lands together has pairs close together.
            for batch in &mut hybrid.batches {
                batch.experts.sort_unstable_by_key(|expert| hybrid.all.slot(*expert));
            }
        }
        let n_pairs = if is_grouped { hybrid.all.n_pairs() } else { self.n * routing.k };
        let call = self.call(l, (is_grouped, n_pairs), access, tiers);
        if is_grouped {
            let pair_rows = hybrid.all.places();
            let to = self.words(&f.pair_rows, pair_rows.len());
            staging.upload(self.stream(), to, pair_rows, u32::to_le_bytes)?;
        }
        if !hybrid.cpu.is_empty() {
            let h = &mut b.h;
            staging.download(self.stream(), &[self.h()], &mut |_, bytes| floats(bytes, h))?;
        }
        self.acquire(hybrid, &call);
        let (context, chosen) = (self.expert_context(), self.route().chosen);
        let biases = self.biases(l);
        let first = DeviceShare {
            device: 0,
            context,
            acts: *acts,
            chosen,
            biases,
            staging,
            to_first: None,
        };
        let mut shares = self.shares(first, hybrid, peers, &call, false)?;
        self.divided(&mut shares, hybrid, (cpu, b), &call)?;
        self.sum(&call.shape, n_pairs, is_grouped)
    }

    /// Computes, beside the stream of the layers, the experts of one token that a layer lacked:
    /// those that are not whole in `addresses`, [experts, granules]. What the router saw is in
    /// `b.h`, the route in `b.route`.
    pub fn missing_experts(&self, tools: &mut Tools, l: usize, slot: usize) -> Result<()> {
        let Tools { hybrid, pipeline, peers, cpu, b, .. } = tools;
        let (f, routing) = (&self.layout().ffn, &self.hyper().routing);
        let tiers = self.tiers(l);
        let DecodePipeline { slots, miss_stream, miss_staging, .. } = &mut **pipeline;
        miss_staging.wait(miss_stream)?;
        let addresses = &slots[slot].addresses;
        let n_granules = addresses.len() / routing.n_experts;
        let is_there = |expert: u32| {
            let row = &addresses[expert as usize * n_granules..][..n_granules];
            row.iter().all(|address| *address != 0)
        };
        hybrid.chosen.clear();
        let missing = b.route.chosen.iter().map(|e| if is_there(*e) { NO_EXPERT } else { *e });
        hybrid.chosen.extend(missing);
        hybrid.group(routing.k, routing.n_experts);
        hybrid.divide(tiers, l);
        let context =
            ExpertContext { stream: miss_stream, layout: &f.miss, ..self.expert_context() };
        let call = self.call(l, (false, routing.k), Access::Decode, tiers);
        self.acquire(hybrid, &call);
        let (chosen, biases) = (self.route().chosen, self.biases(l));
        let (acts, staging) = (self.acts_at(l), miss_staging);
        let first =
            DeviceShare { device: 0, context, acts, chosen, biases, staging, to_first: None };
        let mut shares = self.shares(first, hybrid, peers, &call, true)?;
        self.divided(&mut shares, hybrid, (cpu, b), &call)?;
        // What the CPU computed may be worth having there the next time.
        if let Some(tiers) = tiers {
            tiers.admit(l, &hybrid.cpu);
        }
        Ok(())
    }

    fn call(
        &self,
        l: usize,
        (is_grouped, n_pairs): (bool, usize),
        access: Access,
        tiers: Option<&'a VramTiers>,
    ) -> LayerCall<'a> {
        let (w, k) = (self.weights(l), self.hyper().routing.k);
        let layout = self.dev.layouts[l].expect("a layer with experts");
        let shape = device_shape(&layout, &w.expert, k);
        LayerCall { l, w, shape, is_grouped, n_pairs, access, tiers }
    }

    /// Of the first device.
    pub fn biases(&self, l: usize) -> Option<Biases<'a>> {
        let ffn = &self.dev.layers[l].as_ref().expect("a layer on the device").ffn;
        ffn.biases.as_ref().map(|b| Biases::new(&self.dev.weights, b))
    }

    /// Pins what devices compute, so that all links begin.
    fn acquire(&self, hybrid: &mut Hybrid, call: &LayerCall) {
        let Some(tiers) = call.tiers else { return };
        for (device, batch) in hybrid.batches.iter_mut().enumerate() {
            batch.left = batch.experts.len() * call.shape.n_granules();
            if batch.left > 0 {
                let vram = tiers.get(device).expect("it has experts to compute");
                vram.acquire(call.l, &batch.experts, call.access, &mut batch.work);
            }
        }
    }

    /// The first device and the peers that have something to compute; they get what the router saw.
    fn shares<'b>(
        &self,
        first: DeviceShare<'b>,
        hybrid: &Hybrid,
        peers: &'b mut [Peer],
        call: &LayerCall,
        is_miss: bool,
    ) -> Result<Vec<DeviceShare<'b>>> {
        let routed = Routed { stream: first.context.stream, h: self.h(), chosen: first.chosen };
        let mut shares = vec![first];
        for peer in peers {
            if hybrid.batches[peer.device()].left > 0 {
                shares.push(peer.share(is_miss, routed, (call.l, call.w), self.n)?);
            }
        }
        if call.is_grouped {
            let pairs = call.pairs(hybrid);
            shares.iter_mut().try_for_each(|share| share.begin_grouped(pairs))?;
        }
        Ok(shares)
    }

    /// Computes the demand: `partial` has its pairs' sums then, as far as the first seat's stream
    /// goes.
    fn divided(
        &self,
        shares: &mut [DeviceShare],
        hybrid: &mut Hybrid,
        (cpu, b): (&Cpu, &mut Buffers),
        call: &LayerCall,
    ) -> Result<()> {
        // What is there can be computed while the CPU computes.
        for share in &mut *shares {
            let mut experts = hybrid.batches[share.device].experts.iter();
            let is_whole = |e: &u32| call.vram(share.device).is_whole(call.l, *e);
            if experts.any(is_whole) {
                next_granules(share, hybrid, call)?;
            }
        }
        if !hybrid.cpu.is_empty() {
            self.cpu_experts(&mut shares[0], hybrid, (cpu, b), call)?;
        } else {
            self.prefetch_after(call, &hybrid.all);
        }
        // Each in turn: while one is waited for, the others' links and kernels go on.
        while hybrid.batches.iter().any(|batch| batch.left > 0) {
            for share in &mut *shares {
                if hybrid.batches[share.device].left > 0 {
                    next_granules(share, hybrid, call)?;
                }
            }
        }
        let (first, peers) = shares.split_first_mut().expect("the first device");
        let to = (first.context.stream, first.context.partial(&call.shape, call.n_pairs));
        for share in &mut *peers {
            let runs = hybrid.runs(share.device, call.is_grouped);
            share.return_sums(to, call.pairs(hybrid), &runs)?;
        }
        for share in shares {
            let batch = &mut hybrid.batches[share.device];
            if !batch.experts.is_empty() {
                let end = Fence::after(share.context.stream)?;
                call.vram(share.device).release(&mut batch.work, Some(&end));
            }
        }
        Ok(())
    }

    /// Once everything of this layer is demanded.
    fn prefetch_after(&self, call: &LayerCall, all: &Demand) {
        if call.access == Access::Prompt {
            self.model.prefetch_after(call.l, all.experts.len());
        }
    }

    /// The CPU's experts, whose sums then go up.
    fn cpu_experts(
        &self,
        first: &mut DeviceShare,
        hybrid: &mut Hybrid,
        (cpu, b): (&Cpu, &mut Buffers),
        call: &LayerCall,
    ) -> Result<()> {
        let (start, shape) = (Instant::now(), &call.w.expert);
        for expert in &mut hybrid.chosen {
            if !hybrid.cpu.contains(expert) {
                *expert = NO_EXPERT;
            }
        }
        let demand = &mut hybrid.on_cpu;
        demand.group(&hybrid.chosen, b.route.k, b.route.n_experts);
        let (store, f) = (&*self.model.routed, &mut b.ffn);
        b.acts.fill(cpu, Kinds::of(shape.inputs()), self.n, shape.n_embd, &b.h);
        f.expert.begin(demand.n_pairs(), shape.n_ff, shape.n_embd, Kinds::of([shape.down]));
        store.acquire(call.l, &demand.experts, call.access, &mut f.work);
        self.prefetch_after(call, &hybrid.all);
        let computed = loop {
            match store.next_ready(&mut f.work) {
                Ok(true) => {
                    let mut list = f.granules.list();
                    granules(store, &f.work, demand, shape, &mut list);
                    cpu.expert_granules(&list, demand, call.w.form(), &b.acts, &mut f.expert);
                    f.granules.recycle(list);
                }
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        store.release(&mut f.work);
        computed?;
        let (n, ns) = (demand.experts.len(), start.elapsed().as_nanos() as f64);
        hybrid.placer.cpu.observe(demand.n_pairs().div_ceil(n), ns / n as f64);
        // Pairs of an expert lie side by side here, and so they do there if they are grouped.
        let partial = first.context.partial(&call.shape, call.n_pairs);
        for (slot, expert) in demand.experts.iter().enumerate() {
            let (from, to) = (demand.pairs(slot), hybrid.all.pairs(hybrid.all.slot(*expert)));
            let run = if call.is_grouped { from.len() } else { 1 };
            for (from, to) in from.step_by(run).zip(to.step_by(run)) {
                let to = if call.is_grouped { to } else { hybrid.place_of[to] };
                let sums = f.expert.partial(from..from + run);
                let at = 4 * to * shape.n_embd;
                let to = partial.slice(at..at + 4 * sums.len());
                first.staging.upload(first.context.stream, to, sums, f32::to_le_bytes)?;
            }
        }
        Ok(())
    }

    /// y += Σ_rank weights · partial, in rank order
    pub fn sum(&self, shape: &DeviceShape, n_pairs: usize, is_grouped: bool) -> Result<()> {
        let (route, f) = (self.route(), &self.layout().ffn);
        let pairs = match is_grouped {
            true => self.words(&f.pair_rows, self.n * route.k),
            false => route.chosen,
        };
        let partial = self.expert_context().partial(shape, n_pairs);
        let (experts, stream, y) = (&self.dev.ops.experts, self.stream(), self.y());
        // SAFETY: places are those of the demand's pairs.
        unsafe {
            experts.ordered_sum(stream, shape, self.n, pairs, is_grouped, route.weights, partial, y)
        }
    }
}

impl LayerCall<'_> {
    /// The tier of a device that has something to compute.
    fn vram(&self, device: usize) -> &VramTier {
        self.tiers.and_then(|tiers| tiers.get(device)).expect("it has experts to compute")
    }

    fn pairs<'b>(&'b self, hybrid: &'b Hybrid) -> Pairs<'b> {
        let LayerCall { ref shape, is_grouped, n_pairs, .. } = *self;
        Pairs { demand: &hybrid.all, shape, is_grouped, n_pairs }
    }
}

/// Computes the granules that are in a device's memory now, waiting for some if there are none.
fn next_granules(share: &mut DeviceShare, hybrid: &mut Hybrid, call: &LayerCall) -> Result<()> {
    // What was handed out before is given back by this.
    let end = Fence::after(share.context.stream)?;
    let Hybrid { all, batches, place_of, .. } = hybrid;
    let DeviceBatch { work, table, left, .. } = &mut batches[share.device];
    let vram = call.vram(share.device);
    let more = vram.next_ready(work, Some(&end))?;
    assert!(more, "granules that were demanded and never came");
    let (n_granules, n_items) = (call.shape.n_granules(), all.experts.len());
    table.clear();
    table.resize(if call.is_grouped { n_items } else { call.n_pairs } * n_granules, 0);
    let (mut first, mut end) = (n_granules, 0);
    for i in 0..work.n_handed() {
        let VramGranule { expert, granule, slot } = vram.ready(work, i);
        (first, end) = (first.min(granule), end.max(granule + 1));
        let item = all.slot(expert);
        if call.is_grouped {
            table[granule * n_items + item] = slot.address();
            continue;
        }
        for pair in all.pairs(item) {
            table[place_of[pair] * n_granules + granule] = slot.address();
        }
    }
    *left -= work.n_handed();
    let LayerCall { ref shape, is_grouped, n_pairs, .. } = *call;
    let pairs = Pairs { demand: all, shape, is_grouped, n_pairs };
    // SAFETY: addresses are those of granules that the work holds until the device is done with
    // them; the router chose the experts among those that there are.
    unsafe { share.compute(pairs, table, first..end) }
}
