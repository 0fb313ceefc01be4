//! How the parts of a layer read the residual streams and feed them. `x` is what a part reads; in a
//! model of one stream it is the stream.

use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::forward::CpuPass;
use crate::model::weights::{Connection, GatedConnection, Streams, SubLayer};
use crate::simd::Floats;

#[derive(Default)]
pub struct StreamBuffers {
    pub all: Floats,    // [rows, n, n_embd], or [rows, n_embd] of the present one
    ones: Vec<f32>,     // the weight of the streams' norm
    normed: Floats,     // as `all`
    acts: ActSet,       // the normed ones in the form that mixes read
    mixes: Floats,      // [rows, mixes], as weights
    lagging: Floats,    // [rows, n], weights by which the next part reads
    pub kept: Vec<f32>, // [kept, rows, n_embd]
    gates: Floats,      // as `all`
    low: [Floats; 2],   // [rows, what gates are made of]
    low_acts: ActSet,
}

impl CpuPass<'_, '_> {
    /// x → all streams, before the first layer
    pub(super) fn begin_streams(&self, l: usize, x: &[f32], s: &mut StreamBuffers) {
        let hyper = &self.model.hyper;
        let own = &self.model.weights.layers[l].streams[SubLayer::Mixer as usize];
        let is_first = l == hyper.decoder_layers().start;
        let is_many = matches!(own, Streams::Hyper(_) | Streams::Gated(_));
        if let Some(params) = hyper.streams.filter(|_| is_first && is_many) {
            let rows = x.chunks_exact(hyper.n_embd);
            s.all.copy_from(rows.flat_map(|x| std::iter::repeat_n(x, params.n)));
            // The first part reads the first stream.
            s.lagging.resize(self.batch.n_rows() * params.n);
            let weights = s.lagging.iter_mut().enumerate();
            weights.for_each(|(i, w)| *w = if i % params.n == 0 { 1.0 } else { 0.0 });
        }
    }

    /// streams → x of part `part` of layer `l`
    pub(super) fn read_streams(
        &self,
        l: usize,
        part: SubLayer,
        s: &mut StreamBuffers,
        x: &mut [f32],
    ) {
        let model = self.model;
        let is_first = l == model.hyper.decoder_layers().start && part == SubLayer::Mixer;
        match &model.weights.layers[l].streams[part as usize] {
            Streams::One | Streams::Averaged { .. } | Streams::Weighed { .. } => {}
            Streams::Mean | Streams::Lagging => {}
            Streams::Hyper(connection) => self.join(connection, s, x),
            Streams::Gated(connection) => self.join_gated(connection, s, x),
            Streams::Kept(score) => {
                if is_first {
                    s.all.copy_from(std::iter::once(&x[..]));
                    s.kept.clear();
                }
                if !s.kept.is_empty() {
                    let eps = model.hyper.norm_eps;
                    self.cpu.recall_streams(&s.kept, &s.all, score, eps, x);
                } else {
                    x.copy_from_slice(&s.all);
                }
                if part == SubLayer::Mixer && l.is_multiple_of(model.hyper.kept_every) {
                    s.kept.extend_from_slice(&s.all);
                    s.all.fill(0.0);
                }
            }
        }
    }

    /// x = Σ weights · streams
    fn join(&self, connection: &Connection, s: &mut StreamBuffers, x: &mut [f32]) {
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        let (mixes, mixing) = (&connection.mixes, connection.mixing());
        s.normed.resize(s.all.len());
        s.ones.resize(mixes.weight.cols, 1.0);
        cpu.rms_norm_rows(&s.all, &s.ones, model.hyper.norm_eps, &mut s.normed);
        let acts = &mut s.acts;
        acts.fill(cpu, Kinds::of([mixes.weight.ty]), n, mixes.weight.cols, &s.normed);
        cpu.products([model.linear(mixes, acts, &mut s.mixes, n)]);
        let width = mixing.width();
        s.mixes.chunks_exact_mut(width).for_each(|mixes| cpu.stream_weights(&mixing, mixes));
        if !connection.params.lags {
            return cpu.join_streams(&s.all, &s.mixes, [mixing.n, width], x);
        }
        cpu.join_streams(&s.all, &s.lagging, [mixing.n, mixing.n], x);
        s.lagging.copy_from(s.mixes.chunks_exact(width).map(|mixes| &mixes[..mixing.n]));
    }

    /// x = the mean of what gates leave of the streams' norms
    fn join_gated(&self, connection: &GatedConnection, s: &mut StreamBuffers, x: &mut [f32]) {
        let (model, cpu, n_rows) = (self.model, self.cpu, self.batch.n_rows());
        let GatedConnection { n, norm, down, up, inject } = connection;
        s.normed.copy_from(std::iter::once(&s.all[..]));
        cpu.rms_norm_groups(&mut s.normed, norm, *n, model.hyper.norm_eps);
        let kinds = Kinds::of([down].into_iter().chain(inject).map(|linear| linear.weight.ty));
        s.acts.fill(cpu, kinds, n_rows, down.weight.cols, &s.normed);
        let [low, low_gate] = &mut s.low;
        cpu.products([model.linear(down, &s.acts, low, n_rows)]);
        low.iter_mut().for_each(|x| *x /= *n as f32);
        low_gate.copy_from(std::iter::once(&low[..]));
        cpu.sigmoid_gated(low, low_gate);
        self.product(up, low, &mut s.low_acts, &mut s.gates);
        cpu.sigmoid_gated(&mut s.normed, &mut s.gates);
        if let Some(inject) = inject {
            cpu.products([model.linear(inject, &s.acts, &mut s.mixes, n_rows)]);
            s.mixes.iter_mut().for_each(|x| *x /= *n as f32);
            cpu.kernels.sigmoid(&mut s.mixes);
            s.mixes.iter_mut().for_each(|x| *x *= 2.0);
        }
        let mean = vec![1.0 / *n as f32; n_rows * n];
        cpu.join_streams(&s.normed, &mean, [*n, *n], x);
    }

    /// y, a part's result → streams: x += norm(scale · y), or as the architecture adds. y and h are
    /// overwritten if there is a norm.
    pub(super) fn feed_streams(
        &self,
        l: usize,
        part: SubLayer,
        [y, h]: [&mut [f32]; 2],
        s: &mut StreamBuffers,
        x: &mut [f32],
    ) {
        let layer = &self.model.weights.layers[l];
        match &layer.streams[part as usize] {
            Streams::One | Streams::Mean | Streams::Lagging => {
                let (norm, scale) = layer.post(part);
                self.model.add_to_stream(self.cpu, norm, scale, [y, h], x);
            }
            Streams::Averaged { stream, part: factor } => {
                x.iter_mut().for_each(|x| *x *= stream);
                self.model.norm(self.cpu, layer.norm_behind(part), y, h);
                self.cpu.add_scaled(x, *factor, h);
            }
            Streams::Weighed { stream, part: factors } => {
                self.model.norm(self.cpu, layer.norm_behind(part), y, h);
                let rows = x.chunks_exact_mut(stream.len()).zip(h.chunks_exact(stream.len()));
                for (x, h) in rows {
                    let factors = stream.iter().zip(factors);
                    let both = x.iter_mut().zip(h).zip(factors);
                    both.for_each(|((x, h), (stream, part))| *x = *x * stream + h * part);
                }
            }
            Streams::Hyper(connection) => {
                self.cpu.feed_streams(&connection.mixing(), &s.mixes, y, &mut s.all);
            }
            Streams::Gated(_) => self.cpu.add_to_streams(&s.mixes, y, &mut s.all),
            Streams::Kept(_) => self.cpu.add(&mut s.all, y),
        }
    }

    /// streams → x of the output norm, behind the last layer
    pub(super) fn end_streams(&self, l: usize, s: &mut StreamBuffers, x: &mut [f32]) {
        let model = self.model;
        if l + 1 != model.hyper.n_layers {
            return;
        }
        match &model.weights.last_streams {
            Streams::One | Streams::Averaged { .. } | Streams::Weighed { .. } => {}
            Streams::Hyper(connection) => self.join(connection, s, x),
            Streams::Gated(connection) => self.join_gated(connection, s, x),
            Streams::Lagging => {
                let n = s.all.len() / x.len();
                self.cpu.join_streams(&s.all, &s.lagging, [n, n], x);
            }
            Streams::Mean => {
                let n = s.all.len() / x.len();
                s.mixes.resize(x.len() / model.hyper.n_embd * n);
                s.mixes.fill(1.0 / n as f32);
                self.cpu.join_streams(&s.all, &s.mixes, [n, n], x);
            }
            Streams::Kept(score) => {
                self.cpu.recall_streams(&s.kept, &s.all, score, model.hyper.norm_eps, x);
            }
        }
    }
}
