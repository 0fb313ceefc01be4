//! `moeba run`: one answer to a prompt, or a chat where there is none.

use super::answer::{Screen, Writer};
use super::args::{self, BatchArgs, SpecArgs, ThreadsArg};
use super::conversation::{Conversation, Prompt, has_template};
use super::figures::counted;
use super::grammar::{GrammarArgs, of_answer};
use super::model::{Model, ModelArg};
use super::outcome::{self, WithBar};
use super::preset::{self, PresetArgs};
use super::prompt::read_prompt;
use super::reasoning::{Reasoning, ReasoningArgs};
use super::sampling::{LimitArgs, SamplingArgs};
use super::stats::Stats;
use super::translate::LanguageArgs;
use super::{chat, consent, out, plan, stdin, translate};
use crate::chat::reasoning::ChatAnswer;
use crate::engine::{
    Engine, EngineOptions, FinishReason, Generator, Limits, Outcome, Request, SpecMode, Speculation,
};
use crate::sample::grammar::Constraint;
use crate::sample::{Sampler, SamplerOptions};
use crate::tokenizer::{EncodeOptions, Tokenizer};
use crate::{Error, Result, interrupt};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
#[command(mut_arg("model", |arg| arg.index(1).required_unless_present_any(["hf_repo", "preset"])))]
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    #[command(flatten)]
    text: TextArgs,
    #[command(flatten)]
    languages: LanguageArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    grammar: GrammarArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    reasoning: ReasoningArgs,
    /// Tokens of context; 0 is the model's own, as far as memory allows
    #[arg(short, long, value_name = "N", default_value = "0", help_heading = "Engine")]
    #[arg(value_parser = args::tokens_or_zero, env = "MOEBA_CTX_SIZE")]
    ctx_size: usize,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    batch: BatchArgs,
    #[command(flatten)]
    spec: SpecArgs,
    /// Write the figures of the run to this file as JSON (- is standard output)
    #[arg(long, value_name = "FILE.json", help_heading = "Report")]
    stats: Option<PathBuf>,
    /// Print where the weights would be and what a token reads, and exit
    #[arg(long, help_heading = "Report")]
    dry_run: bool,
    #[command(flatten)]
    preset: PresetArgs,
    /// Download a model of more than 1 GiB without asking first, as without a terminal
    #[arg(short = 'y', long, help_heading = "Model")]
    yes: bool,
}

impl Args {
    /// The model's file. Someone who can answer is asked before many gigabytes are downloaded.
    fn resolve(&self) -> Result<Model> {
        match self.yes {
            true => self.model.resolve(),
            false => self.model.resolve_with_consent(&mut consent::ask),
        }
    }
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct TextArgs {
    /// The prompt; with a chat model, a message that is answered once. Text on stdin follows it
    /// after a blank line
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// The prompt, in the place of --prompt
    #[arg(index = 2, value_name = "PROMPT", conflicts_with = "prompt", hide_short_help = true)]
    question: Option<String>,
    /// A file that holds the prompt, or what follows --prompt (- is stdin)
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// System prompt (or -sys TEXT)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    #[arg(conflicts_with = "no_conversation")]
    system_prompt: Option<String>,
    /// A file that holds the system prompt (or -sysf FILE)
    #[arg(long, value_name = "FILE", overrides_with = "system_prompt")]
    #[arg(conflicts_with = "no_conversation")]
    system_prompt_file: Option<PathBuf>,
    /// Read \n, \r, \t, \", \', \\ and \xHH in --prompt and --reverse-prompt as in C; the default
    #[arg(short, long, overrides_with = "no_escape")]
    escape: bool,
    /// Leave them as they are
    #[arg(long, overrides_with = "escape")]
    no_escape: bool,
    /// Chat, even if the model has no chat template (or -cnv)
    #[arg(long, overrides_with = "no_conversation")]
    conversation: bool,
    /// Continue the prompt as plain text (or -no-cnv)
    #[arg(long, visible_alias = "raw", overrides_with = "conversation")]
    no_conversation: bool,
    /// Answer one message and exit (or -st)
    #[arg(long)]
    single_turn: bool,
    /// Go on chatting after the answer to --prompt (or -cnv, which makes any model chat)
    #[arg(short, long)]
    interactive: bool,
    /// Chat template: one of the model's or of llama.cpp's by name (chatml, llama3, ...), a file,
    /// or the template itself
    #[arg(long, visible_alias = "chat-template-file", value_name = "NAME|FILE")]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    #[arg(env = "MOEBA_CHAT_TEMPLATE")]
    chat_template: Option<String>,
    /// Do not print the prompt before its continuation
    #[arg(long, overrides_with = "display_prompt")]
    no_display_prompt: bool,
    /// Repeat it; the default
    #[arg(long, overrides_with = "no_display_prompt")]
    display_prompt: bool,
    /// Print the tokens of each prompt to stderr
    #[arg(long, hide_short_help = true)]
    verbose_prompt: bool,
}

impl TextArgs {
    fn flag_or_word(&self) -> Option<&str> {
        self.prompt.as_deref().or(self.question.as_deref())
    }

    fn unescaped(&self, text: &str) -> String {
        let as_it_is = self.no_escape && !self.escape;
        if as_it_is { text.to_owned() } else { super::prompt::unescape(text) }
    }

    /// The prompt by flag, by file, or by a stdin that is no terminal; the first two, or the first
    /// and the last, one after the other. `None`: ask for it.
    fn prompt(&self) -> Result<Option<String>> {
        let given = self.flag_or_word().map(|text| self.unescaped(text));
        let given = given.filter(|text| !text.is_empty());
        let read = match &self.file {
            Some(path) => Some(read_prompt(path)?),
            None if given.is_some() => stdin::text()?,
            None if io::stdin().is_terminal() => return Ok(None),
            None => Some(read_prompt(Path::new("-"))?),
        };
        match (given, read.filter(|text| !text.is_empty())) {
            (Some(given), Some(read)) => {
                Ok(Some(format!("{}\n\n{read}", given.trim_end_matches('\n'))))
            }
            (None, None) => {
                let why = "the prompt is empty: give one with -p, -f or on stdin";
                Err(Error::Usage(why.into()))
            }
            (given, read) => Ok(given.or(read)),
        }
    }

    /// The text of the system prompt.
    fn system(&self) -> Result<Option<String>> {
        match &self.system_prompt_file {
            Some(path) => read_prompt(path).map(Some),
            None => Ok(self.system_prompt.clone()),
        }
    }

    /// Whether a chat goes on after an answer: where someone can type, and either asked for it or
    /// gave no prompt.
    fn goes_on(&self, has_prompt: bool) -> bool {
        let is_wanted = !has_prompt || self.conversation || self.interactive;
        is_wanted && !self.single_turn && io::stdin().is_terminal()
    }

    fn wants_chat(&self, engine: &Engine) -> bool {
        !self.no_conversation && (self.asks_for_chat() || has_template(engine.gguf()))
    }

    /// Whether a flag says so.
    pub fn asks_for_chat(&self) -> bool {
        let system = self.system_prompt.is_some() || self.system_prompt_file.is_some();
        self.conversation || self.single_turn || system || self.chat_template.is_some()
    }
}

/// States of a chat's text that are kept, for models that have any: of the last prompt, of places
/// where prompts parted, and within an answer.
const CHECKPOINTS: usize = 4;

/// A loaded model and what to do with it.
pub struct Run {
    pub generator: Generator,
    pub sampling: SamplerOptions,
    pub limits: Limits,
    pub reasoning: Reasoning,
    /// The form of answers.
    constraint: Option<Constraint>,
    spec: SpecMode,
    /// The tokens of prompts are shown.
    shows_prompts: bool,
    pub stats: Option<PathBuf>,
    load_time: Duration,
}

pub fn run(args: Args) -> Result<()> {
    let options = |has_prompt: bool| {
        let n_checkpoints = if args.text.goes_on(has_prompt) { CHECKPOINTS } else { 0 };
        let options = args.batch.options(args.ctx_size, args.threads.count());
        args.spec.with(EngineOptions { n_checkpoints, ..options })
    };
    let may_have_prompt = args.text.flag_or_word().is_some() || args.text.file.is_some();
    match (args.preset.name()?, args.dry_run) {
        (Some(name), true) => {
            return args.preset.print_plan(name, &args.model, options(may_have_prompt));
        }
        (Some(name), false) => return Err(preset::without_weights(name)),
        (None, true) => {
            let model = args.resolve()?;
            let options = model.options(&options(may_have_prompt));
            return plan::print(&Engine::plan_of(&model.path, &options)?, Some(&model.path));
        }
        (None, false) => {}
    }
    // Read before the model is: a prompt that is missing need not wait for gigabytes.
    let prompt = args.text.prompt()?;
    let system = args.text.system()?;
    let grammar = args.grammar.grammar()?;
    let model = args.resolve()?;
    let start = Instant::now();
    let engine = model.load(&options(prompt.is_some()))?;
    let load_time = start.elapsed();
    let mut sampling = args.sampling.options(engine.gguf());
    log::info!("sampling: {}", sampling.describe());
    // Told even where it was drawn, so that any run can be repeated.
    let seed = Sampler::for_text(sampling.clone(), engine.tokenizer())?.seed();
    sampling.seed = Some(seed);
    if !sampling.is_greedy() {
        log::info!("seed {seed}");
    }
    let run = Run {
        generator: Generator::new(&engine)?,
        sampling,
        limits: args.limits.limits(|text| args.text.unescaped(text)),
        reasoning: args.reasoning.settings(),
        constraint: grammar.map(|grammar| engine.grammars()?.constraint(&grammar)).transpose()?,
        spec: args.spec.mode,
        shows_prompts: args.text.verbose_prompt,
        stats: args.stats,
        load_time,
    };
    engine.check_continues()?;
    if engine.encoder().is_some() {
        return translate::run(run, &engine, &args.text, &args.languages, prompt);
    }
    args.languages.refuse()?;
    match (args.text.wants_chat(&engine), prompt) {
        (true, prompt) => converse(run, &engine, &args.text, system, prompt),
        (false, Some(prompt)) => complete(run, &prompt, !args.text.no_display_prompt),
        (false, None) => {
            let why = "there is nothing to continue: give a prompt with -p, -f or on stdin";
            Err(Error::Usage(why.into()))
        }
    }
}

/// The prompt and its continuation, as plain text.
fn complete(mut run: Run, prompt: &str, display_prompt: bool) -> Result<()> {
    if run.reasoning.is_set() {
        log::warn!("plain text has no chat template: flags of thinking have no effect");
    }
    let tokens = run.generator.engine().tokenizer().encode(prompt, EncodeOptions::PROMPT);
    if display_prompt {
        out::write(prompt.as_bytes())?;
    }
    let request = run.request(tokens, run.sampling.clone());
    let mut write = |text: &str| out::write(text.as_bytes());
    let outcome = run.generator.generate(&request, &mut WithBar::new(&mut write))?;
    out::line("")?;
    run.finish(&outcome)
}

fn converse(
    mut run: Run,
    engine: &Arc<Engine>,
    text: &TextArgs,
    system: Option<String>,
    prompt: Option<String>,
) -> Result<()> {
    let template = text.chat_template.as_deref();
    let mut conversation = Conversation::new(engine.gguf(), engine.tokenizer(), template)?;
    if let Some(system) = &system {
        conversation.set_system(system);
    }
    conversation.set_reasoning(&run.reasoning)?;
    run.reasoning.warn_of(conversation.format());
    if text.goes_on(prompt.is_some()) {
        return chat::run(run, conversation, prompt);
    }
    let message = match prompt {
        Some(message) => message,
        None => chat::read_message()?,
    };
    conversation.add_user(&message);
    let prompt = conversation.prompt(engine.tokenizer())?;
    let (outcome, answer) = run.reply(prompt, run.sampling.clone())?;
    let is_cut = matches!(outcome.finish, FinishReason::Length | FinishReason::ContextFull);
    if is_cut && answer.content.is_empty() && conversation.format().is_some() {
        log::warn!("{NO_CONTENT}: raise -n, or end the reasoning earlier with --reasoning-budget");
    }
    run.finish(&outcome)
}

impl Run {
    /// A request that Ctrl-C cancels.
    pub fn request(&self, prompt: Vec<u32>, sampling: SamplerOptions) -> Request {
        if self.shows_prompts {
            show_tokens(self.generator.engine().tokenizer(), &prompt);
        }
        let (limits, cancel) = (self.limits.clone(), interrupt::token());
        let constraint = self.constraint.clone();
        let speculation = Speculation { mode: self.spec, ..Speculation::default() };
        Request { prompt, sampling, limits, constraint, speculation, cancel, ..Request::default() }
    }

    /// The next answer of a conversation, written as it comes.
    pub fn reply(
        &mut self,
        prompt: Prompt,
        sampling: SamplerOptions,
    ) -> Result<(Outcome, ChatAnswer)> {
        let tokenizer = self.generator.engine().tokenizer();
        let shown = prompt.format.map_or(Vec::new(), |format| format.tokens(tokenizer));
        let budget = prompt.format.and_then(|format| self.reasoning.budget(format, tokenizer));
        let mut writer =
            Writer::new(prompt.scanner, budget, self.reasoning.format, Screen::stdout());
        let request = self.request(prompt.tokens, sampling);
        let of_answer = |constraint| of_answer(constraint, prompt.answer_start, tokenizer);
        let constraint = request.constraint.map(of_answer);
        let request = Request { shown, own_text: true, constraint, ..request };
        let outcome = self.generator.generate(&request, &mut WithBar::new(&mut writer))?;
        let answer = writer.finish()?;
        out::line("")?;
        Ok((outcome, answer))
    }

    /// The report of a one-shot run, and its exit code: 130 if it was cut short.
    pub fn finish(self, outcome: &Outcome) -> Result<()> {
        if outcome.finish == FinishReason::ContextFull {
            log::warn!("{}", context_full(self.generator.engine().n_ctx()));
        }
        outcome::print(outcome);
        self.write_stats(outcome)?;
        match outcome.finish {
            FinishReason::Cancelled => Err(Error::Interrupted),
            _ => Ok(()),
        }
    }

    pub fn write_stats(&self, outcome: &Outcome) -> Result<()> {
        let Some(path) = &self.stats else { return Ok(()) };
        let engine = self.generator.engine();
        let mut stats = Stats::new();
        outcome::fill(outcome, engine, &mut stats);
        stats.number("load_ms", super::stats::ms(self.load_time));
        stats.count("dense_bytes", engine.plan().sizes.dense_bytes);
        stats.count("kv_bytes", engine.kv_bytes());
        stats.process();
        stats.count("n_ctx", engine.n_ctx() as u64);
        stats.count("n_threads", engine.n_threads() as u64);
        stats.count("seed", self.sampling.seed.unwrap_or_default());
        stats.write(path)
    }
}

/// Writes a line for each token to stderr.
fn show_tokens(tokenizer: &Tokenizer, tokens: &[u32]) {
    out::say(&format!("the prompt has {}:", counted(tokens.len(), "token")));
    for &id in tokens {
        let piece = tokenizer.piece(id).map(String::from_utf8_lossy).unwrap_or_default();
        out::say(&format!("{id:>6} -> {piece:?}"));
    }
}

/// The note if the text ended within the reasoning.
pub const NO_CONTENT: &str = "the text ended before the answer began";

pub fn context_full(n_ctx: usize) -> String {
    format!("the context of {n_ctx} tokens is full, so the text ends here: raise it with -c")
}

/// Whether the answer was cut by Ctrl-C, which a chat takes as "enough".
pub fn was_interrupted(outcome: &Outcome) -> bool {
    let interrupted = outcome.finish == FinishReason::Cancelled;
    if interrupted {
        interrupt::clear();
    }
    interrupted
}
