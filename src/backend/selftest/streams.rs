//! Several residual streams a token.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::norm::Norm;
use crate::backend::gpu::streams::{DeviceMixing, GatedStreams, OutputWeights, Streams};
use crate::backend::ops::Mixing;

const EPS: f32 = 1e-6;

/// Tokens, streams of a token, elements of a stream.
type Shape = [usize; 3];

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let streams = Streams::load(&bench.gpu)?;
    let norm = Norm::load(&bench.gpu)?;
    let shapes: Vec<Shape> =
        bench.shapes(&[[1, 4, 64], [3, 2, 300]], &[[2, 8, 257], [5, 3, 8]], &[[1, 4, 7168]]);
    report.row("join_streams", "f32", |row| {
        shapes.iter().try_for_each(|shape| mixed(bench, &streams, *shape, row, Part::Join))
    });
    report.row("feed_streams", "f32", |row| {
        shapes.iter().try_for_each(|shape| mixed(bench, &streams, *shape, row, Part::Feed))
    });
    report.row("join_gated", "f32", |row| {
        shapes.iter().try_for_each(|shape| gated(bench, &streams, &norm, *shape, row))
    });
    report.row("mean_silu", "f32", |row| {
        for [tokens, n, n_embd] in shapes.iter().copied() {
            let mut x = Random(n_embd as u64).floats(tokens * n_embd);
            let x_up = bench.up_f32(&x)?;
            streams.mean_silu(&bench.stream, x_up.all(), n)?;
            x.iter_mut().for_each(|x| *x /= n as f32);
            let mut gate = x.clone();
            bench.cpu.sigmoid_gated(&mut x, &mut gate);
            row.bits(x.len(), &bench.down_f32(&x_up)?, &x);
        }
        Ok(())
    });
    report.row("gate_ngrams", "f32", |row| {
        shapes.iter().try_for_each(|shape| ngrams(bench, &streams, *shape, row))
    });
    report.row("recall_streams", "f32", |row| {
        shapes.iter().try_for_each(|shape| recalled(bench, &streams, *shape, row))
    });
    Ok(())
}

/// N-grams' keys, queries and values.
fn ngrams(
    bench: &Bench,
    streams: &Streams,
    [tokens, n, n_embd]: Shape,
    row: &mut Row,
) -> Result<()> {
    let mut random = Random(n_embd as u64);
    let (mut key, mut query) = (random.floats(tokens * n * n_embd), random.floats(n_embd));
    // A product of 0.
    key[..n_embd].fill(0.0);
    query.extend(random.floats(key.len() - n_embd));
    let value = random.floats(tokens * n_embd);
    let (key_up, query_up) = (bench.up_f32(&key)?, bench.up_f32(&query)?);
    let (value_up, pair) = (bench.up_f32(&value)?, [key_up.all(), query_up.all()]);
    streams.gate_ngrams(&bench.stream, [tokens, n], pair, value_up.all())?;
    bench.cpu.gate_ngrams(tokens, &mut key, &query, &value);
    row.bits(format!("{tokens} tokens, {n}×{n_embd}"), &bench.down_f32(&key_up)?, &key);
    Ok(())
}

/// The half of a hyper-connection that is compared.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Join,
    Feed,
}

/// Hyper-connections of the head, of layers, and of layers that mix streams.
fn mixed(
    bench: &Bench,
    streams: &Streams,
    [tokens, n, n_embd]: Shape,
    row: &mut Row,
    part: Part,
) -> Result<()> {
    let mut random = Random((n * n_embd) as u64);
    for (width, rounds) in [(n, 0), (2 * n, 0), ((2 + n) * n, 1), ((2 + n) * n, 20)] {
        let what = format!("{tokens} tokens, {n}×{n_embd}, {width} mixes, {rounds} rounds");
        let (scales, bases) = ([0.7, 1.3, 2.1], random.floats(width));
        let (all, y) = (random.floats(tokens * n * n_embd), random.floats(tokens * n_embd));
        let mut weights = random.floats(tokens * width);
        let [scales_up, bases_up] = [&scales[..], &bases].map(|values| bench.up_f32(values));
        let (scales_up, bases_up) = (scales_up?, bases_up?);
        let (all_up, y_up, mixes_up) =
            (bench.up_f32(&all)?, bench.up_f32(&y)?, bench.up_f32(&weights)?);
        let (weights_up, out_up) = (bench.empty(mixes_up.len())?, bench.empty(y_up.len())?);
        let mixing = Mixing { n, scales: &scales, bases: &bases, eps: EPS, magnitude: 1.7, rounds };
        let device = DeviceMixing {
            n,
            scales: scales_up.all(),
            bases: bases_up.all(),
            eps: EPS,
            magnitude: 1.7,
            rounds,
        };
        let mixes = [mixes_up.all(), weights_up.all()];
        streams.join(&bench.stream, &device, all_up.all(), mixes, out_up.all())?;
        weights.chunks_exact_mut(width).for_each(|mixes| bench.cpu.stream_weights(&mixing, mixes));
        if part == Part::Join {
            let mut out = vec![0.0; y.len()];
            bench.cpu.join_streams(&all, &weights, [n, width], &mut out);
            row.bits(format!("{what}: weights"), &bench.down_f32(&weights_up)?, &weights);
            row.bits(what, &bench.down_f32(&out_up)?, &out);
        } else if width > n {
            let output = OutputWeights { all: weights_up.all(), width, first: n };
            streams.feed(&bench.stream, n, output, y_up.all(), all_up.all())?;
            let mut all = all;
            bench.cpu.feed_streams(&mixing, &weights, &y, &mut all);
            row.bits(what, &bench.down_f32(&all_up)?, &all);
        } else {
            let output = OutputWeights { all: weights_up.all(), width, first: 0 };
            streams.feed(&bench.stream, n, output, y_up.all(), all_up.all())?;
            let mut all = all;
            bench.cpu.add_to_streams(&weights, &y, &mut all);
            row.bits(format!("{what}: added"), &bench.down_f32(&all_up)?, &all);
        }
    }
    Ok(())
}

/// Streams with gates of their elements.
fn gated(
    bench: &Bench,
    streams: &Streams,
    norm: &Norm,
    [tokens, n, n_embd]: Shape,
    row: &mut Row,
) -> Result<()> {
    let what = format!("{tokens} tokens, {n}×{n_embd}");
    let mut random = Random(n_embd as u64);
    let (mut normed, weight) = (random.floats(tokens * n * n_embd), random.floats(n * n_embd));
    let (mut gates, mut mixes) = (random.floats(normed.len()), random.floats(tokens * n));
    let (all_up, weight_up) = (bench.up_f32(&normed)?, bench.up_f32(&weight)?);
    let (gates_up, mixes_up) = (bench.up_f32(&gates)?, bench.up_f32(&mixes)?);
    let (normed_up, weights_up) = (bench.empty(all_up.len())?, bench.empty(mixes_up.len())?);
    let out_up = bench.empty(4 * tokens * n_embd)?;
    let (x, out) = (all_up.all(), normed_up.all());
    norm.rms_norm_groups_into(&bench.stream, x, weight_up.all(), n, EPS, out)?;
    bench.cpu.rms_norm_groups(&mut normed, &weight, n, EPS);
    row.bits(format!("{what}: norms"), &bench.down_f32(&normed_up)?, &normed);
    let (weights, sizes) = ([mixes_up.all(), weights_up.all()], [tokens, n]);
    let plain = GatedStreams { streams: out, gates: None, weights: None };
    let head = GatedStreams { gates: Some(gates_up.all()), ..plain };
    let layer = GatedStreams { weights: Some(weights), ..head };
    let mean = vec![1.0 / n as f32; tokens * n];
    let mut expected = vec![0.0; tokens * n_embd];
    streams.join_gated(&bench.stream, sizes, &plain, out_up.all())?;
    bench.cpu.join_streams(&normed, &mean, [n, n], &mut expected);
    row.bits(format!("{what}: mean"), &bench.down_f32(&out_up)?, &expected);
    streams.join_gated(&bench.stream, sizes, &layer, out_up.all())?;
    bench.cpu.sigmoid_gated(&mut normed, &mut gates);
    mixes.iter_mut().for_each(|x| *x /= n as f32);
    bench.cpu.kernels.sigmoid(&mut mixes);
    mixes.iter_mut().for_each(|x| *x *= 2.0);
    bench.cpu.join_streams(&normed, &mean, [n, n], &mut expected);
    row.bits(format!("{what}: weights"), &bench.down_f32(&weights_up)?, &mixes);
    row.bits(what.clone(), &bench.down_f32(&out_up)?, &expected);
    // The head adds nothing.
    streams.join_gated(&bench.stream, sizes, &head, out_up.all())?;
    row.bits(format!("{what}, the head"), &bench.down_f32(&out_up)?, &expected);
    Ok(())
}

/// The present stream and those that were left behind.
fn recalled(
    bench: &Bench,
    streams: &Streams,
    [tokens, n, n_embd]: Shape,
    row: &mut Row,
) -> Result<()> {
    let mut random = Random(n_embd as u64);
    for n in [n, 8 * n] {
        let (sources, weight) = (random.floats(n * tokens * n_embd), random.floats(n_embd));
        let (sources_up, weight_up) = (bench.up_f32(&sources)?, bench.up_f32(&weight)?);
        let (scores, out) = (bench.empty(4 * tokens * n)?, bench.empty(4 * tokens * n_embd)?);
        let (from, score) = (sources_up.all(), weight_up.all());
        streams.recall(&bench.stream, from, score, EPS, scores.all(), out.all())?;
        let (kept, present) = sources.split_at((n - 1) * tokens * n_embd);
        let mut expected = vec![0.0; tokens * n_embd];
        bench.cpu.recall_streams(kept, present, &weight, EPS, &mut expected);
        let what = format!("{tokens} tokens, {n} streams of {n_embd}");
        row.bits(what, &bench.down_f32(&out)?, &expected);
    }
    Ok(())
}
