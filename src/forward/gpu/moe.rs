//! The feed-forward part of a layer on a device: router, shared expert, dense branch, and the
//! experts that every token goes to. Routed experts are in `experts`.

use super::acts::GpuActs;
use super::experts::{Biases, DecodePairs, GroupedPairs, device_shape, is_grouped};
use super::layers::{GpuBiases, GpuFfn, GpuOnly, GpuRouter};
use super::pass::Pass;
use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::expert::Chosen;
use crate::backend::gpu::router::DeviceRoute;
use crate::backend::ops::{Choice, Route};
use crate::forward::gpu::upload::{Staging, floats, integers};
use crate::forward::gpu::workspace::RouteParts;
use crate::model::weights::FfnWeights;

impl<'a> Pass<'a> {
    /// The stream as attention found it, for experts that do not see what the dense branch does.
    pub fn keep_before(&self, ffn: &GpuFfn) -> Result<()> {
        match ffn.branch {
            Some(_) => self.stream().copy(self.before(), self.x()),
            None => Ok(()),
        }
    }

    /// y = expert(norm(x))
    pub fn dense_branch(&self, staging: &mut Staging, ffn: &GpuFfn) -> Result<bool> {
        let Some((norm, expert)) = &ffn.branch else { return Ok(false) };
        self.norm(norm, self.x(), self.h())?;
        let acts = self.acts_of_h(expert.shape.inputs())?;
        self.stream().fill(self.y(), 0)?;
        self.only_expert(staging, expert, None, &acts, None)?;
        Ok(true)
    }

    /// The input of the FFN → h and its forms.
    pub fn ffn_input(&self, w: &FfnWeights, ffn: &GpuFfn) -> Result<GpuActs<'a>> {
        let seen = if ffn.branch.is_some() { self.before() } else { self.x() };
        self.norm(&ffn.norm, seen, self.h())?;
        self.acts_of_h(w.inputs())
    }

    pub fn route_parts(&self) -> RouteParts {
        let routing = &self.hyper().routing;
        RouteParts::new(self.n, routing.k, routing.n_experts)
    }

    /// All of `RouteParts`.
    pub fn route_bytes(&self) -> DeviceSlice<'a> {
        self.slice(&self.layout().ffn.route).slice(0..self.route_parts().n_bytes())
    }

    /// The route, and the word for a look-up's missing pairs.
    fn route_and_missing(&self) -> (DeviceRoute<'a>, DeviceSlice<'a>) {
        let (all, routing) = (self.route_bytes(), &self.hyper().routing);
        let [missing, chosen, weights, probs] =
            self.route_parts().ranges().map(|range| all.slice(range));
        let (k, n_experts) = (routing.k, routing.n_experts);
        (DeviceRoute { k, n_experts, probs, chosen, weights }, missing)
    }

    /// Takes in what came down of `route_bytes`.
    pub fn take_route(&self, bytes: &[u8], route: &mut Route) {
        let [_, chosen, weights, probs] = self.route_parts().ranges();
        (route.k, route.n_experts) = (self.hyper().routing.k, self.hyper().routing.n_experts);
        integers(&bytes[chosen], &mut route.chosen);
        floats(&bytes[weights], &mut route.weights);
        floats(&bytes[probs], &mut route.probs);
    }

    /// How many pairs a look-up lacked, of the same bytes.
    pub fn missing_in(&self, bytes: &[u8]) -> u32 {
        let [missing, ..] = self.route_parts().ranges();
        u32::from_le_bytes(bytes[missing].try_into().expect("one word"))
    }

    pub fn route(&self) -> DeviceRoute<'a> {
        self.route_and_missing().0
    }

    pub fn missing(&self) -> DeviceSlice<'a> {
        self.route_and_missing().1
    }

    /// Logits, probabilities, the chosen experts as far as they have room, and their weights.
    pub fn choose(&self, router: &GpuRouter, choice: &Choice, acts: &GpuActs) -> Result<()> {
        let route = self.route();
        self.linear(&router.logits, acts, route.probs)?;
        let bias = router.choice_bias.as_ref().map(|bias| self.dev.weights.vector(bias));
        self.dev.ops.router.route(self.stream(), route, choice, bias)?;
        // A pass of no more tokens fills no expert.
        let Some(capacity) = self.hyper().routing.capacity.filter(|n| self.n > *n) else {
            return Ok(());
        };
        self.dev.ops.resolve.limit(self.stream(), route.chosen, route.n_experts, capacity)
    }

    /// y = sigmoid(gate · h) · expert(h), or 0 without a shared expert
    pub fn shared_expert(&self, staging: &mut Staging, ffn: &GpuFfn, acts: &GpuActs) -> Result<()> {
        self.stream().fill(self.y(), 0)?;
        let Some(shared) = &ffn.shared else { return Ok(()) };
        let mut gate = None;
        if let Some(matrix) = &shared.gate {
            let (mat, out) =
                (self.dev.weights.mat(matrix), self.words(&self.layout().ffn.only_gate, self.n));
            self.dev.ops.products.product(self.stream(), mat, acts.view(mat.ty), None, out, 1)?;
            self.dev.ops.activate.sigmoid(self.stream(), out)?;
            gate = Some(out);
        }
        self.only_expert(staging, &shared.expert, None, acts, gate)
    }

    /// y += gate · expert, the one that every token goes to; a gate of 1 where there is none.
    pub fn only_expert(
        &self,
        staging: &mut Staging,
        expert: &GpuOnly,
        biases: Option<&GpuBiases>,
        acts: &GpuActs,
        gate: Option<DeviceSlice>,
    ) -> Result<()> {
        let (f, n, context) = (&self.layout().ffn, self.n, self.expert_context());
        let shape = device_shape(&expert.layout, &expert.shape, 1);
        let zeros = self.words(&self.layout().zeros, n);
        let table = self.dev.tables.slice(expert.table.clone());
        let biases = biases.map(|b| Biases::new(&self.dev.weights, b));
        if is_grouped(&expert.shape, n) {
            let starts = self.words(&f.experts.starts, 2);
            staging.upload(self.stream(), starts, &[0, n as u32], u32::to_le_bytes)?;
            let grouped_pairs = GroupedPairs {
                shape: &shape,
                n_items: 1,
                n_pairs: n,
                matrices: table,
                starts,
                tokens: None,
                experts: zeros,
                max_pairs: n,
                pairs: 0..n,
            };
            // SAFETY: the table holds the addresses of this expert's granules, which stay where
            // they are; there is one item with all pairs, and its number is 0.
            unsafe {
                context.grouped_pairs(
                    &grouped_pairs,
                    biases.as_ref(),
                    acts,
                    0..shape.n_granules(),
                )?
            };
        } else {
            let decode_pairs = DecodePairs {
                shape: &shape,
                chosen: Chosen {
                    n_pairs: n,
                    granules: table.slice(0..8 * n * shape.n_granules()),
                    experts: zeros,
                },
            };
            // SAFETY: as above.
            unsafe { context.decode_pairs(&decode_pairs, biases.as_ref(), acts)? };
        }
        let gate = gate.unwrap_or(self.words(&self.layout().ones, n));
        let partial = context.partial(&shape, n);
        // SAFETY: token t's pair is t, in both ways of computing it.
        unsafe {
            let (experts, stream) = (&self.dev.ops.experts, self.stream());
            experts.ordered_sum(stream, &shape, n, zeros, false, gate, partial, self.y())
        }
    }
}
