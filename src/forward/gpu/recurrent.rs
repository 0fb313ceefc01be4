//! Layers with a recurrence on a device: the stages of `forward::recurrent`.

use crate::Result;
use crate::backend::gpu::conv::ConvRows;
use crate::forward::gpu::layers::GpuShortConv;
use crate::forward::gpu::pass::GpuPass;

impl GpuPass<'_> {
    /// h → y = convolution(h)
    pub fn short_conv(&mut self, l: usize, w: &GpuShortConv) -> Result<()> {
        let (m, dev, n_embd) = (&self.layout().mixer, self.dev, self.hyper().n_embd);
        // b, c and x of output · (c ⊙ conv(b ⊙ x))
        let acts = self.acts_of_h([w.input.weight.ty])?;
        let width = w.input.weight.rows;
        let projected = self.words(&m.qkv, self.n() * width);
        self.linear(&w.input, &acts, projected)?;
        // convolution: each text with its own past
        let attended = self.words(&m.attended, self.n() * n_embd);
        let (conv, stream) = (dev.weights.conv(&w.conv), self.stream());
        let [factor, gate] = [0, n_embd].map(Some);
        self.over_states(l, |part, [past, _]| {
            let rows = part.of(projected, width);
            let x = ConvRows { rows, stride: width, first: 2 * n_embd, factor, gate };
            dev.ops.conv.launch(stream, &conv, past, x, part.of(attended, n_embd))
        })?;
        self.attention_output(&w.output)
    }
}
