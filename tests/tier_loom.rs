//! The tier under a model checker: the very sources of slots, residency, queue and their lock, with
//! loom's primitives in the place of src/experts/sync.rs, so that loom tries the interleavings of
//! works, predictions and link threads one by one. It finds dead locks and lost wake-ups (a wait
//! has no time-out here) and, as slots are cells it watches, accesses to a slot that nothing
//! orders: what the header of src/experts/tier/mod.rs argues.

pub use moeba::{cancel, policy};

#[allow(dead_code, unused_imports)]
#[path = "../src/experts"]
mod experts {
    pub mod acquisition;
    pub mod counters;
    pub mod tier;

    pub mod layout {
        pub mod piece;
    }

    pub mod disk {
        pub mod sleep;
    }

    pub mod sync {
        pub use loom::sync::atomic::{AtomicU8, Ordering};
        pub use loom::sync::{Condvar, Mutex, MutexGuard};
        use std::time::Duration;

        /// No time ever ends: what waits must be woken.
        pub fn wait_at_most<'a, T>(
            condvar: &Condvar,
            guard: MutexGuard<'a, T>,
            _time: Duration,
        ) -> MutexGuard<'a, T> {
            condvar.wait(guard).unwrap()
        }
    }

    /// Stands in for the store, which alone may start an acquisition.
    pub fn open(work: &mut acquisition::Acquisition, experts: &[u32], access: acquisition::Access) {
        work.start(1, 0, acquisition::LayerPart::whole(experts), access);
    }

    pub fn handed(work: &acquisition::Acquisition) -> &[acquisition::GranuleRef] {
        &work.handed
    }
}

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use experts::acquisition::{Access, Acquisition};
use experts::disk::sleep::Sleep;
use experts::layout::piece::{Dest, Piece};
use experts::tier::{ClassPlan, Fault, LayerPlan, Layout, Stop, Ticket, Tier, TierPlan};
use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use policy::{Event, Eviction, Expert, Lru, Prediction, ScanResistant, Shape};

const PIECE_BYTES: usize = 4096;

/// One read a granule and, with `rows`, one that all granules need and that is staged.
struct Plain {
    rows: bool,
}

impl Layout for Plain {
    fn pieces(&self, expert: Expert, granules: Range<usize>, out: &mut Vec<Piece>) {
        let start = u64::from(expert.expert);
        let piece = |to| Piece { shard: 0, start, len: PIECE_BYTES, need: PIECE_BYTES, to };
        out.extend(granules.map(|granule| piece(Dest::Slot { granule, at: 0 })));
        if self.rows {
            out.push(piece(Dest::Rows { first: 0, n: 1, skip: 0 }));
        }
    }
}

/// Which granule's bytes a slot has.
type Label = Option<(u32, usize)>;

/// A tier and its memory, in which a label stands for bytes.
struct World {
    tier: Tier,
    /// The bytes that reads bring directly, and those copied out of staged rows.
    slots: Vec<[UnsafeCell<Label>; 2]>,
    staging: Vec<UnsafeCell<u32>>,
}

// SAFETY: that accesses to the cells are ordered is what loom checks here.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new(n_granules: usize, n_slots: usize, n_transit: usize, rows: bool) -> Arc<World> {
        let lru = Lru::new(&Shape::of_model(vec![3], 2));
        World::with(Box::new(lru), n_granules, [n_slots, n_transit], rows)
    }

    fn with(
        eviction: Box<dyn Eviction>,
        n_granules: usize,
        [n_slots, n_transit]: [usize; 2],
        rows: bool,
    ) -> Arc<World> {
        let plan = TierPlan {
            layers: vec![LayerPlan { n_experts: 3, n_own: 3, n_granules, class: 0 }],
            classes: vec![ClassPlan { n_slots, n_transit, slot_bytes: PIECE_BYTES }],
            n_staging: usize::from(rows),
            staging_bytes: PIECE_BYTES,
        };
        Arc::new(World {
            tier: Tier::new(plan, Box::new(Plain { rows }), eviction),
            slots: (0..n_slots).map(|_| [(); 2].map(|()| UnsafeCell::new(None))).collect(),
            staging: (0..usize::from(rows)).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    /// A link's thread with one read at a time; the first `n_faults` of them fail.
    fn link(self: &Arc<World>, n_faults: usize) -> thread::JoinHandle<()> {
        let world = self.clone();
        thread::spawn(move || {
            let mut n_faults = n_faults;
            let mut reads = Vec::new();
            while world.tier.start_reads(1, true, &mut reads) {
                for (number, ticket) in reads.drain(..) {
                    world.carry(number, &ticket, n_faults > 0);
                    n_faults = n_faults.saturating_sub(1);
                }
            }
        })
    }

    fn carry(&self, number: u32, ticket: &Ticket, fails: bool) {
        let expert = ticket.expert.expert;
        let write = |at: usize, part: usize| {
            let label = Some((expert, ticket.first_granule + at));
            let slot = &self.slots[ticket.slots[at] as usize][part];
            // SAFETY: loom panics where another thread may be at it.
            slot.with_mut(|bytes| unsafe { *bytes = label });
        };
        match (ticket.piece.to, ticket.staging) {
            (Dest::Slot { granule, .. }, _) => write(granule - ticket.first_granule, 0),
            (Dest::Rows { .. }, staging) => {
                let staging = &self.staging[staging.unwrap() as usize];
                // SAFETY: as above.
                staging.with_mut(|bytes| unsafe { *bytes = expert });
                (0..ticket.slots.len()).for_each(|at| write(at, 1));
                // SAFETY: as above.
                assert_eq!(staging.with(|bytes| unsafe { *bytes }), expert);
            }
        }
        let fault = || Fault("disk on fire".into());
        self.tier.end_read(number, if fails { Err(fault()) } else { Ok(()) });
    }

    fn acquire(&self, experts: &[u32], access: Access) -> Acquisition {
        let mut work = Acquisition::default();
        experts::open(&mut work, experts, access);
        self.tier.acquire(&mut work);
        work
    }

    /// Computes until the end, or the failure; how many granules there were.
    fn compute(&self, work: &mut Acquisition) -> Result<usize, Stop> {
        let mut n = 0;
        while self.tier.next_ready(work, &|| false)? {
            for handed in experts::handed(work) {
                for part in &self.slots[handed.slot as usize][..1 + self.staging.len()] {
                    // SAFETY: as above.
                    let label = part.with(|bytes| unsafe { *bytes });
                    assert_eq!(label, Some((handed.expert, handed.granule)));
                }
                n += 1;
            }
        }
        Ok(n)
    }

    /// From acquire to release, with all granules computed.
    fn decode(&self, experts: &[u32], n_granules: usize) {
        let mut work = self.acquire(experts, Access::Decode);
        assert_eq!(self.compute(&mut work), Ok(n_granules));
        self.tier.release(&mut work);
    }

    fn prefetch(&self, expert: u32) {
        let expert = Expert { layer: 0, expert };
        self.tier.prefetch(&[Prediction { expert, priority: 0.5 }], self.tier.step());
    }

    /// Run by the last one: the links end, and nothing is left pinned or on its way.
    fn end(&self, links: impl IntoIterator<Item = thread::JoinHandle<()>>) {
        self.tier.close();
        links.into_iter().for_each(|link| link.join().unwrap());
        self.tier.check_integrity();
    }
}

/// All interleavings with so few pre-emptions.
fn check(name: &str, preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    let (n, since) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let counted = n.clone();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    eprintln!("{name}: {} interleavings, {:.1?}", n.load(Ordering::Relaxed), since.elapsed());
}

#[test]
fn a_token_waits_for_its_misses() {
    check("two misses, one link", 3, || {
        let world = World::new(1, 3, 1, false);
        let link = world.link(0);
        world.decode(&[0, 1], 2);
        assert!(world.tier.check_integrity());
        world.end([link]);
    });
}

#[test]
fn reads_of_one_expert_share_its_slots_and_the_staging_between_two_links() {
    check("staged rows, two links", 3, || {
        let world = World::new(2, 4, 2, true);
        let links = [world.link(0), world.link(0)];
        world.decode(&[0], 2);
        world.end(links);
    });
}

#[test]
fn works_that_have_room_for_one_expert_take_turns() {
    check("two works, one slot", 3, || {
        let world = World::new(1, 1, 1, false);
        let link = world.link(0);
        let other = world.clone();
        let prompt = thread::spawn(move || {
            let mut work = other.acquire(&[1, 2], Access::Prompt);
            assert_eq!(other.compute(&mut work), Ok(2));
            other.tier.release(&mut work);
        });
        world.decode(&[0, 1], 2);
        prompt.join().unwrap();
        assert!(world.tier.check_integrity());
        world.end([link]);
    });
}

#[test]
fn a_prefetch_may_come_at_any_time() {
    check("prefetch and acquire", 3, || {
        let world = World::new(1, 2, 1, false);
        let link = world.link(0);
        let other = world.clone();
        let policy = thread::spawn(move || {
            other.prefetch(0);
            other.prefetch(2);
        });
        world.decode(&[0], 1);
        // The prefetch of the other is stale now, whether queued or being read or landed.
        world.decode(&[1], 1);
        policy.join().unwrap();
        world.end([link]);
    });
}

#[test]
fn a_prefetch_in_the_way_of_demand_leaves() {
    check("prefetch in the only slot", 3, || {
        let world = World::new(2, 2, 2, false);
        let link = world.link(0);
        let other = world.clone();
        let policy = thread::spawn(move || other.prefetch(0));
        world.decode(&[1], 2);
        policy.join().unwrap();
        world.end([link]);
    });
}

#[test]
fn a_prompt_takes_what_it_foresaw() {
    check("a layer prefetch, wanted and not", 2, || {
        let world = World::new(1, 2, 1, false);
        let link = world.link(0);
        let other = world.clone();
        let decode = thread::spawn(move || other.decode(&[0], 1));
        world.tier.prefetch_layer(0, &|expert| expert != 1);
        let mut work = world.acquire(&[1, 2], Access::Prompt);
        assert_eq!(world.compute(&mut work), Ok(2));
        world.tier.release(&mut work);
        decode.join().unwrap();
        world.tier.cancel_layer_prefetch();
        world.end([link]);
    });
}

#[test]
fn a_prefetch_is_read_without_being_asked_for() {
    check("prefetch alone", 3, || {
        let world = World::new(1, 2, 1, false);
        let other = world.clone();
        let link = thread::spawn(move || {
            let mut reads = Vec::new();
            assert!(other.tier.start_reads(1, true, &mut reads));
            other.carry(reads[0].0, &reads[0].1, false);
        });
        world.prefetch(0);
        link.join().unwrap();
        assert!(world.tier.check_integrity());
        assert_eq!(world.tier.counters().prefetch_pending_bytes, PIECE_BYTES as u64);
    });
}

#[test]
fn free_room_is_filled_beside_demand() {
    check("filling, two links", 2, || {
        let world = World::new(1, 3, 1, false);
        world.tier.use_idle_link(None);
        let links = [world.link(0), world.link(0)];
        world.decode(&[1], 1);
        world.end(links);
    });
}

#[test]
fn an_idle_link_swaps_beside_demand() {
    check("swap", 2, || {
        let eviction = ScanResistant::new(&Shape::of_model(vec![3], 1));
        let world = World::with(Box::new(eviction), 1, [2, 1], false);
        world.tier.use_idle_link(None);
        let link = world.link(0);
        world.decode(&[0], 1);
        world.tier.observe(&Event::Expected { layer: 0, used: &[0.0, 0.0, 1.0], later: &[] });
        world.decode(&[1], 1);
        world.end([link]);
    });
}

#[test]
fn a_work_may_give_up_while_its_reads_are_on_their_way() {
    check("release in flight", 3, || {
        let world = World::new(2, 4, 2, false);
        let link = world.link(0);
        let other = world.clone();
        let hasty = thread::spawn(move || {
            let mut work = other.acquire(&[0, 1], Access::Decode);
            other.tier.release(&mut work);
        });
        world.decode(&[0], 2);
        hasty.join().unwrap();
        world.end([link]);
    });
    check("release of the room", 3, || {
        let world = World::new(1, 1, 1, false);
        let link = world.link(0);
        let other = world.clone();
        let hasty = thread::spawn(move || {
            let mut work = other.acquire(&[0], Access::Prompt);
            assert_eq!(other.tier.next_ready(&mut work, &|| false), Ok(true));
            other.tier.release(&mut work);
        });
        world.decode(&[1], 1);
        hasty.join().unwrap();
        world.end([link]);
    });
}

#[test]
fn an_interrupted_work_lets_go() {
    check("interruption", 3, || {
        let world = World::new(1, 2, 1, false);
        let link = world.link(0);
        let mut work = world.acquire(&[0], Access::Prompt);
        match world.tier.next_ready(&mut work, &|| true) {
            Ok(true) | Err(Stop::Interrupted) => {}
            other => panic!("{other:?}"),
        }
        world.tier.release(&mut work);
        world.decode(&[1], 1);
        world.end([link]);
    });
}

#[test]
fn a_failed_read_fails_its_waiters_and_no_later_ones() {
    check("failed read", 3, || {
        let world = World::new(1, 2, 1, false);
        let link = world.link(1);
        let other = world.clone();
        let other = thread::spawn(move || {
            let mut work = other.acquire(&[0], Access::Decode);
            let result = other.compute(&mut work);
            other.tier.release(&mut work);
            result.is_err()
        });
        let mut work = world.acquire(&[0], Access::Decode);
        let failed = world.compute(&mut work).is_err();
        world.tier.release(&mut work);
        // One at least has met it, and now it is forgotten.
        assert!(other.join().unwrap() | failed);
        world.decode(&[0], 1);
        assert!(world.tier.check_integrity());
        world.end([link]);
    });
}

#[test]
fn links_end_when_the_tier_closes() {
    check("close", 3, || {
        let world = World::new(1, 2, 1, false);
        let links = [world.link(0), world.link(0)];
        world.prefetch(0);
        world.end(links);
    });
}

/// The link that sleeps in the kernel: a source, a bell that counts, and the word between them.
#[test]
fn a_sleeping_link_hears_every_call() {
    check("bell", 4, || {
        let link = Arc::new((Sleep::new(), Mutex::new(0), Mutex::new(0), Condvar::new()));
        let callers = [0, 1].map(|_| {
            let link = link.clone();
            thread::spawn(move || {
                let (sleep, source, bell, rung) = &*link;
                *source.lock().unwrap() += 1;
                if sleep.call() {
                    *bell.lock().unwrap() += 1;
                    rung.notify_all();
                }
            })
        });
        let (sleep, source, bell, rung) = &*link;
        let mut n = 0;
        while n < 2 {
            sleep.listen();
            let found = std::mem::take(&mut *source.lock().unwrap());
            n += found;
            if found == 0 && sleep.fall_asleep() {
                let mut count = bell.lock().unwrap();
                while *count == 0 {
                    count = rung.wait(count).unwrap();
                }
                *count = 0;
            }
        }
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}
