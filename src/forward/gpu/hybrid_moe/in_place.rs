//! Missed experts that kernels of the first device read where they are in the host's memory, over
//! PCIe: without a copy, and without a slot of the device. They stay acquired in the tier below
//! until these kernels are done. The host waits for that before it waits for anything else, since
//! others may need the room that it holds.

use crate::Result;
use crate::backend::gpu::expert::Chosen;
use crate::backend::gpu::{Device, Event};
use crate::experts::vram::VramTier;
use crate::experts::{Acquisition, ExpertStore};
use crate::forward::gpu::expert_parallel::share::{CallPairs, DeviceShare};
use crate::forward::gpu::experts::DecodePairs;
use crate::forward::gpu::placement::InPlaceTimer;
use std::time::{Duration, Instant};

/// Parts of a granule: gate, up and down.
const PARTS: usize = 3;

pub struct InPlaceReads {
    /// The experts of the layer that is being computed.
    pub experts: Vec<u32>,
    /// [parts, pairs, granules]: the addresses for kernels, 0 for those of other experts
    tables: Vec<u64>,
    /// Around the kernels that were queued last.
    start: Event,
    end: Event,
    /// Whether they were queued and not waited for.
    is_queued: bool,
    /// The bytes that they read, those of each row counted.
    n_bytes: usize,
}

impl InPlaceReads {
    pub fn new(gpu: &Device) -> Result<InPlaceReads> {
        Ok(InPlaceReads {
            experts: Vec::new(),
            tables: Vec::new(),
            start: Event::timed(gpu)?,
            end: Event::timed(gpu)?,
            is_queued: false,
            n_bytes: 0,
        })
    }

    /// Fills the tables with the addresses of what `work` was handed, by expert and granule. Leaves
    /// experts that are not whole there to `cpu`. `place_of`: as in `HybridMoe`. Returns the parts'
    /// bytes.
    pub fn find<'a>(
        &mut self,
        vram: &VramTier,
        pairs: CallPairs,
        place_of: &[usize],
        store: &'a dyn ExpertStore,
        work: &'a Acquisition,
        cpu: &mut Vec<u32>,
    ) -> Vec<&'a [u8]> {
        let InPlaceReads { experts, tables, n_bytes, .. } = self;
        let (l, n_granules) = (work.layer, pairs.shape.n_granules());
        let (of_part, mut bytes) = (pairs.n_pairs * n_granules, Vec::new());
        tables.clear();
        tables.resize(PARTS * of_part, 0);
        *n_bytes = 0;
        experts.retain(|expert| {
            let handed = (0..work.n_handed()).map(|i| store.ready(work, i));
            let granules = handed.filter(|granule| granule.expert == *expert);
            let found = granules.map(|g| Some((g.index as usize, vram.below(l, &g)?)));
            let found: Option<Vec<_>> = found.collect();
            let Some(found) = found.filter(|found| found.len() == n_granules) else {
                cpu.push(*expert);
                return false;
            };
            let of_expert = pairs.demand.pairs(pairs.demand.slot(*expert));
            *n_bytes += of_expert.len() * vram.expert_bytes(l);
            for (granule, (parts, addresses)) in found {
                bytes.extend(parts.into_iter().filter(|part| !part.is_empty()));
                for (part, address) in addresses.into_iter().enumerate() {
                    for pair in of_expert.clone() {
                        let row = part * of_part + place_of[pair] * n_granules;
                        tables[row + granule] = address;
                    }
                }
            }
            true
        });
        bytes
    }

    /// Queues the kernels that read these bytes, by the tables.
    ///
    /// # Safety
    /// The bytes stay as they are until `finish`.
    pub unsafe fn queue(
        &mut self,
        first: &mut DeviceShare,
        pairs: CallPairs,
        bytes: &[&[u8]],
    ) -> Result<()> {
        let (context, CallPairs { shape, n_pairs, .. }) = (first.context, pairs);
        let n = 8 * self.tables.len();
        let all = context.workspace.slice(&context.layout.granules).slice(0..n);
        first.staging.upload(context.stream, all, &self.tables[..], u64::to_le_bytes)?;
        let part = |i: usize| all.slice(n / PARTS * i..n / PARTS * (i + 1));
        let (granules, apart) = (part(0), Some([part(1), part(2)]));
        let chosen = Chosen { n_pairs, granules, apart, experts: first.chosen };
        let pairs = DecodePairs { shape, chosen };
        self.is_queued = true;
        context.stream.record(&self.start)?;
        // SAFETY: the addresses are of parts of granules of this shape that stay, by the caller's
        // promise, and the experts are some that the router chose.
        unsafe {
            let queue = || context.compute_pairs(&pairs, first.form, &first.acts);
            context.stream.reading(bytes, queue)?;
        }
        context.stream.record(&self.end)
    }

    /// Waits until nothing reads. Returns the time that this took.
    pub fn finish(&mut self, timer: &mut InPlaceTimer) -> Result<Duration> {
        if !std::mem::take(&mut self.is_queued) {
            return Ok(Duration::ZERO);
        }
        let start = Instant::now();
        self.end.synchronize_watched()?;
        timer.observe(self.n_bytes, 1e6 * f64::from(self.end.since(&self.start)?));
        Ok(start.elapsed())
    }
}
