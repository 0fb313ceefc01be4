//! Traces with a property of their routing taken away or put in.

use moeba::policy::mix;
use moeba::trace::format::{Trace, Writer};
use moeba::{Error, Result};
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alteration {
    /// The generated tokens of all requests change places, so that nothing that a token uses says
    /// more of the next one than of any other.
    Shuffle,
    /// The experts of each token and layer change places, so that none is used more than others.
    Even,
    /// Every other choice of a layer goes to the experts that the layer uses most.
    Skew,
    /// Routers foretell exactly what later layers choose.
    Exact,
    /// Routers foretell the reverse of what they do.
    Wrong,
    /// Prompts are their last two tokens.
    ShortPrompts,
}

impl Alteration {
    pub fn run(self) -> &'static str {
        match self {
            Alteration::Shuffle => "with the generated tokens in random order",
            Alteration::Even => "with experts that change places at random for each token",
            Alteration::Skew => "with every other choice made the layer's most used experts",
            Alteration::Exact => "with exact predictions of the next layers",
            Alteration::Wrong => "with predictions that take the least likely experts",
            Alteration::ShortPrompts => "with prompts of two tokens",
        }
    }
}

/// The trace with such alterations, without hidden states.
pub fn alter(trace: &Trace, alterations: &[Alteration]) -> Result<Option<Trace>> {
    let path = Path::new("an altered trace");
    let failed = |e| Error::io(path, e);
    let mut header = trace.header().clone();
    header.hidden = false;
    let rewrite = Rewrite::new(trace, alterations);
    let mut writer = Writer::new(Vec::new(), header).map_err(failed)?;
    for request in trace.requests() {
        writer.begin_request(&request.kind).map_err(failed)?;
        let mut tokens = request.tokens.clone();
        if rewrite.has(Alteration::ShortPrompts) {
            tokens.start += request.n_prompt.saturating_sub(2);
        }
        for token in tokens {
            rewrite.token(token, &mut writer).map_err(failed)?;
        }
    }
    let bytes = writer.finish().map_err(failed)?;
    Trace::decode(&bytes, path).map(Some)
}

struct Rewrite<'a> {
    trace: &'a Trace,
    alterations: &'a [Alteration],
    /// The token that stands in each one's place.
    from: Vec<usize>,
    /// [layers], the most used first.
    hottest: Vec<Vec<u32>>,
}

impl<'a> Rewrite<'a> {
    fn new(trace: &'a Trace, alterations: &'a [Alteration]) -> Rewrite<'a> {
        let mut from: Vec<usize> = (0..trace.n_tokens()).collect();
        if alterations.contains(&Alteration::Shuffle) {
            let is_generated = |token: &usize| trace.phase(*token) == moeba::policy::Phase::Decode;
            let places: Vec<usize> = from.iter().copied().filter(is_generated).collect();
            let mut drawn = places.clone();
            drawn.sort_by_key(|token| mix(*token as u64));
            places.iter().zip(drawn).for_each(|(place, token)| from[*place] = token);
        }
        let hottest = (0..trace.header().layers.len()).map(|layer| hottest(trace, layer));
        Rewrite { trace, alterations, from, hottest: hottest.collect() }
    }

    fn has(&self, alteration: Alteration) -> bool {
        self.alterations.contains(&alteration)
    }

    /// The place of each expert of a layer for the token in this place.
    fn places(&self, place: usize, layer: usize) -> Vec<u32> {
        let n = self.trace.header().layers[layer].n_experts as u32;
        let mut to: Vec<u32> = (0..n).collect();
        let draw = |part: u64| mix(mix(place as u64) ^ mix(layer as u64 + 1) ^ part);
        if self.has(Alteration::Even) {
            to.sort_by_key(|expert| draw(u64::from(*expert) << 8));
        }
        if self.has(Alteration::Skew) && draw(0) % 2 == 0 {
            let chosen = self.trace.chosen(self.from[place], layer);
            for (&chosen, &hot) in chosen.iter().zip(&self.hottest[layer]) {
                let holder = to.iter().position(|expert| *expert == hot).expect("one of these");
                to.swap(chosen as usize, holder);
            }
        }
        to
    }

    fn token(&self, place: usize, writer: &mut Writer<Vec<u8>>) -> std::io::Result<()> {
        let (trace, token) = (self.trace, self.from[place]);
        let ids = [trace.token_id(token)];
        writer.begin_pass(trace.phase(token), &ids, trace.embedding(token))?;
        let mut probs = Vec::new();
        for layer in trace.header().moe_layers() {
            let to = self.places(place, layer);
            let chosen: Vec<u32> =
                trace.chosen(token, layer).iter().map(|expert| to[*expert as usize]).collect();
            trace.probs(token, layer, &mut probs);
            writer.routed(layer, &chosen, &moved(&probs, &to));
            for distance in 1..=trace.header().ahead {
                let Some(target) = trace.ahead(token, layer, distance, &mut probs) else {
                    continue;
                };
                // Around the end it is the next token's layer.
                let at = if target > layer { place } else { place + 1 };
                let at = at.min(trace.n_tokens() - 1);
                if self.has(Alteration::Exact) {
                    certain(trace.chosen(self.from[at], target), &mut probs);
                }
                if self.has(Alteration::Wrong) {
                    let most = probs.iter().copied().fold(0.0, f32::max);
                    probs.iter_mut().for_each(|prob| *prob = most - *prob);
                }
                writer.ahead(layer, distance, &moved(&probs, &self.places(at, target)));
            }
        }
        Ok(())
    }
}

/// A value for each expert in the place where it goes.
fn moved(probs: &[f32], to: &[u32]) -> Vec<f32> {
    let mut out = vec![0.0; probs.len()];
    probs.iter().zip(to).for_each(|(prob, place)| out[*place as usize] = *prob);
    out
}

/// All probability on some experts, the first a little before the others.
fn certain(chosen: &[u32], probs: &mut [f32]) {
    probs.fill(0.0);
    let n = chosen.len() as f32;
    for (rank, expert) in chosen.iter().enumerate() {
        probs[*expert as usize] = (1.0 - 0.01 * rank as f32) / n;
    }
}

fn hottest(trace: &Trace, layer: usize) -> Vec<u32> {
    let mut counts = vec![0_u32; trace.header().layers[layer].n_experts];
    for token in 0..trace.n_tokens() {
        trace.chosen(token, layer).iter().for_each(|expert| counts[*expert as usize] += 1);
    }
    let mut order: Vec<u32> = (0..counts.len() as u32).collect();
    order.sort_by_key(|expert| (u32::MAX - counts[*expert as usize], *expert));
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use moeba::policy::Phase;
    use moeba::trace::{N_UBATCH, Routing, Traced};

    fn demo() -> Trace {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/bench/traces/demo.mtrace");
        Trace::open(path.as_ref()).unwrap()
    }

    fn altered(trace: &Trace, alteration: Alteration) -> Trace {
        alter(trace, &[alteration]).unwrap().unwrap()
    }

    /// Uses of each expert of a layer by generated tokens, sorted.
    fn uses(trace: &Trace, layer: usize) -> Vec<u32> {
        let mut counts = vec![0; trace.header().layers[layer].n_experts];
        for token in (0..trace.n_tokens()).filter(|t| trace.phase(*t) == Phase::Decode) {
            trace.chosen(token, layer).iter().for_each(|expert| counts[*expert as usize] += 1);
        }
        counts.sort_unstable();
        counts
    }

    /// The part of an expert's uses by generated tokens that the token before has, too.
    fn repeated(trace: &Trace) -> f64 {
        let (mut n, mut same) = (0, 0);
        let generated = |token: &usize| trace.phase(*token) == Phase::Decode;
        for token in (1..trace.n_tokens()).filter(generated).filter(|t| generated(&(t - 1))) {
            for layer in trace.header().moe_layers() {
                let before = trace.chosen(token - 1, layer);
                n += before.len();
                same += trace.chosen(token, layer).iter().filter(|e| before.contains(e)).count();
            }
        }
        same as f64 / n as f64
    }

    #[test]
    fn alterations_change_what_they_say_and_nothing_else() {
        let trace = demo();
        let shuffled = altered(&trace, Alteration::Shuffle);
        assert_eq!(uses(&shuffled, 3), uses(&trace, 3));
        assert!(repeated(&shuffled) < 0.7 * repeated(&trace));
        // 1 where all experts are used alike.
        let uneven = |trace: &Trace| {
            let uses = uses(trace, 3);
            let sum = f64::from(uses.iter().sum::<u32>());
            let squares = uses.iter().map(|n| (f64::from(*n) / sum).powi(2)).sum::<f64>();
            squares * uses.len() as f64
        };
        let (even, skewed) = (altered(&trace, Alteration::Even), altered(&trace, Alteration::Skew));
        let [before, even, skewed] = [&trace, &even, &skewed].map(uneven);
        assert!(even < 1.03 && before > 1.04 && skewed > 2.0, "{even} {before} {skewed}");
        let short = altered(&trace, Alteration::ShortPrompts);
        assert!(short.requests().iter().all(|request| request.n_prompt == 2));
        assert_eq!(uses(&short, 3), uses(&trace, 3));
    }

    /// The part of the next layer's experts that its router finds on this layer's activation.
    fn found(trace: &Trace) -> f64 {
        let (mut n, mut hits, mut probs) = (0, 0, Vec::new());
        for token in 0..trace.n_tokens() {
            for layer in 0..trace.header().layers.len() - 1 {
                let Some(target) = trace.ahead(token, layer, 1, &mut probs) else { continue };
                let best = moeba::policy::papers::finemoe::top_k(&probs, trace.header().k);
                n += best.len();
                hits += trace.chosen(token, target).iter().filter(|e| best.contains(e)).count();
            }
        }
        hits as f64 / n as f64
    }

    #[test]
    fn predictions_are_exact_or_wrong_and_follow_the_experts() {
        let trace = demo();
        assert!(found(&altered(&trace, Alteration::Exact)) > 0.999);
        assert!(found(&altered(&trace, Alteration::Wrong)) < 0.1);
        let even = found(&altered(&trace, Alteration::Even));
        // Equal probabilities, which are bytes, are told apart by the experts' numbers.
        assert!((even - found(&trace)).abs() < 0.01, "{even}");
        let both = alter(&trace, &[Alteration::Even, Alteration::Exact]).unwrap().unwrap();
        assert!(found(&both) > 0.999);
        let routing = Traced::new(&both, N_UBATCH);
        assert_eq!(routing.n_requests(), trace.requests().len());
    }
}
