//! Least cache priority, MoEpic's Eq. 4: P = μ · ρ^(ν/ω), where μ counts the tokens that have
//! activated an expert and ν those of its layer that have passed since the last one did. Frequent
//! experts stay through a pause, and what was frequent once goes in the end.

use super::{Event, Eviction, Expert, PerExpert, Routed, Shape};

/// ω, tokens.
const WINDOW: f64 = 128.0;
/// ρ: a pause of one window divides an expert's count by four.
const RHO: f64 = 0.25;

#[derive(Clone, Debug)]
pub struct Lcp {
    experts: PerExpert<Record>,
    /// Tokens that each layer has seen.
    tokens: Vec<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// μ
    activations: u64,
    /// The layer's number of the last token that activated the expert.
    last: u64,
}

impl Lcp {
    pub fn new(shape: &Shape) -> Self {
        Self { experts: PerExpert::new(shape), tokens: vec![0; shape.n_experts.len()] }
    }

    /// `priority` without the layer's token count, which all its experts share: within a layer it
    /// gives the same order, and only an activation changes it. It grows then.
    pub(super) fn standing(&self, expert: Expert) -> f64 {
        let record = self.experts[expert];
        (record.activations as f64).ln() - record.last as f64 * (RHO.ln() / WINDOW)
    }
}

impl Eviction for Lcp {
    fn observe(&mut self, event: &Event<'_>) {
        let Event::Routed(Routed { layer, chosen, .. }) = *event else { return };
        let now = &mut self.tokens[layer as usize];
        *now += 1;
        for &expert in chosen {
            let record = &mut self.experts[Expert { layer, expert }];
            record.activations += 1;
            record.last = *now;
        }
    }

    /// ln P, in the order of P. P itself would be 0 after some 70,000 tokens, and an expert of a
    /// thousand uses no better than one that was never used, whose ln P is −∞.
    fn priority(&self, expert: Expert) -> f64 {
        let record = self.experts[expert];
        let pause = self.tokens[expert.layer as usize] - record.last;
        (record.activations as f64).ln() + pause as f64 * (RHO.ln() / WINDOW)
    }
}
