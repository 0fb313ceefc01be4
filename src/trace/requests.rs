//! Requests of a trace in the order in which tables serve them: the kinds by turns, as a server
//! sees them, so that any part from the start has something of each.

use crate::trace::format::Trace;

/// Requests of each kind, kinds in the order in which they first come.
pub fn kinds(trace: &Trace) -> Vec<(&str, Vec<usize>)> {
    let mut kinds: Vec<(&str, Vec<usize>)> = Vec::new();
    for (number, request) in trace.requests().iter().enumerate() {
        match kinds.iter_mut().find(|(kind, _)| *kind == request.kind) {
            Some((_, numbers)) => numbers.push(number),
            None => kinds.push((&request.kind, vec![number])),
        }
    }
    kinds
}

/// Every n-th request of each kind, the kinds by turns.
pub fn by_turns(trace: &Trace, every: usize) -> Vec<usize> {
    let kinds = kinds(trace);
    let lists: Vec<&[usize]> = kinds.iter().map(|(_, numbers)| &numbers[..]).collect();
    in_turn(&lists, every)
}

/// Every n-th of each list, the lists by turns.
pub fn in_turn(lists: &[&[usize]], every: usize) -> Vec<usize> {
    let longest = lists.iter().map(|list| list.len()).max().unwrap_or(0);
    let turns = (0..longest).step_by(every);
    turns.flat_map(|i| lists.iter().filter_map(move |list| list.get(i).copied())).collect()
}
