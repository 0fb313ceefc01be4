//! `moeba bench`: llama-bench's tests, names and JSON keys, so that figures compare; beside them
//! what an expert costs (bytes of experts a token touches), and how far each test is from what the
//! machine can do: bytes that decode reads and operations that every test does, a second.

mod report;
mod table;
mod traffic;
mod wall;
mod work;

use super::args::{self, SizeArgs, WeightArgs};
use super::model::ModelArg;
use super::values::Parsed;
use super::{stats, values};
use crate::engine::{BatchRow, CacheType, Engine, ExpertTraffic, Experts, Phase, Session, Want};
use crate::machine::Wall;
use crate::{Result, interrupt, terminal};
use report::{Format, Report, Row};
use std::sync::Arc;
use std::time::{Instant, SystemTime};
use traffic::Traffic;
use work::Work;

const MAX_REPETITIONS: i64 = 100_000;
const MAX_TEXTS: i64 = 256;

#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    /// Prompt tests: tokens of each, separated by commas; 0 for none
    #[arg(short = 'p', long, value_name = "N,…", default_value = "512", value_parser = counts)]
    n_prompt: List<usize>,
    /// Decode tests: numbers of tokens; 0 for none
    #[arg(short = 'n', long, value_name = "N,…", default_value = "128", value_parser = counts)]
    n_gen: List<usize>,
    /// A test of a prompt and tokens decoded after it, timed together (or -pg P,N); may be repeated
    #[arg(long, value_name = "P,N", value_parser = pair)]
    prompt_gen: Vec<(usize, usize)>,
    /// Tokens in the context before each test
    #[arg(short = 'd', long, value_name = "N,…", default_value = "0", value_parser = counts)]
    n_depth: List<usize>,
    /// Texts that are decoded at once, one token of each in a pass; speed is that of all together
    #[arg(long, value_name = "N,…", default_value = "1", value_parser = text_counts)]
    parallel: List<usize>,
    /// Repetitions of each test
    #[arg(short, long, value_name = "N", default_value = "5", value_parser = repetitions)]
    repetitions: usize,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "md")]
    output: Format,
    /// Threads, separated by commas; -1 is one for each physical core
    #[arg(short, long, value_name = "N,…", default_value = "-1", value_parser = thread_counts)]
    #[arg(allow_hyphen_values = true, env = "MOEBA_THREADS")]
    threads: List<i64>,
    /// Skip the untimed run before each test
    #[arg(long)]
    no_warmup: bool,
    /// Skip measuring the machine's read rate and integer peak, which takes half a second a run
    #[arg(long)]
    no_machine: bool,
    #[command(flatten)]
    sizes: SizeLists,
    #[command(flatten)]
    weights: WeightArgs,
}

/// [`SizeArgs`] with a list of values for each: all combinations are measured.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Engine")]
struct SizeLists {
    /// Tokens of a prompt handed to the engine at once
    #[arg(short, long, value_name = "N,…", default_value = "2048", value_parser = sizes)]
    #[arg(env = "MOEBA_BATCH_SIZE")]
    batch_size: List<usize>,
    /// Tokens of a prompt computed at once (or -ub N) [default: 512, up to 2048 as memory allows
    /// where the CPU computes routed experts]
    #[arg(long, value_name = "N,…", value_parser = sizes, env = "MOEBA_UBATCH_SIZE")]
    ubatch_size: Option<List<usize>>,
    /// Types of the key cache: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0 or q5_1 (or -ctk
    /// TYPE)
    #[arg(long, value_name = "TYPE,…", default_value = "f16", value_parser = cache_types)]
    #[arg(env = "MOEBA_CACHE_TYPE_K")]
    cache_type_k: List<CacheType>,
    /// Types of the value cache, as for keys (or -ctv TYPE)
    #[arg(long, value_name = "TYPE,…", default_value = "f16", value_parser = cache_types)]
    #[arg(env = "MOEBA_CACHE_TYPE_V")]
    cache_type_v: List<CacheType>,
}

impl SizeLists {
    fn all(&self) -> Vec<SizeArgs> {
        let ubatch_sizes = match &self.ubatch_size {
            Some(list) => list.0.iter().map(|n| Some(*n)).collect(),
            None => vec![None],
        };
        let mut all = Vec::new();
        for &batch_size in &self.batch_size.0 {
            for &ubatch_size in &ubatch_sizes {
                for &cache_type_k in &self.cache_type_k.0 {
                    all.extend(self.cache_type_v.0.iter().map(|&cache_type_v| SizeArgs {
                        batch_size,
                        ubatch_size,
                        cache_type_k,
                        cache_type_v,
                    }));
                }
            }
        }
        all
    }
}

/// A list is one value of the flag, so it needs a type of its own: clap reads `Vec` as "repeated".
#[derive(Clone, Debug)]
struct List<T>(Vec<T>);

fn counts(text: &str) -> Parsed<List<usize>> {
    values::list(text, args::tokens_or_zero).map(List)
}

fn sizes(text: &str) -> Parsed<List<usize>> {
    values::list(text, args::tokens).map(List)
}

fn cache_types(text: &str) -> Parsed<List<CacheType>> {
    values::list(text, args::cache_type).map(List)
}

fn thread_counts(text: &str) -> Parsed<List<i64>> {
    values::list(text, args::threads).map(List)
}

fn text_counts(text: &str) -> Parsed<List<usize>> {
    values::list(text, |one| values::integer(one, 1, MAX_TEXTS)).map(List)
}

fn repetitions(text: &str) -> Parsed<usize> {
    values::integer(text, 1, MAX_REPETITIONS)
}

fn pair(text: &str) -> Parsed<(usize, usize)> {
    match values::list(text, args::tokens)?[..] {
        [prompt, gen_tokens] => Ok((prompt, gen_tokens)),
        _ => Err("expected two numbers, as in 512,128".into()),
    }
}

/// In each of `n_texts` texts: a prompt of `n_prompt` tokens, then `n_gen` tokens one by one, after
/// `n_depth` others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Test {
    n_prompt: usize,
    n_gen: usize,
    n_depth: usize,
    n_texts: usize,
}

impl Test {
    /// The tokens of all texts.
    fn n_tokens(self) -> usize {
        self.n_texts * (self.n_prompt + self.n_gen)
    }
}

/// In llama-bench's order: for each depth the prompts, the decodes, both together; all of them for
/// each number of texts.
fn tests(args: &Args) -> Vec<Test> {
    let mut out = Vec::new();
    let depths = || args.n_depth.0.iter();
    for (n_texts, n_depth) in args.parallel.0.iter().flat_map(|n| depths().map(|d| (*n, *d))) {
        let prompts = args.n_prompt.0.iter().map(|&n| (n, 0));
        let decodes = args.n_gen.0.iter().map(|&n| (0, n));
        let all = prompts.chain(decodes).filter(|&pair| pair != (0, 0));
        let all = all.chain(args.prompt_gen.iter().copied());
        out.extend(all.map(|(n_prompt, n_gen)| Test { n_prompt, n_gen, n_depth, n_texts }));
    }
    out
}

pub fn run(args: Args) -> Result<()> {
    let tests = tests(&args);
    let n_ctx = tests.iter().map(|t| t.n_prompt + t.n_gen + t.n_depth).max().unwrap_or(1);
    let n_texts = args.parallel.0.iter().copied().max().unwrap_or(1);
    let model = args.model.resolve()?;
    let sizes = args.sizes.all();
    let mut report = Report::new(args.output, &tests, &sizes);
    let (level, mut walls) = (log::max_level(), Vec::new());
    let threads = args.threads.0.iter();
    for (sizes, &n_threads) in threads.flat_map(|n| sizes.iter().map(move |sizes| (sizes, n))) {
        let n_threads = usize::try_from(n_threads).ok();
        let mut options = args.weights.options(sizes, n_ctx, n_threads);
        options.n_ctx = Some(n_ctx);
        options.n_sessions = n_texts;
        options.without_text = true;
        let engine = model.load(&options)?;
        // Notes would stand between the rows, and were the same for each engine.
        log::set_max_level(level.min(log::LevelFilter::Error));
        for test in &tests {
            let samples = Bench::new(&engine, &args, sizes, *test)?.run()?;
            walls.extend(samples.walls.iter().map(|wall| (engine.n_threads(), wall.clone())));
            let work = Work::of(&engine, sizes, *test);
            report.add(&Row::new(&engine, sizes, *test, samples, &work))?;
        }
    }
    log::set_max_level(level);
    report.finish()?;
    wall::report(&walls);
    Ok(())
}

/// One test's measurements.
struct Samples {
    /// When the first run began.
    started: SystemTime,
    ns: Vec<u64>,
    /// The machine's limits, measured right before each run, if asked for.
    walls: Vec<Wall>,
    peak_rss_bytes: Option<u64>,
    traffic: Traffic,
    /// The experts' traffic in all runs together.
    experts: ExpertTraffic,
}

struct Bench<'a> {
    engine: &'a Arc<Engine>,
    args: &'a Args,
    sizes: &'a SizeArgs,
    test: Test,
    /// One for each text.
    sessions: Vec<Session>,
    tokens: Tokens,
}

impl<'a> Bench<'a> {
    fn new(
        engine: &'a Arc<Engine>,
        args: &'a Args,
        sizes: &'a SizeArgs,
        test: Test,
    ) -> Result<Self> {
        let sessions = (0..test.n_texts).map(|_| engine.new_session()).collect::<Result<_>>()?;
        let tokens = Tokens::new(engine.tokenizer().n_vocab());
        Ok(Self { engine, args, sizes, test, sessions, tokens })
    }

    fn run(mut self) -> Result<Samples> {
        let mut traffic = Traffic::none();
        if !self.args.no_warmup {
            // Which experts are touched is counted here, where nothing is timed.
            self.sessions.iter_mut().for_each(|session| session.record_experts(true));
            self.prepare()?;
            self.take_experts();
            self.once()?;
            traffic = Traffic::of(self.engine, &self.take_experts(), self.test.n_prompt);
            self.sessions.iter_mut().for_each(|session| session.record_experts(false));
        }
        let started = SystemTime::now();
        let bar = terminal::bar("bench", self.args.repetitions as u64);
        let (mut ns, mut walls, mut experts) = (Vec::new(), Vec::new(), None::<ExpertTraffic>);
        let mut peak_rss_bytes = None;
        for _ in 0..self.args.repetitions {
            self.prepare()?;
            if !self.args.no_machine {
                peak_rss_bytes = peak_rss_bytes.max(stats::peak_rss_bytes());
                walls.push(wall::measure(self.engine));
            }
            let (before, start) = (self.engine.expert_traffic(), Instant::now());
            self.once()?;
            ns.push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
            let now = self.engine.expert_traffic().since(&before);
            experts = Some(experts.map_or(now, |sum| now.plus(&sum)));
            bar.inc(1);
        }
        drop(bar);
        peak_rss_bytes = peak_rss_bytes.max(stats::peak_rss_bytes());
        let experts = experts.unwrap_or_default();
        Ok(Samples { started, ns, walls, peak_rss_bytes, traffic, experts })
    }

    fn take_experts(&mut self) -> Vec<Experts> {
        self.sessions.iter_mut().map(Session::take_experts).collect()
    }

    /// Empty contexts, or contexts of the test's depth.
    fn prepare(&mut self) -> Result<()> {
        for session in &mut self.sessions {
            session.truncate(0);
        }
        self.prompt(self.test.n_depth)
    }

    fn once(&mut self) -> Result<()> {
        self.prompt(self.test.n_prompt)?;
        for _ in 0..self.test.n_gen {
            interrupt::check()?;
            let tokens: Vec<u32> = self.sessions.iter().map(|_| self.tokens.next()).collect();
            let texts = self.sessions.iter_mut().zip(tokens.chunks(1));
            let rows = texts.map(|(session, tokens)| BatchRow {
                session,
                tokens,
                phase: Phase::Decode,
                want: Want::Last,
            });
            self.engine.eval_batch(&mut rows.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Prompts of `n` tokens, one text after the other.
    fn prompt(&mut self, n: usize) -> Result<()> {
        for session in &mut self.sessions {
            let tokens: Vec<u32> = (0..n).map(|_| self.tokens.next()).collect();
            for part in tokens.chunks(self.sizes.batch_size) {
                session.eval(part, Want::Last)?;
            }
        }
        Ok(())
    }
}

/// Random tokens, as llama-bench takes them; the same ones in every run of the program.
struct Tokens {
    state: u64,
    n_vocab: u64,
}

impl Tokens {
    fn new(n_vocab: usize) -> Self {
        Self { state: 0x9e37_79b9_7f4a_7c15, n_vocab: n_vocab.max(1) as u64 }
    }

    fn next(&mut self) -> u32 {
        // xorshift64*: enough to spread tokens over the vocabulary.
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        let random = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        ((random * self.n_vocab) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_spread_over_the_vocabulary() {
        let mut tokens = Tokens::new(10);
        let mut seen = [0; 10];
        (0..1000).for_each(|_| seen[tokens.next() as usize] += 1);
        assert!(seen.iter().all(|&n| n > 50), "{seen:?}");
    }

    #[test]
    fn pairs_are_two_positive_numbers() {
        assert_eq!(pair("8,4"), Ok((8, 4)));
        for bad in ["8", "8,4,2", "0,4", "8,", "x,y"] {
            assert!(pair(bad).is_err(), "{bad}");
        }
    }
}
