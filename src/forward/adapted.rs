//! Adapters in the layer loop of the CPU: where a matrix has some, its products get theirs.

use crate::backend::cpu::acts::ActSet;
use crate::backend::cpu::linear::Product;
use crate::backend::ops::{Adapted, AdaptedExperts};
use crate::experts::LayerExperts;
use crate::forward::CpuPass;
use crate::gguf::TensorType;
use crate::model::Model;
use crate::model::weights::{FfnWeights, Linear, Matrix};
use crate::simd::{ActView, FloatBuffer};

impl Model {
    /// The adapters of a matrix, for rows of these factors, their input and the first row.
    pub(super) fn adapted<'a>(
        &'a self,
        matrix: &Matrix,
        acts: &'a ActSet,
        factors: &'a [f32],
    ) -> Option<(Adapted<'a>, ActView<'a>, usize)> {
        let adapters = self.adapters.as_ref()?;
        let (tensor, first) = matrix.place()?;
        let adapted = adapters.of(tensor, factors);
        // A tied output is the embedding, which is adapted where it is looked up in.
        let is_table = self.weights.token_embd.place().is_some_and(|(table, _)| table == tensor);
        let is_there = !adapted.pairs.is_empty() && !is_table;
        is_there.then(|| (adapted, acts.view(TensorType::F32), first))
    }
}

impl<'p> CpuPass<'p, '_> {
    /// Computes [`Model::linear`] for the rows of the batch, with the matrix's adapters.
    pub(super) fn linear<'a>(
        &'a self,
        linear: &'a Linear,
        acts: &'a ActSet,
        out: &'a mut impl FloatBuffer,
        n: usize,
    ) -> Product<'a> {
        let adapted = self.adapted(&linear.weight, acts);
        Product { adapted, ..self.model.linear(linear, acts, out, n) }
    }

    /// The adapters of a matrix, for the rows of the batch.
    pub(super) fn adapted<'a>(
        &'a self,
        matrix: &Matrix,
        acts: &'a ActSet,
    ) -> Option<(Adapted<'a>, ActView<'a>, usize)> {
        self.model.adapted(matrix, acts, self.batch.row_factors().0)
    }

    /// The adapters of a layer's routed experts, or of its dense one.
    pub(super) fn adapted_experts(&self, l: usize, ffn: &FfnWeights) -> Option<AdaptedExperts<'p>> {
        self.adapted_of(self.model.weights.experts_of(l, &ffn.gate))
    }

    /// The adapters of some experts.
    pub(super) fn adapted_of(&self, experts: Option<&LayerExperts>) -> Option<AdaptedExperts<'p>> {
        let (model, batch) = (self.model, self.batch);
        model.adapters.as_ref()?.of_experts(experts?, batch.row_factors().0)
    }

    /// x += scale · B · A's column of each token
    pub(super) fn adapt_embeddings(&self, x: &mut [f32]) {
        let (Some(adapters), Some((table, _))) =
            (&self.model.adapters, self.model.weights.token_embd.place())
        else {
            return;
        };
        let n_embd = self.model.hyper.n_embd;
        let adapted = adapters.of(table, self.batch.row_factors().0);
        let rows = x.chunks_exact_mut(n_embd).zip(self.batch.tokens());
        for (row, (x, token)) in rows.enumerate() {
            for pair in adapted.pairs {
                let factor = adapted.factor(row, pair) * self.model.hyper.embedding_scale;
                if factor == 0.0 {
                    continue;
                }
                for k in 0..pair.rank {
                    let a = pair.a(0, k)[*token as usize];
                    self.cpu.kernels.axpy(x, factor * a, pair.b(0, k));
                }
            }
        }
    }
}
