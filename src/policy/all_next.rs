//! All experts of the next layer: DeepSpeed-Inference's prefetching, as MoE-Infinity describes it
//! (7.2). Any of them may be needed, so all of them are brought.

use super::grid::Grid;
use super::{Event, Expert, Prediction, Predictor, Shape};

/// After the last MoE layer comes the next token's first. All are equally urgent, by id: the
/// priority is the probability to be among k of n.
#[derive(Clone, Debug)]
pub struct AllNext {
    grid: Grid,
    k: usize,
    layer: Option<u32>,
}

impl AllNext {
    pub fn new(shape: &Shape) -> Self {
        Self { grid: Grid::new(shape), k: shape.k, layer: None }
    }
}

impl Predictor for AllNext {
    fn observe(&mut self, event: &Event<'_>) {
        self.layer = self.grid.next(event, self.layer);
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clear();
        let Some(layer) = self.layer else { return };
        let n = self.grid.row(layer).len();
        let priority = (self.k as f32 / n as f32).min(1.0);
        let experts = (0..n as u32).map(|expert| Expert { layer, expert });
        out.extend(experts.map(|expert| Prediction { expert, priority }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Phase, Routed};

    #[test]
    fn all_of_the_next_layer_are_predicted() {
        let mut predictor = AllNext::new(&Shape::of_model(vec![0, 3, 0, 4, 2], 2));
        let mut out = vec![Prediction { expert: Expert::default(), priority: 1.0 }];
        let mut predicted = |predictor: &mut AllNext| {
            predictor.predict(&mut out);
            let experts = out.iter().map(|p| (p.expert.layer, p.expert.expert)).collect::<Vec<_>>();
            assert!(out.iter().all(|p| p.priority == 2.0 / out.len() as f32));
            experts
        };
        assert_eq!(predicted(&mut predictor), []);
        predictor.observe(&Event::IterationStart {
            request: 0,
            phase: Phase::Prompt,
            token: None,
            embedding: &[],
        });
        assert_eq!(predicted(&mut predictor), []);
        let phase = Phase::Decode;
        predictor.observe(&Event::IterationStart {
            request: 0,
            phase,
            token: None,
            embedding: &[],
        });
        assert_eq!(predicted(&mut predictor), [(1, 0), (1, 1), (1, 2)]);
        for (layer, next, n) in [(1, 3, 4), (3, 4, 2), (4, 1, 3)] {
            let (chosen, probs, hidden) = (&[0, 1][..], &[][..], &[][..]);
            let routed = Routed { request: 0, layer, chosen, probs, hidden, ahead: None };
            predictor.observe(&Event::Routed(routed));
            let expected: Vec<_> = (0..n).map(|expert| (next, expert)).collect();
            assert_eq!(predicted(&mut predictor), expected);
        }
    }
}
