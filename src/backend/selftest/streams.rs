//! Several residual streams a token.

use super::{Bench, Random};
use crate::Result;
use crate::backend::gpu::norm::Norm;
use crate::backend::gpu::streams::{DeviceMixing, GatedStreams, OutputWeights, Streams};
use crate::backend::ops::Mixing;

const EPS: f32 = 1e-6;

/// Tokens, streams of a token, elements of a stream.
type Shape = [usize; 3];

pub fn check(bench: &Bench) -> Result<()> {
    let (streams, norm) = (Streams::load(&bench.gpu)?, Norm::load(&bench.gpu)?);
    let odd = [[2, 8, 257], [5, 3, 8]];
    let shapes: Vec<Shape> = bench.shapes(&[[1, 4, 64], [3, 2, 300]], &odd, &[[1, 4, 7168]]);
    bench.each("join_streams", "f32", &shapes, |s| mixed(bench, &streams, *s, Half::Join));
    bench.each("feed_streams", "f32", &shapes, |s| mixed(bench, &streams, *s, Half::Feed));
    bench.each("join_gated", "f32", &shapes, |s| gated(bench, &streams, &norm, *s));
    bench.each("mean_silu", "f32", &shapes, |&[tokens, n, n_embd]| {
        let [mut x] = bench.seeded(n_embd, [tokens * n_embd])?;
        streams.mean_silu(&bench.stream, x.gpu(), n)?;
        x.iter_mut().for_each(|x| *x /= n as f32);
        let mut gate = x.to_vec();
        bench.cpu.sigmoid_gated(&mut x, &mut gate);
        bench.equal(x.len(), &x)
    });
    bench.each("gate_ngrams", "f32", &shapes, |s| ngrams(bench, &streams, *s));
    bench.each("recall_streams", "f32", &shapes, |s| recalled(bench, &streams, *s));
    Ok(())
}

/// N-grams' keys, queries and values.
fn ngrams(bench: &Bench, streams: &Streams, [tokens, n, n_embd]: Shape) -> Result<()> {
    let len = tokens * n * n_embd;
    let [mut key, query, value] = Random(n_embd as u64).vectors([len, len, tokens * n_embd]);
    // A product of 0.
    key[..n_embd].fill(0.0);
    let (mut key, query, value) = (bench.up(key)?, bench.up(query)?, bench.up(value)?);
    streams.gate_ngrams(&bench.stream, [tokens, n], [key.gpu(), query.gpu()], value.gpu())?;
    bench.cpu.gate_ngrams(tokens, &mut key, &query, &value, false);
    bench.equal(format!("{tokens} tokens, {n}×{n_embd}"), &key)
}

/// The half of a hyper-connection that is compared.
#[derive(Clone, Copy, PartialEq)]
enum Half {
    Join,
    Feed,
}

/// Hyper-connections of the head, of layers, and of layers that mix streams.
fn mixed(bench: &Bench, streams: &Streams, [tokens, n, n_embd]: Shape, part: Half) -> Result<()> {
    let (mut random, stream, magnitude) = (Random((n * n_embd) as u64), &bench.stream, 1.7);
    let scales = bench.up([0.7f32, 1.3, 2.1])?;
    for (width, rounds) in [(n, 0), (2 * n, 0), ((2 + n) * n, 1), ((2 + n) * n, 20)] {
        let what = format!("{tokens} tokens, {n}×{n_embd}, {width} mixes, {rounds} rounds");
        let lengths = [width, tokens * n * n_embd, tokens * n_embd, tokens * width];
        let [bases, mut all, y, mixes] = bench.floats(&mut random, lengths)?;
        let (mut weights, mut out) = (bench.out(mixes.len())?, bench.out(y.len())?);
        let mixing = Mixing { n, scales: &scales, bases: &bases, eps: EPS, magnitude, rounds };
        let (scales, bases) = (scales.gpu(), bases.gpu());
        let device = DeviceMixing { n, scales, bases, eps: EPS, magnitude, rounds };
        streams.join(stream, &device, all.gpu(), [mixes.gpu(), weights.gpu()], out.gpu())?;
        weights.copy_from_slice(&mixes);
        weights.chunks_exact_mut(width).for_each(|mixes| bench.cpu.stream_weights(&mixing, mixes));
        if part == Half::Join {
            bench.cpu.join_streams(&all, &weights, [n, width], &mut out);
            bench.equal(format!("{what}: weights"), &weights)?;
            bench.equal(what, &out)?;
            continue;
        }
        let first = if width > n { n } else { 0 };
        let output = OutputWeights { all: weights.gpu(), width, first };
        streams.feed(stream, n, output, y.gpu(), all.gpu())?;
        if width > n {
            bench.cpu.feed_streams(&mixing, &weights, &y, &mut all);
            bench.equal(what, &all)?;
        } else {
            bench.cpu.add_to_streams(&weights, &y, &mut all);
            bench.equal(format!("{what}: added"), &all)?;
        }
    }
    Ok(())
}

/// Streams with gates of their elements.
fn gated(bench: &Bench, streams: &Streams, norm: &Norm, [tokens, n, n_embd]: Shape) -> Result<()> {
    let (what, stream) = (format!("{tokens} tokens, {n}×{n_embd}"), &bench.stream);
    let len = tokens * n * n_embd;
    let [x, weight, mut gates, mut mixes] =
        bench.seeded(n_embd, [len, n * n_embd, len, tokens * n])?;
    let (mut normed, mut out) = (bench.out(len)?, bench.out(tokens * n_embd)?);
    let weights = bench.empty(4 * mixes.len())?;
    norm.rms_norm_groups_into(stream, x.gpu(), weight.gpu(), n, EPS, normed.gpu())?;
    normed.copy_from_slice(&x);
    bench.cpu.rms_norm_groups(&mut normed, &weight, n, EPS);
    bench.equal(format!("{what}: norms"), &normed)?;
    let (all_weights, sizes) = ([mixes.device.all(), weights.all()], [tokens, n]);
    let plain = GatedStreams { streams: normed.device.all(), gates: None, weights: None };
    let head = GatedStreams { gates: Some(gates.device.all()), ..plain };
    let layer = GatedStreams { weights: Some(all_weights), ..head };
    let mean = vec![1.0 / n as f32; tokens * n];
    streams.join_gated(stream, sizes, &plain, out.gpu())?;
    bench.cpu.join_streams(&normed.host, &mean, [n, n], &mut out);
    bench.equal(format!("{what}: mean"), &out)?;
    streams.join_gated(stream, sizes, &layer, out.gpu())?;
    bench.cpu.sigmoid_gated(&mut normed.host, &mut gates.host);
    mixes.host.iter_mut().for_each(|x| *x /= n as f32);
    bench.cpu.kernels.sigmoid(&mut mixes.host);
    mixes.host.iter_mut().for_each(|x| *x *= 2.0);
    bench.cpu.join_streams(&normed.host, &mean, [n, n], &mut out);
    bench.equal_to(format!("{what}: weights"), &weights, &mixes.host)?;
    bench.equal(what.clone(), &out)?;
    // The head adds nothing.
    streams.join_gated(stream, sizes, &head, out.gpu())?;
    bench.equal(format!("{what}, the head"), &out)
}

/// The present stream and those that were left behind.
fn recalled(bench: &Bench, streams: &Streams, [tokens, n, n_embd]: Shape) -> Result<()> {
    let mut random = Random(n_embd as u64);
    for n in [n, 8 * n] {
        let [sources, weight] = bench.floats(&mut random, [n * tokens * n_embd, n_embd])?;
        let (scores, mut out) = (bench.empty(4 * tokens * n)?, bench.out(tokens * n_embd)?);
        let (from, score) = (sources.gpu(), weight.gpu());
        streams.recall(&bench.stream, from, score, EPS, scores.all(), out.gpu())?;
        let (kept, present) = sources.split_at((n - 1) * tokens * n_embd);
        bench.cpu.recall_streams(kept, present, &weight, EPS, &mut out);
        bench.equal(format!("{tokens} tokens, {n} streams of {n_embd}"), &out)?;
    }
    Ok(())
}
