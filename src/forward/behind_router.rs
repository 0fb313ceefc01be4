//! Parts around the routed experts of some layers: matrices that make their input narrow and
//! their sum wide again, and small experts behind them.

use crate::Result;
use crate::backend::cpu::acts::Kinds;
use crate::backend::ops::ExpertShape;
use crate::forward::CpuPass;
use crate::forward::moe::FfnBuffers;
use crate::model::weights::{Adjugate, Latent};
use crate::simd::Floats;

impl CpuPass<'_, '_> {
    /// The forms of h → the forms of down · h that experts read.
    pub(super) fn narrow(&self, latent: &Latent, expert: &ExpertShape, f: &mut FfnBuffers) {
        let n = self.batch.n_rows();
        self.cpu.products([self.model.linear(&latent.down, &f.acts, &mut f.latent, n)]);
        if let Some(norm) = &latent.input_norm {
            self.cpu.rms_norm_heads(&mut f.latent, norm, self.model.hyper.norm_eps);
        }
        f.acts.fill(self.cpu, Kinds::of(expert.inputs()), n, expert.n_embd, &f.latent);
    }

    /// y += up · norm(Σ weights · chosen experts)
    pub(super) fn widen(&self, latent: &Latent, f: &mut FfnBuffers, y: &mut Floats) {
        let (cpu, n) = (self.cpu, self.batch.n_rows());
        f.latent.fill(0.0);
        cpu.ordered_sum(&f.demand, &f.route.weights, &f.expert, &mut f.latent);
        if let Some(norm) = &latent.norm {
            cpu.rms_norm_heads(&mut f.latent, norm, self.model.hyper.norm_eps);
        }
        let up = &latent.up;
        f.acts.fill(cpu, Kinds::of([up.weight.ty]), n, up.weight.cols, &f.latent);
        cpu.products([self.model.linear(up, &f.acts, &mut f.wide, n)]);
        cpu.add(y, &f.wide);
    }

    /// y += scale · Σ weights · adjugate experts(y). A token's are those of its best experts'
    /// groups. As llama.cpp has it, their weights are the probabilities of the experts with the
    /// groups' numbers.
    pub(super) fn adjugate(
        &self,
        l: usize,
        a: &Adjugate,
        f: &mut FfnBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let scale = a.scale * self.model.hyper.routing.choice.scale;
        f.groups.clear();
        f.only_gate.clear();
        f.route.groups(a.k, a.group, scale, &mut f.groups, &mut f.only_gate);
        f.only_demand.group(&f.groups, a.k, a.n_experts);
        let n = self.batch.n_rows();
        f.acts.fill(self.cpu, Kinds::of(a.shape.inputs()), n, a.shape.n_embd, y);
        self.resident_experts(l, &self.model.dense, &a.shape, a.shape.form(), f, y)
    }
}
