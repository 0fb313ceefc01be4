//! The steady state of a decode: a token allocates nothing on any thread, whatever the kind of the
//! model, and puts no thread to sleep between two regions of it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{golden_options, load};
use moeba::engine::plan::ram::{Place, RamBudget};
use moeba::engine::{Engine, EngineOptions, Session, Want};
use moeba::experts::disk::IoKind;
use moeba::sample::{Sampler, SamplerOptions};

/// The system's allocator, which counts what all threads ask of it while `COUNTS` is on.
struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static N_CALLS: AtomicUsize = AtomicUsize::new(0);

fn count() {
    if COUNTS.load(SeqCst) {
        N_CALLS.fetch_add(1, SeqCst);
    }
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time: what is counted is the whole process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls of the allocator while `f` runs.
fn calls(f: impl FnOnce()) -> usize {
    N_CALLS.store(0, SeqCst);
    COUNTS.store(true, SeqCst);
    f();
    COUNTS.store(false, SeqCst);
    N_CALLS.load(SeqCst)
}

/// A text, its last token, and how the next one is found.
struct Decode {
    session: Session,
    token: u32,
    sampler: Sampler,
}

impl Decode {
    fn new(engine: &Arc<Engine>) -> Decode {
        let session = engine.new_session().unwrap();
        let options = SamplerOptions { seed: Some(1), ..SamplerOptions::default() };
        Decode { session, token: 3, sampler: Sampler::new(options).unwrap() }
    }

    /// Appends `n` tokens.
    fn tokens(&mut self, n: usize) {
        for _ in 0..n {
            let Decode { session, token, sampler } = self;
            let fed = [*token];
            *token = sampler.sample(session.eval(&fed, Want::Last).unwrap().all()).unwrap();
            sampler.accept(*token);
        }
    }
}

/// Tokens until buffers have grown, and tokens that are counted.
const WARM_UP: usize = 4;
const COUNTED: usize = 12;

/// Calls in `COUNTED` tokens. A thread's own room grows when it first takes a piece of the largest
/// operation, which one thread alone has done by now; of several, each will have at some time.
fn calls_at_rest(decode: &mut Decode, n_threads: usize) -> usize {
    let rounds = if n_threads == 1 { 1 } else { 4 * n_threads };
    let mut n = 0;
    for _ in 0..rounds {
        n = calls(|| decode.tokens(COUNTED));
        if n == 0 {
            break;
        }
    }
    n
}

/// Every kind of layer that there is.
const MODELS: [(&str, &str); 18] = [
    ("llama", "f32"),
    ("qwen3", "q8_0"),
    ("qwen3moe", "q4_0"),
    ("qwen2moe", "q8_0"),
    ("mixtral", "q4_0"),
    ("olmoe", "f32"),
    ("granitemoe", "f32"),
    ("phimoe", "q8_0"),
    ("gpt_oss", "f32"),
    ("gpt_oss_mxfp4", "f32"),
    ("deepseek_v2", "q8_0"),
    ("deepseek_v3", "f32"),
    ("glm4moe", "f32"),
    ("qwen3next", "f32"),
    ("qwen35moe", "q8_0"),
    ("arctic_mixed", "f32"),
    ("switch", "f32"),
    ("nllb_moe", "f32"),
];

#[test]
fn a_token_of_any_model_in_memory_allocates_nothing() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    for (name, outtype) in MODELS {
        let path = common::convert_golden(name, outtype, dir.path());
        for n_threads in [1, 2] {
            let options = EngineOptions { n_threads: Some(n_threads), ..golden_options() };
            let engine = load(&path, &options);
            assert_eq!(engine.plan().place, Place::InPlace);
            let mut decode = Decode::new(&engine);
            if engine.encoder().is_some() {
                decode.session.encode(&[5, 6, 7, 8]).unwrap();
            }
            decode.tokens(WARM_UP);
            let n = calls_at_rest(&mut decode, n_threads);
            assert_eq!(n, 0, "{name}, {n_threads} threads: calls in {COUNTED} tokens");
        }
    }
}

/// A text that grows beyond what one thread attends to needs room for partial results: once, for
/// each thread and for all, however long it gets.
#[test]
fn a_long_text_allocates_once() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let path = common::convert_golden("qwen3", "f32", dir.path());
    let engine = load(&path, &EngineOptions { n_ctx: Some(2400), ..golden_options() });
    let mut decode = Decode::new(&engine);
    let prompt: Vec<u32> = (0..500).map(|i| 3 + i * 7 % 200).collect();
    decode.session.eval(&prompt, Want::None).unwrap();
    decode.tokens(WARM_UP);
    let at_first = calls(|| decode.tokens(30));
    assert!(at_first <= 1 + engine.n_threads(), "{at_first} calls");
    let later = calls(|| decode.tokens(1800));
    assert!(later <= 2 * engine.n_threads(), "{later} calls in 1800 tokens");
}

/// Experts that are brought from disk cost allocations, those already there none.
#[test]
fn a_token_whose_experts_have_landed_allocates_nothing() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    for name in ["qwen3moe", "deepseek_v3", "gpt_oss"] {
        let path = common::convert_golden(name, "f32", dir.path());
        let ram = RamBudget::Percent(100.0);
        let engine = load(&path, &EngineOptions { ram, io: IoKind::Pread, ..golden_options() });
        assert!(matches!(engine.plan().place, Place::Streamed { .. }));
        let mut decode = Decode::new(&engine);
        // A prompt keeps nothing; a decode keeps the experts that it meets.
        for token in 0..120 {
            decode.session.eval(&[3 + token], Want::None).unwrap();
        }
        let misses = || engine.expert_counters().map(|c| c.misses + c.hits_partial);
        let before = misses();
        decode.tokens(WARM_UP);
        let n = calls_at_rest(&mut decode, engine.n_threads());
        assert_eq!(misses(), before, "{name}: not all experts have landed");
        assert_eq!(n, 0, "{name}: calls in {COUNTED} tokens");
    }
}

/// How often the threads of this process have waited for anything, and how often they had to give
/// way to others.
#[cfg(target_os = "linux")]
fn switches() -> [u64; 2] {
    let mut sums = [0; 2];
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let Ok(status) = std::fs::read_to_string(task.unwrap().path().join("status")) else {
            continue; // it has ended
        };
        for (sum, which) in sums.iter_mut().zip(["voluntary", "nonvoluntary"]) {
            let name = format!("{which}_ctxt_switches:");
            let n = status.lines().find_map(|line| line.strip_prefix(&name)).expect("a count");
            *sum += n.trim().parse::<u64>().unwrap();
        }
    }
    sums
}

/// Steps of a round.
#[cfg(target_os = "linux")]
const STEPS: usize = 16;

/// How long a quiet round may take to come: threads that saw a processor taken away sleep for
/// 10 seconds, whether this system tells of it or not.
#[cfg(target_os = "linux")]
const QUIET_BY: Duration = Duration::from_secs(30);

/// The counts of `switches` over some tokens, each shown for half a millisecond.
#[cfg(target_os = "linux")]
fn switches_of_a_round(decode: &mut Decode) -> [u64; 2] {
    let before = switches();
    for _ in 0..STEPS {
        decode.tokens(1);
        let shown = Instant::now();
        while shown.elapsed() < Duration::from_micros(500) {
            std::hint::spin_loop();
        }
    }
    let [waits, gave_way] = switches();
    [waits - before[0], gave_way - before[1]]
}

/// Threads spin from one region to the next, and over the time that a token is sampled and shown
/// in. Rounds in which other work took a processor away tell nothing.
#[cfg(target_os = "linux")]
#[test]
fn a_decode_puts_no_thread_to_sleep() {
    let _alone = alone();
    if std::thread::available_parallelism().is_ok_and(|n| n.get() < 2) {
        return; // who has no processor of its own must give way
    }
    let dir = tempfile::tempdir().unwrap();
    let path = common::convert_golden("qwen3moe", "q4_0", dir.path());
    let engine = load(&path, &EngineOptions { n_ctx: Some(1000), ..golden_options() });
    let (start, mut waits) = (Instant::now(), Vec::new());
    let is_quiet = |n: &u64| *n < 4;
    while start.elapsed() < QUIET_BY && !waits.iter().any(is_quiet) {
        let mut decode = Decode::new(&engine);
        for _ in 0..50 {
            let [waited, gave_way] = switches_of_a_round(&mut decode);
            waits.extend((gave_way == 0).then_some(waited));
        }
    }
    assert!(waits.is_empty() || waits.iter().any(is_quiet), "waits in {STEPS} tokens: {waits:?}");
    println!("waits in {STEPS} tokens: {waits:?}");
}
