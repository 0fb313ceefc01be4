//! Routes: ids, probabilities and weights.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::router::{DeviceRoute, Router};
use crate::backend::ops::{Choice, Route, Score};

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let router = Router::load(&bench.gpu)?;
    // (tokens, experts, k, groups, groups used)
    let small = [(2, 33, 33, 1, 1), (3, 64, 6, 8, 3)];
    let large = [(1, 8, 2, 1, 1), (512, 128, 8, 1, 1), (100, 256, 8, 8, 4)];
    let shapes = bench.shapes(&small, &large);
    let scores = [
        ("softmax", Score::Softmax),
        ("sigmoid", Score::Sigmoid),
        ("sparsemixer", Score::SparseMixer),
    ];
    for (name, score) in scores {
        report.row("route", name, |row| {
            for (tokens, n, k, n_groups, n_groups_used) in shapes.iter().copied() {
                let mut random = Random(n as u64);
                let mut logits = random.floats(tokens * n);
                // A tie, which goes to the lower id.
                logits[n - 1] = logits[0];
                let bias = random.floats(n);
                let plain = Choice {
                    score,
                    normalize: true,
                    scale: 1.0,
                    n_groups,
                    n_groups_used,
                    jitter: 0.2,
                };
                compare(
                    bench,
                    &router,
                    row,
                    &Case { logits: &logits, n, k, choice: plain, bias: None },
                )?;
                let choice = Choice { normalize: false, scale: 2.5, ..plain };
                compare(
                    bench,
                    &router,
                    row,
                    &Case { logits: &logits, n, k, choice, bias: Some(&bias) },
                )?;
            }
            Ok(())
        });
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
}

fn compare(bench: &Bench, router: &Router, row: &mut Row, case: &Case) -> Result<()> {
    let Case { logits, n, k, choice, bias } = *case;
    let tokens = logits.len() / n;
    let mut route = Route::default();
    (route.k, route.n_experts, route.probs) = (k, n, logits.to_vec());
    bench.cpu.route(&mut route, &choice, bias);
    let probs = bench.up_f32(logits)?;
    let (chosen, weights) = (bench.empty(4 * tokens * k)?, bench.empty(4 * tokens * k)?);
    let bias = bias.map(|bias| bench.up_f32(bias)).transpose()?;
    let device_route = DeviceRoute {
        k,
        n_experts: n,
        probs: probs.all(),
        chosen: chosen.all(),
        weights: weights.all(),
    };
    let bias = bias.as_ref().map(DeviceBuffer::all);
    router.route(&bench.stream, device_route, &choice, bias)?;
    let shape = format!("{tokens}×{k} of {n}");
    row.words(format!("{shape}: ids"), &bench.down_u32(&chosen)?, &route.chosen);
    row.bits(format!("{shape}: probabilities"), &bench.down_f32(&probs)?, &route.probs);
    row.bits(format!("{shape}: weights"), &bench.down_f32(&weights)?, &route.weights);
    Ok(())
}
