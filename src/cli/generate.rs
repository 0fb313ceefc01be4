//! One text from a model: the prompt into the cache (what is there already stays), then token by
//! token until something ends it. Used by one-shot runs and by chats.

use super::report::{self, Moved, Watch};
use super::stats::{Stats, ms, peak_rss_bytes, per_second};
use super::{figures, out};
use crate::engine::{Engine, Logits, Session, TopK};
use crate::sample::{Sampler, SamplerOptions, StopMatcher};
use crate::terminal::{self, Detail};
use crate::tokenizer::{Detokenizer, Tokenizer};
use crate::units::size;
use crate::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What bounds a generation besides the model's own end.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// `None`: until the end.
    pub n_predict: Option<usize>,
    pub ignore_eos: bool,
    pub stops: Vec<String>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model said so.
    Eog,
    Stop,
    Length,
    ContextFull,
    Interrupted,
}

impl End {
    /// As OpenAI's API names them, where it does.
    pub fn name(self) -> &'static str {
        match self {
            End::Eog | End::Stop => "stop",
            End::Length => "length",
            End::ContextFull => "context_full",
            End::Interrupted => "interrupted",
        }
    }
}

/// What was measured of one generation.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    pub end: End,
    /// Tokens of the prompt that were computed, and that the cache had.
    pub n_prompt: usize,
    pub n_reused: usize,
    pub n_generated: usize,
    /// From the start to the prompt's end, which is the first token.
    pub prompt_time: Duration,
    /// From there to the last token: the time of all tokens but the first.
    pub decode_time: Duration,
    /// What experts cost in these two times.
    pub prompt_experts: Moved,
    pub decode_experts: Moved,
}

impl Outcome {
    /// Steps of one token each.
    fn n_decoded(&self) -> usize {
        self.n_generated.saturating_sub(1)
    }

    fn prompt_rate(&self) -> f64 {
        per_second(self.n_prompt, self.prompt_time)
    }

    fn decode_rate(&self) -> f64 {
        per_second(self.n_decoded(), self.decode_time)
    }

    /// Says on stderr what was measured: in a line, or in full with -v.
    pub fn tell(&self) {
        log::info!("{}", self.report());
        if terminal::detail() < Detail::Verbose {
            out::aside(&self.summary());
        }
    }

    /// One line of figures.
    fn summary(&self) -> String {
        let mut parts = vec![figures::counted(self.n_generated, "token")];
        if self.n_decoded() > 0 {
            parts[0].push_str(&format!(", {:.1} tokens/s", self.decode_rate()));
        }
        let prompt = figures::counted(self.n_prompt, "token");
        let cached = match self.n_reused {
            0 => String::new(),
            n => format!(" ({} cached)", figures::count(n)),
        };
        parts.push(format!("prompt {prompt} in {}{cached}", figures::time(self.prompt_time)));
        let experts = if self.n_decoded() > 0 { self.decode_experts } else { self.prompt_experts };
        let hits = experts.top().map(|c| c.hit_rate()).filter(|rate| !rate.is_nan());
        let hits = hits.map(|rate| format!("{:.0} % hits", 100.0 * rate));
        let peak = peak_rss_bytes().map(|bytes| format!("peak {}", size(bytes)));
        let machine: Vec<String> = [hits, peak].into_iter().flatten().collect();
        if !machine.is_empty() {
            parts.push(machine.join(", "));
        }
        parts.join("; ")
    }

    /// All figures, in some lines.
    pub fn report(&self) -> String {
        let phase = |n: usize, time: Duration, rate: f64| {
            let (tokens, time) = (figures::counted(n, "token"), figures::time(time));
            format!("{tokens} in {time}, {rate:.2} tokens/s")
        };
        let mut lines =
            vec![format!("prompt: {}", phase(self.n_prompt, self.prompt_time, self.prompt_rate()))];
        if self.n_reused > 0 {
            lines[0]
                .push_str(&format!("; {} more were in the cache", figures::count(self.n_reused)));
        }
        lines.extend(report::lines(&self.prompt_experts, self.n_prompt));
        if self.n_decoded() > 0 {
            let decode = phase(self.n_decoded(), self.decode_time, self.decode_rate());
            lines.push(format!("decode: {decode}"));
            lines.extend(report::lines(&self.decode_experts, self.n_decoded()));
        }
        let memory = peak_rss_bytes().map(|bytes| format!("; peak memory {}", size(bytes)));
        let generated = figures::counted(self.n_generated, "token");
        lines.push(format!("generated {generated}{}", memory.unwrap_or_default()));
        lines.join("\n")
    }

    /// What experts cost is of decode, by which policies differ; a prompt's share has keys of its
    /// own.
    pub fn fill(&self, engine: &Engine, stats: &mut Stats) {
        let per_token = |n: usize, time| if n == 0 { f64::NAN } else { ms(time) / n as f64 };
        let first = if self.n_generated == 0 { f64::NAN } else { ms(self.prompt_time) };
        stats.number("ttft_ms", first);
        stats.number("tpot_ms", per_token(self.n_decoded(), self.decode_time));
        stats.count("prompt_tokens", (self.n_prompt + self.n_reused) as u64);
        stats.count("prompt_tokens_reused", self.n_reused as u64);
        stats.count("generated_tokens", self.n_generated as u64);
        stats.number("prompt_tokens_per_second", self.prompt_rate());
        stats.number("decode_tokens_per_second", self.decode_rate());
        stats.text("finish_reason", self.end.name());
        report::fill(stats, engine.plan(), &self.decode_experts, self.n_decoded());
        let prompt = self.prompt_experts.top();
        stats.value("prompt_read_bytes", prompt.map(|c| c.read_bytes).into());
        stats.value("prompt_stall_ms", prompt.map(|c| c.stall_ns as f64 / 1e6).into());
    }
}

/// A session and the tokens that its cache holds.
pub struct Generator {
    engine: Arc<Engine>,
    session: Session,
    cached: Vec<u32>,
}

/// Hears a text while a model writes it.
pub trait Listener {
    /// Whole characters, as soon as no stop string can begin with them.
    fn text(&mut self, text: &str) -> Result<()>;

    /// Asked before each token: one that must come, whatever the model would choose. `is_whole`:
    /// the last one ended a character.
    fn forced(&mut self, _is_whole: bool) -> Option<u32> {
        None
    }
}

impl<F: FnMut(&str) -> Result<()>> Listener for F {
    fn text(&mut self, text: &str) -> Result<()> {
        self(text)
    }
}

/// What is asked for.
pub struct Request<'a> {
    /// What the encoder reads, if the model has one: the prompt is the answer's beginning then.
    pub source: Option<&'a [u32]>,
    pub prompt: &'a [u32],
    pub sampling: SamplerOptions,
    pub limits: &'a Limits,
    /// The answer is a text of its own, not the prompt's next words: a leading space that only
    /// marks a word is no part of it.
    pub own_text: bool,
    /// Control tokens are part of the answer.
    pub shows_control: bool,
    /// These control tokens are, where others are not.
    pub shown: &'a [u32],
}

impl<'a> Request<'a> {
    /// Of a decoder: what follows a prompt, without control tokens.
    pub fn continuing(
        prompt: &'a [u32],
        sampling: SamplerOptions,
        limits: &'a Limits,
        own_text: bool,
    ) -> Request<'a> {
        Request {
            source: None,
            prompt,
            sampling,
            limits,
            own_text,
            shows_control: false,
            shown: &[],
        }
    }
}

impl Generator {
    pub fn new(engine: &Arc<Engine>) -> Result<Self> {
        let session = Session::new(engine)?;
        Ok(Self { engine: engine.clone(), session, cached: Vec::new() })
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Empties the context.
    pub fn clear(&mut self) {
        let kept = self.session.truncate(0);
        self.cached.truncate(kept);
    }

    /// Tokens of context in use.
    pub fn n_past(&self) -> usize {
        self.cached.len()
    }

    /// Continues the prompt. Ctrl-C ends it with what there is.
    pub fn generate(
        &mut self,
        request: Request<'_>,
        listener: &mut dyn Listener,
    ) -> Result<Outcome> {
        let Request { prompt, limits, .. } = request;
        self.check(prompt)?;
        let mut sampler = Sampler::for_text(request.sampling, self.engine.tokenizer())?;
        if limits.ignore_eos {
            sampler.ban(self.engine.tokenizer().eog_ids());
        }
        prompt.iter().for_each(|&id| sampler.accept(id));
        let (watch, start) = (Watch::start(&self.engine), Instant::now());
        if request.source.is_some() {
            self.cached.clear();
        }
        let n_reused = self.keep_common(prompt);
        let n_source = request.source.map_or(0, <[u32]>::len);
        let mut outcome = Outcome {
            end: End::Interrupted,
            n_prompt: n_source + prompt.len() - n_reused,
            n_reused,
            n_generated: 0,
            prompt_time: Duration::ZERO,
            decode_time: Duration::ZERO,
            prompt_experts: Moved::default(),
            decode_experts: Moved::default(),
        };
        let read = request.source.map_or(Ok(()), |source| self.session.encode(source));
        let forced = listener.forced(true);
        let first = read.and_then(|()| self.feed(&prompt[n_reused..], &mut sampler, forced));
        outcome.prompt_time = start.elapsed();
        outcome.prompt_experts = watch.counted(&self.engine);
        let first = match first {
            Err(Error::Interrupted) => {
                outcome.n_prompt = self.cached.len().saturating_sub(n_reused);
                return Ok(outcome);
            }
            other => other?,
        };
        let (watch, start) = (Watch::start(&self.engine), Instant::now());
        let engine = self.engine.clone();
        let skip_special = !request.shows_control;
        let detokenizer = match request.own_text {
            true => Detokenizer::new(engine.tokenizer(), skip_special),
            false => Detokenizer::continuing(engine.tokenizer(), skip_special),
        };
        let mut text = Text::new(detokenizer.showing(request.shown), limits, listener);
        outcome.end = self.decode(first, &mut sampler, limits, &mut text, &mut outcome)?;
        text.finish()?;
        outcome.decode_time = start.elapsed();
        outcome.decode_experts = watch.counted(&self.engine);
        Ok(outcome)
    }

    fn check(&self, prompt: &[u32]) -> Result<()> {
        let n_ctx = self.engine.n_ctx();
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

    /// Drops from the cache what differs from `prompt`; how many tokens are left. The prompt's last
    /// token is always computed, because its logits are needed.
    fn keep_common(&mut self, prompt: &[u32]) -> usize {
        let common = self.cached.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let kept = self.session.truncate(common.min(prompt.len() - 1));
        self.cached.truncate(kept);
        kept
    }

    /// Computes `tokens`, with a bar, and samples the token that follows.
    fn feed(&mut self, tokens: &[u32], sampler: &mut Sampler, forced: Option<u32>) -> Result<u32> {
        let bar = terminal::bar("prompt", tokens.len() as u64);
        let shown = bar.clone();
        self.session.hear_progress(Some(Box::new(move |n| shown.set_position(n as u64))));
        let next = self.step(tokens, sampler, forced);
        self.session.hear_progress(None);
        drop(bar);
        next
    }

    /// Computes `tokens` and samples what follows, if it is not `forced`.
    fn step(&mut self, tokens: &[u32], sampler: &mut Sampler, forced: Option<u32>) -> Result<u32> {
        // A model may have more rows than its vocabulary has tokens: padding, never an answer.
        let n_vocab = self.engine.tokenizer().n_vocab();
        let enough = sampler.n_best().map(|k| TopK { k, n_vocab });
        let mut next = Err(Error::Interrupted);
        let result = self.session.eval_last(tokens, enough, &mut |logits| {
            next = match (forced, logits) {
                (Some(id), _) => Ok(id),
                (None, Logits::All(logits)) => sampler.sample(&logits[..n_vocab]),
                (None, Logits::Best { ids, logits }) => sampler.sample_best(ids, logits),
            };
        });
        // After an interruption fewer of them, or none at all.
        self.cached.extend(tokens);
        self.cached.truncate(self.session.n_past());
        result?;
        let next = next?;
        sampler.accept(next);
        Ok(next)
    }

    /// Prints and computes token by token, beginning with the one that the prompt led to.
    fn decode(
        &mut self,
        first: u32,
        sampler: &mut Sampler,
        limits: &Limits,
        text: &mut Text<'_>,
        outcome: &mut Outcome,
    ) -> Result<End> {
        let mut next = first;
        loop {
            if limits.n_predict == Some(outcome.n_generated) {
                return Ok(End::Length);
            }
            outcome.n_generated += 1;
            if self.engine.tokenizer().is_eog(next) {
                return Ok(End::Eog);
            }
            if text.push(next)? {
                return Ok(End::Stop);
            }
            if limits.n_predict == Some(outcome.n_generated) {
                return Ok(End::Length);
            }
            if self.cached.len() == self.engine.n_ctx() {
                return Ok(End::ContextFull);
            }
            // Ctrl-C is heard in here.
            next = match self.step(&[next], sampler, text.forced()) {
                Err(Error::Interrupted) => return Ok(End::Interrupted),
                other => other?,
            };
        }
    }
}

/// From tokens to what is printed.
struct Text<'a> {
    detokenizer: Detokenizer<&'a Tokenizer>,
    stops: StopMatcher,
    stopped: bool,
    listener: &'a mut dyn Listener,
}

impl<'a> Text<'a> {
    fn new(
        detokenizer: Detokenizer<&'a Tokenizer>,
        limits: &Limits,
        listener: &'a mut dyn Listener,
    ) -> Self {
        Self {
            detokenizer,
            stops: StopMatcher::new(limits.stops.iter().cloned()),
            stopped: false,
            listener,
        }
    }

    /// Whether a stop string was found.
    fn push(&mut self, token: u32) -> Result<bool> {
        let found = self.stops.push(self.detokenizer.push(token)?);
        self.stopped = found.by.is_some();
        if !found.text.is_empty() {
            self.listener.text(found.text)?;
        }
        Ok(self.stopped)
    }

    /// A token that must come next.
    fn forced(&mut self) -> Option<u32> {
        self.listener.forced(self.detokenizer.is_whole())
    }

    /// What was held back, unless a stop string ended it all.
    fn finish(mut self) -> Result<()> {
        if self.stopped {
            return Ok(());
        }
        let mut rest = self.stops.push(self.detokenizer.finish()).text.to_owned();
        rest.push_str(self.stops.finish());
        if rest.is_empty() { Ok(()) } else { self.listener.text(&rest) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::Counters;

    fn outcome(n_generated: usize) -> Outcome {
        Outcome {
            end: End::Length,
            n_prompt: 1024,
            n_reused: 0,
            n_generated,
            prompt_time: Duration::from_millis(2100),
            decode_time: Duration::from_millis(100 * n_generated.saturating_sub(1) as u64),
            prompt_experts: Moved::default(),
            decode_experts: Moved::default(),
        }
    }

    /// Rates of nothing are not told.
    #[test]
    fn figures_are_told_of_what_was_done() {
        let starts = [
            (0, "0 tokens; prompt 1,024 tokens in 2.1 s"),
            (1, "1 token; prompt 1,024 tokens in 2.1 s"),
            (2, "2 tokens, 10.0 tokens/s; prompt 1,024 tokens in 2.1 s"),
        ];
        for (n, start) in starts {
            let summary = outcome(n).summary();
            assert!(summary.starts_with(start) && !summary.contains("hits"), "{summary}");
            assert_eq!(outcome(n).report().contains("decode: "), n > 1, "{n}");
        }
        let hits = Counters { hits_whole: 61, misses: 39, ..Counters::default() };
        let moved = Moved { link: None, disk: Some(hits) };
        let streamed = Outcome { decode_experts: moved, n_reused: 7, ..outcome(3) };
        let summary = streamed.summary();
        assert!(summary.contains("in 2.1 s (7 cached); 61 % hits"), "{summary}");
        let report = streamed.report();
        assert!(report.starts_with("prompt: 1,024 tokens in 2.1 s, 487.62 tokens/s; 7 more"));
        assert!(report.contains("\ndecode: 2 tokens in 200.0 ms, 10.00 tokens/s\nexperts: "));
        assert!(report.contains("\ngenerated 3 tokens"), "{report}");
    }
}
