//! The drafts of one text.

use super::lookup::Lookup;
use super::{Draft, DraftKind, DraftSource, MAX_DRAFTS, SpecMode};
use crate::engine::Generation;

/// Finds what may come next in a job's text.
pub struct Drafter {
    /// Made for the first draft.
    lookup: Option<Lookup>,
    draft: Draft,
}

impl Drafter {
    pub fn new() -> Drafter {
        Drafter { lookup: None, draft: Draft::default() }
    }

    /// Finds what may follow a text, whose first `n_prompt` tokens are its prompt: at most `most`
    /// tokens.
    pub fn find(
        &mut self,
        generation: &mut Generation,
        text: &[u32],
        n_prompt: usize,
        most: usize,
    ) {
        self.clear();
        let most = most.min(MAX_DRAFTS);
        if generation.speculation().mode == SpecMode::Off || most == 0 {
            return;
        }
        let forced = generation.forced_tokens();
        if !forced.is_empty() {
            let kind = DraftKind { source: DraftSource::Grammar, n_matched: forced.len() };
            self.draft = Draft { tokens: forced, kind: Some(kind) };
            self.draft.tokens.truncate(most);
            return;
        }
        let lookup =
            self.lookup.get_or_insert_with(|| Lookup::new(&generation.speculation().prediction));
        lookup.follow(text, n_prompt);
        self.draft = lookup.draft(most);
        if self.draft.tokens.first().is_some_and(|id| !generation.may_follow(*id)) {
            self.clear();
        }
    }

    /// Takes drafts that were made, as far as the generation may go on with them.
    pub fn take(&mut self, generation: &mut Generation, source: DraftSource, tokens: Vec<u32>) {
        self.clear();
        if tokens.first().is_some_and(|id| generation.may_follow(*id)) {
            let kind = DraftKind { source, n_matched: 0 };
            self.draft = Draft { tokens, kind: Some(kind) };
        }
    }

    /// Keeps the first `n` tokens.
    pub fn keep(&mut self, n: usize) {
        self.draft.tokens.truncate(n);
    }

    pub fn clear(&mut self) {
        self.draft.tokens.clear();
        self.draft.kind = None;
    }

    pub fn tokens(&self) -> &[u32] {
        &self.draft.tokens
    }

    /// Present if there are tokens.
    pub fn kind(&self) -> Option<DraftKind> {
        self.draft.kind.filter(|_| !self.draft.tokens.is_empty())
    }
}
