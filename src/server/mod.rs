//! The HTTP server: a loaded model behind the wire formats of OpenAI, Anthropic and llama-server.
//!
//! [`Server::bind`] opens the socket and answers at once; before [`Server::open`] has given it a
//! model, with 503. A request passes `router` (host, origin, key, limits), `api` (its wire's format
//! to the inner `request`), `service` (to tokens, and into the engine's queue) and comes back as
//! inner `events`, which `api` writes in its wire's format, whole or by `sse`. The tasks of this
//! module never compute, and the thread that computes never waits for a client.

mod adapters;
mod api;
mod auth;
mod bodies;
mod body;
mod collect;
mod digest;
mod embedding;
mod errors;
mod events;
mod experts;
mod fields;
mod forms;
mod identity;
mod limits;
mod listen;
mod metrics;
mod model;
mod models;
mod openapi;
mod origin;
mod page;
mod peer;
mod prompt;
mod proxy;
mod query;
mod random;
mod replay;
mod report;
mod request;
mod router;
mod service;
mod sink;
mod slots;
mod sockets;
mod sse;
mod status;
pub mod systemd;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub use auth::Keys;
pub use limits::ConnectionLimits;
pub use listen::Address;
pub use models::{Downloads, Library, Limits, Listed, Need, Pulled, Shelf};
pub use origin::Allowed;
pub use proxy::Network;
pub use report::LogRequests;
pub use service::Defaults;

use crate::chat::ChatTemplate;
use crate::engine::kv_disk::KvFolder;
use crate::engine::scheduler::SchedulerOptions;
use crate::engine::{Engine, EngineOptions, ExpertsWork, Loading, MAX_EXPERTS_BYTES};
use crate::{Error, Result, interrupt};
use auth::Failures;
use errors::{ApiError, ApiResult};
use experts::Viewers;
use fields::Fields;
use listen::Listener;
use metrics::Metrics;
use models::{Lease, Models};
use peer::PeerService;
use sockets::Sockets;

/// How a server listens and whom it serves.
#[derive(Debug)]
pub struct ServerOptions {
    pub address: Address,
    pub keys: Keys,
    /// Listen for other machines without a key.
    pub insecure: bool,
    pub hosts: Vec<String>,
    pub origins: Vec<String>,
    /// Names of the model in answers; its file's name if there are none.
    pub names: Vec<String>,
    /// Whether other names of models are refused.
    pub strict_model: bool,
    /// Whether all requests may have priorities; else those of keys that may.
    pub allow_priority: bool,
    /// Bytes of a request's body.
    pub max_body: usize,
    pub connections: ConnectionLimits,
    /// The longest silence of a stream; `None` is any.
    pub ping: Option<Duration>,
    /// Time that requests have to end when the server stops.
    pub grace: Duration,
    pub metrics: bool,
    pub slots: bool,
    /// The folder of files with the texts of slots; `None` serves none.
    pub slot_save_path: Option<PathBuf>,
    /// Whether there is a page at `/`.
    pub page: bool,
    /// Whether it is to be a peer, which computes experts and no texts.
    pub only_experts: bool,
    /// The beginning of all paths, as `/llm`; empty for none.
    pub api_prefix: String,
    pub log_requests: LogRequests,
}

impl ServerOptions {
    /// The settings of `moeba serve` without flags, for this address.
    pub fn new(address: Address) -> ServerOptions {
        ServerOptions {
            metrics: address.is_local(),
            address,
            keys: Keys::default(),
            insecure: false,
            hosts: Vec::new(),
            origins: Vec::new(),
            names: Vec::new(),
            strict_model: false,
            allow_priority: false,
            max_body: 32 << 20,
            connections: ConnectionLimits::default(),
            ping: Some(Duration::from_secs(15)),
            grace: Duration::from_secs(30),
            slots: true,
            slot_save_path: None,
            page: true,
            only_experts: false,
            api_prefix: String::new(),
            log_requests: LogRequests::Line,
        }
    }

    /// The options of a peer, which computes experts and no texts.
    pub fn of_peer(address: Address, keys: Keys) -> ServerOptions {
        ServerOptions {
            keys,
            max_body: MAX_EXPERTS_BYTES,
            ping: None,
            grace: Duration::ZERO,
            slots: false,
            page: false,
            only_experts: true,
            ..ServerOptions::new(address)
        }
    }
}

/// A model that a server is to serve.
pub struct Loaded {
    pub engine: Arc<Engine>,
    /// Options that it was loaded with.
    pub options: EngineOptions,
    pub scheduler: SchedulerOptions,
    /// Keeps texts for the next server.
    pub kv_folder: Option<KvFolder>,
    pub template: ChatTemplate,
    /// Variables of the template.
    pub variables: Map<String, Value>,
    /// Whether texts of control tokens in messages become control tokens.
    pub trusts_content: bool,
    pub defaults: Defaults,
}

impl Loaded {
    /// An engine with the chat template of its file, as many texts at a time as the engine was
    /// loaded for sessions, and the settings that hold for requests without their own. Fails for a
    /// template that cannot be read.
    pub fn new(engine: Arc<Engine>) -> Result<Loaded> {
        let options = engine.options().clone();
        Ok(Loaded {
            template: ChatTemplate::from_gguf(engine.gguf(), engine.tokenizer(), None)?,
            scheduler: SchedulerOptions {
                n_parallel: options.n_sessions,
                page_bytes: engine.plan().page_bytes as usize,
                ..SchedulerOptions::default()
            },
            engine,
            options,
            kv_folder: None,
            variables: Map::new(),
            trusts_content: false,
            defaults: Defaults::default(),
        })
    }
}

/// Everything that requests share.
pub struct App {
    options: ServerOptions,
    allowed: Allowed,
    /// The keys that are valid now.
    keys: RwLock<Arc<Keys>>,
    failures: Failures,
    metrics: Arc<Metrics>,
    viewers: Viewers,
    sockets: Sockets,
    models: OnceLock<Arc<Models>>,
    peer: OnceLock<Arc<PeerService>>,
    /// How far the load of the model is.
    loading: Mutex<Loading>,
    is_stopping: AtomicBool,
}

impl App {
    /// The models, once the server has them.
    fn models(&self) -> ApiResult<&Arc<Models>> {
        if self.options.only_experts {
            let why = "this server computes experts for other machines (moeba experts), no texts";
            return Err(ApiError::not_supported(why));
        }
        self.models.get().ok_or_else(ApiError::loading)
    }

    /// [`App::models`], unless the server is about to stop.
    fn open_models(&self) -> ApiResult<&Arc<Models>> {
        match self.is_stopping.load(Ordering::Relaxed) {
            true => Err(ApiError::shutting_down()),
            false => self.models(),
        }
    }

    /// The model that the query of a look names, if it is loaded.
    fn looked_at(&self, query: &str) -> ApiResult<Option<Arc<Lease>>> {
        let models = self.models()?;
        let id = models.find_to_look(query::value(query, "model").as_deref())?;
        Ok(id.and_then(|id| models.look(id)))
    }

    /// Whether the server has its models, or a peer its part of one.
    fn is_loaded(&self) -> bool {
        self.models.get().is_some() || self.peer.get().is_some()
    }

    /// How far the load of the server's model is, until it has it.
    fn loading(&self) -> Option<Loading> {
        let now = *self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        (!self.is_loaded()).then_some(now)
    }

    fn keys(&self) -> Arc<Keys> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The time after which a request that has no place now should come again.
    fn time_to_wait(&self) -> Duration {
        let newest = self.models.get().and_then(|models| models.newest());
        newest.map_or(Duration::from_secs(1), |model| model.scheduler.time_to_wait())
    }

    /// Counts the fields of a request that have no meaning here.
    fn note_unknown(&self, fields: &Fields<'_>) {
        let unknown = fields.unknown();
        self.metrics.add_unknown_fields(unknown.len());
        if !unknown.is_empty() {
            log::debug!("fields without a meaning: {}", unknown.join(", "));
        }
    }
}

/// The error of a server without a key that other machines can reach.
pub fn needs_key() -> Error {
    let why = "other machines could use the server: give --api-key, or --insecure if that is what \
               you want";
    Error::Usage(why.into())
}

/// Lets the process have as many open files as connections and a model need, as far as the system
/// does: its usual 1024 are for programs that wait with select.
fn allow_files(n_connections: usize) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    let wanted = n_connections as u64 + 512;
    if let Some(current) = now.current.filter(|current| *current < wanted) {
        let most = now.maximum.map_or(wanted, |maximum| wanted.min(maximum));
        let raised = Rlimit { current: Some(most.max(current)), maximum: now.maximum };
        if setrlimit(Resource::Nofile, raised).is_err() || most < wanted {
            log::debug!("{most} files may be open: fewer connections than {n_connections}");
        }
    }
}

/// A server that listens.
pub struct Server {
    app: Arc<App>,
    url: String,
    /// Stops the connections.
    stop: watch::Sender<bool>,
    accepting: JoinHandle<()>,
    /// Dropped last: it runs the tasks.
    runtime: Runtime,
}

/// Threads that read requests: some that work, and others that wait for their grammar's turn, of
/// which there are more than the sandbox lets wait.
const N_BLOCKING: usize = 16 + 144;

impl Server {
    /// Opens the socket and answers on it.
    pub fn bind(mut options: ServerOptions) -> Result<Server> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(N_BLOCKING)
            .thread_name("http")
            .enable_all()
            .build();
        let runtime = runtime
            .map_err(|e| Error::invalid(format!("cannot start the server's threads: {e}")))?;
        let entered = runtime.enter();
        let listener = Listener::bind(&options.address)?;
        if !listener.is_local() && options.keys.is_empty() && !options.insecure {
            return Err(needs_key());
        }
        drop(entered);
        let lower = |list: &[String]| list.iter().map(|text| text.to_ascii_lowercase()).collect();
        let allowed = Allowed {
            hosts: lower(&options.hosts),
            origins: lower(&options.origins),
            has_keys: !options.keys.is_empty(),
        };
        let limits = &options.connections;
        let sockets = Sockets::new(limits.most, limits.most_per_address);
        allow_files(limits.most);
        let keys = RwLock::new(Arc::new(std::mem::take(&mut options.keys)));
        let app = Arc::new(App {
            options,
            allowed,
            keys,
            failures: Failures::default(),
            metrics: Arc::default(),
            viewers: Viewers::default(),
            sockets,
            models: OnceLock::new(),
            peer: OnceLock::new(),
            loading: Mutex::default(),
            is_stopping: AtomicBool::new(false),
        });
        let (stop, stopped) = watch::channel(false);
        let url = listener.url() + &app.options.api_prefix;
        let accepting = runtime.spawn(listener.run(app.clone(), stopped));
        Ok(Server { app, url, stop, accepting, runtime })
    }

    /// The address for clients, with the port that was chosen.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Says how far the load of the model is.
    pub fn set_loading(&self, now: Loading) {
        *self.app.loading.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    /// Starts to serve a model.
    pub fn open(&self, model: Loaded) -> Result<()> {
        self.set_models(Models::of_one(model, self.app.options.names.clone())?);
        Ok(())
    }

    /// Starts to serve models that come when they are asked for.
    pub fn open_models(&self, shelf: Shelf) -> Result<()> {
        self.set_models(Models::of_shelf(shelf)?);
        Ok(())
    }

    fn set_models(&self, models: Arc<Models>) {
        assert!(self.app.models.set(models).is_ok(), "a server gets its models once");
    }

    /// Loads the model of requests that name none. Fails if there is none, or if it cannot be
    /// loaded.
    pub fn load_first(&self) -> Result<()> {
        let loaded = self.runtime.block_on(async {
            let models = self.app.models()?;
            models.take(models.find(None)?).await
        });
        loaded
            .map(drop)
            .map_err(|why| interrupt::check().err().unwrap_or_else(|| Error::invalid(why.message)))
    }

    /// Starts to compute experts for other machines.
    pub fn open_experts(&self, work: ExpertsWork) {
        let is_new = self.app.peer.set(Arc::new(PeerService::new(work))).is_ok();
        assert!(is_new, "a server has one model");
    }

    /// How far answers can be repeated: `exact`, or `load` where they depend on how a prompt came.
    pub fn deterministic(&self) -> &'static str {
        let newest = self.app.models.get().and_then(|models| models.newest());
        newest.map_or("exact", |model| status::deterministic(&model))
    }

    /// Serves until a signal asks the program to end, then stops. On SIGHUP the keys are those of
    /// `new_keys`, if it is there and gives some.
    pub fn wait(self, new_keys: Option<&dyn Fn() -> Result<Keys>>) {
        if new_keys.is_some() {
            interrupt::take_over_hangup();
        }
        while !interrupt::is_set() {
            std::thread::sleep(Duration::from_millis(50));
            if let Some(new_keys) = new_keys.filter(|_| interrupt::take_hangup()) {
                match new_keys() {
                    Ok(keys) => self.set_keys(keys),
                    Err(why) => log::warn!("the keys stay as they are: {why}"),
                }
            }
        }
        systemd::tell("STOPPING=1");
        self.stop();
    }

    /// Replaces the keys. Those that are gone are refused from now on, and their requests that run
    /// go on.
    fn set_keys(&self, mut keys: Keys) {
        let mut place = self.app.keys.write().unwrap_or_else(PoisonError::into_inner);
        keys.go_on_from(&place);
        log::info!("keys that are valid now: {}", keys.len());
        *place = Arc::new(keys);
    }

    /// Takes no more requests, lets those that were taken end for a while, and ends.
    pub fn stop(self) {
        let Server { app, stop, accepting, runtime, .. } = self;
        app.is_stopping.store(true, Ordering::Relaxed);
        accepting.abort();
        if let Some(models) = app.models.get() {
            models.close(app.options.grace);
        }
        // Connections end after the answer that they write.
        let _ = stop.send(true);
        let end = Instant::now() + Duration::from_secs(2);
        while app.sockets.count() > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        if let Address::Unix(path) = &app.options.address {
            let _ = std::fs::remove_file(path);
        }
        runtime.shutdown_timeout(Duration::from_secs(1));
    }
}
