//! Layers with a recurrence: short convolutions, scans, linear attention with a fixed decay.

use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::scan::Selective;
use crate::backend::ops::{Columns, Scan};
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::scratch::{rows_of, rows_of_mut};
use crate::model::kv::{KvCache, State};
use crate::model::weights::{
    LightningWeights, Linear, Mamba2Weights, MambaWeights, ShortConvWeights,
};
use crate::simd::Floats;
use std::ops::Range;

#[derive(Default)]
pub struct RecurrentBuffers {
    projected: Floats, // [rows, all that the first matrix makes]
    inner: Floats,     // [rows, channels], the convolution's input
    convolved: Floats, // [rows, channels]
    scan: Floats,      // [rows, rank + 2 · states]
    ranks: Floats,     // [rows, rank]
    steps: Floats,     // [rows, channels or heads]
    pasts: Vec<f32>,   // [parts, kernel − 1, channels]
}

impl CpuPass<'_, '_> {
    /// Calls `part` for each text's rows in their order, cut where a copy of the state is wanted,
    /// and then makes it.
    pub(super) fn over_states(
        &mut self,
        l: usize,
        mut part: impl FnMut(&Range<usize>, &mut State),
    ) {
        self.over_parts(|rows, cache, n| {
            part(rows, cache.state_mut(l));
            cache.note_state(l, n);
        });
    }

    /// Goes over the parts without copies; `part` is told the number of its text's positions behind
    /// it.
    pub(super) fn over_parts(&mut self, mut part: impl FnMut(&Range<usize>, &mut KvCache, usize)) {
        for (rows, segment) in self.batch.segments() {
            let cache = &mut *self.caches[segment.session];
            let mut start = rows.start;
            while start < rows.end {
                let n_past = segment.past + start - rows.start;
                let own = start..start + cache.n_to_mark(n_past).min(rows.end - start);
                part(&own, cache, n_past + own.len());
                start = own.end;
            }
        }
    }

    /// out = linear · x, for all rows of the batch
    pub(super) fn product(&self, linear: &Linear, x: &[f32], acts: &mut ActSet, out: &mut Floats) {
        let n = self.batch.n_rows();
        acts.fill(self.cpu, Kinds::of([linear.weight.ty]), n, linear.weight.cols, x);
        self.cpu.products([self.linear(linear, acts, out, n)]);
    }

    /// y = convolution(h) of layer `l`
    pub(super) fn short_conv(
        &mut self,
        l: usize,
        w: &ShortConvWeights,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) {
        let (cpu, n_embd) = (self.cpu, self.model.hyper.n_embd);
        let r = &mut m.recurrent;
        self.product(&w.input, h, &mut m.acts, &mut r.projected);
        let rows = || r.projected.chunks_exact(3 * n_embd);
        r.inner.copy_from(rows().map(|row| &row[..n_embd]));
        for (x, row) in r.inner.chunks_exact_mut(n_embd).zip(rows()) {
            x.iter_mut().zip(&row[2 * n_embd..]).for_each(|(b, x)| *b *= x);
        }
        m.attended.resize(r.inner.len());
        self.over_states(l, |rows, state| {
            let out = rows_of_mut(&mut m.attended, rows, n_embd);
            cpu.short_conv(&w.conv.form(), &mut state.past, rows_of(&r.inner, rows, n_embd), out);
        });
        for (x, row) in
            m.attended.chunks_exact_mut(n_embd).zip(r.projected.chunks_exact(3 * n_embd))
        {
            x.iter_mut().zip(&row[n_embd..]).for_each(|(x, c)| *x *= c);
        }
        self.attention_output(&w.output, m, y);
    }

    /// y = selective scan(h) of layer `l`
    pub(super) fn mamba(
        &mut self,
        l: usize,
        w: &MambaWeights,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) {
        let (cpu, eps) = (self.cpu, self.model.hyper.norm_eps);
        let (channels, rank, n_states) = (w.shape.conv.channels, w.shape.rank, w.shape.n_states);
        let r = &mut m.recurrent;
        self.product(&w.input, h, &mut m.acts, &mut r.projected);
        let rows = || r.projected.chunks_exact(2 * channels);
        r.inner.copy_from(rows().map(|row| &row[..channels]));
        m.gate.copy_from(rows().map(|row| &row[channels..]));
        r.convolved.resize(r.inner.len());
        // What the convolution remembers after each part, as copies of states come with the scan.
        r.pasts.clear();
        self.over_parts(|rows, cache, _| {
            let past = &mut cache.state_mut(l).past;
            let out = rows_of_mut(&mut r.convolved, rows, channels);
            cpu.short_conv(&w.conv.form(), past, rows_of(&r.inner, rows, channels), out);
            r.pasts.extend_from_slice(past);
        });
        // steps, inputs and outputs of the states
        self.product(&w.scan, &r.convolved, &mut m.acts, &mut r.scan);
        let width = rank + 2 * n_states;
        let (inputs, outputs) = (rank..rank + n_states, rank + n_states..width);
        let parts = [0..rank, inputs.clone(), outputs.clone()];
        for row in r.scan.chunks_exact_mut(width) {
            for (part, norm) in parts.iter().zip(&w.norms) {
                cpu.rms_norm_heads(&mut row[part.clone()], norm, eps);
            }
        }
        r.ranks.copy_from(r.scan.chunks_exact(width).map(|row| &row[..rank]));
        self.product(&w.steps, &r.ranks, &mut m.acts, &mut r.steps);
        cpu.softplus(&mut r.steps);
        m.attended.resize(r.inner.len());
        let mut pasts = r.pasts.chunks_exact(w.shape.conv.n_past());
        self.over_states(l, |rows, state| {
            state.past.copy_from_slice(pasts.next().expect("as many parts"));
            let scan = Selective {
                x: rows_of(&r.convolved, rows, channels),
                steps: rows_of(&r.steps, rows, channels),
                rows: rows_of(&r.scan, rows, width),
                width,
                inputs: inputs.clone(),
                outputs: outputs.clone(),
                log_decay: &w.log_decay,
                skip: &w.skip,
            };
            let out = rows_of_mut(&mut m.attended, rows, channels);
            cpu.selective_scan(&scan, &mut state.state, out);
        });
        cpu.silu_gated(&mut m.attended, &m.gate, channels);
        self.attention_output(&w.output, m, y);
    }

    /// y = scan(h) of layer `l`
    pub(super) fn mamba2(
        &mut self,
        l: usize,
        w: &Mamba2Weights,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) {
        let (cpu, eps, shape) = (self.cpu, self.model.hyper.norm_eps, w.shape.scan);
        let (inner, channels) = (shape.width(), w.shape.conv.channels);
        let r = &mut m.recurrent;
        self.product(&w.input, h, &mut m.acts, &mut r.projected);
        let rows = || r.projected.chunks_exact(inner + channels + shape.n_heads);
        m.gate.copy_from(rows().map(|row| &row[..inner]));
        r.inner.copy_from(rows().map(|row| &row[inner..inner + channels]));
        r.steps.copy_from(rows().map(|row| &row[inner + channels..]));
        cpu.steps(&mut r.steps, &w.step_bias);
        r.convolved.resize(r.inner.len());
        m.attended.resize(m.gate.len());
        // heads' values, groups' inputs, groups' outputs
        let of_group = |first| Columns { first, step: shape.k_dim };
        let outputs = of_group(inner + shape.n_groups * shape.k_dim);
        self.over_states(l, |rows, state| {
            let convolved = rows_of_mut(&mut r.convolved, rows, channels);
            let x = rows_of(&r.inner, rows, channels);
            cpu.short_conv(&w.conv.form(), &mut state.past, x, convolved);
            let scan = Scan {
                shape,
                rows: convolved,
                width: channels,
                q: outputs,
                k: of_group(inner),
                v: Columns { first: 0, step: shape.v_dim },
                steps: Some(rows_of(&r.steps, rows, shape.n_heads)),
                log_decay: &w.log_decay,
                skip: Some(&w.skip),
            };
            cpu.scan(&scan, &mut state.state, rows_of_mut(&mut m.attended, rows, inner));
        });
        cpu.silu_gated(&mut m.attended, &m.gate, inner);
        cpu.rms_norm_groups(&mut m.attended, &w.norm, shape.n_groups, eps);
        self.attention_output(&w.output, m, y);
    }

    /// y = linear attention(h) of layer `l`
    pub(super) fn lightning(
        &mut self,
        l: usize,
        w: &LightningWeights,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) {
        let (cpu, eps, shape) = (self.cpu, LightningWeights::NORM_EPS, w.shape);
        let width = 3 * shape.width();
        let n = self.batch.n_rows();
        let r = &mut m.recurrent;
        m.acts.fill(cpu, Kinds::of([w.qkv.weight.ty, w.gate.weight.ty]), n, w.qkv.weight.cols, h);
        cpu.products([
            self.linear(&w.qkv, &m.acts, &mut r.inner, n),
            self.linear(&w.gate, &m.acts, &mut m.gate, n),
        ]);
        r.projected.copy_from(std::iter::once(&r.inner[..]));
        cpu.sigmoid_gated(&mut r.inner, &mut r.projected);
        m.attended.resize(m.gate.len());
        // q, k and v of each head
        let (dim, step) = (shape.v_dim, 3 * shape.v_dim);
        let [q, k, v] = [0, dim, 2 * dim].map(|first| Columns { first, step });
        self.over_states(l, |rows, state| {
            let out = rows_of_mut(&mut m.attended, rows, shape.width());
            let rows = rows_of(&r.inner, rows, width);
            let log_decay = &w.log_decay;
            let scan = Scan { shape, rows, width, q, k, v, steps: None, log_decay, skip: None };
            cpu.scan(&scan, &mut state.state, out);
        });
        cpu.rms_norm_heads(&mut m.attended, &w.norm, eps);
        cpu.sigmoid_gated(&mut m.attended, &mut m.gate);
        self.attention_output(&w.output, m, y);
    }
}
