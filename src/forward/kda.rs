//! Linear-attention layers with a gated delta rule that forgets each element of a key at its own
//! rate (Kimi Delta Attention, arXiv 2510.26692).

use crate::backend::cpu::acts::Kinds;
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::scratch::{rows_of, rows_of_mut};
use crate::model::weights::KdaWeights;
use crate::simd::Floats;

#[derive(Default)]
pub struct KdaBuffers {
    parts: [Floats; 3], // [rows, n_heads, head_dim] each: q, k and v
    ranks: [Floats; 2], // [rows, rank] each: of decay and gate
}

impl CpuPass<'_, '_> {
    /// y = delta rule(h) of layer `l`
    pub(super) fn kda(
        &mut self,
        l: usize,
        w: &KdaWeights,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) {
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        let (d, width, n_heads) = (&mut m.delta, w.shape.key_width(), w.shape.n_v_heads);
        // q, k, v, beta and the first parts of decay and gate
        let inputs = w.qkv.iter().chain([&w.beta, &w.decay.first, &w.gate.first]);
        let kinds = Kinds::of(inputs.map(|linear| linear.weight.ty));
        m.acts.fill(cpu, kinds, n, model.hyper.n_embd, h);
        let ([q, k, v], [decay, gate]) = (&mut m.kda.parts, &mut m.kda.ranks);
        cpu.products([
            self.linear(&w.qkv[0], &m.acts, q, n),
            self.linear(&w.qkv[1], &m.acts, k, n),
            self.linear(&w.qkv[2], &m.acts, v, n),
        ]);
        cpu.products([
            self.linear(&w.beta, &m.acts, &mut d.beta, n),
            self.linear(&w.decay.first, &m.acts, decay, n),
            self.linear(&w.gate.first, &m.acts, gate, n),
        ]);
        let parts = q.chunks_exact(width).zip(k.chunks_exact(width)).zip(v.chunks_exact(width));
        d.qkv.copy_from(parts.flat_map(|((q, k), v)| [q, k, v]));
        for (projection, first, out) in
            [(&w.decay, decay, &mut d.log_decay), (&w.gate, gate, &mut m.gate)]
        {
            match &projection.second {
                Some(second) => self.product(second, first, &mut m.acts, out),
                None => std::mem::swap(first, out),
            }
        }
        cpu.kernels.sigmoid(&mut d.beta);
        cpu.element_decays(&mut d.log_decay, &w.dt, &w.a, w.bound);
        // convolution, recurrence: each text with its own state
        let channels = w.shape.channels();
        d.convolved.resize(d.qkv.len());
        m.attended.resize(n * width);
        self.over_states(l, |rows, state| {
            let convolved = rows_of_mut(&mut d.convolved, rows, channels);
            let qkv = rows_of(&d.qkv, rows, channels);
            cpu.short_conv(&w.conv.form(), &mut state.past, qkv, convolved);
            let gates = (rows_of(&d.log_decay, rows, width), rows_of(&d.beta, rows, n_heads));
            let out = rows_of_mut(&mut m.attended, rows, width);
            cpu.delta_rule(w.shape, convolved, gates, &mut state.state, out);
        });
        // norm, gate, output projection
        cpu.rms_norm_heads(&mut m.attended, &w.norm, model.hyper.norm_eps);
        cpu.sigmoid_gated(&mut m.attended, &mut m.gate);
        self.attention_output(&w.output, m, y);
    }
}
