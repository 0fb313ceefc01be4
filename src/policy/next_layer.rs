//! The next layer's router on this layer's activation: MoEpic's Eq. 3, and what Mixtral offloading
//! (Eliseev and Mazur, 2023) does. A residual stream changes little from one layer to the next, so
//! the guess is mostly right. For the first layer the last one's activation of the previous token
//! serves.
//!
//! If the next layer is too near to prefetch for, the driver shows the router of the one behind it.
//! A prediction stands until its layer is reached.

use super::ranks::best;
use super::{Event, Expert, Prediction, Predictor, Routed, Shape, Wants};

/// Predicts as many experts as a token uses, in descending order of their probability, the lower
/// id first among equals.
#[derive(Clone, Debug)]
pub struct NextLayer {
    k: usize,
    /// The MoE layer after each layer.
    next: Vec<usize>,
    /// Predictions that stand, of a layer before the one that was looked ahead at last.
    standing: Vec<Prediction>,
    /// The layer that was looked ahead at last, and its probabilities: they are ranked when they
    /// are asked for, so that a predictor that is not costs next to nothing.
    ahead: Option<u32>,
    /// Whether the last event looked ahead.
    is_new: bool,
    probs: Vec<f32>,
    /// Room to order a layer's experts.
    order: Vec<u32>,
}

impl NextLayer {
    pub fn new(shape: &Shape) -> Self {
        let next = shape.next_moe_layers();
        let (standing, probs, order) = (Vec::new(), Vec::new(), Vec::new());
        Self { k: shape.k, next, standing, ahead: None, is_new: false, probs, order }
    }

    /// Adds the best of the last look-ahead to `out`.
    fn rank(&mut self, out: &mut Vec<Prediction>) {
        let Some(layer) = self.ahead else { return };
        let ranked = best(&mut self.order, &self.probs, self.k).iter();
        out.extend(ranked.map(|&expert| Prediction {
            expert: Expert { layer, expert },
            priority: self.probs[expert as usize],
        }));
    }
}

impl Predictor for NextLayer {
    fn observe(&mut self, event: &Event<'_>) {
        self.is_new = false;
        let Event::Routed(Routed { layer, ahead, .. }) = *event else { return };
        self.is_new = ahead.is_some();
        let next = self.next.get(layer as usize).map(|next| *next as u32);
        let stands = |of: u32| Some(of) == next && ahead.is_some_and(|ahead| ahead.layer != of);
        self.standing.retain(|prediction| stands(prediction.expert.layer));
        if self.ahead.is_some_and(stands) {
            let mut standing = std::mem::take(&mut self.standing);
            self.rank(&mut standing);
            self.standing = standing;
        }
        self.ahead = ahead.map(|ahead| ahead.layer);
        self.probs.clear();
        self.probs.extend(ahead.map_or(&[][..], |ahead| ahead.probs));
    }

    /// Nearest layer first.
    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clone_from(&self.standing);
        self.rank(out);
    }

    fn emit(&self, listener: &mut dyn FnMut(&Event<'_>)) {
        if let Some(layer) = self.ahead.filter(|_| self.is_new) {
            listener(&Event::Predicted { layer, probs: &self.probs });
        }
    }

    fn wants(&self) -> Wants {
        Wants { ahead: true, ..Wants::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::LookAhead;

    /// Layers 0, 1, 3 and 4 have experts.
    fn predictor() -> NextLayer {
        NextLayer::new(&Shape::of_model(vec![3, 3, 0, 3, 3], 1))
    }

    /// The layers of what is predicted after `layer`, whose activation went through `ahead`'s
    /// router, which chooses expert 2.
    fn predicted(predictor: &mut NextLayer, layer: u32, ahead: Option<u32>) -> Vec<u32> {
        let ahead = ahead.map(|layer| LookAhead { layer, probs: &[0.1, 0.2, 0.7] });
        let (request, chosen, probs, hidden) = (0, &[][..], &[][..], &[][..]);
        let routed = Routed { request, layer, chosen, probs, hidden, ahead };
        predictor.observe(&Event::Routed(routed));
        let mut out = Vec::new();
        predictor.predict(&mut out);
        assert!(out.iter().all(|p| p.expert.expert == 2));
        out.iter().map(|p| p.expert.layer).collect()
    }

    #[test]
    fn the_next_layer_is_predicted_until_it_is_reached() {
        let mut predictor = predictor();
        let steps = [(0, 1), (1, 3), (3, 4), (4, 0), (0, 1)];
        for (layer, next) in steps {
            assert_eq!(predicted(&mut predictor, layer, Some(next)), [next]);
        }
        assert!(predicted(&mut predictor, 1, None).is_empty());
    }

    #[test]
    fn two_layers_ahead_both_stand() {
        let mut predictor = predictor();
        assert_eq!(predicted(&mut predictor, 0, Some(3)), [3]);
        for (layer, next, second) in [(1, 3, 4), (3, 4, 0), (4, 0, 1), (0, 1, 3)] {
            assert_eq!(predicted(&mut predictor, layer, Some(second)), [next, second]);
        }
        assert!(predicted(&mut predictor, 1, None).is_empty());
    }
}
