//! Reports of the layer loop about the inputs of its matrices, while a model sums them.

use crate::backend::cpu::acts::ActSet;
use crate::backend::cpu::expert::ExpertBuffers;
use crate::backend::ops::Demand;
use crate::experts::{ExpertTensors, LayerExperts};
use crate::forward::CpuPass;
use crate::gguf::TensorType;
use crate::model::Model;
use crate::model::granules::stacked_names;
use crate::model::weights::{HeadMatrices, Matrix};

impl Model {
    /// A matrix reads these rows. One that is not the first part of its tensor tells nothing new.
    pub(super) fn sum_inputs(&self, matrix: &Matrix, acts: &ActSet) {
        let Some(sums) = &self.input_sums else { return };
        let Some((tensor, 0)) = matrix.place() else { return };
        let x = acts.view(TensorType::F32);
        let rows = (0..x.tokens()).map(|t| (0, x.f32s(t)));
        sums.add(&self.gguf.tensors()[tensor].name, 1, x.cols(), rows);
    }

    /// Each head's matrix reads its row of these, [tokens, heads].
    fn sum_head_inputs(&self, heads: &HeadMatrices, acts: &ActSet) {
        let Some(sums) = &self.input_sums else { return };
        let Some((tensor, 0)) = heads.all.place() else { return };
        let tensor = &self.gguf.tensors()[tensor];
        // Heads that are cut from one matrix are not what the file's columns are.
        if tensor.dims.get(2).is_none_or(|n| *n != heads.n_heads as u64) {
            return;
        }
        let x = acts.view(TensorType::F32);
        let rows = (0..x.tokens()).map(|t| (t % heads.n_heads, x.f32s(t)));
        sums.add(&tensor.name, heads.n_heads, x.cols(), rows);
    }

    /// A layer's experts have read their rows of `acts`, and of what they made of them.
    pub(super) fn sum_expert_inputs(
        &self,
        l: usize,
        experts: Option<&LayerExperts>,
        demand: &Demand,
        acts: &ActSet,
        buffers: &ExpertBuffers,
    ) {
        let (Some(sums), Some(experts)) = (&self.input_sums, experts) else { return };
        let of_file = |tensor: usize| self.gguf.tensors()[tensor].name.clone();
        let (gate, up, down) = match experts.tensors {
            ExpertTensors::Stacked { gate, up, down } => {
                (gate.map(of_file), of_file(up), Some(of_file(down)))
            }
            ExpertTensors::Fused { gate_up, down } => (None, of_file(gate_up), Some(of_file(down))),
            ExpertTensors::Single { tensor } => (None, of_file(tensor), None),
            ExpertTensors::GranuleMajor { .. } => {
                let [gate, up, down] = stacked_names(l);
                (Some(gate), up, Some(down))
            }
        };
        let (x, n) = (acts.view(TensorType::F32), experts.n_experts);
        let pairs = || {
            let slots = demand.experts.iter().enumerate();
            slots.flat_map(|(slot, e)| demand.pairs(slot).map(|pair| (*e as usize, pair)))
        };
        let read = pairs().map(|(e, pair)| (e, x.f32s(demand.inputs()[pair] as usize)));
        sums.add(&up, n, x.cols(), read);
        if let Some(down) = down {
            let inner = pairs().map(|(e, pair)| (e, buffers.inner(pair)));
            sums.add(&down, n, buffers.n_ff(), inner);
        }
        if let Some(gate) = gate {
            sums.set_twin(&up, &gate);
        }
    }
}

impl CpuPass<'_, '_> {
    /// out = each head's matrix · its row of `acts`, [tokens, heads]
    pub(super) fn head_products(&self, heads: &HeadMatrices, acts: &ActSet, out: &mut [f32]) {
        self.model.sum_head_inputs(heads, acts);
        let mats = heads.mats(&self.model.gguf);
        self.cpu.head_products(mats, acts.view(mats.all.ty), out);
    }
}
