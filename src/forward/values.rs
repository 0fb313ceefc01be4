//! Attention's values by experts, in layers that have them: the same tiers hold these experts, by
//! numbers of their own.

use std::time::Instant;

use crate::Result;
use crate::backend::cpu::acts::Kinds;
use crate::backend::cpu::expert::GranuleMats;
use crate::backend::ops::Choice;
use crate::experts::{Acquisition, ExpertStore, LayerPart};
use crate::forward::CpuPass;
use crate::forward::events::{EventBuffers, Routing, nanos_since};
use crate::forward::moe::{self, FfnBuffers};
use crate::forward::scratch::Buffers;
use crate::model::weights::ValueExperts;
use crate::simd::{Floats, MatRef};

impl CpuPass<'_, '_> {
    /// mixer.v = Σ weight · silu(W · h) over the experts that a router chooses
    pub(super) fn make_values(&mut self, b: &mut Buffers, l: usize) -> Result<()> {
        let (model, n) = (self.model, self.batch.n_rows());
        let Some(w) = model.weights.values_of(l) else { return Ok(()) };
        let Buffers { x, h, ffn: f, events: e, mixer, .. } = b;
        let types = w.shape.inputs().chain([w.router.logits.weight.ty]);
        f.acts.fill(self.cpu, Kinds::of(types), n, model.hyper.n_embd, h);
        let choice = Choice { n_groups: 1, n_groups_used: 1, ..model.hyper.routing.choice };
        self.route_by(&w.router, [w.experts.n_experts, w.k], &choice, f);
        f.demand.group(&f.route.chosen, f.route.k, f.route.n_experts);
        let result = self.acquire_values(l, w, [x, h], f, e, &mut mixer.v);
        model.hierarchy.host().release(&mut f.work);
        result
    }

    fn acquire_values(
        &mut self,
        l: usize,
        w: &ValueExperts,
        [x, h]: [&[f32]; 2],
        f: &mut FfnBuffers,
        e: &mut EventBuffers,
        v: &mut Floats,
    ) -> Result<()> {
        let (model, cpu, store) = (self.model, self.cpu, self.model.hierarchy.host());
        let number = model.hyper.tier_layer_of_values(l);
        let FfnBuffers { route, demand, work, expert, granules, acts, .. } = f;
        model.publish_choice_at(self.batch, number, &mut Routing { route, h, x, events: e });
        let access = moe::access(self.batch, demand);
        store.acquire_part(number, LayerPart::whole(&demand.experts), access, work);
        if access.has_prompt() {
            model.prefetch_after(number, demand.experts.len());
        }
        let routing = &mut Routing { route, h, x, events: e };
        model.publish_look_ahead_at(cpu, self.batch, number, routing);
        let start = Instant::now();
        expert.begin(demand.n_pairs(), w.shape.n_ff, w.shape.n_ff, Kinds::default());
        while store.next_ready(work)? {
            let mut list = granules.list();
            list.extend(handed(&**store, work, w, |expert| demand.slot(expert)));
            cpu.gate_up(&list, demand, w.shape.form(), acts, expert);
            granules.recycle(list);
        }
        expert.end_without_down();
        model.sum_expert_inputs(l, Some(&w.experts), demand, acts, expert);
        v.resize(self.batch.n_rows() * w.shape.n_ff);
        v.fill(0.0);
        cpu.ordered_sum(demand, &route.weights, expert, v);
        e.timing.add_experts(nanos_since(start), work.stall_ns());
        Ok(())
    }
}

/// The granules that `work` was handed.
fn handed<'a>(
    store: &'a dyn ExpertStore,
    work: &'a Acquisition,
    w: &ValueExperts,
    slot: impl Fn(u32) -> usize,
) -> impl Iterator<Item = GranuleMats<'a>> {
    let (ty, n_embd) = (w.shape.up, w.shape.n_embd);
    (0..work.n_handed()).map(move |i| {
        let g = store.ready(work, i);
        let up = MatRef::new(ty, g.up, g.rows.len(), n_embd, g.up_stride);
        let down = MatRef::new(ty, &[], 0, 0, 0);
        GranuleMats { slot: slot(g.expert), gate: None, up, down, rows: g.rows }
    })
}
