//! The latest predictions, and how often predictions are right: the share of the experts predicted
//! for a layer some MoE layers ahead that the layer's router then chose, a running mean for each
//! distance.

use super::grid::Grid;
use super::{Event, Prediction, Shape};

/// Distances that are told apart, in MoE layers. A prediction from farther ahead is not
/// judged and counts as the farthest.
pub(super) const DISTANCES: usize = 5;

/// So many predicted experts count.
const WINDOW: f64 = 256.0;

#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    hits: f64,
    judged: f64,
}

impl Rate {
    fn add(&mut self, hits: usize, judged: usize) {
        (self.hits, self.judged) = (self.hits + hits as f64, self.judged + judged as f64);
        let keep = (WINDOW / self.judged).min(1.0);
        (self.hits, self.judged) = (self.hits * keep, self.judged * keep);
    }

    /// Laplace's rule of succession: a half before anything is known.
    fn mean(self) -> f64 {
        (self.hits + 1.0) / (self.judged + 2.0)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Forecast {
    grid: Grid,
    /// The place of the layer whose router was heard of last, and the experts that the pass's
    /// tokens have chosen there.
    reached: Option<usize>,
    chosen: Vec<u32>,
    /// The latest predictions, most urgent first.
    latest: Vec<Prediction>,
    /// [places][distances]: the experts that were predicted for a layer that is still to come.
    awaited: Vec<[Vec<u32>; DISTANCES]>,
    rates: [Rate; DISTANCES],
}

impl Forecast {
    pub fn new(shape: &Shape) -> Forecast {
        let grid = Grid::new(shape);
        Forecast {
            reached: None,
            chosen: Vec::new(),
            latest: Vec::new(),
            awaited: vec![Default::default(); grid.moe().len()],
            rates: [Rate::default(); DISTANCES],
            grid,
        }
    }

    /// Rows of one pass come to a layer one after the other.
    pub fn observe(&mut self, event: &Event<'_>) {
        let Event::Routed(routed) = event else { return };
        let place = self.grid.place(routed.layer);
        if self.reached != Some(place) {
            self.leave();
            self.reached = Some(place);
            self.chosen.clear();
        }
        self.chosen.extend(routed.chosen);
    }

    /// The layer whose router was heard of last.
    pub fn reached_layer(&self) -> Option<u32> {
        self.reached.map(|place| self.grid.moe()[place])
    }

    /// Replaces the predictions.
    pub fn set_latest(&mut self, predictions: &[Prediction]) {
        self.latest.clear();
        self.latest.extend(predictions);
    }

    pub fn latest(&self) -> &[Prediction] {
        &self.latest
    }

    /// Judges what was predicted for the layer that is left, and notes what its last predictions
    /// were.
    fn leave(&mut self) {
        let Some(reached) = self.reached else { return };
        for (awaited, rate) in self.awaited[reached].iter_mut().zip(&mut self.rates) {
            let hits = awaited.iter().filter(|expert| self.chosen.contains(expert)).count();
            rate.add(hits, awaited.len());
            awaited.clear();
        }
        for prediction in &self.latest {
            let to = self.grid.place(prediction.expert.layer);
            let distance = self.distance(reached, to);
            if let Some(awaited) = self.awaited[to].get_mut(distance - 1) {
                awaited.push(prediction.expert.expert);
            }
        }
    }

    /// MoE layers from one place to another, through the next token if need be: 1 or more.
    pub fn distance(&self, from: usize, to: usize) -> usize {
        let n = self.grid.moe().len();
        (to + n - from - 1) % n + 1
    }

    pub fn place(&self, layer: u32) -> usize {
        self.grid.place(layer)
    }

    /// The MoE layer that comes `distance` behind the one at `place`.
    pub fn layer_behind(&self, place: usize, distance: usize) -> u32 {
        self.grid.moe()[(place + distance) % self.grid.moe().len()]
    }

    /// Layers that there is anything to say of behind another.
    pub fn n_ahead(&self) -> usize {
        DISTANCES.min(self.grid.moe().len())
    }

    /// How often an expert of a layer has been needed that was predicted from where the latest
    /// predictions are from.
    pub fn p_hit(&self, layer: u32) -> f64 {
        let from = self.reached.unwrap_or(0);
        let distance = self.distance(from, self.grid.place(layer));
        self.rates[distance.min(DISTANCES) - 1].mean()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Expert, Routed};

    /// Three MoE layers, a dense one between the first two.
    fn forecast() -> Forecast {
        Forecast::new(&Shape::of_model(vec![8, 0, 8, 8], 2))
    }

    fn route(forecast: &mut Forecast, layer: u32, chosen: &[u32]) {
        let (request, probs, hidden) = (0, &[][..], &[][..]);
        forecast.observe(&Event::Routed(Routed {
            request,
            layer,
            chosen,
            probs,
            hidden,
            ahead: None,
        }));
    }

    fn predict(forecast: &mut Forecast, experts: &[(u32, u32)]) {
        let prediction =
            |(layer, expert)| Prediction { expert: Expert { layer, expert }, priority: 0.5 };
        let predictions: Vec<_> = experts.iter().copied().map(prediction).collect();
        forecast.set_latest(&predictions);
    }

    #[test]
    fn distances_are_in_moe_layers_and_go_around_the_end() {
        let forecast = forecast();
        let distance = |from, to| forecast.distance(forecast.place(from), forecast.place(to));
        assert_eq!([distance(0, 2), distance(2, 3), distance(0, 3)], [1, 1, 2]);
        assert_eq!([distance(3, 0), distance(3, 2), distance(2, 2)], [1, 2, 3]);
        assert_eq!([1, 2, 3].map(|d| forecast.layer_behind(1, d)), [3, 0, 2]);
        assert_eq!(forecast.n_ahead(), 3);
    }

    /// At distance 1 three of four are right, at distance 2 one of four.
    #[test]
    fn each_distance_has_its_own_rate() {
        let mut forecast = forecast();
        for _ in 0..200 {
            route(&mut forecast, 0, &[0, 1]);
            predict(&mut forecast, &[(2, 0), (2, 1), (3, 0), (3, 1)]);
            route(&mut forecast, 2, &[0, 1]);
            predict(&mut forecast, &[(3, 2), (3, 5)]);
            route(&mut forecast, 3, &[2, 3]);
            predict(&mut forecast, &[(0, 1), (0, 0), (2, 0), (2, 7)]);
        }
        route(&mut forecast, 0, &[]);
        // 2 from 0: 2 of 2. 3 from 2: 1 of 2. 0 from 3: 2 of 2. 3 from 0: none; 2 from 3: 1 of 2.
        let near = forecast.p_hit(2);
        let far = forecast.p_hit(3);
        assert!((near - 5.0 / 6.0).abs() < 0.02 && (far - 0.25).abs() < 0.02, "{near} {far}");
    }

    /// Several rows choose: what any of them needs was right.
    #[test]
    fn rows_of_a_pass_are_judged_together() {
        let mut forecast = forecast();
        for _ in 0..100 {
            route(&mut forecast, 0, &[7]);
            predict(&mut forecast, &[(2, 4), (2, 5)]);
            route(&mut forecast, 2, &[4]);
            route(&mut forecast, 2, &[5]);
            predict(&mut forecast, &[]);
        }
        route(&mut forecast, 0, &[7]);
        assert!(forecast.p_hit(2) > 0.95);
    }

    #[test]
    fn a_change_is_followed() {
        let mut forecast = forecast();
        let mut tokens = |right: u32, n: usize| {
            for _ in 0..n {
                route(&mut forecast, 0, &[0]);
                predict(&mut forecast, &[(2, right)]);
                route(&mut forecast, 2, &[1]);
                predict(&mut forecast, &[]);
            }
            route(&mut forecast, 0, &[0]);
            forecast.p_hit(2)
        };
        assert_eq!(tokens(1, 0), 0.5);
        assert!(tokens(1, 1000) > 0.98);
        assert!(tokens(2, 1000) < 0.05);
    }
}
