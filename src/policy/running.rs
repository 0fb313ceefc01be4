//! When a policy's parts are asked, in the engine and in the simulator alike.

use super::{Event, Phase, Predictor};

/// Whether a predictor is to predict after this event.
pub fn is_asked(predictor: &dyn Predictor, event: &Event<'_>) -> bool {
    event.is_step() || event.is_prompt_step() && predictor.predicts_prompts()
}

/// Whether a splitter is asked for a plan after this event: when a request starts, and after each
/// token (MoEpic, Algorithm 1).
pub fn is_time_to_split(event: &Event<'_>) -> bool {
    matches!(event, Event::RequestStart { .. } | Event::IterationEnd { phase: Phase::Decode, .. })
}
