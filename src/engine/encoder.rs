//! Sessions of encoder–decoder models: a source text is read once, then answered.

use super::Session;
use super::compute::{PassInput, TextState};
use super::session::{CallObserver, EvalHooks};
use crate::forward::Want;
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
        let mut hooks = EvalHooks::default();
        let mut observer =
            CallObserver::new(&mut hooks, &self.cancel, 0..tokens.len(), engine.n_layers());
        observer.experts = self.experts.as_mut();
        let text = TextState {
            kv: &mut self.kv,
            gpu_kv: self.gpu_kv.as_ref(),
            buffers: &mut self.buffers,
            cancel: &self.cancel,
        };
        let (request, want) = (self.id, Want::None);
        let input = PassInput { tokens, request, past: 0, is_prompt: true, want };
        engine.compute.encode(&engine.model, text, &input, &mut observer)?;
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
