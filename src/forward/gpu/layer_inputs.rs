//! Inputs of each layer's own on a device, as in `forward::layer_inputs`, which makes them.

use crate::Result;
use crate::backend::ops::{Activation, ExpertForm};
use crate::forward::gpu::acts::RowShape;
use crate::forward::gpu::pack::OnDevice;
use crate::forward::gpu::pass::GpuPass;
use crate::model::weights::InputPart;

/// The function of a layer's gate.
const GATED: ExpertForm = ExpertForm {
    activation: Activation::Gelu,
    limit: 0.0,
    up_limit: 0.0,
    biases: None,
    scales: None,
    adapted: None,
};

impl GpuPass<'_> {
    /// Uploads the inputs of all layers, if the model has such.
    pub fn upload_layer_inputs(&mut self) -> Result<()> {
        let (n_layers, width) = (self.hyper().n_layers, self.hyper().layer_input);
        if width == 0 {
            return Ok(());
        }
        let to = self.words(&self.kept().inputs, n_layers * self.n() * width);
        let all = self.b.inputs.by_layer(n_layers, width);
        self.state.staging.upload(&self.dev.stream, to, all, f32::to_le_bytes)
    }

    /// x → x, behind the feed-forward part of a layer: what it makes of an input of its own, and
    /// its factor.
    pub fn end_layer(&self, l: usize) -> Result<()> {
        let layer = self.layer(l);
        if let Some(part) = &layer.input {
            self.add_layer_input(l, part)?;
        }
        match layer.scale {
            1.0 => Ok(()),
            scale => self.dev.ops.rows.scale(self.stream(), self.x(), scale),
        }
    }

    /// x += norm(output · (gelu(gate · x) ⊙ input)); y and h are overwritten.
    fn add_layer_input(&self, l: usize, part: &InputPart<OnDevice>) -> Result<()> {
        let (n, width, m) = (self.n(), self.hyper().layer_input, &self.layout().mixer);
        let all = self.words(&self.kept().inputs, self.hyper().n_layers * n * width);
        let own = all.slice(4 * l * n * width..4 * (l + 1) * n * width);
        let acts = self.acts_of([part.gate.weight.ty], n, self.x())?;
        let gate = self.words(&m.gate, n * width);
        self.linear(&part.gate, &acts, gate)?;
        let inner = self.words(&m.attended, n * width);
        self.dev.ops.activate.gated(self.stream(), GATED, Some(gate), own, inner)?;
        let acts = self.mixer_acts([part.output.weight.ty], RowShape { n, cols: width }, inner)?;
        self.linear(&part.output, &acts, self.y())?;
        self.norm(&part.norm, self.y(), self.h())?;
        self.dev.ops.norm.add_scaled(self.stream(), self.x(), 1.0, self.h())
    }
}
