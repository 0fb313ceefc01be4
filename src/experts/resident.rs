//! Experts computed in place on the mapped file: everything is resident, nothing moves.

use std::sync::Arc;

use super::{ExpertStore, Geometry, LayerExperts, ReadyGranule, Work};
use crate::Result;
use crate::gguf::Gguf;

/// All experts of a model, in the mapped file.
pub struct Resident {
    file: Arc<Gguf>,
    layers: Vec<Option<LayerExperts>>,
}

impl Resident {
    /// Asserts that each layer's shapes fit its tensors: the caller has checked the file.
    pub fn new(file: Arc<Gguf>, layers: Vec<Option<LayerExperts>>) -> Resident {
        layers.iter().flatten().for_each(|layer| layer.assert_fits(&file));
        Resident { file, layers }
    }
}

impl ExpertStore for Resident {
    fn geometry(&self, layer: usize) -> Option<Geometry> {
        self.layers[layer].as_ref().map(|l| l.geometry)
    }

    fn acquire(&self, layer: usize, experts: &[u32], work: &mut Work) -> Result<()> {
        work.start(layer, experts);
        Ok(())
    }

    fn next_ready<'a>(&'a self, work: &mut Work, ready: &mut Vec<ReadyGranule<'a>>) -> Result<()> {
        ready.clear();
        let layer = self.layers[work.layer].as_ref().expect("a layer with experts");
        for &expert in &work.experts[work.handed_out..] {
            let granules = 0..layer.geometry.n_granules();
            ready.extend(granules.map(|index| layer.in_place(&self.file, expert, index)));
        }
        work.handed_out = work.experts.len();
        Ok(())
    }

    fn release(&self, work: &mut Work) {
        work.finish();
    }
}
