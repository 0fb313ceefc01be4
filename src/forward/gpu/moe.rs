//! The feed-forward part of a layer on a device: router, shared expert, dense branch, and the sum
//! of routed experts. `layer` says where routed experts are computed.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::expert::{Chosen, OrderedSum};
use crate::backend::gpu::router::{DeviceRoute, FixedExperts, Groups, RouteVectors};
use crate::backend::gpu::rows::Columns;
use crate::forward::gpu::acts::{GpuActs, RowShape};
use crate::forward::gpu::experts::{DecodePairs, GroupedPairs, device_form, device_shape};
use crate::forward::gpu::halves::only_shape;
use crate::forward::gpu::layers::{GpuAdjugate, GpuBranch, GpuFfn, GpuForm, GpuOnly};
use crate::forward::gpu::pack::OnDevice;
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::weights::GpuVector;
use crate::forward::gpu::workspace::RouteParts;
use crate::gguf::TensorType;
use crate::model::weights::{Latent, Router, Streams, SubLayer};

/// The use of the result of an expert that every token goes to; see `OrderedSum`.
struct OnlySum<'a> {
    /// f32 [tokens]; 1 if there is none
    gate: Option<DeviceSlice<'a>>,
    begins: bool,
    residual: Option<(DeviceSlice<'a>, f32)>,
}

impl<'a> GpuPass<'a> {
    /// Keeps the residual stream before attention, for experts that do not see the dense branch's
    /// output.
    pub fn keep_before(&self, ffn: &GpuFfn) -> Result<()> {
        match ffn.sees_before {
            true => self.stream().copy(self.before(), self.x()),
            false => Ok(()),
        }
    }

    /// x += expert(norm(x)); or its norm, kept for the experts' sum.
    pub fn dense_branch(&mut self, branch: &GpuBranch) -> Result<()> {
        let acts = self.branch_input(&branch.expert, &branch.norm, self.x())?;
        let sum = OnlySum { gate: None, begins: true, residual: None };
        self.only_expert(&branch.expert, &acts, sum)?;
        match &branch.post_norm {
            None => self.add_residual(None, 1.0),
            Some(norm) => self.norm(norm, self.y(), self.branch()),
        }
    }

    /// y += expert(h), the only expert of a dense layer; residual, and what is behind it.
    pub fn dense_expert(&mut self, l: usize, expert: &GpuOnly) -> Result<()> {
        let begins = self.ffn(l).shared.is_none();
        let residual = self.plain_residual(l);
        let sum = OnlySum { gate: None, begins, residual };
        self.only_expert(expert, &self.ffn_acts(l), sum)?;
        if residual.is_none() {
            self.add_experts(l)?;
        }
        self.end_layer(l)
    }

    /// The residual stream and the factor of what a layer's experts add to it, if they add it
    /// without a norm.
    fn plain_residual(&self, l: usize) -> Option<(DeviceSlice<'a>, f32)> {
        let (ffn, scale) = (self.ffn(l), self.hyper().residual_scale);
        let is_one = matches!(self.layer(l).streams[SubLayer::FeedForward as usize], Streams::One);
        let has_norm = ffn.post_norm.is_some() || ffn.experts_norm.is_some();
        let is_plain = !has_norm && is_one && ffn.latent.is_none() && !self.adds_to_normed();
        is_plain.then(|| (self.x(), ffn.scale * scale))
    }

    /// Feeds y to the stream or the streams, of the feed-forward part of a layer; y is normalised
    /// and joined by the dense branch before, if the layer has a norm for it.
    pub fn add_experts(&self, l: usize) -> Result<()> {
        let ffn = self.ffn(l);
        if let Some(norm) = &ffn.experts_norm {
            self.norm(norm, self.y(), self.h())?;
            self.stream().copy(self.y(), self.h())?;
            self.dev.ops.rows.add(self.stream(), self.y(), self.branch())?;
        }
        self.feed_streams(l, SubLayer::FeedForward, ffn.post_norm.as_ref(), ffn.scale)
    }

    /// The offsets of a route's parts.
    pub fn route_parts(&self) -> RouteParts {
        let routing = &self.hyper().routing;
        RouteParts::new(self.n(), routing.k, routing.n_experts)
    }

    /// The parts of a route, all in one piece.
    pub fn route_bytes(&self) -> DeviceSlice<'a> {
        self.slice(&self.layout().ffn.route).slice(0..self.route_parts().n_bytes())
    }

    /// The router's output.
    pub fn device_route(&self) -> DeviceRoute<'a> {
        let (all, routing) = (self.route_bytes(), &self.hyper().routing);
        let [_, chosen, weights, probs] = self.route_parts().ranges().map(|range| all.slice(range));
        DeviceRoute { k: routing.k, n_experts: routing.n_experts, probs, chosen, weights }
    }

    /// The chosen experts, as far as they have capacity, their weights, and the probabilities of
    /// all.
    pub fn route(&self, router: &Router<OnDevice>, acts: &GpuActs) -> Result<()> {
        let (route, choice) = (self.device_route(), &self.hyper().routing.choice);
        self.linear(&router.logits, &acts.exact(), route.probs)?;
        let vector = |v: &Option<GpuVector>| v.as_ref().map(|v| self.dev.weights.vector(v));
        let vectors =
            RouteVectors { bias: vector(&router.choice_bias), scales: vector(&router.scales) };
        let router_ops = &self.dev.ops.router;
        match vector(&router.fixed) {
            None => router_ops.route(self.stream(), route, choice, vectors)?,
            Some(table) => {
                let fixed = FixedExperts { table, ids: self.words(&self.kept().tokens, self.n()) };
                // SAFETY: the table has a row for each token of the vocabulary, whose experts the
                // binder has checked, and texts' ids are checked when a pass is made.
                unsafe { router_ops.route_to(self.stream(), route, choice, vectors, fixed)? };
            }
        }
        let Some(capacity) = self.hyper().routing.capacity else { return Ok(()) };
        // The capacity counts the tokens of one text. No more tokens than that fill no expert.
        for segment in self.segments().filter(|segment| segment.n() > capacity) {
            let chosen = segment.of(route.chosen, route.k);
            self.dev.ops.resolve.limit(self.stream(), chosen, route.n_experts, capacity)?;
        }
        Ok(())
    }

    /// y = sigmoid(gate · h) · expert(h), if there is a shared expert
    pub fn shared_expert(&mut self, ffn: &GpuFfn, acts: &GpuActs) -> Result<()> {
        let Some(shared) = &ffn.shared else { return Ok(()) };
        let mut gate = None;
        if let Some(matrix) = &shared.gate {
            let mat = self.dev.weights.mat(matrix);
            let out = self.words(&self.layout().ffn.only_gate, self.n());
            self.dev.ops.products.product(self.stream(), mat, acts.view(mat.ty), None, out, 1)?;
            self.dev.ops.activate.sigmoid(self.stream(), out)?;
            gate = Some(out);
        }
        let sum = OnlySum { gate, begins: true, residual: None };
        self.only_expert(&shared.expert, acts, sum)
    }

    /// Multiplies the experts' input by the weights, one a row, which become 1. Of several experts
    /// a token each has a row, a copy of h.
    pub fn weigh_input(&mut self, l: usize) -> Result<()> {
        let (rows, stream, w) = (&self.dev.ops.rows, self.stream(), self.ffn_weights(l));
        let (x, DeviceRoute { k, weights, .. }) = (self.expert_input(l), self.device_route());
        let RowShape { cols, .. } = self.input_rows(l);
        for rank in (0..k).filter(|_| w.splits_input) {
            let (from, to) = (self.h(), Columns::new(x, k * cols, rank * cols));
            rows.copy_columns(stream, Columns::new(from, cols, 0), to, cols, self.n())?;
        }
        rows.mul_rows(stream, x, weights)?;
        rows.set(stream, weights, 1.0)?;
        if w.splits_input {
            return self.own_input(l, x);
        }
        self.ffn_input_of_h(l).map(drop)
    }

    /// Makes the narrow experts' input of h and stores it in the forms that they read.
    pub fn narrow(&self, l: usize, latent: &Latent<OnDevice>, acts: &GpuActs) -> Result<()> {
        let rows = self.expert_input(l);
        self.linear(&latent.down, &acts.exact(), rows)?;
        if let Some(norm) = &latent.input_norm {
            let (weight, eps) = (self.dev.weights.vector(norm), self.hyper().norm_eps);
            self.dev.ops.norm.rms_norm_heads(self.stream(), rows, weight, eps)?;
        }
        self.own_input(l, rows)
    }

    /// Stores routed experts' own input in the forms that they read.
    fn own_input(&self, l: usize, rows: DeviceSlice<'a>) -> Result<()> {
        let (types, memory) = (self.routed_halves(l), self.slice(&self.layout().ffn.latent_acts));
        let inputs = self.ffn_weights(l).expert.inputs();
        let acts = self.latent_acts(inputs, self.input_rows(l), rows)?;
        self.with_halves(acts, types, rows, memory).map(drop)
    }

    /// y += up · norm(sums), of the narrow experts' sums in the place of their input; h is
    /// overwritten.
    fn widen(&self, l: usize, latent: &Latent<OnDevice>) -> Result<()> {
        let (sums, stream, ops) = (self.expert_input(l), self.stream(), &self.dev.ops);
        if let Some(norm) = &latent.norm {
            let weight = self.dev.weights.vector(norm);
            ops.norm.rms_norm_heads(stream, sums, weight, self.hyper().norm_eps)?;
        }
        let up = &latent.up;
        let acts = self.latent_acts([up.weight.ty], self.input_rows(l), sums)?;
        self.linear(up, &acts, self.h())?;
        if self.ffn(l).shared.is_none() {
            ops.rows.set(stream, self.y(), 0.0)?;
        }
        ops.rows.add(stream, self.y(), self.h())
    }

    fn latent_acts(
        &self,
        types: impl IntoIterator<Item = TensorType>,
        shape: RowShape,
        rows: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        let memory = self.slice(&self.layout().ffn.latent_acts);
        GpuActs::fill(&self.dev.ops, self.stream(), types, shape, rows, memory)
    }

    /// y += gate · expert(h), for an expert that every token goes to.
    fn only_expert(
        &mut self,
        expert: &GpuOnly,
        acts: &GpuActs,
        OnlySum { gate, begins, residual }: OnlySum<'a>,
    ) -> Result<()> {
        let (n, context) = (self.n(), self.expert_context());
        let (shape, form) = (only_shape(expert), device_form(&self.dev.weights, &expert.form));
        let zeros = self.words(&self.layout().zeros, n);
        let table = self.dev.tables.slice(expert.table.clone());
        if self.groups(&shape) {
            let pairs = GroupedPairs {
                shape: &shape,
                n_items: 1,
                n_pairs: n,
                matrices: table.slice(0..8 * shape.n_granules()),
                tiles: None,
                tokens: None,
                experts: None,
                pairs: 0..n,
            };
            let granules = 0..shape.n_granules();
            // SAFETY: the table holds the addresses of this expert's granules, which stay where
            // they are. There is one item, expert 0, which has all n pairs.
            unsafe { context.compute_grouped(&pairs, form, acts, granules)? };
        } else {
            let granules = table.slice(0..8 * n * shape.n_granules());
            let pairs = DecodePairs {
                shape: &shape,
                chosen: Chosen { n_pairs: n, granules, apart: None, experts: zeros },
            };
            // SAFETY: the table holds the addresses of this expert's granules for each pair; its
            // number is 0.
            unsafe { context.compute_pairs(&pairs, form, acts)? };
        }
        let gate = self.only_weights(gate, expert.weight)?;
        let partial = context.partial(&shape, n);
        // SAFETY: token t's pair is t, in both ways of computing it.
        unsafe {
            let (pairs, weights, y) = (zeros, gate, self.y());
            let sum = OrderedSum {
                n_tokens: n,
                pairs,
                is_grouped: false,
                weights,
                partial,
                y,
                begins,
                residual,
            };
            self.dev.ops.experts.ordered_sum(self.stream(), &shape, sum)
        }
    }

    /// The rows' factors on the result of an expert that every token goes to: f32 [tokens].
    fn only_weights(&self, gate: Option<DeviceSlice<'a>>, weight: f32) -> Result<DeviceSlice<'a>> {
        let (rows, stream, f) = (&self.dev.ops.rows, self.stream(), &self.layout().ffn);
        let gate = match gate {
            None if weight == 1.0 => return Ok(self.words(&self.layout().ones, self.n())),
            None => self.words(&f.only_gate, self.n()),
            Some(gate) if weight == 1.0 => return Ok(gate),
            Some(gate) => return rows.scale(stream, gate, weight).map(|()| gate),
        };
        rows.set(stream, gate, weight).map(|()| gate)
    }

    /// y += Σ weights · partial of `n_pairs` routed pairs, in the order of a token's ranks;
    /// residual, and what is behind it.
    pub fn routed_sum(&self, l: usize, n_pairs: usize, is_grouped: bool) -> Result<()> {
        let (shape, latent) = (&self.routed_shape(l), self.ffn(l).latent.as_ref());
        let begins = latent.is_some() || self.ffn(l).shared.is_none();
        let (added, adjugate) = (self.plain_residual(l), self.ffn(l).adjugate.as_ref());
        let residual = added.filter(|_| adjugate.is_none());
        let (route, f) = (self.device_route(), &self.layout().ffn);
        let pairs = match is_grouped {
            true => self.words(&f.pair_rows, self.n() * route.k),
            false => route.chosen,
        };
        let partial = self.expert_context().partial(shape, n_pairs);
        let y = latent.map_or(self.y(), |_| self.expert_input(l));
        let (n_tokens, weights) = (self.n(), route.weights);
        let sum = OrderedSum { n_tokens, pairs, is_grouped, weights, partial, y, begins, residual };
        // SAFETY: `pair_rows` holds the rows of `partial` that the demand's pairs have.
        unsafe { self.dev.ops.experts.ordered_sum(self.stream(), shape, sum)? };
        latent.map_or(Ok(()), |latent| self.widen(l, latent))?;
        adjugate.map_or(Ok(()), |adjugate| self.adjugate(l, adjugate, added))?;
        if added.is_none() {
            self.add_experts(l)?;
        }
        self.end_layer(l)
    }

    /// y += Σ weights · adjugate experts(y); residual, if they are the last to add to it.
    fn adjugate(
        &self,
        l: usize,
        adjugate: &GpuAdjugate,
        residual: Option<(DeviceSlice<'a>, f32)>,
    ) -> Result<()> {
        let w = self.ffn_weights(l).adjugate.as_ref().expect("as on the device");
        let (n, context, f) = (self.n(), self.expert_context(), &self.layout().ffn);
        let (shape, n_pairs) = (device_shape(&adjugate.layout, &w.shape, w.k), n * w.k);
        let groups = Groups {
            k: w.k,
            size: w.group,
            scale: w.scale * self.hyper().routing.choice.scale,
            table: self.dev.tables.slice(adjugate.table.clone()),
            n_granules: shape.n_granules(),
            groups: self.words(&f.experts.experts, n_pairs),
            weights: self.words(&f.only_gate, n_pairs),
            granules: self.slice(&f.experts.granules).slice(0..8 * n_pairs * shape.n_granules()),
        };
        // SAFETY: the router chooses among the layer's experts, of which each has a group.
        unsafe { self.dev.ops.router.group(self.stream(), self.device_route(), groups)? };
        let acts = self.acts_of(w.shape.inputs(), n, self.y())?;
        let (granules, experts) = (groups.granules, groups.groups);
        let chosen = Chosen { n_pairs, granules, apart: None, experts };
        let (pairs, form) = (DecodePairs { shape: &shape, chosen }, GpuForm::default());
        // SAFETY: the table holds the addresses of these experts' granules, which stay where they
        // are.
        unsafe { context.compute_pairs(&pairs, device_form(&self.dev.weights, &form), &acts)? };
        let sum = OrderedSum {
            n_tokens: n,
            pairs: groups.groups,
            is_grouped: false,
            weights: groups.weights,
            partial: context.partial(&shape, n_pairs),
            y: self.y(),
            begins: false,
            residual,
        };
        // SAFETY: a token's pairs are those of its ranks.
        unsafe { self.dev.ops.experts.ordered_sum(self.stream(), &shape, sum) }
    }
}
