//! The output norm and the output head, for the rows that get logits.

use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::linear::Product;
use crate::forward::batch::LogitRow;
use crate::forward::scratch::rows_of;
use crate::forward::{CpuPass, Outputs};
use crate::model::Model;
use crate::simd::Kernels;

/// Logits are computed for this many rows at a time: a vocabulary is large.
pub const LOGITS_ROWS: usize = 32;

/// Logits of a token.
#[derive(Debug)]
pub enum Logits<'a> {
    /// By token id. The receiver may overwrite them.
    All(&'a mut [f32]),
    /// The greatest first, of equals the lowest id first; [`TopK`](super::TopK) says how many. NaN
    /// and +∞ count as equal, and as greater than all others.
    Best { ids: &'a [u32], logits: &'a [f32] },
}

impl CpuPass<'_, '_> {
    /// x → normalised outputs h of the rows that are wanted
    pub(super) fn outputs(&mut self, x: &[f32], h: &mut [f32]) {
        let (model, n_embd) = (self.model, self.model.hyper.n_embd);
        for (rows, segment) in self.batch.segments() {
            let n = self.outputs.n_outputs(segment.session).min(rows.len());
            if n > 0 {
                let position = segment.past + rows.len() - n;
                let h = &mut h[..n * n_embd];
                let x = rows_of(x, &(rows.end - n..rows.end), n_embd);
                model.norm(self.cpu, &model.weights.output_norm, x, h);
                self.outputs.outputs(segment.session, position, h);
            }
        }
    }

    /// x → logits of `rows`, handed on
    pub(super) fn logits(
        &mut self,
        rows: &[LogitRow],
        x: &[f32],
        h: &mut [f32],
        acts: &mut ActSet,
        logits: &mut Vec<f32>,
    ) {
        let (model, cpu) = (self.model, self.cpu);
        let (head, n_embd) = (&model.weights.output, model.hyper.n_embd);
        for wanted in rows.chunks(LOGITS_ROWS) {
            let n = wanted.len();
            let h = &mut h[..n * n_embd];
            let mut start = 0;
            for run in wanted.chunk_by(|a, b| a.row + 1 == b.row) {
                let rows = run[0].row..run[0].row + run.len();
                let out = &mut h[start * n_embd..][..run.len() * n_embd];
                model.norm(cpu, &model.weights.output_norm, rows_of(x, &rows, n_embd), out);
                start += run.len();
            }
            acts.fill(cpu, Kinds::of([head.weight.ty]), n, n_embd, h);
            let (sessions, adapters) = (wanted.iter().map(|row| row.session), &model.adapters);
            let factors: Vec<f32> = match adapters {
                None => Vec::new(),
                Some(_) => sessions.flat_map(|s| self.batch.factors_of(s)).copied().collect(),
            };
            let adapted = model.adapted(&head.weight, acts, &factors);
            let product = model.linear(head, acts, logits, n);
            cpu.products([Product { adapted, ..product }]);
            model.finish_logits(cpu.kernels, logits);
            model.give_logits(logits, wanted, self.outputs);
        }
    }
}

impl Model {
    /// The head's products → logits.
    pub(super) fn finish_logits(&self, kernels: &Kernels, products: &mut [f32]) {
        if self.weights.logit_divisor != 1.0 {
            products.iter_mut().for_each(|l| *l /= self.weights.logit_divisor);
        }
        if let Some(cap) = self.hyper.logit_cap {
            kernels.soft_cap(products, cap);
        }
    }

    /// The logits of some rows, handed on.
    pub(super) fn give_logits(
        &self,
        logits: &mut [f32],
        rows: &[LogitRow],
        outputs: &mut dyn Outputs,
    ) {
        for (logits, row) in logits.chunks_exact_mut(self.n_vocab()).zip(rows) {
            outputs.logits(row.session, row.token, Logits::All(logits));
        }
    }
}
