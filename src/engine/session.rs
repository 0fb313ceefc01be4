//! One text and its KV cache.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::compute::{PassInput, TextState};
use super::recording::{ExpertRecorder, Experts};
use super::{Engine, Logits, Recorder, TopK, Want};
use crate::cancel::Cancel;
use crate::forward::gpu::GpuCache;
use crate::forward::{Buffers, Observer};
use crate::interrupt;
use crate::model::kv::KvCache;
use crate::policy::Event;
use crate::{Error, Result};

/// One timeline: a text and its KV cache.
pub struct Session {
    pub(super) engine: Arc<Engine>,
    /// What policies know it by.
    pub(super) id: u32,
    /// Whether policies know of its text.
    pub(super) is_started: bool,
    pub(super) kv: KvCache,
    /// Of the layers that are on a device.
    pub(super) gpu_kv: Option<GpuCache>,
    pub(super) buffers: Buffers,
    pub(super) n_past: usize,
    /// Tokens of the text that the encoder has read; 0 if there is none.
    pub(super) n_source: usize,
    /// There while chosen experts are recorded.
    pub(super) recorded: Option<ExpertRecorder>,
    /// See `hear_progress`.
    pub(super) on_progress: Option<OnProgress>,
    pub(super) cancel: Cancel,
}

/// Hears how many tokens of a call are computed.
type OnProgress = Box<dyn FnMut(usize) + Send>;

/// Hands the model's answers on to the session's caller.
pub(super) struct Relay<'a> {
    /// Which of the call's tokens are computed now.
    pub(super) part: Range<usize>,
    pub(super) n_layers: usize,
    pub(super) on_progress: Option<&'a mut OnProgress>,
    pub(super) recorder: Option<&'a mut dyn Recorder>,
    pub(super) on_logits: &'a mut dyn FnMut(usize, Logits<'_>),
    pub(super) cancel: &'a Cancel,
}

impl Observer for Relay<'_> {
    fn recorder(&mut self, _session: usize) -> Option<&mut dyn Recorder> {
        match &mut self.recorder {
            Some(recorder) => Some(&mut **recorder),
            None => None,
        }
    }

    /// A token of decode is done in no time, and then nothing of it is lost.
    fn layer(&mut self, l: usize) -> Result<()> {
        if let Some(on_progress) = &mut self.on_progress {
            on_progress(self.part.start + self.part.len() * l / self.n_layers);
        }
        if self.part.len() > 1 { self.cancel.check() } else { Ok(()) }
    }

    fn logits(&mut self, _session: usize, token: usize, logits: Logits<'_>) {
        (self.on_logits)(self.part.start + token, logits);
    }
}

/// Who takes all logits of a token, among those who take any.
fn whole(on_logits: &mut dyn FnMut(usize, &mut [f32])) -> impl FnMut(usize, Logits<'_>) {
    |token, logits| match logits {
        Logits::All(logits) => on_logits(token, logits),
        Logits::Best { .. } => unreachable!("not wanted"),
    }
}

/// The same tokens, with all logits.
fn all_of(want: Want) -> Want {
    if let Want::LastBest(_) = want { Want::Last } else { want }
}

impl Session {
    pub fn new(engine: &Arc<Engine>) -> Result<Session> {
        let (k, v) = (engine.options.cache_type_k, engine.options.cache_type_v);
        let planned = engine.plan.device.as_ref().map_or(0, |part| part.plan.kv_bytes);
        Ok(Session {
            kv: KvCache::new(&engine.model.hyper().cache_shapes(), engine.n_ctx, k, v),
            gpu_kv: engine.compute.new_cache(&engine.model, engine.n_ctx, [k, v], planned)?,
            engine: engine.clone(),
            id: engine.next_session.fetch_add(1, Ordering::Relaxed),
            is_started: false,
            buffers: Buffers::default(),
            n_past: 0,
            n_source: 0,
            recorded: None,
            on_progress: None,
            cancel: interrupt::token(),
        })
    }

    /// Tokens in the cache.
    pub fn n_past(&self) -> usize {
        self.n_past
    }

    /// Forgets all tokens but the first `n`, or all where a model's state cannot go back; answers
    /// how many are left.
    pub fn truncate(&mut self, n: usize) -> usize {
        self.n_past = self.forget(self.n_past, n);
        self.n_past
    }

    /// Of `n_past` tokens all but the first `n`; answers how many are left.
    fn forget(&mut self, n_past: usize, n: usize) -> usize {
        let left = self.kv.truncate(n_past, n);
        if let (0, Some(on_device)) = (left, &self.gpu_kv)
            && let Err(why) = on_device.clear_states()
        {
            // Of a device that is lost: what is computed next says so again.
            log::warn!("{why}");
        }
        left
    }

    /// Appends `tokens`, computed in micro-batches. `on_logits(index in tokens, logits)` is called
    /// for the last token, for each, or not at all, with all logits. An interruption or an error
    /// leaves the session at the last whole micro-batch or, where a model's state cannot go back,
    /// empty: `n_past` says which.
    pub fn eval(
        &mut self,
        tokens: &[u32],
        want: Want,
        on_logits: &mut dyn FnMut(usize, &mut [f32]),
    ) -> Result<()> {
        self.eval_heard(tokens, all_of(want), &mut whole(on_logits))
    }

    /// `eval` for the last token's logits, of which `enough` is needed: `take` is called once, with
    /// all of them or with these. Without `enough`, with all.
    pub fn eval_last(
        &mut self,
        tokens: &[u32],
        enough: Option<TopK>,
        take: &mut dyn FnMut(Logits<'_>),
    ) -> Result<()> {
        let want = enough.map_or(Want::Last, Want::LastBest);
        self.eval_heard(tokens, want, &mut |_, logits| take(logits))
    }

    /// `eval`, of which `recorder` hears everything. An interruption or an error may leave it in
    /// the middle of a pass.
    pub fn eval_recorded(
        &mut self,
        tokens: &[u32],
        want: Want,
        recorder: &mut dyn Recorder,
        on_logits: &mut dyn FnMut(usize, &mut [f32]),
    ) -> Result<()> {
        self.eval_parts(tokens, all_of(want), Some(recorder), &mut whole(on_logits))
    }

    fn eval_heard(
        &mut self,
        tokens: &[u32],
        want: Want,
        on_logits: &mut dyn FnMut(usize, Logits<'_>),
    ) -> Result<()> {
        let mut recorded = self.recorded.take();
        let recorder = recorded.as_mut().map(|recorder| recorder as &mut dyn Recorder);
        let result = self.eval_parts(tokens, want, recorder, on_logits);
        self.recorded = recorded;
        result
    }

    fn eval_parts(
        &mut self,
        tokens: &[u32],
        want: Want,
        mut recorder: Option<&mut dyn Recorder>,
        on_logits: &mut dyn FnMut(usize, Logits<'_>),
    ) -> Result<()> {
        let engine = self.engine.clone();
        self.check(tokens)?;
        self.start_request();
        if engine.encoder().is_some() {
            return self.answer(tokens, want, recorder, on_logits);
        }
        let n_ubatch = engine.plan.n_ubatch;
        for (i, part) in tokens.chunks(n_ubatch).enumerate() {
            self.cancel.check()?;
            let at = i * n_ubatch..i * n_ubatch + part.len();
            let last = at.end == tokens.len();
            let want = if want == Want::All || last { want } else { Want::None };
            let recorder = recorder.as_mut().map(|recorder| &mut **recorder as &mut dyn Recorder);
            let mut relay = Relay {
                part: at,
                n_layers: engine.n_layers(),
                on_progress: self.on_progress.as_mut(),
                recorder,
                on_logits: &mut *on_logits,
                cancel: &self.cancel,
            };
            let text = TextState {
                kv: &mut self.kv,
                gpu_kv: self.gpu_kv.as_ref(),
                buffers: &mut self.buffers,
                cancel: &self.cancel,
            };
            let input = PassInput {
                tokens: part,
                request: self.id,
                past: self.n_past,
                is_prompt: tokens.len() > 1,
                want,
            };
            let result = engine.compute.forward(&engine.model, text, &input, &mut relay);
            let end = self.n_past + part.len();
            self.n_past = match result {
                Ok(()) => end,
                // Some layers may have seen these tokens.
                Err(_) => self.forget(end, self.n_past),
            };
            result?;
        }
        Ok(())
    }

    /// A session that was emptied begins another text.
    pub(super) fn start_request(&mut self) {
        if self.n_past + self.n_source > 0 && self.is_started {
            return;
        }
        self.end_request();
        self.engine.model.hierarchy().publish(&Event::RequestStart { request: self.id });
        self.is_started = true;
    }

    fn end_request(&mut self) {
        if std::mem::take(&mut self.is_started) {
            self.engine.model.hierarchy().publish(&Event::RequestEnd { request: self.id });
        }
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        self.check_source()?;
        self.check_room(tokens)
    }

    pub(super) fn check_room(&self, tokens: &[u32]) -> Result<()> {
        let (n_vocab, n_ctx) = (self.engine.n_vocab(), self.engine.n_ctx);
        if let Some(bad) = tokens.iter().find(|t| **t as usize >= n_vocab) {
            return Err(Error::invalid(format!(
                "token id {bad} is out of range: the model has {n_vocab} tokens"
            )));
        }
        if self.n_past + tokens.len() > n_ctx {
            return Err(Error::invalid(format!(
                "{} tokens do not fit the context of {n_ctx} ({} are used): raise it with -c",
                tokens.len(),
                self.n_past
            )));
        }
        Ok(())
    }

    /// What ends the calls from now on; at first the process-wide interrupt. A cancelled call fails
    /// with [`Error::Interrupted`], a prompt before its next layer, a token before it is begun, and
    /// both while they wait for experts.
    pub fn set_cancel(&mut self, cancel: Cancel) {
        self.cancel = cancel;
    }

    /// From now on `hear` is told how many of the tokens of a call are computed; of a micro-batch a
    /// part for each layer.
    pub fn hear_progress(&mut self, hear: Option<OnProgress>) {
        self.on_progress = hear;
    }

    /// Starts or stops recording the chosen experts of what `eval` evaluates.
    pub fn record_experts(&mut self, on: bool) {
        let (n_layers, k) = (self.engine.n_layers(), self.engine.model.hyper().routing.k);
        self.recorded = on.then(|| ExpertRecorder::new(n_layers, k.max(1)));
    }

    /// What was recorded since the last call or `record_experts`.
    pub fn take_experts(&mut self) -> Experts {
        self.recorded.as_mut().map(ExpertRecorder::take).unwrap_or_default()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end_request();
        if let Some(cache) = self.gpu_kv.take() {
            self.engine.compute.free(cache);
        }
    }
}
