//! The models of a server: which there are, which are loaded, and who uses them.
//!
//! A request takes a [`Lease`], which keeps its model in memory; if the model is not there, the
//! request waits. One thread plans, loads and unloads, as [`roster`] decides.

mod lease;
mod roster;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

pub use lease::Lease;
use roster::{Act, Roster, State};
pub use roster::{Limits, Need};

use super::Loaded;
use super::bodies::Bodies;
use super::errors::{ApiError, ApiResult, Kind};
use super::model::{Facts, ModelInfo};
use super::prompt::Templates;
use super::service::Service;
use crate::engine::Loading;
use crate::gguf::Gguf;
use crate::{Error, Result, meter};

/// A model that a server can load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub name: String,
    pub path: PathBuf,
    pub n_bytes: u64,
    pub modified: Option<SystemTime>,
}

impl Listed {
    /// The model in this file, with the size and the time that the file has now.
    pub fn new(name: String, path: PathBuf) -> Listed {
        let data = path.metadata().ok();
        let n_bytes = data.as_ref().map_or(0, |data| data.len());
        let modified = data.and_then(|data| data.modified().ok());
        Listed { name, path, n_bytes, modified }
    }
}

/// The source of a server's models.
pub trait Library: Send + Sync {
    /// The models that there are now.
    fn list(&self) -> Vec<Listed>;
    /// The memory that a model takes once it is loaded.
    fn need(&self, model: &Listed) -> Result<Need>;
    /// Loads it. `progress` is told how far it is.
    fn load(&self, model: &Listed, progress: &mut dyn FnMut(Loading)) -> Result<Loaded>;
    /// Names of the model in answers; its own if there are none.
    fn names(&self, model: &Listed) -> Vec<String>;
    /// Downloads models and removes what was downloaded; `None`: clients may not.
    fn hub(&self) -> Option<&dyn Downloads> {
        None
    }
}

/// Models of a hub.
pub trait Downloads: Send + Sync {
    /// Downloads a model. `progress` fails if it is not wanted any more.
    fn pull(&self, name: &str, progress: &mut dyn FnMut(Pulled<'_>) -> Result<()>) -> Result<()>;
    /// Removes a downloaded model: bytes that became free.
    fn remove(&self, model: &Listed) -> Result<u64>;
}

/// How far a download is.
#[derive(Clone, Copy, Debug)]
pub struct Pulled<'a> {
    pub file: &'a str,
    /// The SHA-256 of the file, where the hub tells it.
    pub digest: Option<&'a str>,
    /// Bytes of all files.
    pub done: u64,
    pub total: u64,
}

/// A model beside its state.
#[derive(Clone, Debug)]
struct Card {
    model: Listed,
    names: Vec<String>,
    /// Whether the library has it still.
    is_listed: bool,
    facts: Option<Arc<Facts>>,
    /// Why the last load has failed.
    failure: Option<ApiError>,
    /// How far its load is, or was.
    loading: Loading,
    /// The number of the load, among all.
    load: u64,
}

struct Inner {
    roster: Roster<Arc<Service>>,
    /// By the roster's numbers.
    cards: Vec<Card>,
    n_loads: u64,
    is_over: bool,
}

/// The models of a server.
pub struct Models {
    inner: Mutex<Inner>,
    /// Wakes the thread that loads.
    work: Condvar,
    /// Wakes requests that wait.
    changed: watch::Sender<()>,
    /// The time after which a request has waited for too long.
    patience: Option<Duration>,
    library: Option<Box<dyn Library>>,
    /// Whether all names are those of one model.
    is_single: bool,
    /// The model of requests that name none.
    first: Option<usize>,
    start: Instant,
    thread: Mutex<Option<JoinHandle<()>>>,
    pulls: Arc<Semaphore>,
    /// Memory for requests' bodies.
    pub bodies: Bodies,
}

/// Downloads for clients at a time.
const MAX_PULLS: usize = 2;

/// The state of a model, for lists.
pub struct Listing {
    pub names: Vec<String>,
    pub model: Listed,
    /// The name that llama-server has for it.
    pub state: &'static str,
    /// Why its last load has failed.
    pub failure: Option<String>,
    /// How far its load is, of one that is being loaded.
    pub loading: Option<Loading>,
    pub facts: Option<Arc<Facts>>,
    /// Whether it was loaded once.
    pub was_loaded: bool,
    /// Present while it is loaded.
    pub lease: Option<Arc<Lease>>,
    /// When it leaves; `None` is never.
    pub expires: Option<SystemTime>,
}

/// How a server with several models serves them.
pub struct Shelf {
    pub library: Box<dyn Library>,
    pub limits: Limits,
    /// The path of the model of requests that name none.
    pub first: Option<PathBuf>,
    /// Whether all names are those of this model.
    pub is_single: bool,
    /// Memory for requests' bodies.
    pub body_bytes: u64,
    /// The time after which a request has waited for too long.
    pub patience: Option<Duration>,
}

/// Makes a service of a model.
fn started(loaded: Loaded, names: Vec<String>) -> Result<Service> {
    let info = ModelInfo::new(&loaded, names)?;
    let Loaded { engine, scheduler, kv_folder, .. } = loaded;
    let Loaded { template, variables, trusts_content, defaults, .. } = loaded;
    let templates = Templates::new(template, variables, trusts_content, engine.tokenizer())?;
    Service::start(&engine, scheduler, templates, info, defaults, kv_folder)
}

impl Models {
    /// A single model, which stays.
    pub fn of_one(loaded: Loaded, names: Vec<String>) -> Result<Arc<Models>> {
        let bodies = Bodies::new(loaded.engine.plan().body_bytes);
        let service = Arc::new(started(loaded, names)?);
        let info = &service.info;
        let card = Card {
            model: Listed::new(info.name().to_owned(), info.path.clone()),
            names: info.names.clone(),
            is_listed: true,
            facts: Some(Arc::new(info.facts.clone())),
            failure: None,
            loading: Loading::default(),
            load: 1,
        };
        let mut roster = Roster::new(Limits::one());
        roster.add_loaded(service.clone());
        let inner = Inner { roster, cards: vec![card], n_loads: 1, is_over: false };
        let patience = None;
        Ok(Arc::new(Models::new(inner, None, true, Some(0), patience, bodies)))
    }

    /// Models of a library, which come when they are asked for.
    pub fn of_shelf(shelf: Shelf) -> Result<Arc<Models>> {
        let Shelf { library, limits, first, is_single, body_bytes, patience } = shelf;
        let roster = Roster::new(limits);
        let mut inner = Inner { roster, cards: Vec::new(), n_loads: 0, is_over: false };
        inner.update(&*library);
        let first = first.and_then(|path| inner.cards.iter().position(|c| c.model.path == path));
        let bodies = Bodies::new(body_bytes);
        let models = Models::new(inner, Some(library), is_single, first, patience, bodies);
        let models = Arc::new(models);
        let thread = std::thread::Builder::new().name("models".into()).spawn({
            let models = models.clone();
            move || models.work()
        });
        let thread = thread.map_err(|e| Error::invalid(format!("cannot start a thread: {e}")))?;
        *models.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(models)
    }

    fn new(
        inner: Inner,
        library: Option<Box<dyn Library>>,
        is_single: bool,
        first: Option<usize>,
        patience: Option<Duration>,
        bodies: Bodies,
    ) -> Models {
        Models {
            inner: Mutex::new(inner),
            work: Condvar::new(),
            changed: watch::Sender::new(()),
            patience,
            library,
            is_single,
            first,
            start: Instant::now(),
            thread: Mutex::default(),
            pulls: Arc::new(Semaphore::new(MAX_PULLS)),
            bodies,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Whether all names are those of one model.
    pub fn is_single(&self) -> bool {
        self.is_single
    }

    /// Whether models can leave: they can come again.
    pub fn can_leave(&self) -> bool {
        self.library.is_some()
    }

    /// Downloads, if clients may have some.
    pub fn hub(&self) -> Option<&dyn Downloads> {
        self.library.as_ref().and_then(|library| library.hub())
    }

    /// A place among the downloads that may run at a time.
    pub fn place_to_pull(&self) -> ApiResult<OwnedSemaphorePermit> {
        self.pulls.clone().try_acquire_owned().map_err(|_| {
            let message = format!("{MAX_PULLS} downloads run already");
            let error = ApiError::new(Kind::Overloaded, "server_overloaded", message);
            error.after(Duration::from_secs(30))
        })
    }

    /// The library's entry of a model.
    pub fn model(&self, id: usize) -> Listed {
        self.lock().cards[id].model.clone()
    }

    /// Most models at a time.
    pub fn most(&self) -> usize {
        self.lock().roster.limits().most
    }

    /// Looks again which models there are. Reads folders.
    pub fn refresh(&self) {
        let Some(library) = &self.library else { return };
        self.lock().update(&**library);
        self.work.notify_one();
    }

    /// The number of the model that a request names. Reads folders if it is not known.
    pub fn find(&self, name: Option<&str>) -> ApiResult<usize> {
        if let Some(id) = self.known(name) {
            return Ok(id);
        }
        self.refresh();
        let found = self.known(name);
        found.ok_or_else(|| name.map_or_else(|| self.not_named(), |name| self.unknown(name)))
    }

    /// The number of the model that a request names, as far as folders were read before.
    pub fn known(&self, name: Option<&str>) -> Option<usize> {
        match name {
            _ if self.is_single => Some(0),
            None => self.default(),
            Some(name) => self.lock().find(name),
        }
    }

    /// The model of requests that name none: the one that was given, or the only one.
    fn default(&self) -> Option<usize> {
        let inner = self.lock();
        let mut listed = (0..inner.cards.len()).filter(|id| inner.cards[*id].is_listed);
        self.first.or_else(|| listed.next().filter(|_| listed.next().is_none()))
    }

    /// The names of some models, for errors.
    fn some_names(&self) -> String {
        const MOST: usize = 20;
        let inner = self.lock();
        let names: Vec<&str> = inner.listed().map(|card| card.names[0].as_str()).collect();
        match names.len() {
            0 => "no models".into(),
            n if n > MOST => format!("{} and {} more", names[..MOST].join(", "), n - MOST),
            _ => names.join(", "),
        }
    }

    fn not_named(&self) -> ApiError {
        let there = self.some_names();
        ApiError::invalid("model", format!("model: the field is missing: the server has {there}"))
    }

    /// The error for a model that the server does not have.
    pub fn unknown(&self, name: &str) -> ApiError {
        let there = self.some_names();
        let message = format!("model '{name}' not found: the server has {there}");
        let error = ApiError::new(Kind::NotFound, "model_not_found", message);
        ApiError { param: Some("model".into()), ..error }
    }

    /// The model, to be used. Waits until it is loaded.
    pub async fn take(self: &Arc<Self>, id: usize) -> ApiResult<Arc<Lease>> {
        let mut changed = self.changed.subscribe();
        let end = self.patience.map(|patience| Instant::now() + patience);
        let (waiting, n_failures) = {
            let mut inner = self.lock();
            if let Some(service) = inner.roster.take(id, self.now()) {
                return Ok(Lease::new(self, id, service, inner.cards[id].load, true));
            }
            inner.may_wait(id)?;
            (lease::Waiting::new(self, id), inner.roster.n_failures(id))
        };
        self.work.notify_one();
        loop {
            match end {
                None => changed.changed().await.is_ok(),
                Some(end) => match tokio::time::timeout_at(end.into(), changed.changed()).await {
                    Ok(changed) => changed.is_ok(),
                    Err(_) => return Err(self.late(id)),
                },
            };
            let mut inner = self.lock();
            if inner.is_over {
                return Err(ApiError::shutting_down());
            }
            if let Some(service) = inner.roster.take(id, self.now()) {
                let load = inner.cards[id].load;
                drop(inner);
                drop(waiting);
                return Ok(Lease::new(self, id, service, load, true));
            }
            if inner.roster.n_failures(id) > n_failures {
                let failure = inner.cards[id].failure.clone();
                return Err(failure.unwrap_or_else(ApiError::loading));
            }
        }
    }

    /// The error of a request that has waited for too long.
    fn late(&self, id: usize) -> ApiError {
        let inner = self.lock();
        let Card { names, loading, .. } = &inner.cards[id];
        let name = &names[0];
        let message = match inner.roster.state(id) {
            State::Loading => format!("the model '{name}' is still being loaded: {loading}"),
            _ => format!("there is no memory for the model '{name}' while others are in use"),
        };
        ApiError::new(Kind::Overloaded, "model_timeout", message).after(Duration::from_secs(5))
    }

    /// The model, to be looked at, if it is loaded.
    pub fn look(self: &Arc<Self>, id: usize) -> Option<Arc<Lease>> {
        let mut inner = self.lock();
        let service = inner.roster.look(id)?;
        Some(Lease::new(self, id, service, inner.cards[id].load, false))
    }

    /// The number of the model that a look is for: the one that is named, that requests without a
    /// name have, or that was used last.
    pub fn find_to_look(&self, name: Option<&str>) -> ApiResult<Option<usize>> {
        match name {
            Some(name) => self.known(Some(name)).map(Some).ok_or_else(|| self.unknown(name)),
            None => Ok(self.default().or_else(|| self.lock().roster.newest())),
        }
    }

    /// Keeps an idle model for this time; `None` is for ever.
    pub fn keep(&self, id: usize, keep: Option<Duration>) {
        if self.can_leave() {
            self.lock().roster.keep(id, keep);
            self.work.notify_one();
        }
    }

    /// Lets a model go once it is idle; false if it is not loaded.
    pub fn unload(&self, id: usize) -> bool {
        let is_loaded = self.lock().roster.unload(id);
        self.work.notify_one();
        is_loaded
    }

    /// All models with their states.
    pub fn list(self: &Arc<Self>) -> Vec<Listing> {
        let n = self.lock().cards.len();
        (0..n).filter_map(|id| self.listing(id)).collect()
    }

    /// [`Models::list`] with facts of all files that can be read. Reads their beginnings.
    pub fn list_with_facts(self: &Arc<Self>) -> Vec<Listing> {
        let n = self.lock().cards.len();
        (0..n).filter_map(|id| self.listing_with_facts(id)).collect()
    }

    /// [`Models::listing`] with facts of the file. Reads its beginning, and no other file's.
    pub fn listing_with_facts(self: &Arc<Self>, id: usize) -> Option<Listing> {
        Some(Listing { facts: self.facts(id), ..self.listing(id)? })
    }

    /// The number of the model with exactly this name.
    pub fn named(&self, name: &str) -> Option<usize> {
        let is_it = |card: &Card| card.is_listed && card.names.iter().any(|own| own == name);
        self.lock().cards.iter().position(is_it)
    }

    /// A model with its state; `None` if the library does not have it any more.
    pub fn listing(self: &Arc<Self>, id: usize) -> Option<Listing> {
        let lease = self.look(id);
        let inner = self.lock();
        let card = inner.cards[id].clone();
        if !card.is_listed {
            // A lease must not end while the models are locked.
            drop(inner);
            return None;
        }
        let state = inner.roster.state(id);
        let is_asleep = self.is_single && matches!(state, State::Unloaded);
        let now = self.now();
        let left = inner.roster.expiry(id, now).map(|end| end.saturating_sub(now));
        Some(Listing {
            state: match state {
                State::Loading => "loading",
                State::Loaded(_) => "loaded",
                State::Leaving { .. } | State::Going => "unloading",
                State::Unloaded if is_asleep => "sleeping",
                State::Unloaded => "unloaded",
            },
            loading: matches!(state, State::Loading).then_some(card.loading),
            failure: card.failure.filter(|_| lease.is_none()).map(|failure| failure.message),
            was_loaded: card.load > 0,
            names: card.names,
            model: card.model,
            facts: card.facts,
            expires: left.map(|left| SystemTime::now() + left),
            lease,
        })
    }

    /// Facts of a model's file. Reads its beginning if no one has asked before.
    pub fn facts(&self, id: usize) -> Option<Arc<Facts>> {
        let (known, model) = {
            let inner = self.lock();
            (inner.cards[id].facts.clone(), inner.cards[id].model.clone())
        };
        known.or_else(|| {
            let facts = Arc::new(Facts::new(&Gguf::open(&model.path).ok()?));
            let mut inner = self.lock();
            // Unless the file has changed meanwhile.
            let card = &mut inner.cards[id];
            (card.model == model).then(|| card.facts.get_or_insert(facts).clone())
        })
    }

    /// The loaded model that was used last.
    pub fn newest(self: &Arc<Self>) -> Option<Arc<Lease>> {
        let id = self.lock().roster.newest()?;
        self.look(id)
    }

    /// Waits for no more requests, and lets those that run end until `end`.
    pub fn close(&self, grace: Duration) {
        let services = {
            let mut inner = self.lock();
            inner.is_over = true;
            inner.roster.drain()
        };
        self.work.notify_one();
        self.changed.send_replace(());
        services.iter().for_each(|service| service.scheduler.close());
        let end = Instant::now() + grace;
        let is_idle = || services.iter().all(|service| service.scheduler.is_idle());
        while !is_idle() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        for service in &services {
            service.cancel_all();
            service.scheduler.end();
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            log::error!("the thread that loads models has ended with a panic");
        }
    }

    /// The work of the thread that plans, loads and unloads.
    fn work(&self) {
        let Some(library) = &self.library else { return };
        let mut inner = self.lock();
        while !inner.is_over {
            let now = self.now();
            inner = match inner.roster.next(now) {
                Act::Wait(None) => self.work.wait(inner).unwrap_or_else(PoisonError::into_inner),
                Act::Wait(Some(time)) => {
                    let left = time.saturating_sub(now).max(Duration::from_millis(1));
                    let waited = self.work.wait_timeout(inner, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                act => {
                    drop(inner);
                    self.act(act, &**library);
                    self.changed.send_replace(());
                    self.lock()
                }
            };
        }
    }

    fn act(&self, act: Act<Arc<Service>>, library: &dyn Library) {
        match act {
            Act::Plan(id) => {
                let model = self.lock().cards[id].model.clone();
                match guarded(|| library.need(&model)) {
                    Ok(need) => self.lock().roster.planned(id, Some(need)),
                    Err(why) => self.failed(id, &why),
                }
            }
            Act::Load(id) => self.load(id, library),
            Act::Unload(id, service) => {
                let service = Arc::into_inner(service);
                let service = service.expect("a model that goes has no users");
                log::info!("{}: unloaded", service.info.name());
                drop(service);
                meter::give_back();
                self.lock().roster.gone(id);
            }
            Act::Wait(_) => {}
        }
    }

    fn load(&self, id: usize, library: &dyn Library) {
        let (model, names) = {
            let mut inner = self.lock();
            let card = &mut inner.cards[id];
            card.loading = Loading::default();
            (card.model.clone(), card.names.clone())
        };
        let mut progress = |now| self.lock().cards[id].loading = now;
        let loaded = guarded(|| started(library.load(&model, &mut progress)?, names));
        match loaded {
            Ok(service) => {
                let mut inner = self.lock();
                inner.n_loads += 1;
                let n_loads = inner.n_loads;
                let card = &mut inner.cards[id];
                (card.load, card.failure) = (n_loads, None);
                card.facts = Some(Arc::new(service.info.facts.clone()));
                inner.roster.loaded(id, Arc::new(service), self.now());
            }
            Err(why) => self.failed(id, &why),
        }
    }

    fn failed(&self, id: usize, why: &Error) {
        let mut inner = self.lock();
        let card = &mut inner.cards[id];
        log::warn!("{} cannot be loaded: {why}", card.names[0]);
        let message = format!("the model '{}' cannot be loaded: {why}", card.names[0]);
        card.failure = Some(ApiError::new(Kind::Invalid, "model_not_loaded", message));
        inner.roster.failed(id);
    }
}

/// A panic in a model's file is an error of this model.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Error::invalid("loading it has failed: see the messages")))
}

impl Inner {
    /// The models that the library has.
    fn listed(&self) -> impl Iterator<Item = &Card> {
        self.cards.iter().filter(|card| card.is_listed)
    }

    /// Takes over what the library has now. A loaded model whose file is gone or another one
    /// leaves once it is idle.
    fn update(&mut self, library: &dyn Library) {
        let now = library.list();
        for id in 0..self.cards.len() {
            let card = &mut self.cards[id];
            let found = now.iter().find(|model| model.name == card.model.name);
            card.is_listed = found.is_some();
            if found == Some(&card.model) {
                continue;
            }
            if let Some(found) = found {
                (card.model, card.facts, card.failure) = (found.clone(), None, None);
                self.roster.planned(id, None);
            }
            self.roster.unload(id);
        }
        for model in now {
            if self.cards.iter().any(|card| card.model.name == model.name) {
                continue;
            }
            let names = library.names(&model);
            let names = if names.is_empty() { vec![model.name.clone()] } else { names };
            let id = self.roster.add();
            assert_eq!(id, self.cards.len(), "a card for each model");
            let (is_listed, facts, failure) = (true, None, None);
            let loading = Loading::default();
            let card = Card { model, names, is_listed, facts, failure, loading, load: 0 };
            self.cards.push(card);
        }
    }

    /// The model of this name. A name may be marked as a hub's, end with `:latest`, or leave out
    /// the type of the weights.
    fn find(&self, name: &str) -> Option<usize> {
        let marks = ["hf:", "hf.co/", "huggingface.co/"];
        let bare = marks.iter().find_map(|mark| name.strip_prefix(mark)).unwrap_or(name);
        let short = bare.strip_suffix(":latest").unwrap_or(bare);
        let by = |is_it: &dyn Fn(&str) -> bool| {
            let all = self.cards.iter();
            all.enumerate().find(|(_, c)| c.is_listed && c.names.iter().any(|n| is_it(n)))
        };
        let of_type = |ty: &'static str| {
            move |own: &str| {
                own.strip_prefix(short).is_some_and(|rest| rest.eq_ignore_ascii_case(ty))
            }
        };
        let found = [name, bare, short].iter().find_map(|name| by(&|own| own == *name));
        let found = found.or_else(|| by(&|own| own.eq_ignore_ascii_case(short)));
        let found = found.or_else(|| by(&of_type(":Q4_K_M"))).or_else(|| by(&of_type(":Q8_0")));
        let any = |own: &str| own.strip_prefix(short).is_some_and(|rest| rest.starts_with(':'));
        found.or_else(|| by(&any)).map(|(id, _)| id)
    }

    /// Whether one more request may wait for a model.
    fn may_wait(&mut self, id: usize) -> ApiResult<()> {
        if self.is_over {
            return Err(ApiError::shutting_down());
        }
        if self.roster.begin_wait(id) {
            return Ok(());
        }
        let n = self.roster.limits().n_waiting;
        let message =
            format!("{n} requests wait for the model '{}' already", self.cards[id].names[0]);
        let error = ApiError::new(Kind::Overloaded, "server_overloaded", message);
        Err(error.after(Duration::from_secs(5)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Names(&'static [&'static str]);

    impl Library for Names {
        fn list(&self) -> Vec<Listed> {
            self.0.iter().map(|name| Listed::new((*name).into(), PathBuf::from(name))).collect()
        }

        fn need(&self, _: &Listed) -> Result<Need> {
            Ok(Need::default())
        }

        fn load(&self, _: &Listed, _: &mut dyn FnMut(Loading)) -> Result<Loaded> {
            Err(Error::invalid("there is no file"))
        }

        fn names(&self, _: &Listed) -> Vec<String> {
            Vec::new()
        }
    }

    #[test]
    fn names_are_found_as_clients_spell_them() {
        let roster = Roster::new(Limits::one());
        let mut inner = Inner { roster, cards: Vec::new(), n_loads: 0, is_over: false };
        let names = Names(&["u/m:Q8_0", "u/m:q4_k_m", "u/n:BF16", "plain", "Plain:latest", "u/mm"]);
        inner.update(&names);
        for (name, expected) in [
            ("u/m:Q8_0", Some(0)),
            ("hf:u/m:q8_0", Some(0)),
            ("u/m", Some(1)),
            ("hf.co/u/m:latest", Some(1)),
            ("u/n", Some(2)),
            ("plain", Some(3)),
            ("PLAIN", Some(3)),
            ("Plain:latest", Some(4)),
            ("plain:latest", Some(3)),
            ("u/m:Q2_K", None),
            ("u", None),
            ("", None),
        ] {
            assert_eq!(inner.find(name), expected, "{name}");
        }
        // One that is gone is not found, and has its number again when it comes back.
        inner.update(&Names(&["plain"]));
        assert_eq!((inner.find("u/m"), inner.find("plain")), (None, Some(3)));
        inner.update(&names);
        assert_eq!(inner.find("u/m"), Some(1));
    }

    #[test]
    fn facts_of_a_model_are_of_no_other_file() {
        const NAMES: [&str; 2] = ["models/demo/moeba-demo.gguf", "./models/demo/moeba-demo.gguf"];
        let shelf = Shelf {
            library: Box::new(Names(&NAMES)),
            limits: Limits::one(),
            first: None,
            is_single: false,
            body_bytes: 0,
            patience: None,
        };
        let models = Models::of_shelf(shelf).unwrap();
        let id = models.named(NAMES[1]).unwrap();
        assert!(models.listing_with_facts(id).unwrap().facts.is_some());
        let has_read: Vec<bool> = models.lock().cards.iter().map(|c| c.facts.is_some()).collect();
        assert_eq!(has_read, [false, true]);
        assert_eq!(models.named("moeba-demo"), None);
        models.close(Duration::ZERO);
    }
}
