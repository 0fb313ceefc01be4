//! Layers with a recurrence: short convolutions, scans, linear attention with a fixed decay.

use crate::Result;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::scan::Selective;
use crate::backend::ops::{Columns, Scan};
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::mixer::CpuMixer;
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

impl CpuMixer for ShortConvWeights {
    /// y = convolution(h)
    fn mix(
        &self,
        pass: &mut CpuPass,
        l: usize,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (cpu, n_embd) = (pass.cpu, pass.model.hyper.n_embd);
        let r = &mut m.recurrent;
        pass.product(&self.input, h, &mut m.acts, &mut r.projected);
        let rows = || r.projected.chunks_exact(3 * n_embd);
        r.inner.copy_from(rows().map(|row| &row[..n_embd]));
        for (x, row) in r.inner.chunks_exact_mut(n_embd).zip(rows()) {
            x.iter_mut().zip(&row[2 * n_embd..]).for_each(|(b, x)| *b *= x);
        }
        m.attended.resize(r.inner.len());
        pass.over_states(l, |rows, state| {
            let out = rows_of_mut(&mut m.attended, rows, n_embd);
            cpu.short_conv(
                &self.conv.form(),
                &mut state.past,
                rows_of(&r.inner, rows, n_embd),
                out,
            );
        });
        for (x, row) in
            m.attended.chunks_exact_mut(n_embd).zip(r.projected.chunks_exact(3 * n_embd))
        {
            x.iter_mut().zip(&row[n_embd..]).for_each(|(x, c)| *x *= c);
        }
        pass.attention_output(&self.output, m, y);
        Ok(())
    }
}

impl CpuMixer for MambaWeights {
    /// y = selective scan(h)
    fn mix(
        &self,
        pass: &mut CpuPass,
        l: usize,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (cpu, eps) = (pass.cpu, pass.model.hyper.norm_eps);
        let (channels, rank, n_states) =
            (self.shape.conv.channels, self.shape.rank, self.shape.n_states);
        let r = &mut m.recurrent;
        pass.product(&self.input, h, &mut m.acts, &mut r.projected);
        let rows = || r.projected.chunks_exact(2 * channels);
        r.inner.copy_from(rows().map(|row| &row[..channels]));
        m.gate.copy_from(rows().map(|row| &row[channels..]));
        r.convolved.resize(r.inner.len());
        // What the convolution remembers after each part, as copies of states come with the scan.
        r.pasts.clear();
        pass.over_parts(|rows, cache, _| {
            let past = &mut cache.state_mut(l).past;
            let out = rows_of_mut(&mut r.convolved, rows, channels);
            cpu.short_conv(&self.conv.form(), past, rows_of(&r.inner, rows, channels), out);
            r.pasts.extend_from_slice(past);
        });
        // steps, inputs and outputs of the states
        pass.product(&self.scan, &r.convolved, &mut m.acts, &mut r.scan);
        let width = rank + 2 * n_states;
        let (inputs, outputs) = (rank..rank + n_states, rank + n_states..width);
        let parts = [0..rank, inputs.clone(), outputs.clone()];
        for row in r.scan.chunks_exact_mut(width) {
            for (part, norm) in parts.iter().zip(&self.norms) {
                cpu.rms_norm_heads(&mut row[part.clone()], norm, eps);
            }
        }
        r.ranks.copy_from(r.scan.chunks_exact(width).map(|row| &row[..rank]));
        pass.product(&self.steps, &r.ranks, &mut m.acts, &mut r.steps);
        cpu.softplus(&mut r.steps);
        m.attended.resize(r.inner.len());
        let mut pasts = r.pasts.chunks_exact(self.shape.conv.n_past());
        pass.over_states(l, |rows, state| {
            state.past.copy_from_slice(pasts.next().expect("as many parts"));
            let scan = Selective {
                x: rows_of(&r.convolved, rows, channels),
                steps: rows_of(&r.steps, rows, channels),
                rows: rows_of(&r.scan, rows, width),
                width,
                inputs: inputs.clone(),
                outputs: outputs.clone(),
                log_decay: &self.log_decay,
                skip: &self.skip,
            };
            let out = rows_of_mut(&mut m.attended, rows, channels);
            cpu.selective_scan(&scan, &mut state.state, out);
        });
        cpu.silu_gated(&mut m.attended, &m.gate, channels);
        pass.attention_output(&self.output, m, y);
        Ok(())
    }
}

impl CpuMixer for Mamba2Weights {
    /// y = scan(h)
    fn mix(
        &self,
        pass: &mut CpuPass,
        l: usize,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (cpu, eps, shape) = (pass.cpu, pass.model.hyper.norm_eps, self.shape.scan);
        let (inner, channels) = (shape.width(), self.shape.conv.channels);
        let r = &mut m.recurrent;
        pass.product(&self.input, h, &mut m.acts, &mut r.projected);
        let rows = || r.projected.chunks_exact(inner + channels + shape.n_heads);
        m.gate.copy_from(rows().map(|row| &row[..inner]));
        r.inner.copy_from(rows().map(|row| &row[inner..inner + channels]));
        r.steps.copy_from(rows().map(|row| &row[inner + channels..]));
        cpu.steps(&mut r.steps, &self.step_bias);
        r.convolved.resize(r.inner.len());
        m.attended.resize(m.gate.len());
        // heads' values, groups' inputs, groups' outputs
        let of_group = |first| Columns { first, step: shape.k_dim };
        let outputs = of_group(inner + shape.n_groups * shape.k_dim);
        pass.over_states(l, |rows, state| {
            let convolved = rows_of_mut(&mut r.convolved, rows, channels);
            let x = rows_of(&r.inner, rows, channels);
            cpu.short_conv(&self.conv.form(), &mut state.past, x, convolved);
            let scan = Scan {
                shape,
                rows: convolved,
                width: channels,
                q: outputs,
                k: of_group(inner),
                v: Columns { first: 0, step: shape.v_dim },
                steps: Some(rows_of(&r.steps, rows, shape.n_heads)),
                log_decay: &self.log_decay,
                skip: Some(&self.skip),
            };
            cpu.scan(&scan, &mut state.state, rows_of_mut(&mut m.attended, rows, inner));
        });
        cpu.silu_gated(&mut m.attended, &m.gate, inner);
        cpu.rms_norm_groups(&mut m.attended, &self.norm, shape.n_groups, eps);
        pass.attention_output(&self.output, m, y);
        Ok(())
    }
}

impl CpuMixer for LightningWeights {
    /// y = linear attention(h)
    fn mix(
        &self,
        pass: &mut CpuPass,
        l: usize,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (cpu, eps, shape) = (pass.cpu, LightningWeights::NORM_EPS, self.shape);
        let width = 3 * shape.width();
        let n = pass.batch.n_rows();
        let r = &mut m.recurrent;
        m.acts.fill(
            cpu,
            Kinds::of([self.qkv.weight.ty, self.gate.weight.ty]),
            n,
            self.qkv.weight.cols,
            h,
        );
        cpu.products([
            pass.linear(&self.qkv, &m.acts, &mut r.inner, n),
            pass.linear(&self.gate, &m.acts, &mut m.gate, n),
        ]);
        r.projected.copy_from(std::iter::once(&r.inner[..]));
        cpu.sigmoid_gated(&mut r.inner, &mut r.projected);
        m.attended.resize(m.gate.len());
        // q, k and v of each head
        let (dim, step) = (shape.v_dim, 3 * shape.v_dim);
        let [q, k, v] = [0, dim, 2 * dim].map(|first| Columns { first, step });
        pass.over_states(l, |rows, state| {
            let out = rows_of_mut(&mut m.attended, rows, shape.width());
            let rows = rows_of(&r.inner, rows, width);
            let log_decay = &self.log_decay;
            let scan = Scan { shape, rows, width, q, k, v, steps: None, log_decay, skip: None };
            cpu.scan(&scan, &mut state.state, out);
        });
        cpu.rms_norm_heads(&mut m.attended, &self.norm, eps);
        cpu.sigmoid_gated(&mut m.attended, &mut m.gate);
        pass.attention_output(&self.output, m, y);
        Ok(())
    }
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
}
