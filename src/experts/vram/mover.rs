//! Moves granules from RAM to VRAM.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

use super::VramOptions;
use super::fence::Fences;
use super::layout::{GranuleLayout, GranulePart};
use super::link::Link;
use super::owners::Own;
use super::pinned_tier::PinnedTier;
use super::slot_table::SlotTable;
use super::timer::LinkTimer;
use crate::backend::gpu::{Device, DeviceBuffer, DeviceSlice};
use crate::experts::runtime::Mover;
use crate::experts::tier::{Fault, Tier};
use crate::experts::{Dest, ExpertStore, LayerExperts, Layout, Piece, TierPlan};
use crate::policy::Expert;
use crate::{Error, Result};

#[derive(Clone, Copy)]
pub struct Layer {
    pub experts: LayerExperts,
    pub layout: GranuleLayout,
    /// Whether the parts of granules lie in the tier below as kernels want them.
    pub is_readable: bool,
}

/// By layer; `None` where the layer has no experts that move.
pub type Layers = Vec<Option<Layer>>;

/// One read a granule, from the tier below: shard and offset mean nothing here.
pub struct Pieces {
    pub layers: Layers,
    /// Experts that the tier may hold; `None`: all.
    pub own: Option<Own>,
    /// The tier below.
    pub source: Arc<dyn ExpertStore>,
}

impl Layout for Pieces {
    fn pieces(&self, id: Expert, granules: Range<usize>, out: &mut Vec<Piece>) {
        let layer = self.layers[id.layer as usize].as_ref().expect("its experts move");
        out.extend(granules.map(|granule| {
            let n_bytes = layer.experts.granule_bytes(granule);
            let to = Dest::Slot { granule, at: 0 };
            Piece { shard: 0, start: 0, len: n_bytes, need: n_bytes, to }
        }));
    }

    fn may_hold(&self, expert: Expert) -> bool {
        let own = self.own.as_ref();
        own.is_none_or(|own| own.has(expert.layer as usize, expert.expert))
    }

    fn is_at_hand(&self, expert: Expert) -> bool {
        self.may_hold(expert) && self.source.is_whole(expert)
    }
}

/// The state that the layer loop and the link's threads share.
pub struct Core {
    pub tier: Tier,
    pub plan: TierPlan,
    pub layers: Layers,
    /// By layer.
    pub tables: Vec<Option<Mutex<SlotTable>>>,
    /// The slots of each size class.
    pub arenas: Vec<DeviceBuffer>,
    pub fences: Fences,
    pub timer: LinkTimer,
    /// Experts that the tier may hold; `None`: all.
    pub own: Option<Own>,
    /// The tier below.
    pub source: Arc<dyn ExpertStore>,
    /// The tier below, pinned where it is.
    pub pinned: Option<Arc<PinnedTier>>,
    /// Bytes that were copied from where they are.
    pub in_place_bytes: AtomicU64,
    /// Why the device was given up, once it has failed.
    pub lost: OnceLock<String>,
}

impl Core {
    pub fn slot(&self, class: usize, slot: u32) -> DeviceSlice<'_> {
        let bytes = self.plan.classes[class].slot_bytes;
        let at = slot as usize * bytes;
        self.arenas[class].slice(at..at + bytes)
    }

    /// The bytes of a granule's parts where they are, if a device can copy all of them from there.
    pub fn in_place<'a>(&self, parts: &[GranulePart<'a>; 3]) -> Option<[&'a [u8]; 3]> {
        let pinned = self.pinned.as_ref()?;
        let [gate, up, down] = parts.each_ref().map(GranulePart::in_place);
        let bytes = [gate?, up?, down?];
        bytes.iter().all(|bytes| bytes.is_empty() || pinned.has(bytes)).then_some(bytes)
    }
}

/// RAM to VRAM, over PCIe.
pub struct PcieMover {
    /// Declared first so that it is dropped first: its threads use the core.
    _link: Link,
    pub(super) core: Arc<Core>,
}

impl PcieMover {
    /// Starts the link's threads.
    pub fn open(core: Core, gpu: &Device, options: &VramOptions) -> Result<PcieMover> {
        if let Some(lower) = core.source.upper_residency() {
            core.tier.set_lower_tier(lower);
        }
        let core = Arc::new(core);
        let link = Link::open(&core, gpu, options.pinned, options.n_streams)?;
        Ok(PcieMover { _link: link, core })
    }
}

impl Mover for PcieMover {
    fn price_section(&self) -> &'static str {
        "price.device-link"
    }

    fn tier(&self) -> &Tier {
        &self.core.tier
    }

    fn may_hold(&self, expert: Expert) -> bool {
        let own = self.core.own.as_ref();
        own.is_none_or(|own| own.has(expert.layer as usize, expert.expert))
    }

    fn load_error(&self, fault: Fault) -> Error {
        match self.core.lost.get() {
            Some(why) => Error::Device(why.clone()),
            None => Error::Load(fault.0.to_string()),
        }
    }
}
