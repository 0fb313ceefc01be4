//! MoE-Infinity's prefetching (5.1). Requests in progress are traced; after each router's choice
//! the past requests that are most similar to this one predict the later layers.

use super::InfinityOptions;
use super::eam::Eam;
use super::past::Past;
use super::persist::SECTION;
use super::prefetch::{Frame, Prefetcher};
use super::requests::Requests;
use super::trace::Trace;
use crate::policy::{Event, Phase, Prediction, Predictor, Profile, PromptRouted, Routed, Shape};

/// Experts of a model up to which any event is over in 10 µs. Roughly measured on a busy server,
/// with 48 layers of 128 experts and 120 or 1,000 EAMs: an event of a step 1 or 3 µs, what is
/// predicted then 20 µs, most of it to order the experts of all layers; the end of a request 200
/// µs. With 32 layers of 8: 0.1, 2 and 8 µs.
const QUICK_CELLS: usize = 256;

#[derive(Clone, Debug)]
pub struct EamcPredictor {
    frame: Frame,
    past: Past,
    /// All decode steps ever seen: model-level counts.
    lifetime: Eam,
    requests: Requests<Trace>,
    prefetcher: Prefetcher,
}

impl EamcPredictor {
    /// The profile's section.
    pub const SECTION: &str = SECTION;

    pub fn new(shape: &Shape, options: InfinityOptions) -> Self {
        let frame = Frame::new(shape, options);
        let past = Past::new(&frame.grid, options.capacity);
        Self::with_past(frame, past)
    }

    /// Starts with the requests of another run. Returns the reason as a clause, for use after a
    /// colon.
    pub fn restore(shape: &Shape, options: InfinityOptions, bytes: &[u8]) -> Result<Self, String> {
        let frame = Frame::new(shape, options);
        let past = Past::decode(&frame.grid, options.capacity, bytes)?;
        Ok(Self::with_past(frame, past))
    }

    fn with_past(frame: Frame, past: Past) -> Self {
        let lifetime = Eam::new(&frame.grid);
        let (requests, prefetcher) = (Requests::new(), Prefetcher::default());
        EamcPredictor { frame, past, lifetime, requests, prefetcher }
    }

    /// The index of the request among those in progress, which is added if its start was not seen.
    fn find(&mut self, request: u32) -> usize {
        self.requests.position(request).unwrap_or_else(|| {
            let trace = Trace::new(&self.frame.grid, &self.past);
            if let Some(oldest) = self.requests.begin(request, trace) {
                self.join(oldest);
            }
            self.requests.len() - 1
        })
    }

    fn end(&mut self, request: u32) {
        if let Some(trace) = self.requests.end(request) {
            self.join(trace);
        }
    }

    fn join(&mut self, mut trace: Trace) {
        trace.end_iteration();
        if let Some(at) = trace.join(&mut self.past) {
            self.requests.iter_mut().for_each(|other| other.replaced(&self.past, at));
        }
    }

    fn prompt_routed(&mut self, PromptRouted { request, layer, counts, .. }: PromptRouted<'_>) {
        let at = self.find(request);
        let row = self.frame.grid.row(layer).start;
        self.requests.at(at).add_prompt(&self.past, row, counts);
    }

    fn routed(&mut self, Routed { request, layer, chosen, .. }: Routed<'_>) {
        let at = self.find(request);
        let trace = self.requests.at(at);
        // If it goes back then the step's beginning has been missed.
        if trace.iteration.layer().is_some_and(|last| last >= layer) {
            trace.end_iteration();
        }
        let row = self.frame.grid.row(layer).start;
        let cells = || chosen.iter().map(|expert| row + *expert as usize);
        cells().for_each(|cell| self.lifetime.add(cell, 1));
        trace.iteration.add_row(&self.past.decode, layer, cells());
        // What comes next are the next token's first layers.
        if self.frame.grid.moe().last() == Some(&layer) {
            trace.end_iteration();
        }
        trace.is_due = true;
    }
}

impl Predictor for EamcPredictor {
    fn observe(&mut self, event: &Event<'_>) {
        match *event {
            Event::RequestStart { request } => {
                self.end(request);
                self.find(request);
            }
            Event::IterationStart { request, phase, .. } => {
                let at = self.find(request);
                let trace = self.requests.at(at);
                trace.end_iteration();
                trace.is_due = phase == Phase::Decode;
                // Nothing is prefetched for a prompt.
                trace.predictions.clear();
            }
            Event::PromptRouted(routed) => self.prompt_routed(routed),
            Event::Routed(routed) => self.routed(routed),
            Event::IterationEnd { request, .. } => {
                if let Some(at) = self.requests.position(request) {
                    self.requests.at(at).end_iteration();
                }
            }
            Event::RequestEnd { request } => self.end(request),
            Event::NextToken { .. } | Event::Predicted { .. } | Event::Expected { .. } => {}
        }
    }

    /// The experts that any request in progress will use.
    fn predict(&mut self, out: &mut Vec<Prediction>) {
        let Self { frame, past, lifetime, requests, prefetcher } = self;
        for trace in requests.iter_mut().filter(|trace| trace.is_due) {
            trace.is_due = false;
            prefetcher.update(frame, past, lifetime, trace);
        }
        out.clear();
        requests.iter().for_each(|trace| out.extend(&trace.predictions));
        if requests.iter().filter(|trace| !trace.predictions.is_empty()).count() > 1 {
            merge(out, frame.n_predictions);
        }
    }

    fn is_slow(&self) -> bool {
        self.frame.grid.n_cells() > QUICK_CELLS
    }

    /// Requests in progress are saved as if they had ended.
    fn save(&self, profile: &mut Profile) {
        let mut ended = self.clone();
        while let Some(trace) = ended.requests.end_oldest() {
            ended.join(trace);
        }
        profile.set(SECTION, ended.past.encode(&ended.frame.grid));
    }
}

/// Merges the requests' predictions: each expert once, with its highest priority.
fn merge(lists: &mut Vec<Prediction>, n: usize) {
    lists.sort_unstable_by(|a, b| a.expert.cmp(&b.expert).then(b.priority.total_cmp(&a.priority)));
    lists.dedup_by_key(|prediction| prediction.expert);
    // Stable: the earlier layer first among equals.
    lists.sort_by(|a, b| b.priority.total_cmp(&a.priority));
    lists.truncate(n);
}
