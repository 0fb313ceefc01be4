//! The feed-forward part of a layer: router, routed experts, shared expert, dense branch.

use crate::Result;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::expert::{ExpertBuffers, GranuleMats};
use crate::backend::cpu::linear::Product;
use crate::backend::ops::{Choice, Demand, ExpertForm, ExpertShape, Route};
use crate::cancel::Cancel;
use crate::experts::peers::Remote;
use crate::experts::{Access, Acquisition, ExpertStore, LayerPart, Resident, prefetch_pays};
use crate::forward::events::{EventBuffers, Routing, nanos_since};
use crate::forward::{Batch, Buffers, CpuPass, parts};
use crate::model::Model;
use crate::model::weights::{DenseBranch, FfnWeights, Gate, OnlyScales, Router, SharedExpert};
use crate::simd::{Floats, MatRef};
use std::ops::Range;
use std::time::Instant;

/// Buffers of the feed-forward part.
#[derive(Default)]
pub struct FfnBuffers {
    pub acts: ActSet, // [rows, n_embd], the input in the forms that router and experts read
    pub route: Route,
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
    pub wide: Floats,        // [rows, n_embd], what narrow experts add
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
    /// The forms of h that the router reads → its choice for each row
    pub(super) fn route(&self, gate: &Gate, f: &mut FfnBuffers) {
        match gate {
            Gate::Dense(weight) => f.route.dense(self.batch.n_rows(), *weight),
            Gate::Router(router) => {
                let routing = &self.model.hyper.routing;
                self.route_by(router, [routing.n_experts, routing.k], &routing.choice, f);
            }
        }
    }

    /// `route` by a router of `n_experts`, of which a token uses `k`.
    pub(super) fn route_by(
        &self,
        router: &Router,
        [n_experts, k]: [usize; 2],
        choice: &Choice,
        f: &mut FfnBuffers,
    ) {
        let (model, n) = (self.model, self.batch.n_rows());
        let FfnBuffers { acts, route, .. } = f;
        (route.n_experts, route.k) = (n_experts, k);
        self.cpu.products([self.linear(&router.logits, acts, &mut route.probs, n)]);
        match &router.fixed {
            None => self.cpu.route(route, choice, router.choice_bias.as_deref()),
            Some(fixed) => {
                let tokens = self.batch.tokens();
                let of_token = |t: usize| &fixed[tokens[t] as usize * k..][..k];
                self.cpu.route_to(route, choice, of_token);
            }
        }
        if let Some(scales) = &router.scales {
            route.scale_weights(scales);
        }
        if let Some(capacity) = model.hyper.routing.capacity {
            // By definition it counts the tokens of one text.
            self.batch.segments().for_each(|(rows, _)| route.limit(&rows, capacity));
        }
    }

    /// y = shared expert + Σ weights · chosen experts, by the route and the input in `f`. Policies
    /// hear of `x` and `h`, the stream and the router's input.
    pub(super) fn experts(
        &mut self,
        l: usize,
        ffn: &FfnWeights,
        [x, h]: [&[f32]; 2],
        f: &mut FfnBuffers,
        e: &mut EventBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let result = self.acquire_and_compute(l, ffn, [x, h], f, e, y);
        if matches!(ffn.gate, Gate::Router(_)) {
            self.outputs.experts(f.demand.experts.len());
        }
        self.model.experts_of(&ffn.gate).release(&mut f.work);
        result
    }

    fn acquire_and_compute(
        &mut self,
        l: usize,
        ffn: &FfnWeights,
        [x, h]: [&[f32]; 2],
        f: &mut FfnBuffers,
        e: &mut EventBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (model, cpu) = (self.model, self.cpu);
        // demand: pins, and queues loads of what is missing
        f.demand.group(&f.route.chosen, f.route.k, f.route.n_experts);
        f.order.clone_from(&f.demand.experts);
        if self.has_parts(ffn, &f.demand) {
            // As the layer prefetch brings them.
            f.order.sort_unstable();
        }
        self.deal_to_peers(l, ffn, f);
        let mut part = self.next_part(ffn, f, 0);
        model.publish_choice(self.batch, l, &mut Routing { route: &f.route, h, x, events: e });
        self.acquire_part(l, ffn, &part, f);
        let changes_input = ffn.weights_input || ffn.latent.is_some();
        if !changes_input {
            self.send_to_peers(l, ffn, f);
        }
        // shared expert, a look ahead: dense work while loads are in flight
        y.fill(0.0);
        if let Some(shared) = &ffn.shared {
            self.shared_expert(l, shared, f, y)?;
        }
        model.publish_look_ahead(
            cpu,
            self.batch,
            l,
            &mut Routing { route: &f.route, h, x, events: e },
        );
        if ffn.weights_input {
            self.weigh_input(ffn, h, f);
        }
        if let Some(latent) = &ffn.latent {
            self.narrow(latent, &ffn.expert, f);
        }
        if changes_input {
            self.send_to_peers(l, ffn, f);
        }
        let (n_pairs, width) = (f.demand.n_pairs(), ffn.expert.n_embd);
        f.expert.begin(n_pairs, ffn.expert.n_ff, width, inner(&ffn.expert));
        let adapted = self.adapted_experts(l, ffn);
        if let Some(adapted) = &adapted {
            cpu.begin_low_rank(adapted, &f.demand, &f.acts, &mut f.expert);
        }
        self.compute_part(l, ffn, f, e)?;
        while part.end < f.order.len() {
            model.experts_of(&ffn.gate).release(&mut f.work);
            self.rests.rest()?;
            part = self.next_part(ffn, f, part.end);
            self.acquire_part(l, ffn, &part, f);
            self.compute_part(l, ffn, f, e)?;
        }
        self.take_from_peers(l, ffn, f, e)?;
        if let Some(adapted) = &adapted {
            cpu.end_low_rank(&adapted.down, &mut f.expert);
        }
        let of_layer = model.weights.experts_of(l, &ffn.gate);
        model.sum_expert_inputs(l, of_layer, &f.demand, &f.acts, &f.expert);
        self.sum_experts(l, ffn, f, e, y)
    }

    /// y += the experts' sum, in a fixed order, and what small experts make of it
    fn sum_experts(
        &self,
        l: usize,
        ffn: &FfnWeights,
        f: &mut FfnBuffers,
        e: &mut EventBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let start = Instant::now();
        if let Some(norm) = &ffn.result_norm {
            self.cpu.scaled_rms_norm_rows(f.expert.results(), &norm.weight, norm.eps);
        }
        match &ffn.latent {
            None => self.cpu.ordered_sum(&f.demand, &f.route.weights, &f.expert, y),
            Some(latent) => self.widen(latent, f, y),
        }
        if let Some(adjugate) = &ffn.adjugate {
            self.adjugate(l, adjugate, f, y)?;
        }
        e.timing.add_experts(nanos_since(start), 0);
        Ok(())
    }

    /// Makes the experts' inputs, a row a pair: h times the pair's weight, which becomes 1.
    fn weigh_input(&self, ffn: &FfnWeights, h: &[f32], f: &mut FfnBuffers) {
        let (k, n_embd) = (f.route.k, self.model.hyper.n_embd);
        let rows = h.chunks_exact(n_embd).flat_map(|h| std::iter::repeat_n(h, k));
        f.weighed.copy_from(rows);
        let rows = f.weighed.chunks_exact_mut(n_embd).zip(&mut f.route.weights);
        for (row, weight) in rows {
            row.iter_mut().for_each(|x| *x *= *weight);
            *weight = 1.0;
        }
        if ffn.splits_input {
            f.demand.split_inputs();
        }
        let n = f.route.weights.len();
        f.acts.fill(self.cpu, Kinds::of(ffn.expert.inputs()), n, n_embd, &f.weighed);
    }

    /// Whether experts are acquired part by part. A prompt alone keeps the link busiest with all of
    /// a layer's loads at once.
    fn has_parts(&self, ffn: &FfnWeights, demand: &Demand) -> bool {
        let is_streamed = self.model.experts_of(&ffn.gate).is_streamed();
        let is_prompt = access(self.batch, demand) == Access::Prompt;
        is_prompt && (self.rests.has_others() || !is_streamed)
    }

    /// The experts, as indices of their order from `start` on, that are acquired together.
    fn next_part(&self, ffn: &FfnWeights, f: &FfnBuffers, start: usize) -> Range<usize> {
        if !self.has_parts(ffn, &f.demand) || f.order.is_empty() {
            return start..f.order.len();
        }
        let work = self.rests.part_work();
        parts::experts_of_a_part(&f.demand, &f.order, &ffn.expert, work, start)
    }

    pub(super) fn acquire_part(
        &self,
        l: usize,
        ffn: &FfnWeights,
        part: &Range<usize>,
        f: &mut FfnBuffers,
    ) {
        let (store, order) = (self.model.experts_of(&ffn.gate), &f.order);
        let access = access_of(self.batch, &f.demand, &order[part.clone()]);
        let part = LayerPart { experts: &order[part.clone()], later: &order[part.end..] };
        // Of dense layers there is a store by layer.
        let is_routed = matches!(ffn.gate, Gate::Router(_));
        let number = if is_routed { self.model.hyper.tier_layer(l) } else { l };
        store.acquire_part(number, part, access, &mut f.work);
        if access.has_prompt() && part.later.is_empty() {
            self.model.prefetch_after(self.model.hyper.tier_layer(l), f.demand.experts.len());
        }
    }

    /// Granules of what is acquired: resident ones first, then as they land.
    pub(super) fn compute_part(
        &self,
        l: usize,
        ffn: &FfnWeights,
        f: &mut FfnBuffers,
        e: &mut EventBuffers,
    ) -> Result<()> {
        let (store, start) = (self.model.experts_of(&ffn.gate), Instant::now());
        let form = ExpertForm { adapted: self.adapted_experts(l, ffn), ..ffn.form() };
        while store.next_ready(&mut f.work)? {
            let mut list = f.granules.list();
            granules(store, &f.work, &f.demand, &ffn.expert, |_| true, &mut list);
            self.cpu.expert_granules(&list, &f.demand, form, &f.acts, &mut f.expert);
            f.granules.recycle(list);
        }
        e.timing.add_experts(nanos_since(start), f.work.stall_ns());
        Ok(())
    }

    /// y += sigmoid(gate · h) · expert(h)
    fn shared_expert(
        &self,
        l: usize,
        shared: &SharedExpert,
        f: &mut FfnBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let cpu = self.cpu;
        f.only_gate.clear();
        f.only_gate.resize(self.batch.n_rows(), 1.0);
        if let Some(gate) = &shared.gate {
            let mat = gate.mat(&self.model.gguf);
            let adapted = self.adapted(gate, &f.acts);
            self.model.sum_inputs(gate, &f.acts);
            let (acts, out) = (f.acts.view(mat.ty), &mut f.only_gate[..]);
            cpu.products([Product { mat, acts, bias: None, scale: 1.0, out, adapted }]);
            cpu.kernels.sigmoid(&mut f.only_gate);
        }
        self.only_expert(l, &self.model.shared, &shared.shape, &shared.scales, f, y)
    }

    /// y = expert(h)
    pub(super) fn dense_branch(
        &self,
        l: usize,
        branch: &DenseBranch,
        h: &[f32],
        f: &mut FfnBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (shape, n) = (&branch.shape, self.batch.n_rows());
        f.acts.fill(self.cpu, Kinds::of(shape.inputs()), n, self.model.hyper.n_embd, h);
        f.only_gate.clear();
        f.only_gate.resize(n, 1.0);
        y.fill(0.0);
        self.only_expert(l, &self.model.dense, shape, &branch.scales, f, y)
    }

    /// y += only_gate · expert, the one of layer `l` in `store`, to which every row goes.
    fn only_expert(
        &self,
        l: usize,
        store: &Resident,
        shape: &ExpertShape,
        scales: &OnlyScales,
        f: &mut FfnBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        f.only_demand.everyone(f.only_gate.len());
        if scales.outer != 1.0 {
            f.only_gate.iter_mut().for_each(|gate| *gate *= scales.outer);
        }
        let adapted = self.adapted_of(store.layer(l).as_ref());
        let form = ExpertForm { scales: scales.inner.as_ref(), adapted, ..shape.form() };
        self.resident_experts(l, store, shape, form, f, y)
    }

    /// y += Σ only_gate · experts of layer `l` in `store` that `only_demand` names.
    pub(super) fn resident_experts(
        &self,
        l: usize,
        store: &Resident,
        shape: &ExpertShape,
        form: ExpertForm,
        f: &mut FfnBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let cpu = self.cpu;
        f.expert.begin(f.only_demand.n_pairs(), shape.n_ff, shape.n_embd, inner(shape));
        if let Some(adapted) = &form.adapted {
            cpu.begin_low_rank(adapted, &f.only_demand, &f.acts, &mut f.expert);
        }
        store.acquire(l, &f.only_demand.experts, Access::Decode, &mut f.only_work);
        while store.next_ready(&mut f.only_work)? {
            let mut list = f.granules.list();
            granules(store, &f.only_work, &f.only_demand, shape, |_| true, &mut list);
            cpu.expert_granules(&list, &f.only_demand, form, &f.acts, &mut f.expert);
            f.granules.recycle(list);
        }
        if let Some(adapted) = &form.adapted {
            cpu.end_low_rank(&adapted.down, &mut f.expert);
        }
        let of_layer = store.layer(l);
        self.model.sum_expert_inputs(l, of_layer.as_ref(), &f.only_demand, &f.acts, &f.expert);
        cpu.ordered_sum(&f.only_demand, &f.only_gate, &f.expert, y);
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
    /// Prefetches the experts of the next number in the tiers if a prompt that uses `n_chosen` of
    /// this one's will use most of them.
    pub(super) fn prefetch_after(&self, number: usize, n_chosen: usize) {
        let (hyper, weights) = (&self.hyper, &self.weights);
        let experts = weights.in_tier(hyper, number);
        let n_experts = experts.map_or(hyper.routing.n_experts, |experts| experts.n_experts);
        let n_encoder = hyper.n_encoder_layers();
        // The decoder's tokens are others.
        let end =
            if hyper.layer_in_tier(number).0 < n_encoder { n_encoder } else { hyper.n_layers };
        let mut behind = number + 1..hyper.tier_layer(end - 1) + 1;
        let next = behind.find(|number| weights.in_tier(hyper, *number).is_some());
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
