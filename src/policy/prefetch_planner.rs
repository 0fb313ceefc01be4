//! Plans a link's prefetches by PreSched (PreScope 4.3, questions 2 to 4), from what the predictor
//! says, how often it has been right at that distance, and measured times. The disk link and the
//! PCIe link are planned by this code; what a layer itself misses, `PreSched` places.

use super::forecast::Forecast;
use super::{
    Costs, Event, Expert, Missing, PreSched, PredictedLayer, Prediction, Schedule, Shape, Timer,
    View,
};

/// The least that counts of an expert which is predicted.
const LEAST_TOKENS: f64 = 1e-6;

#[derive(Clone, Debug)]
pub struct PrefetchPlanner {
    forecast: Forecast,
    /// Granules of an expert of each layer.
    n_granules: Vec<usize>,
    /// Experts that the last router chose and that a demand loads.
    n_demanded: usize,
    presched: PreSched,
    predicted: Vec<PredictedLayer>,
    schedule: Schedule,
}

impl PrefetchPlanner {
    pub fn new(shape: &Shape) -> PrefetchPlanner {
        PrefetchPlanner {
            forecast: Forecast::new(shape),
            n_granules: shape.n_granules.clone(),
            n_demanded: 0,
            presched: PreSched::filling(),
            predicted: Vec::new(),
            schedule: Schedule::default(),
        }
    }

    /// A router has chosen, and its layer's demand is queued. `is_demanded`: whether it waits for
    /// an expert.
    pub fn observe(&mut self, event: &Event<'_>, is_demanded: &dyn Fn(Expert) -> bool) {
        self.forecast.observe(event);
        if let Event::Routed(routed) = event {
            let experts = routed.chosen.iter();
            let experts = experts.map(|expert| Expert { layer: routed.layer, expert: *expert });
            self.n_demanded = experts.filter(|expert| is_demanded(*expert)).count();
        }
    }

    /// Replaces the predictions.
    pub fn set_latest(&mut self, predictions: &[Prediction]) {
        self.forecast.set_latest(predictions);
    }

    /// Leaves out of the latest predictions what is not worth loading now. `lacks`: whether an
    /// expert is neither in memory nor on its way. Everything else stays: predictions protect what
    /// is there.
    /// A layer takes `costs.attention_ns` and, beside the loads that it demands,
    /// `costs.experts_ns`.
    pub fn plan(
        &mut self,
        predictions: &mut Vec<Prediction>,
        costs: &Costs,
        lacks: &dyn Fn(Expert) -> bool,
    ) {
        let Some(layer) = self.forecast.reached_layer() else { return };
        self.list(layer, lacks);
        let granules = self.n_granules.get(layer as usize).copied().unwrap_or(1).max(1);
        let timer = Timer {
            load_ns: costs.load_ns,
            granule_ns: costs.load_ns / granules as f64,
            attention_ns: costs.attention_ns + costs.experts_ns,
            ..Timer::default()
        };
        let link_ns = self.n_demanded as f64 * costs.load_ns;
        let gap_ns = (costs.experts_ns - link_ns).max(0.0) + costs.attention_ns;
        let view = View { timer, current: &[], predicted: &self.predicted, delay_ns: 0.0 };
        self.schedule.clear();
        self.presched.prefetch(&view, gap_ns, &mut self.schedule);
        let Self { forecast, schedule, .. } = self;
        predictions.retain(|p| is_planned(forecast, layer, schedule, p.expert) || !lacks(p.expert));
    }

    /// The experts of the MoE layers behind `layer` that are predicted and missing, for its
    /// placement.
    pub fn predicted(&mut self, layer: u32, lacks: &dyn Fn(Expert) -> bool) -> &[PredictedLayer] {
        self.list(layer, lacks);
        &self.predicted
    }

    /// The latest predictions as far as `layer`'s placement has planned their prefetch, and those
    /// of experts that are not missing.
    pub fn planned(
        &self,
        layer: u32,
        schedule: &Schedule,
        lacks: &dyn Fn(Expert) -> bool,
        out: &mut Vec<Prediction>,
    ) {
        let latest = self.forecast.latest().iter().copied();
        let stays = |p: &Prediction| {
            is_planned(&self.forecast, layer, schedule, p.expert) || !lacks(p.expert)
        };
        out.clear();
        out.extend(latest.filter(stays));
    }

    fn list(&mut self, layer: u32, lacks: &dyn Fn(Expert) -> bool) {
        let place = self.forecast.place(layer);
        self.predicted.resize(self.forecast.n_ahead(), PredictedLayer::default());
        for (distance, predicted) in (1..).zip(&mut self.predicted) {
            let layer = self.forecast.layer_behind(place, distance);
            predicted.p_hit = self.forecast.p_hit(layer);
            let latest = self.forecast.latest().iter();
            let missing = latest.filter(|p| p.expert.layer == layer && lacks(p.expert));
            predicted.missing.clear();
            predicted.missing.extend(missing.map(|p| {
                let n_tokens = f64::from(p.priority).clamp(LEAST_TOKENS, 1.0);
                Missing::whole(p.expert.expert, n_tokens)
            }));
        }
    }
}

/// Whether the prefetch of an expert is in a schedule that was made at `layer`.
fn is_planned(forecast: &Forecast, layer: u32, schedule: &Schedule, expert: Expert) -> bool {
    let distance = forecast.distance(forecast.place(layer), forecast.place(expert.layer));
    schedule.prefetch.contains(&(distance, expert.expert))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Routed;

    /// Three layers with experts of two granules. A load takes 100.
    fn planner() -> PrefetchPlanner {
        let shape = Shape::of_model(vec![8; 3], 2);
        PrefetchPlanner::new(&Shape { n_granules: vec![2; 3], ..shape })
    }

    const COSTS: Costs =
        Costs { attention_ns: 120.0, experts_ns: 200.0, head_ns: 0.0, load_ns: 100.0 };

    fn route(planner: &mut PrefetchPlanner, layer: u32, chosen: &[u32], n_demanded: usize) {
        let (request, probs, hidden) = (0, &[][..], &[][..]);
        let routed = Routed { request, layer, chosen, probs, hidden, ahead: None };
        let demanded = chosen[..n_demanded].to_vec();
        planner.observe(&Event::Routed(routed), &|e| demanded.contains(&e.expert));
    }

    fn predictions(experts: &[(u32, u32)]) -> Vec<Prediction> {
        let prediction =
            |(layer, expert)| Prediction { expert: Expert { layer, expert }, priority: 0.5 };
        experts.iter().copied().map(prediction).collect()
    }

    /// The predictions that are left of layer 1's first `n` experts.
    fn planned(planner: &mut PrefetchPlanner, n: u32, lacks: &dyn Fn(Expert) -> bool) -> Vec<u32> {
        let mut left = predictions(&(0..n).map(|expert| (1, expert)).collect::<Vec<_>>());
        planner.set_latest(&left);
        planner.plan(&mut left, &COSTS, lacks);
        left.iter().map(|p| p.expert.expert).collect()
    }

    #[test]
    fn prefetches_fill_the_time_that_demand_leaves() {
        let n = |n_demanded| {
            let mut planner = planner();
            route(&mut planner, 0, &[6, 7], n_demanded);
            planned(&mut planner, 8, &|_| true).len()
        };
        // 200 beside the experts and 120 beside the attention; half of what is predicted is
        // assumed to be right, so that a fifth is worth no granule's delay.
        assert_eq!([0, 1, 2].map(n), [3, 2, 1]);
    }

    #[test]
    fn a_predictor_that_is_right_may_delay_a_demand() {
        let n = |predicted, chosen| {
            let mut planner = planner();
            for _ in 0..200 {
                route(&mut planner, 0, &[6], 0);
                planner.set_latest(&predictions(&[(1, predicted)]));
                route(&mut planner, 1, &[chosen], 0);
                planner.set_latest(&[]);
            }
            route(&mut planner, 0, &[6], 0);
            planned(&mut planner, 8, &|_| true).len()
        };
        assert_eq!((n(1, 1), n(1, 2)), (4, 3));
    }

    #[test]
    fn what_is_there_stays_predicted() {
        let mut planner = planner();
        route(&mut planner, 0, &[6, 7], 2);
        assert_eq!(planned(&mut planner, 5, &|e| e.expert % 2 == 1), [0, 1, 2, 4]);
        assert_eq!(planned(&mut planner, 5, &|_| false), [0, 1, 2, 3, 4]);
    }

    /// A placement sees what is missing of the layers behind its own, and prefetches its plan.
    #[test]
    fn a_placement_sees_the_layers_behind_it() {
        let mut planner = planner();
        route(&mut planner, 0, &[6, 7], 0);
        planner.set_latest(&predictions(&[(1, 3), (2, 4), (2, 5), (0, 1)]));
        let experts = |predicted: &[PredictedLayer]| {
            let layer = |layer: &PredictedLayer| -> Vec<u32> {
                layer.missing.iter().map(|m| m.expert).collect()
            };
            predicted.iter().map(layer).collect::<Vec<_>>()
        };
        let lacks = |expert: Expert| expert.expert != 4;
        assert_eq!(experts(planner.predicted(0, &lacks)), [vec![3], vec![5], vec![1]]);
        // One layer on, which the predictor has not heard of.
        assert_eq!(experts(planner.predicted(1, &lacks)), [vec![5], vec![1], vec![3]]);
        let schedule = Schedule { prefetch: vec![(1, 5)], ..Schedule::default() };
        let mut left = Vec::new();
        planner.planned(1, &schedule, &lacks, &mut left);
        assert_eq!(left, predictions(&[(2, 4), (2, 5)]));
    }
}
