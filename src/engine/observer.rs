//! The outputs of a pass, for the sessions that it computes.

use super::embedding::Pooled;
use super::recording::ExpertRecorder;
use super::speculation::NextTokenText;
use super::{Logits, Recorder};
use crate::forward::Outputs;

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
    /// The caller's own, which comes before `experts`.
    pub recorder: Option<&'a mut (dyn Recorder + 'h)>,
    /// The caller's own, and the index of the pass's first token in its call.
    pub on_logits: Option<(&'a mut OnLogits<'h>, usize)>,
}

/// Gets the index of a token and its logits, which it may overwrite.
pub(super) type OnLogits<'h> = dyn FnMut(usize, &mut [f32]) + 'h;

/// The listeners of a pass, by session.
pub(super) struct Listeners<'a, 'l, 'h>(pub &'a mut [Listener<'l, 'h>]);

impl Outputs for Listeners<'_, '_, '_> {
    fn recorder(&mut self, session: usize) -> Option<&mut dyn Recorder> {
        let Listener { recorder, experts, .. } = &mut self.0[session];
        match (recorder, experts) {
            (Some(recorder), _) => Some(&mut **recorder),
            (None, Some(experts)) => Some(&mut **experts),
            (None, None) => None,
        }
    }

    fn experts(&mut self, n: usize) {
        if let Some(listener) = self.0.first_mut() {
            listener.n_experts.push(n as u32);
        }
    }

    fn n_outputs(&self, session: usize) -> usize {
        let Listener { n_tokens, outputs, pooled, .. } = &self.0[session];
        let of_drafts = outputs.as_ref().map_or(0, |_| NextTokenText::WINDOW);
        pooled.as_ref().map_or(0, |pooled| pooled.n_wanted(*n_tokens)).max(of_drafts)
    }

    fn outputs(&mut self, session: usize, position: usize, rows: &[f32]) {
        let Listener { outputs, pooled, .. } = &mut self.0[session];
        if let Some(outputs) = outputs {
            outputs.add(position, rows);
        }
        if let Some(pooled) = pooled {
            pooled.add(position, rows);
        }
    }

    fn logits(&mut self, session: usize, token: usize, logits: Logits<'_>) {
        let listener = &mut self.0[session];
        let logits = match (&mut listener.on_logits, logits) {
            (Some((on_logits, first)), Logits::All(logits)) => {
                on_logits(*first + token, logits);
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
