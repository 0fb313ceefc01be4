//! A tier's prefetch planner behind a lock of its own, which is held for microseconds: the layer
//! loop asks it for predictions while a slow predictor is at work.

use std::sync::Mutex;

use crate::experts::tier::Tier;
use crate::policy::{Costs, Event, PredictedLayer, Prediction, PrefetchPlanner, Schedule};

/// The layers behind one that is placed, the nearest first. Tiers side by side add theirs.
pub type PredictedLayers = Vec<PredictedLayer>;

struct Plan {
    planner: PrefetchPlanner,
    /// The tier's step when the latest predictions were made.
    step: u64,
    /// `None` until they are measured. On a device, the time between its layers is measured by
    /// whoever computes them, and resident experts are computed within it.
    costs: Option<Costs>,
    attention_ns: Option<f64>,
    /// Room for a list of predictions.
    planned: Vec<Prediction>,
}

pub struct Planning(Mutex<Plan>);

impl Planning {
    pub fn new(planner: PrefetchPlanner) -> Planning {
        let (costs, attention_ns, planned) = (None, None, Vec::new());
        Planning(Mutex::new(Plan { planner, step: 0, costs, attention_ns, planned }))
    }

    fn with<R>(&self, f: impl FnOnce(&mut Plan) -> R) -> R {
        f(&mut self.0.lock().expect("no panic under this lock"))
    }

    /// Called once a pass.
    pub fn set_costs(&self, costs: Option<Costs>) {
        self.with(|plan| plan.costs = costs);
    }

    pub fn set_attention_ns(&self, ns: f64) {
        self.with(|plan| plan.attention_ns = Some(ns));
    }

    pub fn observe(&self, event: &Event, tier: &Tier) {
        self.with(|plan| plan.planner.observe(event, &|expert| tier.is_demanded(expert)));
    }

    /// Queues new predictions as far as they are worth it by what things take. All of them before
    /// that is measured.
    pub fn prefetch(&self, predictions: &mut Vec<Prediction>, step: u64, tier: &Tier) {
        self.with(|plan| {
            plan.step = step;
            plan.planner.set_latest(predictions);
            if let Some(costs) = plan.costs {
                let costs = match plan.attention_ns {
                    Some(attention_ns) => Costs { attention_ns, experts_ns: 0.0, ..costs },
                    None => costs,
                };
                plan.planner.plan(predictions, &costs, &|expert| tier.lacks(expert));
            }
            tier.prefetch(predictions, step);
        });
    }

    /// Adds the experts of the layers behind `layer` that are predicted and missing.
    pub fn predicted(&self, layer: usize, tier: &Tier, out: &mut PredictedLayers) {
        self.with(|plan| {
            let layers = plan.planner.predicted(layer as u32, &|expert| tier.lacks(expert));
            out.resize(out.len().max(layers.len()), PredictedLayer::default());
            for (out, layer) in out.iter_mut().zip(layers) {
                out.p_hit = layer.p_hit;
                out.missing.extend(&layer.missing);
            }
        });
    }

    /// Queues those of the latest predictions that a layer's placement has planned.
    pub fn prefetch_planned(&self, layer: usize, schedule: &Schedule, tier: &Tier) {
        self.with(|Plan { planner, step, planned, .. }| {
            planner.planned(layer as u32, schedule, &|expert| tier.lacks(expert), planned);
            tier.prefetch(planned, *step);
        });
    }
}
