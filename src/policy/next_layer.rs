//! The next layer's router on this layer's activation: MoEpic's Eq. 3, and what Mixtral offloading
//! (Eliseev and Mazur, 2023) does. A residual stream changes little from one layer to the next, so
//! the guess is mostly right. For the first layer the last one's activation of the previous token
//! serves.

use super::{Event, Expert, Prediction, Predictor, Routed, Shape, Wants};

/// Predicts as many experts as a token uses, in descending order of their probability, the lower
/// id first among equals.
#[derive(Clone, Debug)]
pub struct NextLayer {
    k: usize,
    predictions: Vec<Prediction>,
    /// Room to order a layer's experts.
    order: Vec<u32>,
}

impl NextLayer {
    pub fn new(shape: &Shape) -> Self {
        Self { k: shape.k, predictions: Vec::new(), order: Vec::new() }
    }
}

impl Predictor for NextLayer {
    /// Drops the last prediction: its layer has been reached.
    fn observe(&mut self, event: &Event<'_>) {
        let Event::Routed(Routed { ahead, .. }) = *event else { return };
        self.predictions.clear();
        let Some(ahead) = ahead else { return };
        let p = |expert: u32| ahead.probs[expert as usize];
        let order = |a: &u32, b: &u32| p(*b).total_cmp(&p(*a)).then(a.cmp(b));
        self.order.clear();
        self.order.extend(0..ahead.probs.len() as u32);
        // Only the best few need be in order.
        if self.k < self.order.len() {
            self.order.select_nth_unstable_by(self.k, order);
            self.order.truncate(self.k);
        }
        self.order.sort_unstable_by(order);
        self.predictions.extend(self.order.iter().map(|&expert| {
            let layer = ahead.layer;
            Prediction { expert: Expert { layer, expert }, priority: p(expert) }
        }));
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clone_from(&self.predictions);
    }

    fn wants(&self) -> Wants {
        Wants { ahead: true, hidden: false }
    }
}
