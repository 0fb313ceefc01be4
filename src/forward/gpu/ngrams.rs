//! Embeddings of the last tokens together on a device: the stages of `forward::ngrams`. The table
//! stays with the host, which looks a pass's rows up before the first layer.

use crate::Result;
use crate::backend::gpu::conv::{ConvRows, DeviceConv};
use crate::backend::ops::ConvShape;
use crate::forward::gpu::pack::OnDevice;
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::upload::floats;
use crate::model::weights::NgramWeights;

impl GpuPass<'_> {
    /// Uploads the table's rows and the tokens for a layer on the device that reads them. Nothing
    /// of the pass is queued yet.
    pub fn upload_ngrams(&mut self) -> Result<()> {
        let Some(l) = self.hyper().ngrams.first().map(|params| params.layer) else {
            return Ok(());
        };
        let Some(layer) = &self.dev.layers[l] else { return Ok(()) };
        let Some(own) = &layer.ngrams else { return Ok(()) };
        let (stream, slot) = (self.stream(), self.hyper().ngram_slot(l));
        let (batch, mut before) = (self.batch, Vec::new());
        self.b.ngrams.begin(self.n() * self.hyper().n_embd);
        for segment in self.segments() {
            let [past, _] = segment.cache.state(slot);
            let ids = past.slice(4 * own.params.conv().n_past()..past.len());
            let take = &mut |_, bytes: &[u8]| floats(bytes, &mut before);
            self.state.staging.download(stream, &[ids], take)?;
            let tokens = &batch.tokens()[segment.rows.clone()];
            self.b.ngrams.look_up(self.model, &own.params, &before, tokens)?;
        }
        let kept = self.kept();
        let (embedded, ids) = (&self.b.ngrams.embedded, self.words(&kept.ids, self.n()));
        let to = self.words(&kept.ngrams, embedded.len());
        self.state.staging.upload_floats(stream, to, embedded)?;
        // As states keep them.
        let tokens = batch.tokens();
        self.state.staging.upload(stream, ids, tokens, |id| ((id + 1) as f32).to_le_bytes())
    }

    /// Adds to the streams what the last tokens make, before layer `l`.
    pub fn add_ngrams(&mut self, l: usize, w: &NgramWeights<OnDevice>) -> Result<()> {
        let (dev, stream, hyper, n_rows) = (self.dev, self.stream(), self.hyper(), self.n());
        let (ops, eps, n_embd) = (&dev.ops, hyper.norm_eps, hyper.n_embd);
        let conv = w.conv.as_ref().expect("a layer whose streams have kernels");
        let (n, n_past) = (w.params.channels / n_embd, w.params.conv().n_past());
        let (layout, channels) = (&self.layout().ngrams, w.params.channels);
        let ranges = [&layout.key, &layout.query, &layout.normed, &layout.convolved];
        let [key, query, normed, convolved] =
            ranges.map(|range| self.words(range, n_rows * channels));
        let value = self.words(&layout.value, n_rows * n_embd);
        let vector = |vector| dev.weights.vector(vector);
        let embedded = self.words(&self.kept().ngrams, n_rows * n_embd);
        let types = [&w.key, &w.value].map(|linear| linear.weight.ty);
        let acts = self.acts_of(types, n_rows, embedded)?;
        self.linear(&w.key, &acts, key)?;
        self.linear(&w.value, &acts, value)?;
        let all = self.streams(0..n);
        ops.norm.rms_norm_groups(stream, key, vector(&w.key_norm), n, eps)?;
        ops.norm.rms_norm_groups_into(stream, all, vector(&w.query_norm), n, eps, query)?;
        // gate · value, in the key's place
        ops.streams.gate_ngrams(stream, [n_rows, n], [key, query], value)?;
        ops.norm.rms_norm_groups_into(stream, key, vector(&conv.norm), n, eps, normed)?;
        // convolution: each text with its own past, and its last tokens
        let conv = dev.weights.conv(&conv.form);
        let ids = self.words(&self.kept().ids, n_rows);
        let shape = ConvShape { channels: 1, kernel: w.params.n_before() + 1 };
        let (weight, bias, units) = (ids, None, None);
        let last_tokens = DeviceConv { shape, weight, bias, silu: false, units };
        self.over_states(hyper.ngram_slot(l), |part, [past, _]| {
            let rows = ConvRows::plain(part.of(normed, channels), channels);
            let (inputs, own_ids) = (past.slice(0..4 * n_past), 4 * n_past..past.len());
            ops.conv.launch(stream, &conv, inputs, rows, part.of(convolved, channels))?;
            let rows = ConvRows::plain(part.of(ids, 1), 1);
            ops.conv.move_past(stream, &last_tokens, past.slice(own_ids), rows)
        })?;
        ops.rows.add(stream, key, convolved)?;
        ops.rows.add(stream, all, key)
    }
}
