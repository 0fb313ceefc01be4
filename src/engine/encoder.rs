//! Sessions of encoder–decoder models: a source text is read once, then answered.

use super::Session;
use super::compute::{Pass, Stack};
use super::observer::Listeners;
use crate::forward::Want;
use crate::policy::Phase;
use crate::{Error, Result};

impl Session {
    /// Reads a source text in one pass and replaces the one before; what is evaluated from now on
    /// answers it. Encoder–decoder models only.
    ///
    /// After an error, and after cancelling, the session has no source text.
    pub fn encode(&mut self, tokens: &[u32]) -> Result<()> {
        let engine = self.engine.clone();
        if engine.encoder().is_none() {
            let file = engine.model.path().display();
            return Err(Error::invalid(format!("{file}: the model has no encoder")));
        }
        if tokens.is_empty() {
            return Err(Error::invalid("the source text is empty: there is nothing to answer"));
        }
        self.tokens.clear();
        self.n_source = 0;
        self.check_ids(tokens)?;
        self.check_room(0, tokens.len())?;
        self.start_request();
        self.cancel.check()?;
        let cancel = self.cancel.clone();
        let (text, listener) = self.parts(tokens, Phase::Prompt, Want::None);
        let (texts, outputs) = (&mut [text], &mut Listeners(&mut [listener]));
        let pass = Pass { stack: Stack::Encoder, texts, cancel, outputs, progress: None };
        engine.compute.run(&engine.model, pass)?;
        engine.check_files()?;
        self.n_source = tokens.len();
        Ok(())
    }

    /// Checks that there is a text to answer, where the model needs one.
    pub(super) fn check_source(&self) -> Result<()> {
        if self.engine.encoder().is_none() || self.n_source > 0 {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{}: an encoder–decoder model answers a source text, and this session has none (`run` \
             and `logits --decoder-tokens` give it one)",
            self.engine.model.path().display()
        )))
    }
}
