//! The feed-forward part of a layer: router, routed experts, shared expert, dense branch.

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::backend::cpu::expert::{ExpertBuffers, GranuleMats};
use crate::backend::ops::{Demand, ExpertShape};
use crate::cancel::Cancel;
use crate::experts::{Access, Acquisition, ExpertStore, Resident, prefetch_pays};
use crate::forward::Buffers;
use crate::forward::events::{Pass, nanos_since};
use crate::model::Model;
use crate::model::weights::{DenseBranch, FfnWeights, Gate, SharedExpert};
use crate::policy::Phase;
use crate::simd::MatRef;
use std::time::Instant;

/// What the feed-forward part needs for itself.
#[derive(Default)]
pub struct FfnBuffers {
    demand: Demand,
    pub work: Acquisition,
    pub expert: ExpertBuffers,
    /// Of an expert that every token goes to.
    only_demand: Demand,
    only_work: Acquisition,
    only_gate: Vec<f32>, // [tokens]
    pub granules: GranuleRoom,
}

impl Buffers {
    /// Waits for experts end once `cancel` is set, from the next pass on.
    pub(crate) fn set_cancel(&mut self, cancel: &Cancel) {
        self.ffn.work.cancel = cancel.clone();
    }
}

/// Room for a list of granules, empty between lists.
#[derive(Default)]
pub struct GranuleRoom(Vec<GranuleMats<'static>>);

impl GranuleRoom {
    /// An empty list in this room. Whoever is done with it gives the room back.
    pub fn list<'a>(&mut self) -> Vec<GranuleMats<'a>> {
        emptied(std::mem::take(&mut self.0))
    }

    pub fn give_back(&mut self, list: Vec<GranuleMats>) {
        self.0 = emptied(list);
    }
}

/// The room of a list for one that borrows from elsewhere. The standard library collects into the
/// room that the elements come from, where these are of one size; tests/token_loop.rs fails if it
/// ceases to.
fn emptied<'a>(mut list: Vec<GranuleMats>) -> Vec<GranuleMats<'a>> {
    list.clear();
    list.into_iter().map(|_| unreachable!("the list is empty")).collect()
}

impl Model {
    pub(super) fn route(&self, cpu: &Cpu, b: &mut Buffers, ffn: &FfnWeights, n: usize) {
        let Gate::Router(router) = &ffn.gate else { return b.route.dense(n) };
        let routing = &self.hyper.routing;
        (b.route.n_experts, b.route.k) = (routing.n_experts, routing.k);
        cpu.products([self.linear(&router.logits, &b.acts, &mut b.route.probs, n)]);
        cpu.route(&mut b.route, &routing.choice, router.choice_bias.as_deref());
        if let Some(capacity) = routing.capacity {
            b.route.limit(capacity);
        }
    }

    /// y = shared expert + Σ weights · chosen experts. The caller releases `b.ffn.work`, also after
    /// an error.
    pub(super) fn experts(
        &self,
        cpu: &Cpu,
        b: &mut Buffers,
        l: usize,
        ffn: &FfnWeights,
        pass: Pass,
    ) -> Result<()> {
        let (store, n_embd) = (self.experts_of(&ffn.gate), self.hyper.n_embd);
        let access = match pass.phase {
            Phase::Prompt => Access::Prompt,
            Phase::Decode => Access::Decode,
        };
        // demand: pins, and queues loads of what is missing
        b.ffn.demand.group(&b.route.chosen, b.route.k, b.route.n_experts);
        store.acquire(l, &b.ffn.demand.experts, access, &mut b.ffn.work);
        if access == Access::Prompt {
            self.prefetch_after(l, b.ffn.demand.experts.len());
        }
        // shared expert, a look ahead: dense work while loads are in flight
        b.y.fill(0.0);
        if let Some(shared) = &ffn.shared {
            self.shared_expert(cpu, b, l, shared)?;
        }
        self.publish_routed(cpu, b, l, pass);
        // granules: resident ones first, then as they land
        let start = Instant::now();
        b.ffn.expert.begin(b.ffn.demand.n_pairs(), ffn.expert.n_ff, n_embd, inner(&ffn.expert));
        while store.next_ready(&mut b.ffn.work)? {
            let f = &mut b.ffn;
            let mut list = f.granules.list();
            granules(store, &f.work, &f.demand, &ffn.expert, &mut list);
            cpu.expert_granules(&list, &f.demand, ffn.form(), &b.acts, &mut f.expert);
            f.granules.give_back(list);
        }
        // ordered sum
        cpu.ordered_sum(&b.ffn.demand, &b.route.weights, &b.ffn.expert, &mut b.y);
        b.published.timing.add_experts(nanos_since(start), b.ffn.work.stall_ns());
        Ok(())
    }

    /// Prefetches the next layer's experts if a prompt that uses `n_chosen` of layer `l`'s will
    /// use most of them.
    pub(super) fn prefetch_after(&self, l: usize, n_chosen: usize) {
        let n_experts = self.hyper.routing.n_experts;
        let n_encoder = self.hyper.n_encoder_layers();
        // The decoder's tokens are others.
        let end = if l < n_encoder { n_encoder } else { self.weights.layers.len() };
        let mut behind = l + 1..end;
        let next = behind.find(|l| self.weights.routed[*l].is_some());
        match next.filter(|_| prefetch_pays(n_chosen, n_experts)) {
            Some(next) => self.prefetch_layer(next),
            None => self.cancel_layer_prefetch(),
        }
    }

    fn prefetch_layer(&self, l: usize) {
        if let Some(tiers) = &self.tiers {
            tiers.prefetch_layer(l);
        }
        match self.tiers.as_ref().is_some_and(|tiers| tiers.has(l)) {
            true => self.routed.cancel_layer_prefetch(),
            false => self.routed.prefetch_layer(l),
        }
    }

    pub(super) fn cancel_layer_prefetch(&self) {
        if let Some(tiers) = &self.tiers {
            tiers.cancel_layer_prefetch();
        }
        self.routed.cancel_layer_prefetch();
    }

    /// y += sigmoid(gate · h) · expert(h)
    fn shared_expert(
        &self,
        cpu: &Cpu,
        b: &mut Buffers,
        l: usize,
        shared: &SharedExpert,
    ) -> Result<()> {
        let n = b.route.chosen.len() / b.route.k;
        b.ffn.only_gate.clear();
        b.ffn.only_gate.resize(n, 1.0);
        if let Some(gate) = &shared.gate {
            let mat = gate.mat(&self.gguf);
            cpu.product(mat, b.acts.view(mat.ty), &mut b.ffn.only_gate);
            cpu.kernels.sigmoid(&mut b.ffn.only_gate);
        }
        self.only_expert(cpu, b, l, &self.shared, &shared.shape)
    }

    /// The stream as attention found it, for experts that do not see what the dense branch does.
    pub(super) fn keep_before(&self, b: &mut Buffers, ffn: &FfnWeights) {
        if ffn.branch.is_some() {
            b.before.clone_from(&b.x);
        }
    }

    /// y = expert(norm(x))
    pub(super) fn dense_branch(
        &self,
        cpu: &Cpu,
        b: &mut Buffers,
        l: usize,
        branch: &DenseBranch,
    ) -> Result<()> {
        let (n_embd, shape) = (self.hyper.n_embd, &branch.shape);
        let n = b.x.len() / n_embd;
        self.norm(cpu, &branch.norm, &b.x, &mut b.h);
        b.acts.fill(cpu, Kinds::of(shape.inputs()), n, n_embd, &b.h);
        b.ffn.only_gate.clear();
        b.ffn.only_gate.resize(n, 1.0);
        b.y.fill(0.0);
        self.only_expert(cpu, b, l, &self.dense, shape)
    }

    /// y += only_gate · expert, the one that every token goes to in layer `l` of `store`.
    fn only_expert(
        &self,
        cpu: &Cpu,
        b: &mut Buffers,
        l: usize,
        store: &Resident,
        shape: &ExpertShape,
    ) -> Result<()> {
        let (n, f) = (b.ffn.only_gate.len(), &mut b.ffn);
        f.only_demand.everyone(n);
        f.expert.begin(n, shape.n_ff, self.hyper.n_embd, inner(shape));
        store.acquire(l, &f.only_demand.experts, Access::Decode, &mut f.only_work);
        while store.next_ready(&mut f.only_work)? {
            let mut list = f.granules.list();
            granules(store, &f.only_work, &f.only_demand, shape, &mut list);
            cpu.expert_granules(&list, &f.only_demand, shape.form(), &b.acts, &mut f.expert);
            f.granules.give_back(list);
        }
        cpu.ordered_sum(&f.only_demand, &f.only_gate, &f.expert, &mut b.y);
        store.release(&mut f.only_work);
        Ok(())
    }
}

/// Bytes and types brought together: what the backend computes with, of all granules that `work`
/// was handed.
pub(super) fn granules<'a>(
    store: &'a dyn ExpertStore,
    work: &'a Acquisition,
    demand: &Demand,
    shape: &ExpertShape,
    list: &mut Vec<GranuleMats<'a>>,
) {
    list.extend((0..work.n_handed()).map(|i| {
        let g = store.ready(work, i);
        let n = g.rows.len();
        GranuleMats {
            slot: demand.slot(g.expert),
            gate: shape.gate.map(|ty| MatRef::new(ty, g.gate, n, shape.n_embd, g.gate_stride)),
            up: MatRef::new(shape.up, g.up, n, shape.n_embd, g.up_stride),
            down: MatRef::new(shape.down, g.down, shape.n_embd, n, g.down_stride),
            rows: g.rows,
        }
    }));
}

/// The form of the intermediate activations.
fn inner(shape: &ExpertShape) -> Kinds {
    Kinds::of([shape.down])
}
