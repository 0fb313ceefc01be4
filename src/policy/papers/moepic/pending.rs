//! Predictions for layers that their requests have not reached yet.

use crate::policy::LookAhead;

/// Predictions that may wait at once. One per request is usual; the bound is for requests whose end
/// was not reported.
const N_WAITING: usize = 256;

#[derive(Clone, Debug, Default)]
pub(super) struct Pending {
    /// Oldest first.
    waiting: Vec<Ranking>,
    /// To use their room again.
    spare: Vec<Ranking>,
}

#[derive(Clone, Debug, Default)]
struct Ranking {
    request: u32,
    layer: u32,
    /// Experts in descending order of predicted score.
    best: Vec<u32>,
}

impl Pending {
    /// Keeps the best `depth` experts of a prediction, the lower id first among equals. It takes
    /// the place of an earlier one of that layer.
    pub fn put(&mut self, request: u32, ahead: &LookAhead<'_>, depth: usize) {
        let earlier = self.position(request, ahead.layer);
        let oldest = (self.waiting.len() == N_WAITING).then_some(0);
        if let Some(at) = earlier.or(oldest) {
            self.spare.push(self.waiting.remove(at));
        }
        let mut ranking = self.spare.pop().unwrap_or_default();
        (ranking.request, ranking.layer) = (request, ahead.layer);
        let score = |expert: u32| ahead.probs[expert as usize];
        let by_score = |a: &u32, b: &u32| score(*b).total_cmp(&score(*a)).then(a.cmp(b));
        let best = &mut ranking.best;
        best.clear();
        best.extend(0..ahead.probs.len() as u32);
        if depth < best.len() {
            best.select_nth_unstable_by(depth, by_score);
            best.truncate(depth);
        }
        best.sort_unstable_by(by_score);
        self.waiting.push(ranking);
    }

    /// The prediction of a layer that is reached now.
    pub fn take(&mut self, request: u32, layer: u32) -> Option<&[u32]> {
        let at = self.position(request, layer)?;
        self.spare.push(self.waiting.remove(at));
        self.spare.last().map(|ranking| ranking.best.as_slice())
    }

    pub fn forget(&mut self, request: u32) {
        self.spare.extend(self.waiting.extract_if(.., |ranking| ranking.request == request));
    }

    fn position(&self, request: u32, layer: u32) -> Option<usize> {
        self.waiting.iter().position(|r| (r.request, r.layer) == (request, layer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(pending: &mut Pending, request: u32, layer: u32, probs: &[f32]) {
        pending.put(request, &LookAhead { layer, probs }, 2);
    }

    #[test]
    fn the_last_prediction_of_a_layer_is_taken_once() {
        let mut pending = Pending::default();
        put(&mut pending, 0, 1, &[0.1, 0.2, 0.7]);
        put(&mut pending, 1, 1, &[0.7, 0.1, 0.2]);
        put(&mut pending, 0, 1, &[0.4, 0.2, 0.4]);
        assert_eq!(pending.take(0, 2), None);
        assert_eq!(pending.take(0, 1), Some(&[0, 2][..]));
        assert_eq!(pending.take(0, 1), None);
        assert_eq!(pending.take(1, 1), Some(&[0, 2][..]));
    }

    #[test]
    fn requests_end_and_what_waits_is_bounded() {
        let mut pending = Pending::default();
        for request in 0..2 * N_WAITING as u32 {
            put(&mut pending, request, 1, &[1.0]);
        }
        assert_eq!(pending.waiting.len() + pending.spare.len(), N_WAITING);
        assert_eq!(pending.take(0, 1), None);
        let last = 2 * N_WAITING as u32 - 1;
        put(&mut pending, last, 2, &[1.0]);
        pending.forget(last);
        assert!((1..=2).all(|layer| pending.take(last, layer).is_none()));
        assert_eq!(pending.take(last - 1, 1), Some(&[0][..]));
    }
}
