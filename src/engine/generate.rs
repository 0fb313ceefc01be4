//! Text generation: the prompt's tokens go into the KV cache, then one token follows the other
//! until something ends the text.
//!
//! [`Generation`] is one request between two passes. It chooses tokens and makes text of them, and
//! computes nothing itself, so that a scheduler can drive many of them with one batch.
//! [`Generator`] drives one with a session of its own.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::embedding::Pooling;
use super::scheduler::{Core, Job, JobSink, Owner, Pages};
use super::speculation::{DraftCounts, Gate, Speculation};
use super::traffic::ExpertTraffic;
use super::{Engine, Logits, Session, TopK, Want};
use crate::cancel::Cancel;
use crate::sample::grammar::Constraint;
use crate::sample::{Sampler, SamplerOptions, StopMatcher, TokenLogprob};
use crate::tokenizer::{Detokenizer, Tokenizer};
use crate::{Error, Result};

/// A text to continue, and how.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Token ids of the prompt, at least one. For an encoder–decoder model: the beginning of the
    /// answer.
    pub prompt: Vec<u32>,
    /// Token ids that the encoder reads, if the model has one.
    pub source: Option<Vec<u32>>,
    pub sampling: SamplerOptions,
    pub limits: Limits,
    /// Whether the answer is a text of its own and not the prompt's next words: SentencePiece's
    /// leading space is dropped then.
    pub own_text: bool,
    /// Whether control tokens are part of the text.
    pub shows_control: bool,
    /// Control tokens that are part of the text where others are not.
    pub shown: Vec<u32>,
    /// A form that the answer must have.
    pub constraint: Option<Constraint>,
    /// Whether tokens that may come next are computed ahead of their turn. The text is the same.
    pub speculation: Speculation,
    /// The prompt's outputs are pooled, and nothing is generated.
    pub pooling: Option<Pooling>,
    /// Ends the request early.
    pub cancel: Cancel,
}

/// Bounds of a text besides the model's own end.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Tokens at most; `None` is no limit.
    pub n_predict: Option<usize>,
    /// Whether the model's end tokens are banned.
    pub ignore_eos: bool,
    /// Strings that end the text. They are no part of it.
    pub stops: Vec<String>,
    /// Whether a text goes on when the context is full.
    pub context_shift: Option<ContextShift>,
}

/// A text that fills the context goes on without the older half of its tokens. The other half is
/// computed again: the tokens that follow are those that a shorter text would have, bit for bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextShift {
    /// Tokens of the prompt's beginning that stay; `None` for all of the prompt. The token that
    /// begins each text stays besides.
    pub n_keep: Option<usize>,
}

impl ContextShift {
    /// The tokens that leave a text, whose prompt had `n_prompt` tokens. Fewer stay than there is
    /// room for, whatever is to be kept.
    fn leaving(self, text: &[u32], n_prompt: usize, bos: Option<u32>) -> Range<usize> {
        let n_first = usize::from(bos.is_some() && text.first().copied() == bos);
        let wanted = self.n_keep.map_or(n_prompt, |n| n.saturating_add(n_first).min(n_prompt));
        let n_kept = wanted.min(text.len().saturating_sub(4));
        n_kept..n_kept + (text.len() - n_kept).div_ceil(2)
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose an end token, or the text is complete in its grammar.
    StopToken,
    /// One of [`Limits::stops`] was found.
    StopString,
    /// [`Limits::n_predict`] tokens were generated.
    Length,
    /// The context has no room for another token.
    ContextFull,
    /// [`Request::cancel`] was set.
    Cancelled,
}

/// Receives a text while it is generated.
pub trait TextSink {
    /// The next characters: whole ones, as soon as no stop string can begin with them. An error
    /// ends the generation.
    fn text(&mut self, text: &str) -> Result<()>;

    /// `done` of `total` tokens of the prompt are computed. Called before each layer of a pass,
    /// and with `done == total` once the prompt is computed.
    fn prompt_progress(&mut self, _done: usize, _total: usize) {}

    /// A token that must come next whatever the model would choose. Asked before each choice;
    /// `is_whole` says that the last token ended a character.
    fn forced(&mut self, _is_whole: bool) -> Option<u32> {
        None
    }
}

impl<F: FnMut(&str) -> Result<()>> TextSink for F {
    fn text(&mut self, text: &str) -> Result<()> {
        self(text)
    }
}

/// The end of a request, with its counts and times.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    pub finish: FinishReason,
    /// Tokens of the prompt and the source text that were computed.
    pub n_prompt: usize,
    /// Tokens of the prompt that the session had already.
    pub n_reused: usize,
    pub n_generated: usize,
    /// Tokens that left the text where it filled the context.
    pub n_shifted: usize,
    /// Which of [`Limits::stops`] has ended the text.
    pub stop: Option<usize>,
    /// From the start until the first token is chosen.
    pub prompt_time: Duration,
    /// From there to the last token.
    pub decode_time: Duration,
    /// Experts moved in `prompt_time`.
    pub prompt_traffic: ExpertTraffic,
    /// Experts moved in `decode_time`.
    pub decode_traffic: ExpertTraffic,
    /// Tokens that were computed as drafts.
    pub drafts: DraftCounts,
}

impl Outcome {
    pub(super) fn new(finish: FinishReason) -> Outcome {
        Outcome {
            finish,
            n_prompt: 0,
            n_reused: 0,
            n_generated: 0,
            n_shifted: 0,
            stop: None,
            prompt_time: Duration::ZERO,
            decode_time: Duration::ZERO,
            prompt_traffic: ExpertTraffic::default(),
            decode_traffic: ExpertTraffic::default(),
            drafts: DraftCounts::default(),
        }
    }
}

/// The next step of a generation after a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Compute this token and choose the one that follows.
    Next(u32),
    Finished(FinishReason),
}

/// One request between two passes: sampler, text and limits. The caller computes.
///
/// Whoever drives it computes the prompt, wanting [`Generation::want`] of the last token's logits,
/// then repeats: [`Generation::choose`] a token from the logits, [`Generation::accept`] it, and
/// compute it if the answer is [`Step::Next`]. [`Generation::finish`] writes the rest of the text.
pub struct Generation {
    engine: Arc<Engine>,
    sampler: Sampler,
    limits: Limits,
    detokenizer: Detokenizer<EngineTokenizer>,
    stops: StopMatcher,
    /// Which of the limits' stop strings was found.
    stop: Option<usize>,
    n_generated: usize,
    constraint: Option<Constraint>,
    speculation: Speculation,
    /// The time that the next token's mask took, or the last one's, unless it was taken.
    mask_time: Option<Duration>,
    /// Alternatives to report with each token's log probability; `None` reports none.
    n_top_logprobs: Option<usize>,
    /// The alternatives are tokens that the samplers have left.
    after_sampling: bool,
    last_logprob: Option<TokenLogprob>,
    pooling: Option<Pooling>,
}

/// A tokenizer that lives as long as somebody decodes with it.
struct EngineTokenizer(Arc<Engine>);

impl Deref for EngineTokenizer {
    type Target = Tokenizer;

    fn deref(&self) -> &Tokenizer {
        self.0.tokenizer()
    }
}

impl Generation {
    /// Fails for sampling options that make no sense, and for a prompt that is empty or longer than
    /// the context.
    pub fn new(engine: &Arc<Engine>, request: &Request) -> Result<Generation> {
        check(&request.prompt, engine.n_ctx())?;
        let Request { limits, sampling, .. } = request;
        let mut limits = limits.clone();
        // An answer to a text that an encoder has read ends with its context.
        limits.context_shift = limits.context_shift.filter(|_| engine.encoder().is_none());
        let mut sampler = Sampler::for_text(sampling.clone(), engine.tokenizer())?;
        sampler.ban(engine.tokenizer().suppressed().iter().copied());
        if limits.ignore_eos {
            sampler.ban(engine.tokenizer().eog_ids());
        }
        request.prompt.iter().for_each(|&id| sampler.accept(id));
        let (tokenizer, skip_special) = (EngineTokenizer(engine.clone()), !request.shows_control);
        let detokenizer = match request.own_text {
            true => Detokenizer::new(tokenizer, skip_special),
            false => Detokenizer::continuing(tokenizer, skip_special),
        };
        Ok(Generation {
            engine: engine.clone(),
            sampler,
            stops: StopMatcher::new(limits.stops.iter().cloned()),
            limits,
            detokenizer: detokenizer.showing(&request.shown),
            stop: None,
            n_generated: 0,
            constraint: request.constraint.clone(),
            speculation: request.speculation.clone(),
            mask_time: None,
            n_top_logprobs: None,
            after_sampling: false,
            last_logprob: None,
            pooling: request.pooling,
        })
    }

    /// Gives the text a form, before its first token is chosen.
    pub fn constrain(&mut self, constraint: Constraint) {
        self.constraint = Some(constraint);
    }

    /// Reports each token's log probability and those of the `n_top` most probable tokens, at most
    /// [`MAX_TOP_LOGPROBS`](crate::sample::MAX_TOP_LOGPROBS).
    pub fn report_logprobs(&mut self, n_top: usize) {
        self.n_top_logprobs = Some(n_top);
    }

    /// [`report_logprobs`](Self::report_logprobs) of the tokens that samplers and grammars have
    /// left, which each token was drawn from.
    pub fn report_sampled(&mut self, n_top: usize) {
        (self.n_top_logprobs, self.after_sampling) = (Some(n_top), true);
    }

    /// Lets drafts be verified, as far as the text's model and machine can.
    pub fn speculate(&mut self, speculation: Speculation) {
        self.speculation = speculation;
    }

    pub(super) fn speculation(&self) -> &Speculation {
        &self.speculation
    }

    /// The tokens of what must come next by the text's form; none where it leaves a choice.
    pub(super) fn forced_tokens(&mut self) -> Vec<u32> {
        self.time_mask();
        match &mut self.constraint {
            // The choice will tell of an error.
            Some(constraint) => constraint.forced().unwrap_or_default(),
            None => Vec::new(),
        }
    }

    /// Whether the text's form allows a token next.
    pub(super) fn may_follow(&mut self, id: u32) -> bool {
        let Some(constraint) = &mut self.constraint else { return true };
        constraint.mask().is_ok_and(|mask| mask.is_none_or(|mask| mask.allows(id)))
    }

    /// Computes the next token's mask and keeps the time that it took. An error stays for the
    /// choice.
    fn time_mask(&mut self) {
        if let Some(constraint) = self.constraint.as_mut().filter(|it| it.needs_mask()) {
            let start = Instant::now();
            if constraint.mask().is_ok() {
                self.mask_time = Some(start.elapsed());
            }
        }
    }

    /// The log probability of the token that `choose` answered last, if it is to be reported.
    pub fn last_logprob(&self) -> Option<&TokenLogprob> {
        self.last_logprob.as_ref()
    }

    /// Computes the next token's mask, if the text has a form. `choose` does so too: called while
    /// the logits are computed, it takes that time off the choice.
    pub fn prepare_mask(&mut self) -> Result<()> {
        match &mut self.constraint {
            Some(constraint) => constraint.mask().map(drop),
            None => Ok(()),
        }
    }

    /// The time that the mask of the last choice took, if it was computed there; once.
    pub(super) fn take_mask_time(&mut self) -> Option<Duration> {
        self.mask_time.take()
    }

    /// How the prompt's outputs are pooled, if that is all that is asked for.
    pub(super) fn pooling(&self) -> Option<Pooling> {
        self.pooling
    }

    /// The logits of a text's last token that `choose` needs.
    pub fn want(&self) -> Want {
        if self.pooling.is_some() {
            return Want::None;
        }
        let is_constrained = self.constraint.as_ref().is_some_and(Constraint::is_active);
        if is_constrained || self.n_top_logprobs.is_some() {
            return Want::Last;
        }
        let n_vocab = self.n_vocab();
        self.sampler.n_best().map_or(Want::Last, |k| Want::LastBest(TopK { k, n_vocab }))
    }

    /// A model may have more rows than its vocabulary has tokens: padding, never an answer.
    fn n_vocab(&self) -> usize {
        self.engine.tokenizer().n_vocab()
    }

    /// The token that follows the one whose logits these are; they must be those of `want`.
    pub fn choose(&mut self, logits: Logits<'_>, sink: &mut dyn TextSink) -> Result<u32> {
        let n_vocab = self.n_vocab();
        let forced = sink.forced(self.detokenizer.is_whole());
        let token = match forced {
            Some(id) => id,
            None => self.sample(&logits)?,
        };
        if let Some(n_top) = self.n_top_logprobs {
            self.last_logprob = Some(match (self.after_sampling, forced) {
                (false, _) => TokenLogprob::new(&all(&logits)[..n_vocab], token, n_top)?,
                (true, None) => self.sampler.last_probabilities(token, n_top),
                (true, Some(_)) => TokenLogprob::certain(token, n_top),
            });
        }
        self.sampler.accept(token);
        Ok(token)
    }

    fn sample(&mut self, logits: &Logits<'_>) -> Result<u32> {
        let n_vocab = self.n_vocab();
        self.time_mask();
        let mask = match &mut self.constraint {
            Some(constraint) => constraint.mask()?,
            None => None,
        };
        match (logits, mask) {
            (logits, Some(mask)) => self.sampler.sample_allowed(&all(logits)[..n_vocab], mask),
            (Logits::All(logits), None) => self.sampler.sample(&logits[..n_vocab]),
            (Logits::Best { ids, logits }, None) => self.sampler.sample_best(ids, logits),
        }
    }

    /// Adds a chosen token to the text; `n_past` tokens are in the cache.
    pub fn accept(&mut self, token: u32, n_past: usize, sink: &mut dyn TextSink) -> Result<Step> {
        let is_full = |n| self.limits.n_predict == Some(n);
        if is_full(self.n_generated) {
            return Ok(Step::Finished(FinishReason::Length));
        }
        let is_last = is_full(self.n_generated + 1);
        self.n_generated += 1;
        if self.engine.tokenizer().is_eog(token) {
            return Ok(Step::Finished(FinishReason::StopToken));
        }
        let constraint = &mut self.constraint;
        constraint.as_mut().map_or(Ok(()), |constraint| constraint.accept(token))?;
        let is_complete = constraint.as_ref().is_some_and(Constraint::is_complete);
        let found = self.stops.push(self.detokenizer.push(token)?);
        let stops = &self.limits.stops;
        self.stop = found.by.and_then(|by| stops.iter().position(|stop| stop == by));
        if !found.text.is_empty() {
            sink.text(found.text)?;
        }
        Ok(match () {
            () if self.stop.is_some() => Step::Finished(FinishReason::StopString),
            () if is_complete => Step::Finished(FinishReason::StopToken),
            () if is_last => Step::Finished(FinishReason::Length),
            () if n_past == self.engine.n_ctx() && self.limits.context_shift.is_none() => {
                Step::Finished(FinishReason::ContextFull)
            }
            () => Step::Next(token),
        })
    }

    /// Passes on the text that was held back, unless a stop string ended it.
    pub fn finish(&mut self, sink: &mut dyn TextSink) -> Result<()> {
        if self.stop.is_some() {
            return Ok(());
        }
        let mut rest = self.stops.push(self.detokenizer.finish()).text.to_owned();
        rest.push_str(self.stops.finish());
        if rest.is_empty() { Ok(()) } else { sink.text(&rest) }
    }

    /// The tokens that leave a text that fills the context, whose prompt had `n_prompt` tokens;
    /// none where there is room.
    pub(super) fn leaving(&self, text: &[u32], n_prompt: usize) -> Range<usize> {
        let shift = self.limits.context_shift.filter(|_| text.len() > self.engine.n_ctx());
        let bos = self.engine.tokenizer().bos();
        shift.map_or(0..0, |shift| shift.leaving(text, n_prompt, bos))
    }

    /// Which of [`Limits::stops`] has ended the text.
    pub fn stop(&self) -> Option<usize> {
        self.stop
    }

    /// Tokens that there may be after those so far; `None` is no limit.
    pub fn n_left(&self) -> Option<usize> {
        let most = self.pooling.map_or(self.limits.n_predict, |_| Some(0));
        most.map(|n| n.saturating_sub(self.n_generated))
    }

    /// Tokens so far, the end token included.
    pub fn n_generated(&self) -> usize {
        self.n_generated
    }
}

/// # Panics
/// If only the best are there: [`Generation::want`] asks for all where they are needed.
fn all<'a>(logits: &'a Logits<'_>) -> &'a [f32] {
    match logits {
        Logits::All(logits) => logits,
        Logits::Best { .. } => panic!("a mask and log probabilities need all logits"),
    }
}

fn check(prompt: &[u32], n_ctx: usize) -> Result<()> {
    if prompt.is_empty() {
        return Err(Error::invalid("the prompt is empty: there is nothing to continue"));
    }
    if prompt.len() > n_ctx {
        return Err(Error::invalid(format!(
            "the prompt has {} tokens and the context {n_ctx}: shorten it or raise -c",
            prompt.len()
        )));
    }
    Ok(())
}

/// Serves one request after the other with a session of its own. Of each prompt it computes what
/// follows the longest prefix that the session holds.
///
/// ```no_run
/// use moeba::engine::{Engine, EngineOptions, Generator, Request};
/// use moeba::tokenizer::EncodeOptions;
///
/// # fn main() -> moeba::Result<()> {
/// let engine = Engine::load("model.gguf".as_ref(), &EngineOptions::default(), &mut |_| ())?;
/// let prompt = engine.tokenizer().encode("Once upon a time", EncodeOptions::PROMPT);
/// let request = Request { prompt, ..Request::default() };
/// let outcome = Generator::new(&engine)?.generate(&request, &mut |text: &str| {
///     print!("{text}");
///     Ok(())
/// })?;
/// println!("\n{:?} after {} tokens", outcome.finish, outcome.n_generated);
/// # Ok(())
/// # }
/// ```
pub struct Generator {
    engine: Arc<Engine>,
    /// Always there between two requests.
    held: Option<Held>,
}

/// A session between two requests, states of its text, and what was learned of drafts.
struct Held {
    session: Session,
    pages: Pages,
    gate: Gate,
}

impl Generator {
    /// Takes the memory of a session; see [`Engine::new_session`].
    pub fn new(engine: &Arc<Engine>) -> Result<Generator> {
        Ok(Generator { engine: engine.clone(), held: Some(begin(engine)?) })
    }

    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Empties the context.
    pub fn clear(&mut self) {
        if let Some(held) = &mut self.held {
            held.session.truncate(0);
            held.pages = states_of(&self.engine);
        }
    }

    /// Tokens of context in use.
    pub fn n_past(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.session.n_past())
    }

    /// Continues the request's prompt and gives the text to `sink`.
    ///
    /// A request that is cancelled is no error: it ends with the text that there is. Errors are
    /// those of [`Generation::new`] and [`Session::eval`], and the sink's own.
    pub fn generate(&mut self, request: &Request, sink: &mut dyn TextSink) -> Result<Outcome> {
        let generation = Generation::new(&self.engine, request)?;
        let mut result = Err(Error::Interrupted);
        let job = Job {
            id: 0,
            prompt: request.prompt.clone(),
            source: request.source.clone(),
            generation,
            sink: OnlySink { sink, result: &mut result },
            cancel: request.cancel.clone(),
            owner: Owner::default(),
            salt: Some(0),
            priority: 0,
            slot: None,
            adapters: None,
        };
        let Held { session, pages, gate } = match self.held.take() {
            Some(held) => held,
            // The one before was lost in a panic.
            None => begin(&self.engine)?,
        };
        let mut core = Core::with_pages(&self.engine, vec![session], 0.5, pages);
        core.set_gate(gate);
        core.submit(job);
        while core.step() {}
        let (mut sessions, pages, gate) = core.into_parts();
        self.held = sessions.pop().map(|session| Held { session, pages, gate });
        result
    }
}

fn begin(engine: &Arc<Engine>) -> Result<Held> {
    let session = engine.new_session()?;
    Ok(Held { session, pages: states_of(engine), gate: Gate::default() })
}

/// Room for the states that are planned for.
fn states_of(engine: &Engine) -> Pages {
    Pages::of_states(engine.plan().page_bytes as usize)
}

/// The sink of a scheduler's only job.
struct OnlySink<'a> {
    sink: &'a mut dyn TextSink,
    result: &'a mut Result<Outcome>,
}

impl TextSink for OnlySink<'_> {
    fn text(&mut self, text: &str) -> Result<()> {
        self.sink.text(text)
    }

    fn prompt_progress(&mut self, done: usize, total: usize) {
        self.sink.prompt_progress(done, total);
    }

    fn forced(&mut self, is_whole: bool) -> Option<u32> {
        self.sink.forced(is_whole)
    }
}

impl JobSink for OnlySink<'_> {
    fn finished(&mut self, result: Result<Outcome>) {
        *self.result = result;
    }
}
