//! Requests that advance together: for each step of a batch and each layer how many of its tokens
//! need each expert, and how many were predicted to.

use moeba::trace::{Pass, Routing};

/// MoE layers that are predicted, from each layer.
pub const N_AHEAD: usize = 2;

/// A MoE layer of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchLayer {
    /// [experts], tokens that need each.
    pub counts: Vec<u32>,
    /// For the MoE layers that follow, the nearest first: [experts], tokens predicted to need each.
    /// Empty where nothing is predicted.
    pub predicted: Vec<Vec<f32>>,
}

/// One forward pass of a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchStep {
    pub n_tokens: usize,
    /// Tokens that it generates: one for each request.
    pub n_generated: usize,
    /// The MoE layers in order.
    pub layers: Vec<BatchLayer>,
}

/// Batches one after another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batches {
    /// Experts of each MoE layer.
    pub n_experts: Vec<usize>,
    pub steps: Vec<BatchStep>,
}

/// The source of predictions.
pub enum Source<'a> {
    #[cfg(test)]
    Nothing,
    /// The true choices.
    #[cfg(test)]
    Oracle,
    /// Later routers on the present activation, each token's best k.
    Gate,
    /// A predictor of one token's choices, such as LLaPor.
    Tokens(OfToken<'a>),
}

/// (token, layer, distance in MoE layers, out): replaces `out` by how probably the token will use
/// each expert of the layer so far ahead, or by nothing.
pub type OfToken<'a> = &'a dyn Fn(usize, usize, usize, &mut Vec<f32>);

/// Tokens of each expert over all of some requests, [MoE layers][experts]: PreScope's Counter.
pub fn counts(routing: &dyn Routing, requests: std::ops::Range<usize>) -> Vec<Vec<u32>> {
    let layers = moe_layers(routing);
    let mut counts: Vec<_> = layers.iter().map(|l| vec![0; routing.n_experts()[*l]]).collect();
    for pass in requests.flat_map(|request| routing.passes(request)) {
        for (layer, counts) in layers.iter().zip(&mut counts) {
            count(routing, pass.tokens.clone(), *layer, counts);
        }
    }
    counts
}

fn moe_layers(routing: &dyn Routing) -> Vec<usize> {
    (0..routing.n_experts().len()).filter(|layer| routing.n_experts()[*layer] > 0).collect()
}

fn count(
    routing: &dyn Routing,
    tokens: impl Iterator<Item = usize>,
    layer: usize,
    counts: &mut [u32],
) {
    let mut chosen = Vec::new();
    for token in tokens {
        routing.chosen(token, layer, &mut chosen);
        chosen.iter().for_each(|expert| counts[*expert as usize] += 1);
    }
}

impl Batches {
    /// Batches of `size` requests each; what is left over makes no batch. All prompts of a batch
    /// are one step, in which each request's first token is generated; then each step is the next
    /// token of every request that has one.
    pub fn new(
        routing: &dyn Routing,
        requests: std::ops::Range<usize>,
        size: usize,
        source: &Source,
    ) -> Batches {
        assert!(size > 0);
        let layers = moe_layers(routing);
        let requests: Vec<usize> = requests.collect();
        let steps = requests.chunks_exact(size).flat_map(|batch| steps(routing, batch));
        let steps: Vec<Vec<usize>> = steps.collect();
        let mut batches = Batches {
            n_experts: layers.iter().map(|layer| routing.n_experts()[*layer]).collect(),
            steps: steps.iter().map(|tokens| step(routing, &layers, tokens, size)).collect(),
        };
        batches.predict(routing, &layers, &steps, source);
        batches
    }

    fn predict(
        &mut self,
        routing: &dyn Routing,
        layers: &[usize],
        tokens: &[Vec<usize>],
        source: &Source,
    ) {
        for (s, tokens) in tokens.iter().enumerate() {
            for at in 0..layers.len() {
                let predict = |distance| match source {
                    #[cfg(test)]
                    Source::Nothing => Vec::new(),
                    #[cfg(test)]
                    Source::Oracle => self.oracle(s, at, distance),
                    Source::Gate => of_tokens(tokens, |token, out| {
                        routing.ahead(token, layers[at], distance, out);
                        keep_best(out, routing.k());
                    }),
                    Source::Tokens(predict) => {
                        of_tokens(tokens, |token, out| predict(token, layers[at], distance, out))
                    }
                };
                let predicted: Vec<Vec<f32>> = (1..=N_AHEAD).map(predict).collect();
                self.steps[s].layers[at].predicted = predicted;
            }
        }
    }

    /// The experts that the layer `distance` MoE layers on will use, around the end in the next
    /// step.
    #[cfg(test)]
    fn oracle(&self, step: usize, layer: usize, distance: usize) -> Vec<f32> {
        let at = layer + distance;
        let n = self.n_experts.len();
        let step = self.steps.get(step + at / n);
        step.map_or(Vec::new(), |s| s.layers[at % n].counts.iter().map(|c| *c as f32).collect())
    }
}

/// The tokens of each step of a batch.
fn steps(routing: &dyn Routing, batch: &[usize]) -> Vec<Vec<usize>> {
    let passes: Vec<Vec<Pass>> = batch.iter().map(|request| routing.passes(*request)).collect();
    let tokens = |of_prompt: bool| {
        let of = move |passes: &Vec<Pass>| -> Vec<usize> {
            let passes = passes.iter().filter(|pass| pass.is_prompt == of_prompt);
            passes.flat_map(|pass| pass.tokens.clone()).collect()
        };
        passes.iter().map(of).collect::<Vec<_>>()
    };
    let (prompts, decodes) = (tokens(true).concat(), tokens(false));
    let n = decodes.iter().map(Vec::len).max().unwrap_or(0);
    let decode = |i: usize| decodes.iter().filter_map(|t| t.get(i).copied()).collect();
    let steps = std::iter::once(prompts).chain((0..n).map(decode));
    steps.filter(|tokens| !tokens.is_empty()).collect()
}

fn step(routing: &dyn Routing, layers: &[usize], tokens: &[usize], size: usize) -> BatchStep {
    let layer = |&layer: &usize| {
        let mut counts = vec![0; routing.n_experts()[layer]];
        count(routing, tokens.iter().copied(), layer, &mut counts);
        BatchLayer { counts, predicted: Vec::new() }
    };
    BatchStep {
        n_tokens: tokens.len(),
        n_generated: tokens.len().min(size),
        layers: layers.iter().map(layer).collect(),
    }
}

/// The sum of what tokens are predicted to use.
fn of_tokens(tokens: &[usize], mut predict: impl FnMut(usize, &mut Vec<f32>)) -> Vec<f32> {
    let (mut sum, mut of_token) = (Vec::new(), Vec::new());
    for &token in tokens {
        predict(token, &mut of_token);
        sum.resize(sum.len().max(of_token.len()), 0.0);
        sum.iter_mut().zip(&of_token).for_each(|(sum, x): (&mut f32, _)| *sum += x);
    }
    sum
}

/// 1 for the `k` highest, the lower id first among equals, and 0 for the others.
pub fn keep_best(probs: &mut [f32], k: usize) {
    let mut order: Vec<usize> = (0..probs.len()).collect();
    order.sort_by(|a, b| probs[*b].total_cmp(&probs[*a]).then(a.cmp(b)));
    let best = &order[..k.min(order.len())];
    (0..probs.len()).for_each(|expert| probs[expert] = f32::from(best.contains(&expert)));
}
