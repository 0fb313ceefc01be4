//! The state machine under random events in random order, with a memory of labels in place of
//! bytes: what is handed out must hold what it is said to hold, for as long as it is handed out.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;

use super::tier::class::{ClassPlan, Role};
use super::tier::load::Fault;
use super::tier::queue::{Cause, PREFETCH_GRANULES_MAX};
use super::tier::residency::LayerPlan;
use super::tier::state::{Layout, Progress, State, TierPlan};
use super::tier::upper::UpperResidency;
use crate::experts::acquisition::{Access, Acquisition, GranuleRef, LayerPart};
use crate::experts::layout::piece::{Dest, Piece};
use crate::policy::{Event, Expert, LayerShare, Prediction, Profile, Routed, Shape};

mod admission;
mod filling;
mod mixed;
mod pinned;
mod prefetch;
mod share;
mod status;
mod swapping;
mod transit;
mod upper;

const PIECE_BYTES: usize = 4096;
const GRANULES: usize = 3;

/// Two reads a granule, and with `rows` two more that all granules need.
struct Plain {
    rows: bool,
}

impl Layout for Plain {
    fn pieces(&self, expert: Expert, granules: Range<usize>, out: &mut Vec<Piece>) {
        let piece = |to| Piece {
            shard: 0,
            start: u64::from(expert.expert),
            len: PIECE_BYTES,
            need: PIECE_BYTES,
            to,
        };
        for granule in granules {
            out.extend([0, 1].map(|i| piece(Dest::Slot { granule, at: i * PIECE_BYTES })));
        }
        if self.rows {
            out.extend([0, 1].map(|i| piece(Dest::Rows { first: i, n: 1, skip: 0 })));
        }
    }
}

fn plan(n_slots: [usize; 2], n_transit: usize) -> TierPlan {
    let layer = |n_experts, n_granules, class| {
        let n_own = n_experts;
        LayerPlan { n_experts, n_own, n_granules, class }
    };
    let class = |n_slots| ClassPlan { n_slots, n_transit, slot_bytes: 2 * PIECE_BYTES };
    TierPlan {
        layers: vec![layer(0, 0, 0), layer(6, GRANULES, 0), layer(6, 2, 1), layer(6, GRANULES, 0)],
        classes: n_slots.map(class).to_vec(),
        n_staging: 2,
        staging_bytes: PIECE_BYTES,
    }
}

const MOE_LAYERS: Range<usize> = 1..4;

struct World {
    state: State,
    works: Vec<Acquisition>,
    /// For each class and slot the granule whose bytes it has, if they are all of one.
    memory: Vec<Vec<Option<(Expert, usize)>>>,
    /// Slots that are being computed with, by work.
    lent: Vec<HashSet<(usize, u32)>>,
    in_flight: Vec<u32>,
    /// The granules that a device was told of, for each pinned layer.
    pinned_layers: BTreeMap<usize, Vec<GranuleRef>>,
    /// The slot table of each layer, kept by what has changed: slots by expert.
    slot_tables: BTreeMap<usize, BTreeMap<u32, Vec<u32>>>,
    /// The reports to a tier below.
    told: Arc<UpperResidency>,
    /// Granules of prefetch that may be in flight.
    n_granules: u64,
    /// Whether an idle link brings what is worth more than a working expert.
    is_swapping: bool,
}

impl World {
    fn new(plan: TierPlan, rows: bool, policy: &str, n_works: usize) -> World {
        let n_experts = plan.layers.iter().map(|l| l.n_experts).collect();
        let spec: crate::policy::PolicySpec = policy.parse().unwrap();
        let shape = Shape::of_model(n_experts, 2);
        let eviction = spec.build(&shape, &Profile::default()).eviction;
        let told = Arc::new(UpperResidency::new(&plan.layers));
        let memory = plan.classes.iter().map(|c| vec![None; c.n_slots]).collect();
        let mut state = State::new(plan, Box::new(Plain { rows }), eviction);
        state.set_lower_tier(told.clone());
        World {
            memory,
            state,
            told,
            n_granules: 1,
            is_swapping: false,
            works: (0..n_works).map(|_| Acquisition::default()).collect(),
            lent: vec![HashSet::new(); n_works],
            in_flight: Vec::new(),
            pinned_layers: BTreeMap::new(),
            slot_tables: BTreeMap::new(),
        }
    }

    fn class(layer: usize) -> usize {
        usize::from(layer == 2)
    }

    fn acquire(&mut self, w: usize, layer: usize, experts: &[u32], access: Access) {
        self.acquire_part(w, layer, LayerPart::whole(experts), access);
    }

    fn acquire_part(&mut self, w: usize, layer: usize, part: LayerPart<'_>, access: Access) {
        self.works[w].start(1, layer, part, access);
        if access.has_decode() {
            let n_decode = if let Access::Mixed { n_decode } = access { n_decode } else { 6 };
            let (layer, chosen) = (layer as u32, &part.experts[..n_decode.min(part.experts.len())]);
            let (probs, hidden): (&[f32], &[f32]) = (&[], &[]);
            let routed = Routed { request: 0, layer, chosen, probs, hidden, ahead: None };
            self.state.observe(&Event::Routed(routed));
        }
        let before = self.working();
        self.state.acquire(&mut self.works[w]);
        if access == Access::Prompt {
            assert!(before.is_subset(&self.working()), "a prompt has evicted working granules");
        }
    }

    /// Working granules that have landed and that somebody has asked for.
    fn working(&self) -> HashSet<(Expert, usize)> {
        let entries = self.state.entries().iter().filter(|e| !e.is_filler);
        entries
            .flat_map(|e| (0..e.working.min(e.resident)).map(move |granule| (e.id, granule)))
            .collect()
    }

    fn advance(&mut self, w: usize) -> Progress {
        self.check_lent(w);
        self.lent[w].clear();
        let layer = self.works[w].layer;
        let progress = self.state.advance(&mut self.works[w]);
        if progress == Progress::Ready {
            for handed in &self.works[w].handed {
                let expert = Expert { layer: layer as u32, expert: handed.expert };
                let label = Some((expert, handed.granule));
                let class = Self::class(layer);
                assert_eq!(self.memory[class][handed.slot as usize], label);
                self.lent[w].insert((class, handed.slot));
            }
            let order = self.works[w].handed.chunk_by(|a, b| a.expert == b.expert);
            let experts: HashSet<u32> = order.clone().map(|run| run[0].expert).collect();
            assert_eq!(experts.len(), order.count(), "granules of an expert stand together");
        } else {
            assert!(self.works[w].handed.is_empty(), "what may be unpinned is not handed out");
        }
        progress
    }

    /// Checks that lent granules have not been written to since.
    fn check_lent(&self, w: usize) {
        let layer = self.works[w].layer;
        for handed in &self.works[w].handed {
            if self.lent[w].contains(&(Self::class(layer), handed.slot)) {
                let expert = Expert { layer: layer as u32, expert: handed.expert };
                let label = Some((expert, handed.granule));
                assert_eq!(self.memory[Self::class(layer)][handed.slot as usize], label);
            }
        }
    }

    /// Pins a layer and records the places that a device may rely on. Returns the number of rows
    /// of its slot table that were named.
    fn pin_layer(&mut self, layer: usize) -> usize {
        let (rebuilt, mut n_rows) = (self.state.rebuilt_slot_table(layer), 0);
        let table = self.slot_tables.entry(layer).or_default();
        self.state.pin_layer(layer, &mut |expert, slots| {
            n_rows += 1;
            match slots {
                [] => drop(table.remove(&expert)),
                _ => drop(table.insert(expert, slots.to_vec())),
            }
        });
        assert!(table.iter().eq(rebuilt.iter().map(|(expert, slots)| (expert, slots))));
        let granules = |(expert, slots): (u32, Vec<u32>)| {
            let place = move |(granule, slot)| GranuleRef { expert, granule, slot };
            slots.into_iter().enumerate().map(place)
        };
        self.pinned_layers.insert(layer, rebuilt.into_iter().flat_map(granules).collect());
        self.check_pinned_layers(layer);
        n_rows
    }

    fn unpin_layer(&mut self, layer: usize, used: &[u32]) {
        self.check_pinned_layers(layer);
        self.pinned_layers.remove(&layer);
        self.state.unpin_layer(layer, used, &mut |_| {});
    }

    fn check_pinned_layers(&self, layer: usize) {
        for handed in &self.pinned_layers[&layer] {
            let expert = Expert { layer: layer as u32, expert: handed.expert };
            let held = self.memory[Self::class(layer)][handed.slot as usize];
            assert_eq!(held, Some((expert, handed.granule)));
        }
    }

    fn is_layer_pinned(&self, class: usize, slot: u32) -> bool {
        let mut of_class =
            self.pinned_layers.iter().filter(|(layer, _)| Self::class(**layer) == class);
        of_class.any(|(_, placed)| placed.iter().any(|handed| handed.slot == slot))
    }

    fn predict(&mut self, predictions: &[Prediction]) {
        self.predict_late(predictions, 0);
    }

    /// Predictions that `age` decode steps have overtaken.
    fn predict_late(&mut self, predictions: &[Prediction], age: u64) {
        let (step, before) = (self.state.step(), self.working());
        self.state.prefetch(predictions, step.saturating_sub(age));
        assert!(before.is_subset(&self.working()), "a prediction evicts working granules");
    }

    fn share(&mut self, shares: &[(usize, usize)]) {
        let shares = shares.iter().map(|&(n_slots, keep)| LayerShare { n_slots, keep });
        let dense = [LayerShare::default()].into_iter();
        self.state.set_shares(&dense.chain(shares).collect::<Vec<_>>());
    }

    fn prefetch_layer(&mut self, layer: Option<usize>) {
        let before = self.working();
        match layer {
            Some(layer) => self.state.prefetch_layer(layer, &|_| true),
            None => self.state.cancel_layer_prefetch(),
        }
        assert!(before.is_subset(&self.working()), "a layer prefetch evicts working granules");
    }

    fn load_all(&mut self) {
        self.start_reads();
        while !self.in_flight.is_empty() {
            self.end_read(0, false);
            self.start_reads();
        }
    }

    fn resident(&self, layer: u32, expert: u32) -> usize {
        let id = Expert { layer, expert };
        self.state.entries().iter().find(|e| e.id == id).unwrap().resident
    }

    fn release(&mut self, w: usize) {
        self.check_lent(w);
        self.lent[w].clear();
        self.state.release(&mut self.works[w]);
    }

    /// So many granules of prefetch may be in flight from now on.
    fn set_depth(&mut self, n_granules: u64) {
        self.n_granules = n_granules;
        self.state.set_prefetch_granules(n_granules);
    }

    fn swap_when_idle(&mut self) {
        self.is_swapping = true;
        self.state.swap_when_idle();
    }

    /// The next read. An idle link that only fills free room evicts no working granules.
    fn start_read(&mut self) -> Option<u32> {
        let before = self.working();
        let number = self.state.start_read();
        let is_kept = self.is_swapping || before.is_subset(&self.working());
        assert!(is_kept, "an idle link has evicted working granules");
        number
    }

    fn start_reads(&mut self) {
        while let Some(number) = self.start_read() {
            let ticket = self.state.ticket(number).clone();
            // A read overwrites its slot from its start, and no slot that is lent.
            if let Dest::Slot { granule, .. } = ticket.piece.to {
                let slot = ticket.slots[granule - ticket.first_granule];
                assert!(self.lent.iter().all(|lent| !lent.contains(&(ticket.class, slot))));
                assert!(!self.is_layer_pinned(ticket.class, slot));
                self.memory[ticket.class][slot as usize] = None;
            }
            if ticket.cause == Cause::Prefetch {
                let flying = self.in_flight.iter().map(|n| self.state.ticket(*n));
                let (mut bytes, mut demand) = (0, 0);
                for other in flying {
                    match other.cause {
                        Cause::Prefetch => bytes += other.piece.len,
                        Cause::Demand => demand += 1,
                    }
                }
                let most = self.n_granules as usize * 2 * PIECE_BYTES;
                assert!(demand == 0 && bytes + ticket.piece.len <= most);
            }
            self.in_flight.push(number);
        }
    }

    fn end_read(&mut self, which: usize, fails: bool) {
        if self.in_flight.is_empty() {
            return;
        }
        let number = self.in_flight.swap_remove(which % self.in_flight.len());
        let ticket = self.state.ticket(number).clone();
        for (i, slot) in ticket.slots.iter().enumerate() {
            // Labels go by granule, so the last write of any of its reads is as good as all.
            self.memory[ticket.class][*slot as usize] =
                Some((ticket.expert, ticket.first_granule + i));
        }
        let fault = || Fault("disk on fire".into());
        self.state.end_read(number, if fails { Err(fault()) } else { Ok(()) });
    }

    /// Computes a work to its end, or to its failure, which is answered.
    fn drain(&mut self, w: usize) -> Option<Fault> {
        for step in 0.. {
            assert!(step < 10_000, "the work waits for ever");
            match self.advance(w) {
                Progress::Ready => {}
                Progress::Done => return None,
                Progress::Failed(fault) => return Some(fault),
                Progress::Waiting => {
                    self.start_reads();
                    assert!(!self.in_flight.is_empty(), "waits for nothing");
                    self.end_read(step, false);
                }
            }
        }
        unreachable!()
    }

    /// All works go on side by side until each is done or has failed.
    fn settle_down(&mut self) {
        let mut open: Vec<usize> = (0..self.works.len()).collect();
        let mut idle_steps = 0;
        for step in 0.. {
            assert!(step < 10_000, "the works wait for each other");
            let before = (open.len(), reads(self), self.in_flight.len());
            let mut computed = false;
            open.retain(|&w| match self.advance(w) {
                Progress::Ready | Progress::Waiting if !self.works[w].is_open() => false,
                Progress::Ready => {
                    computed = true;
                    true
                }
                Progress::Waiting => true,
                Progress::Done | Progress::Failed(_) => {
                    self.release(w);
                    false
                }
            });
            if open.is_empty() {
                break;
            }
            self.start_reads();
            self.end_read(step, false);
            let after = (open.len(), reads(self), self.in_flight.len());
            // One step may go by with unpinning what another work waits for.
            idle_steps = if computed || after != before { 0 } else { idle_steps + 1 };
            assert!(idle_steps < 2, "all wait for nothing");
        }
        self.load_all();
        self.prefetch_layer(None);
        // Works have ended beside what is pinned.
        while let Some(layer) = self.pinned_layers.keys().next() {
            self.unpin_layer(*layer, &[]);
        }
        assert!(self.state.is_idle());
        self.state.check_integrity();
    }
}

#[derive(Clone, Debug)]
enum Op {
    Acquire {
        work: usize,
        layer: usize,
        experts: Vec<u32>,
        later: Vec<u32>,
        access: Access,
    },
    Advance {
        work: usize,
    },
    Release {
        work: usize,
    },
    Prefetch {
        predictions: Vec<Prediction>,
        age: u64,
    },
    /// Slots and kept granules of each layer with experts.
    Share {
        shares: Vec<(usize, usize)>,
    },
    Admit {
        layer: usize,
        experts: Vec<u32>,
    },
    PrefetchLayer {
        layer: Option<usize>,
    },
    PinLayer {
        layer: usize,
    },
    UnpinLayer {
        layer: usize,
        used: Vec<u32>,
    },
    /// The tier above says what it has.
    SetUpper {
        layer: usize,
        expert: u32,
        is_whole: bool,
    },
    /// A predictor says what it expects of a layer's next coming.
    Expect {
        layer: usize,
        used: Vec<f32>,
    },
    /// The link needs so many granules of prefetch in flight.
    Depth {
        n_granules: u64,
    },
    StartReads,
    EndRead {
        which: usize,
        fails: bool,
    },
}

const N_WORKS: usize = 2;

fn op() -> impl Strategy<Value = Op> {
    let experts = proptest::sample::subsequence((0..6).collect::<Vec<u32>>(), 1..=6);
    let upload = proptest::bool::ANY.prop_map(|keep| Access::Upload { keep });
    let mixed = (1..4usize).prop_map(|n_decode| Access::Mixed { n_decode });
    let access = prop_oneof![
        2 => Just(Access::Decode),
        2 => Just(Access::Prompt),
        1 => mixed,
        1 => upload,
    ];
    let prediction = (MOE_LAYERS, 0..6u32, 0.0..1.0f32).prop_map(|(layer, expert, priority)| {
        Prediction { expert: Expert { layer: layer as u32, expert }, priority }
    });
    prop_oneof![
        3 => (0..N_WORKS, MOE_LAYERS, experts.prop_shuffle(), access, 1..=6usize).prop_map(
            |(work, layer, mut experts, access, part)| {
                // A token's experts, or many tokens', all of them or a part.
                experts.truncate(if access.has_prompt() { 6 } else { 2 });
                let is_cut = access == Access::Prompt && part < experts.len();
                let later = if is_cut { experts.split_off(part) } else { Vec::new() };
                Op::Acquire { work, layer, experts, later, access }
            }
        ),
        6 => (0..N_WORKS).prop_map(|work| Op::Advance { work }),
        1 => (0..N_WORKS).prop_map(|work| Op::Release { work }),
        2 => (proptest::collection::vec(prediction, 1..4), 0..3u64)
            .prop_map(|(predictions, age)| Op::Prefetch { predictions, age }),
        1 => proptest::collection::vec((0..12usize, 0..=GRANULES), MOE_LAYERS.len())
            .prop_map(|shares| Op::Share { shares }),
        1 => (MOE_LAYERS, proptest::collection::vec(0..6u32, 0..4))
            .prop_map(|(layer, experts)| Op::Admit { layer, experts }),
        2 => proptest::option::weighted(0.8, MOE_LAYERS)
            .prop_map(|layer| Op::PrefetchLayer { layer }),
        2 => MOE_LAYERS.prop_map(|layer| Op::PinLayer { layer }),
        1 => (MOE_LAYERS, proptest::collection::vec(0..6u32, 0..4))
            .prop_map(|(layer, used)| Op::UnpinLayer { layer, used }),
        2 => (MOE_LAYERS, 0..6u32, proptest::bool::ANY)
            .prop_map(|(layer, expert, is_whole)| Op::SetUpper { layer, expert, is_whole }),
        3 => (MOE_LAYERS, proptest::collection::vec(0.0..1.0f32, 6))
            .prop_map(|(layer, used)| Op::Expect { layer, used }),
        1 => (1..=PREFETCH_GRANULES_MAX).prop_map(|n_granules| Op::Depth { n_granules }),
        4 => Just(Op::StartReads),
        8 => (0..99usize, proptest::bool::weighted(0.05))
            .prop_map(|(which, fails)| Op::EndRead { which, fails }),
    ]
}

fn run(world: &mut World, ops: Vec<Op>) {
    for op in ops {
        match op {
            Op::Acquire { work, layer, experts, later, access } => {
                if world.works[work].is_open() {
                    world.release(work);
                }
                let part = LayerPart { experts: &experts, later: &later };
                world.acquire_part(work, layer, part, access);
            }
            Op::Advance { work } if world.works[work].is_open() => {
                world.advance(work);
            }
            Op::Release { work } => world.release(work),
            Op::Prefetch { predictions, age } => world.predict_late(&predictions, age),
            Op::Share { shares } => world.share(&shares),
            Op::PrefetchLayer { layer } => world.prefetch_layer(layer),
            Op::Admit { layer, experts } => world.state.admit(layer, &experts),
            Op::PinLayer { layer } if !world.pinned_layers.contains_key(&layer) => {
                world.pin_layer(layer);
            }
            Op::UnpinLayer { layer, used } if world.pinned_layers.contains_key(&layer) => {
                world.unpin_layer(layer, &used);
            }
            Op::PinLayer { .. } | Op::UnpinLayer { .. } => {}
            Op::SetUpper { layer, expert, is_whole } => {
                world.set_upper(layer as u32, expert, is_whole);
            }
            Op::Expect { layer, used } => {
                world.state.observe(&Event::Expected {
                    layer: layer as u32,
                    used: &used,
                    later: &[],
                });
            }
            Op::Depth { n_granules } => world.set_depth(n_granules),
            Op::StartReads => world.start_reads(),
            Op::EndRead { which, fails } => world.end_read(which, fails),
            Op::Advance { .. } => {}
        }
        world.state.check_integrity();
        for entry in world.state.entries() {
            assert_eq!(world.told.has(entry.id), entry.is_whole(), "{:?}", entry.id);
        }
        let n_lacking_slots = world.works.iter().filter(|work| work.lacks_slots).count();
        assert_eq!(world.state.n_lacking_slots(), n_lacking_slots);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn whatever_happens_granules_hold_what_they_should(
        ops in proptest::collection::vec(op(), 1..120),
        n_slots in (9..20usize, 6..14usize),
        n_transit in GRANULES..=5,
        rows: bool,
        [fills, swaps] in proptest::array::uniform2(proptest::bool::ANY),
        policy in proptest::sample::select(vec![
            "lru", "lfu", "lcp", "random", "scan-resistant",
        ]),
    ) {
        let policy = format!("predictor=none,eviction={policy}");
        let plan = plan([n_slots.0, n_slots.1], n_transit);
        let budget: usize = plan.n_bytes() as usize;
        let mut world = World::new(plan, rows, &policy, N_WORKS);
        fills.then(|| world.state.fill_free_room());
        swaps.then(|| world.swap_when_idle());
        run(&mut world, ops);
        prop_assert!(world.state.counters().resident_bytes_max as usize <= budget);
        world.settle_down();
        // And the next request is right.
        world.acquire(0, 1, &[5, 0], Access::Decode);
        prop_assert_eq!(world.drain(0), None);
        world.release(0);
    }
}

fn small() -> World {
    World::new(plan([12, 8], GRANULES), true, "predictor=none,eviction=lru", 1)
}

fn decode(world: &mut World, layer: usize, experts: &[u32]) {
    world.acquire(0, layer, experts, Access::Decode);
    assert_eq!(world.drain(0), None);
    world.release(0);
}

fn reads(world: &World) -> u64 {
    world.state.counters().n_reads
}

#[test]
fn what_decode_used_stays_and_a_prompt_leaves_it_there() {
    let mut world = small();
    decode(&mut world, 1, &[0, 1]);
    decode(&mut world, 3, &[2]);
    let before = reads(&world);
    world.acquire(0, 1, &[0, 1, 2, 3, 4, 5], Access::Prompt);
    assert_eq!(world.drain(0), None);
    world.release(0);
    // Four experts, once each, three granules of two reads and two reads of rows.
    assert_eq!(reads(&world) - before, 4 * 8);
    let before = reads(&world);
    decode(&mut world, 1, &[0, 1]);
    decode(&mut world, 3, &[2]);
    assert_eq!(reads(&world), before);
}

#[test]
fn a_victim_keeps_the_prefix_whose_room_is_not_needed() {
    let mut world = small();
    // Layers of three granules share 12 − 3 working slots; one expert needs three.
    for expert in 0..3 {
        decode(&mut world, 1, &[expert]);
    }
    decode(&mut world, 3, &[0]);
    let victim = world.state.entries().iter().find(|e| e.id == Expert { layer: 1, expert: 0 });
    assert_eq!(victim.unwrap().working, 0);
    let counters = world.state.counters();
    assert_eq!((counters.hits_whole, counters.misses), (0, 4));
    decode(&mut world, 1, &[1]);
    assert_eq!(world.state.counters().hits_whole, 1);
}

#[test]
fn a_prefetch_that_is_used_is_not_read_again_and_a_wrong_one_is_counted() {
    let mut world = small();
    // The working set is full, so predictions live in transit.
    for expert in 0..3 {
        decode(&mut world, 3, &[expert]);
    }
    let (demanded, missed) = (world.state.counters().demand_bytes, 3);
    let predict = |expert| Prediction { expert: Expert { layer: 1, expert }, priority: 0.5 };
    world.predict(&[predict(3)]);
    while world.state.start_read().map(|n| world.in_flight.push(n)).is_some() {
        world.end_read(0, false);
    }
    let before = reads(&world);
    decode(&mut world, 1, &[3]);
    assert_eq!(reads(&world), before);
    let counters = world.state.counters();
    assert_eq!(counters.prefetch_used_bytes, 8 * PIECE_BYTES as u64);
    assert_eq!((counters.demand_bytes, counters.hits_whole), (demanded, 1));
    assert_eq!(counters.misses, missed);
    // Transit holds one expert: the next prediction pushes out the last.
    for expert in [4, 5] {
        world.predict(&[predict(expert)]);
        while world.state.start_read().map(|n| world.in_flight.push(n)).is_some() {
            world.end_read(0, false);
        }
    }
    assert_eq!(world.state.counters().prefetch_wasted_bytes, 8 * PIECE_BYTES as u64);
}

#[test]
fn demand_takes_the_room_of_prefetches_that_wait_for_it() {
    for n_started in 0..=2 {
        let mut world = small();
        for expert in 0..3 {
            decode(&mut world, 3, &[expert]);
        }
        // All of transit is promised to a prediction, one granule of which is on its way at most.
        let predict = |expert| Prediction { expert: Expert { layer: 1, expert }, priority: 0.5 };
        world.predict(&[predict(3)]);
        for _ in 0..n_started {
            world.in_flight.push(world.state.start_read().unwrap());
        }
        world.acquire(0, 3, &[4], Access::Prompt);
        for _ in 0..n_started {
            world.end_read(0, false);
            assert_eq!(world.advance(0), Progress::Waiting);
        }
        world.start_reads();
        let causes = world.in_flight.iter().map(|n| world.state.ticket(*n).cause);
        let causes: Vec<Cause> = causes.collect();
        assert!(!causes.is_empty() && causes.iter().all(|cause| *cause == Cause::Demand));
        assert_eq!(world.drain(0), None);
        world.release(0);
        assert!(world.state.is_idle());
        let wasted = (n_started * PIECE_BYTES) as u64;
        assert_eq!(world.state.counters().prefetch_wasted_bytes, wasted);
    }
}

#[test]
fn a_prediction_of_what_is_waited_for_does_not_put_it_off() {
    let mut world = World::new(plan([12, 8], GRANULES), true, "predictor=none,eviction=lru", 2);
    for expert in 0..3 {
        decode(&mut world, 3, &[expert]);
    }
    // The one has taken all of transit, so that the other waits for room.
    world.acquire(0, 1, &[3], Access::Prompt);
    world.acquire(1, 1, &[4], Access::Prompt);
    world.predict(&[Prediction { expert: Expert { layer: 1, expert: 4 }, priority: 0.5 }]);
    assert_eq!(world.drain(0), None);
    world.release(0);
    world.predict(&[Prediction { expert: Expert { layer: 1, expert: 4 }, priority: 0.5 }]);
    assert_eq!(world.advance(1), Progress::Waiting);
    world.start_reads();
    assert_eq!(world.state.ticket(world.in_flight[0]).cause, Cause::Demand);
    assert_eq!(world.drain(1), None);
    world.release(1);
    assert!(world.state.is_idle());
}

#[test]
fn a_failed_load_fails_its_work_and_the_next_tries_again() {
    let mut world = small();
    world.acquire(0, 1, &[0], Access::Decode);
    world.start_reads();
    world.end_read(0, true);
    while !world.in_flight.is_empty() {
        world.end_read(0, false);
    }
    assert_eq!(world.advance(0), Progress::Failed(Fault("disk on fire".into())));
    world.release(0);
    assert!(world.state.is_idle());
    assert_eq!(world.state.held(Role::Working) + world.state.held(Role::Transit), 0);
    decode(&mut world, 1, &[0]);
}

fn predicted(layer: u32, expert: u32, priority: f32) -> Prediction {
    Prediction { expert: Expert { layer, expert }, priority }
}

/// A tier whose working set is full and whose transit holds two experts of three granules.
fn full() -> World {
    let mut world = World::new(plan([15, 8], 2 * GRANULES), true, "predictor=none,eviction=lru", 1);
    for expert in 0..3 {
        decode(&mut world, 3, &[expert]);
    }
    world
}

#[test]
fn a_prediction_protects_until_a_more_urgent_one_or_one_without_it() {
    let mut world = full();
    world.predict(&[predicted(1, 0, 0.9), predicted(1, 1, 0.5)]);
    world.load_all();
    let resident = |world: &World| (0..4).map(|e| world.resident(1, e)).collect::<Vec<_>>();
    assert_eq!(resident(&world), [3, 3, 0, 0]);
    // Less urgent: there is no room for it.
    world.predict(&[predicted(1, 0, 0.9), predicted(1, 1, 0.5), predicted(1, 2, 0.4)]);
    world.load_all();
    assert_eq!(resident(&world), [3, 3, 0, 0]);
    // More urgent than one of them.
    world.predict(&[predicted(1, 0, 0.9), predicted(1, 2, 0.6), predicted(1, 1, 0.5)]);
    world.load_all();
    assert_eq!(resident(&world), [3, 0, 3, 0]);
    // They are not named any more.
    world.predict(&[predicted(1, 3, 0.1)]);
    world.load_all();
    assert_eq!(resident(&world), [0, 0, 3, 3]);
}

#[test]
fn predictions_replace_each_other_in_the_queue() {
    let mut world = full();
    world.predict(&[predicted(1, 0, 0.9), predicted(1, 1, 0.5)]);
    world.predict(&[predicted(1, 1, 0.8), predicted(1, 2, 0.3)]);
    world.start_reads();
    assert_eq!(world.state.ticket(world.in_flight[0]).expert.expert, 1);
    world.load_all();
    let resident = (0..3).map(|e| world.resident(1, e)).collect::<Vec<_>>();
    assert_eq!(resident, [0, 3, 3]);
}

#[test]
fn what_is_predicted_of_a_layer_that_has_gone_by_is_not_brought() {
    let mut world = full();
    let step = world.state.step();
    decode(&mut world, 1, &[0]);
    world.state.prefetch(&[predicted(1, 4, 0.9), predicted(3, 4, 0.5)], step);
    world.load_all();
    assert_eq!((world.resident(1, 4), world.resident(3, 4)), (0, 3));
}
