//! Graphs: the operations of one stream and of those that joined it, with their dependencies.

use super::clock::Clock;
use super::machine::{Signal, Work};
use std::collections::BTreeMap;

#[derive(Clone)]
pub struct PlanNode {
    pub work: Work,
    /// The nodes that come before it; all have lower numbers.
    pub deps: Vec<usize>,
    /// The captured stream that it was queued on.
    pub stream: usize,
}

/// A graph that can be launched.
#[derive(Clone)]
pub struct Plan {
    pub nodes: Vec<PlanNode>,
    /// A chain for each captured stream, see `clock`.
    pub chains: BTreeMap<usize, usize>,
    /// The end of the launch before.
    pub last: Option<(Signal, Clock)>,
}

/// A capture that is going on.
pub struct Capture {
    pub origin: usize,
    pub nodes: Vec<PlanNode>,
    /// For each stream of the capture, the nodes that its next operation comes after.
    heads: BTreeMap<usize, Vec<usize>>,
}

impl Capture {
    pub fn new(origin: usize) -> Capture {
        Capture { origin, nodes: Vec::new(), heads: BTreeMap::from([(origin, Vec::new())]) }
    }

    pub fn streams(&self) -> Vec<usize> {
        self.heads.keys().copied().collect()
    }

    pub fn note(&mut self, stream: usize, work: Work) {
        let head = self.heads.entry(stream).or_default();
        let deps = std::mem::replace(head, vec![self.nodes.len()]);
        self.nodes.push(PlanNode { work, deps, stream });
    }

    pub fn head(&self, stream: usize) -> Vec<usize> {
        self.heads.get(&stream).cloned().unwrap_or_default()
    }

    pub fn join(&mut self, stream: usize, nodes: &[usize]) {
        let head = self.heads.entry(stream).or_default();
        head.extend(nodes);
        head.sort_unstable();
        head.dedup();
    }

    /// Whether all nodes come before the next node of the origin.
    pub fn is_joined(&self) -> bool {
        let mut reached = vec![false; self.nodes.len()];
        let mut pending = self.head(self.origin);
        while let Some(node) = pending.pop() {
            if !std::mem::replace(&mut reached[node], true) {
                pending.extend(&self.nodes[node].deps);
            }
        }
        reached.iter().all(|r| *r)
    }
}
