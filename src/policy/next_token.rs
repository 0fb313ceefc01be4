//! Look-ahead by the model's layer that predicts the token after the next. Before a token goes
//! through the layers, that layer makes a state of its embedding and of the model's output for the
//! token before; the routers of all layers, applied to that state (`Event::NextToken`), say what
//! the token may choose before its first layer is computed.
//!
//! Whether a router is right about a state of another layer depends on the model, so it is
//! measured: for each layer the part of the experts foretold that the token then chose, beside the
//! same of the experts that the predictor behind this one expected by then. A layer's look-ahead is
//! used if half of it is right, and more than is expected anyway: it is prefetched, and evictions
//! hear of it. If no layer's is, the state is not computed for a while, and each time for longer.

use super::ranks::best;
use super::{
    Event, Expert, LookAhead, Phase, Prediction, Predictor, Profile, Routed, Shape, Wants,
};

/// Tokens between two decisions.
const TRIAL: u32 = 32;

/// The part of the experts foretold that must be right.
const MIN_HIT_RATE: f32 = 0.5;

/// Weight of a token in a mean, at least.
const WEIGHT: f32 = 1.0 / 32.0;

/// Tokens without a look-ahead after a trial in vain, at first and at most; each pause is
/// [`LONGER`] times as long as the one before.
const FIRST_PAUSE: u32 = 512;
const MAX_PAUSE: u32 = 1 << 15;
const LONGER: u32 = 4;

/// Layers that are prefetched ahead of the one that comes next: a link brings no more in time.
const DEPTH: usize = 8;

/// A running mean.
#[derive(Clone, Copy, Debug, Default)]
struct HitRate {
    mean: f32,
    n: u32,
}

impl HitRate {
    /// The part of `predicted` that is among `chosen`.
    fn add(&mut self, predicted: &[u32], chosen: &[u32]) {
        let n_right = predicted.iter().filter(|expert| chosen.contains(expert)).count();
        let rate = n_right as f32 / chosen.len().max(1) as f32;
        self.n += 1;
        self.mean += (1.0 / self.n as f32).max(WEIGHT) * (rate - self.mean);
    }
}

#[derive(Clone, Debug, Default)]
struct Layer {
    /// The router's probabilities for the text's next token, and the best experts by them, best
    /// first; both are empty if nothing is foretold.
    probs: Vec<f32>,
    best: Vec<u32>,
    /// By experts: what the predictor behind expects of the layer's next coming.
    expected: Vec<f32>,
    hits: HitRate,
    expected_hits: HitRate,
    is_used: bool,
}

impl Layer {
    fn forget(&mut self) {
        self.probs.clear();
        self.best.clear();
    }

    /// Whether its look-ahead is worth using.
    fn is_good(&self) -> bool {
        let HitRate { mean, n } = self.hits;
        n > 0 && mean >= MIN_HIT_RATE && mean > self.expected_hits.mean
    }
}

pub struct NextToken {
    /// The predictor that this one completes.
    behind: Option<Box<dyn Predictor>>,
    k: usize,
    layers: Vec<Layer>,
    /// Layers with experts, in order.
    moe: Vec<u32>,
    /// The text whose next token was foretold.
    request: Option<u32>,
    /// The place among the MoE layers of the one that the token comes to next.
    next: usize,
    /// The layer of the last event, if its look-ahead is used.
    told: Option<u32>,
    /// Whether anything was ever foretold: most models have no such layer.
    is_fed: bool,
    /// Tokens foretold since the last decision.
    n_foretold: u32,
    /// Tokens to come without a look-ahead, and the length of the next pause.
    pause: u32,
    next_pause: u32,
    order: Vec<u32>,
}

impl NextToken {
    /// `behind` predicts as it would alone, on the layer loop's own thread.
    pub fn new(shape: &Shape, behind: Option<Box<dyn Predictor>>) -> NextToken {
        debug_assert!(behind.as_ref().is_none_or(|predictor| !predictor.is_slow()));
        NextToken {
            behind,
            k: shape.k,
            layers: vec![Layer::default(); shape.n_layers()],
            moe: shape.moe_layers().map(|layer| layer as u32).collect(),
            request: None,
            next: 0,
            told: None,
            is_fed: false,
            n_foretold: 0,
            pause: 0,
            next_pause: FIRST_PAUSE,
            order: Vec::new(),
        }
    }

    fn foretold(&mut self, request: u32, ahead: LookAhead<'_>) {
        self.is_fed = true;
        if self.request != Some(request) {
            self.forget();
            self.request = Some(request);
        }
        let layer = &mut self.layers[ahead.layer as usize];
        layer.probs.clear();
        layer.probs.extend(ahead.probs);
        layer.best.clear();
        layer.best.extend_from_slice(best(&mut self.order, &layer.probs, self.k));
        self.told = layer.is_used.then_some(ahead.layer);
    }

    fn routed(&mut self, routed: &Routed<'_>) {
        let Routed { request, layer: l, chosen, .. } = *routed;
        self.next = self.moe.partition_point(|moe| *moe <= l);
        let layer = &mut self.layers[l as usize];
        if self.request == Some(request) && !layer.best.is_empty() {
            layer.hits.add(&layer.best, chosen);
            if !layer.expected.is_empty() {
                let expected = best(&mut self.order, &layer.expected, self.k);
                layer.expected_hits.add(expected, chosen);
            }
        }
        layer.forget();
    }

    /// Nothing is known of the next token.
    fn forget(&mut self) {
        self.request = None;
        self.layers.iter_mut().for_each(Layer::forget);
    }

    /// A token has come through all layers.
    fn end_token(&mut self, request: u32) {
        if self.pause > 0 {
            self.pause -= 1;
        } else if self.request == Some(request) {
            self.n_foretold += 1;
            if self.n_foretold == TRIAL {
                self.decide();
            }
        }
        self.forget();
    }

    fn decide(&mut self) {
        self.n_foretold = 0;
        self.layers.iter_mut().for_each(|layer| layer.is_used = layer.is_good());
        if self.layers.iter().any(|layer| layer.is_used) {
            self.next_pause = FIRST_PAUSE;
            return;
        }
        self.pause = self.next_pause;
        self.next_pause = (self.next_pause * LONGER).min(MAX_PAUSE);
        for layer in &mut self.layers {
            (layer.hits, layer.expected_hits) = Default::default();
            layer.expected.clear();
        }
    }

    /// Keeps what the predictor behind expects of the layers' next coming.
    fn hear_behind(&mut self) {
        let NextToken { behind: Some(behind), layers, is_fed: true, pause: 0, .. } = self else {
            return;
        };
        behind.emit(&mut |event| {
            if let Event::Expected { layer, used, .. } = *event {
                let expected = &mut layers[layer as usize].expected;
                expected.clear();
                expected.extend(used);
            }
        });
    }

    /// The experts that are used of what was foretold of the layers to come, nearest first.
    fn standing(&self) -> impl Iterator<Item = Prediction> + '_ {
        let layers = self.moe[self.next..].iter().take(DEPTH).enumerate();
        layers.filter(|(_, l)| self.layers[**l as usize].is_used).flat_map(|(distance, &l)| {
            let Layer { probs, best, .. } = &self.layers[l as usize];
            best.iter().map(move |&expert| Prediction {
                expert: Expert { layer: l, expert },
                priority: probs[expert as usize].max(0.0) / (1 + distance) as f32,
            })
        })
    }
}

impl Predictor for NextToken {
    fn observe(&mut self, event: &Event<'_>) {
        self.told = None;
        // What was expected of a layer is compared before the predictor behind hears of the layer.
        match *event {
            Event::NextToken { request, ahead } => self.foretold(request, ahead),
            Event::Routed(ref routed) => self.routed(routed),
            Event::IterationStart { request, phase, .. } => {
                self.next = 0;
                if phase == Phase::Prompt || self.request != Some(request) {
                    self.forget();
                }
            }
            Event::IterationEnd { request, phase: Phase::Decode, .. } => self.end_token(request),
            _ => {}
        }
        if let Some(behind) = &mut self.behind {
            behind.observe(event);
            self.hear_behind();
        }
    }

    /// A token's own look-ahead to its first layer comes before one from the token before. For
    /// later layers the predictor behind, which has seen the layer before, is nearer.
    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clear();
        if let Some(behind) = &mut self.behind {
            behind.predict(out);
        }
        let n_behind = out.len();
        let is_new = |out: &[Prediction], prediction: &Prediction| {
            out.iter().all(|known| known.expert != prediction.expert)
        };
        for prediction in self.standing() {
            if is_new(&out[..n_behind], &prediction) {
                out.push(prediction);
            }
        }
        if self.next == 0 {
            out.rotate_left(n_behind);
        }
    }

    fn wants(&self) -> Wants {
        let behind = self.behind.as_ref().map_or(Wants::default(), |behind| behind.wants());
        Wants { next_token: self.pause == 0, ..behind }
    }

    fn predicts_prompts(&self) -> bool {
        self.behind.as_ref().is_some_and(|behind| behind.predicts_prompts())
    }

    fn emit(&self, listener: &mut dyn FnMut(&Event<'_>)) {
        self.behind.iter().for_each(|behind| behind.emit(listener));
        if let Some(layer) = self.told {
            listener(&Event::Predicted { layer, probs: &self.layers[layer as usize].probs });
        }
    }

    fn save(&self, profile: &mut Profile) {
        self.behind.iter().for_each(|behind| behind.save(profile));
    }

    fn verdict(&self) -> Option<String> {
        let n_used = self.layers.iter().filter(|layer| layer.is_used).count();
        let has_paused = self.next_pause > FIRST_PAUSE;
        let of = self.moe.len();
        match n_used {
            0 if has_paused => Some(
                "the layer that predicts the token after the next is no look-ahead for prefetch: \
                 too few of the experts that it foretells are used"
                    .to_string(),
            ),
            0 => None,
            n => Some(format!(
                "the layer that predicts the token after the next is a look-ahead for prefetch \
                 in {n} of {of} layers"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Timing;

    const N_EXPERTS: usize = 8;

    /// Layers 0, 1 and 3 have experts, of which a token uses two.
    fn predictor(behind: Option<Box<dyn Predictor>>) -> NextToken {
        let layers = [N_EXPERTS, N_EXPERTS, 0, N_EXPERTS].to_vec();
        NextToken::new(&Shape::of_model(layers, 2), behind)
    }

    fn probs(chosen: [u32; 2]) -> Vec<f32> {
        let p = |e: u32| if chosen.contains(&e) { 0.4 } else { 0.2 / 6.0 };
        (0..N_EXPERTS as u32).map(p).collect()
    }

    fn foretell(policy: &mut NextToken, request: u32, layer: u32, chosen: [u32; 2]) {
        let ahead = LookAhead { layer, probs: &probs(chosen) };
        policy.observe(&Event::NextToken { request, ahead });
    }

    fn route(policy: &mut NextToken, layer: u32, chosen: [u32; 2]) {
        let (request, probs, hidden) = (0, &[][..], &[][..]);
        let chosen = &chosen[..];
        policy.observe(&Event::Routed(Routed {
            request,
            layer,
            chosen,
            probs,
            hidden,
            ahead: None,
        }));
    }

    fn start(policy: &mut NextToken) {
        let (phase, embedding) = (Phase::Decode, &[][..]);
        policy.observe(&Event::IterationStart { request: 0, phase, token: None, embedding });
    }

    fn end(policy: &mut NextToken) {
        let (phase, timing) = (Phase::Decode, Timing::default());
        policy.observe(&Event::IterationEnd { request: 0, phase, timing });
    }

    fn predicted(policy: &mut NextToken) -> Vec<(u32, u32)> {
        let mut out = Vec::new();
        policy.predict(&mut out);
        out.iter().map(|p| (p.expert.layer, p.expert.expert)).collect()
    }

    /// The experts that a token uses in a layer; of layer 1 the look-ahead is wrong.
    fn chosen(token: u32, layer: u32) -> [u32; 2] {
        let first = (token * 3 + layer) % 7;
        [first, first + 1]
    }

    fn token(policy: &mut NextToken, token: u32) {
        for layer in [0, 1, 3] {
            let right = chosen(token, layer);
            let wrong = right.map(|e| (e + 3) % 8);
            foretell(policy, 0, layer, if layer == 1 { wrong } else { right });
        }
        start(policy);
        [0, 1, 3].iter().for_each(|layer| route(policy, *layer, chosen(token, *layer)));
        end(policy);
    }

    #[test]
    fn layers_whose_look_ahead_is_right_are_prefetched() {
        let mut policy = predictor(None);
        for t in 0..TRIAL {
            assert!(policy.wants().next_token);
            token(&mut policy, t);
        }
        assert!(policy.verdict().unwrap().ends_with("in 2 of 3 layers"));
        let mut told = Vec::new();
        for (layer, chosen) in [(0, [4, 5]), (1, [0, 1]), (3, [6, 2])] {
            foretell(&mut policy, 0, layer, chosen);
            policy.emit(&mut |event| told.push(format!("{event:?}")));
        }
        assert_eq!(told.len(), 2);
        start(&mut policy);
        assert_eq!(predicted(&mut policy), [(0, 4), (0, 5), (3, 2), (3, 6)]);
        route(&mut policy, 0, [4, 5]);
        assert_eq!(predicted(&mut policy), [(3, 2), (3, 6)]);
        route(&mut policy, 1, [4, 5]);
        route(&mut policy, 3, [2, 6]);
        assert!(predicted(&mut policy).is_empty());
        end(&mut policy);
        // Of another text's token nothing is known.
        foretell(&mut policy, 1, 0, [4, 5]);
        start(&mut policy);
        assert!(predicted(&mut policy).is_empty());
    }

    #[test]
    fn trials_in_vain_are_made_ever_less_often() {
        let mut policy = predictor(None);
        let (mut tries, mut n_tokens) = (Vec::new(), 0);
        for _ in 0..20_000 {
            if policy.wants().next_token {
                tries.push(n_tokens);
                [0, 1, 3].iter().for_each(|l| foretell(&mut policy, 0, *l, [0, 1]));
            }
            start(&mut policy);
            [0, 1, 3].iter().for_each(|l| route(&mut policy, *l, [6, 7]));
            assert!(predicted(&mut policy).is_empty());
            end(&mut policy);
            n_tokens += 1;
        }
        let mut first = Vec::new();
        let mut at = 0;
        for pause in [512, 2048, 8192, 32768] {
            first.extend(at..at + TRIAL);
            at += TRIAL + pause;
        }
        first.retain(|t| *t < 20_000);
        assert_eq!(tries, first);
        assert!(policy.verdict().unwrap().contains("no look-ahead"));
    }

    /// Expects the same experts of every layer, rightly.
    struct Expecting;

    impl Predictor for Expecting {
        fn observe(&mut self, _: &Event<'_>) {}

        fn predict(&mut self, out: &mut Vec<Prediction>) {
            let expert = Expert { layer: 0, expert: 1 };
            *out = vec![Prediction { expert, priority: 0.9 }];
        }

        fn emit(&self, listener: &mut dyn FnMut(&Event<'_>)) {
            for layer in [0, 1, 3] {
                let (used, later) = (&probs([0, 1])[..], &[0.0; 2][..]);
                listener(&Event::Expected { layer, used, later });
            }
        }
    }

    #[test]
    fn what_is_expected_anyway_is_not_foretold() {
        // Each is right; what is expected of layers 0 and 1 is, too.
        let mut policy = predictor(Some(Box::new(Expecting)));
        for _ in 0..TRIAL {
            for (layer, chosen) in [(0, [0, 1]), (1, [0, 1]), (3, [2, 3])] {
                foretell(&mut policy, 0, layer, chosen);
            }
            start(&mut policy);
            for (layer, chosen) in [(0, [0, 1]), (1, [0, 1]), (3, [2, 3])] {
                route(&mut policy, layer, chosen);
            }
            end(&mut policy);
        }
        assert!(policy.verdict().unwrap().ends_with("in 1 of 3 layers"));
        foretell(&mut policy, 0, 3, [2, 3]);
        start(&mut policy);
        assert_eq!(predicted(&mut policy), [(3, 2), (3, 3), (0, 1)]);
        route(&mut policy, 0, [0, 1]);
        assert_eq!(predicted(&mut policy), [(0, 1), (3, 2), (3, 3)]);
    }
}
