//! Residual streams on a device: the stages of `forward::streams`. `x` is what a part reads; in a
//! model of one stream it is the stream.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::rows::Columns;
use crate::backend::gpu::streams::{DeviceMixing, GatedStreams, OutputWeights};
use crate::forward::gpu::acts::{GpuActs, RowShape};
use crate::forward::gpu::pack::OnDevice;
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::weights::GpuVector;
use crate::forward::gpu::workspace::{n_left, n_streams};
use crate::model::streams::StreamParams;
use crate::model::weights::{Connection, GatedConnection, Norm, Streams, SubLayer};
use crate::simd::FloatBuffer;
use std::ops::Range;

impl<'a> GpuPass<'a> {
    /// Some of the streams: f32 [tokens, n, n_embd], all of them, or [n, tokens, n_embd] of those
    /// that layers have left behind and, the last one, the present one.
    pub fn streams(&self, range: Range<usize>) -> DeviceSlice<'a> {
        let row = 4 * self.n() * self.hyper().n_embd;
        self.slice(&self.kept().streams).slice(row * range.start..row * range.end)
    }

    /// The present stream behind the mixer of layer `l`.
    fn present(&self, l: usize) -> DeviceSlice<'a> {
        let n = n_left(self.hyper(), l + 1).expect("a model whose layers leave streams behind");
        self.streams(n..n + 1)
    }

    /// Makes several streams of x, before the first layer.
    pub fn begin_streams(&self, l: usize) -> Result<()> {
        if l != self.hyper().decoder_layers().start {
            return Ok(());
        }
        match &self.layer(l).streams[SubLayer::Mixer as usize] {
            Streams::One | Streams::Averaged { .. } | Streams::Weighed { .. } => Ok(()),
            Streams::Mean | Streams::Lagging => Ok(()),
            Streams::Hyper(w) => self.repeat_stream(w.params.n),
            Streams::Gated(w) => self.repeat_stream(w.n),
            Streams::Kept(_) => self.stream().copy(self.streams(0..1), self.x()),
        }
    }

    /// x of a part of layer `l`, of the streams.
    pub fn read_streams(&self, l: usize, part: SubLayer) -> Result<()> {
        let hyper = self.hyper();
        match &self.layer(l).streams[part as usize] {
            Streams::One | Streams::Averaged { .. } | Streams::Weighed { .. } => Ok(()),
            Streams::Mean | Streams::Lagging => Ok(()),
            Streams::Hyper(w) => self.join(w),
            Streams::Gated(w) => self.join_gated(w),
            Streams::Kept(score) => {
                let is_left = l.is_multiple_of(hyper.kept_every);
                let seen = if part == SubLayer::Mixer { l } else { l + 1 };
                let n = n_left(hyper, seen).unwrap_or(0);
                if n > 0 {
                    self.recall(score, n + 1)?;
                }
                match part == SubLayer::Mixer && is_left {
                    true => self.dev.ops.rows.set(self.stream(), self.present(l), 0.0),
                    false => Ok(()),
                }
            }
        }
    }

    /// Each of the `n` streams is x.
    fn repeat_stream(&self, n: usize) -> Result<()> {
        let (rows, n_embd) = (&self.dev.ops.rows, self.hyper().n_embd);
        let (x, all) = (Columns::new(self.x(), n_embd, 0), self.streams(0..n));
        let to = |i| Columns::new(all, n * n_embd, i * n_embd);
        (0..n).try_for_each(|i| rows.copy_columns(self.stream(), x, to(i), n_embd, self.n()))
    }

    /// x = Σ weights · streams
    fn join(&self, w: &Connection<OnDevice>) -> Result<()> {
        let (dev, stream, hyper) = (self.dev, self.stream(), self.hyper());
        let (ops, s, n_rows) = (&dev.ops, &self.layout().streams, self.n());
        let (n, width) = (w.params.n, w.params.n * hyper.n_embd);
        let (all, normed) = (self.streams(0..n), self.words(&s.normed, n_rows * width));
        let ones = self.words(&self.layout().ones, width);
        ops.norm.rms_norm_rows(stream, all, ones, hyper.norm_eps, normed)?;
        let (ty, shape) = (w.mixes.weight.ty, RowShape { n: n_rows, cols: width });
        let acts = GpuActs::fill(ops, stream, [ty], shape, normed, self.slice(&s.acts))?;
        let mixes = [&s.mixes, &s.weights].map(|to| self.words(to, n_rows * w.mixes.weight.rows));
        self.linear(&w.mixes, &acts, mixes[0])?;
        let StreamParams { eps, magnitude, rounds, .. } = w.params;
        let [scales, bases] = [&w.scales, &w.bases].map(|vector| dev.weights.vector(vector));
        let mixing = DeviceMixing { n, scales, bases, eps, magnitude, rounds };
        ops.streams.join(stream, &mixing, all, mixes, self.x())
    }

    /// x = the mean of what gates leave of the streams' norms
    fn join_gated(&self, w: &GatedConnection<OnDevice>) -> Result<()> {
        let (dev, stream, hyper) = (self.dev, self.stream(), self.hyper());
        let (ops, s, n_rows, n) = (&dev.ops, &self.layout().streams, self.n(), w.n);
        let width = n * hyper.n_embd;
        let [normed, gates] = [&s.normed, &s.gates].map(|to| self.words(to, n_rows * width));
        let (all, norm) = (self.streams(0..n), dev.weights.vector(&w.norm));
        ops.norm.rms_norm_groups_into(stream, all, norm, n, hyper.norm_eps, normed)?;
        let types = [&w.down].into_iter().chain(&w.inject).map(|linear| linear.weight.ty);
        let shape = RowShape { n: n_rows, cols: width };
        let acts = GpuActs::fill(ops, stream, types, shape, normed, self.slice(&s.acts))?;
        let rank = w.down.weight.rows;
        let low = self.words(&s.low, n_rows * rank);
        self.linear(&w.down, &acts, low)?;
        ops.streams.mean_silu(stream, low, n)?;
        let (ty, shape) = (w.up.weight.ty, RowShape { n: n_rows, cols: rank });
        let low_acts = GpuActs::fill(ops, stream, [ty], shape, low, self.slice(&s.low_acts))?;
        self.linear(&w.up, &low_acts, gates)?;
        let mut weights = None;
        if let Some(inject) = &w.inject {
            let parts = [&s.mixes, &s.weights].map(|to| self.words(to, n_rows * n));
            self.linear(inject, &acts, parts[0])?;
            weights = Some(parts);
        }
        let gated = GatedStreams { streams: normed, gates: Some(gates), weights };
        ops.streams.join_gated(stream, [n_rows, n], &gated, self.x())
    }

    /// x = the mean of the first `n` streams, those that layers have left behind and the present
    /// one
    fn recall(&self, score: &GpuVector, n: usize) -> Result<()> {
        let score = self.dev.weights.vector(score);
        let scores = self.words(&self.layout().streams.weights, self.n() * n);
        let (sources, eps) = (self.streams(0..n), self.hyper().norm_eps);
        self.dev.ops.streams.recall(self.stream(), sources, score, eps, scores, self.x())
    }

    /// Feeds a part's result y to the streams: x += norm(scale · y), or as the architecture adds.
    /// y and h are overwritten if there is a norm.
    pub fn feed_streams(
        &self,
        l: usize,
        part: SubLayer,
        norm: Option<&Norm<OnDevice>>,
        scale: f32,
    ) -> Result<()> {
        let (ops, stream, n_rows) = (&self.dev.ops.streams, self.stream(), self.n());
        let weights = |width, first| {
            let all = self.words(&self.layout().streams.weights, n_rows * width);
            OutputWeights { all, width, first }
        };
        match &self.layer(l).streams[part as usize] {
            Streams::One | Streams::Mean => self.add_residual(norm, scale),
            Streams::Averaged { stream: factor, part } => {
                let norm = norm.expect("a norm behind each part");
                self.dev.ops.rows.scale(stream, self.x(), *factor)?;
                self.norm(norm, self.y(), self.h())?;
                self.dev.ops.norm.add_scaled(stream, self.x(), *part, self.h())
            }
            Streams::Weighed { .. } | Streams::Lagging => {
                unreachable!("a layer without kernels is on the CPU")
            }
            Streams::Hyper(w) => {
                let (n, width) = (w.params.n, w.mixes.weight.rows);
                ops.feed(stream, n, weights(width, n), self.y(), self.streams(0..n))
            }
            Streams::Gated(w) => {
                ops.feed(stream, w.n, weights(w.n, 0), self.y(), self.streams(0..w.n))
            }
            Streams::Kept(_) => self.dev.ops.rows.add(stream, self.present(l), self.y()),
        }
    }

    /// x of the output norm, behind the last layer.
    pub fn end_streams(&self, l: usize) -> Result<()> {
        let hyper = self.hyper();
        if l + 1 != hyper.n_layers {
            return Ok(());
        }
        match &self.dev.last_streams {
            Streams::One | Streams::Averaged { .. } | Streams::Weighed { .. } => Ok(()),
            Streams::Lagging => unreachable!("a layer without kernels is on the CPU"),
            Streams::Hyper(w) => self.join(w),
            Streams::Gated(w) => self.join_gated(w),
            Streams::Kept(score) => {
                let n = n_left(hyper, hyper.n_layers).unwrap_or(0);
                self.recall(score, n + 1)
            }
            Streams::Mean => {
                let n = n_streams(hyper);
                let all = GatedStreams { streams: self.streams(0..n), gates: None, weights: None };
                let (ops, sizes) = (&self.dev.ops.streams, [self.n(), n]);
                ops.join_gated(self.stream(), sizes, &all, self.x())
            }
        }
    }

    /// The number of streams, besides x, that are all there is before layer `l` or behind the last
    /// one; `None` where x is.
    fn moved_streams(&self, l: usize) -> Option<usize> {
        let hyper = self.hyper();
        if l == hyper.decoder_layers().start || l == hyper.n_layers {
            return None;
        }
        match hyper.streams {
            Some(params) => Some(params.n),
            None => n_left(hyper, l).map(|n| n + 1),
        }
    }

    /// Moves what layer `l` reads to the device.
    pub fn upload_streams(&mut self, l: usize) -> Result<()> {
        let stream = self.stream();
        let Some(n) = self.moved_streams(l) else {
            let x = self.x();
            return self.state.staging.upload(stream, x, &self.b.x, f32::to_le_bytes);
        };
        let all = self.streams(0..n);
        let s = &self.b.streams;
        let kept = if self.hyper().streams.is_some() { &[][..] } else { &s.kept };
        let (first, last) = (4 * kept.len(), all.len());
        let staging = &mut self.state.staging;
        staging.upload_floats(stream, all.slice(0..first), kept)?;
        staging.upload_floats(stream, all.slice(first..last), &s.all)
    }

    /// Moves what layer `l` reads to the CPU.
    pub fn download_streams(&mut self, l: usize) -> Result<()> {
        let (stream, x) = (self.stream(), self.x());
        let Some(n) = self.moved_streams(l) else {
            let to = &mut self.b.x;
            return self.state.staging.download_floats(stream, x, to);
        };
        // What the parts read, which are rows of all tokens.
        self.b.x.with_len(x.count::<f32>());
        let n_kept = if self.hyper().streams.is_some() { 0 } else { n - 1 };
        let (kept, present) = (self.streams(0..n_kept), self.streams(n_kept..n));
        let s = &mut self.b.streams;
        self.state.staging.download_floats(stream, kept, &mut s.kept)?;
        self.state.staging.download_floats(stream, present, &mut s.all)
    }
}
