//! The predictor on the simulated clock. A fast one answers at once, as in the layer loop. A slow
//! one has a thread of its own: a search takes its time, sees what had happened when it began, and
//! whatever comes meanwhile waits for the next search; what it says takes effect when it ends.

use crate::policy::{Event, Prediction, Predictor, Wants};

/// What the predictor says.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// `None`: what it said before stands.
    pub predictions: Option<Vec<Prediction>>,
    /// The tier's step when they were made.
    pub step: u64,
    /// `Event::Foreseen` for the eviction: layer and probabilities.
    pub foreseen: Vec<(u32, Vec<f32>)>,
}

pub struct Foresight {
    predictor: Box<dyn Predictor>,
    /// 0 for a predictor that is not slow.
    search_ns: u64,
    /// What the search under way will have found, and when.
    answer: Answer,
    due: Option<u64>,
    /// A step has happened that no search has seen.
    is_behind: bool,
    /// Told since the search began.
    foreseen: Vec<(u32, Vec<f32>)>,
}

impl Foresight {
    /// `search_ns`: how long a slow predictor takes.
    pub fn new(predictor: Box<dyn Predictor>, search_ns: u64) -> Foresight {
        Foresight {
            search_ns: if predictor.is_slow() { search_ns } else { 0 },
            predictor,
            answer: Answer::default(),
            due: None,
            is_behind: false,
            foreseen: Vec::new(),
        }
    }

    pub fn wants(&self) -> Wants {
        self.predictor.wants()
    }

    /// `step`: the tier's.
    pub fn observe(&mut self, event: &Event, now: u64, step: u64) {
        self.predictor.observe(event);
        self.is_behind |= event.is_step();
        let begins = self.begin(now, step);
        // After it has predicted, as in the layer loop.
        let foreseen = if begins { &mut self.answer.foreseen } else { &mut self.foreseen };
        self.predictor.tell(&mut |event| {
            if let Event::Foreseen { layer, probs } = event {
                foreseen.push((*layer, probs.to_vec()));
            }
        });
    }

    /// Whether a search has begun.
    fn begin(&mut self, now: u64, step: u64) -> bool {
        if !self.is_behind || self.due.is_some() {
            return false;
        }
        self.is_behind = false;
        self.due = Some(now + self.search_ns);
        let mut predictions = Vec::new();
        self.predictor.predict(&mut predictions);
        let foreseen = std::mem::take(&mut self.foreseen);
        self.answer = Answer { predictions: Some(predictions), step, foreseen };
        true
    }

    /// When there will be an answer.
    pub fn due(&self) -> Option<u64> {
        self.due
    }

    /// What has been said by `now`; the next search begins when an answer has been taken.
    pub fn take(&mut self, now: u64, step: u64) -> Option<Answer> {
        if self.due.is_some_and(|due| due <= now) {
            self.due = None;
            let answer = std::mem::take(&mut self.answer);
            self.begin(now, step);
            return Some(answer);
        }
        // Who takes no time to search takes none to tell of what was no step.
        let told = self.search_ns == 0 && !self.foreseen.is_empty();
        told.then(|| Answer { foreseen: std::mem::take(&mut self.foreseen), ..Answer::default() })
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

    fn step(foresight: &mut Foresight, now: u64) {
        let (chosen, probs, hidden): (&[u32], &[f32], &[f32]) = (&[], &[], &[]);
        let routed = Routed { request: 0, layer: 0, chosen, probs, hidden, ahead: None };
        foresight.observe(&Event::Routed(routed), now, now / 2);
    }

    fn seen(answer: Option<Answer>) -> Option<u32> {
        answer.map(|answer| answer.predictions.unwrap()[0].expert.layer)
    }

    #[test]
    fn a_fast_predictor_answers_at_once() {
        let counting = Counting { n_steps: 0, is_slow: false };
        let mut foresight = Foresight::new(Box::new(counting), 1000);
        for n in 1..4 {
            step(&mut foresight, 10);
            assert_eq!(seen(foresight.take(10, 5)), Some(n));
            assert_eq!(seen(foresight.take(10, 5)), None);
        }
    }

    #[test]
    fn a_slow_one_answers_later_and_catches_up() {
        let counting = Counting { n_steps: 0, is_slow: true };
        let mut foresight = Foresight::new(Box::new(counting), 100);
        step(&mut foresight, 0);
        step(&mut foresight, 40);
        step(&mut foresight, 80);
        assert_eq!((foresight.due(), seen(foresight.take(99, 60))), (Some(100), None));
        // What was asked at 0, and then one search for both that came since.
        let first = foresight.take(100, 60);
        assert_eq!((first.as_ref().map(|answer| answer.step), seen(first)), (Some(0), Some(1)));
        assert_eq!((foresight.due(), seen(foresight.take(200, 90))), (Some(200), Some(3)));
        assert_eq!(foresight.due(), None);
    }
}
