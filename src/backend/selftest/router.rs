//! Routes: ids, probabilities and weights.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::router::{DeviceRoute, FixedExperts, Groups, RouteVectors, Router};
use crate::backend::ops::{Choice, Route, Score};

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let router = Router::load(&bench.gpu)?;
    // (tokens, experts, k, groups, groups used)
    let small = [(2, 33, 33, 1, 1), (3, 64, 6, 8, 3)];
    let odd = [
        (1, 8, 2, 1, 1),
        (7, 128, 8, 1, 1),
        (3, 60, 4, 1, 1),
        (1, 256, 8, 1, 1),
        (2, 512, 10, 1, 1),
        (1, 1024, 3, 1, 1),
        (3, 256, 8, 8, 4),
        (3, 6, 2, 6, 2),
        (3, 96, 4, 48, 5),
    ];
    let large = [(512, 128, 8, 1, 1), (100, 256, 8, 8, 4)];
    let shapes = bench.shapes(&small, &odd, &large);
    let scores = [
        ("softmax", Score::Softmax),
        ("sigmoid", Score::Sigmoid),
        ("sparsemixer", Score::SparseMixer),
        ("sqrtsoftplus", Score::SqrtSoftplus),
    ];
    for (name, score) in scores {
        report.row("route", name, |row| {
            for (tokens, n, k, n_groups, n_groups_used) in shapes.iter().copied() {
                let mut random = Random(n as u64);
                let mut logits = random.floats(tokens * n);
                // Ties, which go to the lower id.
                logits[n - 1] = logits[0];
                logits[n / 2] = logits[n / 2 - 1];
                let (bias, scales) = (random.floats(n), random.floats(n));
                let plain = Choice {
                    score,
                    cap: 0.0,
                    normalize: true,
                    scale: 1.0,
                    n_groups,
                    n_groups_used,
                    jitter: 0.2,
                };
                let scaled = Choice { normalize: false, scale: 2.5, ..plain };
                let capped = Choice { cap: 0.7, ..plain };
                let table: Vec<u32> = (0..5 * k).map(|i| (i * 5 % n) as u32).collect();
                for choice in [plain, scaled, capped] {
                    // SparseMixer weighs as it chooses.
                    if score != Score::SparseMixer {
                        let case = Case::new(&logits, n, k, choice);
                        compare(bench, &router, row, &Case { fixed: Some(&table), ..case })?;
                    }
                    for bias in [None, Some(&bias[..])] {
                        for scales in [None, Some(&scales[..])] {
                            let case = Case { scales, bias, ..Case::new(&logits, n, k, choice) };
                            compare(bench, &router, row, &case)?;
                        }
                    }
                }
            }
            // The threshold of SparseMixer means nothing here.
            if score != Score::SparseMixer {
                compare_hard(bench, &router, row, score)?;
            }
            Ok(())
        });
    }
    check_groups(bench, &router, report);
    Ok(())
}

fn check_groups(bench: &Bench, router: &Router, report: &mut Report) {
    report.row("group_route", "", |row| {
        for shape in bench.shapes(&[[3, 32, 4, 2], [1, 6, 1, 6]], &[], &[[512, 128, 8, 2]]) {
            compare_groups(bench, router, row, shape)?;
        }
        Ok(())
    });
}

/// The groups of the best experts, a table of two granules each, and weights that are small.
fn compare_groups(
    bench: &Bench,
    router: &Router,
    row: &mut Row,
    [tokens, n, k, size]: [usize; 4],
) -> Result<()> {
    const N_GRANULES: usize = 2;
    let (mut random, n_chosen, scale) = (Random(n as u64), k + 1, 0.7);
    let mut route = Route { k: n_chosen, n_experts: n, ..Route::default() };
    route.probs = random.floats(tokens * n).into_iter().map(f32::abs).collect();
    // The last token's sum is too small.
    route.probs[(tokens - 1) * n..].fill(1e-7);
    let expert = |i: usize| (i * 7 % n) as u32;
    route.chosen = (0..tokens * n_chosen).map(expert).collect();
    let (mut groups, mut weights) = (Vec::new(), Vec::new());
    route.groups(k, size, scale, &mut groups, &mut weights);
    let table: Vec<u64> = (0..n / size * N_GRANULES).map(|i| 1000 + i as u64).collect();
    let rows = groups.iter().flat_map(|group| &table[*group as usize * N_GRANULES..][..N_GRANULES]);
    let expected: Vec<u8> = rows.flat_map(|address| address.to_le_bytes()).collect();

    let (probs, chosen) = (bench.up_f32(&route.probs)?, bench.up_u32(&route.chosen)?);
    let table: Vec<u8> = table.iter().flat_map(|address| address.to_le_bytes()).collect();
    let (table, granules) = (bench.up(&table)?, bench.empty(expected.len())?);
    let (to_groups, to_weights) = (bench.empty(4 * tokens * k)?, bench.empty(4 * tokens * k)?);
    let device_route = DeviceRoute {
        k: n_chosen,
        n_experts: n,
        probs: probs.all(),
        chosen: chosen.all(),
        weights: to_weights.all(),
    };
    let to = Groups {
        k,
        size,
        scale,
        table: table.all(),
        n_granules: N_GRANULES,
        groups: to_groups.all(),
        weights: to_weights.all(),
        granules: granules.all(),
    };
    // SAFETY: experts are below `n`, which is a multiple of `size`.
    unsafe { router.group(&bench.stream, device_route, to)? };
    let shape = format!("{tokens}×{k} of {n} in groups of {size}");
    row.words(format!("{shape}: groups"), &bench.down_u32(&to_groups)?, &groups);
    row.words(format!("{shape}: addresses"), &bench.down(&granules)?, &expected);
    row.bits(format!("{shape}: weights"), &bench.down_f32(&to_weights)?, &weights);
    Ok(())
}

/// Logits that are no numbers; distinct experts are chosen all the same.
fn compare_hard(bench: &Bench, router: &Router, row: &mut Row, score: Score) -> Result<()> {
    const N: usize = 40;
    for hard in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = Random(6).floats(2 * N);
        logits[3] = hard;
        // The second token has nothing else.
        logits[N..].fill(hard);
        let choice = Choice {
            score,
            cap: 0.0,
            normalize: true,
            scale: 1.0,
            n_groups: 1,
            n_groups_used: 1,
            jitter: 0.2,
        };
        let case = Case::new(&logits, N, 6, choice);
        compare(bench, router, row, &case)?;
    }
    Ok(())
}

/// Logits of some tokens, and how their experts are chosen.
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
}

fn compare(bench: &Bench, router: &Router, row: &mut Row, case: &Case) -> Result<()> {
    let Case { logits, n, k, choice, bias, scales, fixed } = *case;
    let tokens = logits.len() / n;
    let ids: Vec<u32> = (0..tokens as u32).map(|t| 3 * t % 5).collect();
    let mut route = Route::default();
    (route.k, route.n_experts, route.probs) = (k, n, logits.to_vec());
    match fixed {
        None => bench.cpu.route(&mut route, &choice, bias),
        Some(table) => {
            let of_token = |t: usize| &table[ids[t] as usize * k..][..k];
            bench.cpu.route_to(&mut route, &choice, of_token);
        }
    }
    scales.into_iter().for_each(|scales| route.scale_weights(scales));
    let probs = bench.up_f32(logits)?;
    let (chosen, weights) = (bench.empty(4 * tokens * k)?, bench.empty(4 * tokens * k)?);
    let up = |v: Option<&[f32]>| v.map(|v| bench.up_f32(v)).transpose();
    let (bias, scales) = (up(bias)?, up(scales)?);
    let device_route = DeviceRoute {
        k,
        n_experts: n,
        probs: probs.all(),
        chosen: chosen.all(),
        weights: weights.all(),
    };
    let [bias, scales] = [&bias, &scales].map(|v| v.as_ref().map(DeviceBuffer::all));
    let vectors = RouteVectors { bias, scales };
    match fixed {
        None => router.route(&bench.stream, device_route, &choice, vectors)?,
        Some(table) => {
            let (table, ids) = (bench.up_u32(table)?, bench.up_u32(&ids)?);
            let fixed = FixedExperts { table: table.all(), ids: ids.all() };
            // SAFETY: ids are below five, and experts below `n`.
            unsafe { router.route_to(&bench.stream, device_route, &choice, vectors, fixed)? };
            bench.stream.synchronize()?;
        }
    }
    let shape = format!("{tokens}×{k} of {n}");
    row.words(format!("{shape}: ids"), &bench.down_u32(&chosen)?, &route.chosen);
    row.bits(format!("{shape}: probabilities"), &bench.down_f32(&probs)?, &route.probs);
    row.bits(format!("{shape}: weights"), &bench.down_f32(&weights)?, &route.weights);
    Ok(())
}
