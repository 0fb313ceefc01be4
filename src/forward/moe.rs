//! The feed-forward part of a layer: router, routed experts, shared expert, dense branch.

use crate::Result;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::expert::{ExpertBuffers, GranuleMats};
use crate::backend::cpu::linear::Product;
use crate::backend::ops::{Demand, ExpertForm, ExpertShape, Route};
use crate::cancel::Cancel;
use crate::experts::peers::Remote;
use crate::experts::{Access, Acquisition, ExpertStore, LayerPart, Resident, prefetch_pays};
use crate::forward::events::nanos_since;
use crate::forward::{Batch, Buffers, CpuPass, parts};
use crate::model::Model;
use crate::model::weights::{DenseBranch, FfnWeights, Gate, OnlyScales, SharedExpert};
use crate::simd::{Floats, MatRef};
use std::ops::Range;
use std::time::Instant;

/// Buffers of the feed-forward part.
#[derive(Default)]
pub struct FfnBuffers {
    pub demand: Demand,
    pub order: Vec<u32>, // [experts of the demand that are computed here], as they are acquired
    pub remote: Remote,
    pub packed: Vec<u8>, // rows that peers are sent
    pub n_own_misses: usize,
    pub work: Acquisition,
    pub expert: ExpertBuffers,
    // Of experts that are always there:
    pub only_demand: Demand,
    only_work: Acquisition,
    pub only_gate: Vec<f32>, // [rows, experts a row]
    pub latent: Floats,      // [rows, width of narrow experts]
    weighed: Floats,         // [rows, experts a row, n_embd]
    pub groups: Vec<u32>,    // [rows, adjugate experts a row]
    pub granules: GranuleList,
}

impl Buffers {
    /// Waits for experts end once `cancel` is set, from the next pass on.
    pub(crate) fn set_cancel(&mut self, cancel: &Cancel) {
        self.ffn.work.cancel = cancel.clone();
    }
}

/// The allocation of a list of granules, empty between lists.
#[derive(Default)]
pub struct GranuleList(Vec<GranuleMats<'static>>);

impl GranuleList {
    /// An empty list that reuses this allocation; return it with `recycle`.
    pub fn list<'a>(&mut self) -> Vec<GranuleMats<'a>> {
        emptied(std::mem::take(&mut self.0))
    }

    pub fn recycle(&mut self, list: Vec<GranuleMats>) {
        self.0 = emptied(list);
    }
}

/// An empty list of another lifetime in the same allocation: the standard library collects in
/// place where the elements have one size. tests/token_loop.rs fails if that changes.
fn emptied<'a>(mut list: Vec<GranuleMats>) -> Vec<GranuleMats<'a>> {
    list.clear();
    list.into_iter().map(|_| unreachable!("the list is empty")).collect()
}

impl CpuPass<'_, '_> {
    /// The router's choice for each row, by the forms of h that it reads.
    pub(super) fn route(&self, gate: &Gate, acts: &ActSet, route: &mut Route) {
        let (model, n) = (self.model, self.batch.n_rows());
        let router = match gate {
            Gate::Router(router) => router,
            Gate::Dense(weight) => return route.dense(n, *weight),
        };
        let routing = &model.hyper.routing;
        (route.n_experts, route.k) = (routing.n_experts, routing.k);
        self.cpu.products([self.linear(&router.logits, acts, &mut route.probs, n)]);
        match &router.fixed {
            None => self.cpu.route(route, &routing.choice, router.choice_bias.as_deref()),
            Some(fixed) => {
                let (tokens, k) = (self.batch.tokens(), routing.k);
                let of_token = |t: usize| &fixed[tokens[t] as usize * k..][..k];
                self.cpu.route_to(route, &routing.choice, of_token);
            }
        }
        if let Some(scales) = &router.scales {
            route.scale_weights(scales);
        }
        if let Some(capacity) = routing.capacity {
            // By definition it counts the tokens of one text.
            self.batch.segments().for_each(|(rows, _)| route.limit(&rows, capacity));
        }
    }

    /// y = shared expert + Σ weights · chosen experts
    pub(super) fn experts(&mut self, l: usize, ffn: &FfnWeights, b: &mut Buffers) -> Result<()> {
        let result = self.acquire_and_compute(l, ffn, b);
        if matches!(ffn.gate, Gate::Router(_)) {
            self.observer.experts(b.ffn.demand.experts.len());
        }
        self.model.experts_of(&ffn.gate).release(&mut b.ffn.work);
        result
    }

    fn acquire_and_compute(&mut self, l: usize, ffn: &FfnWeights, b: &mut Buffers) -> Result<()> {
        let (model, cpu) = (self.model, self.cpu);
        // demand: pins, and queues loads of what is missing
        b.ffn.demand.group(&b.route.chosen, b.route.k, b.route.n_experts);
        b.ffn.order.clone_from(&b.ffn.demand.experts);
        if self.has_parts(ffn, &b.ffn.demand) {
            // As the layer prefetch brings them.
            b.ffn.order.sort_unstable();
        }
        self.deal_to_peers(l, ffn, b);
        let mut part = self.next_part(ffn, &b.ffn, 0);
        model.publish_choice(self.batch, b, l);
        self.acquire_part(l, ffn, &part, b);
        let changes_input = ffn.weights_input || ffn.latent.is_some();
        if !changes_input {
            self.send_to_peers(l, ffn, b);
        }
        // shared expert, a look ahead: dense work while loads are in flight
        b.y.fill(0.0);
        if let Some(shared) = &ffn.shared {
            self.shared_expert(l, shared, b)?;
        }
        model.publish_look_ahead(cpu, self.batch, b, l);
        if ffn.weights_input {
            self.weigh_input(ffn, b);
        }
        if let Some(latent) = &ffn.latent {
            self.narrow(latent, &ffn.expert, b);
        }
        if changes_input {
            self.send_to_peers(l, ffn, b);
        }
        let (n_pairs, width) = (b.ffn.demand.n_pairs(), ffn.expert.n_embd);
        b.ffn.expert.begin(n_pairs, ffn.expert.n_ff, width, inner(&ffn.expert));
        let adapted = self.adapted_experts(l, ffn);
        if let Some(adapted) = &adapted {
            cpu.begin_low_rank(adapted, &b.ffn.demand, &b.acts, &mut b.ffn.expert);
        }
        self.compute_part(l, ffn, b)?;
        while part.end < b.ffn.order.len() {
            model.experts_of(&ffn.gate).release(&mut b.ffn.work);
            self.observer.rest()?;
            part = self.next_part(ffn, &b.ffn, part.end);
            self.acquire_part(l, ffn, &part, b);
            self.compute_part(l, ffn, b)?;
        }
        self.take_from_peers(l, ffn, b)?;
        if let Some(adapted) = &adapted {
            cpu.end_low_rank(&adapted.down, &mut b.ffn.expert);
        }
        let of_layer = model.weights.experts_of(l, &ffn.gate);
        model.sum_expert_inputs(l, of_layer, &b.ffn.demand, &b.acts, &b.ffn.expert);
        // ordered sum
        let start = Instant::now();
        match &ffn.latent {
            None => cpu.ordered_sum(&b.ffn.demand, &b.route.weights, &b.ffn.expert, &mut b.y),
            Some(latent) => self.widen(latent, b),
        }
        if let Some(adjugate) = &ffn.adjugate {
            self.adjugate(l, adjugate, b)?;
        }
        b.events.timing.add_experts(nanos_since(start), 0);
        Ok(())
    }

    /// Makes the experts' inputs, a row a pair: h times the pair's weight, which becomes 1.
    fn weigh_input(&self, ffn: &FfnWeights, b: &mut Buffers) {
        let (k, n_embd) = (b.route.k, self.model.hyper.n_embd);
        let rows = b.h.chunks_exact(n_embd).flat_map(|h| std::iter::repeat_n(h, k));
        b.ffn.weighed.copy_from(rows);
        let rows = b.ffn.weighed.chunks_exact_mut(n_embd).zip(&mut b.route.weights);
        for (row, weight) in rows {
            row.iter_mut().for_each(|x| *x *= *weight);
            *weight = 1.0;
        }
        if ffn.splits_input {
            b.ffn.demand.split_inputs();
        }
        let n = b.route.weights.len();
        b.acts.fill(self.cpu, Kinds::of(ffn.expert.inputs()), n, n_embd, &b.ffn.weighed);
    }

    /// Whether experts are acquired part by part. A prompt alone keeps the link busiest with all of
    /// a layer's loads at once.
    fn has_parts(&self, ffn: &FfnWeights, demand: &Demand) -> bool {
        let is_streamed = self.model.experts_of(&ffn.gate).is_streamed();
        let is_prompt = access(self.batch, demand) == Access::Prompt;
        is_prompt && (self.observer.has_others() || !is_streamed)
    }

    /// The experts, as indices of their order from `start` on, that are acquired together.
    fn next_part(&self, ffn: &FfnWeights, f: &FfnBuffers, start: usize) -> Range<usize> {
        if !self.has_parts(ffn, &f.demand) || f.order.is_empty() {
            return start..f.order.len();
        }
        let work = self.observer.part_work();
        parts::experts_of_a_part(&f.demand, &f.order, &ffn.expert, work, start)
    }

    pub(super) fn acquire_part(
        &self,
        l: usize,
        ffn: &FfnWeights,
        part: &Range<usize>,
        b: &mut Buffers,
    ) {
        let (store, order) = (self.model.experts_of(&ffn.gate), &b.ffn.order);
        let access = access_of(self.batch, &b.ffn.demand, &order[part.clone()]);
        let part = LayerPart { experts: &order[part.clone()], later: &order[part.end..] };
        store.acquire_part(l, part, access, &mut b.ffn.work);
        if access.has_prompt() && part.later.is_empty() {
            self.model.prefetch_after(l, b.ffn.demand.experts.len());
        }
    }

    /// Granules of what is acquired: resident ones first, then as they land.
    pub(super) fn compute_part(&self, l: usize, ffn: &FfnWeights, b: &mut Buffers) -> Result<()> {
        let (store, start) = (self.model.experts_of(&ffn.gate), Instant::now());
        let form = ExpertForm { adapted: self.adapted_experts(l, ffn), ..ffn.form() };
        while store.next_ready(&mut b.ffn.work)? {
            let f = &mut b.ffn;
            let mut list = f.granules.list();
            granules(store, &f.work, &f.demand, &ffn.expert, |_| true, &mut list);
            self.cpu.expert_granules(&list, &f.demand, form, &b.acts, &mut f.expert);
            f.granules.recycle(list);
        }
        b.events.timing.add_experts(nanos_since(start), b.ffn.work.stall_ns());
        Ok(())
    }

    /// y += sigmoid(gate · h) · expert(h)
    fn shared_expert(&self, l: usize, shared: &SharedExpert, b: &mut Buffers) -> Result<()> {
        let cpu = self.cpu;
        b.ffn.only_gate.clear();
        b.ffn.only_gate.resize(self.batch.n_rows(), 1.0);
        if let Some(gate) = &shared.gate {
            let mat = gate.mat(&self.model.gguf);
            let adapted = self.adapted(gate, &b.acts);
            self.model.sum_inputs(gate, &b.acts);
            let (acts, out) = (b.acts.view(mat.ty), &mut b.ffn.only_gate[..]);
            cpu.products([Product { mat, acts, bias: None, scale: 1.0, out, adapted }]);
            cpu.kernels.sigmoid(&mut b.ffn.only_gate);
        }
        self.only_expert(l, &self.model.shared, &shared.shape, &shared.scales, b)
    }

    /// y = expert(h)
    pub(super) fn dense_branch(
        &self,
        l: usize,
        branch: &DenseBranch,
        b: &mut Buffers,
    ) -> Result<()> {
        let (shape, n) = (&branch.shape, self.batch.n_rows());
        b.acts.fill(self.cpu, Kinds::of(shape.inputs()), n, self.model.hyper.n_embd, &b.h);
        b.ffn.only_gate.clear();
        b.ffn.only_gate.resize(n, 1.0);
        b.y.fill(0.0);
        self.only_expert(l, &self.model.dense, shape, &branch.scales, b)
    }

    /// y += only_gate · expert, the one of layer `l` in `store`, to which every row goes.
    fn only_expert(
        &self,
        l: usize,
        store: &Resident,
        shape: &ExpertShape,
        scales: &OnlyScales,
        b: &mut Buffers,
    ) -> Result<()> {
        b.ffn.only_demand.everyone(b.ffn.only_gate.len());
        if scales.outer != 1.0 {
            b.ffn.only_gate.iter_mut().for_each(|gate| *gate *= scales.outer);
        }
        let adapted = self.adapted_of(store.layer(l).as_ref());
        let form = ExpertForm { scales: scales.inner.as_ref(), adapted, ..shape.form() };
        self.resident_experts(l, store, shape, form, b)
    }

    /// y += Σ only_gate · experts of layer `l` in `store` that `only_demand` names.
    pub(super) fn resident_experts(
        &self,
        l: usize,
        store: &Resident,
        shape: &ExpertShape,
        form: ExpertForm,
        b: &mut Buffers,
    ) -> Result<()> {
        let (f, cpu) = (&mut b.ffn, self.cpu);
        f.expert.begin(f.only_demand.n_pairs(), shape.n_ff, shape.n_embd, inner(shape));
        if let Some(adapted) = &form.adapted {
            cpu.begin_low_rank(adapted, &f.only_demand, &b.acts, &mut f.expert);
        }
        store.acquire(l, &f.only_demand.experts, Access::Decode, &mut f.only_work);
        while store.next_ready(&mut f.only_work)? {
            let mut list = f.granules.list();
            granules(store, &f.only_work, &f.only_demand, shape, |_| true, &mut list);
            cpu.expert_granules(&list, &f.only_demand, form, &b.acts, &mut f.expert);
            f.granules.recycle(list);
        }
        if let Some(adapted) = &form.adapted {
            cpu.end_low_rank(&adapted.down, &mut f.expert);
        }
        let of_layer = store.layer(l);
        self.model.sum_expert_inputs(l, of_layer.as_ref(), &f.only_demand, &b.acts, &f.expert);
        cpu.ordered_sum(&f.only_demand, &f.only_gate, &f.expert, &mut b.y);
        store.release(&mut f.only_work);
        Ok(())
    }
}

/// The phase that a batch's experts are wanted for.
pub(super) fn access(batch: &Batch, demand: &Demand) -> Access {
    match batch.decode_rows().len() {
        0 => Access::Prompt,
        n if n == batch.n_rows() => Access::Decode,
        n => Access::Mixed { n_decode: demand.n_chosen_by(n) },
    }
}

/// The access of some of the experts, of which those of decode come first.
fn access_of(batch: &Batch, demand: &Demand, experts: &[u32]) -> Access {
    match access(batch, demand) {
        Access::Mixed { n_decode } => {
            let is_decode = |expert: &&u32| demand.slot(**expert) < n_decode;
            Access::Mixed { n_decode: experts.iter().filter(is_decode).count() }
        }
        access => access,
    }
}

impl Model {
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
            Some(next) => self.hierarchy.prefetch_layer(next),
            None => self.hierarchy.cancel_layer_prefetch(),
        }
    }
}

/// Bytes and types brought together: what the backend computes with, of the granules that `work`
/// was handed and whose experts are wanted.
pub(super) fn granules<'a>(
    store: &'a dyn ExpertStore,
    work: &'a Acquisition,
    demand: &Demand,
    shape: &ExpertShape,
    is_wanted: impl Fn(u32) -> bool,
    list: &mut Vec<GranuleMats<'a>>,
) {
    let handed = (0..work.n_handed()).map(|i| store.ready(work, i));
    list.extend(handed.filter(|g| is_wanted(g.expert)).map(|g| {
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
pub(super) fn inner(shape: &ExpertShape) -> Kinds {
    Kinds::of([shape.down])
}
