//! GBNF, llama.cpp's grammar format, read and followed as llama.cpp does
//! (<https://github.com/ggml-org/llama.cpp/tree/master/grammars>).
//!
//! A GBNF grammar is about characters: `[a-z]* "b"` may end its first part at any letter. A lexer
//! would always take the longest, so these grammars are not translated for llguidance. They are
//! followed by the set of all stacks that the text may have led to (`automaton`).

mod automaton;
mod masks;
mod parse;
mod rules;

use crate::Result;
use automaton::{Automaton, State};
use llguidance::toktrie::{INVALID_TOKEN, Recognizer, SimpleVob, TokTrie};
use masks::Masks;

/// Bytes that are looked ahead where a grammar leaves no choice.
const MAX_FORCED: usize = 128;

/// The state of one text in a grammar.
#[derive(Clone)]
pub struct Matcher {
    automaton: Automaton,
    state: State,
    masks: Masks,
}

impl Matcher {
    /// Fails with a sentence that names the line.
    pub fn new(text: &str) -> Result<Matcher> {
        let (automaton, state) = Automaton::new(parse::parse(text)?)?;
        Ok(Matcher { automaton, state, masks: Masks::default() })
    }

    /// The tokens that may come next; `trie` is the same one for all of a text.
    pub fn mask(&mut self, trie: &TokTrie) -> Result<SimpleVob> {
        if let Some(mask) = self.masks.get(self.state) {
            return Ok((*mask).clone());
        }
        let mask = self.walk(trie)?;
        self.masks.put(self.state, &mask);
        Ok(mask)
    }

    /// The mask, from the tree of all tokens.
    fn walk(&mut self, trie: &TokTrie) -> Result<SimpleVob> {
        let mut mask = trie.alloc_token_set();
        let states = vec![self.state];
        let mut walk = Walk { automaton: &mut self.automaton, states, failed: None };
        trie.add_bias(&mut walk, &mut mask, &[]);
        if let Some(why) = walk.failed {
            return Err(why);
        }
        if self.can_end() {
            let ends = trie.eos_tokens().iter().filter(|&&id| id != INVALID_TOKEN);
            ends.for_each(|&id| mask.allow_token(id));
        }
        Ok(mask)
    }

    /// Adds bytes to the text; false if they do not fit, and nothing is added then.
    pub fn accept(&mut self, bytes: &[u8]) -> Result<bool> {
        let mut state = self.state;
        for &byte in bytes {
            match self.automaton.step(state, byte)? {
                Some(next) => state = next,
                None => return Ok(false),
            }
        }
        self.state = state;
        Ok(true)
    }

    /// The bytes that must come next; empty where there is a choice, or the text may end.
    pub fn forced(&mut self) -> Result<Vec<u8>> {
        let (mut bytes, mut state) = (Vec::new(), self.state);
        while bytes.len() < MAX_FORCED && !self.automaton.can_end(state) {
            let Some((byte, next)) = self.automaton.only_step(state)? else { break };
            bytes.push(byte);
            state = next;
        }
        Ok(bytes)
    }

    /// Whether the text is complete here.
    pub fn can_end(&self) -> bool {
        self.automaton.can_end(self.state)
    }

    /// Whether the text is complete and nothing can follow.
    pub fn must_end(&self) -> bool {
        self.automaton.must_end(self.state)
    }
}

/// The way through the tree of tokens, and the state at each of its bytes.
struct Walk<'a> {
    automaton: &'a mut Automaton,
    states: Vec<State>,
    failed: Option<crate::Error>,
}

impl Recognizer for Walk<'_> {
    fn pop_bytes(&mut self, n: usize) {
        self.states.truncate(self.states.len() - n);
    }

    fn collapse(&mut self) {
        let last = self.states.len() - 1;
        self.states.drain(..last);
    }

    fn trie_finished(&mut self) {
        self.states.truncate(1);
    }

    fn try_push_byte(&mut self, byte: u8) -> bool {
        let state = self.states[self.states.len() - 1];
        match self.automaton.step(state, byte) {
            Ok(Some(next)) => {
                self.states.push(next);
                true
            }
            Ok(None) => false,
            Err(why) => {
                self.failed = Some(why);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests;
