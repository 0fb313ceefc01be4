//! Linear-attention layers with a gated delta rule that forgets each element of a key at its own
//! rate (Kimi Delta Attention, arXiv 2510.26692).

use crate::Result;
use crate::backend::cpu::acts::Kinds;
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::mixer::CpuMixer;
use crate::forward::scratch::{rows_of, rows_of_mut};
use crate::model::weights::KdaWeights;
use crate::simd::Floats;

#[derive(Default)]
pub struct KdaBuffers {
    parts: [Floats; 3], // [rows, n_heads, head_dim] each: q, k and v
    ranks: [Floats; 2], // [rows, rank] each: of decay and gate
}

impl CpuMixer for KdaWeights {
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
        let (d, width, n_heads) = (&mut m.delta, self.shape.key_width(), self.shape.n_v_heads);
        // q, k, v, beta and the first parts of decay and gate
        let inputs = self.qkv.iter().chain([&self.beta, &self.decay.first, &self.gate.first]);
        let kinds = Kinds::of(inputs.map(|linear| linear.weight.ty));
        m.acts.fill(cpu, kinds, n, model.hyper.n_embd, h);
        let ([q, k, v], [decay, gate]) = (&mut m.kda.parts, &mut m.kda.ranks);
        cpu.products([
            pass.linear(&self.qkv[0], &m.acts, q, n),
            pass.linear(&self.qkv[1], &m.acts, k, n),
            pass.linear(&self.qkv[2], &m.acts, v, n),
        ]);
        cpu.products([
            pass.linear(&self.beta, &m.acts, &mut d.beta, n),
            pass.linear(&self.decay.first, &m.acts, decay, n),
            pass.linear(&self.gate.first, &m.acts, gate, n),
        ]);
        let parts = q.chunks_exact(width).zip(k.chunks_exact(width)).zip(v.chunks_exact(width));
        d.qkv.copy_from(parts.flat_map(|((q, k), v)| [q, k, v]));
        for (projection, first, out) in
            [(&self.decay, decay, &mut d.log_decay), (&self.gate, gate, &mut m.gate)]
        {
            match &projection.second {
                Some(second) => pass.product(second, first, &mut m.acts, out),
                None => std::mem::swap(first, out),
            }
        }
        cpu.kernels.sigmoid(&mut d.beta);
        cpu.element_decays(&mut d.log_decay, &self.dt, &self.a, self.bound);
        // convolution, recurrence: each text with its own state
        let channels = self.shape.channels();
        d.convolved.resize(d.qkv.len());
        m.attended.resize(n * width);
        pass.over_states(l, |rows, state| {
            let convolved = rows_of_mut(&mut d.convolved, rows, channels);
            let qkv = rows_of(&d.qkv, rows, channels);
            cpu.short_conv(&self.conv.form(), &mut state.past, qkv, convolved);
            let gates = (rows_of(&d.log_decay, rows, width), rows_of(&d.beta, rows, n_heads));
            let out = rows_of_mut(&mut m.attended, rows, width);
            cpu.delta_rule(self.shape, convolved, gates, &mut state.state, out);
        });
        // norm, gate, output projection
        cpu.rms_norm_heads(&mut m.attended, &self.norm, model.hyper.norm_eps);
        cpu.sigmoid_gated(&mut m.attended, &mut m.gate);
        pass.attention_output(&self.output, m, y);
        Ok(())
    }
}
