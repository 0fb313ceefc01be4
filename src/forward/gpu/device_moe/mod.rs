//! Device-routed experts of many rows: prompts without a device that waits for the host. Where all
//! of a layer's granules are in the first device's memory, a kernel groups the pairs of the rows
//! and the experts that its router chose, and their products are queued at once. The host gets the
//! route beside them and reads it before it queues the next layer's experts. Then it tells policies
//! and counts the experts' use as if it had divided them. The layer is pinned until then.

pub mod answer;
pub mod route;

use crate::Result;
use crate::backend::gpu::group::{Grouper, Grouping};
use crate::backend::gpu::matmul::{TILE_TOKENS, TILE_WORDS, max_tiles};
use crate::experts::vram::{Fence, VramTiers};
use crate::forward::gpu::device_moe::route::{MAX_ACTIVATIONS, PendingRoute};
use crate::forward::gpu::experts::{GroupedPairs, PairTiles};
use crate::forward::gpu::pass::GpuPass;

impl<'a> GpuPass<'a> {
    /// Whether the layer's experts can be grouped on the device.
    pub fn groups_on_device(&self, l: usize) -> bool {
        let (n, routing) = (self.n(), &self.hyper().routing);
        !self.is_step()
            && self.n_activations() <= MAX_ACTIVATIONS
            && self.groups(&self.routed_shape(l))
            && Grouper::takes(n * routing.k, routing.n_experts)
            && self.is_whole_on_first(l)
    }

    /// Whether all experts of the layer are in the first device's memory.
    fn is_whole_on_first(&self, l: usize) -> bool {
        let is_alone = self.state.peers.is_empty();
        let first = self.tiers(l).and_then(|tiers| tiers.get(0)).filter(|_| is_alone);
        first.is_some_and(|vram| vram.is_layer_whole(l))
    }

    /// y += Σ weights · chosen experts; residual. Returns whether it is queued: not if the layer
    /// cannot be pinned as a whole.
    pub fn device_routed_experts(&mut self, l: usize, tiers: &VramTiers) -> Result<bool> {
        self.finish_pending()?;
        if self.pin_layer(l, tiers)?.number.is_some() {
            tiers.unpin_layer(l, &[], None);
            self.state.pipeline.pinned.retain(|pinned| *pinned != l);
            return Ok(false);
        }
        let (shape, n_pairs) = (self.routed_shape(l), self.n() * self.hyper().routing.k);
        let grouping = self.group_pairs(l)?;
        let sizes = self.send_route()?;
        let (context, n_experts) = (self.expert_context(), grouping.n_experts);
        if self.hyper().routing.capacity.is_some() {
            // Pairs without an expert have rows that are not computed.
            context.begin_grouped(&shape, n_pairs)?;
        }
        let pairs = GroupedPairs {
            shape: &shape,
            n_items: n_experts,
            n_pairs,
            matrices: grouping.matrices,
            tiles: Some(PairTiles { tiles: grouping.tiles, starts: grouping.starts }),
            tokens: Some(grouping.tokens),
            experts: None,
            pairs: 0..n_pairs,
        };
        let (form, acts) = (self.expert_form(l), self.ffn_acts(l));
        // SAFETY: the grouping's tables are of this layer's pairs, and the addresses are those of
        // its granules, which are pinned until `end`.
        unsafe { context.compute_grouped(&pairs, form, &acts, 0..shape.n_granules())? };
        // What comes next overwrites what is copied.
        self.stream().wait(&self.state.route.copied)?;
        self.routed_sum(l, n_pairs, true)?;
        let end = Fence::after(self.stream())?;
        self.state.route.pending = Some(PendingRoute { l, sizes, end });
        self.state.graph_counts.n_grouped += 1;
        // A layer that lacks experts may want them before its router has run.
        let next = self.layers().find(|next| *next > l && self.tiers(*next).is_some());
        match next.is_none_or(|next| self.is_whole_on_first(next)) {
            true => Ok(true),
            false => self.finish_pending().map(|()| true),
        }
    }

    /// Queues the grouping of the layer's pairs.
    fn group_pairs(&self, l: usize) -> Result<Grouping<'a>> {
        let (route, f) = (self.device_route(), &self.layout().ffn);
        let (e, n_pairs, n_experts) = (&f.experts, self.n() * route.k, route.n_experts);
        let table = self.slot_table(l);
        let [wide, narrow] = [0, 1].map(|kind| {
            let n = max_tiles(n_pairs, n_experts, TILE_TOKENS[kind]);
            self.words(&e.tiles[kind], TILE_WORDS * n)
        });
        let grouping = Grouping {
            chosen: route.chosen,
            n_experts,
            pairs_a_row: self.routed_shape(l).pairs_a_row,
            table,
            matrices: self.slice(&e.granules).slice(0..table.len()),
            starts: self.words(&e.starts, n_experts + 1),
            tokens: self.words(&e.tokens, n_pairs),
            places: self.words(&f.pair_rows, n_pairs),
            tiles: [wide, narrow],
        };
        // SAFETY: the router chooses among the layer's experts.
        unsafe { self.dev.ops.group.launch(self.stream(), &grouping)? };
        Ok(grouping)
    }
}
