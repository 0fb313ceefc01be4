//! One text: its tokens and their KV cache.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::checkpoints::Checkpoints;
use super::compute::{Pass, PassText, Stack};
use super::embedding::Pooled;
use super::observer::{LastLogits, Listener, Listeners};
use super::recording::{ExpertRecorder, Experts};
use super::scheduler::{Load, PAGE, Pages, Restored};
use super::speculation::NextTokenText;
use super::text_cache::TextCache;
use super::{Engine, Logits, Recorder, TopK};
use crate::cancel::Cancel;
use crate::forward;
use crate::interrupt;
use crate::model::kv::{KvCache, LayerShape};
use crate::policy::{Event, Phase};
use crate::{Error, Result};

/// One text of an engine: the tokens that were evaluated and their KV cache. Sessions of one engine
/// may be used from several threads; their passes follow one another.
///
/// The context's memory is reserved when the session is made and used as the text grows.
pub struct Session {
    pub(super) engine: Arc<Engine>,
    /// The number by which policies know the text.
    pub(super) id: u32,
    /// Whether policies know that the text has begun.
    is_started: bool,
    pub(super) cache: TextCache,
    pub(super) logits: LastLogits,
    /// The tokens whose keys and values are in the cache.
    pub(super) tokens: Vec<u32>,
    pub(super) checkpoints: Checkpoints,
    /// Positions whose states are kept until a pass's drafts are accepted or refused.
    pub(super) verified_states: Vec<usize>,
    /// The text's part of the layer that predicts the token after the next, if there is one.
    pub(super) outputs: Option<Box<NextTokenText>>,
    /// The text as the model that drafts has read it, if there is one.
    pub(super) draft: Option<Box<Session>>,
    /// Present while the text's outputs are pooled.
    pub(super) pooled: Option<Pooled>,
    /// Tokens of the text that the encoder has read; 0 if there is none.
    pub(super) n_source: usize,
    /// Present while chosen experts are recorded.
    pub(super) experts: Option<ExpertRecorder>,
    /// Experts that each layer needed in the last pass for all of its texts, of which this is the
    /// first one.
    n_experts: Vec<u32>,
    pub(super) cancel: Cancel,
    /// How much of each adapter the text takes; empty if the model has none.
    adapters: Arc<[f32]>,
}

/// The logits of a call's last token that [`Session::eval`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// None: the product with the output matrix is saved.
    None,
    /// All, `[n_vocab]` by token id.
    Last,
    /// The greatest suffice. All are returned where choosing on a GPU saves nothing.
    LastBest(TopK),
}

impl Want {
    pub(super) fn of_pass(self) -> forward::Want {
        match self {
            Want::None => forward::Want::None,
            Want::Last => forward::Want::Last,
            Want::LastBest(top) => forward::Want::LastBest(top),
        }
    }
}

/// Reports of a call while it computes.
#[derive(Default)]
pub struct EvalHooks<'a> {
    /// Called before each layer with the number of tokens that are computed; of a pass under way
    /// the fraction of its layers counts.
    pub progress: Option<&'a mut dyn FnMut(usize)>,
    /// Receives embeddings and routings in the order of the layers.
    pub recorder: Option<&'a mut dyn Recorder>,
    /// Called for every token with its index in the call and its logits, `[n_vocab]`, in order.
    /// The logits may be overwritten.
    pub on_logits: Option<&'a mut dyn FnMut(usize, &mut [f32])>,
}

impl<'a> Logits<'a> {
    /// All logits by token id; `[n_vocab]`, or empty if none were wanted.
    ///
    /// # Panics
    /// If only the best were wanted.
    pub fn all(self) -> &'a mut [f32] {
        match self {
            Logits::All(logits) => logits,
            Logits::Best { .. } => panic!("only the best logits are there"),
        }
    }
}

impl Session {
    pub(super) fn new(engine: &Arc<Engine>) -> Result<Session> {
        let (k, v) = (engine.options.cache_type_k, engine.options.cache_type_v);
        let planned = engine.plan.device.as_ref().map_or(0, |part| part.plan.kv_bytes);
        let planned = planned / engine.options.n_sessions.max(1) as u64;
        let device = engine.compute.new_cache(&engine.model, engine.n_ctx, [k, v], planned)?;
        let mut shapes = engine.model.hyper().cache_shapes();
        for (slot, shape) in shapes.iter_mut().enumerate() {
            if device.as_ref().is_some_and(|device| device.has(slot)) {
                *shape = LayerShape::ELSEWHERE;
            }
        }
        let host = match engine.plan.shares_kv() {
            true => KvCache::in_pages(&shapes, engine.n_ctx, k, v)?,
            false => KvCache::new(&shapes, engine.n_ctx, k, v),
        };
        let next = engine.model.next.as_deref();
        Ok(Session {
            cache: TextCache { host, device },
            engine: engine.clone(),
            id: engine.next_session.fetch_add(1, Ordering::Relaxed),
            is_started: false,
            logits: LastLogits::default(),
            tokens: Vec::with_capacity(engine.n_ctx),
            checkpoints: Checkpoints::default(),
            verified_states: Vec::new(),
            outputs: next.map(|head| Box::new(NextTokenText::new(head, engine.n_ctx, [k, v]))),
            draft: engine.draft.as_ref().map(Session::new).transpose()?.map(Box::new),
            pooled: None,
            n_source: 0,
            experts: None,
            n_experts: Vec::new(),
            cancel: interrupt::token(),
            adapters: engine.adapter_scales().into(),
        })
    }

    /// Tokens in the cache.
    pub fn n_past(&self) -> usize {
        self.tokens.len()
    }

    /// The tokens in the cache, `[n_past]`.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Prepares for evaluating all of `tokens`: keeps the longest prefix that the cache holds,
    /// drops the rest of the cache and returns how many tokens, at the end of `tokens`, are left to
    /// compute. That is at least one, because the last token's logits are wanted. Models with a
    /// recurrent state cannot drop single tokens: see [`Session::truncate`].
    ///
    /// Fails if there are no tokens, if they do not fit the context, or if an id is out of range.
    pub fn sync(&mut self, tokens: &[u32]) -> Result<usize> {
        let Some((_, before_last)) = tokens.split_last() else {
            return Err(Error::invalid("there are no tokens to evaluate"));
        };
        self.check_ids(tokens)?;
        self.check_room(0, tokens.len())?;
        let common = n_common(&self.tokens, before_last);
        Ok(tokens.len() - self.truncate(common))
    }

    /// Drops all tokens but the first `n`; returns how many are left. Where the model has a
    /// recurrent state, that is what the last checkpoint before `n` has: a scheduler makes some,
    /// other sessions have none and drop everything.
    pub fn truncate(&mut self, n: usize) -> usize {
        let left = self.forget(self.n_past(), n);
        self.tokens.truncate(left);
        self.outputs.iter_mut().for_each(|outputs| outputs.truncate(left));
        left
    }

    /// Gives the memory behind the text back, where sessions share it.
    pub(super) fn give_back(&mut self) {
        if self.engine.plan.shares_kv() {
            self.cache.host.give_back(self.n_past());
        }
    }

    /// Whether positions can be copied from and to other sessions and pages: they depend on the
    /// text alone, and not on one that an encoder has read.
    pub(super) fn can_copy(&self) -> bool {
        self.engine.encoder().is_none()
    }

    /// Whether the model has a state, so that a text can go on from checkpoints only.
    pub(super) fn has_state(&self) -> bool {
        self.cache.has_state()
    }

    /// Whether checkpoints are of use, and `pages` have room for one.
    pub(super) fn needs_checkpoints(&self, pages: &Pages) -> bool {
        self.can_copy() && pages.has_room_for_states(&self.cache)
    }

    /// Tokens that a session whose text has the same first `n` can have from this one.
    pub(super) fn n_to_copy(&self, n: usize) -> usize {
        match self.cache.has_state() && n < self.n_past() {
            true => self.checkpoints.last(n).map_or(0, |(n, _)| n),
            false => n.min(self.n_past()),
        }
    }

    /// Copies what follows from another session, whose text begins with this one's, so that this
    /// one holds `n` tokens: one of its checkpoints, if the model has a state, or all that it has.
    pub(super) fn extend_from(&mut self, other: &Session, n: usize) {
        let held = self.n_past();
        debug_assert!(self.can_copy() && other.tokens.starts_with(&self.tokens));
        if n < other.n_past() && self.cache.has_state() {
            let Some((_, states)) = other.checkpoints.last(n).filter(|(at, _)| *at == n) else {
                return;
            };
            self.cache.restore_states(&states);
        } else {
            self.cache.copy_states(&other.cache);
        }
        self.cache.copy_from(&other.cache, &(held..n));
        self.tokens.extend(&other.tokens[held..n]);
        self.checkpoints.add_all(&other.checkpoints, n);
    }

    /// Puts pages of a text that begins with the session's into its cache.
    pub(super) fn extend_from_pages(&mut self, pages: &mut Pages, salt: u64, text: &[u32]) {
        let restored = pages.restore(salt, text, self.n_past(), &mut self.cache);
        self.take_restored(restored, text);
    }

    /// Prepares to load what the disk behind `pages` has of such a text; `None` if it has no more.
    pub(super) fn begin_load(&self, pages: &Pages, salt: u64, text: &[u32]) -> Option<Load> {
        pages.begin_load(salt, text, self.n_past(), &self.cache)
    }

    /// Loads some of the text; true once there is no more to load.
    pub(super) fn load(&mut self, pages: &mut Pages, load: &mut Load, text: &[u32]) -> bool {
        let restored = pages.load(load, &mut self.cache);
        let is_over = restored.is_some();
        restored.into_iter().for_each(|restored| self.take_restored(restored, text));
        is_over
    }

    /// The cache has got more of a text that begins with the session's.
    fn take_restored(&mut self, restored: Restored, text: &[u32]) {
        let held = self.n_past();
        self.tokens.extend(&text[held..restored.n.max(held)]);
        if let Some(states) = restored.states {
            self.add_checkpoint(restored.n, &states);
        }
    }

    /// Keeps the session's text in pages.
    pub(super) fn keep(&self, pages: &mut Pages, salt: u64) {
        pages.keep(salt, &self.tokens, &self.cache);
    }

    /// Hands the session's text to the disk behind `pages`, from page `n_saved` on, as far as a
    /// text could go on from there; false if some of it has to wait.
    pub(super) fn save(&self, pages: &Pages, salt: u64, n_saved: &mut usize) -> bool {
        let mut text = &self.tokens[..];
        if self.has_state() {
            let kept = self.checkpoints.all();
            text = &text[..kept.last().map_or(0, |(n, _)| *n)];
            let save = |(n, values): &(usize, Arc<Vec<f32>>)| {
                pages.save_states(salt, &self.tokens[..*n], values)
            };
            if !kept.iter().all(save) {
                return false;
            }
        }
        *n_saved = pages.save(salt, text, *n_saved, &self.cache);
        *n_saved >= text.len() / PAGE
    }

    /// The last checkpoint of the text that is still there.
    pub(super) fn last_checkpoint(&self) -> Option<(usize, Arc<Vec<f32>>)> {
        self.checkpoints.last(self.n_past())
    }

    /// The cache holds this text, which the session had not.
    pub(super) fn set_tokens(&mut self, tokens: &[u32]) {
        self.tokens.clear();
        self.tokens.extend(tokens);
    }

    /// Asks the next pass for checkpoints at these positions.
    pub(super) fn mark(&mut self, positions: &[usize]) {
        self.cache.mark(positions);
    }

    /// The states after the first `n` tokens are kept elsewhere.
    pub(super) fn add_checkpoint(&mut self, n: usize, states: &Arc<Vec<f32>>) {
        self.checkpoints.add_kept(n, states);
    }

    /// Hands over the states of new checkpoints, with their positions.
    pub(super) fn take_checkpoints(&mut self) -> Vec<(usize, Arc<Vec<f32>>)> {
        self.checkpoints.take_own()
    }

    /// Drops all but the first `n` of `n_past` positions from the cache; returns how many are left.
    fn forget(&mut self, n_past: usize, n: usize) -> usize {
        self.checkpoints.truncate(n);
        if n < n_past
            && self.cache.has_state()
            && let Some((n, states)) = self.checkpoints.last(n)
        {
            self.cache.restore_states(&states);
            return n;
        }
        self.cache.truncate(n_past, n)
    }

    /// Appends `tokens` to the text and returns the wanted logits of the last one. They stay valid
    /// until the next call and may be overwritten.
    ///
    /// The tokens are computed in passes of at most [`MemoryPlan::n_ubatch`] tokens. Fails if a
    /// token id is out of range or the context is full ([`Error::Invalid`]), if experts cannot be
    /// read ([`Error::Load`]), if a GPU fails ([`Error::Device`]), or if the call is cancelled
    /// ([`Error::Interrupted`]). The session then keeps the passes that were completed or, if the
    /// model has a recurrent state, its last checkpoint; [`Session::n_past`] tells which.
    ///
    /// [`MemoryPlan::n_ubatch`]: super::MemoryPlan::n_ubatch
    pub fn eval(&mut self, tokens: &[u32], want: Want) -> Result<Logits<'_>> {
        self.eval_with(tokens, want, EvalHooks::default())
    }

    /// [`Session::eval`] for the logits of every token, which `on_logits` receives with the token's
    /// index in `tokens`. It is called chunk by chunk, since all logits of a prompt may be larger
    /// than the model.
    pub fn eval_all(
        &mut self,
        tokens: &[u32],
        on_logits: &mut dyn FnMut(usize, &mut [f32]),
    ) -> Result<()> {
        let hooks = EvalHooks { on_logits: Some(on_logits), ..EvalHooks::default() };
        self.eval_with(tokens, Want::Last, hooks).map(drop)
    }

    /// [`Session::eval`] with reports while it computes. After an error a recorder may have heard
    /// of a part of a pass.
    pub fn eval_with(
        &mut self,
        tokens: &[u32],
        want: Want,
        mut hooks: EvalHooks<'_>,
    ) -> Result<Logits<'_>> {
        if self.pooled.is_none() {
            self.engine.check_has_logits()?;
        }
        self.check_source()?;
        self.check_ids(tokens)?;
        self.check_room(self.n_past(), tokens.len())?;
        self.start_request();
        let engine = self.engine.clone();
        // The capacity of experts in an encoder–decoder model counts the tokens of a call.
        let n_ubatch = match engine.encoder() {
            Some(_) => tokens.len().max(1),
            None if engine.model.hyper().sees_all => tokens.len().max(1),
            None => engine.plan.n_ubatch,
        };
        let phase = if tokens.len() > 1 { Phase::Prompt } else { Phase::Decode };
        for (i, part) in tokens.chunks(n_ubatch).enumerate() {
            let at = i * n_ubatch..i * n_ubatch + part.len();
            let want = match want {
                _ if hooks.on_logits.is_some() => forward::Want::All,
                want if at.end == tokens.len() => want.of_pass(),
                _ => forward::Want::None,
            };
            self.pass(part, at, phase, want, &mut hooks)?;
        }
        match want {
            Want::None => Ok(Logits::All(&mut [])),
            _ if tokens.is_empty() => Ok(Logits::All(&mut [])),
            Want::Last | Want::LastBest(_) => Ok(self.logits.get()),
        }
    }

    /// Computes some of a call's tokens: a batch of one text.
    fn pass(
        &mut self,
        tokens: &[u32],
        part: Range<usize>,
        phase: Phase,
        want: forward::Want,
        hooks: &mut EvalHooks<'_>,
    ) -> Result<()> {
        self.cancel.check()?;
        let (engine, cancel) = (self.engine.clone(), self.cancel.clone());
        let (text, listener) = self.parts(tokens, phase, want);
        let EvalHooks { progress, recorder, on_logits } = hooks;
        let on_logits = on_logits.as_deref_mut().map(|on_logits| (on_logits, part.start));
        let listener = Listener { recorder: recorder.as_deref_mut(), on_logits, ..listener };
        let mut tell = |n| progress.iter_mut().for_each(|progress| progress(n));
        let progress = Some((part, &mut tell as &mut dyn FnMut(usize)));
        let (texts, outputs) = (&mut [text], &mut Listeners(&mut [listener]));
        let pass = Pass { stack: Stack::Decoder, texts, cancel, outputs, progress };
        let result = engine.compute.run(&engine.model, pass);
        let result = result.and_then(|()| engine.check_files());
        self.end_pass(tokens, result.is_ok());
        result
    }

    /// The session's part of a pass that computes `tokens`, and its observer.
    pub(super) fn parts<'a>(
        &'a mut self,
        tokens: &'a [u32],
        phase: Phase,
        want: forward::Want,
    ) -> (PassText<'a>, Listener<'a, 'a>) {
        let (request, past) = (self.id, self.n_past());
        let Session { cache, logits, outputs, pooled, experts, n_experts, adapters, .. } = self;
        let (outputs, pooled) = (outputs.as_deref_mut(), pooled.as_mut());
        let TextCache { host: kv, device } = cache;
        let (gpu_kv, experts) = (device.as_ref(), experts.as_mut());
        n_experts.clear();
        let n_tokens = tokens.len();
        let keeps_all = phase == Phase::Decode && n_tokens > 1;
        let listener = Listener {
            n_tokens,
            logits,
            keeps_all,
            outputs,
            pooled,
            experts,
            n_experts,
            recorder: None,
            on_logits: None,
        };
        (PassText { tokens, request, past, phase, want, adapters, kv, gpu_kv }, listener)
    }

    /// Keeps the tokens of a pass that was completed, and drops those of another. Policies have
    /// learned from both.
    pub(super) fn end_pass(&mut self, tokens: &[u32], is_complete: bool) {
        let states = self.cache.take_states();
        if let Some(profile) = &self.engine.profile {
            profile.add_tokens(tokens.len());
        }
        if is_complete {
            states.into_iter().for_each(|states| self.checkpoints.add(states));
            return self.tokens.extend(tokens);
        }
        // Some layers may have stored these tokens.
        let past = self.n_past();
        let left = self.forget(past + tokens.len(), past);
        self.tokens.truncate(left);
        self.outputs.iter_mut().for_each(|outputs| outputs.truncate(left));
    }

    /// The number of different experts that each layer needed in the last pass, for all texts of
    /// it, of which this was the first. Empty after a pass on a GPU.
    pub(super) fn n_experts(&self) -> &[u32] {
        &self.n_experts
    }

    /// The logits that the last pass was asked for, if it was asked for any.
    pub fn logits(&mut self) -> Logits<'_> {
        self.logits.get()
    }

    /// The logits of the token of index `i` in the last pass, if that was a step of decode of
    /// several tokens.
    ///
    /// # Panics
    /// If the pass has not computed any of that token.
    pub fn logits_of(&mut self, i: usize) -> Logits<'_> {
        self.logits.of(i)
    }

    /// Tells policies that a text begins. A session that was emptied begins another one.
    pub(super) fn start_request(&mut self) {
        if self.n_past() + self.n_source > 0 && self.is_started {
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

    pub(super) fn check_ids(&self, tokens: &[u32]) -> Result<()> {
        let n_vocab = self.engine.n_vocab();
        match tokens.iter().find(|token| **token as usize >= n_vocab) {
            None => Ok(()),
            Some(id) => Err(Error::invalid(format!(
                "token id {id} is out of range: the model has {n_vocab} tokens"
            ))),
        }
    }

    /// Whether the context holds `n` tokens more than `n_past`.
    pub(super) fn check_room(&self, n_past: usize, n: usize) -> Result<()> {
        let n_ctx = self.engine.n_ctx;
        if n_past + n > n_ctx {
            return Err(Error::invalid(format!(
                "{n} tokens do not fit the context of {n_ctx} ({n_past} are used): raise it with -c"
            )));
        }
        Ok(())
    }

    /// Sets what cancels the calls from now on. At first that is the process-wide interrupt (see
    /// [`interrupt`]). A prompt is cancelled between two parts of a layer, a token before it is
    /// begun, and both while they wait for experts.
    pub fn set_cancel(&mut self, cancel: Cancel) {
        if let Some(draft) = &mut self.draft {
            draft.set_cancel(cancel.clone());
        }
        self.cancel = cancel;
    }

    /// Sets how much of each adapter the text takes, which the engine's options say at first. A
    /// text of other numbers is dropped.
    ///
    /// # Panics
    /// If these are not as many numbers as there are adapters.
    pub fn set_adapters(&mut self, scales: &[f32]) {
        assert_eq!(scales.len(), self.adapters.len(), "a scale an adapter");
        if *self.adapters != *scales {
            self.truncate(0);
            self.adapters = scales.into();
        }
    }

    /// How much of each adapter the text takes.
    pub(super) fn adapters(&self) -> &Arc<[f32]> {
        &self.adapters
    }

    /// Starts or stops recording the experts that are chosen for evaluated tokens.
    pub fn record_experts(&mut self, on: bool) {
        let (n_layers, k) = (self.engine.n_layers(), self.engine.model.hyper().routing.k);
        self.experts = on.then(|| ExpertRecorder::new(n_layers, k.max(1)));
    }

    /// The experts recorded since the last call or since `record_experts`.
    pub fn take_experts(&mut self) -> Experts {
        self.experts.as_mut().map(ExpertRecorder::take).unwrap_or_default()
    }
}

/// Tokens that two texts begin with.
pub(super) fn n_common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end_request();
        if let Some(cache) = self.cache.device.take() {
            self.engine.compute.free(cache);
        }
    }
}
