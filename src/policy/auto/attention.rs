//! Which events all candidates observe, and which only those that are used.

use crate::policy::{Event, Phase};

/// Passes of decode that all candidates observe. After these it is one in `PERIOD`: what they learn
/// is worth less then, and costs time of the layer loop and of another core.
const N_GENERAL: u32 = 256;
const PERIOD: u32 = 32;

#[derive(Clone, Copy, Debug, Default)]
pub struct Attention {
    /// Passes of texts that have begun and not ended.
    n_under_way: u32,
    /// Passes of decode that have begun, texts that are decoded together as one.
    n_passes: u32,
    /// Whether those under way are for some candidates alone.
    is_partial: bool,
    /// `is_partial` of the last event.
    was_partial: bool,
}

impl Attention {
    /// After a run in which all candidates have learned.
    pub fn again() -> Attention {
        Attention { n_passes: N_GENERAL, ..Attention::default() }
    }

    /// Texts that are decoded together are observed alike, each pass as a whole.
    pub fn observe(&mut self, event: &Event<'_>) {
        if let Event::IterationStart { phase, .. } = event {
            if self.n_under_way == 0 && *phase == Phase::Decode {
                // From `N_GENERAL` on in turns of `PERIOD`.
                let is_over = self.n_passes == N_GENERAL + PERIOD;
                self.n_passes = if is_over { N_GENERAL } else { self.n_passes } + 1;
                let is_due = self.n_passes == N_GENERAL + PERIOD;
                self.is_partial = self.n_passes > N_GENERAL && !is_due;
            }
            self.n_under_way += 1;
        }
        // Texts begin and end for all.
        let is_text = matches!(event, Event::RequestStart { .. } | Event::RequestEnd { .. });
        self.was_partial = self.is_partial && !is_text;
        if let Event::IterationEnd { .. } = event {
            self.n_under_way = self.n_under_way.saturating_sub(1);
            self.is_partial &= self.n_under_way > 0;
        }
    }

    /// Whether all candidates observe the last event.
    pub fn is_general(&self) -> bool {
        !self.was_partial
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Timing;

    /// Whether each event of a pass of `n` texts is for all.
    fn pass(attention: &mut Attention, n: u32, phase: Phase) -> Vec<bool> {
        let start = |request| Event::IterationStart { request, phase, token: None, embedding: &[] };
        let end = |request| Event::IterationEnd { request, phase, timing: Timing::default() };
        let events = (0..n).map(start).chain((0..n).map(end));
        let observe = |event| {
            attention.observe(&event);
            attention.is_general()
        };
        events.map(observe).collect()
    }

    #[test]
    fn the_first_passes_are_for_all_and_then_one_in_a_period() {
        let mut attention = Attention::default();
        for _ in 0..N_GENERAL {
            assert!(pass(&mut attention, 1, Phase::Decode).into_iter().all(|is| is));
        }
        for mut attention in [attention, Attention::again()] {
            for n in [1, 3] {
                let passes: Vec<_> =
                    (0..2 * PERIOD).map(|_| pass(&mut attention, n, Phase::Decode)).collect();
                assert!(passes.iter().all(|events| events.iter().all(|is| *is == events[0])));
                assert_eq!(passes.iter().filter(|events| events[0]).count(), 2);
                assert!(pass(&mut attention, n, Phase::Prompt).into_iter().all(|is| is));
            }
        }
    }

    #[test]
    fn texts_begin_and_end_for_all() {
        let mut attention = Attention::again();
        for _ in 0..3 {
            let start = Event::IterationStart {
                request: 0,
                phase: Phase::Decode,
                token: None,
                embedding: &[],
            };
            attention.observe(&start);
            assert!(!attention.is_general());
            attention.observe(&Event::RequestEnd { request: 1 });
            assert!(attention.is_general());
        }
    }
}
