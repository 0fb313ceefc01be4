//! Linear-attention layers: a gated delta rule behind a short convolution.

use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::forward::Buffers;
use crate::model::Model;
use crate::model::kv::KvCache;
use crate::model::weights::{DeltaWeights, Gates};
use crate::simd::Floats;

/// What such a layer needs for itself.
#[derive(Default)]
pub struct DeltaBuffers {
    qkv: Floats,       // [tokens, channels]
    convolved: Floats, // [tokens, channels]
    gates: [Floats; 2],
    beta: Floats,      // [tokens, n_v_heads]
    log_decay: Floats, // [tokens, n_v_heads]
}

impl Model {
    /// h → y
    pub(super) fn delta_rule(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        l: usize,
        w: &DeltaWeights,
    ) {
        let n = b.h.len() / self.hyper.n_embd;
        // q, k, v, the output's gate, beta and alpha
        let matrices = [&w.qkv.weight, &w.z.weight].into_iter().chain(w.gates.matrices());
        b.acts.fill(cpu, Kinds::of(matrices.map(|m| m.ty)), n, self.hyper.n_embd, &b.h);
        let m = &mut b.mixer;
        let d = &mut m.delta;
        cpu.products([
            self.linear(&w.qkv, &b.acts, &mut d.qkv, n),
            self.linear(&w.z, &b.acts, &mut m.gate, n),
        ]);
        let [first, second] = &mut d.gates;
        match &w.gates {
            Gates::Mixed(both) => cpu.products([self.linear(both, &b.acts, first, n)]),
            Gates::Apart { beta, alpha } => cpu.products([
                self.linear(beta, &b.acts, first, n),
                self.linear(alpha, &b.acts, second, n),
            ]),
        }
        d.split(w);
        cpu.kernels.sigmoid(&mut d.beta);
        cpu.log_decays(&mut d.log_decay, &w.dt, &w.a);
        // convolution, recurrence
        let memory = kv.delta_mut(l);
        d.convolved.resize(d.qkv.len());
        cpu.short_conv(w.shape, &w.conv, &mut memory.past, &d.qkv, &mut d.convolved);
        m.attended.resize(n * w.shape.value_width());
        let gates = (&d.log_decay[..], &d.beta[..]);
        cpu.delta_rule(w.shape, &d.convolved, gates, &mut memory.state, &mut m.attended);
        // norm, gate, output projection
        cpu.rms_norm_gated(&mut m.attended, &w.norm, self.hyper.norm_eps, &m.gate);
        self.attention_output(cpu, b, &w.output, n);
    }
}

impl DeltaBuffers {
    /// Products to betas and alphas, the latter in `log_decay`.
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
