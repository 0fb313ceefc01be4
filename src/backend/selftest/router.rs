//! Routes: ids, probabilities and weights.

use super::{Bench, Mirror, Random, try_map};
use crate::Result;
use crate::backend::gpu::router::{DeviceRoute, FixedExperts, Groups, RouteVectors, Router};
use crate::backend::ops::{Choice, Route, Score};

/// Tokens, experts, k, groups, groups used.
type Shape = [usize; 5];

pub fn check(bench: &Bench) -> Result<()> {
    let router = Router::load(&bench.gpu)?;
    let small = [[2, 33, 33, 1, 1], [3, 64, 6, 8, 3]];
    let odd = [
        [1, 8, 2, 1, 1],
        [7, 128, 8, 1, 1],
        [3, 60, 4, 1, 1],
        [1, 256, 8, 1, 1],
        [2, 512, 10, 1, 1],
        [1, 1024, 3, 1, 1],
        [3, 256, 8, 8, 4],
        [3, 6, 2, 6, 2],
        [3, 96, 4, 48, 5],
    ];
    let large = [[512, 128, 8, 1, 1], [100, 256, 8, 8, 4]];
    let shapes = bench.shapes(&small, &odd, &large);
    let scores = [
        ("softmax", Score::Softmax),
        ("sigmoid", Score::Sigmoid),
        ("sparsemixer", Score::SparseMixer),
        ("sqrtsoftplus", Score::SqrtSoftplus),
    ];
    for (name, score) in scores {
        bench.row("route", name, || {
            shapes.iter().try_for_each(|shape| compare_all(bench, &router, *shape, score))?;
            // The threshold of SparseMixer means nothing here.
            if score != Score::SparseMixer { compare_hard(bench, &router, score) } else { Ok(()) }
        });
    }
    let shapes = bench.shapes(&[[3, 32, 4, 2], [1, 6, 1, 6]], &[], &[[512, 128, 8, 2]]);
    bench.each("group_route", "", shapes, |shape| compare_groups(bench, &router, shape));
    Ok(())
}

/// Experts that are chosen by this score, from one group.
fn by(score: Score) -> Choice {
    Choice {
        score,
        cap: 0.0,
        normalize: true,
        scale: 1.0,
        bias_on_logits: false,
        n_groups: 1,
        n_groups_used: 1,
        jitter: 0.2,
    }
}

/// Each choice with biases and scales and without.
fn compare_all(
    bench: &Bench,
    router: &Router,
    [tokens, n, k, n_groups, n_groups_used]: Shape,
    score: Score,
) -> Result<()> {
    let [mut logits, bias, scales] = Random(n as u64).vectors([tokens * n, n, n]);
    // Ties, which go to the lower id.
    logits[n - 1] = logits[0];
    logits[n / 2] = logits[n / 2 - 1];
    let plain = Choice { n_groups, n_groups_used, ..by(score) };
    let scaled = Choice { normalize: false, scale: 2.5, ..plain };
    let capped = Choice { cap: 0.7, ..plain };
    let by_logits = Choice { bias_on_logits: true, ..plain };
    let table: Vec<u32> = (0..5 * k).map(|i| (i * 5 % n) as u32).collect();
    for choice in [plain, scaled, capped, by_logits] {
        let case = Case::new(&logits, n, k, choice);
        // SparseMixer weighs as it chooses.
        if score != Score::SparseMixer {
            Case { fixed: Some(&table), ..case }.compare(bench, router)?;
        }
        for bias in [None, Some(&bias[..])] {
            for scales in [None, Some(&scales[..])] {
                Case { scales, bias, ..case }.compare(bench, router)?;
            }
        }
    }
    Ok(())
}

/// The groups of the best experts, a table of two granules each, and weights that are small.
fn compare_groups(bench: &Bench, router: &Router, [tokens, n, k, size]: [usize; 4]) -> Result<()> {
    const N_GRANULES: usize = 2;
    let (mut random, n_chosen, scale) = (Random(n as u64), k + 1, 0.7);
    let mut route = Route { k: n_chosen, n_experts: n, ..Route::default() };
    route.probs = random.floats(tokens * n).into_iter().map(f32::abs).collect();
    // The last token's sum is too small.
    route.probs[(tokens - 1) * n..].fill(1e-7);
    route.chosen = (0..tokens * n_chosen).map(|i| (i * 7 % n) as u32).collect();
    let (probs, chosen) = (bench.up(route.probs.to_vec())?, bench.up(route.chosen.to_vec())?);
    let table = (0..n / size * N_GRANULES).map(|i| 1000 + i as u64);
    let table = bench.up(table)?;
    let (mut groups, mut weights) = (bench.out(tokens * k)?, bench.out(tokens * k)?);
    let mut granules = bench.out::<u64>(groups.len() * N_GRANULES)?;
    let device_route = DeviceRoute {
        k: n_chosen,
        n_experts: n,
        probs: probs.gpu(),
        chosen: chosen.gpu(),
        weights: weights.gpu(),
    };
    let to = Groups {
        k,
        size,
        scale,
        table: table.gpu(),
        n_granules: N_GRANULES,
        groups: groups.gpu(),
        weights: weights.gpu(),
        granules: granules.gpu(),
    };
    // SAFETY: experts are below `n`, which is a multiple of `size`.
    unsafe { router.group(&bench.stream, device_route, to)? };
    // The twin appends.
    (groups.host, weights.host) = (Vec::new(), Vec::new());
    route.groups(k, size, scale, &mut groups.host, &mut weights.host);
    for (to, group) in granules.chunks_exact_mut(N_GRANULES).zip(groups.iter()) {
        to.copy_from_slice(&table[*group as usize * N_GRANULES..][..N_GRANULES]);
    }
    let shape = format!("{tokens}×{k} of {n} in groups of {size}");
    bench.equal(format!("{shape}: groups"), &groups)?;
    bench.equal(format!("{shape}: addresses"), &granules)?;
    bench.equal(format!("{shape}: weights"), &weights)
}

/// Logits that are no numbers; distinct experts are chosen all the same.
fn compare_hard(bench: &Bench, router: &Router, score: Score) -> Result<()> {
    const N: usize = 40;
    for hard in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = Random(6).floats(2 * N);
        logits[3] = hard;
        // The second token has nothing else.
        logits[N..].fill(hard);
        Case::new(&logits, N, 6, by(score)).compare(bench, router)?;
    }
    Ok(())
}

/// Logits of some tokens, and how their experts are chosen.
#[derive(Clone, Copy)]
struct Case<'a> {
    logits: &'a [f32],
    n: usize,
    k: usize,
    choice: Choice,
    bias: Option<&'a [f32]>,
    scales: Option<&'a [f32]>,
    /// Experts of five tokens of the vocabulary, which come in turn.
    fixed: Option<&'a [u32]>,
}

impl<'a> Case<'a> {
    fn new(logits: &'a [f32], n: usize, k: usize, choice: Choice) -> Case<'a> {
        Case { logits, n, k, choice, bias: None, scales: None, fixed: None }
    }

    fn compare(&self, bench: &Bench, router: &Router) -> Result<()> {
        let Case { logits, n, k, choice, bias, scales, fixed } = *self;
        let tokens = logits.len() / n;
        let mut probs = bench.up(logits.to_vec())?;
        let ids = bench.up((0..tokens as u32).map(|t| 3 * t % 5))?;
        let (mut chosen, mut weights) = (bench.out(tokens * k)?, bench.out(tokens * k)?);
        let up = |v: Option<&[f32]>| v.map(|v| bench.up(v.to_vec())).transpose();
        let [bias_up, scales_up] = try_map([bias, scales], up)?;
        let [bias_up, scales_up] = [&bias_up, &scales_up].map(|v| v.as_ref().map(Mirror::gpu));
        let vectors = RouteVectors { bias: bias_up, scales: scales_up };
        let device_route = DeviceRoute {
            k,
            n_experts: n,
            probs: probs.gpu(),
            chosen: chosen.gpu(),
            weights: weights.gpu(),
        };
        let mut route = Route { k, n_experts: n, probs: logits.to_vec(), ..Route::default() };
        if let Some(table) = fixed {
            let experts = bench.up(table.to_vec())?;
            let fixed = FixedExperts { table: experts.gpu(), ids: ids.gpu() };
            // SAFETY: ids are below five, and experts below `n`.
            unsafe { router.route_to(&bench.stream, device_route, &choice, vectors, fixed)? };
            let of_token = |t: usize| &table[ids[t] as usize * k..][..k];
            bench.cpu.route_to(&mut route, &choice, of_token);
        } else {
            router.route(&bench.stream, device_route, &choice, vectors)?;
            bench.cpu.route(&mut route, &choice, bias);
        }
        scales.into_iter().for_each(|scales| route.scale_weights(scales));
        (probs.host, chosen.host, weights.host) = (route.probs, route.chosen, route.weights);
        let shape = format!("{tokens}×{k} of {n}");
        bench.equal(format!("{shape}: ids"), &chosen)?;
        bench.equal(format!("{shape}: probabilities"), &probs)?;
        bench.equal(format!("{shape}: weights"), &weights)
    }
}
