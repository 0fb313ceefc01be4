//! The last layer of a prompt: behind its mixer only rows with logits matter, one of a whole prompt
//! as a rule, so no others go through its feed-forward part.

use crate::Result;
use crate::forward::CpuPass;
use crate::forward::scratch::Buffers;
use crate::model::Model;
use crate::model::weights::Streams;

impl Model {
    /// Whether the last layer may leave rows out. Experts that are streamed are chosen for all
    /// rows, as recordings and policies count on it; a full expert turns tokens away, whoever
    /// needs them.
    pub fn may_leave_rows_out(&self) -> bool {
        let Some(layer) = self.weights.layers.last() else { return false };
        let Some(ffn) = &layer.ffn else { return false };
        let is_plain = !ffn.routes_stream && matches!(layer.streams, [Streams::One, Streams::One]);
        let is_seen = self.experts_of(&ffn.gate).is_streamed() || self.hierarchy.has_policies();
        let is_free = self.hyper.routing.capacity.is_none() && self.hyper.encoder.is_none();
        is_plain && is_free && !is_seen
    }
}

impl CpuPass<'_, '_> {
    /// Some rows of this pass serve the mixer alone: there is no reader behind it.
    pub(super) fn leaves_rows_out(&mut self, b: &Buffers) -> bool {
        self.model.may_leave_rows_out()
            && b.logit_rows.len() < self.batch.n_rows()
            && self.batch.segments().all(|(_, segment)| {
                let session = segment.session;
                self.outputs.n_outputs(session) == 0 && self.outputs.recorder(session).is_none()
            })
    }

    /// x → x of layer `l`, the last: of the rows with logits, which are all that `b` has then.
    pub(super) fn last_layer(&mut self, b: &mut Buffers, l: usize) -> Result<()> {
        let (model, n_embd) = (self.model, self.model.hyper.n_embd);
        self.mix(b, l, &model.weights.layers[l])?;
        let width = b.inputs.all.len() / self.batch.n_rows();
        for (i, row) in b.logit_rows.iter_mut().enumerate() {
            let from = row.row * n_embd..(row.row + 1) * n_embd;
            b.x.copy_within(from.clone(), i * n_embd);
            // It is there if the feed-forward part reads it.
            if from.end <= b.before.len() {
                b.before.copy_within(from, i * n_embd);
            }
            b.inputs.all.copy_within(row.row * width..(row.row + 1) * width, i * width);
            row.row = i;
        }
        let n = b.logit_rows.len() * n_embd;
        [&mut b.x, &mut b.before, &mut b.h].into_iter().for_each(|rows| rows.truncate(n));
        b.y.resize(n);
        if n == 0 {
            return Ok(());
        }
        let batch = &self.batch.wanted();
        let CpuPass { cpu, caches, outputs, rests, .. } = self;
        CpuPass { model, cpu, batch, caches, outputs: *outputs, rests: *rests }.behind_mixer(b, l)
    }
}
