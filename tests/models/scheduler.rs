//! Many texts at a time: each has the text that it has alone.

use common::{load, repo};
use moeba::engine::scheduler::{
    AnySink, Core, Job, JobSink, Owner, Refused, Scheduler, SchedulerOptions, Status,
};
use moeba::engine::{
    Cancel, Engine, EngineOptions, FinishReason, Generation, Generator, Limits, Outcome, Request,
    TestHooks, TextSink,
};
use moeba::experts::disk::Faults;
use moeba::experts::disk::link::Read;
use moeba::sample::SamplerOptions;
use moeba::tokenizer::EncodeOptions;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn demo(options: EngineOptions) -> Arc<Engine> {
    let path = repo().join("models/demo/moeba-demo.gguf");
    load(&path, &EngineOptions { n_threads: Some(2), n_ctx: Some(512), ..options })
}

/// Layers of prompts rest behind every expert and query.
fn in_parts() -> TestHooks {
    TestHooks { part_work: Some(1), ..TestHooks::default() }
}

/// Requests whose prompts share beginnings, greedy and sampled.
fn requests(engine: &Engine, n: usize) -> Vec<Request> {
    let prompts = [
        "What is a branch?",
        "What is a branch in a tree of versions, and what is it for?",
        "A queue is",
        "What is",
        "Explain how a program reads a file. First, it opens the file and",
    ];
    let request = |i: usize| {
        let prompt = engine.tokenizer().encode(prompts[i % prompts.len()], EncodeOptions::PROMPT);
        let temp = if i.is_multiple_of(3) { 0.0 } else { 0.9 };
        let seed = Some(i as u64 / 2);
        Request {
            prompt: prompt.repeat(1 + i % 4),
            sampling: SamplerOptions { seed, temp, ..SamplerOptions::default() },
            limits: Limits { n_predict: Some(3 + (7 * i) % 20), ..Limits::default() },
            cancel: Cancel::new(),
            ..Request::default()
        }
    };
    (0..n).map(request).collect()
}

/// Texts and ends by request alone, each in an empty session.
fn alone(engine: &Arc<Engine>, requests: &[Request]) -> Vec<(String, FinishReason)> {
    let mut generator = Generator::new(engine).unwrap();
    let one = |request: &Request| {
        generator.clear();
        let mut text = String::new();
        let outcome = generator.generate(request, &mut |more: &str| {
            text.push_str(more);
            Ok(())
        });
        (text, outcome.unwrap().finish)
    };
    requests.iter().map(one).collect()
}

/// Collects a job's text and sends it when the job ends.
struct Collect {
    index: usize,
    text: String,
    /// Says now and then that its reader is behind.
    is_slow: bool,
    n_asked: AtomicUsize,
    done: Sender<(usize, String, moeba::Result<Outcome>)>,
}

impl TextSink for Collect {
    fn text(&mut self, text: &str) -> moeba::Result<()> {
        self.text.push_str(text);
        Ok(())
    }
}

impl JobSink for Collect {
    fn is_full(&self) -> bool {
        self.is_slow && self.n_asked.fetch_add(1, Ordering::Relaxed) / 4 % 2 == 1
    }

    fn finished(&mut self, result: moeba::Result<Outcome>) {
        let text = std::mem::take(&mut self.text);
        self.done.send((self.index, text, result)).expect("the test listens");
    }
}

type Done = (usize, String, moeba::Result<Outcome>);

fn job(engine: &Arc<Engine>, index: usize, request: &Request, done: &Sender<Done>) -> Job<AnySink> {
    let sink = Collect {
        index,
        text: String::new(),
        is_slow: index % 4 == 3,
        n_asked: AtomicUsize::new(0),
        done: done.clone(),
    };
    Job {
        id: index as u64,
        prompt: request.prompt.clone(),
        source: None,
        generation: Generation::new(engine, request).unwrap(),
        sink: AnySink::new(sink),
        cancel: request.cancel.clone(),
        owner: Owner { id: index as u64 % 3, weight: 1 + index as u32 % 2 },
        salt: Some(index as u64 % 2),
        priority: 0,
        slot: None,
        adapters: None,
    }
}

fn next(done: &Receiver<Done>) -> Done {
    done.recv_timeout(Duration::from_secs(120)).expect("a job ends")
}

/// Waits until nothing is pinned and prefetches have ended.
fn at_rest(engine: &Engine) {
    let end = Instant::now() + Duration::from_secs(60);
    while !engine.model().hierarchy().check_integrity() {
        assert!(Instant::now() < end, "something is pinned or on its way");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// All requests through a scheduler, handed over in an order that `stride` gives.
fn scheduled(
    engine: &Arc<Engine>,
    requests: &[Request],
    n_parallel: usize,
    stride: usize,
) -> Vec<(String, FinishReason)> {
    let (n_queue, page_bytes) = (requests.len(), stride * 100_000);
    let options = SchedulerOptions { n_parallel, n_queue, page_bytes, prompt_share: 0.5 };
    let scheduler = Scheduler::start(engine, options).unwrap();
    let (sender, receiver) = channel();
    for i in 0..requests.len() {
        let index = (i * stride) % requests.len();
        scheduler.submit(vec![job(engine, index, &requests[index], &sender)]).unwrap();
    }
    let mut texts = vec![(String::new(), FinishReason::Cancelled); requests.len()];
    for _ in 0..requests.len() {
        let (index, text, outcome) = next(&receiver);
        texts[index] = (text, outcome.unwrap().finish);
    }
    at_rest(engine);
    texts
}

#[test]
fn every_text_is_the_one_that_it_is_alone() {
    let engine = demo(EngineOptions::default());
    let requests = requests(&engine, 24);
    let expected = alone(&engine, &requests);
    assert!(expected.iter().any(|(text, _)| text.len() > 20));
    for (n_parallel, stride) in [(1, 1), (2, 5), (8, 7)] {
        let got = scheduled(&engine, &requests, n_parallel, stride);
        assert!(got == expected, "{n_parallel} at a time");
    }
    let engine = demo(EngineOptions { test: in_parts(), ..EngineOptions::default() });
    assert!(scheduled(&engine, &requests, 8, 13) == expected, "layers in many parts");
    // A few experts in memory, and one thread; prompts in small passes.
    for (ram, policy) in [("10%", "finemoe"), ("50%", "eviction=lfu")] {
        let engine = demo(EngineOptions {
            ram: ram.parse().unwrap(),
            policy: policy.parse().unwrap(),
            n_threads: Some(1),
            n_ubatch: Some(8),
            test: in_parts(),
            ..EngineOptions::default()
        });
        assert!(scheduled(&engine, &requests, 4, 11) == expected, "{ram}, {policy}");
    }
}

/// Notes in which order things happen.
struct Note {
    name: &'static str,
    notes: Arc<Mutex<Vec<&'static str>>>,
    /// Cancelled after so many notes.
    cancel: Option<(usize, Cancel)>,
}

impl Note {
    fn note(&self) {
        let mut notes = self.notes.lock().unwrap();
        notes.push(self.name);
        if let Some((n, cancel)) = &self.cancel
            && notes.iter().filter(|name| **name == self.name).count() == *n
        {
            cancel.cancel();
        }
    }
}

impl TextSink for Note {
    fn text(&mut self, _text: &str) -> moeba::Result<()> {
        self.note();
        Ok(())
    }

    fn prompt_progress(&mut self, done: usize, total: usize) {
        if self.name == "layer" && done < total {
            self.note();
        }
    }
}

impl JobSink for Note {
    fn finished(&mut self, result: moeba::Result<Outcome>) {
        let mut notes = self.notes.lock().unwrap();
        notes.push(match result {
            Ok(Outcome { finish: FinishReason::Cancelled, .. }) => "cancelled",
            Ok(_) => "end",
            Err(_) => "error",
        });
    }
}

fn noted(
    engine: &Arc<Engine>,
    prompt: Vec<u32>,
    n_predict: usize,
    sink: impl FnOnce(&Cancel) -> Note,
) -> Job<Note> {
    let cancel = Cancel::new();
    let limits = Limits { n_predict: Some(n_predict), ignore_eos: true, ..Limits::default() };
    let sampling = SamplerOptions { seed: Some(1), ..SamplerOptions::default() };
    let request = Request { prompt, limits, sampling, ..Request::default() };
    Job {
        id: 0,
        generation: Generation::new(engine, &request).unwrap(),
        prompt: request.prompt,
        source: None,
        sink: sink(&cancel),
        cancel,
        owner: Owner::default(),
        salt: Some(0),
        priority: 0,
        slot: None,
        adapters: None,
    }
}

/// How often a step is due depends on times, so several prompts have their turn.
#[test]
fn a_text_goes_on_between_the_layers_of_a_prompt() {
    let engine = demo(EngineOptions::default());
    let sessions = (0..2).map(|_| engine.new_session().unwrap()).collect();
    let mut core = Core::new(&engine, sessions, 0.5, 0);
    let notes = Arc::new(Mutex::new(Vec::new()));
    let note = |name| Note { name, notes: notes.clone(), cancel: None };
    core.submit(noted(&engine, vec![5, 6, 7], 400, |_| note("token")));
    while !notes.lock().unwrap().contains(&"token") {
        assert!(core.step());
    }
    let goes_on = (0..10).any(|turn| {
        notes.lock().unwrap().clear();
        let long: Vec<u32> = (0..400).map(|i| (i + turn) % 200 + 10).collect();
        core.submit(noted(&engine, long, 1, |_| note("layer")));
        while !notes.lock().unwrap().contains(&"end") {
            assert!(core.step());
        }
        let notes = notes.lock().unwrap();
        let is_layer = |note: &&str| *note == "layer";
        let first = notes.iter().position(is_layer);
        let last = notes.iter().rposition(is_layer);
        first.zip(last).is_some_and(|(first, last)| notes[first..last].contains(&"token"))
    });
    assert!(goes_on, "{:?}", notes.lock().unwrap());
}

#[test]
fn a_cancelled_prompt_ends_and_keeps_its_finished_part() {
    let engine = demo(EngineOptions { n_ubatch: Some(16), ..EngineOptions::default() });
    let mut core = Core::new(&engine, vec![engine.new_session().unwrap()], 0.5, 0);
    let notes = Arc::new(Mutex::new(Vec::new()));
    let long: Vec<u32> = (0..200).map(|i| i % 150 + 10).collect();
    let n = 3 * engine.n_layers() + 2;
    let note = |cancel| Note { name: "layer", notes: notes.clone(), cancel };
    core.submit(noted(&engine, long.clone(), 1, |cancel| note(Some((n, cancel.clone())))));
    while core.step() {}
    assert_eq!(notes.lock().unwrap().last(), Some(&"cancelled"));
    assert_eq!(core.board().read().slots[0].n_past, 48);
    core.submit(noted(&engine, long, 1, |_| note(None)));
    while core.step() {}
    assert_eq!(core.board().read().counts.n_reused, 48);
    assert_eq!(notes.lock().unwrap().last(), Some(&"end"));
}

#[test]
fn a_full_queue_refuses_and_a_cancelled_job_leaves_it() {
    let engine = demo(EngineOptions::default());
    let options = SchedulerOptions { n_parallel: 1, n_queue: 2, prompt_share: 0.5, page_bytes: 0 };
    let scheduler = Scheduler::start(&engine, options).unwrap();
    let (sender, receiver) = channel();
    let limits = Limits { ignore_eos: true, n_predict: None, ..Limits::default() };
    let mut requests = requests(&engine, 5);
    requests.iter_mut().for_each(|request| request.limits = limits.clone());
    let submit = |i: usize| scheduler.submit(vec![job(&engine, i, &requests[i], &sender)]);
    (0..3).for_each(|i| submit(i).unwrap());
    let Err(Refused::QueueFull { n_queued, wait }) = submit(4) else { panic!("no room") };
    assert!(n_queued >= 2 && wait <= Duration::from_secs(60));
    // Those who are refused come again one after the other.
    let Err(Refused::QueueFull { wait: later, .. }) = submit(4) else { panic!("no room") };
    assert!(later > wait, "{later:?} {wait:?}");
    for i in [1, 2, 0] {
        requests[i].cancel.cancel();
        scheduler.wake();
        let (index, _, outcome) = next(&receiver);
        assert_eq!((index, outcome.unwrap().finish), (i, FinishReason::Cancelled));
    }
    scheduler.close();
    assert_eq!(submit(4), Err(Refused::Closed));
}

/// Runs all jobs of a scheduler; returns what it has counted.
fn run_all(core: &mut Core<Note>) -> Arc<Status> {
    while core.step() {}
    core.board().read()
}

#[test]
fn a_prompt_of_several_jobs_is_computed_once() {
    let engine = demo(EngineOptions { n_ubatch: Some(64), ..EngineOptions::default() });
    let sessions = (0..3).map(|_| engine.new_session().unwrap()).collect();
    let mut core = Core::new(&engine, sessions, 0.5, 0);
    let notes = Arc::new(Mutex::new(Vec::new()));
    let long: Vec<u32> = (0..300).map(|i| i % 150 + 10).collect();
    for _ in 0..3 {
        core.submit(noted(&engine, long.clone(), 2, |_| Note {
            name: "job",
            notes: notes.clone(),
            cancel: None,
        }));
    }
    let counts = run_all(&mut core).counts;
    assert_eq!(notes.lock().unwrap().iter().filter(|note| **note == "end").count(), 3);
    // The last token of each is computed, and less than a page beside it.
    assert!((302..300 + 2 * 65).contains(&counts.n_prompt), "{counts:?}");
}

#[test]
fn a_text_whose_session_another_one_took_comes_back_in_pages() {
    let engine = demo(EngineOptions::default());
    let notes = Arc::new(Mutex::new(Vec::new()));
    let text = |first: u32| (0..200).map(|i| first + i % 150).collect::<Vec<u32>>();
    for (page_bytes, n_reused) in [(0, 0), (64 << 20, 192)] {
        let mut core = Core::new(&engine, vec![engine.new_session().unwrap()], 0.5, page_bytes);
        for first in [10, 200, 10] {
            core.submit(noted(&engine, text(first), 2, |_| Note {
                name: "job",
                notes: notes.clone(),
                cancel: None,
            }));
        }
        let status = run_all(&mut core);
        assert_eq!(status.counts.n_reused, n_reused);
        assert_eq!(status.n_pages > 0, page_bytes > 0);
    }
}

/// A disk that cannot read one place.
#[derive(Debug, Default)]
struct BadPlace {
    /// The offset of a byte, and 0 for none.
    bad: AtomicU64,
    /// Offsets of reads.
    seen: Mutex<Vec<u64>>,
}

impl Faults for BadPlace {
    fn after(&self, read: &Read, result: std::io::Result<usize>) -> std::io::Result<usize> {
        let bad = self.bad.load(Ordering::SeqCst);
        if (read.offset..read.offset + read.len as u64).contains(&bad) {
            return Err(std::io::Error::other("a bad sector"));
        }
        self.seen.lock().unwrap().push(read.offset);
        result
    }
}

/// With an expert that cannot be read: the texts that need it fail, whoever they share passes with,
/// and all others are what they are alone.
#[test]
fn a_failed_read_fails_the_texts_that_needed_it() {
    let disk = Arc::new(BadPlace::default());
    let hooks = TestHooks { faults: Some(disk.clone()), ..TestHooks::default() };
    let policy = "on-demand".parse().unwrap();
    let options = EngineOptions {
        ram: "20%".parse().unwrap(),
        policy,
        test: hooks,
        ..EngineOptions::default()
    };
    let all = requests(&demo(EngineOptions::default()), 10);
    let (mut n_failed, mut n_whole) = (0, 0);
    let reads = {
        let engine = demo(options.clone());
        alone(&engine, &all[..1]);
        disk.seen.lock().unwrap().clone()
    };
    for bad in reads.iter().rev().step_by(reads.len() / 4) {
        disk.bad.store(bad + 1, Ordering::SeqCst);
        let engine = demo(options.clone());
        let mut generator = Generator::new(&engine).unwrap();
        let mut one = |request: &Request| {
            generator.clear();
            let mut text = String::new();
            let outcome = generator.generate(request, &mut |more: &str| {
                text.push_str(more);
                Ok(())
            });
            outcome.ok().map(|outcome| (text, outcome.finish))
        };
        let expected: Vec<_> = all.iter().map(&mut one).collect();
        let options =
            SchedulerOptions { n_parallel: 4, n_queue: 10, ..SchedulerOptions::default() };
        let scheduler = Scheduler::start(&engine, options).unwrap();
        let (sender, receiver) = channel();
        let jobs = (0..all.len()).map(|i| job(&engine, i, &all[i], &sender));
        scheduler.submit(jobs.collect()).unwrap();
        for _ in 0..all.len() {
            let (index, text, outcome) = next(&receiver);
            let got = outcome.ok().map(|outcome| (text, outcome.finish));
            assert!(got == expected[index], "text {index}: {got:?}");
            n_failed += usize::from(got.is_none());
            n_whole += usize::from(got.is_some());
        }
        at_rest(&engine);
    }
    assert!(n_failed > 0 && n_whole > 0, "{n_failed} of texts failed, {n_whole} did not");
}
