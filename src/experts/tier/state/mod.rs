//! The machine itself: residency, slots, loads and queue of one tier, moved by six events: a layer
//! acquires experts, asks for more of them, releases them; a policy predicts; a read starts; a
//! read ends. It holds no memory, does no I/O and never waits, so every interleaving can be tested.
//!
//! Invariants, checked by `check_integrity`:
//! - an expert's granules in memory are a prefix, its slots too, and its working slots too;
//! - a pinned granule that has landed stays where it is;
//! - a load's granules hold slots from its start to its end, and those of no other load;
//! - a queued prefetch belongs to the layer prefetch, the latest predictions or an admission;
//! - without a load, transit holds whole experts or nothing of them, unless a load has just failed:
//!   so what waits for room in transit waits for computation and reads, never for another waiter;
//! - both roles keep within what their class gives them.

mod admission;
mod allocation;
mod check;
mod filling;
mod layer_prefetch;
mod pinned;
mod predictions;
mod swapping;
mod transit;

use slab::Slab;

use super::class::{Class, ClassPlan};
use super::load::{Fault, Load};
use super::queue::{Cause, LoadId, TransferQueue};
use super::residency::{LayerPlan, Residency};
use super::upper::UpperResidency;
use crate::experts::acquisition::{Access, Acquisition, GranuleRef, WantedExpert};
use crate::experts::counters::Counters;
use crate::experts::layout::piece::Piece;
use crate::policy::{Event, Eviction, Expert, LayerShare, Profile};
use filling::Filling;
use layer_prefetch::LayerPrefetch;
use pinned::PinnedLayer;
use std::ops::Range;
use std::sync::Arc;
use swapping::Swapping;

/// While a prompt waits for loads, so many granules are handed out at once: enough to keep the
/// processor busy, few enough for their slots to come back before the link runs dry.
const PROMPT_WAVE_GRANULES: usize = 8;

/// Which reads bring granules to memory.
pub trait Layout: Send + Sync {
    fn pieces(&self, expert: Expert, granules: Range<usize>, out: &mut Vec<Piece>);

    /// Whether the tier may hold an expert of its layers.
    fn may_hold(&self, _expert: Expert) -> bool {
        true
    }

    /// Whether the tier may hold it, and reads of it keep no other link busy.
    fn is_at_hand(&self, expert: Expert) -> bool {
        self.may_hold(expert)
    }
}

/// The sizes of a tier.
#[derive(Clone, Debug)]
pub struct TierPlan {
    pub layers: Vec<LayerPlan>,
    pub classes: Vec<ClassPlan>,
    /// Buffers for reads that are scattered into slots, and their size.
    pub n_staging: usize,
    pub staging_bytes: usize,
}

impl TierPlan {
    /// Asserts that no work can wait for ever: transit holds an expert of every layer, or every
    /// expert has slots of its own.
    fn check(&self) {
        for (class, slots) in self.classes.iter().enumerate() {
            let all: usize = self.layers_of(class).map(|l| l.n_own * l.n_granules).sum();
            let largest = self.largest_expert(class);
            let working = slots.n_slots - slots.n_transit;
            assert!(working >= all || slots.n_transit >= largest, "{slots:?} of {all}");
        }
    }

    fn layers_of(&self, class: usize) -> impl Iterator<Item = &LayerPlan> {
        self.layers.iter().filter(move |l| l.n_experts > 0 && l.class == class)
    }

    /// Granules of the largest expert of a class.
    fn largest_expert(&self, class: usize) -> usize {
        self.layers_of(class).map(|l| l.n_granules).max().unwrap_or(0)
    }
}

/// A read that has started: what its executor needs to know.
#[derive(Clone, Debug)]
pub struct Ticket {
    pub load: LoadId,
    pub expert: Expert,
    pub piece: Piece,
    pub cause: Cause,
    /// The use that the load was begun for.
    pub access: Access,
    pub class: usize,
    /// The first granule of the load and the slots of its granules, in order.
    pub first_granule: usize,
    pub slots: Vec<u32>,
    /// Which staging buffer, for rows that are scattered.
    pub staging: Option<u32>,
}

/// The state of a work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Granules have been handed out.
    Ready,
    /// Something must land first.
    Waiting,
    /// All has been computed.
    Done,
    Failed(Fault),
}

pub struct State {
    layout: Box<dyn Layout>,
    eviction: Box<dyn Eviction>,
    table: Residency,
    classes: Vec<Class>,
    loads: Slab<Load>,
    queue: TransferQueue,
    tickets: Slab<Ticket>,
    staging: Vec<u32>,
    plan: TierPlan,
    /// The part that each layer may keep; empty: a class's slots go to the most valuable experts.
    shares: Vec<LayerShare>,
    clock: u64,
    /// Decode steps of layers so far, and the last one of each layer.
    step: u64,
    last_step: Vec<u64>,
    /// Tokens of decode that the eviction has heard of in each layer since its last step.
    n_heard: Vec<u64>,
    /// Number of the last predictions: what they name is protected.
    prediction_round: u64,
    /// The layer that a prompt wants next.
    layer_prefetch: LayerPrefetch,
    /// Works of which a demand waits for room.
    n_lacking_slots: usize,
    /// The experts that free room is filled with.
    filling: Filling,
    /// The experts that an idle link may bring in the place of others.
    swapping: Swapping,
    /// How much a byte of prefetch takes from demand, from 0 to 1.
    prefetch_price: f64,
    /// The last layer that was acquired has rows of a prompt.
    is_prompt: bool,
    /// Layers whose whole experts are pinned for a device.
    pinned_layers: Vec<PinnedLayer>,
    /// The experts that the tier above holds whole, and the same report of this tier to the one
    /// below.
    upper: Arc<UpperResidency>,
    lower: Option<Arc<UpperResidency>>,
    pub counters: Counters,
}

impl Drop for State {
    fn drop(&mut self) {
        let whole = |e: &u32| self.table.get(*e).is_whole();
        let all = 0..self.table.entries().len() as u32;
        all.filter(whole).for_each(|e| self.report_whole(e, false));
    }
}

impl State {
    pub fn new(plan: TierPlan, layout: Box<dyn Layout>, eviction: Box<dyn Eviction>) -> State {
        let granule_bytes = plan.classes.iter().map(|c| c.slot_bytes).max().unwrap_or(0);
        plan.check();
        State {
            layout,
            eviction,
            table: Residency::new(&plan.layers),
            classes: plan.classes.iter().map(|class| Class::new(*class)).collect(),
            loads: Slab::new(),
            queue: TransferQueue::new(granule_bytes as u64),
            tickets: Slab::new(),
            staging: (0..plan.n_staging as u32).rev().collect(),
            shares: Vec::new(),
            clock: 0,
            step: 0,
            last_step: vec![0; plan.layers.len()],
            n_heard: vec![0; plan.layers.len()],
            // Of none yet: entries begin with 0.
            prediction_round: 1,
            layer_prefetch: LayerPrefetch::default(),
            n_lacking_slots: 0,
            filling: Filling::default(),
            prefetch_price: 0.0,
            is_prompt: false,
            swapping: Swapping::new(plan.layers.len()),
            pinned_layers: Vec::new(),
            upper: Arc::new(UpperResidency::new(&plan.layers)),
            lower: None,
            plan,
            counters: Counters::default(),
        }
    }

    pub fn set_lower_tier(&mut self, lower: Arc<UpperResidency>) {
        self.lower = Some(lower);
    }

    pub fn upper_residency(&self) -> Arc<UpperResidency> {
        self.upper.clone()
    }

    pub fn observe(&mut self, event: &Event) {
        self.eviction.observe(event);
        if let Event::Routed(routed) = event {
            self.n_heard[routed.layer as usize] += 1;
        }
        if self.swapping.observe(event) {
            self.swap();
        }
    }

    /// Puts what the eviction has learned into the profile.
    pub fn save(&self, profile: &mut Profile) {
        self.eviction.save(profile);
    }

    /// Limits the granules that each layer may keep from now on. The surplus leaves when its slots
    /// are needed.
    pub fn set_shares(&mut self, shares: &[LayerShare]) {
        assert_eq!(shares.len(), self.plan.layers.len());
        self.shares = shares.to_vec();
    }

    fn index(&self, layer: usize, expert: u32) -> u32 {
        self.table.index(Expert { layer: layer as u32, expert })
    }

    // ---- a layer's demand ----

    /// Pins what the work wants and queues loads of what is missing.
    pub fn acquire(&mut self, work: &mut Acquisition) {
        // All are pinned before room is made for any.
        for i in 0..work.wanted.len() {
            let e = self.index(work.layer, work.wanted[i].expert);
            self.pin(e);
        }
        if work.access.has_prompt() || work.access.has_decode() {
            self.is_prompt = work.access.has_prompt();
        }
        if work.access.has_prompt() {
            self.on_prompt_layer(work.layer, &work.later);
        }
        if work.access.has_decode() {
            self.on_decode_step(work.layer);
        }
        for i in 0..work.wanted.len() {
            if work.wanted[i].access.keeps() {
                self.move_to_working(self.index(work.layer, work.wanted[i].expert));
            }
        }
        self.queue_demands(work);
    }

    fn pin(&mut self, e: u32) {
        self.count_use(e);
        let entry = self.table.get_mut(e);
        entry.pins += 1;
        if let Some(load) = entry.load {
            self.demand_load(load);
        }
    }

    fn count_use(&mut self, e: u32) {
        self.table.set_counted(e);
        let entry = self.table.get_mut(e);
        entry.is_filler = false;
        self.counters.prefetch_used_bytes += std::mem::take(&mut entry.unused_bytes);
        match entry.is_whole() {
            true => entry.n_hits = entry.n_hits.wrapping_add(1),
            false => entry.n_misses = entry.n_misses.wrapping_add(1),
        }
        match entry.resident {
            n if n == entry.n_granules => self.counters.hits_whole += 1,
            0 => self.counters.misses += 1,
            _ => self.counters.hits_partial += 1,
        }
    }

    /// A decode step has come to this layer.
    fn on_decode_step(&mut self, layer: usize) {
        self.drop_stale_prefetches(layer);
        let n_heard = std::mem::take(&mut self.n_heard[layer]);
        self.counters.unheard_steps += u64::from(n_heard == 0);
        self.step += 1;
        self.last_step[layer] = self.step;
        self.swapping.on_decode_step(layer);
    }

    /// A load that was under way for another reason, or for none any more, is wanted now.
    fn demand_load(&mut self, id: LoadId) {
        let load = &mut self.loads[id as usize];
        load.cause = Cause::Demand;
        if load.stopped && load.fault.is_none() {
            load.stopped = false;
            if load.peek().is_some() {
                self.queue.push_demand(id);
            }
        } else {
            self.queue.promote(id);
        }
    }

    /// Drops prefetches that were predicted for a layer which does not want them.
    fn drop_stale_prefetches(&mut self, layer: usize) {
        let stale = |load: &LoadId| {
            let load = &self.loads[*load as usize];
            let entry = self.table.get(load.expert);
            let is_of_layer = entry.id.layer as usize == layer && !self.is_in_layer_prefetch(entry);
            is_of_layer && entry.pins == 0 && !load.outlives_predictions()
        };
        let stale: Vec<LoadId> = self.queue.prefetches().filter(stale).collect();
        for load in stale {
            self.stop(load);
        }
    }

    /// Queues loads for the work, in its order, as far as there is room.
    fn queue_demands(&mut self, work: &mut Acquisition) {
        let lacks_slots = !self.start_demands(work);
        self.set_lacks_slots(work, lacks_slots);
    }

    fn set_lacks_slots(&mut self, work: &mut Acquisition, lacks_slots: bool) {
        self.n_lacking_slots += usize::from(lacks_slots);
        self.n_lacking_slots -= usize::from(std::mem::replace(&mut work.lacks_slots, lacks_slots));
    }

    /// Whether there was room for all of them.
    fn start_demands(&mut self, work: &Acquisition) -> bool {
        for want in work.wanted.iter().filter(|want| !want.is_done) {
            let e = self.index(work.layer, want.expert);
            let entry = self.table.get(e);
            let lacks = !entry.is_whole() && entry.load.is_none() && entry.fault.is_none();
            if lacks && !self.start_demand(e, want.access) {
                return false;
            }
        }
        true
    }

    /// Prefetches that hold the room give it up, at once or with the end of the read they have on
    /// its way: they wait for demand, so demand must not wait for them. Least probable first.
    fn start_demand(&mut self, e: u32, access: Access) -> bool {
        let class = self.table.get(e).class;
        while !self.start_load(e, Cause::Demand, access, 1.0) {
            let of = |load: LoadId| self.table.get(self.loads[load as usize].expert);
            let mut prefetches = self.queue.prefetches().rev();
            let Some(load) = prefetches.find(|load| of(*load).class == class) else {
                return false;
            };
            drop(prefetches);
            self.stop(load);
        }
        true
    }

    /// Retires what was handed out last and hands out what has landed since.
    pub fn advance(&mut self, work: &mut Acquisition) -> Progress {
        for i in 0..work.wanted.len() {
            self.retire(work, i);
        }
        // An unpinned granule must not be read any more, also if this is the end.
        work.handed.clear();
        self.queue_demands(work);
        self.queue_layer_prefetch();
        let mut left = false;
        let mut waits = false;
        for want in work.wanted.iter().filter(|want| !want.is_done) {
            let entry = self.table.get(self.index(work.layer, want.expert));
            if let Some(fault) = &entry.fault {
                return Progress::Failed(fault.clone());
            }
            left = true;
            waits |= !entry.is_whole();
        }
        if !left {
            return Progress::Done;
        }
        let bounded = waits && work.access.has_prompt();
        let most = if bounded { PROMPT_WAVE_GRANULES } else { usize::MAX };
        self.hand_out(work, most);
        if work.handed.is_empty() { Progress::Waiting } else { Progress::Ready }
    }

    fn retire(&mut self, work: &mut Acquisition, i: usize) {
        let e = self.index(work.layer, work.wanted[i].expert);
        let want = &mut work.wanted[i];
        want.computed = want.ready;
        if !want.is_done && want.computed == self.table.get(e).n_granules {
            want.is_done = true;
            self.unpin(e, want.access);
        }
    }

    /// Hands out experts in transit first: others wait for their slots.
    fn hand_out(&self, work: &mut Acquisition, most: usize) {
        let layer = work.layer;
        for in_transit in [true, false] {
            for want in work.wanted.iter_mut().filter(|want| want.ready == want.computed) {
                let e = self.index(layer, want.expert);
                let entry = self.table.get(e);
                if want.is_done || (entry.in_transit() > 0) != in_transit {
                    continue;
                }
                let end = want.computed.saturating_add(most - work.handed.len().min(most));
                want.ready = entry.resident.min(end).max(want.computed);
                let granules = want.computed..want.ready;
                let expert = want.expert;
                work.handed.extend(granules.map(|granule| {
                    let slot = self.table.slot(e, granule);
                    GranuleRef { expert, granule, slot }
                }));
            }
        }
    }

    /// Unpins the granules that are still pinned. Loads that no other work wants are stopped.
    pub fn release(&mut self, work: &mut Acquisition) {
        self.set_lacks_slots(work, false);
        for i in 0..work.wanted.len() {
            if !work.wanted[i].is_done {
                let WantedExpert { expert, access, .. } = work.wanted[i];
                self.unpin(self.index(work.layer, expert), access);
            }
        }
        work.finish();
        self.queue_layer_prefetch();
    }

    fn unpin(&mut self, e: u32, access: Access) {
        let entry = self.table.get_mut(e);
        entry.pins -= 1;
        if self.table.is_pinned(e) {
            return;
        }
        let entry = self.table.get_mut(e);
        entry.fault = None;
        if let Some(load) = entry.load {
            self.stop(load);
        } else if !access.keeps() || !entry.is_whole() {
            if access == Access::Prompt {
                self.exchange(e);
            }
            self.drop_transit(e);
        }
    }

    // ---- the link ----

    /// The load whose next read may start now, and what for.
    fn startable(&self) -> Option<(LoadId, Cause)> {
        let next = |load: LoadId| self.loads[load as usize].peek();
        let (load, cause) = self.queue.front(|load| next(load).map_or(0, |p| p.len as u64))?;
        let has_room = !next(load)?.is_staged() || !self.staging.is_empty();
        has_room.then_some((load, cause))
    }

    /// Whether a link that asks gets a read, or an expert to fill free room with is looked for.
    pub fn can_start(&self) -> bool {
        self.startable().is_some() || self.may_fill()
    }

    pub fn granule_bytes(&self) -> u64 {
        self.queue.granule_bytes()
    }

    /// So many granules of prefetch may be in flight together.
    pub fn set_prefetch_granules(&mut self, n: u64) {
        self.queue.set_prefetch_granules(n);
    }

    /// Sets how much a byte of prefetch takes from demand, from 0 to 1; see `LinkPrice`.
    pub fn set_prefetch_price(&mut self, price: f64) {
        self.prefetch_price = price;
    }

    /// Whether the last layer that was acquired has rows of a prompt.
    pub fn is_prompt(&self) -> bool {
        self.is_prompt
    }

    /// Whether reads of demand are left to start.
    pub fn has_demand(&self) -> bool {
        self.queue.has_demand()
    }

    /// The next read, now started: its ticket's number.
    pub fn start_read(&mut self) -> Option<u32> {
        if self.startable().is_none() && !self.fill() {
            self.swap();
        }
        let (load_id, cause) = self.startable()?;
        let load = &mut self.loads[load_id as usize];
        let piece = load.start_next();
        if load.peek().is_none() {
            self.queue.remove(load_id);
        }
        self.queue.started(cause, piece.len as u64);
        let (e, granules, access) = (load.expert, load.granules.clone(), load.access);
        let entry = self.table.get(e);
        let ticket = Ticket {
            load: load_id,
            expert: entry.id,
            piece,
            cause,
            access,
            class: entry.class,
            first_granule: granules.start,
            slots: granules.map(|granule| self.table.slot(e, granule)).collect(),
            staging: if piece.is_staged() { self.staging.pop() } else { None },
        };
        self.counters.n_reads += 1;
        Some(self.tickets.insert(ticket) as u32)
    }

    pub fn ticket(&self, number: u32) -> &Ticket {
        &self.tickets[number as usize]
    }

    /// Whether a read is on its way.
    pub fn is_reading(&self) -> bool {
        !self.tickets.is_empty()
    }

    /// A read has ended, its bytes in their slots, or failed for good.
    pub fn end_read(&mut self, number: u32, result: Result<(), Fault>) {
        let ticket = self.tickets.remove(number as usize);
        self.staging.extend(ticket.staging);
        let bytes = ticket.piece.len as u64;
        self.queue.ended(ticket.cause, bytes);
        let load = &mut self.loads[ticket.load as usize];
        load.n_in_flight -= 1;
        match result {
            Ok(()) => {
                load.landed(&ticket.piece);
                self.count_read(ticket.load, ticket.cause, bytes);
            }
            Err(fault) => {
                load.fault.get_or_insert(fault);
            }
        }
        self.land(ticket.load);
        if self.loads[ticket.load as usize].fault.is_some() {
            let is_idle_links = self.loads[ticket.load as usize].access == Access::Fill;
            self.filling.stop_if(is_idle_links);
            self.swapping.stop_if(is_idle_links);
            self.stop(ticket.load);
        } else {
            self.end_if_over(ticket.load);
        }
    }

    fn count_read(&mut self, load: LoadId, cause: Cause, bytes: u64) {
        self.counters.read_bytes += bytes;
        let load = &self.loads[load as usize];
        match (cause, load.cause) {
            (Cause::Demand, _) => self.counters.demand_bytes += bytes,
            (Cause::Prefetch, Cause::Demand) => self.counters.prefetch_used_bytes += bytes,
            (Cause::Prefetch, Cause::Prefetch) => {
                self.table.get_mut(load.expert).unused_bytes += bytes;
            }
        }
    }

    /// Lengthens the expert's prefix by what has landed.
    fn land(&mut self, load: LoadId) {
        let load = &self.loads[load as usize];
        let entry = self.table.get_mut(load.expert);
        while entry.resident < load.granules.end && load.is_complete(entry.resident) {
            entry.resident += 1;
        }
        if entry.is_whole() {
            let e = load.expert;
            self.table.note_change(e);
            self.report_whole(e, true);
        }
    }

    fn report_whole(&self, e: u32, is_whole: bool) {
        if let Some(lower) = &self.lower {
            lower.set_whole(self.table.get(e).id, is_whole);
        }
    }

    /// No further read of this load is started.
    fn stop(&mut self, load: LoadId) {
        self.loads[load as usize].stopped = true;
        self.queue.remove(load);
        self.end_if_over(load);
    }

    fn end_if_over(&mut self, load_id: LoadId) {
        if !self.loads[load_id as usize].is_over() {
            return;
        }
        let load = self.loads.remove(load_id as usize);
        let entry = self.table.get_mut(load.expert);
        entry.load = None;
        if entry.pins > 0 {
            // Granules that landed before the fault may be being computed.
            entry.fault = load.fault;
            let resident = entry.resident;
            self.shrink(load.expert, resident);
        } else if load.stopped || !entry.is_whole() {
            let kept = entry.working.min(entry.resident);
            self.shrink(load.expert, kept);
        }
    }

    // ---- what there is ----

    fn resident_bytes(&self) -> u64 {
        let slots: usize = self.classes.iter().map(|c| c.slots.n_taken() * c.slot_bytes()).sum();
        // Staging is counted whole: it is memory that holds experts' bytes.
        (slots + self.plan.n_staging * self.plan.staging_bytes) as u64
    }

    /// Whether every granule of its experts is in memory, or all of them are in the tier above:
    /// there is nothing left to predict.
    pub fn has_everything(&self) -> bool {
        let granules: usize = self.plan.layers.iter().map(|l| l.n_own * l.n_granules).sum();
        let taken: usize = self.classes.iter().map(|class| class.slots.n_taken()).sum();
        taken == granules && self.loads.is_empty() || self.upper.has_all()
    }

    pub fn counters(&self) -> Counters {
        let pending = self.table.entries().iter().map(|entry| entry.unused_bytes).sum();
        let resident_bytes = self.resident_bytes();
        Counters {
            prefetch_pending_bytes: pending,
            resident_bytes,
            // Before the first load it is the staging buffers alone.
            resident_bytes_max: self.counters.resident_bytes_max.max(resident_bytes),
            ..self.counters
        }
    }
}
