//! Moves granules from disk to RAM: the tier's reads become reads of the disk link, straight into
//! slots or through staging buffers.

use std::io;
use std::sync::Arc;

use super::arena::Arena;
use super::files::Files;
use super::link::{self, Link, Read, ReadSource};
use super::options::StreamOptions;
use super::toucher::Toucher;
use crate::Result;
use crate::experts::HostMemory;
use crate::experts::layout::piece::{Dest, Piece};
use crate::experts::layout::place::{LayerExperts, SlotLayout};
use crate::experts::memory::Region;
use crate::experts::numa::Node;
use crate::experts::peers::Peers;
use crate::experts::runtime::Mover;
use crate::experts::tier::{ClassPlan, Fault, Layout, Ticket, Tier, TierPlan};
use crate::gguf::Gguf;
use crate::policy::Expert;

/// By layer; `None` where a layer has no routed experts.
#[derive(Clone)]
pub struct SlotLayouts {
    layers: Vec<Option<SlotLayout>>,
    /// Machines that have experts of their own, which are not to be brought here unasked.
    peers: Option<Arc<Peers>>,
}

impl SlotLayouts {
    pub fn new(file: &Gguf, layers: &[Option<LayerExperts>]) -> SlotLayouts {
        let layout = |layer: &Option<LayerExperts>| Some(SlotLayout::new(file, layer.as_ref()?));
        SlotLayouts { layers: layers.iter().map(layout).collect(), peers: None }
    }

    pub fn beside(self, peers: Option<Arc<Peers>>) -> SlotLayouts {
        SlotLayouts { peers, ..self }
    }

    pub fn of(&self, layer: usize) -> &SlotLayout {
        self.layers[layer].as_ref().expect("a layer with experts")
    }
}

impl Layout for SlotLayouts {
    fn pieces(&self, expert: Expert, granules: std::ops::Range<usize>, out: &mut Vec<Piece>) {
        self.of(expert.layer as usize).pieces(expert.expert, granules, out);
    }

    fn may_hold(&self, expert: Expert) -> bool {
        self.peers.as_ref().is_none_or(|peers| peers.is_own(expert))
    }
}

/// A RAM tier's memory.
pub struct Memory {
    /// The slots of each size class.
    pub arenas: Vec<Arena>,
    pub staging: Region,
    /// The nodes that slots are spread over; none if there is one.
    pub nodes: Vec<Node>,
}

impl Memory {
    pub fn new(plan: &TierPlan, nodes: Vec<Node>) -> io::Result<Memory> {
        let arena = |class: &ClassPlan| Arena::new(class.n_slots, class.slot_bytes, &nodes);
        let arenas = plan.classes.iter().map(arena).collect::<io::Result<_>>()?;
        let staging = Region::new(plan.n_staging * plan.staging_bytes)?;
        Ok(Memory { arenas, staging, nodes })
    }

    /// All slots.
    pub fn slots(&self) -> Vec<HostMemory> {
        self.arenas.iter().flat_map(Arena::memory).collect()
    }
}

/// The state that the layer loop and the link's threads share.
pub struct Core {
    pub tier: Tier,
    pub plan: TierPlan,
    pub layouts: SlotLayouts,
    pub memory: Memory,
}

impl Core {
    /// The memory of all slots.
    fn slots(&self) -> Vec<&Region> {
        self.memory.arenas.iter().flat_map(Arena::regions).collect()
    }

    pub fn slot(&self, class: usize, slot: u32) -> *mut u8 {
        self.memory.arenas[class].slot(slot)
    }

    fn staging(&self, index: u32) -> *mut u8 {
        let at = index as usize * self.plan.staging_bytes;
        assert!(at + self.plan.staging_bytes <= self.memory.staging.len());
        // SAFETY: in the region, by the assertion.
        unsafe { self.memory.staging.ptr().add(at) }
    }

    fn read(&self, number: u32, ticket: &Ticket) -> Read {
        let Piece { shard, start: offset, len, need, to } = ticket.piece;
        // Staged rows are copied to all slots: the first one's node stands for theirs.
        let (slot, dest) = match to {
            Dest::Slot { granule, at } => {
                assert!(at + len <= self.plan.classes[ticket.class].slot_bytes);
                let slot = ticket.slots[granule - ticket.first_granule];
                // SAFETY: in the slot, by the assertion.
                (slot, unsafe { self.slot(ticket.class, slot).add(at) })
            }
            Dest::Rows { .. } => {
                assert!(len <= self.plan.staging_bytes);
                (ticket.slots[0], self.staging(ticket.staging.expect("rows are staged")))
            }
        };
        let is_spread = !self.memory.nodes.is_empty();
        let node = is_spread.then(|| self.memory.arenas[ticket.class].part(slot));
        Read { id: number, shard, offset, len, need, dest, node }
    }

    /// Copies staged rows of down to the granules they hold columns of.
    fn scatter(&self, ticket: &Ticket) {
        let Some(staging) = ticket.staging else { return };
        let slots: Vec<*mut u8> =
            ticket.slots.iter().map(|slot| self.slot(ticket.class, *slot)).collect();
        let granules = ticket.first_granule..ticket.first_granule + slots.len();
        // SAFETY: the read that filled this buffer has ended and its ticket has not, so the buffer
        // has no other user; the slots belong to a load that is under way, so no layer reads them,
        // and other reads of the load write other bytes of them.
        unsafe {
            let staged = std::slice::from_raw_parts(self.staging(staging), ticket.piece.need);
            let layout = self.layouts.of(ticket.expert.layer as usize);
            layout.scatter(&ticket.piece, staged, granules, &slots);
        }
    }
}

// SAFETY: a read's bytes are those of a slot of a load that is under way, or of a staging buffer
// that its ticket holds; the state machine gives neither to another user before `end_read`, which
// `complete` calls last. The regions live as long as the core, which the link holds.
unsafe impl ReadSource for Core {
    fn next(&self, max: usize, wait: bool, out: &mut Vec<Read>) -> bool {
        let mut tickets = Vec::new();
        let open = self.tier.start_reads(max, wait, &mut tickets);
        out.extend(tickets.iter().map(|(number, ticket)| self.read(*number, ticket)));
        open
    }

    fn enter(&self, node: usize) {
        self.memory.nodes[node].enter();
    }

    fn complete(&self, read: Read, result: io::Result<()>) {
        let ticket = self.tier.ticket(read.id);
        let result = match result {
            Ok(()) => {
                self.scatter(&ticket);
                Ok(())
            }
            Err(error) => {
                let Expert { layer, expert } = ticket.expert;
                Err(Fault(format!("expert {expert} of layer {layer}: {error}").into()))
            }
        };
        self.tier.end_read(read.id, result);
    }
}

/// Disk to RAM.
pub struct DiskMover {
    pub(super) core: Arc<Core>,
    pub(super) link: Box<dyn Link>,
    _toucher: Toucher,
}

impl DiskMover {
    /// Starts the link into the core's memory.
    pub fn open(core: Core, file: &Gguf, options: &StreamOptions) -> Result<DiskMover> {
        let core = Arc::new(core);
        let (files, faults) = (Files::new(file)?, options.faults.clone());
        let link = link::open(options.io, files, faults, core.clone())?;
        Ok(DiskMover { _toucher: Toucher::start(core.clone(), Core::slots), core, link })
    }
}

impl Mover for DiskMover {
    fn price_section(&self) -> &'static str {
        "price.disk"
    }

    fn tier(&self) -> &Tier {
        &self.core.tier
    }

    fn wake(&self) {
        self.link.wake();
    }

    fn may_hold(&self, expert: Expert) -> bool {
        self.core.layouts.may_hold(expert)
    }

    /// Waking a link that sleeps is a system call, so it is done for a read alone.
    fn wake_if_startable(&self) {
        if self.core.tier.can_start() {
            self.link.wake();
        }
    }
}
