//! The merging that BPE and SentencePiece share: a doubly linked list of symbols and a heap of
//! neighbouring pairs. Each merge removes a symbol and adds at most two pairs, so n symbols take
//! O(n log n) whatever the text (a scan for the best pair after each merge takes n², which for a
//! run of 131,072 equal letters is minutes).

use std::cmp::Ordering;
use std::collections::BinaryHeap;

const NONE: u32 = u32::MAX;

struct Node {
    symbol: u32,
    prev: u32,
    next: u32,
    live: bool,
}

/// A candidate merge. `seen` are the symbols as they were: a pair of which one has since been
/// merged is stale and dropped when it comes up.
struct Pair<K> {
    key: K,
    left: u32,
    right: u32,
    seen: (u32, u32),
    merged: u32,
}

impl<K: Ord> Ord for Pair<K> {
    /// The heap's greatest is the smallest key, and among equals the leftmost.
    fn cmp(&self, other: &Self) -> Ordering {
        other.key.cmp(&self.key).then(other.left.cmp(&self.left))
    }
}

impl<K: Ord> PartialOrd for Pair<K> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<K: Ord> PartialEq for Pair<K> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<K: Ord> Eq for Pair<K> {}

/// Reused between words.
pub struct Merger<K> {
    nodes: Vec<Node>,
    heap: BinaryHeap<Pair<K>>,
}

impl<K: Ord> Merger<K> {
    pub fn new() -> Self {
        Self { nodes: Vec::new(), heap: BinaryHeap::new() }
    }

    /// Merges until no pair has a rule. `rule(left, right)` says at what key (lowest first) two
    /// neighbouring symbols merge and into which symbol; `each` gets what remains, in order.
    pub fn run(
        &mut self,
        symbols: impl Iterator<Item = u32>,
        mut rule: impl FnMut(u32, u32) -> Option<(K, u32)>,
        mut each: impl FnMut(u32),
    ) {
        self.link(symbols);
        for right in 1..self.nodes.len() as u32 {
            self.consider(right - 1, right, &mut rule);
        }
        while let Some(pair) = self.heap.pop() {
            let (left, right) = (&self.nodes[pair.left as usize], &self.nodes[pair.right as usize]);
            if !left.live || !right.live || (left.symbol, right.symbol) != pair.seen {
                continue;
            }
            let (prev, next) = (left.prev, right.next);
            self.nodes[pair.right as usize].live = false;
            let node = &mut self.nodes[pair.left as usize];
            node.symbol = pair.merged;
            node.next = next;
            if next != NONE {
                self.nodes[next as usize].prev = pair.left;
                self.consider(pair.left, next, &mut rule);
            }
            if prev != NONE {
                self.consider(prev, pair.left, &mut rule);
            }
        }
        self.nodes.iter().filter(|node| node.live).for_each(|node| each(node.symbol));
    }

    fn link(&mut self, symbols: impl Iterator<Item = u32>) {
        self.nodes.clear();
        self.heap.clear();
        self.nodes.extend(symbols.zip(0u32..).map(|(symbol, i)| Node {
            symbol,
            prev: i.wrapping_sub(1), // NONE for the first
            next: i + 1,
            live: true,
        }));
        if let Some(last) = self.nodes.last_mut() {
            last.next = NONE;
        }
    }

    fn consider(
        &mut self,
        left: u32,
        right: u32,
        rule: &mut impl FnMut(u32, u32) -> Option<(K, u32)>,
    ) {
        let seen = (self.nodes[left as usize].symbol, self.nodes[right as usize].symbol);
        if let Some((key, merged)) = rule(seen.0, seen.1) {
            self.heap.push(Pair { key, left, right, seen, merged });
        }
    }
}
