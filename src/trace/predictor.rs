//! The predictor on the simulated clock. A fast one answers at once, as in the layer loop. A slow
//! one has a thread of its own: a search sees the events before its start, takes its time, and its
//! answer takes effect at its end; later events wait for the next search.

use crate::policy::{Event, Prediction, Predictor, Wants, is_asked};

/// An answer of the predictor.
#[derive(Clone, Debug, Default)]
pub struct PredictorAnswer {
    /// `None`: the earlier predictions stand.
    pub predictions: Option<Vec<Prediction>>,
    /// The tier's step when they were made.
    pub step: u64,
    /// Events for the eviction, which come first.
    pub estimates: Vec<Estimate>,
}

/// An event for the eviction, owned.
#[derive(Clone, Debug)]
pub enum Estimate {
    /// `Event::Predicted`
    Predicted { layer: u32, probs: Vec<f32> },
    /// `Event::Expected`
    Expected { layer: u32, used: Vec<f32>, later: Vec<f32> },
}

impl Estimate {
    fn of(event: &Event) -> Option<Estimate> {
        match *event {
            Event::Predicted { layer, probs } => {
                Some(Estimate::Predicted { layer, probs: probs.to_vec() })
            }
            Event::Expected { layer, used, later } => {
                let (used, later) = (used.to_vec(), later.to_vec());
                Some(Estimate::Expected { layer, used, later })
            }
            _ => None,
        }
    }

    pub fn event(&self) -> Event<'_> {
        match self {
            Estimate::Predicted { layer, probs } => Event::Predicted { layer: *layer, probs },
            Estimate::Expected { layer, used, later } => {
                Event::Expected { layer: *layer, used, later }
            }
        }
    }
}

pub struct TimedPredictor {
    predictor: Box<dyn Predictor>,
    /// How long it takes to predict.
    search_ns: u64,
    /// The result of the running search, and the time of its end.
    answer: PredictorAnswer,
    due: Option<u64>,
    /// A step has happened that no search has seen.
    is_behind: bool,
    /// Told since the search began.
    estimates: Vec<Estimate>,
}

impl TimedPredictor {
    /// `search_ns`: how long a slow predictor takes.
    pub fn new(predictor: Box<dyn Predictor>, search_ns: u64) -> TimedPredictor {
        TimedPredictor {
            search_ns: if predictor.is_slow() { search_ns } else { 0 },
            predictor,
            answer: PredictorAnswer::default(),
            due: None,
            is_behind: false,
            estimates: Vec::new(),
        }
    }

    pub fn wants(&self) -> Wants {
        self.predictor.wants()
    }

    /// `step`: the tier's.
    pub fn observe(&mut self, event: &Event, now: u64, step: u64) {
        self.predictor.observe(event);
        self.predictor.emit(&mut |event| self.estimates.extend(Estimate::of(event)));
        self.is_behind |= is_asked(&*self.predictor, event);
        self.begin(now, step);
    }

    /// Begins a search if one is asked for and none is running.
    fn begin(&mut self, now: u64, step: u64) {
        if !self.is_behind || self.due.is_some() {
            return;
        }
        self.is_behind = false;
        self.due = Some(now + self.search_ns);
        let mut predictions = Vec::new();
        self.predictor.predict(&mut predictions);
        let estimates = std::mem::take(&mut self.estimates);
        self.answer = PredictorAnswer { predictions: Some(predictions), step, estimates };
    }

    /// When there will be an answer.
    pub fn due(&self) -> Option<u64> {
        self.due
    }

    /// The answer that is ready at `now`; the next search starts when it is taken.
    pub fn take(&mut self, now: u64, step: u64) -> Option<PredictorAnswer> {
        if self.due.is_some_and(|due| due <= now) {
            self.due = None;
            let answer = std::mem::take(&mut self.answer);
            self.begin(now, step);
            return Some(answer);
        }
        // Who takes no time to search takes none to tell of what was no step.
        if self.search_ns > 0 || self.estimates.is_empty() {
            return None;
        }
        let estimates = std::mem::take(&mut self.estimates);
        Some(PredictorAnswer { estimates, ..PredictorAnswer::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Expert, Routed};

    /// Predicts the number of steps it has seen.
    struct Counting {
        n_steps: u32,
        is_slow: bool,
    }

    impl Predictor for Counting {
        fn observe(&mut self, event: &Event<'_>) {
            self.n_steps += u32::from(event.is_step());
        }

        fn predict(&mut self, out: &mut Vec<Prediction>) {
            let expert = Expert { layer: self.n_steps, expert: 0 };
            *out = vec![Prediction { expert, priority: 1.0 }];
        }

        fn is_slow(&self) -> bool {
            self.is_slow
        }
    }

    fn step(predictor: &mut TimedPredictor, now: u64) {
        let (chosen, probs, hidden): (&[u32], &[f32], &[f32]) = (&[], &[], &[]);
        let routed = Routed { request: 0, layer: 0, chosen, probs, hidden, ahead: None };
        predictor.observe(&Event::Routed(routed), now, now / 2);
    }

    fn seen(answer: Option<PredictorAnswer>) -> Option<u32> {
        answer.map(|answer| answer.predictions.unwrap()[0].expert.layer)
    }

    #[test]
    fn a_fast_predictor_answers_at_once() {
        let counting = Counting { n_steps: 0, is_slow: false };
        let mut predictor = TimedPredictor::new(Box::new(counting), 1000);
        for n in 1..4 {
            step(&mut predictor, 10);
            assert_eq!(seen(predictor.take(10, 5)), Some(n));
            assert_eq!(seen(predictor.take(10, 5)), None);
        }
    }

    #[test]
    fn a_slow_one_answers_later_and_catches_up() {
        let counting = Counting { n_steps: 0, is_slow: true };
        let mut predictor = TimedPredictor::new(Box::new(counting), 100);
        step(&mut predictor, 0);
        step(&mut predictor, 40);
        step(&mut predictor, 80);
        assert_eq!((predictor.due(), seen(predictor.take(99, 60))), (Some(100), None));
        // What was asked at 0, and then one search for both that came since.
        let first = predictor.take(100, 60);
        assert_eq!((first.as_ref().map(|answer| answer.step), seen(first)), (Some(0), Some(1)));
        assert_eq!((predictor.due(), seen(predictor.take(200, 90))), (Some(200), Some(3)));
        assert_eq!(predictor.due(), None);
    }
}
