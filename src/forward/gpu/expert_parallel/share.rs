//! A device's place in a layer's call: where it computes its experts, and with what.

use crate::Result;
use crate::backend::gpu::expert::{Chosen, ExpertShape as DeviceShape};
use crate::backend::gpu::{DeviceSlice, Stream};
use crate::backend::ops::Demand;
use crate::forward::gpu::acts::GpuActs;
use crate::forward::gpu::expert_parallel::StagedCopy;
use crate::forward::gpu::experts::{Biases, DecodePairs, ExpertContext, GroupedPairs};
use crate::forward::gpu::upload::Staging;
use std::ops::Range;

pub struct DeviceShare<'a> {
    /// Its number among the model's.
    pub device: usize,
    pub context: ExpertContext<'a>,
    /// What experts read.
    pub acts: GpuActs<'a>,
    /// u32 [tokens, k]
    pub chosen: DeviceSlice<'a>,
    pub biases: Option<Biases<'a>>,
    pub staging: &'a mut Staging,
    /// The way to the first device; none for that.
    pub to_first: Option<&'a mut StagedCopy>,
}

/// The pairs of a call, of all devices.
#[derive(Clone, Copy)]
pub struct Pairs<'a> {
    pub demand: &'a Demand,
    pub shape: &'a DeviceShape,
    pub is_grouped: bool,
    pub n_pairs: usize,
}

impl DeviceShare<'_> {
    /// The demand's tables, and zeros where granules will be computed one after the other. For
    /// grouped pairs.
    pub fn begin_grouped(&mut self, pairs: Pairs) -> Result<()> {
        let (layout, demand) = (self.context.layout, pairs.demand);
        let starts: Vec<u32> = demand.starts().iter().map(|start| *start as u32).collect();
        let tables = [(&layout.starts, &starts[..]), (&layout.tokens, demand.tokens())];
        for (place, numbers) in tables.into_iter().chain([(&layout.experts, &demand.experts[..])]) {
            let to = self.context.workspace.words(place, numbers.len());
            self.staging.upload(self.context.stream, to, numbers, u32::to_le_bytes)?;
        }
        self.context.begin_grouped(pairs.shape, pairs.n_pairs)
    }

    /// Computes granules `granules` of the items, or what there is of each pair, as `table` says
    /// where they lie.
    ///
    /// # Safety
    /// As `Site::few` and `Site::grouped`.
    pub unsafe fn compute(
        &mut self,
        pairs: Pairs,
        table: &[u64],
        granules: Range<usize>,
    ) -> Result<()> {
        let Pairs { demand, shape, n_pairs, .. } = pairs;
        let (context, layout, n_items) = (self.context, self.context.layout, demand.experts.len());
        let matrices = context.workspace.slice(&layout.granules).slice(0..8 * table.len());
        self.staging.upload(context.stream, matrices, table, u64::to_le_bytes)?;
        if !pairs.is_grouped {
            let chosen = Chosen { n_pairs, granules: matrices, experts: self.chosen };
            let decode_pairs = DecodePairs { shape, chosen };
            // SAFETY: the caller's promise, passed on.
            return unsafe {
                context.decode_pairs(&decode_pairs, self.biases.as_ref(), &self.acts)
            };
        }
        let grouped_pairs = GroupedPairs {
            shape,
            n_items,
            n_pairs,
            matrices,
            starts: context.workspace.words(&layout.starts, n_items + 1),
            tokens: Some(context.workspace.words(&layout.tokens, n_pairs)),
            experts: context.workspace.words(&layout.experts, n_items),
            max_pairs: (0..n_items).map(|item| demand.pairs(item).len()).max().unwrap_or(0),
            pairs: spanned(demand, table),
        };
        // SAFETY: the caller's promise, passed on; the tables are the demand's.
        unsafe { context.grouped_pairs(&grouped_pairs, self.biases.as_ref(), &self.acts, granules) }
    }

    /// A peer's sums of these pairs go to the same places of the first device.
    pub fn return_sums(
        &mut self,
        (first, to): (&Stream, DeviceSlice),
        pairs: Pairs,
        runs: &[Range<usize>],
    ) -> Result<()> {
        let Some(to_first) = &mut self.to_first else { return Ok(()) };
        let (partial, row) =
            (self.context.partial(pairs.shape, pairs.n_pairs), 4 * pairs.shape.n_embd);
        let bytes = |run: &Range<usize>| run.start * row..run.end * row;
        let piece = |run: &Range<usize>| (partial.slice(bytes(run)), to.slice(bytes(run)));
        let pieces: Vec<_> = runs.iter().map(piece).collect();
        to_first.carry(self.context.stream, first, &pieces)
    }
}

/// The run of pairs from the first to the last item that `table`, [granules, items], has a granule
/// of. A round's activations go by it: one launch, of little more than the round's own pairs, where
/// a launch for each expert would cost more than it spares.
fn spanned(demand: &Demand, table: &[u64]) -> Range<usize> {
    let here = table.iter().enumerate().filter(|(_, address)| **address != 0);
    let items = || here.clone().map(|(at, _)| at % demand.experts.len());
    match (items().min(), items().max()) {
        (Some(first), Some(last)) => demand.pairs(first).start..demand.pairs(last).end,
        _ => 0..0,
    }
}
