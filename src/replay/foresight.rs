//! The predictor on the simulated clock. A fast one answers at once, as in the layer loop. A slow
//! one has a thread of its own: a search takes its time, sees what had happened when it began, and
//! whatever comes meanwhile waits for the next search; what it says takes effect when it ends.

use crate::policy::{Event, Prediction, Predictor, Wants};

/// What came of a search.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub predictions: Vec<Prediction>,
    /// `Event::Foreseen` for the eviction: layer and probabilities.
    pub foreseen: Vec<(u32, Vec<f32>)>,
    /// The tier's step when the search began: what the predictions are as old as.
    pub step: u64,
}

pub struct Foresight {
    predictor: Box<dyn Predictor>,
    /// 0 for a predictor that is not slow.
    search_ns: u64,
    answer: Answer,
    /// When the search under way ends.
    due: Option<u64>,
    /// A step has happened that no search has seen.
    is_behind: bool,
}

impl Foresight {
    /// `search_ns`: how long a slow predictor takes.
    pub fn new(predictor: Box<dyn Predictor>, search_ns: u64) -> Foresight {
        let search_ns = if predictor.is_slow() { search_ns } else { 0 };
        let answer = Answer::default();
        Foresight { predictor, search_ns, answer, due: None, is_behind: false }
    }

    pub fn wants(&self) -> Wants {
        self.predictor.wants()
    }

    /// `step`: the tier's.
    pub fn observe(&mut self, event: &Event, now: u64, step: u64) {
        self.predictor.observe(event);
        if event.is_step() {
            self.is_behind = true;
            self.search(now, step);
        }
    }

    fn search(&mut self, now: u64, step: u64) {
        if !self.is_behind || self.due.is_some() {
            return;
        }
        self.is_behind = false;
        self.due = Some(now + self.search_ns);
        self.answer.step = step;
        self.predictor.predict(&mut self.answer.predictions);
        let foreseen = &mut self.answer.foreseen;
        foreseen.clear();
        self.predictor.tell(&mut |event| {
            if let Event::Foreseen { layer, probs } = event {
                foreseen.push((*layer, probs.to_vec()));
            }
        });
    }

    /// When there will be an answer.
    pub fn due(&self) -> Option<u64> {
        self.due
    }

    /// The answer that is due by `now`; the next search begins when it has been taken.
    pub fn take(&mut self, now: u64, step: u64) -> Option<Answer> {
        self.due.filter(|due| *due <= now)?;
        self.due = None;
        let answer = std::mem::take(&mut self.answer);
        self.search(now, step);
        Some(answer)
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
        answer.map(|answer| answer.predictions[0].expert.layer)
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
