//! The model as the routes use it: requests become jobs, and jobs' events an answer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::timeout_at;

use super::adapters::{self, AdapterScales};
use super::auth::{Client, Running};
use super::digest::{number_of, sha256};
use super::errors::{ApiError, ApiResult, Kind};
use super::events::{Event, Receiver, Sender, channel};
use super::model::ModelInfo;
use super::models::Lease;
use super::prompt::{Encoded, Room, Templates};
use super::replay;
use super::request::{Chat, Prompt, Request, Scheduling};
use super::sink::{Sink, SinkSettings};
use crate::Result;
use crate::cancel::Cancel;
use crate::chat::reasoning::{AnswerStart, Budget};
use crate::chat::tools::{Calls, Mode, Scanner};
use crate::engine::kv_disk::KvFolder;
use crate::engine::scheduler::{
    AnySink, Histogram, Job, JobStatus, Refused, SECONDS, Scheduler, SchedulerOptions, Status,
};
use crate::engine::{self, Engine, Generation, Limits, Pooling, SpecMode, Speculation};
use crate::sample::grammar::Constraint;
use crate::sample::{LogitBias, SamplerOptions};
use crate::tokenizer::EncodeOptions;

/// Jobs that have ended and may still be in a snapshot.
const MAX_ENDED: usize = 256;

/// A loaded model, its scheduler and its chat template.
pub struct Service {
    pub scheduler: Scheduler,
    pub templates: Templates,
    pub info: ModelInfo,
    pub defaults: Defaults,
    pub adapters: AdapterScales,
    /// Jobs that are not done.
    open: Mutex<Vec<OpenJob>>,
    /// The jobs that ended last: a snapshot may be older than their answers.
    ended: Mutex<VecDeque<u64>>,
    /// Times in which grammars were compiled.
    pub(super) compile_times: Mutex<Histogram>,
}

/// Settings that hold where a request has none.
#[derive(Clone, Debug, Default)]
pub struct Defaults {
    pub sampling: SamplerOptions,
    /// Tokens at most.
    pub n_predict: Option<usize>,
    /// Texts go on when the context is full.
    pub context_shift: bool,
    pub reasoning_budget: Option<usize>,
    /// Reasoning stays in the content.
    pub keeps_reasoning_in_content: bool,
    /// Times after which a request that waits in the queue, and any request, is given up.
    pub queue_time: Option<Duration>,
    pub total_time: Option<Duration>,
    /// When drafts are verified.
    pub spec: SpecMode,
    /// How embeddings are pooled, if not as the file says.
    pub pooling: Option<Pooling>,
}

struct OpenJob {
    id: u64,
    cancel: Cancel,
}

/// A request whose prompt is tokens: only the queue can refuse it.
pub struct Prepared {
    request: Request,
    prompt: Vec<u32>,
    /// The rendered chat.
    text: String,
    generations: Vec<Generation>,
    adapters: Arc<[f32]>,
    seed: u64,
    hash: [u8; 32],
}

impl Prepared {
    /// Tokens of the prompt.
    pub fn n_prompt(&self) -> usize {
        self.prompt.len()
    }

    /// The text of the prompt's tokens.
    pub fn prompt_text(&self, service: &Service) -> String {
        service.engine().tokenizer().decode_lossy(&self.prompt, false).unwrap_or_default()
    }
}

/// An answer that comes. Dropping it cancels its jobs.
pub struct PendingAnswer {
    /// Keeps the model.
    model: Arc<Lease>,
    receiver: Receiver,
    cancel: Cancel,
    ids: Vec<u64>,
    n_open: usize,
    start: Instant,
    has_started: bool,
    /// Tokens of the first prompt.
    pub n_prompt: usize,
    /// Names what the answer's bytes follow from, beside the model.
    pub hash: String,
    /// Keeps the key's count of running requests.
    _running: Arc<Running>,
}

impl Service {
    /// Takes the sessions' memory and starts the thread that computes. `kv_folder` keeps texts.
    pub fn start(
        engine: &Arc<Engine>,
        options: SchedulerOptions,
        templates: Templates,
        info: ModelInfo,
        defaults: Defaults,
        kv_folder: Option<KvFolder>,
    ) -> Result<Service> {
        let scheduler = Scheduler::on_disk(engine, options, kv_folder)?;
        let compile_times = Mutex::new(Histogram::new(&SECONDS));
        let adapters = AdapterScales::of(engine);
        Ok(Service {
            scheduler,
            templates,
            info,
            defaults,
            adapters,
            open: Mutex::default(),
            ended: Mutex::default(),
            compile_times,
        })
    }

    pub fn engine(&self) -> &Arc<Engine> {
        self.scheduler.engine()
    }

    /// The newest snapshot, without jobs whose answers clients have.
    pub fn status(&self) -> Arc<Status> {
        let status = self.scheduler.status();
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let has_ended = |job: &JobStatus| ended.contains(&job.id);
        if !status.slots.iter().any(|slot| slot.job.as_ref().is_some_and(has_ended)) {
            return status;
        }
        let mut status = (*status).clone();
        for slot in &mut status.slots {
            slot.job.take_if(|job| has_ended(job));
        }
        Arc::new(status)
    }

    /// Notes that a job's answer is complete.
    fn note_end(&self, id: u64) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.push_back(id);
        if ended.len() > MAX_ENDED {
            ended.pop_front();
        }
    }

    /// Ends all jobs at once.
    pub fn cancel_all(&self) {
        self.open().iter().for_each(|job| job.cancel.cancel());
        self.scheduler.wake();
    }

    fn open(&self) -> std::sync::MutexGuard<'_, Vec<OpenJob>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Renders, tokenizes and checks. Takes a while: not for a thread that serves sockets.
    pub fn prepare(&self, mut request: Request) -> ApiResult<Prepared> {
        let engine = self.engine();
        engine.check_continues().map_err(|_| continues_none(engine.only_embeds()))?;
        let n_ctx = engine.n_ctx();
        let Encoded { tokens, text } = self.encode(&request.prompt, "prompt", n_ctx)?;
        if tokens.len() >= n_ctx {
            return Err(ApiError::context_overflow(tokens.len(), n_ctx));
        }
        if tokens.is_empty() {
            let message = "the prompt is empty: there is nothing to continue";
            return Err(ApiError::invalid("prompt", message));
        }
        let format = self.templates.reasoning();
        let is_chat = matches!(request.prompt, Prompt::Chat(_));
        let mut shown = match format {
            Some(format) if is_chat => format.tokens(engine.tokenizer()),
            _ => Vec::new(),
        };
        let may_call = matches!(&request.prompt, Prompt::Chat(chat) if chat.may_call());
        let mut constraint = match &request.form {
            Some(form) if !may_call => Some(self.of_answer(self.form(form)?, &request, &text)),
            _ => None,
        };
        if let Prompt::Chat(chat) = &request.prompt
            && !chat.tools.is_empty()
        {
            let format = self.templates.tools.format;
            if chat.may_call() {
                shown.extend(format.tokens(engine.tokenizer()));
                constraint = self.calls(chat, &request, &text)?;
            } else {
                let ids = format.opening_tokens(engine.tokenizer()).into_iter();
                let bans = ids.map(|id| LogitBias { id, bias: f32::NEG_INFINITY });
                request.sampling.logit_bias.extend(bans);
            }
        }
        let (n_logprobs, after_sampling) = (request.n_logprobs, request.after_sampling);
        let seed = request.sampling.seed.unwrap_or_else(super::random::seed);
        let speculation = self.speculation(&request);
        let generations = (0..request.n_choices as u64).map(|i| {
            request.sampling.seed = Some(seed.wrapping_add(i));
            let request = engine::Request {
                prompt: tokens.clone(),
                sampling: request.sampling.clone(),
                limits: request.limits.clone(),
                own_text: is_chat,
                shown: shown.clone(),
                speculation: speculation.clone(),
                ..engine::Request::default()
            };
            let mut generation =
                Generation::new(engine, &request).map_err(|e| ApiError::of_request(&e))?;
            if let Some(constraint) = &constraint {
                generation.constrain(constraint.clone());
            }
            match n_logprobs {
                Some(n_top) if after_sampling => generation.report_sampled(n_top),
                Some(n_top) => generation.report_logprobs(n_top),
                None => {}
            }
            Ok(generation)
        });
        let generations = generations.collect::<ApiResult<Vec<_>>>()?;
        request.sampling.seed = Some(seed);
        let adapters = self.adapters.asked(request.scheduling.lora.as_deref())?;
        let hash = replay::hash(&request, &tokens, &adapters);
        Ok(Prepared { request, prompt: tokens, text, generations, adapters, seed, hash })
    }

    /// A text to embed, whose tokens are in range and fit the context.
    pub fn prepare_embedding(
        &self,
        tokens: &[u32],
        pooling: Pooling,
        scheduling: &Scheduling,
    ) -> ApiResult<Prepared> {
        let request = engine::Request {
            prompt: tokens.to_vec(),
            pooling: Some(pooling),
            ..engine::Request::default()
        };
        let generation = Generation::new(self.engine(), &request);
        let adapters = self.adapters.asked(scheduling.lora.as_deref())?;
        let request = Request {
            prompt: Prompt::Tokens(Vec::new()),
            sampling: SamplerOptions::default(),
            limits: Limits::default(),
            n_choices: 1,
            form: None,
            n_logprobs: None,
            after_sampling: false,
            salt: String::new(),
            scheduling: scheduling.clone(),
            prediction: None,
            wants_progress: false,
            wants_tokens: false,
            time_limit: None,
        };
        let hash = replay::hash(&request, tokens, &adapters);
        Ok(Prepared {
            request,
            prompt: tokens.to_vec(),
            text: String::new(),
            generations: vec![generation.map_err(|e| ApiError::of_request(&e))?],
            adapters,
            seed: 0,
            hash,
        })
    }

    fn speculation(&self, request: &Request) -> Speculation {
        let mode = request.scheduling.spec.unwrap_or(self.defaults.spec);
        let text = request.prediction.as_deref().filter(|_| mode != SpecMode::Off);
        let encode = |text| self.engine().tokenizer().encode(text, EncodeOptions::TEXT);
        Speculation { mode, prediction: text.map(encode).unwrap_or_default() }
    }

    /// Times in which grammars were compiled, or found among the latest.
    pub fn compile_times(&self) -> Histogram {
        *self.compile_times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A form that begins where the answer does, behind the reasoning.
    fn of_answer(&self, constraint: Constraint, request: &Request, text: &str) -> Constraint {
        let is_chat = matches!(request.prompt, Prompt::Chat(_));
        let format = self.templates.reasoning().filter(|_| is_chat);
        let Some(AnswerStart { marker, open }) = format.and_then(|f| f.answer_start(text)) else {
            return constraint;
        };
        let marker = marker.as_bytes().to_vec();
        let options = EncodeOptions { add_special: false, parse_special: true };
        match open {
            Some(open) => {
                let open = self.engine().tokenizer().encode(open, options);
                constraint.or_after(open, marker)
            }
            None => constraint.after([marker]),
        }
    }

    /// The form of the calls in an answer: from its beginning if one is required or if all else
    /// has a form, too, otherwise from the marker of a call.
    fn calls(&self, chat: &Chat, request: &Request, text: &str) -> ApiResult<Option<Constraint>> {
        let form = request.form.as_ref().filter(|_| chat.tool_choice.mode == Mode::Auto);
        let Some((grammar, constraint)) = self.grammar_of_calls(chat, form)? else {
            return Ok(None);
        };
        Ok(Some(match grammar.trigger {
            Some(trigger) => constraint.after([trigger.into_bytes()]).resuming(),
            // The grammar begins with the reasoning.
            None if grammar.has_reasoning => constraint,
            None => self.of_answer(constraint, request, text),
        }))
    }

    /// The tokens of the prompt that is the field `path`, and the text of a rendered chat. Refuses
    /// one that cannot fit into `n_ctx` tokens, as far as its text says so.
    pub fn encode(&self, prompt: &Prompt, path: &str, n_ctx: usize) -> ApiResult<Encoded> {
        let engine = self.engine();
        let room = Room { n_ctx, longest_piece: self.info.longest_piece };
        match prompt {
            Prompt::Chat(chat) => self.templates.encode(engine.tokenizer(), chat, room),
            Prompt::Text(text) => super::prompt::plain(engine.tokenizer(), text, room),
            Prompt::Tokens(tokens) => {
                let n_vocab = engine.tokenizer().n_vocab();
                if let Some(id) = tokens.iter().find(|id| **id as usize >= n_vocab) {
                    let message = format!(
                        "{path}: token id {id} is out of range: the model has {n_vocab} tokens"
                    );
                    return Err(ApiError::invalid(path, message));
                }
                Ok(Encoded { tokens: tokens.clone(), text: String::new() })
            }
        }
    }

    /// Tokens of a prompt, also of one that does not fit.
    pub fn count(&self, prompt: &Prompt) -> ApiResult<usize> {
        Ok(self.encode(prompt, "prompt", usize::MAX)?.tokens.len())
    }

    /// The jobs of a request, one for each choice.
    fn jobs(
        &self,
        prepared: Prepared,
        priority: i32,
        senders: &mut impl Iterator<Item = Sender>,
        client: &Client,
    ) -> Vec<Job<AnySink>> {
        let Prepared { request, prompt, text, generations, adapters: scales, seed, .. } = prepared;
        let scheduling = &request.scheduling;
        let salt = adapters::salted(&request.salt, self.engine(), &scales);
        let all = generations.into_iter().zip(senders).enumerate();
        let job = |(i, (generation, sender))| {
            let cancel = Cancel::new();
            let settings = SinkSettings {
                n_prompt: prompt.len(),
                seed,
                wants_progress: request.wants_progress,
                wants_tokens: request.wants_tokens,
                time_limit: request.time_limit,
                cancel: cancel.clone(),
                stops: request.limits.stops.clone(),
            };
            let seed = seed.wrapping_add(i as u64);
            let (scanner, budget) = self.scanner(&request, &text, seed);
            Job {
                id: self.scheduler.next_id(),
                prompt: prompt.clone(),
                source: None,
                generation,
                sink: AnySink::new(Sink::new(sender, scanner, budget, settings)),
                cancel,
                owner: client.owner,
                salt: scheduling.is_cached.then(|| client.salt(&salt)),
                priority,
                slot: scheduling.slot,
                adapters: Some(scales.clone()),
            }
        };
        all.map(job).collect()
    }

    /// The reader of an answer's text, and the end that its reasoning has.
    fn scanner(&self, request: &Request, text: &str, seed: u64) -> (Scanner, Option<Budget>) {
        let Prompt::Chat(chat) = &request.prompt else {
            return (Scanner::new(None, None, ""), None);
        };
        let is_required = matches!(chat.tool_choice.mode, Mode::Required);
        let calls = chat.may_call().then(|| Calls {
            format: self.templates.tools.format,
            tools: chat.tools.clone(),
            // With the prompt in it, the calls of two turns have different ids.
            seed: seed.wrapping_add(number_of(&sha256(text.as_bytes()))),
            is_required,
        });
        let is_apart = !chat.keeps_reasoning_in_content;
        let Some(format) = self.templates.reasoning().filter(|_| is_apart) else {
            return (Scanner::new(None, calls, text), None);
        };
        let budget = chat.reasoning_budget.or(self.defaults.reasoning_budget);
        let tokenizer = self.engine().tokenizer();
        // A grammar of calls has the reasoning and the headers in it.
        let end = || match chat.may_call() && (is_required || request.form.is_some()) {
            true => format.end_tokens_before_grammar(tokenizer),
            false => format.end_tokens(tokenizer, ""),
        };
        (Scanner::new(Some(format), calls, text), budget.map(|n| Budget::new(n, end())))
    }
}

impl Lease {
    /// Puts requests into the queue, all or none. Their choices follow each other.
    pub fn submit(
        self: &Arc<Self>,
        all: Vec<Prepared>,
        client: &Client,
    ) -> ApiResult<PendingAnswer> {
        self.submit_as(all, client, &Arc::new(client.enter()?))
    }

    /// Puts a part of a request into the queue that counts as running already.
    pub fn submit_as(
        self: &Arc<Self>,
        all: Vec<Prepared>,
        client: &Client,
        running: &Arc<Running>,
    ) -> ApiResult<PendingAnswer> {
        let n_open = all.iter().map(|prepared| prepared.generations.len()).sum();
        let options = self.scheduler.options();
        let most = options.n_queue + options.n_parallel;
        if n_open > most {
            let message = format!("n: a request has at most {most} choices here, got {n_open}");
            return Err(ApiError::invalid("n", message));
        }
        let priorities = all.iter().map(|one| client.priority(one.request.scheduling.priority));
        let priorities = priorities.collect::<ApiResult<Vec<i32>>>()?;
        let n_prompt = all.first().map_or(0, |prepared| prepared.prompt.len());
        let hash = replay::name(all.iter().map(|prepared| &prepared.hash));
        let (senders, receiver) = channel(n_open);
        let mut senders = senders.into_iter();
        let all = all.into_iter().zip(priorities);
        let jobs = all.flat_map(|(one, priority)| self.jobs(one, priority, &mut senders, client));
        let jobs: Vec<_> = jobs.collect();
        let open = jobs.iter().map(|job| OpenJob { id: job.id, cancel: job.cancel.clone() });
        let open: Vec<OpenJob> = open.collect();
        let ids = open.iter().map(|job| job.id).collect();
        let cancel = Cancel::all(open.iter().map(|job| job.cancel.clone()));
        self.open().extend(open);
        let answer = PendingAnswer {
            model: self.clone(),
            receiver,
            cancel,
            ids,
            n_open,
            start: Instant::now(),
            has_started: false,
            n_prompt,
            hash,
            _running: running.clone(),
        };
        match self.scheduler.submit(jobs) {
            Ok(()) => Ok(answer),
            Err(Refused::Closed) => Err(ApiError::shutting_down()),
            Err(Refused::QueueFull { n_queued, wait }) => Err(queue_full(n_queued, wait)),
        }
    }
}

fn continues_none(embeds: bool) -> ApiError {
    let message = match embeds {
        true => "the model is an embedding model: ask POST /v1/embeddings",
        false => "the model fills in masked tokens of a whole text (diffusion): it continues none",
    };
    ApiError::invalid("model", message)
}

fn queue_full(n_queued: usize, wait: Duration) -> ApiError {
    let seconds = wait.as_secs_f64().ceil() as u64;
    let message = format!(
        "The server is overloaded: {n_queued} requests wait. Please try again in {seconds} s."
    );
    let error = ApiError::new(Kind::Overloaded, "server_overloaded", message);
    let details = vec![("n_queued", n_queued.into()), ("retry_after", seconds.into())];
    ApiError { details, ..error.after(wait) }
}

impl PendingAnswer {
    /// The next event with its choice; `None` once every choice has ended.
    pub async fn next(&mut self) -> Option<(usize, Event)> {
        if self.n_open == 0 {
            return None;
        }
        let (choice, event, was_full) = match self.deadline() {
            None => self.receiver.next().await,
            Some(deadline) => match timeout_at(deadline.into(), self.receiver.next()).await {
                Ok(next) => next,
                Err(_) => {
                    self.n_open = 0;
                    self.cancel();
                    return Some((0, Event::Failed(self.late())));
                }
            },
        };
        if was_full {
            self.model.scheduler.wake();
        }
        match &event {
            Event::Started { .. } => self.has_started = true,
            Event::Finished(_) => {
                self.n_open -= 1;
                if let Some(id) = self.ids.get(choice) {
                    self.model.note_end(*id);
                }
            }
            // The other choices are of no use without it.
            Event::Failed(_) => {
                self.n_open = 0;
                self.cancel();
            }
            _ => {}
        }
        Some((choice, event))
    }

    fn deadline(&self) -> Option<Instant> {
        let defaults = &self.model.defaults;
        let queue = defaults.queue_time.filter(|_| !self.has_started);
        let time = queue.into_iter().chain(defaults.total_time).min()?;
        Some(self.start + time)
    }

    fn late(&self) -> ApiError {
        let seconds = self.start.elapsed().as_secs();
        let (code, message) = match self.has_started {
            false => ("queue_timeout", format!("the request waited {seconds} s for its turn")),
            true => ("timeout", format!("the request took more than {seconds} s: see --timeout")),
        };
        let error = ApiError::new(Kind::Overloaded, code, message);
        error.after(self.model.scheduler.time_to_wait())
    }

    fn cancel(&self) {
        self.cancel.cancel();
        self.model.scheduler.wake();
    }

    /// The name of the model that answers.
    pub fn model_name(&self) -> &str {
        self.model.info.name()
    }

    /// The time since the request was taken.
    pub fn age(&self) -> Duration {
        self.start.elapsed()
    }
}

impl Drop for PendingAnswer {
    fn drop(&mut self) {
        if self.n_open > 0 {
            self.cancel();
        }
        self.model.open().retain(|job| !self.ids.contains(&job.id));
    }
}
