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
