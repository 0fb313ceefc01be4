//! Sessions of encoder–decoder models: a source text is read once, then answered.

use super::session::Relay;
use super::{Compute, Logits, Session, Want};
use crate::forward::encoder_decoder::Answering;
use crate::forward::record::Recorder;
use crate::{Error, Result, interrupt};

impl<'a> Relay<'a> {
    /// Of a pass over all tokens of a call.
    fn of_all(
        tokens: &[u32],
        recorder: Option<&'a mut dyn Recorder>,
        on_logits: &'a mut dyn FnMut(usize, Logits<'_>),
    ) -> Relay<'a> {
        Relay { part: 0..tokens.len(), n_layers: 1, on_progress: None, recorder, on_logits }
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
        interrupt::check()?;
        let recorder = self.recorded.as_mut().map(|recorder| recorder as &mut dyn Recorder);
        let mut ignore = |_: usize, _: Logits<'_>| {};
        let mut relay = Relay::of_all(tokens, recorder, &mut ignore);
        let (kv, b) = (&mut self.kv, &mut self.buffers);
        let (model, Compute { cpu, gpu }) = (&engine.model, &mut *engine.compute());
        match (gpu, &self.gpu_kv) {
            (Some(gpu), Some(on_device)) => {
                gpu.encode(model, cpu, (kv, on_device), b, tokens, self.id, &mut relay)?
            }
            _ => model.encode(cpu, kv, b, tokens, self.id, &mut relay)?,
        }
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
        interrupt::check()?;
        let engine = self.engine.clone();
        let recorder = recorder.as_mut().map(|recorder| &mut **recorder as &mut dyn Recorder);
        let mut relay = Relay::of_all(tokens, recorder, on_logits);
        let (kv, b) = (&mut self.kv, &mut self.buffers);
        let at = Answering { request: self.id, n_source: self.n_source, past: self.n_past };
        let (model, Compute { cpu, gpu }) = (&engine.model, &mut *engine.compute());
        match (gpu, &self.gpu_kv) {
            (Some(gpu), Some(on_device)) => {
                gpu.decode(model, cpu, (kv, on_device), b, tokens, at, want, &mut relay)?
            }
            _ => model.decode(cpu, kv, b, tokens, at, want, &mut relay)?,
        }
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
