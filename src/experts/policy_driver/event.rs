//! An owned event: the layer loop hands it to a policy that runs in another thread.

use crate::policy::{Event, LookAhead, Phase, PromptRouted, Routed, Timing};

/// Owns an event. Taking another in allocates nothing once buffers have grown.
#[derive(Debug, Default)]
pub struct OwnedEvent {
    kind: Kind,
    request: u32,
    layer: u32,
    /// `chosen`, or `counts` and `chosen` one after the other.
    ids: Vec<u32>,
    /// `embedding`, or `probs`, `hidden` and `ahead.probs` one after the other, or `used` and
    /// `later`.
    values: Vec<f32>,
    n_probs: usize,
    n_hidden: usize,
    /// The tier's step when it happened.
    pub step: u64,
}

#[derive(Clone, Copy, Debug, Default)]
enum Kind {
    #[default]
    RequestStart,
    IterationStart(Phase, Option<u32>),
    Routed {
        ahead: Option<u32>,
    },
    PromptRouted {
        n_tokens: u32,
        n_counts: usize,
    },
    NextToken,
    Predicted,
    Expected,
    IterationEnd(Phase, Timing),
    RequestEnd,
}

impl OwnedEvent {
    pub fn take_in(&mut self, event: &Event<'_>, step: u64) {
        self.step = step;
        self.ids.clear();
        self.values.clear();
        (self.n_probs, self.n_hidden) = (0, 0);
        self.kind = match *event {
            Event::RequestStart { request } => self.of(request, Kind::RequestStart),
            Event::IterationStart { request, phase, token, embedding } => {
                self.values.extend(embedding);
                self.of(request, Kind::IterationStart(phase, token))
            }
            Event::Routed(routed) => {
                self.layer = routed.layer;
                self.ids.extend(routed.chosen);
                self.values.extend(routed.probs);
                self.values.extend(routed.hidden);
                self.values.extend(routed.ahead.map_or(&[][..], |ahead| ahead.probs));
                (self.n_probs, self.n_hidden) = (routed.probs.len(), routed.hidden.len());
                let ahead = routed.ahead.map(|ahead| ahead.layer);
                self.of(routed.request, Kind::Routed { ahead })
            }
            Event::PromptRouted(routed) => {
                self.layer = routed.layer;
                self.ids.extend(routed.counts);
                self.ids.extend(routed.chosen);
                self.values.extend(routed.probs);
                let (n_tokens, n_counts) = (routed.n_tokens, routed.counts.len());
                self.of(routed.request, Kind::PromptRouted { n_tokens, n_counts })
            }
            Event::NextToken { request, ahead } => {
                self.layer = ahead.layer;
                self.values.extend(ahead.probs);
                self.of(request, Kind::NextToken)
            }
            Event::Predicted { layer, probs } => {
                self.layer = layer;
                self.values.extend(probs);
                Kind::Predicted
            }
            Event::Expected { layer, used, later } => {
                self.layer = layer;
                self.values.extend(used);
                self.values.extend(later);
                self.n_probs = used.len();
                Kind::Expected
            }
            Event::IterationEnd { request, phase, timing } => {
                self.of(request, Kind::IterationEnd(phase, timing))
            }
            Event::RequestEnd { request } => self.of(request, Kind::RequestEnd),
        };
    }

    fn of(&mut self, request: u32, kind: Kind) -> Kind {
        self.request = request;
        kind
    }

    pub fn event(&self) -> Event<'_> {
        let OwnedEvent { request, layer, ref ids, ref values, .. } = *self;
        match self.kind {
            Kind::RequestStart => Event::RequestStart { request },
            Kind::IterationStart(phase, token) => {
                Event::IterationStart { request, phase, token, embedding: values }
            }
            Kind::Routed { ahead } => {
                let (probs, rest) = values.split_at(self.n_probs);
                let (hidden, ahead_probs) = rest.split_at(self.n_hidden);
                let ahead = ahead.map(|layer| LookAhead { layer, probs: ahead_probs });
                Event::Routed(Routed { request, layer, chosen: ids, probs, hidden, ahead })
            }
            Kind::PromptRouted { n_tokens, n_counts } => {
                let ((counts, chosen), probs) = (ids.split_at(n_counts), &values[..]);
                let routed = PromptRouted { request, layer, n_tokens, counts, probs, chosen };
                Event::PromptRouted(routed)
            }
            Kind::NextToken => {
                Event::NextToken { request, ahead: LookAhead { layer, probs: values } }
            }
            Kind::Predicted => Event::Predicted { layer, probs: values },
            Kind::Expected => {
                let (used, later) = values.split_at(self.n_probs);
                Event::Expected { layer, used, later }
            }
            Kind::IterationEnd(phase, timing) => Event::IterationEnd { request, phase, timing },
            Kind::RequestEnd => Event::RequestEnd { request },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_comes_back_as_it_was() {
        let ahead = Some(LookAhead { layer: 4, probs: &[0.1, 0.9] });
        let (chosen, probs, hidden) = (&[2, 1][..], &[0.2, 0.3, 0.5][..], &[7.0][..]);
        let routed = Routed { request: 1, layer: 3, chosen, probs, hidden, ahead };
        let timing = Timing { wall_ns: 1, stall_ns: 2, experts_ns: 3, head_ns: 4 };
        let (counts, phase) = (&[3, 0][..], Phase::Prompt);
        let chosen = &[0, 0, 0][..];
        let prompt = PromptRouted { request: 2, layer: 1, n_tokens: 3, counts, probs, chosen };
        let events = [
            Event::RequestStart { request: 5 },
            Event::IterationStart {
                request: 5,
                phase: Phase::Decode,
                token: Some(3),
                embedding: &[1.0, 2.0],
            },
            Event::Routed(routed),
            Event::Routed(Routed { ahead: None, hidden: &[], ..routed }),
            Event::PromptRouted(prompt),
            Event::NextToken { request: 4, ahead: LookAhead { layer: 2, probs } },
            Event::Predicted { layer: 2, probs },
            Event::Expected { layer: 2, used: probs, later: &probs[1..] },
            Event::IterationEnd { request: 5, phase, timing },
            Event::RequestEnd { request: 5 },
        ];
        // One buffer for all: what an earlier event left in it must not show.
        let mut owned = OwnedEvent::default();
        for (step, event) in events.iter().enumerate() {
            owned.take_in(event, step as u64);
            assert_eq!(format!("{:?}", owned.event()), format!("{event:?}"));
            assert_eq!(owned.step, step as u64);
        }
    }
}
