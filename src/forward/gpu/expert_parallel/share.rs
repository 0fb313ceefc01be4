//! One device's share of an expert-parallel call.

use crate::Result;
use crate::backend::gpu::expert::{Chosen, DeviceForm, ExpertShape as DeviceShape};
use crate::backend::gpu::matmul::TILE_TOKENS;
use crate::backend::gpu::{DeviceSlice, Stream};
use crate::backend::ops::{Demand, tiles};
use crate::forward::gpu::acts::GpuActs;
use crate::forward::gpu::expert_parallel::staged_copy::StagedCopy;
use crate::forward::gpu::experts::{DecodePairs, ExpertContext, GroupedPairs, PairTiles};
use crate::forward::gpu::upload::Staging;
use std::ops::Range;

/// A device's context and inputs for its experts.
pub struct DeviceShare<'a> {
    /// The device's number in the model.
    pub device: usize,
    pub context: ExpertContext<'a>,
    /// The experts' input.
    pub acts: GpuActs<'a>,
    /// u32 [tokens, k]
    pub chosen: DeviceSlice<'a>,
    pub form: DeviceForm<'a>,
    pub staging: &'a mut Staging,
    /// The copy to the first device; none for the first device itself.
    pub to_first: Option<&'a mut StagedCopy>,
}

/// The pairs of a call, of all devices.
#[derive(Clone, Copy)]
pub struct CallPairs<'a> {
    pub demand: &'a Demand,
    pub shape: &'a DeviceShape,
    pub is_grouped: bool,
    pub n_pairs: usize,
}

impl DeviceShare<'_> {
    /// Uploads the tables of grouped pairs and zeroes intermediate results.
    pub fn begin_grouped(&mut self, pairs: CallPairs) -> Result<()> {
        let (layout, demand) = (self.context.layout, pairs.demand);
        let starts: Vec<u32> = demand.starts().iter().map(|start| *start as u32).collect();
        let tables = [
            (&layout.starts, &starts[..]),
            (&layout.tokens, demand.inputs()),
            (&layout.experts, &demand.experts[..]),
        ];
        for (range, numbers) in tables {
            let to = self.context.workspace.words(range, numbers.len());
            self.staging.upload(self.context.stream, to, numbers, u32::to_le_bytes)?;
        }
        self.context.begin_grouped(pairs.shape, pairs.n_pairs)
    }

    /// Computes the granules whose addresses `table` holds, [pairs or items, granules]. They are
    /// among `granules` of their experts.
    ///
    /// # Safety
    /// As for `ExpertContext::compute_pairs` and `compute_grouped`.
    pub unsafe fn compute(
        &mut self,
        pairs: CallPairs,
        table: &[u64],
        granules: Range<usize>,
    ) -> Result<()> {
        let CallPairs { demand, shape, n_pairs, .. } = pairs;
        let (context, layout, n_items) = (self.context, self.context.layout, demand.experts.len());
        let matrices = context.workspace.slice(&layout.granules).slice(0..8 * table.len());
        self.staging.upload(context.stream, matrices, table, u64::to_le_bytes)?;
        let (form, acts) = (self.form, &self.acts);
        if !pairs.is_grouped {
            let chosen = Chosen { n_pairs, granules: matrices, apart: None, experts: self.chosen };
            // SAFETY: the caller's promise, passed on.
            return unsafe { context.compute_pairs(&DecodePairs { shape, chosen }, form, acts) };
        }
        let is_here = |item: usize| {
            let row = table.chunks_exact(shape.n_granules()).nth(item);
            row.is_some_and(|row| row.iter().any(|address| *address != 0))
        };
        let mut lists = [context.workspace.slice(&layout.tiles[0]); 2];
        for ((list, range), n) in lists.iter_mut().zip(&layout.tiles).zip(TILE_TOKENS) {
            let words = tiles(demand.starts(), n, is_here);
            *list = context.workspace.words(range, words.len());
            self.staging.upload(context.stream, *list, &words, u32::to_le_bytes)?;
        }
        let starts = context.workspace.words(&layout.starts, n_items + 1);
        let grouped = GroupedPairs {
            shape,
            n_items,
            n_pairs,
            matrices,
            tiles: Some(PairTiles { tiles: lists, starts }),
            tokens: Some(context.workspace.words(&layout.tokens, n_pairs)),
            experts: Some(context.workspace.words(&layout.experts, n_items)),
            pairs: spanned(demand, is_here),
        };
        // SAFETY: the caller's promise, passed on; the tables are the demand's.
        unsafe { context.compute_grouped(&grouped, form, acts, granules) }
    }

    /// Queues the copy of a peer's sums, which are these rows of its `partial`, to the same rows of
    /// `to` on the first device.
    pub fn return_sums(
        &mut self,
        first: &Stream,
        to: DeviceSlice,
        pairs: CallPairs,
        runs: &[Range<usize>],
    ) -> Result<()> {
        let Some(to_first) = &mut self.to_first else { return Ok(()) };
        let partial = self.context.partial(pairs.shape, pairs.n_pairs);
        let row = 4 * pairs.shape.n_embd;
        let bytes = |run: &Range<usize>| run.start * row..run.end * row;
        let piece = |run: &Range<usize>| (partial.slice(bytes(run)), to.slice(bytes(run)));
        let pieces: Vec<_> = runs.iter().map(piece).collect();
        to_first.copy(self.context.stream, first, &pieces)
    }
}

/// The run of pairs from the first to the last item that has a granule here. Activations are
/// computed for the whole run: one launch for a few pairs too many is faster than a launch for each
/// expert.
fn spanned(demand: &Demand, is_here: impl Fn(usize) -> bool) -> Range<usize> {
    let items = 0..demand.experts.len();
    let (first, last) = (items.clone().find(|i| is_here(*i)), items.rev().find(|i| is_here(*i)));
    match (first, last) {
        (Some(first), Some(last)) => demand.pairs(first).start..demand.pairs(last).end,
        _ => 0..0,
    }
}
