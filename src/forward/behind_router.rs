//! Parts around the routed experts of some layers: matrices that make their input narrow and
//! their sum wide again, and small experts behind them.

use crate::Result;
use crate::backend::cpu::acts::Kinds;
use crate::backend::ops::ExpertShape;
use crate::forward::{Buffers, CpuPass};
use crate::model::weights::{Adjugate, Latent};

impl CpuPass<'_, '_> {
    /// The forms of h → the forms of down · h that experts read.
    pub(super) fn narrow(&self, latent: &Latent, expert: &ExpertShape, b: &mut Buffers) {
        let n = self.batch.n_rows();
        self.cpu.products([self.model.linear(&latent.down, &b.acts, &mut b.ffn.latent, n)]);
        b.acts.fill(self.cpu, Kinds::of(expert.inputs()), n, expert.n_embd, &b.ffn.latent);
    }

    /// y += up · norm(Σ weights · chosen experts)
    pub(super) fn widen(&self, latent: &Latent, b: &mut Buffers) {
        let (cpu, n, f) = (self.cpu, self.batch.n_rows(), &mut b.ffn);
        f.latent.fill(0.0);
        cpu.ordered_sum(&f.demand, &b.route.weights, &f.expert, &mut f.latent);
        if let Some(norm) = &latent.norm {
            cpu.rms_norm_heads(&mut f.latent, norm, self.model.hyper.norm_eps);
        }
        let up = &latent.up;
        b.acts.fill(cpu, Kinds::of([up.weight.ty]), n, up.weight.cols, &f.latent);
        cpu.products([self.model.linear(up, &b.acts, &mut b.branch, n)]);
        cpu.add(&mut b.y, &b.branch);
    }

    /// y += scale · Σ weights · adjugate experts(y). A token's are those of its best experts'
    /// groups. As llama.cpp has it, their weights are the probabilities of the experts with the
    /// groups' numbers.
    pub(super) fn adjugate(&self, l: usize, a: &Adjugate, b: &mut Buffers) -> Result<()> {
        let (n, route, f) = (self.batch.n_rows(), &b.route, &mut b.ffn);
        let scale = a.scale * self.model.hyper.routing.choice.scale;
        f.groups.clear();
        f.only_gate.clear();
        route.groups(a.k, a.group, scale, &mut f.groups, &mut f.only_gate);
        f.only_demand.group(&f.groups, a.k, a.n_experts);
        b.acts.fill(self.cpu, Kinds::of(a.shape.inputs()), n, a.shape.n_embd, &b.y);
        self.resident_experts(l, &self.model.dense, &a.shape, a.shape.form(), b)
    }
}
