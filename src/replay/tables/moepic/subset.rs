//! Some of a trace's requests, so that many replays take little time.

use super::super::{N_UBATCH, Source};
use crate::replay::trace::Trace;
use crate::replay::{Pass, Routing, Traced};

/// Every n-th request of each kind, the kinds by turns: as a server sees them, and so that the
/// first few are of all kinds.
pub struct Subset<'a> {
    traced: Traced<'a>,
    /// Their numbers in the trace.
    requests: Vec<usize>,
}

impl<'a> Subset<'a> {
    pub fn new(source: &Source<'a>, every: usize) -> Subset<'a> {
        let requests = by_turns(source.trace, every);
        Subset { traced: Traced::new(source.trace, N_UBATCH), requests }
    }

    /// Tokens that the model generated.
    pub fn n_decode(&self) -> usize {
        let passes = (0..self.n_requests()).flat_map(|request| self.passes(request));
        passes.filter(|pass| !pass.is_prompt).map(|pass| pass.tokens.len()).sum()
    }
}

fn by_turns(trace: &Trace, every: usize) -> Vec<usize> {
    let mut kinds: Vec<(&str, Vec<usize>)> = Vec::new();
    for (number, request) in trace.requests().iter().enumerate() {
        match kinds.iter_mut().find(|(kind, _)| *kind == request.kind) {
            Some((_, numbers)) => numbers.push(number),
            None => kinds.push((&request.kind, vec![number])),
        }
    }
    let longest = kinds.iter().map(|(_, numbers)| numbers.len()).max().unwrap_or(0);
    let turns = (0..longest).step_by(every);
    turns.flat_map(|i| kinds.iter().filter_map(move |(_, n)| n.get(i).copied())).collect()
}

impl Routing for Subset<'_> {
    fn n_experts(&self) -> &[usize] {
        self.traced.n_experts()
    }

    fn k(&self) -> usize {
        self.traced.k()
    }

    fn n_requests(&self) -> usize {
        self.requests.len()
    }

    fn passes(&self, request: usize) -> Vec<Pass> {
        self.traced.passes(self.requests[request])
    }

    fn embedding(&self, token: usize, out: &mut Vec<f32>) {
        self.traced.embedding(token, out);
    }

    fn chosen(&self, token: usize, layer: usize, out: &mut Vec<u32>) {
        self.traced.chosen(token, layer, out);
    }

    fn probs(&self, token: usize, layer: usize, out: &mut Vec<f32>) {
        self.traced.probs(token, layer, out);
    }

    fn ahead(&self, token: usize, layer: usize, distance: usize, out: &mut Vec<f32>) {
        self.traced.ahead(token, layer, distance, out);
    }

    fn hidden(&self, token: usize, layer: usize, out: &mut Vec<f32>) {
        self.traced.hidden(token, layer, out);
    }
}
