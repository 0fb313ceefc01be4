//! Made-up routing, and a machine to replay it on.

use crate::policy::{PolicySpec, Profile, Shape};
use crate::trace::*;

/// Layer 1 is dense.
pub const N_EXPERTS: [usize; 4] = [6, 0, 8, 6];
pub const K: usize = 2;
pub const POLICIES: [&str; 6] = [
    "on-demand",
    "mixtral-offloading",
    "predictor=none,eviction=lfu",
    "predictor=none,eviction=lcp",
    "predictor=next-layer,eviction=lcp",
    "predictor=next-layer,eviction=lfu",
];

/// Draws for routing.
struct Draws(u64);

impl Draws {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888);
        (self.0 >> 33) % n
    }
}

/// Tokens that stay with an expert for a while; looking ahead is mostly right.
fn token(draws: &mut Draws, n_experts: &[usize], k: usize, last: Option<&Token>) -> Token {
    let layer = |(l, n): (usize, usize)| {
        let mut chosen = last.map_or(Vec::new(), |t| t.layers[l].chosen.clone());
        chosen.truncate(if draws.below(3) == 0 { 0 } else { 1 });
        while chosen.len() < k.min(n) {
            let expert = draws.below(n as u64) as u32;
            if !chosen.contains(&expert) {
                chosen.push(expert);
            }
        }
        let probs = probs(&chosen, n);
        TokenLayer { chosen, probs, ..TokenLayer::default() }
    };
    let layers = n_experts.iter().copied().enumerate().map(layer).collect();
    let id = draws.below(100);
    Token { id: Some(id as u32), embedding: vec![id as f32; 4], layers }
}

/// Highest for the chosen, in their order.
fn probs(chosen: &[u32], n: usize) -> Vec<f32> {
    let mut probs = vec![0.01; n];
    chosen.iter().enumerate().for_each(|(i, e)| probs[*e as usize] = 0.5 / (i + 1) as f32);
    probs
}

/// Each layer looks ahead to the next MoE layer, of the same or the next token, wrong in `wrong` of
/// 10.
fn look_ahead(routing: &mut Recorded, draws: &mut Draws, wrong: u64) {
    let next = Shape::of_model(routing.n_experts.clone(), routing.k).next_moe_layers();
    for t in 0..routing.tokens.len() {
        for l in 0..next.len() {
            let n = routing.n_experts[next[l]];
            if routing.n_experts[l] == 0 {
                continue;
            }
            let of = t + usize::from(next[l] <= l);
            let right = draws.below(10) >= wrong;
            let chosen = match routing.tokens.get(of) {
                Some(token) if right => token.layers[next[l]].chosen.clone(),
                _ => vec![draws.below(n as u64) as u32],
            };
            routing.tokens[t].layers[l].ahead = vec![probs(&chosen, n)];
        }
    }
}

/// Requests of a prompt and `n_decode` tokens each.
pub fn routing(seed: u64, n_requests: usize, n_prompt: usize, n_decode: usize) -> Recorded {
    let mut draws = Draws(seed);
    let mut routing =
        Recorded { n_experts: N_EXPERTS.to_vec(), k: K, requests: Vec::new(), tokens: Vec::new() };
    for _ in 0..n_requests {
        let mut passes = Vec::new();
        let start = routing.tokens.len();
        for _ in 0..n_prompt + n_decode {
            let last = routing.tokens.last();
            let token = token(&mut draws, &N_EXPERTS, K, last);
            routing.tokens.push(token);
        }
        let decode = start + n_prompt;
        if n_prompt > 0 {
            passes.push(Pass { tokens: start..decode, is_prompt: true });
        }
        passes.extend(
            (decode..decode + n_decode).map(|t| Pass { tokens: t..t + 1, is_prompt: false }),
        );
        routing.requests.push(passes);
    }
    look_ahead(&mut routing, &mut draws, 2);
    routing
}

pub const GEOMETRY: Geometry = Geometry {
    expert_bytes: 4000,
    n_granules: 4,
    attention_bytes: 1000,
    shared_bytes: 0,
    head_bytes: 1000,
    weight_bytes: 2.0,
};

pub fn costs(bytes_per_second: f64) -> CostModel {
    CostModel {
        link: LinkCosts::new(bytes_per_second, 100, 2),
        expert: Roofline { launch_ns: 0.0, memory_ns: 400.0, token_ns: 80.0 },
        attention: Roofline { launch_ns: 50.0, memory_ns: 150.0, token_ns: 10.0 },
        shared: Roofline { launch_ns: 0.0, memory_ns: 30.0, token_ns: 10.0 },
        head: Roofline { launch_ns: 0.0, memory_ns: 70.0, token_ns: 1.0 },
        cpu_expert: CpuExpert::default(),
        search_ns: 0,
    }
}

pub fn options(policy: &str, share: f64) -> SimOptions {
    SimOptions {
        policy: policy.parse::<PolicySpec>().unwrap(),
        profile: Profile::default(),
        geometry: GEOMETRY,
        costs: costs(2e9),
        budget: Budget::Share(share),
        caching: Caching::Keep,
        mode: Mode::Timed,
        n_warm_up: 0,
    }
}
