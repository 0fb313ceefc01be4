//! The figures of one generated text: on stderr for people, in `--stats` for programs; and the bar
//! while its prompt is computed.

use super::report;
use super::stats::{Stats, ms, peak_rss_bytes, per_second};
use super::{figures, out};
use crate::Result;
use crate::engine::{Engine, FinishReason, Outcome, TextSink};
use crate::terminal::{self, Bar, Detail};
use crate::units::size;
use std::time::Duration;

/// Name of a reason in `--stats`: OpenAI's where its API has one.
fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::StopToken | FinishReason::StopString => "stop",
        FinishReason::Length => "length",
        FinishReason::ContextFull => "context_full",
        FinishReason::Cancelled => "interrupted",
    }
}

/// Passes of one token: all but the first token, which the prompt's pass gives.
fn n_decoded(outcome: &Outcome) -> usize {
    outcome.n_generated.saturating_sub(1)
}

fn prompt_rate(outcome: &Outcome) -> f64 {
    per_second(outcome.n_prompt, outcome.prompt_time)
}

fn decode_rate(outcome: &Outcome) -> f64 {
    per_second(n_decoded(outcome), outcome.decode_time)
}

/// Writes the figures to stderr: one line, or all with -v.
pub fn print(outcome: &Outcome) {
    report(outcome).lines().for_each(|line| log::info!("{line}"));
    if terminal::detail() < Detail::Verbose {
        out::aside(&summary(outcome));
    }
}

/// One line of figures.
fn summary(outcome: &Outcome) -> String {
    let mut parts = vec![figures::counted(outcome.n_generated, "token")];
    if n_decoded(outcome) > 0 {
        parts[0].push_str(&format!(", {:.1} tokens/s", decode_rate(outcome)));
    }
    let prompt = figures::counted(outcome.n_prompt, "token");
    let cached = match outcome.n_reused {
        0 => String::new(),
        n => format!(" ({} cached)", figures::count(n)),
    };
    parts.push(format!("prompt {prompt} in {}{cached}", figures::time(outcome.prompt_time)));
    let traffic = match n_decoded(outcome) {
        0 => outcome.prompt_traffic,
        _ => outcome.decode_traffic,
    };
    let hits = traffic.top().map(|c| c.hit_rate()).filter(|rate| !rate.is_nan());
    let hits = hits.map(|rate| format!("{:.0} % hits", 100.0 * rate));
    let peak = peak_rss_bytes().map(|bytes| format!("peak {}", size(bytes)));
    let machine: Vec<String> = [hits, peak].into_iter().flatten().collect();
    if !machine.is_empty() {
        parts.push(machine.join(", "));
    }
    parts.join("; ")
}

/// All figures, in several lines.
pub fn report(outcome: &Outcome) -> String {
    let phase = |n: usize, time: Duration, rate: f64| {
        let (tokens, time) = (figures::counted(n, "token"), figures::time(time));
        format!("{tokens} in {time}, {rate:.2} tokens/s")
    };
    let prompt = phase(outcome.n_prompt, outcome.prompt_time, prompt_rate(outcome));
    let mut lines = vec![format!("prompt: {prompt}")];
    if outcome.n_reused > 0 {
        lines[0]
            .push_str(&format!("; {} more were in the cache", figures::count(outcome.n_reused)));
    }
    lines.extend(report::lines(&outcome.prompt_traffic, outcome.n_prompt));
    if n_decoded(outcome) > 0 {
        let decode = phase(n_decoded(outcome), outcome.decode_time, decode_rate(outcome));
        lines.push(format!("decode: {decode}{}", of_drafts(outcome)));
        lines.extend(report::lines(&outcome.decode_traffic, n_decoded(outcome)));
    }
    let memory = peak_rss_bytes().map(|bytes| format!("; peak memory {}", size(bytes)));
    let generated = figures::counted(outcome.n_generated, "token");
    lines.push(format!("generated {generated}{}", memory.unwrap_or_default()));
    lines.join("\n")
}

/// The drafts that were verified, if there were any.
fn of_drafts(outcome: &Outcome) -> String {
    let drafted = outcome.drafts.all();
    match drafted.n {
        0 => String::new(),
        n => format!("; {} of {n} drafts accepted", figures::count(drafted.n_accepted as usize)),
    }
}

/// Fills in the figures for `--stats`. The keys of expert traffic are decode's, in which policies
/// differ; the prompt's share has keys of its own.
pub fn fill(outcome: &Outcome, engine: &Engine, stats: &mut Stats) {
    let per_token = |n: usize, time| if n == 0 { f64::NAN } else { ms(time) / n as f64 };
    let first = if outcome.n_generated == 0 { f64::NAN } else { ms(outcome.prompt_time) };
    stats.number("ttft_ms", first);
    stats.number("tpot_ms", per_token(n_decoded(outcome), outcome.decode_time));
    stats.count("prompt_tokens", (outcome.n_prompt + outcome.n_reused) as u64);
    stats.count("prompt_tokens_reused", outcome.n_reused as u64);
    stats.count("generated_tokens", outcome.n_generated as u64);
    stats.number("prompt_tokens_per_second", prompt_rate(outcome));
    stats.number("decode_tokens_per_second", decode_rate(outcome));
    stats.text("finish_reason", finish_name(outcome.finish));
    let drafted = outcome.drafts.all();
    stats.count("drafted_tokens", drafted.n);
    stats.count("accepted_drafted_tokens", drafted.n_accepted);
    report::fill(stats, engine.plan(), &outcome.decode_traffic, n_decoded(outcome));
    let prompt = outcome.prompt_traffic.top();
    stats.value("prompt_read_bytes", prompt.map(|c| c.read_bytes).into());
    stats.value("prompt_stall_ms", prompt.map(|c| c.stall_ns as f64 / 1e6).into());
}

/// A sink that also shows a bar while the prompt is computed.
pub struct WithBar<'a> {
    sink: &'a mut dyn TextSink,
    bar: Option<Bar>,
}

impl<'a> WithBar<'a> {
    pub fn new(sink: &'a mut dyn TextSink) -> Self {
        WithBar { sink, bar: None }
    }
}

impl TextSink for WithBar<'_> {
    fn text(&mut self, text: &str) -> Result<()> {
        self.sink.text(text)
    }

    fn prompt_progress(&mut self, done: usize, total: usize) {
        if done == total {
            self.bar = None;
            return;
        }
        let bar = self.bar.get_or_insert_with(|| terminal::bar("prompt", total as u64));
        bar.set_position(done as u64);
    }

    fn forced(&mut self, is_whole: bool) -> Option<u32> {
        self.sink.forced(is_whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{DraftCounts, ExpertTraffic};
    use crate::experts::Counters;

    fn outcome(n_generated: usize) -> Outcome {
        Outcome {
            finish: FinishReason::Length,
            n_prompt: 1024,
            n_reused: 0,
            n_generated,
            n_shifted: 0,
            stop: None,
            prompt_time: Duration::from_millis(2100),
            decode_time: Duration::from_millis(100 * n_generated.saturating_sub(1) as u64),
            prompt_traffic: ExpertTraffic::default(),
            decode_traffic: ExpertTraffic::default(),
            drafts: DraftCounts::default(),
        }
    }

    #[test]
    fn figures_are_told_of_what_was_done() {
        let starts = [
            (0, "0 tokens; prompt 1,024 tokens in 2.1 s"),
            (1, "1 token; prompt 1,024 tokens in 2.1 s"),
            (2, "2 tokens, 10.0 tokens/s; prompt 1,024 tokens in 2.1 s"),
        ];
        for (n, start) in starts {
            let summary = summary(&outcome(n));
            assert!(summary.starts_with(start) && !summary.contains("hits"), "{summary}");
            assert_eq!(report(&outcome(n)).contains("decode: "), n > 1, "{n}");
        }
        let hits = Counters { hits_whole: 61, misses: 39, ..Counters::default() };
        let decode_traffic = ExpertTraffic { disk: Some(hits), ..Default::default() };
        let streamed = Outcome { decode_traffic, n_reused: 7, ..outcome(3) };
        let summary = summary(&streamed);
        assert!(summary.contains("in 2.1 s (7 cached); 61 % hits"), "{summary}");
        let report = report(&streamed);
        assert!(report.starts_with("prompt: 1,024 tokens in 2.1 s, 487.62 tokens/s; 7 more"));
        assert!(report.contains("\ndecode: 2 tokens in 200.0 ms, 10.00 tokens/s\nexperts: "));
        assert!(report.contains("\ngenerated 3 tokens"), "{report}");
    }
}
