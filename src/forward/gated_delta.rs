//! Linear-attention layers: a gated delta rule behind a short convolution.

use crate::Result;
use crate::backend::cpu::acts::Kinds;
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::mixer::CpuMixer;
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

impl CpuMixer for DeltaWeights {
    /// y = delta rule(h)
    fn mix(
        &self,
        pass: &mut CpuPass,
        l: usize,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (model, cpu, n) = (pass.model, pass.cpu, pass.batch.n_rows());
        // q, k, v, the output's gate, beta and alpha
        let inputs = [&self.qkv, &self.z].into_iter().chain(self.gates.linears());
        let kinds = Kinds::of(inputs.map(|linear| linear.weight.ty));
        m.acts.fill(cpu, kinds, n, model.hyper.n_embd, h);
        let d = &mut m.delta;
        cpu.products([
            pass.linear(&self.qkv, &m.acts, &mut d.qkv, n),
            pass.linear(&self.z, &m.acts, &mut m.gate, n),
        ]);
        let [first, second] = &mut d.gates;
        match &self.gates {
            Gates::Mixed(both) => cpu.products([pass.linear(both, &m.acts, first, n)]),
            Gates::Apart { beta, alpha } => cpu.products([
                pass.linear(beta, &m.acts, first, n),
                pass.linear(alpha, &m.acts, second, n),
            ]),
        }
        d.split(self);
        cpu.kernels.sigmoid(&mut d.beta);
        cpu.log_decays(&mut d.log_decay, &self.dt, &self.a);
        // convolution, recurrence: each text with its own state
        let (channels, n_heads) = (self.shape.channels(), self.shape.n_v_heads);
        d.convolved.resize(d.qkv.len());
        m.attended.resize(n * self.shape.value_width());
        let conv = self.conv.form();
        for (rows, segment) in pass.batch.segments() {
            let cache = &mut *pass.caches[segment.session];
            let mut start = rows.start;
            while start < rows.end {
                // A copy of the state may be wanted somewhere in between.
                let n_past = segment.past + start - rows.start;
                let part = start..start + cache.n_to_mark(n_past).min(rows.end - start);
                let qkv = rows_of(&d.qkv, &part, channels);
                let convolved = rows_of_mut(&mut d.convolved, &part, channels);
                let gates = [&d.log_decay, &d.beta].map(|gate| rows_of(gate, &part, n_heads));
                let out = rows_of_mut(&mut m.attended, &part, self.shape.value_width());
                let state = cache.state_mut(l);
                cpu.short_conv(&conv, &mut state.past, qkv, convolved);
                cpu.delta_rule(self.shape, convolved, gates.into(), &mut state.state, out);
                cache.note_state(l, n_past + part.len());
                start = part.end;
            }
        }
        // norm, gate, output projection
        let eps = model.hyper.norm_eps;
        if self.sigmoid_gate {
            cpu.rms_norm_heads(&mut m.attended, &self.norm, eps);
            cpu.sigmoid_gated(&mut m.attended, &mut m.gate);
        } else {
            cpu.rms_norm_gated(&mut m.attended, &self.norm, eps, &m.gate);
        }
        pass.attention_output(&self.output, m, y);
        Ok(())
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
