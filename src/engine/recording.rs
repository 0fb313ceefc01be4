//! Chosen experts of what a session evaluates.

use crate::backend::ops::RouteRows;
use crate::forward::record::Recorder;

/// Chosen experts of some tokens, as `logits --experts` writes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Experts {
    pub layers: usize,
    pub tokens: usize,
    pub k: usize,
    /// [layers, tokens, k], best first; −1 in dense layers, and where an expert had no room.
    pub ids: Vec<i32>,
}

/// Writes down the chosen experts and nothing else.
pub(super) struct ExpertRecorder {
    k: usize,
    /// The choices of each layer, [tokens, k].
    layers: Vec<Vec<i32>>,
}

impl ExpertRecorder {
    pub fn new(n_layers: usize, k: usize) -> ExpertRecorder {
        ExpertRecorder { k, layers: vec![Vec::new(); n_layers] }
    }

    /// The choices since the last call: of all layers, or of the encoder's or the decoder's if only
    /// those have run.
    pub fn take(&mut self) -> Experts {
        let layers = self.layers.iter_mut().map(std::mem::take);
        let layers: Vec<Vec<i32>> = layers.filter(|ids| !ids.is_empty()).collect();
        let tokens = layers.first().map_or(0, |l| l.len() / self.k);
        Experts { layers: layers.len(), tokens, k: self.k, ids: layers.concat() }
    }
}

impl Recorder for ExpertRecorder {
    fn routed(&mut self, layer: usize, route: RouteRows<'_>, _hidden: &[f32]) {
        let ids = &mut self.layers[layer];
        if route.probs.is_empty() {
            ids.extend(std::iter::repeat_n(-1, route.chosen.len() * self.k));
        } else {
            // `NO_EXPERT` becomes −1.
            ids.extend(route.chosen.iter().map(|e| *e as i32));
        }
    }
}
