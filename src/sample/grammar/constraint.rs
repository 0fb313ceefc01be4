//! One text that follows a grammar.

use super::compile::Compiled;
use super::matcher::Matcher;
use super::trigger::Trigger;
use super::vocabulary::piece;
use crate::{Error, Result};
use llguidance::toktrie::{SimpleVob, TokEnv};
use std::sync::Arc;

/// Tokens, one bit for each id.
#[derive(Clone, Debug)]
pub struct TokenMask(SimpleVob);

impl TokenMask {
    pub fn allows(&self, id: u32) -> bool {
        (id as usize) < self.0.len() && self.0.is_allowed(id)
    }
}

/// Which tokens may come next in one text. A clone is another text that has come as far.
///
/// From its beginning a text follows the grammar to its end, or with [`Constraint::after`] it is
/// free until a trigger. With [`Constraint::resuming`] it is free again where the grammar is
/// complete, and waits for the next trigger.
#[derive(Clone)]
pub struct Constraint {
    env: TokEnv,
    start: Arc<Compiled>,
    matcher: Matcher,
    phase: Phase,
    /// The next choice's, once it is computed.
    mask: Option<TokenMask>,
    trigger: Option<Trigger>,
    resumes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Until the trigger.
    Free,
    Following,
    /// Nothing can follow.
    Complete,
}

impl Constraint {
    pub(super) fn new(env: TokEnv, start: Arc<Compiled>) -> Constraint {
        Constraint {
            matcher: start.matcher.clone(),
            mask: Some(TokenMask(start.first.clone())),
            phase: Phase::Following,
            trigger: None,
            resumes: false,
            env,
            start,
        }
    }

    /// Lets the text be free until one of these triggers was generated; the grammar begins right
    /// after it. A control token's text is its name. Without a trigger nothing changes.
    pub fn after(mut self, triggers: impl IntoIterator<Item = Vec<u8>>) -> Constraint {
        self.trigger = Trigger::new(triggers);
        self.phase = if self.trigger.is_some() { Phase::Free } else { Phase::Following };
        self
    }

    /// Lets the text be free again where nothing can follow in the grammar, until the next trigger.
    /// Without a trigger nothing changes.
    pub fn resuming(mut self) -> Constraint {
        self.resumes = self.trigger.is_some();
        self
    }

    /// Whether the next token must fit the grammar. The choice needs the logits of all tokens then.
    pub fn is_active(&self) -> bool {
        self.phase != Phase::Free
    }

    /// Whether the grammar is complete and nothing can follow, not even free text.
    pub fn is_complete(&self) -> bool {
        self.phase == Phase::Complete
    }

    /// Whether the text may end here.
    pub fn can_end(&mut self) -> Result<bool> {
        match self.phase {
            Phase::Following => self.matcher.can_end(),
            Phase::Free | Phase::Complete => Ok(true),
        }
    }

    /// The tokens that may come next; `None` while all may. Computed once per token: call it while
    /// the logits are computed, and the choice need not wait for it.
    pub fn mask(&mut self) -> Result<Option<&TokenMask>> {
        if self.phase == Phase::Free {
            return Ok(None);
        }
        if self.mask.is_none() {
            self.mask = Some(TokenMask(self.matcher.mask(self.env.tok_trie())?));
        }
        Ok(self.mask.as_ref())
    }

    /// Hears of a token that is now part of the text. An end token is none.
    pub fn accept(&mut self, id: u32) -> Result<()> {
        let env = self.env.clone();
        let trie = env.tok_trie();
        if id as usize >= trie.vocab_size() {
            return Err(Error::invalid(format!("token {id} is not in the vocabulary")));
        }
        self.mask = None;
        match self.phase {
            Phase::Free => {
                let rest = self.trigger.as_mut().and_then(|trigger| trigger.push(piece(trie, id)));
                if let Some(rest) = rest {
                    self.begin(rest)?;
                }
            }
            Phase::Following => self.matcher.accept(id, trie)?,
            Phase::Complete => {
                return Err(Error::invalid(format!("token {id} follows a complete text")));
            }
        }
        if self.phase == Phase::Following && self.matcher.must_end() {
            match self.resumes {
                true => self.restart(Phase::Free),
                false => self.phase = Phase::Complete,
            }
        }
        Ok(())
    }

    /// Begins the grammar behind a trigger; `rest` came with it in the same token. The text stays
    /// free if that does not fit.
    fn begin(&mut self, rest: &[u8]) -> Result<()> {
        self.restart(Phase::Following);
        if !rest.is_empty() {
            self.mask = None;
            if !self.matcher.accept_bytes(rest, self.env.tok_trie())? {
                log::debug!("the text behind the trigger does not fit the grammar: it stays free");
                self.restart(Phase::Free);
            }
        }
        Ok(())
    }

    /// Puts the grammar back to its beginning.
    fn restart(&mut self, phase: Phase) {
        self.matcher = self.start.matcher.clone();
        self.mask = Some(TokenMask(self.start.first.clone()));
        self.phase = phase;
    }
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Constraint({:?})", self.phase)
    }
}
