//! Linear-attention layers: a gated delta rule behind a short convolution.

use crate::backend::cpu::acts::Kinds;
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::scratch::{rows_of, rows_of_mut};
use crate::model::weights::{DeltaWeights, Gates};
use crate::simd::Floats;

#[derive(Default)]
pub struct DeltaBuffers {
    pub qkv: Floats,       // [rows, channels]
    pub convolved: Floats, // [rows, channels]
    gates: [Floats; 2],
    pub beta: Floats,      // [rows, n_v_heads]
    pub log_decay: Floats, // [rows, n_v_heads]
}

impl CpuPass<'_, '_> {
    /// y = delta rule(h) of layer `l`
    pub(super) fn gated_delta(
        &mut self,
        l: usize,
        w: &DeltaWeights,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) {
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        // q, k, v, the output's gate, beta and alpha
        let matrices = [&w.qkv.weight, &w.z.weight].into_iter().chain(w.gates.matrices());
        m.acts.fill(cpu, Kinds::of(matrices.map(|m| m.ty)), n, model.hyper.n_embd, h);
        let d = &mut m.delta;
        cpu.products([
            self.linear(&w.qkv, &m.acts, &mut d.qkv, n),
            self.linear(&w.z, &m.acts, &mut m.gate, n),
        ]);
        let [first, second] = &mut d.gates;
        match &w.gates {
            Gates::Mixed(both) => cpu.products([self.linear(both, &m.acts, first, n)]),
            Gates::Apart { beta, alpha } => cpu.products([
                self.linear(beta, &m.acts, first, n),
                self.linear(alpha, &m.acts, second, n),
            ]),
        }
        d.split(w);
        cpu.kernels.sigmoid(&mut d.beta);
        cpu.log_decays(&mut d.log_decay, &w.dt, &w.a);
        // convolution, recurrence: each text with its own state
        let (channels, n_heads) = (w.shape.channels(), w.shape.n_v_heads);
        d.convolved.resize(d.qkv.len());
        m.attended.resize(n * w.shape.value_width());
        let conv = w.conv_form();
        for (rows, segment) in self.batch.segments() {
            let cache = &mut *self.caches[segment.session];
            let mut start = rows.start;
            while start < rows.end {
                // A copy of the state may be wanted somewhere in between.
                let n_past = segment.past + start - rows.start;
                let part = start..start + cache.n_to_mark(n_past).min(rows.end - start);
                let qkv = rows_of(&d.qkv, &part, channels);
                let convolved = rows_of_mut(&mut d.convolved, &part, channels);
                let gates = [&d.log_decay, &d.beta].map(|gate| rows_of(gate, &part, n_heads));
                let out = rows_of_mut(&mut m.attended, &part, w.shape.value_width());
                let state = cache.state_mut(l);
                cpu.short_conv(&conv, &mut state.past, qkv, convolved);
                cpu.delta_rule(w.shape, convolved, gates.into(), &mut state.state, out);
                cache.note_state(l, n_past + part.len());
                start = part.end;
            }
        }
        // norm, gate, output projection
        let eps = model.hyper.norm_eps;
        if w.sigmoid_gate {
            cpu.rms_norm_heads(&mut m.attended, &w.norm, eps);
            cpu.sigmoid_gated(&mut m.attended, &mut m.gate);
        } else {
            cpu.rms_norm_gated(&mut m.attended, &w.norm, eps, &m.gate);
        }
        self.attention_output(&w.output, m, y);
    }
}

impl DeltaBuffers {
    /// Splits products into betas and alphas, the latter in `log_decay`.
    fn split(&mut self, w: &DeltaWeights) {
        let [first, second] = &mut self.gates;
        match w.gates {
            Gates::Mixed(_) => {
                let group = w.shape.n_v_heads / w.shape.n_k_heads;
                let pairs = || first.chunks_exact(2 * group).map(|pair| pair.split_at(group));
                self.beta.copy_from(pairs().map(|(beta, _)| beta));
                self.log_decay.copy_from(pairs().map(|(_, alpha)| alpha));
            }
            Gates::Apart { .. } => {
                std::mem::swap(&mut self.beta, first);
                std::mem::swap(&mut self.log_decay, second);
            }
        }
    }
}
