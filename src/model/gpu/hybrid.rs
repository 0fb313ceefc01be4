//! A layer's routed experts, by device and CPU together: what is in VRAM, or will be sooner than
//! the CPU is done, is computed there, the rest here. Sums are taken in one order, so who computed
//! an expert cannot be seen in a bit.

use super::acts::GpuActs;
use super::decode::Ahead;
use super::experts::{Biases, Few, Grouped, Site, device_shape, is_grouped};
use super::forward::Tools;
use super::pass::Pass;
use super::placement::{Moment, Placer, p_hit};
use super::room::Place;
use super::staging::{Staging, floats, words};
use super::vram::{Fence, Placed, Vram};
use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::backend::cpu::expert::Demand;
use crate::backend::cpu::router::NO_EXPERT;
use crate::backend::gpu::expert::{Chosen, ExpertShape as DeviceShape};
use crate::experts::{Access, Work};
use crate::model::ffn::granules;
use crate::model::forward::Buffers;
use crate::model::weights::FfnWeights;
use crate::policy::{Missing, Schedule};
use std::ops::Range;
use std::time::Instant;

/// Layers with something missing from one count of prefetches to the next.
const COUNT_EVERY: u32 = 1024;

/// What a layer's division of work needs; reused from layer to layer.
#[derive(Default)]
pub struct Hybrid {
    /// Everything that this call is to compute, and the CPU's part of it.
    all: Demand,
    on_cpu: Demand,
    /// Experts that the device computes, and those that the CPU does.
    gpu: Vec<u32>,
    cpu: Vec<u32>,
    /// [tokens, k]: `NO_EXPERT` where it is not of this call, or not the CPU's.
    chosen: Vec<u32>,
    table: Vec<u64>,
    /// Pair of `all` → [token, rank]
    place_of: Vec<usize>,
    work: Work,
    /// Granules of `work` that have not been handed out.
    left: usize,
    placer: Placer,
    missing: Vec<Missing>,
    schedule: Schedule,
    /// How often a prefetch was needed, as of the layer `asked` layers ago.
    p_hit: f64,
    asked: u32,
}

/// One layer's call.
struct Call<'a> {
    l: usize,
    w: &'a FfnWeights,
    shape: DeviceShape,
    is_grouped: bool,
    n_pairs: usize,
    access: Access,
    acts: &'a GpuActs<'a>,
    biases: Option<Biases<'a>>,
    site: Site<'a>,
    granules: &'a Place,
}

impl Hybrid {
    /// `cpu_share`: see `GpuOptions`.
    pub fn new(cpu_share: Option<f32>) -> Hybrid {
        Hybrid { placer: Placer::new(cpu_share), ..Hybrid::default() }
    }

    /// Gives back what a pass that failed had acquired. The device has been waited for.
    pub fn give_up(&mut self, vram: &Vram) {
        vram.release(&mut self.work, None);
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

    /// Who computes what: the device what it has, and of the rest what is there sooner.
    fn divide(&mut self, vram: Option<&Vram>, l: usize) {
        self.gpu.clear();
        self.cpu.clear();
        let Some(vram) = vram else {
            self.cpu.extend(&self.all.experts);
            return;
        };
        self.missing.clear();
        for (slot, &expert) in self.all.experts.iter().enumerate() {
            if vram.is_whole(l, expert) {
                self.gpu.push(expert);
                continue;
            }
            let n_tokens = self.all.pairs(slot).len() as f64;
            self.missing.push(Missing { expert, n_tokens });
        }
        if self.missing.is_empty() {
            return;
        }
        // Counting takes a walk over all experts.
        if self.asked.is_multiple_of(COUNT_EVERY) {
            self.p_hit = p_hit(&vram.counters());
        }
        self.asked = self.asked.wrapping_add(1);
        let moment = Moment {
            missing: &self.missing,
            predicted: &[],
            load_ns: vram.load_ns(l),
            delay_ns: vram.delay_ns(),
            attention_ns: 0.0,
            p_hit: self.p_hit,
        };
        self.placer.place(&moment, &mut self.schedule);
        self.gpu.extend(&self.schedule.upload);
        self.cpu.extend(&self.schedule.cpu);
    }
}

impl<'a> Pass<'a> {
    /// y += Σ weights · chosen experts; the route is in `b.route`.
    pub fn routed_experts(&self, tools: &mut Tools, l: usize, acts: &GpuActs) -> Result<()> {
        let Tools { staging, hybrid, cpu, b, .. } = tools;
        let (w, f, routing) = (self.weights(l), &self.places().ffn, &self.hyper().routing);
        hybrid.chosen.clone_from(&b.route.chosen);
        hybrid.group(routing.k, routing.n_experts);
        let access = if self.n > 1 { Access::Prompt } else { Access::Decode };
        let vram = self.vram(l);
        hybrid.divide(vram, l);
        let is_grouped = is_grouped(&w.expert, self.n);
        let n_pairs = if is_grouped { hybrid.all.n_pairs() } else { self.n * routing.k };
        let (site, granules) = (self.site(), &f.granules);
        let call = self.call(l, (is_grouped, n_pairs), access, acts, (site, granules));
        if is_grouped {
            self.upload_groups(staging, &hybrid.all, &call)?;
        }
        if !hybrid.cpu.is_empty() {
            let h = &mut b.h;
            staging.download(self.stream(), &[self.h()], &mut |_, bytes| floats(bytes, h))?;
        }
        self.divided(staging, hybrid, (cpu, b), vram, &call)?;
        self.sum(&call.shape, n_pairs, is_grouped)
    }

    /// Computes, beside the stream of the layers, the experts of one token that a layer lacked:
    /// those that are not whole in `addresses`, [experts, granules]. What the router saw is in
    /// `b.h`, the route in `b.route`.
    pub fn late_experts(&self, tools: &mut Tools, l: usize, lane: usize) -> Result<()> {
        let Tools { hybrid, ahead, cpu, b, .. } = tools;
        let (f, routing) = (&self.places().ffn, &self.hyper().routing);
        let vram = self.vram(l);
        let Ahead { lanes, late, late_up, .. } = &mut **ahead;
        late_up.wait(late)?;
        let addresses = &lanes[lane].addresses;
        let n_granules = addresses.len() / routing.n_experts;
        let is_there = |expert: u32| {
            let row = &addresses[expert as usize * n_granules..][..n_granules];
            row.iter().all(|address| *address != 0)
        };
        hybrid.chosen.clear();
        let missing = b.route.chosen.iter().map(|e| if is_there(*e) { NO_EXPERT } else { *e });
        hybrid.chosen.extend(missing);
        hybrid.group(routing.k, routing.n_experts);
        hybrid.divide(vram, l);
        let site = Site { stream: late, inner: &f.late_inner, inner_acts: &f.late_acts };
        let acts = self.acts_at(l);
        let call =
            self.call(l, (false, routing.k), Access::Decode, &acts, (site, &f.late_granules));
        self.divided(late_up, hybrid, (cpu, b), vram, &call)?;
        // What the CPU computed may be worth having there the next time.
        if let Some(vram) = vram {
            vram.admit(l, &hybrid.cpu);
        }
        Ok(())
    }

    fn call<'b>(
        &self,
        l: usize,
        (is_grouped, n_pairs): (bool, usize),
        access: Access,
        acts: &'b GpuActs<'b>,
        (site, granules): (Site<'b>, &'b Place),
    ) -> Call<'b>
    where
        'a: 'b,
    {
        let (w, k) = (self.weights(l), self.hyper().routing.k);
        let ffn = &self.g.layers[l].as_ref().expect("a layer on the device").ffn;
        let biases = ffn.biases.as_ref().map(|b| Biases::new(&self.g.weights, b));
        let layout = self.g.layouts[l].expect("a layer with experts");
        let shape = device_shape(&layout, &w.expert, k);
        Call { l, w, shape, is_grouped, n_pairs, access, acts, biases, site, granules }
    }

    /// Computes the demand: `partial` has its pairs' sums then, as far as the site's stream goes.
    fn divided(
        &self,
        staging: &mut Staging,
        hybrid: &mut Hybrid,
        (cpu, b): (&Cpu, &mut Buffers),
        vram: Option<&Vram>,
        call: &Call,
    ) -> Result<()> {
        let vram = vram.filter(|_| !hybrid.gpu.is_empty());
        if let Some(vram) = vram {
            vram.acquire(call.l, &hybrid.gpu, call.access, &mut hybrid.work);
            hybrid.left = hybrid.gpu.len() * call.shape.n_granules();
            // What is there can be computed while the CPU computes.
            if hybrid.gpu.iter().any(|expert| vram.is_whole(call.l, *expert)) {
                self.next_granules(staging, hybrid, vram, call)?;
            }
        }
        if !hybrid.cpu.is_empty() {
            self.cpu_experts(staging, hybrid, (cpu, b), call)?;
        }
        let Some(vram) = vram else { return Ok(()) };
        while hybrid.left > 0 {
            self.next_granules(staging, hybrid, vram, call)?;
        }
        vram.release(&mut hybrid.work, Some(&Fence::after(call.site.stream)?));
        Ok(())
    }

    /// Computes the granules that are in VRAM now, waiting for some if there are none.
    fn next_granules(
        &self,
        staging: &mut Staging,
        hybrid: &mut Hybrid,
        vram: &Vram,
        call: &Call,
    ) -> Result<()> {
        // What was handed out before is given back by this.
        let end = Fence::after(call.site.stream)?;
        let more = vram.next_ready(&mut hybrid.work, Some(&end))?;
        assert!(more, "granules that were demanded and never came");
        let (n_granules, n_items) = (call.shape.n_granules(), hybrid.all.experts.len());
        let table = &mut hybrid.table;
        table.clear();
        table.resize(if call.is_grouped { n_items } else { call.n_pairs } * n_granules, 0);
        let (mut first, mut end) = (n_granules, 0);
        for i in 0..hybrid.work.n_handed() {
            let Placed { expert, granule, slot } = vram.ready(&hybrid.work, i);
            (first, end) = (first.min(granule), end.max(granule + 1));
            let item = hybrid.all.slot(expert);
            if call.is_grouped {
                table[granule * n_items + item] = slot.address();
                continue;
            }
            for pair in hybrid.all.pairs(item) {
                table[hybrid.place_of[pair] * n_granules + granule] = slot.address();
            }
        }
        hybrid.left -= hybrid.work.n_handed();
        self.compute(staging, hybrid, call, first..end)
    }

    /// Computes the granules of `hybrid.table`.
    fn compute(
        &self,
        staging: &mut Staging,
        hybrid: &Hybrid,
        call: &Call,
        granules: Range<usize>,
    ) -> Result<()> {
        let f = &self.places().ffn;
        let bytes = words(&hybrid.table, u64::to_le_bytes);
        let table = self.slice(call.granules).slice(0..bytes.len());
        staging.upload(call.site.stream, table, &bytes)?;
        if !call.is_grouped {
            let experts = self.route().chosen;
            let chosen = Chosen { n_pairs: call.n_pairs, granules: table, experts };
            let few = Few { shape: &call.shape, chosen };
            // SAFETY: addresses are those of granules that the work holds until the device is done
            // with them; the router chose the experts among those that there are.
            return unsafe { self.few(&call.site, &few, call.biases.as_ref(), call.acts) };
        }
        let n_items = hybrid.all.experts.len();
        let grouped = Grouped {
            shape: &call.shape,
            n_items,
            n_pairs: call.n_pairs,
            matrices: table,
            starts: self.words(&f.starts, n_items + 1),
            tokens: Some(self.words(&f.tokens, call.n_pairs)),
            experts: self.words(&f.experts, n_items),
            max_pairs: (0..n_items).map(|item| hybrid.all.pairs(item).len()).max().unwrap_or(0),
        };
        // SAFETY: as above; the other tables are the demand's.
        unsafe { self.grouped(&grouped, call.biases.as_ref(), call.acts, granules) }
    }

    /// The demand's tables, and zeros where granules will be computed one after the other.
    fn upload_groups(&self, staging: &mut Staging, all: &Demand, call: &Call) -> Result<()> {
        let f = &self.places().ffn;
        let mut up = |place, numbers: &[u32]| {
            let bytes = words(numbers, u32::to_le_bytes);
            staging.upload(self.stream(), self.words(place, numbers.len()), &bytes)
        };
        let starts: Vec<u32> = all.starts().iter().map(|start| *start as u32).collect();
        up(&f.starts, &starts)?;
        up(&f.tokens, all.tokens())?;
        up(&f.places, all.places())?;
        up(&f.experts, &all.experts)?;
        self.begin_grouped(&call.shape, call.n_pairs)
    }

    /// The CPU's experts, whose sums then go up.
    fn cpu_experts(
        &self,
        staging: &mut Staging,
        hybrid: &mut Hybrid,
        (cpu, b): (&Cpu, &mut Buffers),
        call: &Call,
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
        let computed = loop {
            match store.next_ready(&mut f.work) {
                Ok(true) => {
                    let mut list = f.granules.list();
                    granules(store, &f.work, demand, shape, &mut list);
                    cpu.expert_granules(&list, demand, call.w.form(), &b.acts, &mut f.expert);
                    f.granules.give_back(list);
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
        let partial = self.slice(&self.places().ffn.partial);
        for (slot, expert) in demand.experts.iter().enumerate() {
            let (from, to) = (demand.pairs(slot), hybrid.all.pairs(hybrid.all.slot(*expert)));
            let run = if call.is_grouped { from.len() } else { 1 };
            for (from, to) in from.step_by(run).zip(to.step_by(run)) {
                let to = if call.is_grouped { to } else { hybrid.place_of[to] };
                let bytes = words(f.expert.partial(from..from + run), f32::to_le_bytes);
                let at = 4 * to * shape.n_embd;
                staging.upload(call.site.stream, partial.slice(at..at + bytes.len()), &bytes)?;
            }
        }
        Ok(())
    }

    /// y += Σ_rank weights · partial, in rank order
    pub fn sum(&self, shape: &DeviceShape, n_pairs: usize, is_grouped: bool) -> Result<()> {
        let (route, f) = (self.route(), &self.places().ffn);
        let pairs = match is_grouped {
            true => self.words(&f.places, self.n * route.k),
            false => route.chosen,
        };
        let partial = self.words(&f.partial, n_pairs * shape.n_embd);
        let (experts, stream, y) = (&self.g.ops.experts, self.stream(), self.y());
        // SAFETY: places are those of the demand's pairs.
        unsafe {
            experts.ordered_sum(stream, shape, self.n, pairs, is_grouped, route.weights, partial, y)
        }
    }
}
