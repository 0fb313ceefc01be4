//! Experts computed in place on the mapped file: everything is resident, nothing moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Access, ExpertStatus, ExpertStore, Geometry, LayerExperts, Presence, ReadyGranule};
use crate::Result;
use crate::experts::acquisition::{Acquisition, GranuleRef, LayerPart};
use crate::gguf::Gguf;

/// All experts of a model, in the mapped file.
pub struct Resident {
    file: Arc<Gguf>,
    layers: Vec<Option<LayerExperts>>,
    /// Times that each layer's experts were acquired; they wrap around.
    uses: Vec<Vec<AtomicU32>>,
}

impl Resident {
    /// Asserts that each layer's shapes fit its tensors: the caller has checked the file.
    pub fn new(file: Arc<Gguf>, layers: Vec<Option<LayerExperts>>) -> Resident {
        layers.iter().flatten().for_each(|layer| layer.assert_fits(&file));
        let n_experts = |layer: &Option<LayerExperts>| layer.as_ref().map_or(0, |l| l.n_experts);
        let uses = layers.iter().map(|layer| (0..n_experts(layer)).map(|_| AtomicU32::new(0)));
        let uses = uses.map(Iterator::collect).collect();
        Resident { file, layers, uses }
    }

    /// The experts of a layer, if it has some.
    pub fn layer(&self, layer: usize) -> Option<LayerExperts> {
        self.layers[layer]
    }

    /// A granule where it lies.
    pub fn granule(&self, layer: usize, expert: u32, index: usize) -> ReadyGranule<'_> {
        let layer = self.layers[layer].as_ref().expect("a layer with experts");
        layer.in_place(&self.file, expert, index)
    }

    fn owner(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

impl ExpertStore for Resident {
    fn geometry(&self, layer: usize) -> Option<Geometry> {
        self.layers[layer].as_ref().map(|l| l.geometry)
    }

    fn acquire_part(
        &self,
        layer: usize,
        part: LayerPart<'_>,
        access: Access,
        work: &mut Acquisition,
    ) {
        work.start(self.owner(), layer, part, access);
        for want in &work.wanted {
            self.uses[layer][want.expert as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn report(&self, layer: usize, out: &mut Vec<ExpertStatus>) {
        let whole = |uses: &AtomicU32| ExpertStatus {
            presence: Presence::Whole,
            n_hits: uses.load(Ordering::Relaxed),
            n_misses: 0,
        };
        out.extend(self.uses[layer].iter().map(whole));
    }

    fn next_ready(&self, work: &mut Acquisition) -> Result<bool> {
        work.check_owner(self.owner());
        let layer = self.layers[work.layer].as_ref().expect("a layer with experts");
        work.handed.clear();
        for want in work.wanted.iter_mut().filter(|want| !want.is_done) {
            let granules = 0..layer.geometry.n_granules();
            let handed = |granule| GranuleRef { expert: want.expert, granule, slot: 0 };
            work.handed.extend(granules.map(handed));
            want.is_done = true;
        }
        Ok(!work.handed.is_empty())
    }

    fn ready<'w>(&'w self, work: &'w Acquisition, i: usize) -> ReadyGranule<'w> {
        work.check_owner(self.owner());
        let GranuleRef { expert, granule, .. } = work.handed[i];
        self.granule(work.layer, expert, granule)
    }

    fn release(&self, work: &mut Acquisition) {
        work.finish();
    }
}
