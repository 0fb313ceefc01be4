//! One text that follows a grammar.

use super::compile::{Compiled, Held};
use super::matcher::Matcher;
use super::trigger::Trigger;
use super::vocabulary::piece;
use crate::{Error, Result};
use llguidance::toktrie::{SimpleVob, TokEnv};
use std::sync::Arc;

/// Tokens that a forced text may begin with, at most: a token for each of its first bytes.
const MAX_PIECES: usize = 32;

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
/// free until a trigger, before which it cannot end. With [`Constraint::or_after`] it may begin
/// with a free block. With [`Constraint::resuming`] it is free again where the grammar is complete,
/// waits for the next trigger, and may end.
#[derive(Clone)]
pub struct Constraint {
    env: TokEnv,
    start: Arc<Compiled>,
    /// Bytes of `matcher`.
    _held: Held,
    matcher: Matcher,
    phase: Phase,
    /// The next choice's, once it is computed.
    mask: Option<TokenMask>,
    trigger: Option<Trigger>,
    /// The tokens that open a free block.
    opening: Vec<u32>,
    /// All tokens but those that end a generation.
    going_on: Option<Arc<TokenMask>>,
    resumes: bool,
    /// Whether a token was accepted in the grammar.
    has_begun: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// In the tokens that open a free block, of which so many are there. Before the first one the
    /// grammar may begin as well.
    Opening(usize),
    /// Until the trigger.
    Free,
    Following,
    /// Nothing can follow.
    Complete,
}

impl Constraint {
    pub(super) fn new(env: TokEnv, start: Arc<Compiled>) -> Result<Constraint> {
        Ok(Constraint {
            _held: Held::new(start.held.bytes())?,
            matcher: start.matcher.clone(),
            mask: Some(TokenMask(start.first.clone())),
            phase: Phase::Following,
            trigger: None,
            opening: Vec::new(),
            going_on: None,
            resumes: false,
            has_begun: false,
            env,
            start,
        })
    }

    /// Lets the text be free until one of these triggers was generated; the grammar begins right
    /// after it. A control token's text is its name. Without a trigger nothing changes.
    pub fn after(mut self, triggers: impl IntoIterator<Item = Vec<u8>>) -> Constraint {
        self.trigger = Trigger::new(triggers);
        self.phase = if self.trigger.is_some() { Phase::Free } else { Phase::Following };
        self.goes_on()
    }

    /// Lets the text begin with a free block, which these tokens open; the grammar begins after
    /// `close`, or at once if the text does not begin with the block. Nothing changes if the
    /// grammar itself allows the first of the tokens.
    pub fn or_after(mut self, open: Vec<u32>, close: Vec<u8>) -> Constraint {
        let n_vocab = self.env.tok_trie().vocab_size();
        let is_known = open.iter().all(|&id| (id as usize) < n_vocab);
        let is_apart = open.first().is_some_and(|&id| is_known && !self.start.first.is_allowed(id));
        if is_apart && !close.is_empty() {
            let mut first = self.start.first.clone();
            first.allow_token(open[0]);
            self.trigger = Trigger::new([close]);
            (self.phase, self.mask) = (Phase::Opening(0), Some(TokenMask(first)));
            self.opening = open;
            return self.goes_on();
        }
        self
    }

    /// Keeps the text from ending while it is free.
    fn goes_on(mut self) -> Constraint {
        if self.trigger.is_some() {
            let trie = self.env.tok_trie();
            let mut mask = trie.alloc_token_set();
            mask.set_all(true);
            trie.eos_tokens().iter().for_each(|&id| mask.disallow_token(id));
            self.going_on = Some(Arc::new(TokenMask(mask)));
        }
        self
    }

    /// Lets the text be free again where nothing can follow in the grammar, until the next trigger.
    /// Without a trigger nothing changes.
    pub fn resuming(mut self) -> Constraint {
        self.resumes = self.trigger.is_some();
        self.going_on = None;
        self
    }

    /// Whether the next token must fit the grammar. The choice needs the logits of all tokens then.
    pub fn is_active(&self) -> bool {
        self.phase != Phase::Free || self.going_on.is_some()
    }

    /// Whether the grammar is complete and nothing can follow, not even free text.
    pub fn is_complete(&self) -> bool {
        self.phase == Phase::Complete
    }

    /// Whether the text may end here.
    pub fn can_end(&mut self) -> Result<bool> {
        match self.phase {
            Phase::Opening(_) => Ok(false),
            Phase::Following => self.matcher.can_end(),
            Phase::Free => Ok(self.going_on.is_none()),
            Phase::Complete => Ok(true),
        }
    }

    /// Whether the next call of `mask` computes one.
    pub fn needs_mask(&self) -> bool {
        self.phase != Phase::Free && self.mask.is_none()
    }

    /// The tokens that may come next; `None` while all may. Computed once per token: call it while
    /// the logits are computed, and the choice need not wait for it.
    pub fn mask(&mut self) -> Result<Option<&TokenMask>> {
        if self.phase == Phase::Free {
            return Ok(self.going_on.as_deref());
        }
        if self.mask.is_none() {
            let trie = self.env.tok_trie();
            self.mask = Some(TokenMask(match self.phase {
                Phase::Opening(n) => trie.singleton_token_set(self.opening[n]),
                _ => self.matcher.mask(trie)?,
            }));
        }
        Ok(self.mask.as_ref())
    }

    /// The tokens of the bytes that must come next, by the longest ones that fit; none where there
    /// is a choice. A guess: the text may come in other tokens.
    pub fn forced(&mut self) -> Result<Vec<u32>> {
        let Some(mask) = self.mask()? else { return Ok(Vec::new()) };
        // Those are the beginnings of one text, or there is more than one.
        if mask.0.num_set() > MAX_PIECES {
            return Ok(Vec::new());
        }
        match self.phase {
            Phase::Opening(n) if n > 0 => Ok(self.opening[n..].to_vec()),
            Phase::Following => {
                let env = self.env.clone();
                let bytes = self.matcher.forced()?;
                Ok(env.tok_trie().greedy_tokenize(&bytes))
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Hears of a token that is now part of the text. An end token is none. White space that the
    /// mask does not allow may stand before the grammar where its token was forced.
    pub fn accept(&mut self, id: u32) -> Result<()> {
        let env = self.env.clone();
        let trie = env.tok_trie();
        if id as usize >= trie.vocab_size() {
            return Err(Error::invalid(format!("token {id} is not in the vocabulary")));
        }
        let is_space = piece(trie, id).iter().all(u8::is_ascii_whitespace);
        if self.phase == Phase::Following && !self.has_begun && is_space {
            let may_follow = self.mask()?.is_some_and(|mask| mask.allows(id));
            if !may_follow {
                return Ok(());
            }
        }
        self.mask = None;
        match self.phase {
            Phase::Opening(n) if self.opening[n] == id => {
                let is_open = n + 1 == self.opening.len();
                self.phase = if is_open { Phase::Free } else { Phase::Opening(n + 1) };
            }
            Phase::Opening(0) => {
                self.restart(Phase::Following);
                return self.accept(id);
            }
            Phase::Opening(_) => {
                return Err(Error::invalid(format!("token {id} does not open the reasoning")));
            }
            Phase::Free => {
                let rest = self.trigger.as_mut().and_then(|trigger| trigger.push(piece(trie, id)));
                if let Some(rest) = rest {
                    self.begin(rest)?;
                }
            }
            Phase::Following => {
                self.has_begun = true;
                self.matcher.accept(id, trie)?;
            }
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

    /// Begins the grammar behind a trigger; `rest` came with it in the same token, perhaps with
    /// white space first. The text stays free if that does not fit.
    fn begin(&mut self, rest: &[u8]) -> Result<()> {
        for rest in [rest, rest.trim_ascii_start()] {
            self.restart(Phase::Following);
            if rest.is_empty() {
                return Ok(());
            }
            (self.mask, self.has_begun) = (None, true);
            if self.matcher.accept_bytes(rest, self.env.tok_trie())? {
                return Ok(());
            }
        }
        log::debug!("the text behind the trigger does not fit the grammar: it stays free");
        self.restart(Phase::Free);
        Ok(())
    }

    /// Puts the grammar back to its beginning.
    fn restart(&mut self, phase: Phase) {
        self.matcher = self.start.matcher.clone();
        self.mask = Some(TokenMask(self.start.first.clone()));
        (self.phase, self.has_begun) = (phase, false);
    }
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Constraint({:?})", self.phase)
    }
}
