//! Eviction by expected next use: Belady's rule, with probabilities in place of the future. An
//! expert that is used once does not displace experts that are used again and again, and an expert
//! that a predictor expects in a later layer is kept until that layer.
//!
//! The priority is E[2^(−τ/H)], τ being the tokens until the expert is used: uses within some H
//! tokens count, and what comes later hardly matters, as it will have been dropped by then. Until
//! an expert's layer comes next d of L layers pass. It is used then with probability q if it was
//! predicted, or else p; and by each later token with probability p, so that P = g^(d/L) · (q + (1
//! − q) · p·g / (1 − (1 − p)·g)), g = 2^(−1/H).
//!
//! p is the expert's rate of use (`rates`), which one use in passing hardly moves, and what a
//! predictor expects it to change by. A run begins with the rates of all runs before it, which the
//! profile keeps (`hot_table`).

use super::grid::Grid;
use super::rates::Rates;
use super::{Event, Eviction, Expert, HotTable, Phase, Profile, PromptRouted, Routed, Shape};

/// H, tokens. What is evicted hardly depends on it (from 2 to 1,000 hits differ by less than
/// 0.002); what an idle link brings does: with 4 in place of 2 gpt-oss-20b takes up to 1 % longer
/// for more bytes.
const HORIZON: f64 = 2.0;

#[derive(Clone, Debug)]
pub struct ScanResistant {
    grid: Grid,
    k: usize,
    rates: Rates,
    /// Uses in all runs, this one included, for the next run's profile.
    uses: HotTable,
    /// Probabilities to be used when the layer comes next: [experts of the model].
    predicted: Vec<f64>,
    /// Whether those of a layer are of its next coming: [layers].
    is_predicted: Vec<bool>,
    /// How much more often than of late a predictor expects tokens to use each.
    later: Vec<f32>, // [experts of the model]
    /// The place among the MoE layers of the one that comes next.
    next: usize,
}

/// Decay factor after so many tokens.
fn decay(tokens: f64, half_life: f64) -> f64 {
    (-tokens / half_life).exp2()
}

fn probability(p: f64) -> f64 {
    if p.is_nan() { 0.0 } else { p.clamp(0.0, 1.0) }
}

impl ScanResistant {
    pub fn new(shape: &Shape) -> Self {
        Self::with(shape, HotTable::new(shape))
    }

    /// With the uses of earlier runs.
    pub fn with(shape: &Shape, uses: HotTable) -> Self {
        let grid = Grid::new(shape);
        Self {
            k: shape.k,
            rates: Rates::with(uses.rates(shape.k)),
            uses,
            predicted: vec![0.0; grid.n_cells()],
            is_predicted: vec![false; grid.n_layers()],
            later: vec![0.0; grid.n_cells()],
            next: 0,
            grid,
        }
    }

    fn routed(&mut self, layer: u32, chosen: &[u32], probs: &[f32]) {
        self.rates.observe(self.grid.row(layer), chosen, probs);
        self.is_predicted[layer as usize] = false;
        self.next = (self.grid.place(layer) + 1) % self.grid.moe().len();
    }

    /// Takes a prediction, unless its layer has been passed. A router's probabilities add up to 1,
    /// and a token uses k experts.
    fn on_predicted(&mut self, layer: u32, probs: &[f32]) {
        let row = &mut self.predicted[self.grid.row(layer)];
        if row.len() != probs.len() || self.grid.place(layer) < self.next {
            return;
        }
        self.is_predicted[layer as usize] = true;
        for (q, prob) in row.iter_mut().zip(probs) {
            let used = f64::from(*prob) * self.k as f64;
            *q = probability(used);
        }
    }

    /// Takes an estimate of the layer's next coming, and of those behind it.
    fn on_expected(&mut self, layer: u32, used: &[f32], later: &[f32]) {
        let row = self.grid.row(layer);
        if row.len() == used.len() {
            self.is_predicted[layer as usize] = true;
            let predicted = &mut self.predicted[row.clone()];
            predicted.iter_mut().zip(used).for_each(|(q, used)| *q = probability(f64::from(*used)));
        }
        if row.len() == later.len() {
            self.later[row].copy_from_slice(later);
        }
    }
}

impl Eviction for ScanResistant {
    fn observe(&mut self, event: &Event<'_>) {
        self.uses.observe(event);
        match *event {
            Event::Routed(Routed { layer, chosen, probs, .. }) => self.routed(layer, chosen, probs),
            Event::PromptRouted(ref routed @ PromptRouted { layer, chosen, .. }) => {
                self.rates.observe_tail(self.grid.row(layer), chosen, routed.k());
            }
            Event::Predicted { layer, probs } => self.on_predicted(layer, probs),
            Event::Expected { layer, used, later } => self.on_expected(layer, used, later),
            Event::IterationStart { phase: Phase::Decode, .. } => self.next = 0,
            _ => {}
        }
    }

    fn save(&self, profile: &mut Profile) {
        if !self.uses.is_empty() {
            self.uses.save(profile);
        }
    }

    fn expected_priority(&self, expert: Expert) -> Option<f64> {
        self.is_predicted[expert.layer as usize].then(|| self.priority(expert))
    }

    fn hears_of_prompts(&self) -> bool {
        true
    }

    /// From 0, for an expert that was never used and is not predicted, to 1.
    fn priority(&self, expert: Expert) -> f64 {
        let (cell, n_layers) = (self.grid.cell(expert), self.grid.moe().len());
        let p = probability(f64::from(self.rates.rate(cell) + self.later[cell]));
        let q = if self.is_predicted[expert.layer as usize] { self.predicted[cell] } else { p };
        let ahead = (self.grid.place(expert.layer) + n_layers - self.next) % n_layers;
        let token = decay(1.0, HORIZON);
        let later = p * token / (1.0 - (1.0 - p) * token);
        decay(ahead as f64 / n_layers as f64, HORIZON) * (q + (1.0 - q) * later)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Layer 1 is dense.
    const N_EXPERTS: [usize; 4] = [4, 0, 3, 5];
    const MOE_LAYERS: [u32; 3] = [0, 2, 3];

    fn observe(policy: &mut ScanResistant, layer: u32, chosen: &[u32]) {
        let (probs, hidden) = (&[][..], &[][..]);
        policy.observe(&Event::Routed(Routed {
            request: 0,
            layer,
            chosen,
            probs,
            hidden,
            ahead: None,
        }));
    }

    fn policy() -> ScanResistant {
        ScanResistant::new(&Shape::of_model(N_EXPERTS.to_vec(), 2))
    }

    /// A layer is routed, predicted or expected.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Kind {
        Routed,
        Predicted,
        Expected,
    }

    type Act = (Kind, u32, u32, f32);

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let layer = prop::sample::select(&MOE_LAYERS[..]);
        let prob = prop_oneof![4 => 0.0f32..1.0, 1 => Just(f32::NAN), 1 => Just(f32::INFINITY)];
        let kind = prop_oneof![
            4 => Just(Kind::Routed),
            1 => Just(Kind::Predicted),
            1 => Just(Kind::Expected),
        ];
        let act = (kind, layer, 0u32..15, prob);
        prop::collection::vec(act, 0..60)
    }

    fn estimate(layer: u32, by: u32, prob: f32) -> Vec<f32> {
        let n = N_EXPERTS[layer as usize];
        (0..n).map(|e| if e == by as usize % n { prob } else { 0.1 }).collect()
    }

    proptest! {
        /// The expectation as a sum over what may happen, from the whole history.
        #[test]
        fn priority_is_the_expected_discount(acts in acts()) {
            let mut policy = policy();
            for &(kind, layer, by, prob) in &acts {
                let estimate = &estimate(layer, by, prob)[..];
                match kind {
                    Kind::Routed => {
                        observe(&mut policy, layer, &[by % N_EXPERTS[layer as usize] as u32])
                    }
                    Kind::Predicted => {
                        policy.observe(&Event::Predicted { layer, probs: estimate })
                    }
                    Kind::Expected => {
                        let (used, later) = (estimate, &[][..]);
                        policy.observe(&Event::Expected { layer, used, later });
                    }
                }
            }
            let mut next = 0;
            let in_time = acts.into_iter().filter(|act| {
                let place = MOE_LAYERS.iter().position(|layer| *layer == act.1).unwrap();
                let in_time = act.0 != Kind::Predicted || place >= next;
                next = if act.0 == Kind::Routed { (place + 1) % 3 } else { next };
                in_time
            });
            let acts: Vec<Act> = in_time.collect();
            let routed: Vec<&Act> = acts.iter().filter(|act| act.0 == Kind::Routed).collect();
            let reached = routed.last().map_or(2, |act| {
                MOE_LAYERS.iter().position(|layer| *layer == act.1).unwrap()
            });
            for (place, layer) in MOE_LAYERS.into_iter().enumerate() {
                let tokens: Vec<_> = routed.iter().filter(|act| act.1 == layer).collect();
                let last = acts.iter().rfind(|act| act.1 == layer);
                let last = last.filter(|act| act.0 != Kind::Routed);
                for expert in 0..N_EXPERTS[layer as usize] as u32 {
                    let n = N_EXPERTS[layer as usize] as u32;
                    let rate = |half_life: f64| -> f64 {
                        let ages = tokens.iter().rev().enumerate();
                        let uses = ages.filter(|(_, act)| act.2 % n == expert);
                        let left = |age: usize| 0.5f64.powf(age as f64 / half_life);
                        uses.map(|(age, _)| left(age) - left(age + 1)).sum()
                    };
                    let p = 0.4 * rate(4.0) + 0.6 * rate(64.0);
                    let q = last.map_or(p, |act| {
                        let prob = estimate(layer, act.2, act.3)[expert as usize];
                        let used = if act.0 == Kind::Predicted { prob * 2.0 } else { prob };
                        if used.is_nan() { 0.0 } else { f64::from(used).min(1.0) }
                    });
                    let ahead = (place + 5 - reached) % 3;
                    let mut expected = 0.0;
                    let mut unused = 1.0;
                    for token in 0..400 {
                        let chance = if token == 0 { q } else { p };
                        let wait = token as f64 + ahead as f64 / 3.0;
                        expected += unused * chance * 0.5f64.powf(wait / 2.0);
                        unused *= 1.0 - chance;
                    }
                    let found = policy.priority(Expert { layer, expert });
                    prop_assert!((found - expected).abs() < 1e-5, "{} {}", found, expected);
                    prop_assert!((0.0..=1.0).contains(&found));
                }
            }
        }
    }

    /// A tier with room for all but one of what is used in turn, and a text full of experts that
    /// come once: those who come back stay.
    #[test]
    fn one_time_uses_do_not_displace_what_comes_back() {
        let shape = Shape::of_model(vec![1000], 1);
        let mut policy = ScanResistant::new(&shape);
        let regulars = 8;
        for token in 0..300 {
            observe(&mut policy, 0, &[if token % 2 == 0 { token / 2 % regulars } else { token }]);
        }
        let priority = |expert| policy.priority(Expert { layer: 0, expert });
        let lowest = (0..regulars).map(priority).fold(f64::INFINITY, f64::min);
        // The last few may yet turn out to be regulars.
        assert!((regulars..270).all(|once| priority(once) < lowest));
    }

    #[test]
    fn a_predicted_expert_stays_until_its_layer_has_come() {
        let mut policy = policy();
        for _ in 0..50 {
            MOE_LAYERS.iter().for_each(|layer| observe(&mut policy, *layer, &[0, 1]));
        }
        let priority =
            |policy: &ScanResistant, expert| policy.priority(Expert { layer: 0, expert });
        assert!(priority(&policy, 3) < priority(&policy, 0));
        policy.observe(&Event::Predicted { layer: 0, probs: &[0.0, 0.5, 0.0, 0.5] });
        assert!(priority(&policy, 3) > priority(&policy, 0));
        observe(&mut policy, 0, &[0, 1]);
        assert!(priority(&policy, 3) < priority(&policy, 0));
        // What is expected of the next token holds from this one on.
        policy.observe(&Event::Expected { layer: 0, used: &[0.1, 0.1, 0.9, 0.9], later: &[] });
        assert!(priority(&policy, 3) > priority(&policy, 0));
    }

    #[test]
    fn a_prompt_says_what_its_answer_will_use() {
        let (mut policy, layer) = (policy(), 0);
        let (counts, probs, chosen) = (&[2, 0, 1, 1][..], &[][..], &[0, 2, 0, 3][..]);
        let routed = PromptRouted { request: 0, layer, n_tokens: 2, counts, probs, chosen };
        policy.observe(&Event::PromptRouted(routed));
        let priority = |expert| policy.priority(Expert { layer, expert });
        assert!(priority(0) > priority(2) && priority(2) > priority(1) && priority(1) == 0.0);
    }
}
