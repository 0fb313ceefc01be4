//! Attention to a source text on a device, as in `forward::encoder_decoder`.

use crate::Result;
use crate::backend::gpu::attention::DeviceAttention;
use crate::forward::gpu::layers::GpuAttention;
use crate::forward::gpu::pass::{GpuPass, Role};
use std::ops::Range;

impl<'a> GpuPass<'a> {
    /// The encoder's output, in h → keys and values of the source text, for these layers of the
    /// decoder.
    pub fn cross_keys(&self, layers: Range<usize>) -> Result<()> {
        let (hyper, m) = (self.hyper(), &self.layout().mixer);
        let heads = self.n() * hyper.n_head_kv;
        let (k, v) = (&m.k, &m.v);
        let k = self.words(k, heads * hyper.head_dim);
        let v = self.words(v, heads * hyper.head_dim_v);
        for l in layers {
            let cross = self.dev.layers[l].as_ref().and_then(|layer| layer.cross.as_ref());
            let w = &cross.expect("a layer of the decoder on the device").attention;
            let acts = self.acts_of_h([&w.k, &w.v].map(|linear| linear.weight.ty))?;
            self.linear(&w.k, &acts, k)?;
            self.linear(&w.v, &acts, v)?;
            let (keys, values) = self.source_rows(l);
            self.store(k, keys)?;
            self.store(v, values)?;
        }
        Ok(())
    }

    /// h → y. The cache has the keys and values already.
    pub fn cross_attention(&self, l: usize, w: &GpuAttention) -> Result<()> {
        let (hyper, m) = (self.hyper(), &self.layout().mixer);
        let heads = self.n() * hyper.n_head;
        let acts = self.acts_of_h([w.q.weight.ty])?;
        let q = self.words(&m.q, heads * hyper.head_dim);
        self.linear(&w.q, &acts, q)?;
        let (keys, values) = self.source_rows(l);
        let attended = self.words(&m.attended, heads * hyper.head_dim_v);
        self.attend(&self.view_of_source(), q, keys, values, attended)?;
        self.attention_output(&w.output)
    }

    /// The view of the decoder's queries: all of the source text. A decoded token is placed at
    /// the last position of the source text; the position is read from memory, so that one graph
    /// serves source texts of any length.
    fn view_of_source(&self) -> DeviceAttention<'a> {
        let Role::Answer { n_source } = self.role else { panic!("no source text was encoded") };
        let view = DeviceAttention { max_seen: self.max_source(), bias: None, ..self.view() };
        match self.is_prompt() {
            true => DeviceAttention { all: Some(n_source), ..view },
            false => DeviceAttention { past: self.words(&self.layout().source, 1), ..view },
        }
    }
}
