//! Graphs of steps of decode of several rows, of one text or of several.

use crate::backend::gpu::Graph;

/// Steps whose graphs are kept.
const MAX_STEPS: usize = 8;

/// A text's part of a step: what its graphs depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepText {
    /// `GpuCache::id`. The graphs of a cache that is gone are never run again.
    pub cache: u64,
    pub n_rows: usize,
    /// Positions that are seen, or more.
    pub max_seen: usize,
}

/// Graphs of the stages before the experts, by layer; none of layers that are not on the device.
pub struct StepGraphs {
    pub texts: Vec<StepText>,
    pub layers: Vec<Option<Graph>>,
}

/// The graphs of the last steps, the last one behind the others.
#[derive(Default)]
pub struct Steps(Vec<StepGraphs>);

/// Numbers of graphs, for tests.
#[derive(Clone, Debug, Default)]
pub struct GraphCounts {
    /// Graphs of steps of several rows that were captured, and those that were run.
    pub n_captured: usize,
    pub n_runs: usize,
    /// Layers of such steps whose experts were looked up on the device.
    pub n_looked_up: usize,
    /// Layers of other passes whose pairs the device grouped, and those whose route the host read
    /// before it queued their experts.
    pub n_grouped: usize,
    pub n_read_first: usize,
    /// By layer: nodes of the graphs of a row alone, before its experts and from there on.
    pub nodes: Vec<[usize; 2]>,
    /// Graphs of whole tokens that were captured, and those that were run.
    pub n_tokens_captured: usize,
    pub n_token_runs: usize,
    /// Nodes of the one that was captured last.
    pub n_token_nodes: usize,
    /// Graphs of all kinds that were launched.
    pub n_launches: usize,
    /// Experts that a layer missed and that kernels read in place.
    pub n_in_place: usize,
}

impl Steps {
    fn find(&self, texts: &[StepText]) -> Option<usize> {
        self.0.iter().position(|step| step.texts == texts)
    }

    pub fn graph(&self, texts: &[StepText], l: usize) -> Option<&Graph> {
        self.0[self.find(texts)?].layers[l].as_ref()
    }

    /// Makes the step the last one. Returns whether it was there.
    pub fn use_again(&mut self, texts: &[StepText]) -> bool {
        let at = self.find(texts);
        if let Some(at) = at {
            self.0[at..].rotate_left(1);
        }
        at.is_some()
    }

    pub fn push(&mut self, step: StepGraphs) {
        if self.0.len() == MAX_STEPS {
            self.0.remove(0);
        }
        self.0.push(step);
    }
}
