//! Attention to a source text on a device, as in `forward::encoder_decoder`.

use crate::Result;
use crate::backend::gpu::attention::DeviceAttention;
use crate::forward::gpu::layers::GpuCross;
use crate::forward::gpu::pass::{GpuPass, GpuSegment};
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
            let w = cross.expect("a layer of the decoder on the device");
            let acts = self.acts_of_h([&w.k, &w.v].map(|linear| linear.weight.ty))?;
            self.linear(&w.k, &acts, k)?;
            self.linear(&w.v, &acts, v)?;
            for segment in self.segments() {
                let (keys, values) = self.source_rows(l, &segment);
                self.store(&segment, k, keys)?;
                self.store(&segment, v, values)?;
            }
        }
        Ok(())
    }

    /// h → y. The cache has the keys and values already.
    pub fn cross_attention(&self, l: usize, w: &GpuCross) -> Result<()> {
        let (hyper, m) = (self.hyper(), &self.layout().mixer);
        let heads = self.n() * hyper.n_head;
        let acts = self.acts_of_h([w.q.weight.ty])?;
        let q = self.words(&m.q, heads * hyper.head_dim);
        self.linear(&w.q, &acts, q)?;
        let attended = self.words(&m.attended, heads * hyper.head_dim_v);
        for segment in self.segments() {
            let (keys, values) = self.source_rows(l, &segment);
            self.attend(&segment, &self.view_of_source(&segment), q, [keys, values], attended)?;
        }
        self.attention_output(&w.output)
    }

    /// The view of the decoder's queries: all of the source text. A decoded token is placed at
    /// the last position of the source text; the position is read from memory, so that one graph
    /// serves source texts of any length.
    fn view_of_source(&self, segment: &GpuSegment<'a>) -> DeviceAttention<'a> {
        let max_seen = self.max_source(segment);
        let view = DeviceAttention { max_seen, bias: None, ..self.view(segment) };
        if !self.is_decode() {
            return DeviceAttention { all: Some(self.n_source(segment)), ..view };
        }
        let past = segment.word(self.words(&self.kept().source, 1));
        DeviceAttention { past, ..view }
    }
}
