//! Computing a layer's routed experts on the devices and the CPU at the same time.

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::backend::cpu::expert::ExpertBuffers;
use crate::backend::gpu::expert::ExpertShape as DeviceShape;
use crate::experts::vram::{Fence, VramGranule, VramTier, VramTiers};
use crate::experts::{Access, Acquisition, ExpertStore};
use crate::forward::Buffers;
use crate::forward::gpu::expert_parallel::peer::Peer;
use crate::forward::gpu::expert_parallel::share::{CallPairs, DeviceShare};
use crate::forward::gpu::expert_parallel::workspace::RoutedLayer;
use crate::forward::gpu::hybrid_moe::division::{DeviceBatch, DivisionInput, HybridMoe};
use crate::forward::moe::granules;
use crate::model::Model;
use std::time::{Duration, Instant};

/// One call for routed experts of a layer: all of them, or those that a look-up missed.
pub struct LayerCall<'a> {
    pub model: &'a Model,
    pub tiers: Option<&'a VramTiers>,
    pub routed: RoutedLayer<'a>,
    pub shape: DeviceShape,
    pub is_grouped: bool,
    /// Whether the CPU computes experts too that are missing: it does not round as tensor cores
    /// do, and bits would depend on the time that each takes.
    pub with_cpu: bool,
    /// The number of pairs in `partial`.
    pub n_pairs: usize,
    /// The first so many rows are decode's, the others are of prompts.
    pub n_decode: usize,
    /// Whether a look-up missed the experts. Only then they are read in place.
    pub is_miss: bool,
}

impl LayerCall<'_> {
    /// The VRAM tier of a device that computes some experts.
    fn vram(&self, device: usize) -> &VramTier {
        self.tiers.and_then(|tiers| tiers.get(device)).expect("the device has a VRAM tier")
    }

    fn pairs<'b>(&'b self, hybrid: &'b HybridMoe) -> CallPairs<'b> {
        let LayerCall { ref shape, is_grouped, n_pairs, .. } = *self;
        CallPairs { demand: &hybrid.all, shape, is_grouped, n_pairs }
    }

    /// The input of the division of its experts.
    pub fn division(&self) -> DivisionInput<'_> {
        let LayerCall { tiers, with_cpu, is_miss, .. } = *self;
        DivisionInput { tiers, l: self.routed.l, has_decode: self.n_decode > 0, with_cpu, is_miss }
    }

    /// The use of some experts, of which the first `n_decode` are chosen by rows of decode.
    fn access(&self, n_decode: usize) -> Access {
        match self.n_decode {
            0 => Access::Prompt,
            n if n == self.routed.n_tokens => Access::Decode,
            _ => Access::Mixed { n_decode },
        }
    }

    /// Begins to load the next layer's experts for a prompt, after all of this layer's are queued.
    fn prefetch_after(&self, hybrid: &HybridMoe) {
        if self.n_decode < self.routed.n_tokens {
            self.model.prefetch_after(self.routed.l, hybrid.all.experts.len());
        }
    }
}

impl HybridMoe {
    /// Groups the pairs of the call, [tokens, k], and divides the experts.
    pub fn plan(&mut self, call: &LayerCall, chosen: impl Iterator<Item = u32>) {
        let (w, routing) = (call.routed.w, &call.model.hyper.routing);
        self.group(w, chosen, routing.k, routing.n_experts);
        self.divide(call.division());
        self.put_decode_first(call.n_decode);
        if call.is_grouped {
            self.sort_by_pairs();
        }
    }

    /// Counts the use of experts that are pinned and that the first device computes by itself until
    /// `end`, as it was planned.
    pub fn count_resident(&mut self, call: &LayerCall, end: &Fence) -> Result<()> {
        self.acquire(call);
        call.prefetch_after(self);
        let DeviceBatch { experts, work, left, .. } = &mut self.batches[0];
        if experts.is_empty() {
            return Ok(());
        }
        while *left > 0 {
            let more = call.vram(0).next_ready(work, Some(end))?;
            assert!(more, "experts that are pinned");
            *left -= work.n_handed();
        }
        call.vram(0).release(work, Some(end));
        Ok(())
    }

    /// Computes the call as it was divided. Then `partial` of the first device holds the sums of
    /// its pairs, for whatever is queued on `first`'s stream. If the CPU computes some experts,
    /// what they read is in `b.h`, or in `b.ffn.latent` if it is not h.
    pub fn compute(
        &mut self,
        call: &LayerCall,
        first: DeviceShare,
        peers: &mut [Peer],
        cpu: &Cpu,
        b: &mut Buffers,
    ) -> Result<()> {
        self.acquire(call);
        let mut shares = self.shares(call, first, peers)?;
        // Resident experts run on the devices while the CPU computes its own.
        for share in &mut shares {
            let mut experts = self.batches[share.device].experts.iter();
            let is_whole = |e: &u32| call.vram(share.device).is_whole(call.routed.l, *e);
            if experts.any(is_whole) {
                self.next_granules(call, share)?;
            }
        }
        if !(self.cpu.is_empty() && self.in_place.experts.is_empty()) {
            self.host_experts(call, &mut shares[0], cpu, b)?;
        } else {
            call.prefetch_after(self);
        }
        // Device by device: while the host waits for one, the others' links and kernels go on.
        while self.batches.iter().any(|batch| batch.left > 0) {
            for share in &mut shares {
                if self.batches[share.device].left > 0 {
                    self.next_granules(call, share)?;
                }
            }
        }
        self.return_sums(call, &mut shares)
    }

    /// Pins the experts that devices compute, so that all links begin to load.
    fn acquire(&mut self, call: &LayerCall) {
        let Some(tiers) = call.tiers else { return };
        let n_decode = self.all.n_chosen_by(call.n_decode);
        for (device, batch) in self.batches.iter_mut().enumerate() {
            batch.left = batch.experts.len() * call.shape.n_granules();
            if batch.left > 0 {
                let vram = tiers.get(device).expect("the device has a VRAM tier");
                let is_decode = |expert: &&u32| self.all.slot(**expert) < n_decode;
                let access = call.access(batch.experts.iter().filter(is_decode).count());
                vram.acquire(call.routed.l, &batch.experts, access, &mut batch.work);
            }
        }
    }

    /// The first device, and the peers that compute some experts, with the router's input.
    fn shares<'b>(
        &self,
        call: &LayerCall,
        first: DeviceShare<'b>,
        peers: &'b mut [Peer],
    ) -> Result<Vec<DeviceShare<'b>>> {
        let mut shares = vec![first];
        for peer in peers {
            if self.batches[peer.device()].left > 0 {
                shares.push(peer.share(call.is_miss, call.routed)?);
            }
        }
        if call.is_grouped {
            let pairs = call.pairs(self);
            shares.iter_mut().try_for_each(|share| share.begin_grouped(pairs))?;
        }
        Ok(shares)
    }

    /// Computes the granules that are in a device's memory now. Waits for one if there are none.
    fn next_granules(&mut self, call: &LayerCall, share: &mut DeviceShare) -> Result<()> {
        // Granules that were handed out before are in use up to this point of the stream.
        let end = Fence::after(share.context.stream)?;
        let HybridMoe { all, batches, place_of, .. } = self;
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
                table[item * n_granules + granule] = slot.address();
                continue;
            }
            for pair in all.pairs(item) {
                table[place_of[pair] * n_granules + granule] = slot.address();
            }
        }
        *left -= work.n_handed();
        let LayerCall { ref shape, is_grouped, n_pairs, .. } = *call;
        let pairs = CallPairs { demand: all, shape, is_grouped, n_pairs };
        // SAFETY: the addresses are of granules that `work` holds until the device has passed the
        // next fence, and the experts are some that the router chose.
        unsafe { share.compute(pairs, table, first..end) }
    }

    /// Has the first device read its experts in the host's memory, and computes the CPU's
    /// meanwhile.
    fn host_experts(
        &mut self,
        call: &LayerCall,
        first: &mut DeviceShare,
        cpu: &Cpu,
        b: &mut Buffers,
    ) -> Result<()> {
        let store = &**call.model.hierarchy.host();
        let computed = self.cpu_experts(call, first, cpu, b, store);
        // Nothing may read what is given back. What cannot be waited for is of a device that runs
        // nothing more.
        let waited = self.in_place.finish(&mut self.placer.in_place);
        store.release(&mut b.ffn.work);
        computed?;
        waited?;
        if self.cpu.is_empty() {
            return Ok(());
        }
        self.upload_sums(call, first, &b.ffn.expert)
    }

    /// Acquires the experts that the first device reads together with those of the CPU, as they are
    /// one demand. Then queues the kernels. What is not there any more is left to the CPU.
    fn begin_in_place(
        &mut self,
        call: &LayerCall,
        first: &mut DeviceShare,
        store: &dyn ExpertStore,
        work: &mut Acquisition,
    ) -> Result<()> {
        let experts = [&self.in_place.experts[..], &self.cpu].concat();
        store.acquire(call.routed.l, &experts, call.access(experts.len()), work);
        let more = store.next_ready(work)?;
        assert!(more, "experts that were demanded and never came");
        let LayerCall { ref shape, is_grouped, n_pairs, .. } = *call;
        let HybridMoe { all, place_of, in_place, cpu, .. } = self;
        let pairs = CallPairs { demand: all, shape, is_grouped, n_pairs };
        let bytes = in_place.find(call.vram(0), pairs, place_of, store, work, cpu);
        if in_place.experts.is_empty() {
            return Ok(());
        }
        // SAFETY: `work` holds them until it is asked for more or released, before which the
        // kernels are waited for.
        unsafe { in_place.queue(first, pairs, &bytes) }
    }

    /// Computes the CPU's experts, which stay acquired.
    fn cpu_experts(
        &mut self,
        call: &LayerCall,
        first: &mut DeviceShare,
        cpu: &Cpu,
        b: &mut Buffers,
        store: &dyn ExpertStore,
    ) -> Result<()> {
        let RoutedLayer { l, w, .. } = call.routed;
        let mut is_handed = !self.in_place.experts.is_empty();
        if is_handed {
            self.begin_in_place(call, first, store, &mut b.ffn.work)?;
        }
        if self.cpu.is_empty() {
            return Ok(());
        }
        let (start, shape) = (Instant::now(), &w.expert);
        self.group_on_cpu(b.ffn.route.k, b.ffn.route.n_experts);
        let (demand, f) = (&self.on_cpu, &mut b.ffn);
        let input = if w.has_own_input() { &f.latent[..] } else { &b.h[..] };
        let n_rows = call.routed.shape().n;
        f.acts.fill(cpu, Kinds::of(shape.inputs()), n_rows, shape.n_embd, input);
        f.expert.begin(demand.n_pairs(), shape.n_ff, shape.n_embd, Kinds::of([shape.down]));
        if !is_handed {
            let access = call.access(demand.n_chosen_by(call.n_decode));
            store.acquire(l, &demand.experts, access, &mut f.work);
        }
        call.prefetch_after(self);
        let mut waited = Duration::ZERO;
        loop {
            if !std::mem::take(&mut is_handed) {
                // It takes back what was handed out.
                waited += self.in_place.finish(&mut self.placer.in_place)?;
                if !store.next_ready(&mut f.work)? {
                    break;
                }
            }
            let mut list = f.granules.list();
            let is_read = |expert: u32| self.in_place.experts.contains(&expert);
            granules(store, &f.work, demand, shape, |expert| !is_read(expert), &mut list);
            if !list.is_empty() {
                cpu.expert_granules(&list, demand, w.form(), &f.acts, &mut f.expert);
            }
            f.granules.recycle(list);
        }
        let ns = start.elapsed().saturating_sub(waited).as_nanos() as f64;
        let (n, n_pairs) = (demand.experts.len(), demand.n_pairs());
        self.placer.cpu.observe(n_pairs.div_ceil(n), ns / n as f64);
        Ok(())
    }

    /// Uploads the sums that the CPU computed to their rows of the first device's `partial`.
    fn upload_sums(
        &self,
        call: &LayerCall,
        first: &mut DeviceShare,
        sums: &ExpertBuffers,
    ) -> Result<()> {
        let (demand, n_embd) = (&self.on_cpu, call.shape.n_embd);
        let partial = first.context.partial(&call.shape, call.n_pairs);
        // Pairs of an expert lie side by side here, and on the device too if they are grouped.
        for (slot, expert) in demand.experts.iter().enumerate() {
            let (from, to) = (demand.pairs(slot), self.all.pairs(self.all.slot(*expert)));
            let run = if call.is_grouped { from.len() } else { 1 };
            for (from, to) in from.step_by(run).zip(to.step_by(run)) {
                let to = if call.is_grouped { to } else { self.place_of[to] };
                let sums = sums.partial(from..from + run);
                let at = 4 * to * n_embd;
                let to = partial.slice(at..at + 4 * sums.len());
                first.staging.upload(first.context.stream, to, sums, f32::to_le_bytes)?;
            }
        }
        Ok(())
    }

    /// Queues the copies of the peers' sums, and releases all experts behind what is queued.
    fn return_sums(&mut self, call: &LayerCall, shares: &mut [DeviceShare]) -> Result<()> {
        let (first, peers) = shares.split_first_mut().expect("the first device");
        let (stream, to) = (first.context.stream, first.context.partial(&call.shape, call.n_pairs));
        for share in peers {
            let runs = self.runs(share.device, call.is_grouped);
            share.return_sums(stream, to, call.pairs(self), &runs)?;
        }
        for share in shares {
            let batch = &mut self.batches[share.device];
            if !batch.experts.is_empty() {
                let end = Fence::after(share.context.stream)?;
                call.vram(share.device).release(&mut batch.work, Some(&end));
            }
        }
        Ok(())
    }
}
