//! `moeba serve`: the HTTP server.

use super::args::{self, BatchArgs, SpecArgs, ThreadsArg};
use super::conversation::has_template;
use super::figures::counted;
use super::library::{self, LibraryArgs};
use super::model::{Model, ModelArg};
use super::reasoning::ReasoningArgs;
use super::sampling::SamplingArgs;
use super::serve_ray::{RayArgs, Served};
use super::values::{self, Parsed};
use super::{out, plan, sampling, stdin};
use crate::chat::ChatTemplate;
use crate::engine::kv_disk::KvFolder;
use crate::engine::plan::ram::{Place, RamBudget};
use crate::engine::scheduler::SchedulerOptions;
use crate::engine::{Engine, EngineOptions, Loading, MemoryPlan, Pooling};
use crate::server::{
    self, Address, ConnectionLimits, Defaults, Keys, Loaded, LogRequests, Network, Server,
    ServerOptions, systemd,
};
use crate::units::size;
use crate::{Error, Result, interrupt};
use clap::builder::Resettable;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub const HOST: &str = "127.0.0.1";
const PORT: &str = "8080";

/// The URL of a server whose flags do not say another.
pub fn default_url() -> String {
    format!("http://{HOST}:{PORT}")
}

#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
// Without a model there are several.
#[command(mut_arg("model", |arg| arg.required_unless_present(Resettable::Reset)))]
pub struct Args {
    #[command(flatten)]
    pub(super) model: ModelArg,
    #[command(flatten)]
    pub(super) library: LibraryArgs,
    #[command(flatten)]
    pub(super) listen: ListenArgs,
    #[command(flatten)]
    pub(super) ray: RayArgs,
    #[command(flatten)]
    pub(super) access: AccessArgs,
    #[command(flatten)]
    pub(super) load: LoadArgs,
    #[command(flatten)]
    answers: AnswerArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    reasoning: ReasoningArgs,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    pub(super) batch: BatchArgs,
    #[command(flatten)]
    pub(super) spec: SpecArgs,
    /// Print where the weights would be and what a token reads, and exit
    #[arg(long, help_heading = "Report")]
    dry_run: bool,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Server")]
pub(super) struct ListenArgs {
    /// Address to listen on, or the path of a Unix socket, ending in .sock
    #[arg(long, value_name = "HOST", default_value = HOST, env = "MOEBA_HOST")]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    host: String,
    /// Port to listen on; 0 takes a free one, and the URL is printed on stdout
    #[arg(long, value_name = "PORT", default_value = PORT, env = "MOEBA_PORT")]
    #[arg(value_parser = values::port)]
    port: u16,
    /// Name of the model in answers, and other names of it [default: the file's name]
    #[arg(short, long, value_name = "NAME,…", value_delimiter = ',', env = "MOEBA_ALIAS")]
    pub(super) alias: Vec<String>,
    /// Refuse requests for models of other names
    #[arg(long)]
    strict_model: bool,
    /// Beginning of all paths, as /llm
    #[arg(long, value_name = "PATH", default_value = "", env = "MOEBA_API_PREFIX")]
    #[arg(value_parser = api_prefix, hide_short_help = true)]
    api_prefix: String,
    /// Write the server's URL to this file once the model is loaded
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
    /// Stop when stdin is closed, as it is when the program that started the server ends
    #[arg(long)]
    lifeline: bool,
    /// Seconds that requests have to end when the server stops
    #[arg(long, value_name = "N", default_value = "30", value_parser = seconds)]
    grace: u64,
    /// Serve GET /metrics; the default where only this machine can connect
    #[arg(long, env = "MOEBA_METRICS", value_parser = values::boolean)]
    metrics: bool,
    /// Serve GET /slots and /moeba/experts; the default
    #[arg(long, overrides_with = "no_slots")]
    slots: bool,
    /// Do not serve GET /slots and /moeba/experts
    #[arg(long, overrides_with = "slots")]
    no_slots: bool,
    /// Serve the page at /; the default
    #[arg(long, alias = "webui", overrides_with = "no_ui")]
    ui: bool,
    /// Do not serve the page
    #[arg(long, alias = "no-webui", overrides_with = "ui")]
    no_ui: bool,
    /// Requests in the log, which -v shows: none, line, or full with their bodies
    #[arg(long, value_name = "KIND", default_value = "line", value_parser = log_requests)]
    log_requests: LogRequests,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Access")]
pub(super) struct AccessArgs {
    /// Key that clients must send; may be repeated
    #[arg(long, value_name = "KEY,…", value_delimiter = ',', env = "MOEBA_API_KEY")]
    #[arg(hide_env_values = true)]
    api_key: Vec<String>,
    /// File of keys, a line each: KEY [NAME] [weight=N] [max-parallel=N] [priority]; SIGHUP reads
    /// it again
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Listen for other machines without a key
    #[arg(long)]
    insecure: bool,
    /// Let requests say which of a key's are next: priority or X-Priority, -100 (first) to 100
    #[arg(long)]
    allow_priority: bool,
    /// Host name of the server besides this machine's own; may be repeated
    #[arg(long, value_name = "HOST,…", value_delimiter = ',')]
    allow_host: Vec<String>,
    /// Origins of web pages that may use the server, besides those of this machine; * is any
    #[arg(long, value_name = "ORIGIN,…", value_delimiter = ',')]
    cors_origins: Vec<String>,
    /// Largest body of a request: bytes with K, M or G
    #[arg(long, value_name = "SIZE", default_value = "32M", value_parser = body_size)]
    max_body: usize,
    /// Memory for bodies of all requests and for what is read of them: bytes with K, M or G, or
    /// auto, which is an eighth of what is available, from 16M to 512M. A body has a quarter of it
    /// at most
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = body_ram)]
    #[arg(env = "MOEBA_BODY_RAM")]
    pub(super) body_ram: RamBudget,
    /// Open connections; 0: 1024 more than requests may wait and run. Idle ones and slow bodies
    /// make room for new ones
    #[arg(long, value_name = "N", default_value = "0", value_parser = connections)]
    max_connections: usize,
    /// Connections of one address. Programs of this machine and trusted proxies have no such limit,
    /// but each client behind them
    #[arg(long, value_name = "N", default_value = "64", value_parser = connections_per_address)]
    max_connections_per_address: usize,
    /// Addresses of proxies whose X-Forwarded-For says who the client is, as 10.0.0.1 or
    /// 10.0.0.0/8; this machine's are trusted anyway
    #[arg(long, value_name = "ADDRESS,…", value_delimiter = ',')]
    trusted_proxy: Vec<Network>,
}

/// A path with a slash at its beginning and none at its end.
fn api_prefix(text: &str) -> Parsed<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/-._~".contains(c);
    let trimmed = text.trim_matches('/');
    match trimmed {
        "" => Ok(String::new()),
        _ if trimmed.contains("//") || !trimmed.chars().all(is_plain) => {
            Err("expected a path of letters, digits, - . _ ~ and single slashes, as in /llm".into())
        }
        _ => Ok(format!("/{trimmed}")),
    }
}

fn body_ram(text: &str) -> Parsed<RamBudget> {
    match text.trim() {
        "auto" => Ok(RamBudget::Auto),
        other => match body_size(other) {
            Ok(bytes) if bytes >= 1 << 20 => Ok(RamBudget::Bytes(bytes as u64)),
            _ => Err("expected auto or bytes from 1M to 1G".into()),
        },
    }
}

fn connections(text: &str) -> Parsed<usize> {
    values::integer(text, 0, 1_000_000)
}

fn connections_per_address(text: &str) -> Parsed<usize> {
    values::integer(text, 1, 1_000_000)
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Load")]
pub(super) struct LoadArgs {
    /// Texts computed at a time (or -np N); auto: 1 where experts are read from disk, 4 where all
    /// are in memory, 8 where all are in VRAM
    #[arg(long, value_name = "N", default_value = "auto", value_parser = parallel)]
    #[arg(env = "MOEBA_PARALLEL")]
    parallel: Parallel,
    /// Tokens of context of all texts together; 0: as many for each as the model has, as far as
    /// memory allows
    #[arg(short, long, value_name = "N", default_value = "0")]
    #[arg(value_parser = args::tokens_or_zero, env = "MOEBA_CTX_SIZE")]
    ctx_size: usize,
    /// Let texts share the memory of -c (or -kvu): one may have all that others do not use. The
    /// default where --parallel is auto; not on GPUs
    #[arg(long, overrides_with = "no_kv_unified", env = "MOEBA_KV_UNIFIED")]
    #[arg(value_parser = values::boolean)]
    kv_unified: bool,
    /// Give each text an even part of -c (or -no-kvu)
    #[arg(long, overrides_with = "kv_unified")]
    no_kv_unified: bool,
    /// Memory for the beginnings of earlier texts: bytes with K, M or G, a percentage of what is
    /// available, auto, which is an eighth of that and at most 8G, or 0 for none
    #[arg(long, value_name = "SIZE", default_value = "auto", env = "MOEBA_KV_RAM")]
    #[arg(value_parser = page_ram)]
    kv_ram: RamBudget,
    /// Folder that keeps texts for the next server, and the bytes that its files take at most, with
    /// K, M, G or T [default: 32G, or half of what is free]
    #[arg(long, value_name = "DIR[,SIZE]", env = "MOEBA_KV_DISK", value_parser = kv_disk)]
    pub(super) kv_disk: Option<KvDiskArg>,
    /// Folder in which POST /slots/ID?action=save keeps the texts of slots
    #[arg(long, value_name = "DIR", env = "MOEBA_SLOT_SAVE_PATH")]
    slot_save_path: Option<PathBuf>,
    /// Compute prompts on a GPU as steps of decode, slower: answers then have the same bytes
    /// whatever a cache held of their prompts. On the CPU they always have
    #[arg(long, env = "MOEBA_EXACT", value_parser = values::boolean)]
    exact: bool,
    /// Requests that may wait
    #[arg(long, value_name = "N", default_value = "64", value_parser = queue)]
    pub(super) queue: usize,
    /// Seconds that a request may wait; 0 is any time
    #[arg(long, value_name = "N", default_value = "600", value_parser = seconds)]
    pub(super) queue_timeout: u64,
    /// Seconds that a request may take (or -to N); 0 is any time
    #[arg(long, value_name = "N", default_value = "0", value_parser = seconds)]
    #[arg(env = "MOEBA_TIMEOUT")]
    timeout: u64,
    /// Part of the time that prompts get while answers are written
    #[arg(long, value_name = "X", default_value = "0.5", value_parser = share)]
    prefill_share: f64,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Answers")]
struct AnswerArgs {
    /// Tokens of an answer, where its request has no limit; -1 is any number
    #[arg(short = 'n', long, visible_alias = "n-predict", value_name = "N", default_value = "-1")]
    #[arg(value_parser = sampling::n_predict, env = "MOEBA_N_PREDICT")]
    predict: i64,
    /// Let answers go on when the context is full: the older half of a text leaves it, but for its
    /// first n_keep tokens
    #[arg(long, overrides_with = "no_context_shift", env = "MOEBA_CONTEXT_SHIFT")]
    #[arg(value_parser = values::boolean)]
    context_shift: bool,
    /// End them there; the default
    #[arg(long, overrides_with = "context_shift")]
    no_context_shift: bool,
    /// How the outputs of a text's tokens become its embedding: none, mean, cls, last, or rank
    /// where documents are ranked only [default: as the file says, or last]
    #[arg(long, value_name = "NAME", env = "MOEBA_POOLING")]
    pooling: Option<Pooling>,
    /// Chat template: one of the model's or of llama.cpp's by name (chatml, llama3, ...), a file,
    /// or the template itself
    #[arg(long, visible_alias = "chat-template-file", value_name = "NAME|FILE")]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    #[arg(env = "MOEBA_CHAT_TEMPLATE")]
    chat_template: Option<String>,
    /// Let texts of control tokens in messages become control tokens: what a client quotes may then
    /// end its message and begin another one
    #[arg(long)]
    trust_content: bool,
    /// Seconds of silence after which a stream gets a comment; -1 is none
    #[arg(long, value_name = "N", default_value = "15", value_parser = ping)]
    sse_ping_interval: i64,
}

impl LoadArgs {
    /// Texts share memory where their number is not given, as in llama-server.
    fn kv_unified(&self) -> bool {
        !self.no_kv_unified && (self.kv_unified || self.parallel.0.is_none())
    }
}

/// Texts at a time; `None` is auto.
#[derive(Clone, Copy, Debug)]
struct Parallel(Option<usize>);

const MAX_PARALLEL: i64 = 256;

fn parallel(text: &str) -> Parsed<Parallel> {
    match text {
        "auto" | "-1" => Ok(Parallel(None)),
        n => match values::integer(n, 1, MAX_PARALLEL) {
            Ok(n) => Ok(Parallel(Some(n))),
            Err(_) => Err(format!("expected auto or a whole number from 1 to {MAX_PARALLEL}")),
        },
    }
}

/// Reads a budget for experts, where none is an amount, too.
fn page_ram(text: &str) -> Parsed<RamBudget> {
    match text.trim() {
        "0" => Ok(RamBudget::Bytes(0)),
        other => other.parse().map_err(|_| {
            "expected bytes with K, M, G or T as in 1.5G, a percentage of what is available as in \
             5%, auto, or 0"
                .into()
        }),
    }
}

/// A folder and the bytes of its files at most.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct KvDiskArg {
    path: PathBuf,
    most_bytes: Option<u64>,
}

/// The part behind the last comma is the size, if it is one.
fn kv_disk(text: &str) -> Parsed<KvDiskArg> {
    let with_size = text.rsplit_once(',').and_then(|(path, size)| match size.parse() {
        Ok(RamBudget::Bytes(bytes)) => Some((path, Some(bytes))),
        _ => None,
    });
    let (path, most_bytes) = with_size.unwrap_or((text, None));
    match path.is_empty() {
        true => Err("expected a folder, and a size behind a comma if there is to be one".into()),
        false => Ok(KvDiskArg { path: path.into(), most_bytes }),
    }
}

fn queue(text: &str) -> Parsed<usize> {
    values::integer(text, 0, 100_000)
}

fn seconds(text: &str) -> Parsed<u64> {
    values::integer(text, 0, 10_000_000)
}

fn ping(text: &str) -> Parsed<i64> {
    values::integer(text, -1, 86_400)
}

fn share(text: &str) -> Parsed<f64> {
    let number = text.parse::<f64>().ok().filter(|x| (0.05..=0.95).contains(x));
    number.ok_or_else(|| "expected a number from 0.05 to 0.95".into())
}

fn log_requests(text: &str) -> Parsed<LogRequests> {
    match text {
        "none" => Ok(LogRequests::None),
        "line" => Ok(LogRequests::Line),
        "full" => Ok(LogRequests::Full),
        _ => Err("expected none, line or full".into()),
    }
}

fn body_size(text: &str) -> Parsed<usize> {
    let upper = text.trim().to_ascii_uppercase();
    let upper = upper.strip_suffix("IB").or(upper.strip_suffix('B')).unwrap_or(&upper);
    let units = [('K', 10), ('M', 20), ('G', 30)];
    let unit = units.iter().find_map(|(unit, shift)| Some((upper.strip_suffix(*unit)?, *shift)));
    let (digits, shift) = unit.unwrap_or((upper, 0));
    let bytes = digits.parse::<usize>().ok().and_then(|n| n.checked_mul(1 << shift));
    let bytes = bytes.filter(|n| (1 << 10..=1 << 30).contains(n));
    bytes.ok_or_else(|| "expected bytes from 1K to 1G".into())
}

/// A time of 0 is none.
pub(super) fn time(seconds: u64) -> Option<Duration> {
    (seconds > 0).then(|| Duration::from_secs(seconds))
}

pub fn run(args: Args) -> Result<()> {
    if args.dry_run {
        keys(&args.access.api_key, args.access.api_key_file.as_deref())?;
        let model = args.model.resolve()?;
        let options = args.engine_options(&model, None, 1)?;
        return plan::print(
            &Engine::plan_of(&model.path, &model.options(&options))?,
            Some(&model.path),
        );
    }
    args.check_library()?;
    let server_options = args.server_options()?;
    if args.ray.is_on() {
        return args.serve_on_ray(&server_options);
    }
    let args = Arc::new(args);
    let kv_folder = args.kv_folder()?;
    let shelf = args.has_library().then(|| library::shelf(&args)).transpose()?;
    let model = if shelf.is_none() { Some(args.model.resolve()?) } else { None };
    interrupt::set_grace(server_options.grace + Duration::from_secs(5));
    if args.listen.lifeline {
        stdin::end_with_it(server_options.grace)?;
    }
    // A client that comes while the model is loaded is told so.
    let server = Server::bind(server_options)?;
    if args.listen.port == 0 {
        out::line(server.url())?;
    }
    if let Some(model) = model {
        let options = args.engine_options(&model, None, 1)?;
        let loaded = args.open(&model, &options, &mut |now| server.set_loading(now))?;
        let loaded = Loaded { kv_folder, ..loaded };
        let lines = args.start_lines(&loaded);
        server.open(loaded)?;
        lines.iter().for_each(|line| out::note(line));
    } else if let Some(shelf) = shelf {
        // Each load opens it again.
        drop(kv_folder);
        let has_first = shelf.first.is_some();
        let (n, names) = (shelf.library.list().len(), "see /v1/models for their names");
        server.open_models(shelf)?;
        if has_first {
            server.load_first()?;
        }
        if args.has_several() {
            out::note(&format!("models: {n}, which are loaded as requests ask for them; {names}"));
        }
    }
    args.tell_where(&server)?;
    let AccessArgs { api_key, api_key_file, .. } = &args.access;
    let new_keys = || keys(api_key, api_key_file.as_deref());
    server.wait(api_key_file.as_ref().map(|_| &new_keys as _));
    Ok(())
}

impl Args {
    fn kv_folder(&self) -> Result<Option<KvFolder>> {
        let arg = self.load.kv_disk.as_ref();
        arg.map(|arg| KvFolder::open(&arg.path, arg.most_bytes)).transpose()
    }

    /// Loads a model. Where models come and go it has its folder for texts.
    pub(super) fn open(
        &self,
        model: &Model,
        options: &EngineOptions,
        progress: &mut dyn FnMut(Loading),
    ) -> Result<Loaded> {
        let engine = model.load_with(options, progress)?;
        if engine.encoder().is_some() {
            let why = "the server generates text only: `moeba run` translates";
            return Err(Error::invalid(why));
        }
        if !engine.only_embeds() {
            engine.check_continues()?;
        }
        let kv_folder = if self.has_library() { self.kv_folder()? } else { None };
        Ok(Loaded { kv_folder, ..self.loaded(engine, &model.options(options))? })
    }

    fn server_options(&self) -> Result<ServerOptions> {
        let ListenArgs { host, port, .. } = &self.listen;
        let keys = keys(&self.access.api_key, self.access.api_key_file.as_deref())?;
        let address = Address::new(host, *port);
        Ok(ServerOptions {
            metrics: self.listen.metrics || address.is_local(),
            address,
            keys,
            insecure: self.access.insecure,
            hosts: self.access.allow_host.clone(),
            origins: self.access.cors_origins.clone(),
            names: self.listen.alias.clone(),
            strict_model: self.listen.strict_model,
            allow_priority: self.access.allow_priority,
            max_body: self.access.max_body,
            connections: self.connections(),
            ping: u64::try_from(self.answers.sse_ping_interval).ok().and_then(time),
            grace: Duration::from_secs(self.listen.grace),
            slots: self.listen.slots || !self.listen.no_slots,
            slot_save_path: self.slot_save_path()?,
            page: self.listen.ui || !self.listen.no_ui,
            only_experts: false,
            api_prefix: self.listen.api_prefix.clone(),
            log_requests: self.listen.log_requests,
        })
    }

    fn connections(&self) -> ConnectionLimits {
        let AccessArgs { max_connections, max_connections_per_address, .. } = self.access;
        let n_waiting = self.load.queue + self.load.parallel.0.unwrap_or(MAX_AUTO_PARALLEL);
        ConnectionLimits {
            most: if max_connections > 0 { max_connections } else { 1024 + n_waiting },
            most_per_address: max_connections_per_address,
            proxies: self.access.trusted_proxy.clone(),
        }
    }

    /// The folder for the texts of slots, which is there and can be written to.
    fn slot_save_path(&self) -> Result<Option<PathBuf>> {
        let Some(path) = &self.load.slot_save_path else { return Ok(None) };
        let failed = |e| Error::io(path, e);
        std::fs::create_dir_all(path).map_err(failed)?;
        tempfile::tempfile_in(path).map_err(failed)?;
        Ok(Some(path.clone()))
    }

    /// Hands over to Ray. The plan of this machine says how many texts each computes at a time.
    fn serve_on_ray(&self, server: &ServerOptions) -> Result<()> {
        if matches!(server.address, Address::Unix(_)) {
            return Err(Error::Usage(
                "--host: with --ray it is a host, not a socket's path".into(),
            ));
        }
        if !self.batch.options(0, None).adapters.is_empty() {
            let why = "--lora: not with --ray: merge the adapter with moeba convert --lora";
            return Err(Error::Usage(why.into()));
        }
        if !server.address.is_local() && server.keys.is_empty() && !server.insecure {
            return Err(server::needs_key());
        }
        let options = self.engine_options(&self.model.resolve()?, None, 1)?;
        let mut keys: String = self.access.api_key.iter().map(|key| format!("{key}\n")).collect();
        if let Some(path) = &self.access.api_key_file {
            keys += &std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
        }
        self.ray.run(&Served {
            host: &self.listen.host,
            port: self.listen.port,
            keys,
            insecure: server.insecure,
            parallel: options.n_sessions,
            kv_unified: options.kv_unified,
            n_queue: self.load.queue,
            queue_timeout: self.load.queue_timeout,
            grace: self.listen.grace,
            ping: self.answers.sse_ping_interval,
            has_random_seeds: self.sampling.seed().is_none(),
            ready_file: self.listen.ready_file.as_deref(),
            of_peers: self.arguments_of_peers(),
        })
    }

    /// The model, and as much memory and as many threads as here.
    fn arguments_of_peers(&self) -> Vec<String> {
        let ram = match self.batch.weights.experts.ram {
            RamBudget::Auto => "auto".into(),
            RamBudget::Bytes(bytes) => bytes.to_string(),
            RamBudget::Percent(percent) => format!("{percent}%"),
        };
        let threads = self.threads.threads.to_string();
        let more = ["--ram".to_owned(), ram, "--threads".to_owned(), threads];
        self.model.arguments().into_iter().chain(more).collect()
    }

    /// Options for as many sessions as are asked for, or as make sense, each with its part of the
    /// context. The model is one of several that share this memory, or what is available.
    pub(super) fn engine_options(
        &self,
        model: &Model,
        memory: Option<u64>,
        n_models: usize,
    ) -> Result<EngineOptions> {
        let kv_unified = self.load.kv_unified();
        let with = |n: usize| {
            let n_ctx = if kv_unified { self.load.ctx_size } else { self.load.ctx_size / n };
            // 0 stands for the model's own.
            let n_ctx = if self.load.ctx_size > 0 { n_ctx.max(1) } else { 0 };
            let options = self.batch.options(n_ctx, self.threads.count());
            // Bodies have theirs beside all models.
            let body_ram =
                if memory.is_some() { RamBudget::Bytes(0) } else { self.access.body_ram };
            let page_ram = self.load.kv_ram;
            let exact = self.load.exact;
            self.spec.with(EngineOptions {
                memory,
                n_models,
                n_sessions: n,
                kv_unified,
                page_ram,
                body_ram,
                exact,
                ..options
            })
        };
        match self.load.parallel {
            Parallel(Some(n)) => Ok(with(n)),
            Parallel(None) => {
                let plan = Engine::plan_of(&model.path, &model.options(&with(IN_MEMORY)))?;
                Ok(with(sessions(&plan)))
            }
        }
    }

    fn loaded(&self, engine: Arc<Engine>, options: &EngineOptions) -> Result<Loaded> {
        let choice = self.answers.chat_template.as_deref();
        if choice.is_none() && !has_template(engine.gguf()) {
            log::warn!("the model has no chat template: chats are rendered as ChatML");
        }
        let template = ChatTemplate::from_gguf(engine.gguf(), engine.tokenizer(), choice)?;
        let reasoning = self.reasoning.settings();
        reasoning.warn_of(template.reasoning());
        let variables = reasoning.variables(&template)?;
        let sampling = self.sampling.options(engine.gguf());
        log::info!("sampling: {}", sampling.describe());
        let scheduler = SchedulerOptions {
            n_parallel: options.n_sessions,
            n_queue: self.load.queue,
            prompt_share: self.load.prefill_share,
            page_bytes: engine.plan().page_bytes as usize,
        };
        let defaults = Defaults {
            sampling,
            n_predict: usize::try_from(self.answers.predict).ok(),
            context_shift: self.answers.context_shift && !self.answers.no_context_shift,
            reasoning_budget: reasoning.budget_tokens(),
            keeps_reasoning_in_content: reasoning.is_in_content(),
            queue_time: time(self.load.queue_timeout),
            total_time: time(self.load.timeout),
            spec: self.spec.mode,
            pooling: self.answers.pooling,
        };
        Ok(Loaded {
            engine,
            options: options.clone(),
            scheduler,
            kv_folder: None,
            template,
            variables,
            trusts_content: self.answers.trust_content,
            defaults,
        })
    }

    /// Lines about the model, for people.
    fn start_lines(&self, loaded: &Loaded) -> Vec<String> {
        let engine = &loaded.engine;
        let mut lines: Vec<String> = engine.describe().lines().map(str::to_owned).collect();
        let n_ctx = engine.n_ctx();
        let context = match engine.plan().shares_kv() {
            true => format!("up to {n_ctx} tokens, {} together,", engine.plan().n_ctx_all),
            false => format!("{n_ctx} tokens"),
        };
        lines.push(format!(
            "{} of {context} at a time, {} more may wait; {} for earlier texts",
            counted(loaded.scheduler.n_parallel, "text"),
            loaded.scheduler.n_queue,
            size(engine.plan().page_bytes)
        ));
        if let Some(folder) = &loaded.kv_folder {
            let (path, most) = (folder.path().display(), size(folder.most_bytes()));
            lines.push(format!("texts are kept in {path}, {most} of them at most"));
        }
        lines
    }

    /// Says where the server is, to people and to scripts.
    fn tell_where(&self, server: &Server) -> Result<()> {
        let url = server.url();
        if url.starts_with("http") && (self.listen.ui || !self.listen.no_ui) {
            out::note(&format!("page: {url}"));
        }
        out::note(&format!(
            "OpenAI API: {url}/v1 (chat completions, completions, embeddings, models)"
        ));
        out::note(&format!("Anthropic API: {url} (messages)"));
        out::note(&format!("Ollama API: {url}/api (chat, generate, tags, show)"));
        let key = match self.access.api_key.is_empty() && self.access.api_key_file.is_none() {
            true => "no key is needed",
            false => "a key is needed",
        };
        let repeated = match server.deterministic() {
            "exact" => "the same request and seed give the same bytes, whatever runs beside it",
            _ => "the same request and seed give the same bytes if its prompt is computed alike",
        };
        out::note(&format!("{key}; {repeated}"));
        tell_ready(self.listen.ready_file.as_deref(), url)
    }
}

/// Tells programs that the server answers: whoever waits for the file, and systemd.
pub fn tell_ready(file: Option<&Path>, url: &str) -> Result<()> {
    file.map_or(Ok(()), |path| write_ready(path, url))?;
    systemd::tell(&format!("READY=1\nSTATUS=serving at {url}"));
    Ok(())
}

/// Keys that were given by themselves, and those of a file.
pub fn keys(given: &[String], file: Option<&Path>) -> Result<Keys> {
    let mut keys = Keys::default();
    given.iter().try_for_each(|key| keys.add(key))?;
    if let Some(path) = file {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
        keys.add_file(&text)?;
        if keys.is_empty() {
            let why = format!("{}: the file has no keys", path.display());
            return Err(Error::Usage(why));
        }
    }
    Ok(keys)
}

/// Writes the URL so that whoever sees the file sees all of it.
fn write_ready(path: &Path, url: &str) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let failed = |e| Error::io(path, e);
    let file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new("."))).map_err(failed)?;
    std::fs::write(file.path(), format!("{url}\n")).map_err(failed)?;
    file.persist(path).map_err(|e| failed(e.error))?;
    Ok(())
}

/// Texts at a time at most, unless more are asked for.
const MAX_AUTO_PARALLEL: usize = 8;

/// Texts at a time where all experts are in memory.
const IN_MEMORY: usize = 4;

/// Texts at a time, by where the experts are: more of them do not read fewer experts from disk.
fn sessions(plan: &MemoryPlan) -> usize {
    let experts = plan.sizes.expert_bytes;
    let in_vram = plan.device.as_ref().map_or(0, |part| part.plan.expert_budget_bytes());
    match plan.place {
        _ if experts > 0 && in_vram >= experts => MAX_AUTO_PARALLEL,
        Place::Streamed { .. } if plan.resident_share() < 1.0 => 1,
        _ => IN_MEMORY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_checked() {
        assert_eq!(parallel("auto").map(|p| p.0), Ok(None));
        assert_eq!(parallel("3").map(|p| p.0), Ok(Some(3)));
        assert!(parallel("0").is_err() && parallel("many").is_err());
        assert_eq!(body_size("32MiB"), Ok(32 << 20));
        assert_eq!(body_size("2048"), Ok(2048));
        for bad in ["", "1", "2T", "99G", "-1M", "M"] {
            assert!(body_size(bad).is_err(), "{bad}");
        }
        assert_eq!(page_ram("0"), Ok(RamBudget::Bytes(0)));
        assert_eq!(page_ram("1.5K"), Ok(RamBudget::Bytes(1536)));
        let folder = |path: &str, most_bytes| KvDiskArg { path: path.into(), most_bytes };
        assert_eq!(kv_disk("a/b,1.5K"), Ok(folder("a/b", Some(1536))));
        assert_eq!(kv_disk("a,b"), Ok(folder("a,b", None)));
        assert_eq!(kv_disk("a,50%"), Ok(folder("a,50%", None)));
        assert!(kv_disk("").is_err() && kv_disk(",1G").is_err());
        assert!(page_ram("-1").is_err() && page_ram("much").is_err());
        assert!(share("0.5").is_ok() && share("1").is_err() && share("NaN").is_err());
    }

    #[test]
    fn the_ready_file_has_the_url() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("url");
        write_ready(&path, "http://127.0.0.1:1").unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "http://127.0.0.1:1\n");
    }
}
