//! Sessions of encoder–decoder models: a source text is read once, then answered.

use super::compute::{PassInput, TextState};
use super::session::Relay;
use super::{Logits, Session, Want};
use crate::cancel::Cancel;
use crate::forward::record::Recorder;
use crate::{Error, Result};

impl<'a> Relay<'a> {
    /// Of a pass over all tokens of a call.
    fn of_all(
        tokens: &[u32],
        recorder: Option<&'a mut dyn Recorder>,
        on_logits: &'a mut dyn FnMut(usize, Logits<'_>),
        cancel: &'a Cancel,
    ) -> Relay<'a> {
        let part = 0..tokens.len();
        Relay { part, n_layers: 1, on_progress: None, recorder, on_logits, cancel }
    }
}

impl Session {
    /// Reads a source text, all at once, in place of any before it: what is evaluated from now on
    /// answers it. An interruption or an error leaves the session without one.
    pub fn encode(&mut self, tokens: &[u32]) -> Result<()> {
        let engine = self.engine.clone();
        if engine.encoder().is_none() {
            let file = engine.model.path().display();
            return Err(Error::invalid(format!("{file}: the model has no encoder")));
        }
        if tokens.is_empty() {
            return Err(Error::invalid("the source text is empty: there is nothing to answer"));
        }
        (self.n_past, self.n_source) = (0, 0);
        self.check_room(tokens)?;
        self.start_request();
        self.cancel.check()?;
        let recorder = self.recorded.as_mut().map(|recorder| recorder as &mut dyn Recorder);
        let mut ignore = |_: usize, _: Logits<'_>| {};
        let mut relay = Relay::of_all(tokens, recorder, &mut ignore, &self.cancel);
        let text = TextState {
            kv: &mut self.kv,
            gpu_kv: self.gpu_kv.as_ref(),
            buffers: &mut self.buffers,
            cancel: &self.cancel,
        };
        let input =
            PassInput { tokens, request: self.id, past: 0, is_prompt: true, want: Want::None };
        engine.compute.encode(&engine.model, text, &input, &mut relay)?;
        self.n_source = tokens.len();
        Ok(())
    }

    /// One pass of the decoder: the capacity of experts counts the tokens of a call.
    pub(super) fn answer(
        &mut self,
        tokens: &[u32],
        want: Want,
        mut recorder: Option<&mut dyn Recorder>,
        on_logits: &mut dyn FnMut(usize, Logits<'_>),
    ) -> Result<()> {
        self.cancel.check()?;
        let engine = self.engine.clone();
        let recorder = recorder.as_mut().map(|recorder| &mut **recorder as &mut dyn Recorder);
        let mut relay = Relay::of_all(tokens, recorder, on_logits, &self.cancel);
        let text = TextState {
            kv: &mut self.kv,
            gpu_kv: self.gpu_kv.as_ref(),
            buffers: &mut self.buffers,
            cancel: &self.cancel,
        };
        let (request, past, is_prompt) = (self.id, self.n_past, tokens.len() > 1);
        let input = PassInput { tokens, request, past, is_prompt, want };
        engine.compute.forward(&engine.model, text, &input, &mut relay)?;
        self.n_past += tokens.len();
        Ok(())
    }

    /// That there is a text to answer, where the model needs one.
    pub(super) fn check_source(&self) -> Result<()> {
        if self.engine.encoder().is_none() || self.n_source > 0 {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{}: an encoder–decoder model answers a source text, and there is none here (`run` \
             and `logits --decoder-tokens` give it one)",
            self.engine.model.path().display()
        )))
    }
}
