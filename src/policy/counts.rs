//! The next layer's most used experts by model-level counts: BrainStorm's prefetching (Cui et al.,
//! 2023), as MoE-Infinity describes it (7.2). Its eviction is `Lfu`.

use super::grid::Grid;
use super::ranks::Ranks;
use super::{Event, Expert, Prediction, Predictor, Shape};

/// How many experts to predict, in those that a token uses. MoE-Infinity does not say; in its
/// Table 3 this method moves 1 to 2 times what is used.
const SHARE: usize = 2;

/// Counts never age and are of all requests. Like those of `Lfu` they are of decode steps. After
/// the last MoE layer comes the next token's first. The priority is the part of all tokens that
/// used the expert; one that none has used is not predicted.
#[derive(Clone, Debug)]
pub struct Counts {
    grid: Grid,
    k: usize,
    /// [experts of the model]
    uses: Vec<u64>,
    /// Of each layer.
    tokens: Vec<u64>,
    layer: Option<u32>,
    ranks: Ranks,
}

impl Counts {
    pub fn new(shape: &Shape) -> Self {
        let grid = Grid::new(shape);
        let (uses, tokens) = (vec![0; grid.n_cells()], vec![0; grid.n_layers()]);
        Self { grid, k: shape.k, uses, tokens, layer: None, ranks: Ranks::default() }
    }
}

impl Predictor for Counts {
    fn observe(&mut self, event: &Event<'_>) {
        if let Event::Routed(routed) = event {
            let layer = routed.layer;
            self.tokens[layer as usize] += 1;
            for &expert in routed.chosen {
                self.uses[self.grid.cell(Expert { layer, expert })] += 1;
            }
        }
        self.layer = self.grid.next(event, self.layer);
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clear();
        let Some(layer) = self.layer else { return };
        self.ranks.clear();
        let tokens = self.tokens[layer as usize] as f64;
        let uses = self.uses[self.grid.row(layer)].iter().zip(0..);
        for (uses, expert) in uses.filter(|(uses, _)| **uses > 0) {
            self.ranks.push((*uses as f64 / tokens) as f32, expert);
        }
        let best = self.ranks.best(SHARE * self.k);
        out.extend(best.map(|(priority, expert)| {
            let expert = Expert { layer, expert };
            Prediction { expert, priority }
        }));
    }
}
