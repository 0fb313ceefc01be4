//! A session's part in speculation: drafts and look-aheads of the model's own layer, and states
//! that refused drafts are taken back to.

use super::Session;
use super::speculation::MAX_DRAFTS;
use crate::Result;

/// Drafts of a pass at most where the model has a state: the state behind each of its tokens is
/// copied.
const MAX_STATES: usize = 4;

impl Session {
    /// Whether the model has a layer that drafts.
    pub(super) fn predicts_next(&self) -> bool {
        self.outputs.is_some()
    }

    /// Drafts of the model's layer that may follow `text`, whose last token is not computed yet.
    pub(super) fn draft(&mut self, text: &[u32], n: usize) -> Result<Vec<u32>> {
        let engine = self.engine.clone();
        let (Some(head), Some(outputs)) = (&engine.model.next, &mut self.outputs) else {
            return Ok(Vec::new());
        };
        let drafts = engine.compute.draft(head, |compute| outputs.draft(text, n, compute));
        drafts.map(Option::unwrap_or_default)
    }

    /// Shows predictors what the model's layer foretells of the last token of `text`, which is not
    /// computed yet, if they want it and there is such a layer.
    pub(super) fn look_ahead(&mut self, text: &[u32]) -> Result<()> {
        let engine = self.engine.clone();
        let (Some(head), Some(outputs)) = (&engine.model.next, &mut self.outputs) else {
            return Ok(());
        };
        let (model, compute) = (&engine.model, &engine.compute);
        if !model.hierarchy().wants().next_token {
            return Ok(());
        }
        compute.look_ahead(model, head, self.id, |compute| outputs.follow(text, 1, compute))
    }

    /// The logits of the model's layer that predicts the token after the next, `next` being that.
    /// `None` if the model has no such layer, or nothing was computed.
    #[doc(hidden)]
    pub fn next_token_logits(&mut self, next: u32) -> Result<Option<Vec<f32>>> {
        let engine = self.engine.clone();
        let (Some(head), Some(outputs)) = (&engine.model.next, &mut self.outputs) else {
            return Ok(None);
        };
        let text: Vec<u32> = self.tokens.iter().copied().chain([next]).collect();
        let last = engine.compute.draft(head, |compute| outputs.follow(&text, 1, compute))?;
        Ok(last.flatten().map(|(logits, _)| logits))
    }

    /// Whether a pass may compute drafts: the bits of a row must not depend on those behind it.
    pub(super) fn can_verify(&self) -> bool {
        self.engine.can_verify()
    }

    /// Drafts of a pass at most.
    pub(super) fn most_drafts(&self) -> usize {
        if self.has_state() { MAX_STATES } else { MAX_DRAFTS }
    }

    /// The next pass is to verify `n` drafts: it keeps the states before each.
    pub(super) fn begin_verification(&mut self, n: usize) {
        if n > 0 && self.has_state() {
            let first = self.n_past() + 1;
            self.verified_states = self.cache.mark_more(first..first + n);
        }
    }

    /// The drafts of the last pass were accepted or refused: states that only they needed go.
    pub(super) fn end_verification(&mut self) {
        self.checkpoints.drop_at(&self.verified_states);
        self.verified_states.clear();
    }
}
