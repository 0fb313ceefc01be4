//! The observer of a pass, for the sessions that it computes.

use std::ops::Range;

use super::embedding::Pooled;
use super::recording::ExpertRecorder;
use super::session::EvalHooks;
use super::speculation::NextTokenText;
use super::{Engine, Logits, Recorder};
use crate::Result;
use crate::cancel::Cancel;
use crate::forward::{Observer, PART_WORK};

/// The logits of a session's last token, or of all tokens of a pass that verifies drafts.
#[derive(Default)]
pub(super) struct LastLogits {
    /// By token id, or those of `ids`; of one token after the other.
    values: Vec<f32>,
    ids: Vec<u32>,
    /// Whether these are the best ones only.
    is_best: bool,
    /// Tokens whose logits these are.
    n: usize,
}

impl LastLogits {
    /// Takes the place of those that were there, or with `adds` comes behind them.
    fn keep(&mut self, logits: Logits<'_>, adds: bool) {
        if !adds {
            self.clear();
        }
        self.n += 1;
        self.is_best = matches!(logits, Logits::Best { .. });
        assert!(self.n == 1 || !self.is_best, "all logits of each token");
        match logits {
            Logits::All(all) => self.values.extend_from_slice(all),
            Logits::Best { ids, logits } => {
                self.ids.extend_from_slice(ids);
                self.values.extend_from_slice(logits);
            }
        }
    }

    pub fn clear(&mut self) {
        self.values.clear();
        self.ids.clear();
        self.n = 0;
    }

    /// Logits of the last token.
    pub fn get(&mut self) -> Logits<'_> {
        self.of(self.n.saturating_sub(1))
    }

    /// Logits of the pass's token with this index, or none.
    pub fn of(&mut self, i: usize) -> Logits<'_> {
        if self.is_best {
            return Logits::Best { ids: &self.ids, logits: &self.values };
        }
        let n_vocab = self.values.len() / self.n.max(1);
        Logits::All(&mut self.values[i * n_vocab..][..n_vocab])
    }
}

/// Listens to a pass for one session.
pub(super) struct Listener<'a, 'h> {
    /// Tokens of the session in the pass.
    pub n_tokens: usize,
    pub logits: &'a mut LastLogits,
    /// Whether the logits of all tokens are kept, and not the last one's alone.
    pub keeps_all: bool,
    /// Gets the outputs that drafts are made of.
    pub outputs: Option<&'a mut NextTokenText>,
    /// Gets those that an embedding is made of.
    pub pooled: Option<&'a mut Pooled>,
    pub experts: Option<&'a mut ExpertRecorder>,
    /// Gets the number of experts of each layer, if it is the first listener of the pass.
    pub n_experts: &'a mut Vec<u32>,
    /// The caller's own, and the tokens of its call that the pass computes. Its recorder comes
    /// before `experts`.
    pub hooks: Option<(&'a mut EvalHooks<'h>, Range<usize>)>,
}

/// Listens to a pass for all of its sessions.
pub(super) struct PassObserver<'a, 'l, 'h> {
    /// By session.
    listeners: &'a mut [Listener<'l, 'h>],
    cancel: &'a Cancel,
    engine: &'a Engine,
    /// Whether the pass looks at `cancel` when it rests. One of few tokens is short, so it is
    /// only cancelled while it waits for experts.
    is_long: bool,
}

impl<'a, 'l, 'h> PassObserver<'a, 'l, 'h> {
    pub fn new(
        engine: &'a Engine,
        listeners: &'a mut [Listener<'l, 'h>],
        cancel: &'a Cancel,
    ) -> Self {
        let is_long = listeners.iter().any(|listener| listener.n_tokens > 1);
        PassObserver { listeners, cancel, engine, is_long }
    }
}

impl Observer for PassObserver<'_, '_, '_> {
    fn recorder(&mut self, session: usize) -> Option<&mut dyn Recorder> {
        let Listener { hooks, experts, .. } = &mut self.listeners[session];
        match (hooks, experts) {
            (Some((EvalHooks { recorder: Some(recorder), .. }, _)), _) => Some(&mut **recorder),
            (_, Some(experts)) => Some(&mut **experts),
            (_, None) => None,
        }
    }

    fn layer(&mut self, l: usize) -> Result<()> {
        let n_layers = self.engine.n_layers();
        for listener in &mut *self.listeners {
            if let Some((EvalHooks { progress: Some(progress), .. }, part)) = &mut listener.hooks {
                progress(part.start + part.len() * l / n_layers);
            }
        }
        self.rest()
    }

    fn rest(&mut self) -> Result<()> {
        if self.is_long { self.cancel.check() } else { Ok(()) }
    }

    fn part_work(&self) -> usize {
        self.engine.options.test.part_work.unwrap_or(PART_WORK)
    }

    fn experts(&mut self, n: usize) {
        if let Some(listener) = self.listeners.first_mut() {
            listener.n_experts.push(n as u32);
        }
    }

    fn n_outputs(&self, session: usize) -> usize {
        let Listener { n_tokens, outputs, pooled, .. } = &self.listeners[session];
        let of_drafts = outputs.as_ref().map_or(0, |_| NextTokenText::WINDOW);
        pooled.as_ref().map_or(0, |pooled| pooled.n_wanted(*n_tokens)).max(of_drafts)
    }

    fn outputs(&mut self, session: usize, position: usize, rows: &[f32]) {
        let Listener { outputs, pooled, .. } = &mut self.listeners[session];
        if let Some(outputs) = outputs {
            outputs.add(position, rows);
        }
        if let Some(pooled) = pooled {
            pooled.add(position, rows);
        }
    }

    fn logits(&mut self, session: usize, token: usize, logits: Logits<'_>) {
        let listener = &mut self.listeners[session];
        let logits = match (&mut listener.hooks, logits) {
            (Some((EvalHooks { on_logits: Some(on_logits), .. }, part)), Logits::All(logits)) => {
                on_logits(part.start + token, logits);
                Logits::All(logits)
            }
            (_, logits) => logits,
        };
        if listener.keeps_all {
            listener.logits.keep(logits, token > 0);
        } else if token + 1 == listener.n_tokens {
            listener.logits.keep(logits, false);
        }
    }
}
