//! A model's routing, pass by pass: the input of a simulation, from a trace or made up by a test.

use std::ops::Range;

use crate::policy::Phase;

/// A forward pass: some consecutive tokens of one request at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Numbers of its tokens among all of the routing.
    pub tokens: Range<usize>,
    /// Whether they were given; otherwise the model has generated them.
    pub is_prompt: bool,
}

impl Pass {
    /// The phase in which the engine runs it: one token is a decode step, also in a prompt.
    pub fn phase(&self) -> Phase {
        if self.tokens.len() > 1 { Phase::Prompt } else { Phase::Decode }
    }

    /// Replaces the contents of `out` by the mean of its tokens' rows; `read` puts a token's row
    /// into `row`. Empty if a token has no row.
    pub fn mean(
        &self,
        row: &mut Vec<f32>,
        out: &mut Vec<f32>,
        mut read: impl FnMut(usize, &mut Vec<f32>),
    ) {
        out.clear();
        for token in self.tokens.clone() {
            read(token, row);
            if token == self.tokens.start {
                out.resize(row.len(), 0.0);
            }
            if row.len() != out.len() {
                return out.clear();
            }
            out.iter_mut().zip(row.iter()).for_each(|(sum, x)| *sum += x);
        }
        let n = self.tokens.len().max(1) as f32;
        out.iter_mut().for_each(|sum| *sum /= n);
    }
}

/// Routing of requests that were served one after the other. Methods with an `out` replace its
/// contents; what was not recorded is empty. Layers without routed experts are not asked about.
pub trait Routing {
    /// Experts of each layer; 0 where it is dense.
    fn n_experts(&self) -> &[usize];

    /// Experts that a token uses in each MoE layer.
    fn k(&self) -> usize;

    fn n_requests(&self) -> usize;

    /// The request's forward passes, in order. Prompts come before what is generated.
    fn passes(&self, request: usize) -> Vec<Pass>;

    /// The token's number in the vocabulary, if it is known.
    fn id(&self, token: usize) -> Option<u32>;

    /// The token's row of the embedding table, `[n_embd]`.
    fn embedding(&self, token: usize, out: &mut Vec<f32>);

    /// The experts that the layer's router chose for the token, `[k]`, best first.
    fn chosen(&self, token: usize, layer: usize, out: &mut Vec<u32>);

    /// The router's probabilities of all the layer's experts.
    fn probs(&self, token: usize, layer: usize, out: &mut Vec<f32>);

    /// The router that is `distance` MoE layers ahead, around the end to the first, on this layer's
    /// activation: probabilities of all that layer's experts.
    fn ahead(&self, token: usize, layer: usize, distance: usize, out: &mut Vec<f32>);

    /// The input of the layer's router, `[n_embd]`.
    fn hidden(&self, token: usize, layer: usize, out: &mut Vec<f32>);
}

/// Routing that is held in memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recorded {
    pub n_experts: Vec<usize>,
    pub k: usize,
    /// The passes of each request.
    pub requests: Vec<Vec<Pass>>,
    pub tokens: Vec<Token>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Token {
    pub id: Option<u32>,
    pub embedding: Vec<f32>,
    /// One for each layer; of dense ones empty.
    pub layers: Vec<TokenLayer>,
}

/// See the methods of `Routing` that have the fields' names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLayer {
    pub chosen: Vec<u32>,
    pub probs: Vec<f32>,
    /// Look-aheads of distances 1 and up.
    pub ahead: Vec<Vec<f32>>,
    pub hidden: Vec<f32>,
}

impl Routing for Recorded {
    fn n_experts(&self) -> &[usize] {
        &self.n_experts
    }

    fn k(&self) -> usize {
        self.k
    }

    fn n_requests(&self) -> usize {
        self.requests.len()
    }

    fn passes(&self, request: usize) -> Vec<Pass> {
        self.requests[request].clone()
    }

    fn id(&self, token: usize) -> Option<u32> {
        self.tokens[token].id
    }

    fn embedding(&self, token: usize, out: &mut Vec<f32>) {
        out.clone_from(&self.tokens[token].embedding);
    }

    fn chosen(&self, token: usize, layer: usize, out: &mut Vec<u32>) {
        out.clone_from(&self.tokens[token].layers[layer].chosen);
    }

    fn probs(&self, token: usize, layer: usize, out: &mut Vec<f32>) {
        out.clone_from(&self.tokens[token].layers[layer].probs);
    }

    fn ahead(&self, token: usize, layer: usize, distance: usize, out: &mut Vec<f32>) {
        out.clear();
        out.extend(self.tokens[token].layers[layer].ahead.get(distance - 1).into_iter().flatten());
    }

    fn hidden(&self, token: usize, layer: usize, out: &mut Vec<f32>) {
        out.clone_from(&self.tokens[token].layers[layer].hidden);
    }
}
