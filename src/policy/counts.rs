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
    /// Tokens of each layer.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Routed;
    use proptest::prelude::*;

    /// Layer 1 is dense.
    const N_EXPERTS: [usize; 3] = [7, 0, 3];

    proptest! {
        #[test]
        fn the_most_used_of_the_next_layer_come_first(
            steps in prop::collection::vec((any::<bool>(), 0u32..49), 1..60),
            k in 1usize..4,
        ) {
            let mut predictor = Counts::new(&Shape::of_model(N_EXPERTS.to_vec(), k));
            let mut seen: Vec<(u32, u32)> = Vec::new();
            for (is_first, at) in steps {
                let layer = if is_first { 0 } else { 2 };
                // Squared, so that some experts are more frequent than others.
                let expert = (at / 7) * (at % 7) / 7 % N_EXPERTS[layer as usize] as u32;
                let (chosen, probs, hidden) = (&[expert][..], &[][..], &[][..]);
                let routed = Routed { request: at, layer, chosen, probs, hidden, ahead: None };
                predictor.observe(&Event::Routed(routed));
                seen.push((layer, expert));
                let next = 2 - layer;
                let tokens = seen.iter().filter(|step| step.0 == next).count();
                let uses = |e: u32| seen.iter().filter(|step| **step == (next, e)).count();
                let all = 0..N_EXPERTS[next as usize] as u32;
                let mut expected: Vec<u32> = all.filter(|e| uses(*e) > 0).collect();
                expected.sort_by_key(|e| std::cmp::Reverse(uses(*e)));
                expected.truncate(2 * k);
                let mut out = Vec::new();
                predictor.predict(&mut out);
                let found: Vec<u32> = out.iter().map(|p| p.expert.expert).collect();
                prop_assert_eq!(found, expected);
                for Prediction { expert, priority } in out {
                    prop_assert_eq!(expert.layer, next);
                    let part = uses(expert.expert) as f64 / tokens as f64;
                    prop_assert_eq!(priority, part as f32);
                }
            }
        }
    }
}
