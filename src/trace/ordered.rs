//! Some requests of a routing, in an order of one's own.

use super::{Pass, Routing};

/// Request i is `order[i]` of the routing within; one may come several times or not at all. Tokens
/// keep their numbers.
pub struct Ordered<'a> {
    pub routing: &'a dyn Routing,
    pub order: Vec<usize>,
}

impl Routing for Ordered<'_> {
    fn n_experts(&self) -> &[usize] {
        self.routing.n_experts()
    }

    fn k(&self) -> usize {
        self.routing.k()
    }

    fn n_requests(&self) -> usize {
        self.order.len()
    }

    fn passes(&self, request: usize) -> Vec<Pass> {
        self.routing.passes(self.order[request])
    }

    fn id(&self, token: usize) -> Option<u32> {
        self.routing.id(token)
    }

    fn embedding(&self, token: usize, out: &mut Vec<f32>) {
        self.routing.embedding(token, out);
    }

    fn chosen(&self, token: usize, layer: usize, out: &mut Vec<u32>) {
        self.routing.chosen(token, layer, out);
    }

    fn probs(&self, token: usize, layer: usize, out: &mut Vec<f32>) {
        self.routing.probs(token, layer, out);
    }

    fn ahead(&self, token: usize, layer: usize, distance: usize, out: &mut Vec<f32>) {
        self.routing.ahead(token, layer, distance, out);
    }

    fn hidden(&self, token: usize, layer: usize, out: &mut Vec<f32>) {
        self.routing.hidden(token, layer, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Recorded, Token, TokenLayer};

    /// A layer of 9 experts; request r has r + 1 tokens, token t uses expert t.
    fn routing() -> Recorded {
        let token = |t: u32| Token {
            layers: vec![TokenLayer { chosen: vec![t], ..TokenLayer::default() }],
            ..Token::default()
        };
        let request = |tokens: std::ops::Range<usize>| {
            tokens.map(|t| Pass { tokens: t..t + 1, is_prompt: false }).collect()
        };
        Recorded {
            n_experts: vec![9],
            k: 1,
            requests: [0..1, 1..3, 3..6].map(request).to_vec(),
            tokens: (0..6).map(token).collect(),
        }
    }

    #[test]
    fn requests_come_as_ordered() {
        let routing = routing();
        let ordered = Ordered { routing: &routing, order: vec![2, 0, 2] };
        assert_eq!((ordered.n_requests(), ordered.k(), ordered.n_experts()), (3, 1, &[9][..]));
        assert_eq!(ordered.passes(1), routing.requests[0]);
        let passes = (0..3).flat_map(|r| ordered.passes(r));
        let mut chosen = Vec::new();
        let experts = passes.map(|pass| {
            ordered.chosen(pass.tokens.start, 0, &mut chosen);
            chosen[0]
        });
        assert_eq!(experts.collect::<Vec<_>>(), [3, 4, 5, 0, 3, 4, 5]);
    }
}
