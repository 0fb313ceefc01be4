//! One layer's demand on its way through `acquire`, `next_ready` and `release`.

use crate::cancel::Cancel;

/// The use of acquired experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// One token of a timeline: what it uses is worth keeping.
    #[default]
    Decode,
    /// Many tokens at once, which want nearly all experts once: read-only towards what decode
    /// keeps.
    Prompt,
    /// A tier takes this expert in from below: it says nothing of the layer's others. To keep it
    /// is as to use it in decode.
    Upload { keep: bool },
    /// Free room is filled with an expert that is not used yet.
    Fill,
    /// Rows of decode beside rows of prompts: the first `n_decode` experts are wanted for decode,
    /// the others for prompts alone.
    Mixed { n_decode: usize },
}

impl Access {
    /// Whether room is made for it in the working set.
    pub(super) fn keeps(self) -> bool {
        matches!(self, Access::Decode | Access::Upload { keep: true })
    }

    /// Whether a decode step has come to the layer.
    pub(super) fn has_decode(self) -> bool {
        matches!(self, Access::Decode | Access::Mixed { .. })
    }

    /// Whether a prompt has come to the layer.
    pub(crate) fn has_prompt(self) -> bool {
        matches!(self, Access::Prompt | Access::Mixed { .. })
    }

    /// The access of the expert at `index` of the demand; never `Mixed`.
    fn of_expert(self, index: usize) -> Access {
        match self {
            Access::Mixed { n_decode } if index < n_decode => Access::Decode,
            Access::Mixed { .. } => Access::Prompt,
            Access::Decode | Access::Prompt | Access::Upload { .. } | Access::Fill => self,
        }
    }
}

/// Experts of a layer that a pass acquires together.
#[derive(Clone, Copy, Debug)]
pub struct LayerPart<'a> {
    pub experts: &'a [u32],
    /// Experts that the layer acquires after these.
    pub later: &'a [u32],
}

impl<'a> LayerPart<'a> {
    /// All that are used.
    pub fn whole(experts: &'a [u32]) -> LayerPart<'a> {
        LayerPart { experts, later: &[] }
    }
}

/// An expert of a demand.
#[derive(Clone, Copy, Debug)]
pub struct WantedExpert {
    /// Within its layer.
    pub expert: u32,
    /// Its access; never `Mixed`.
    pub access: Access,
    /// Granules that were handed out and computed before.
    pub computed: usize,
    /// Granules `computed..ready` are handed out now.
    pub ready: usize,
    /// All are computed, and the expert is unpinned.
    pub is_done: bool,
}

/// A granule that is handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GranuleRef {
    /// Within its layer.
    pub expert: u32,
    /// Within its expert.
    pub granule: usize,
    /// Its slot, if it is in one.
    pub slot: u32,
}

/// Reused from layer to layer.
#[derive(Debug, Default)]
pub struct Acquisition {
    /// Ends the waits of `next_ready`; whoever starts a pass sets it.
    pub(crate) cancel: Cancel,
    pub(crate) layer: usize,
    pub(super) access: Access,
    pub(super) wanted: Vec<WantedExpert>,
    /// Experts of the layer that the same pass acquires next, when these are computed.
    pub(super) later: Vec<u32>,
    /// The granules handed out last; those of one expert side by side, in index order.
    pub(crate) handed: Vec<GranuleRef>,
    /// Whether a wanted expert waits for free slots.
    pub(super) lacks_slots: bool,
    /// Nanoseconds of its waits.
    pub(super) stall_ns: u64,
    /// The address of the store that it was acquired from, while it is open.
    owner: Option<usize>,
}

impl Acquisition {
    /// Asserts the protocol: acquire, next_ready until it answers no more or fails, release.
    pub(crate) fn start(
        &mut self,
        owner: usize,
        layer: usize,
        part: LayerPart<'_>,
        access: Access,
    ) {
        let LayerPart { experts, later } = part;
        assert!(self.owner.is_none(), "work of layer {} was not released", self.layer);
        debug_assert!(
            experts.iter().enumerate().all(|(i, e)| !experts[..i].contains(e)),
            "an expert is demanded once, whatever the number of its tokens"
        );
        (self.layer, self.access, self.stall_ns) = (layer, access, 0);
        self.wanted.clear();
        self.later.clear();
        self.later.extend_from_slice(later);
        self.handed.clear();
        let want = |(i, &expert)| {
            let access = access.of_expert(i);
            WantedExpert { expert, access, computed: 0, ready: 0, is_done: false }
        };
        self.wanted.extend(experts.iter().enumerate().map(want));
        self.owner = Some(owner);
    }

    /// Not all need have been handed out: a failed load ends the work early.
    pub(super) fn finish(&mut self) {
        self.wanted.clear();
        self.later.clear();
        self.handed.clear();
        self.owner = None;
    }

    /// Asserts that it was acquired from this store: slots of another mean nothing to it.
    pub(crate) fn check_owner(&self, owner: usize) {
        assert_eq!(self.owner, Some(owner), "work of another store");
    }

    /// Granules that were handed out last.
    pub fn n_handed(&self) -> usize {
        self.handed.len()
    }

    /// Nanoseconds for which computation has waited for it, since it was acquired.
    pub fn stall_ns(&self) -> u64 {
        self.stall_ns
    }

    pub(crate) fn is_open(&self) -> bool {
        self.owner.is_some()
    }
}
