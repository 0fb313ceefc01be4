//! The layer that predicts the token after the next (DeepSeek-V3, section 2.2): its input is made
//! of the next token's embedding and of the model's output for this one, and its output goes
//! through an output head. It computes drafts, so nothing of it is part of an answer.

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::forward::scratch::rows_of;
use crate::forward::{Batch, Buffers, CpuPass, Logits, NoRests, Outputs, Segment, Want, record};
use crate::model::kv::KvCache;
use crate::model::next_token::NextTokenHead;
use crate::policy::{Phase, Timing};

/// Consecutive positions of a text.
#[derive(Clone, Copy, Debug)]
pub struct NextTokenRows<'a> {
    /// The model's normalised outputs, [rows, n_embd].
    pub hidden: &'a [f32],
    /// The tokens that follow, `[rows]`.
    pub tokens: &'a [u32],
    /// The position of the first row in the text, and in the head's cache, which may begin later.
    pub position: usize,
    pub row: usize,
    /// The context of the text's session.
    pub n_ctx: usize,
}

impl NextTokenHead {
    /// Appends rows to the head's `cache`; the last one's logits are in `b.logits` and its
    /// normalised output in `b.h` then.
    pub fn forward(
        &self,
        cpu: &Cpu,
        rows: NextTokenRows<'_>,
        cache: &mut KvCache,
        batch: &mut Batch,
        b: &mut Buffers,
    ) -> Result<()> {
        let (model, n, n_embd) = (&self.model, rows.tokens.len(), self.n_embd());
        self.states(cpu, rows, cache, batch, b)?;

        // norm, output head
        let last = rows_of(&b.x, &(n - 1..n), n_embd);
        let h = &mut b.h[..n_embd];
        model.norm(cpu, &model.weights.output_norm, last, h);
        let head = &model.weights.output;
        b.ffn.acts.fill(cpu, Kinds::of([head.weight.ty]), 1, n_embd, h);
        cpu.products([model.linear(head, &b.ffn.acts, &mut b.logits, 1)]);
        model.finish_logits(cpu.kernels, &mut b.logits);
        Ok(())
    }

    /// Appends rows to the head's `cache`; their residual streams are in `b.x` then, [rows,
    /// n_embd].
    pub fn states(
        &self,
        cpu: &Cpu,
        rows: NextTokenRows<'_>,
        cache: &mut KvCache,
        batch: &mut Batch,
        b: &mut Buffers,
    ) -> Result<()> {
        let (model, n, n_embd) = (&self.model, rows.tokens.len(), self.n_embd());
        let phase = if n > 1 { Phase::Prompt } else { Phase::Decode };
        batch.clear();
        let past = rows.row;
        batch.push(Segment { session: 0, request: 0, past, phase, want: Want::Last }, rows.tokens);

        // x = input · [norm(embeddings), norm(outputs)]
        b.h.resize(n * n_embd, 0.0);
        b.before.resize(2 * n * n_embd, 0.0);
        model.embed(rows.tokens, &mut b.x);
        for (i, norm) in [&self.embedding_norm, &self.hidden_norm].into_iter().enumerate() {
            model.norm(cpu, norm, if i == 0 { &b.x } else { rows.hidden }, &mut b.h);
            for (both, one) in b.before.chunks_exact_mut(2 * n_embd).zip(b.h.chunks_exact(n_embd)) {
                both[i * n_embd..][..n_embd].copy_from_slice(one);
            }
        }
        b.ffn.acts.fill(cpu, Kinds::of([self.input.weight.ty]), n, 2 * n_embd, &b.before);
        cpu.products([model.linear(&self.input, &b.ffn.acts, &mut b.y, n)]);
        b.x.copy_from_slice(&b.y);
        b.mixer.ropes.clear();
        b.mixer.ropes.push(model, rows.n_ctx, rows.position..rows.position + n);
        b.events.timing = Timing::default();

        // layer
        let caches = &mut [cache];
        CpuPass { model, cpu, batch, caches, outputs: &mut Drafts, rests: &mut NoRests }.layer(b, 0)
    }
}

impl Buffers {
    /// The logits and the normalised output of the last row of `NextTokenHead::forward`.
    pub fn next_token(&self, n_embd: usize) -> (&[f32], &[f32]) {
        (&self.logits, &self.h[..n_embd])
    }
}

/// Outputs of drafts, which concern no policy and no request.
struct Drafts;

impl Outputs for Drafts {
    fn recorder(&mut self, _session: usize) -> Option<&mut dyn record::Recorder> {
        None
    }

    fn logits(&mut self, _session: usize, _token: usize, _logits: Logits<'_>) {}
}
