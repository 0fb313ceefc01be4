//! How a policy is run, in the engine and in the simulator alike. A predictor is divided first:
//! what answers at once runs on the layer loop's own thread, what may take long beside it.

use super::{Event, Phase, Prediction, Predictor};

/// The part for the layer loop's thread, and those for a thread beside it.
pub fn divide(mut predictor: Box<dyn Predictor>) -> (Box<dyn Predictor>, Vec<Box<dyn Predictor>>) {
    if predictor.is_slow() {
        return (Box::new(Absent), vec![predictor]);
    }
    let slow = predictor.take_slow_parts();
    (predictor, slow)
}

/// Whether a predictor is to predict after this event.
pub fn is_asked(predictor: &dyn Predictor, event: &Event<'_>) -> bool {
    event.is_step() || event.is_prompt_step() && predictor.predicts_prompts()
}

/// Whether a splitter is asked for a plan after this event: when a request starts, and after each
/// token (MoEpic, Algorithm 1).
pub fn is_time_to_split(event: &Event<'_>) -> bool {
    matches!(event, Event::RequestStart { .. } | Event::IterationEnd { phase: Phase::Decode, .. })
}

/// In the place of a predictor that is slow as a whole: its one slow part predicts always.
struct Absent;

impl Predictor for Absent {
    fn observe(&mut self, _: &Event<'_>) {}

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clear();
    }

    fn deputy(&self) -> Option<usize> {
        Some(0)
    }
}
