//! Graphs of steps of decode. What runs before a layer's experts is the same for every step of the
//! same texts, but for numbers in device memory, so it is captured once and costs the host one call
//! from then on. A text's cache has the graphs for steps of one row of it. Those of several rows, of
//! one text or of several, are kept for the steps that came last.

use crate::Result;
use crate::backend::gpu::Graph;
use crate::backend::gpu::matvec::MAX_TOKENS;
use crate::forward::gpu::layer::before_experts;
use crate::forward::gpu::pass::{GpuPass, GpuSegment, Role};

/// Steps of several rows whose graphs are kept.
const MAX_STEPS: usize = 8;

/// A text's part of a step: what its graphs depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepText {
    /// `GpuCache::id`. The graphs of a cache that is gone are never run again.
    cache: u64,
    n_rows: usize,
    /// Positions that are seen, or more.
    max_seen: usize,
}

/// Graphs of what is before the experts, by layer; none of layers that are not on the device.
struct StepGraphs {
    texts: Vec<StepText>,
    layers: Vec<Option<Graph>>,
}

/// The graphs of the last steps of several rows, the last one behind the others.
#[derive(Default)]
pub struct Steps(Vec<StepGraphs>);

/// Numbers of graphs, for tests.
#[derive(Clone, Debug, Default)]
pub struct GraphCounts {
    /// Graphs of steps of several rows that were captured, and those that were run.
    pub n_captured: usize,
    pub n_runs: usize,
    /// By layer: nodes of the graphs of a row alone, before its experts and from there on.
    pub nodes: Vec<[usize; 2]>,
}

impl Steps {
    fn find(&self, texts: &[StepText]) -> Option<usize> {
        self.0.iter().position(|step| step.texts == texts)
    }

    fn graph(&self, texts: &[StepText], l: usize) -> Option<&Graph> {
        self.0[self.find(texts)?].layers[l].as_ref()
    }

    /// Makes the step the last one. Returns whether it was there.
    fn use_again(&mut self, texts: &[StepText]) -> bool {
        let at = self.find(texts);
        if let Some(at) = at {
            self.0[at..].rotate_left(1);
        }
        at.is_some()
    }

    fn push(&mut self, step: StepGraphs) {
        if self.0.len() == MAX_STEPS {
            self.0.remove(0);
        }
        self.0.push(step);
    }
}

impl<'a> GpuPass<'a> {
    /// Whether this is one decoded token.
    pub fn is_decode(&self) -> bool {
        self.n() == 1 && self.batch.decode_rows().len() == 1
    }

    /// Whether stages before the experts are captured graphs: those of one decoded token or of a
    /// few, of a model without an encoder, between which no state is copied.
    pub fn is_captured(&self) -> bool {
        let is_step = self.role == Role::Only && self.batch.decode_rows().len() == self.n();
        let is_few = is_step && self.n() <= MAX_TOKENS;
        self.is_decode() || is_few && self.segments().all(|segment| !self.is_cut(&segment))
    }

    /// The decoded token's text.
    pub fn decoded(&self) -> GpuSegment<'a> {
        self.segments().next().expect("a batch of one row")
    }

    /// The numbers of positions that the graphs of one row are captured for: of the text and of the
    /// source text.
    fn graph_key(&self) -> [usize; 2] {
        let segment = self.decoded();
        [self.max_seen(&segment), self.max_source(&segment)]
    }

    fn step_texts(&self) -> Vec<StepText> {
        let text = |segment: GpuSegment| StepText {
            cache: segment.cache.id(),
            n_rows: segment.n(),
            max_seen: self.max_seen(&segment),
        };
        self.segments().map(text).collect()
    }

    /// Captures the graphs that a step of decode needs and that there are not. This is done before
    /// any layer is queued: to make a graph a driver may wait for the device, which may wait for
    /// the host.
    pub fn capture_graphs(&mut self) -> Result<()> {
        match self.n() {
            _ if !self.is_captured() => Ok(()),
            1 => self.capture_row(),
            _ => self.capture_step(),
        }
    }

    fn device_layers(&self) -> Vec<usize> {
        self.layers().filter(|l| self.dev.layers[*l].is_some()).collect()
    }

    fn capture_row(&mut self) -> Result<()> {
        let (cache, key) = (self.decoded().cache, self.graph_key());
        self.state.graph_counts.nodes.resize(self.dev.layers.len(), [0; 2]);
        for l in self.device_layers() {
            let mut graph = cache.graph(self.cache_slots(l).own);
            if graph.as_ref().is_none_or(|(captured_for, _)| *captured_for != key) {
                let captured = self.stream().capture(|| before_experts(self, l))?;
                self.state.graph_counts.nodes[l][0] = captured.n_nodes();
                *graph = Some((key, captured));
            }
            if self.looks_up(l) {
                self.capture_experts(l)?;
            }
        }
        Ok(())
    }

    fn capture_step(&mut self) -> Result<()> {
        let texts = self.step_texts();
        if self.state.steps.use_again(&texts) {
            return Ok(());
        }
        let mut layers: Vec<_> = self.dev.layers.iter().map(|_| None).collect();
        for l in self.device_layers() {
            layers[l] = Some(self.stream().capture(|| before_experts(self, l))?);
            self.state.graph_counts.n_captured += 1;
        }
        self.state.steps.push(StepGraphs { texts, layers });
        Ok(())
    }

    /// Runs the graph of what is before the layer's experts. Returns whether there is one.
    pub fn replay(&mut self, l: usize) -> Result<bool> {
        if self.is_decode() {
            let graph = self.decoded().cache.graph(self.cache_slots(l).own);
            let (_, graph) = graph.as_ref().expect("captured before the first layer");
            // SAFETY: the graph uses memory of this cache, which owns the graph, of the device's
            // model and of its pipeline slots. The session that owns the cache keeps the latter two
            // alive.
            return unsafe { self.stream().run(graph) }.map(|()| true);
        }
        // A step in this one's rests may have taken its graphs' place.
        let Some(graph) = self.state.steps.graph(&self.step_texts(), l) else { return Ok(false) };
        // SAFETY: the graph uses memory of the device's model, and of the caches with these ids,
        // which are those of this pass's texts: no id is given twice.
        unsafe { self.stream().run(graph)? };
        self.state.graph_counts.n_runs += 1;
        Ok(true)
    }
}
