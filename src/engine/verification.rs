//! A session's part in speculation: drafts of another model and of the model's own layer, and
//! states that refused drafts are taken back to.

use super::speculation::{DraftSource, MAX_DRAFTS, NextTokenText, best};
use super::{Session, Want};
use crate::Result;

/// Drafts of a pass at most where the model has a state: the state behind each of its tokens is
/// copied.
const MAX_STATES: usize = 4;

impl Session {
    /// The maker of drafts that are not found in the text, and how many it makes at most: another
    /// model, or the model's own layer.
    pub(super) fn drafter(&self) -> Option<(DraftSource, usize)> {
        match (&self.draft, &self.outputs) {
            (Some(_), _) => Some((DraftSource::Model, MAX_DRAFTS)),
            (None, Some(_)) => Some((DraftSource::Layer, NextTokenText::MAX_DRAFTS)),
            (None, None) => None,
        }
    }

    /// Drafts that may follow `text`, whose last token is not computed yet: `n` at most.
    pub(super) fn draft(&mut self, text: &[u32], n: usize) -> Result<Vec<u32>> {
        if let Some(draft) = &mut self.draft {
            let mut tokens = draft.best_continuation(text, n)?;
            // The draft model may have more tokens at the end of its vocabulary.
            let n_vocab = self.engine.tokenizer().n_vocab() as u32;
            tokens.truncate(tokens.iter().take_while(|id| **id < n_vocab).count());
            return Ok(tokens);
        }
        let engine = self.engine.clone();
        let (Some(head), Some(outputs)) = (&engine.model.next, &mut self.outputs) else {
            return Ok(Vec::new());
        };
        let drafts = engine.compute.draft(head, |compute| outputs.draft(text, n, compute));
        drafts.map(Option::unwrap_or_default)
    }

    /// The most likely token after `text`, the one after that, and so on: `n` at most, fewer where
    /// the context ends.
    fn best_continuation(&mut self, text: &[u32], n: usize) -> Result<Vec<u32>> {
        let n = n.min((self.engine.n_ctx() + 1).saturating_sub(text.len()));
        let mut tokens: Vec<u32> = Vec::with_capacity(n);
        let n_left = if n > 0 { self.sync(text)? } else { 0 };
        while tokens.len() < n {
            let next = match tokens.last() {
                None => self.eval(&text[text.len() - n_left..], Want::Last)?,
                Some(last) => self.eval(&[*last], Want::Last)?,
            };
            tokens.push(best(next.all()));
        }
        Ok(tokens)
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
