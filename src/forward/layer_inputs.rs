//! Inputs of each layer's own: see `model::weights::LayerInputs`.

use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::expert::geglu;
use crate::forward::CpuPass;
use crate::model::weights::InputPart;
use crate::quant;
use crate::simd::Floats;
use std::f32::consts::FRAC_1_SQRT_2;

/// Buffers of these inputs.
#[derive(Default)]
pub struct InputBuffers {
    pub all: Floats,    // [rows, n_layers, layer_input]
    gate: Floats,       // [rows, layer_input]
    inner: Floats,      // as `gate`
    row: Vec<f32>,      // [n_layers, layer_input]
    by_layer: Vec<f32>, // [n_layers, rows, layer_input]
    acts: ActSet,       // the input of one product after the other
}

impl InputBuffers {
    /// All inputs, [n_layers, rows, width].
    pub fn by_layer(&mut self, n_layers: usize, width: usize) -> &[f32] {
        self.by_layer.clear();
        for l in 0..n_layers {
            let rows = self.all.chunks_exact(n_layers * width);
            rows.for_each(|row| self.by_layer.extend_from_slice(&row[l * width..][..width]));
        }
        &self.by_layer
    }
}

impl CpuPass<'_, '_> {
    /// x, the rows' embeddings, and their tokens → every layer's input
    pub(super) fn fill_layer_inputs(&self, x: &[f32], inputs: &mut InputBuffers) {
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        let Some(w) = &model.weights.layer_inputs else { return };
        inputs.acts.fill(cpu, Kinds::of([w.projection.weight.ty]), n, model.hyper.n_embd, x);
        cpu.products([model.linear(&w.projection, &inputs.acts, &mut inputs.all, n)]);
        cpu.rms_norm_heads(&mut inputs.all, &w.norm, model.hyper.norm_eps);
        let table = w.token_embd.mat(&model.gguf);
        let factor = (model.hyper.layer_input as f32).sqrt();
        inputs.row.resize(w.token_embd.cols, 0.0);
        let rows = inputs.all.chunks_exact_mut(w.token_embd.cols);
        for (&token, all) in self.batch.tokens().iter().zip(rows) {
            quant::dequantize(table.ty, table.row(token as usize), &mut inputs.row);
            for (x, own) in all.iter_mut().zip(&inputs.row) {
                *x = (*x + factor * own) * FRAC_1_SQRT_2;
            }
        }
    }

    /// x += norm(output · (gelu(gate · x) ⊙ input))
    pub(super) fn add_layer_input(
        &self,
        l: usize,
        part: &InputPart,
        inputs: &mut InputBuffers,
        y: &mut Floats,
        h: &mut [f32],
        x: &mut [f32],
    ) {
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        let (width, n_embd) = (model.hyper.layer_input, model.hyper.n_embd);
        inputs.acts.fill(cpu, Kinds::of([part.gate.weight.ty]), n, n_embd, x);
        cpu.products([model.linear(&part.gate, &inputs.acts, &mut inputs.gate, n)]);
        inputs.inner.resize(n * width);
        let all = inputs.all.chunks_exact(model.hyper.n_layers * width);
        let rows = inputs.gate.chunks_exact(width).zip(inputs.inner.chunks_exact_mut(width));
        for (own, (gate, inner)) in all.zip(rows) {
            geglu(cpu.kernels, gate, &own[l * width..][..width], inner);
        }
        inputs.acts.fill(cpu, Kinds::of([part.output.weight.ty]), n, width, &inputs.inner);
        cpu.products([model.linear(&part.output, &inputs.acts, y, n)]);
        model.norm(cpu, &part.norm, y, h);
        cpu.add_scaled(x, 1.0, h);
    }
}
