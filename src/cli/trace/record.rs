//! `moeba trace record`: records a model's routing on texts. Each request is a prompt, evaluated as
//! a batch, and then decode steps of one token each: the text's next tokens, or with `--generate`
//! the model's own.

use super::super::args::{self, BatchArgs, ThreadsArg};
use super::super::model::{Model, ModelArg};
use super::super::new_file::NewFile;
use super::super::out;
use super::super::prompt::read_text;
use super::super::values::{self, Parsed};
use super::places::{Lengths, Source};
use crate::engine::{Engine, EvalHooks, Recorder, RouteRows, Session, Want};
use crate::experts::SlotLayout;
use crate::gguf::Gguf;
use crate::policy::Phase;
use crate::sample::{Sampler, SamplerOptions};
use crate::terminal::{self, Bar};
use crate::trace::format::{Header, LayerShape, MAX_AHEAD, Precision, Writer};
use crate::{Error, Result};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    /// Text to take requests from (- is stdin); may be repeated
    #[arg(short, long, value_name = "FILE", required = true)]
    file: Vec<PathBuf>,
    /// Name for the kind of text; once for each -f [default: the files' names]
    #[arg(long, value_name = "NAME")]
    kind: Vec<String>,
    /// File for the trace
    #[arg(short, long, value_name = "OUT.mtrace")]
    output: PathBuf,
    /// Requests from each text
    #[arg(long, value_name = "N", default_value = "64", value_parser = args::tokens)]
    requests: usize,
    /// Tokens of a request's prompt, or a range
    #[arg(short = 'p', long, value_name = "N[-N]", default_value = "32-96")]
    #[arg(value_parser = Lengths::parse)]
    n_prompt: Lengths,
    /// Tokens to decode after the prompt
    #[arg(short = 'n', long, value_name = "N", default_value = "64")]
    #[arg(value_parser = args::tokens_or_zero)]
    n_gen: usize,
    /// Decode the model's own continuation instead of the text's
    #[arg(long)]
    generate: bool,
    /// Record the routers' inputs of decode steps as well
    #[arg(long)]
    hidden: bool,
    /// How many of the following layers' routers to apply to each activation of decode steps
    #[arg(long, value_name = "N", default_value = "1", value_parser = distances)]
    ahead: usize,
    /// Store all values in full, with 32 bits each
    #[arg(long)]
    exact: bool,
    /// Seed for where requests start in the texts, and for --generate
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    seed: u32,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    batch: BatchArgs,
}

fn distances(text: &str) -> Parsed<usize> {
    values::integer(text, 0, MAX_AHEAD as i64)
}

/// A text and what sort it is of.
struct Text {
    path: PathBuf,
    kind: String,
    text: String,
}

pub fn run(args: Args) -> Result<()> {
    let texts = texts(&args)?;
    let n_ctx = args.n_prompt.max + args.n_gen;
    let model = args.model.resolve()?;
    let engine = model.load(&args.batch.options(n_ctx, args.threads.count()))?;
    let header = header(&engine, &model, &args)?;
    if header.moe_layers().next().is_none() {
        let model = model.path.display();
        return Err(Error::invalid(format!("{model}: no layer has routed experts to record")));
    }
    let n_forced = args.n_prompt.max + if args.generate { 0 } else { args.n_gen };
    let sources: Vec<_> =
        texts.iter().map(|text| source(&engine, text, n_forced)).collect::<Result<_>>()?;
    let n_requests = args.requests * texts.len();
    let bar = terminal::bar("trace", n_requests as u64);
    let mut job = OpenTrace::new(&engine, &args, header, bar)?;
    for (text, source) in texts.iter().zip(&sources) {
        for i in 0..args.requests {
            job.request(&text.kind, source, i)?;
        }
    }
    let n_tokens = job.finish()?;
    let n_bytes = std::fs::metadata(&args.output).map_err(|e| Error::io(&args.output, e))?.len();
    let path = args.output.display();
    out::line(&format!("{path}: {n_requests} requests, {n_tokens} tokens, {n_bytes} bytes"))
}

/// Reads the texts, and names their kinds.
fn texts(args: &Args) -> Result<Vec<Text>> {
    if !args.kind.is_empty() && args.kind.len() != args.file.len() {
        let (kinds, files) = (args.kind.len(), args.file.len());
        let sentence = format!(
            "--kind is given {kinds} times and -f {files} times: give one kind for each file"
        );
        return Err(Error::Usage(sentence));
    }
    let stem = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let text = |(i, path): (usize, &PathBuf)| {
        let kind = args.kind.get(i).cloned().unwrap_or_else(|| stem(path));
        Ok(Text { path: path.clone(), kind, text: read_text(path)? })
    };
    args.file.iter().enumerate().map(text).collect()
}

fn source<'a>(engine: &'a Engine, text: &'a Text, n_tokens: usize) -> Result<Source<'a>> {
    Source::new(engine.tokenizer(), &text.text, n_tokens).map_err(|n| {
        Error::invalid(format!(
            "{}: the text has {n} tokens, but a request takes {n_tokens}: give a longer text or \
             smaller -p and -n",
            text.path.display()
        ))
    })
}

fn header(engine: &Engine, file: &Model, args: &Args) -> Result<Header> {
    let model = engine.model();
    let layer = |layer: usize| {
        let Some(experts) = model.routed_experts(layer) else { return LayerShape::default() };
        LayerShape {
            n_experts: experts.n_experts,
            expert_bytes: experts.expert_bytes() as u64,
            n_granules: experts.geometry.n_granules(),
            slot_bytes: SlotLayout::new(engine.gguf(), experts).slot_bytes() as u64,
        }
    };
    let stem = file.path.file_stem().unwrap_or_default().to_string_lossy();
    Ok(Header {
        model: engine.gguf().str("general.name")?.unwrap_or(&stem).to_string(),
        // The engine's own may have let go of the file.
        key: Gguf::open(&file.path)?.key(),
        n_embd: model.hyper().n_embd,
        k: model.hyper().routing.k,
        layers: (0..engine.n_layers()).map(layer).collect(),
        precision: if args.exact { Precision::Exact } else { Precision::Compact },
        ids_only: false,
        hidden: args.hidden,
        ahead: args.ahead,
    })
}

/// A trace while it is recorded.
struct OpenTrace<'a> {
    engine: &'a Engine,
    args: &'a Args,
    session: Session,
    recorder: TraceRecorder,
    n_tokens: usize,
    bar: Bar,
}

impl<'a> OpenTrace<'a> {
    fn new(engine: &'a Arc<Engine>, args: &'a Args, header: Header, bar: Bar) -> Result<Self> {
        let file = NewFile::create(&args.output)?;
        let n_ahead = header.ahead;
        let writer = Writer::new(file, header).map_err(|e| Error::io(&args.output, e))?;
        let recorder = TraceRecorder { writer, phase: Phase::Prompt, n_ahead, fault: None };
        let session = engine.new_session()?;
        Ok(Self { engine, args, session, recorder, n_tokens: 0, bar })
    }

    fn request(&mut self, kind: &str, source: &Source<'_>, i: usize) -> Result<()> {
        let Args { n_gen, requests, seed, generate, .. } = *self.args;
        let n_prompt = self.args.n_prompt.of(i);
        let n_forced = if generate { n_prompt } else { n_prompt + n_gen };
        let tokens = source.request(i, requests, n_forced, seed);
        let (prompt, rest) = tokens.split_at(n_prompt.min(tokens.len()));
        self.recorder.writer.begin_request(kind).map_err(|e| self.io(e))?;
        self.session.truncate(0);
        if generate {
            self.generate(prompt, i)?;
        } else {
            self.eval(Phase::Prompt, prompt, None)?;
            for token in rest {
                self.eval(Phase::Decode, &[*token], None)?;
            }
        }
        self.bar.inc(1);
        Ok(())
    }

    /// Decodes what the model makes of a prompt, until it says that it is done.
    fn generate(&mut self, prompt: &[u32], i: usize) -> Result<()> {
        let seed = u64::from(self.args.seed) << 32 | i as u64;
        let options = SamplerOptions { seed: Some(seed), ..SamplerOptions::default() };
        let mut sampler = Sampler::new(options)?;
        let mut next = self.eval(Phase::Prompt, prompt, Some(&mut sampler))?;
        for _ in 0..self.args.n_gen {
            let Some(token) = next.filter(|token| !self.engine.tokenizer().is_eog(*token)) else {
                break;
            };
            next = self.eval(Phase::Decode, &[token], Some(&mut sampler))?;
        }
        Ok(())
    }

    /// Evaluates some tokens and, given a sampler, says which comes next.
    fn eval(
        &mut self,
        phase: Phase,
        tokens: &[u32],
        sampler: Option<&mut Sampler>,
    ) -> Result<Option<u32>> {
        self.recorder.phase = phase;
        let want = if sampler.is_some() { Want::Last } else { Want::None };
        let hooks = EvalHooks { recorder: Some(&mut self.recorder), ..EvalHooks::default() };
        let logits = self.session.eval_with(tokens, want, hooks)?.all();
        let next = sampler.map(|sampler| sampler.sample(logits));
        if let Some(e) = self.recorder.fault.take() {
            return Err(self.io(e));
        }
        self.n_tokens += tokens.len();
        next.transpose()
    }

    fn io(&self, e: io::Error) -> Error {
        Error::io(&self.args.output, e)
    }

    /// Answers how many tokens were recorded.
    fn finish(self) -> Result<usize> {
        let file = self.recorder.writer.finish().map_err(|e| Error::io(&self.args.output, e))?;
        file.finish()?;
        drop(self.bar);
        Ok(self.n_tokens)
    }
}

/// From the engine to a trace.
struct TraceRecorder {
    writer: Writer<NewFile>,
    /// Phase of the present evaluation.
    phase: Phase,
    n_ahead: usize,
    /// Why nothing more is written.
    fault: Option<io::Error>,
}

impl Recorder for TraceRecorder {
    fn pass(&mut self, tokens: &[u32], embeddings: &[f32]) {
        if self.fault.is_none() {
            self.fault = self.writer.begin_pass(self.phase, tokens, embeddings).err();
        }
    }

    fn routed(&mut self, layer: usize, route: RouteRows<'_>, hidden: &[f32]) {
        if self.fault.is_some() || route.probs.is_empty() {
            return;
        }
        self.writer.routed(layer, route.chosen, route.probs);
        if self.phase == Phase::Decode {
            self.writer.hidden(layer, hidden);
        }
    }

    fn n_ahead(&self) -> usize {
        if self.phase == Phase::Decode { self.n_ahead } else { 0 }
    }

    fn ahead(&mut self, layer: usize, distance: usize, probs: &[f32]) {
        if self.fault.is_none() {
            self.writer.ahead(layer, distance, probs);
        }
    }
}
