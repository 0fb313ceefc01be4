//! Experts of F16 and BF16 that tensor cores multiply: those of models without blocks, in passes
//! whose rows are all of prompts.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::expert::ExpertShape as DeviceShape;
use crate::backend::gpu::halves;
use crate::forward::gpu::acts::{GpuActs, HalfTypes, note_half};
use crate::forward::gpu::experts::{device_shape, is_grouped};
use crate::forward::gpu::layers::GpuOnly;
use crate::forward::gpu::ops::{Ops, types_of};
use crate::forward::gpu::pack::OnDevice;
use crate::forward::gpu::pass::GpuPass;
use crate::model::Model;
use crate::model::weights::Norm;

/// Whether prompts of the model are rounded so, unless they are exact.
pub fn multiplies_halves(model: &Model) -> bool {
    halves::serve(&types_of(model))
}

/// The shape of an expert that every token goes to.
pub fn only_shape(expert: &GpuOnly) -> DeviceShape {
    device_shape(&expert.layout, &expert.shape, 1)
}

impl<'a> GpuPass<'a> {
    /// The shape of a layer's routed experts.
    pub fn routed_shape(&self, l: usize) -> DeviceShape {
        let layout = self.dev.layouts[l].expect("a layer with routed experts");
        let (w, k) = (self.ffn_weights(l), self.hyper().routing.k);
        let pairs_a_row = if w.splits_input { 1 } else { k };
        DeviceShape { pairs_a_row, ..device_shape(&layout, &w.expert, k) }
    }

    /// Whether tensor cores multiply these experts on every device. They are grouped then, however
    /// few rows there are: a prompt's bits do not depend on its division into micro-batches.
    fn takes_halves(&self, shape: &DeviceShape) -> bool {
        let take = |ops: &Ops| ops.halves.take_expert(shape);
        let peers = &self.state.peers;
        self.rounds_to_halves() && take(&self.dev.ops) && peers.iter().all(|peer| take(peer.ops()))
    }

    /// Whether these experts are computed grouped.
    pub fn groups(&self, shape: &DeviceShape) -> bool {
        is_grouped(shape, self.n()) || self.takes_halves(shape)
    }

    /// Whether tensor cores multiply a layer's routed experts.
    pub fn routes_halves(&self, l: usize) -> bool {
        self.routed_halves(l).contains(&true)
    }

    /// Notes the types that the input of these experts is rounded to.
    fn note_halves(&self, shape: &DeviceShape, types: &mut HalfTypes) {
        if self.takes_halves(shape) {
            [shape.gate, shape.up].into_iter().for_each(|ty| note_half(types, ty));
        }
    }

    /// The types that the input of a layer's routed experts is rounded to.
    pub fn routed_halves(&self, l: usize) -> HalfTypes {
        let mut types = HalfTypes::default();
        if self.dev.layouts[l].is_some() {
            self.note_halves(&self.routed_shape(l), &mut types);
        }
        types
    }

    /// The halves of h that a layer's experts read.
    fn ffn_halves(&self, l: usize) -> HalfTypes {
        let mut types = match self.ffn_weights(l).has_own_input() {
            true => HalfTypes::default(),
            false => self.routed_halves(l),
        };
        let ffn = self.ffn(l);
        for expert in ffn.dense.iter().chain(ffn.shared.iter().map(|shared| &shared.expert)) {
            self.note_halves(&only_shape(expert), &mut types);
        }
        types
    }

    /// x → h, in the forms that a layer's experts and its router read.
    pub fn ffn_input(
        &self,
        l: usize,
        norm: &Norm<OnDevice>,
        x: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        let acts = self.normed_acts(norm, x, self.ffn_weights(l).inputs())?;
        self.with_halves(acts, self.ffn_halves(l), self.h(), self.slice(&self.layout().acts))
    }

    /// Stores h again in these forms.
    pub fn ffn_input_of_h(&self, l: usize) -> Result<GpuActs<'a>> {
        let acts = self.acts_of_h(self.ffn_weights(l).inputs())?;
        self.with_halves(acts, self.ffn_halves(l), self.h(), self.slice(&self.layout().acts))
    }

    /// x → h, in the forms that one expert reads.
    pub fn branch_input(
        &self,
        expert: &GpuOnly,
        norm: &Norm<OnDevice>,
        x: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        let mut types = HalfTypes::default();
        self.note_halves(&only_shape(expert), &mut types);
        let acts = self.normed_acts(norm, x, expert.shape.inputs())?;
        self.with_halves(acts, types, self.h(), self.slice(&self.layout().acts))
    }

    /// The forms of the routed experts' input that they read, which are stored already.
    pub fn ffn_acts(&self, l: usize) -> GpuActs<'a> {
        let (w, layout, ops) = (self.ffn_weights(l), self.layout(), &self.dev.ops);
        if w.has_own_input() {
            let (rows, memory) = (self.expert_input(l), self.slice(&layout.ffn.latent_acts));
            let acts = GpuActs::at(w.expert.inputs(), self.input_rows(l), rows, memory);
            return acts.halves_at(ops, self.routed_halves(l), rows, memory);
        }
        let memory = self.slice(&layout.acts);
        let acts = GpuActs::at(w.inputs(), self.embd_rows(self.n()), self.h(), memory);
        acts.halves_at(ops, self.ffn_halves(l), self.h(), memory)
    }
}
