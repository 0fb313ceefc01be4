//! FineMoE's eviction (§4.5): the expert with the highest 1 / (p · freq) goes first.

use crate::policy::{Event, Eviction, Expert, PerExpert, Routed, Shape};

/// The least p: where the searched map says 0, the frequency still tells experts apart.
const MIN_P: f32 = 1e-9;

/// By p · freq. freq counts the tokens of decode that used the expert and never ages; prompts do
/// not use the decode experts' room. p is the layer's last `Predicted` probability, before any 1/J.
///
/// The formula puts experts that were never used before all others; among themselves they go by p.
/// One that was prefetched and not yet used is the tier's to protect.
#[derive(Clone, Debug)]
pub struct MapEviction {
    experts: PerExpert<Record>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Record {
    freq: u64,
    p: f32,
}

impl MapEviction {
    pub fn new(shape: &Shape) -> Self {
        let mut experts = PerExpert::<Record>::new(shape);
        for (layer, &n_experts) in shape.n_experts.iter().enumerate() {
            for expert in 0..n_experts as u32 {
                experts[Expert { layer: layer as u32, expert }].p = 1.0 / n_experts as f32;
            }
        }
        Self { experts }
    }
}

impl Eviction for MapEviction {
    fn observe(&mut self, event: &Event<'_>) {
        match *event {
            Event::Routed(Routed { layer, chosen, .. }) => {
                chosen.iter().for_each(|&expert| self.experts[Expert { layer, expert }].freq += 1);
            }
            Event::Predicted { layer, probs } => {
                for (expert, &p) in (0u32..).zip(probs) {
                    let p = if p.is_nan() { 0.0 } else { p.clamp(0.0, 1.0) };
                    self.experts[Expert { layer, expert }].p = p;
                }
            }
            _ => {}
        }
    }

    /// p · freq; p − 1 of what was never used, which is not above 0.
    fn priority(&self, expert: Expert) -> f64 {
        let Record { freq, p } = self.experts[expert];
        if freq == 0 { f64::from(p) - 1.0 } else { f64::from(p.max(MIN_P)) * freq as f64 }
    }
}
