//! A device that fails under a model: memory that is refused, a device that is lost at any
//! operation, the user's interruption in the middle of a pass. Each ends in a sentence, or on the
//! CPU if the device was auto-detected; nothing hangs, nothing is left behind, and the next request
//! is served.

use common::{convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::{Config, Faults};
use moeba::backend::gpu::{Device, Emulated};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{
    CacheType, DeviceChoice, Engine, EngineOptions, EvalHooks, Recorder, RouteRows, Session,
    TestHooks, Want,
};
use moeba::experts::disk::{Faults as DiskFaults, Read};
use moeba::forward::gpu::{GpuOptions, InPlace};
use moeba::gguf::Gguf;
use moeba::model::{Bound, Model};
use moeba::policy::Profile;
use moeba::{Error, Result, interrupt};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::time::{Duration, Instant};

const PROMPT: usize = 7;
const DECODED: usize = 3;
const N_CTX: usize = 16;

// ---- what tests share

static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Keeps warnings.
struct Log;

impl log::Log for Log {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record) {
        if self.enabled(record.metadata()) {
            SAID.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// Warnings since the last call that begin so.
fn said(start: &str) -> Vec<String> {
    let said = std::mem::take(&mut *SAID.lock().unwrap());
    said.into_iter().filter(|text| text.starts_with(start)).collect()
}

/// One test at a time, as interruptions, warnings and panics are everybody's. At its end no thread
/// has panicked.
struct Turn {
    _turn: MutexGuard<'static, ()>,
    _watch: Sender<()>,
    _dir: tempfile::TempDir,
    path: PathBuf,
}

/// A longer run counts as hanging.
const PATIENCE: Duration = Duration::from_secs(900);

impl Turn {
    fn new(name: &'static str) -> Turn {
        static ONCE: Once = Once::new();
        let turn = crate::turn();
        ONCE.call_once(|| {
            log::set_logger(&Log).unwrap();
            log::set_max_level(log::LevelFilter::Warn);
            let hook = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                PANICS.fetch_add(1, SeqCst);
                hook(panic);
            }));
        });
        PANICS.store(0, SeqCst);
        SAID.lock().unwrap().clear();
        interrupt::clear();
        let (watch, end) = channel();
        std::thread::spawn(move || {
            if end.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{name} hangs");
                std::process::exit(1);
            }
        });
        let dir = tempfile::tempdir().unwrap();
        let path = convert_golden("qwen3moe", "q8_0", dir.path());
        Turn { _turn: turn, _watch: watch, _dir: dir, path }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        interrupt::clear();
        if !std::thread::panicking() {
            assert_eq!(PANICS.load(SeqCst), 0, "a thread has panicked");
        }
    }
}

fn options(config: Config) -> EngineOptions {
    let device = DeviceChoice::Emulated(config);
    EngineOptions { device, n_ctx: Some(N_CTX), ..golden_options() }
}

fn with_faults(faults: Faults) -> EngineOptions {
    options(Config { seed: 1, faults, ..Config::default() })
}

fn alloc_at(n: u64) -> Faults {
    Faults { alloc_at: Some(n), ..Faults::default() }
}

fn try_load(path: &Path, options: &EngineOptions) -> Result<Arc<Engine>> {
    Engine::load(path, options, &mut |_| ())
}

fn tokens() -> Vec<u32> {
    (0..PROMPT + DECODED).map(|i| 3 + (i as u32 * 37) % 90).collect()
}

/// The prompt and the tokens after it, as they are evaluated.
fn parts(tokens: &[u32]) -> impl Iterator<Item = &[u32]> {
    let (prompt, decoded) = tokens.split_at(PROMPT);
    std::iter::once(prompt).chain(decoded.chunks(1))
}

/// Bits of the logits behind the prompt and each token after it.
fn answer(engine: &Arc<Engine>) -> Vec<u32> {
    let mut session = engine.new_session().unwrap();
    let mut out = Vec::new();
    for part in parts(&tokens()) {
        eval(&mut session, part, &mut out).unwrap();
    }
    out
}

fn eval(session: &mut Session, tokens: &[u32], out: &mut Vec<u32>) -> Result<()> {
    let last = session.eval(tokens, Want::Last)?.all();
    out.extend(last.iter().map(|v| v.to_bits()));
    Ok(())
}

/// Nothing is pinned, once what was foretold has come or failed.
fn at_rest(model: &Model) {
    let start = Instant::now();
    while !model.hierarchy().check_integrity() {
        assert!(start.elapsed() < Duration::from_secs(60), "experts are still pinned");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn expect_sentence(why: &Error, words: &[&str]) {
    assert!(matches!(why, Error::Device(_)), "{why:?}");
    let text = why.to_string();
    assert!(!text.contains('\n'), "{text}");
    words.iter().for_each(|word| assert!(text.contains(word), "{text}: no {word}"));
}

// ---- memory that is refused

/// A model by itself, so that the device can be asked afterwards.
fn model(path: &Path) -> Model {
    Bound::new(Gguf::open_with(path, &[]).unwrap()).unwrap().in_place()
}

/// The engine's options for all of so many devices.
fn gpu_options(path: &Path, devices: usize) -> GpuOptions {
    let options = options(Config { devices, ..Config::default() });
    let part = Engine::plan_of(path, &options).unwrap().device.expect("on the device").plan;
    assert!(part.expert_budget_bytes() > 0);
    GpuOptions {
        layers: part.gpu_layers.clone(),
        head: part.head_on_device,
        experts: part.experts_on_cpu.iter().map(|on_cpu| !on_cpu).collect(),
        expert_budgets: part.devices.iter().map(|d| d.expert_budget_bytes).collect(),
        policy: options.policy,
        profile: Profile::default(),
        lockstep: false,
        n_ubatch: N_CTX,
        n_ctx: N_CTX,
        is_exact: false,
        cpu_share: None,
        in_place: InPlace::IfFaster,
        by_layer: false,
    }
}

/// Loads the model and makes room for a session.
fn onto(path: &Path, gpus: &[Device], options: &GpuOptions) -> Result<()> {
    let mut model = model(path);
    let loaded = model.onto(gpus, options)?;
    loaded.new_cache(&model, N_CTX, [CacheType::F32; 2]).map(drop)
}

fn expect_empty(gpu: &Device) {
    let memory = gpu.memory().unwrap();
    assert_eq!(memory.free_bytes, memory.total_bytes, "memory of the device is not given back");
    assert_eq!(Arc::strong_count(gpu), 1, "somebody still has the device");
}

/// The names in the messages of refused allocations, one after the other.
fn refused_allocations(turn: &Turn, devices: usize) -> Vec<String> {
    let options = gpu_options(&turn.path, devices);
    let mut sentences = Vec::new();
    for n in 0.. {
        let config = Config { devices, seed: n, faults: alloc_at(n), ..Config::default() };
        let gpus = Emulated::devices(&config);
        let result = onto(&turn.path, &gpus, &options);
        gpus.iter().for_each(expect_empty);
        let Err(why) = result else { break };
        expect_sentence(&why, &["no room for ", "B of ", "(-", "emulated GPU", "has no room"]);
        sentences.push(why.to_string());
        // The next time it is there.
        onto(&turn.path, &gpus, &options).unwrap();
        gpus.iter().for_each(expect_empty);
    }
    sentences
}

#[test]
fn each_allocation_that_is_refused_is_a_sentence_and_leaves_nothing() {
    let turn = Turn::new("allocations");
    let whats = refused_allocations(&turn, 1);
    let named = |what| whats.iter().any(|text| text.contains(what));
    for what in ["dense weights (-ngl)", "micro-batch (-ub", "experts (--vram)", "KV cache (-c"] {
        assert!(named(what), "{what}: {whats:?}");
    }
}

#[test]
fn a_peers_allocation_that_is_refused_names_it() {
    let turn = Turn::new("a peer's allocations");
    let sentences = refused_allocations(&turn, 2);
    let of_peer: Vec<_> = sentences.iter().filter(|text| text.contains("GPU 1")).collect();
    for what in ["micro-batch (-ub", "experts (--vram)"] {
        assert!(of_peer.iter().any(|text| text.contains(what)), "{what}: {of_peer:?}");
    }
}

#[test]
fn what_cannot_be_pinned_is_a_sentence_or_slower() {
    let turn = Turn::new("pins");
    for devices in [1, 2] {
        let options = gpu_options(&turn.path, devices);
        let (mut n_sentences, mut n_slower) = (0, 0);
        for n in 0.. {
            let faults = Faults { pin_at: Some(n), ..Faults::default() };
            let config = Config { devices, seed: n, faults, ..Config::default() };
            let gpus = Emulated::devices(&config);
            said("");
            let result = onto(&turn.path, &gpus, &options);
            gpus.iter().for_each(expect_empty);
            match result {
                Err(why) => {
                    n_sentences += 1;
                    expect_sentence(&why, &["no room for ", "in pinned memory", "--device cpu"]);
                    onto(&turn.path, &gpus, &options).unwrap();
                }
                Ok(()) if said("experts go to the GPU through pageable memory").len() == 1 => {
                    n_slower += 1;
                }
                Ok(()) => break,
            }
        }
        assert!(n_sentences >= 4 * devices, "{n_sentences} sentences");
        assert!(n_slower >= devices, "{n_slower} slower");
    }
}

#[test]
fn an_engine_says_what_had_no_room_and_the_next_one_loads() {
    let turn = Turn::new("engines");
    let expected = answer(&load(&turn.path, &with_faults(Faults::default())));
    let mut n_failed = 0;
    let engine = loop {
        match try_load(&turn.path, &with_faults(alloc_at(n_failed))) {
            Ok(engine) => break engine,
            Err(why) => expect_sentence(&why, &["no room for ", "(-"]),
        }
        n_failed += 1;
    };
    assert!(n_failed >= 4, "{n_failed}");
    // Of the first session now.
    let why = engine.new_session().err().expect("no room for a KV cache");
    expect_sentence(&why, &["no room for ", "KV cache", "-c"]);
    assert!(answer(&engine) == expected);
}

/// While a model is loaded, a session opened, and in the middle of a prompt and of tokens.
#[test]
fn a_stream_event_or_graph_that_is_refused_is_a_sentence_and_the_next_try_goes_on() {
    let turn = Turn::new("streams, events and graphs");
    let some_there = |faults| {
        let vram = "60%".parse().unwrap();
        EngineOptions {
            vram,
            test: TestHooks { cpu_share: Some(0.4), ..Default::default() },
            ..with_faults(faults)
        }
    };
    let expected = answer(&load(&turn.path, &some_there(Faults::default())));
    let (mut refused, mut is_refused) = (BTreeSet::new(), true);
    let mut hear = |why: Error| {
        expect_sentence(&why, &["emulated GPU 0 could not make "]);
        refused.insert(why.to_string());
    };
    for n in (0..).step_by(STRIDE_OF_MADE) {
        if !std::mem::take(&mut is_refused) {
            break;
        }
        let faults = Faults { make_at: Some(n), ..Faults::default() };
        let engine = match try_load(&turn.path, &some_there(faults)) {
            Ok(engine) => engine,
            Err(why) => {
                hear(why);
                is_refused = true;
                continue;
            }
        };
        let (mut session, mut out) = (engine.new_session().unwrap(), Vec::new());
        for part in parts(&tokens()) {
            let (past, before) = (session.n_past(), out.len());
            let Err(why) = eval(&mut session, part, &mut out) else { continue };
            hear(why);
            is_refused = true;
            assert_eq!((session.n_past(), out.len()), (past, before));
            at_rest(engine.model());
            eval(&mut session, part, &mut out).unwrap();
        }
        assert!(out == expected, "number {n}");
    }
    assert_eq!(refused.len(), 3, "{refused:?}");
}

const STRIDE_OF_MADE: usize = 3;

// ---- a device that was not asked for

#[test]
fn the_cpu_takes_the_place_of_an_auto_detected_device() {
    let turn = Turn::new("auto");
    let cpu = EngineOptions { device: DeviceChoice::Cpu, ..options(Config::default()) };
    let expected = answer(&load(&turn.path, &cpu));
    let lost_at = |op| Faults { lost_at_op: Some(op), ..Faults::default() };
    // The allocations of one device, and some of those of two; the last are a peer's.
    let one = (0..4).map(alloc_at).chain([0, 5].map(lost_at)).map(|faults| (1, faults));
    let two = [1, 4, 5, 6, 7].map(|n| (2, alloc_at(n)));
    let mut n_of_peer = 0;
    for (devices, faults) in one.chain(two) {
        let config = Config { devices, is_auto: true, faults, ..Config::default() };
        said("");
        let engine = load(&turn.path, &options(config.clone()));
        let said = said("running on the CPU: ");
        assert_eq!(said.len(), 1, "{said:?}");
        n_of_peer += usize::from(said[0].contains("emulated GPU 1"));
        assert!(said[0].contains("emulated GPU"), "{said:?}");
        assert!(engine.plan().device.is_none());
        assert!(answer(&engine) == expected);
        // A flag that only devices heed is a wish.
        let vram = "50%".parse().unwrap();
        let asked = EngineOptions { vram, ..options(config) };
        expect_sentence(&try_load(&turn.path, &asked).err().expect("an error"), &["emulated"]);
    }
    assert!(n_of_peer > 0);
    // Not even a plan.
    let small = Config { memory_bytes: 64 << 10, is_auto: true, ..Config::default() };
    let engine = load(&turn.path, &options(small.clone()));
    assert_eq!(said("running on the CPU: ").len(), 1);
    assert!(engine.plan().device.is_none() && answer(&engine) == expected);
    let named = Config { is_auto: false, ..small };
    assert!(try_load(&turn.path, &options(named)).is_err(), "it was asked for");
}

// ---- a device that is lost

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Load,
    Session,
    Prompt,
    Decode,
    Nowhere,
}

const LOST: [&str; 2] = ["emulated GPU 0 was lost", "emulated GPU 1 was lost"];

/// Answers which one.
fn expect_lost(result: Result<()>) -> usize {
    let why = result.expect_err("the device is lost");
    assert!(matches!(why, Error::Device(_)), "{why:?}");
    let device = LOST.iter().position(|lost| why.to_string() == *lost);
    device.unwrap_or_else(|| panic!("{why}"))
}

/// The stage in which it is lost; every part is told from then on, and everything ends. `Decode`
/// and `Prompt` with the device.
fn stage_of_loss(path: &Path, options: &EngineOptions) -> (Stage, usize) {
    let engine = match try_load(path, options) {
        Ok(engine) => engine,
        Err(why) => return (Stage::Load, expect_lost(Err(why))),
    };
    let sessions: Result<Vec<Session>> = (0..2).map(|_| engine.new_session()).collect();
    let mut sessions = match sessions {
        Ok(sessions) => sessions,
        Err(why) => return (Stage::Session, expect_lost(Err(why))),
    };
    let (all, mut stage) = (tokens(), Stage::Prompt);
    for part in parts(&all) {
        let past = sessions[0].n_past();
        if let Err(why) = eval(&mut sessions[0], part, &mut Vec::new()) {
            let device = expect_lost(Err(why));
            assert_eq!(sessions[0].n_past(), past);
            for session in &mut sessions {
                assert_eq!(expect_lost(eval(session, &all[..1], &mut Vec::new())), device);
                assert_eq!(expect_lost(eval(session, &all[..PROMPT], &mut Vec::new())), device);
            }
            at_rest(engine.model());
            // A session takes memory of the first device alone.
            if device == 0 {
                expect_lost(engine.new_session().map(drop));
            }
            return (stage, device);
        }
        stage = Stage::Decode;
    }
    (Stage::Nowhere, 0)
}

/// A device of so many is lost at every so many operations, from `first` to the last; at others in
/// between, while there is a device that no decode has lost.
fn lost_of(devices: usize, name: &'static str, vram: &str, cpu_share: Option<f32>, first: u64) {
    let turn = Turn::new(name);
    let mut found = Vec::new();
    let mut starts = (first..).step_by(STRIDE / 4).take(4);
    let is_lost = |found: &[_], device| found.contains(&(Stage::Decode, device));
    while !(0..devices).all(|device| is_lost(&found, device)) {
        let start = starts.next().unwrap_or_else(|| panic!("{name}: a device is never lost"));
        lost_from(start, devices, &turn.path, vram, cpu_share, &mut found);
    }
    let count = |stage| found.iter().filter(|(s, _)| *s == stage).count();
    let [load, prompt, decode] = [Stage::Load, Stage::Prompt, Stage::Decode].map(count);
    eprintln!("{name}: lost {load} times at load, {prompt} in prompts, {decode} in decodes");
    assert!(load >= 2 && prompt >= 2 && decode >= 4, "{load}, {prompt}, {decode}");
}

/// Adds the stages of loss, each STRIDE operations after the one before.
fn lost_from(
    start: u64,
    devices: usize,
    path: &Path,
    vram: &str,
    cpu_share: Option<f32>,
    found: &mut Vec<(Stage, usize)>,
) {
    for op in (start..).step_by(STRIDE) {
        let faults = Faults { lost_at_op: Some(op), ..Faults::default() };
        let config = Config { devices, seed: op, faults, ..Config::default() };
        let options = EngineOptions {
            test: TestHooks { cpu_share, ..Default::default() },
            vram: vram.parse().unwrap(),
            ..options(config)
        };
        found.push(stage_of_loss(path, &options));
        if found.ends_with(&[(Stage::Nowhere, 0)]) {
            break;
        }
    }
}

fn lost(name: &'static str, vram: &str, cpu_share: Option<f32>, first: u64) {
    lost_of(1, name, vram, cpu_share, first);
}

const STRIDE: usize = 29;

#[test]
fn lost_with_all_experts_in_vram() {
    lost("all experts in VRAM", "100%", None, 0);
}

#[test]
fn lost_while_experts_are_brought() {
    lost("experts are brought", "50%", Some(0.0), 3);
}

#[test]
fn lost_while_the_cpu_does_its_share() {
    lost("the CPU's share", "50%", Some(0.4), 11);
    lost("the CPU's experts", "50%", Some(1.0), 17);
}

#[test]
fn one_of_two_devices_is_lost() {
    // Odd steps, so that seeds are odd and even.
    lost_of(2, "all experts on two", "100%", None, 7);
    lost_of(2, "the CPU's share beside two", "60%", Some(0.4), 11);
}

// ---- a model with an encoder

const SOURCE: [u32; 9] = [5, 9, 33, 71, 12, 8, 101, 44, 3];

/// The result for a source text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    NotLoaded,
    NotRead,
    NotAnswered,
    All,
}

fn source_and_answer(path: &Path, options: &EngineOptions) -> Said {
    let loaded = try_load(path, options);
    let mut session = match loaded.and_then(|engine| engine.new_session()) {
        Ok(session) => session,
        Err(why) => {
            expect_lost(Err(why));
            return Said::NotLoaded;
        }
    };
    if let Err(why) = session.encode(&SOURCE) {
        expect_lost(Err(why));
        // It has read nothing.
        let why = eval(&mut session, &[0], &mut Vec::new()).unwrap_err().to_string();
        assert!(why.contains("source text"), "{why}");
        expect_lost(session.encode(&SOURCE[..1]));
        return Said::NotRead;
    }
    for (past, part) in [&[0, 7, 9][..], &[4], &[11]].into_iter().enumerate() {
        let before = session.n_past();
        if let Err(why) = eval(&mut session, part, &mut Vec::new()) {
            expect_lost(Err(why));
            assert!(session.n_past() == before && (before > 0) == (past > 0));
            expect_lost(eval(&mut session, part, &mut Vec::new()));
            return Said::NotAnswered;
        }
    }
    Said::All
}

#[test]
fn lost_under_a_source_text_and_its_answer() {
    let turn = Turn::new("an encoder");
    let path = convert_golden("switch", "q8_0", turn.path.parent().unwrap());
    for (first, cpu_share) in [(5, None), (9, Some(0.4))] {
        let mut said = Vec::new();
        for op in (first..).step_by(STRIDE) {
            let faults = Faults { lost_at_op: Some(op), ..Faults::default() };
            let config = Config { seed: op, faults, ..Config::default() };
            let vram = "50%".parse().unwrap();
            said.push(source_and_answer(
                &path,
                &EngineOptions {
                    test: TestHooks { cpu_share, ..Default::default() },
                    vram,
                    ..options(config)
                },
            ));
            if said.ends_with(&[Said::All]) {
                break;
            }
        }
        let count = |what| said.iter().filter(|s| **s == what).count();
        let [unread, unanswered] = [Said::NotRead, Said::NotAnswered].map(count);
        assert!(unread >= 2 && unanswered >= 2, "{said:?}");
    }
    // Ctrl-C before a text: it is not read, and the next one is.
    let engine = load(&path, &options(Config::default()));
    let mut session = engine.new_session().unwrap();
    session.encode(&SOURCE).unwrap();
    interrupt::set();
    assert!(matches!(session.encode(&SOURCE), Err(Error::Interrupted)));
    interrupt::clear();
    assert!(eval(&mut session, &[0], &mut Vec::new()).is_err(), "a text that was not read");
    session.encode(&SOURCE).unwrap();
    eval(&mut session, &[0], &mut Vec::new()).unwrap();
}

// ---- interruptions and failed reads

/// Presses Ctrl-C when the router of a layer has chosen, some passes on.
struct Press {
    after: usize,
}

impl Recorder for Press {
    fn routed(&mut self, _layer: usize, _route: RouteRows<'_>, _hidden: &[f32]) {
        match self.after {
            0 => {}
            1 => {
                interrupt::set();
                self.after = 0;
            }
            _ => self.after -= 1,
        }
    }
}

#[test]
fn an_interrupted_prompt_goes_on_where_it_was() {
    let turn = Turn::new("interrupted prompts");
    let vram = "50%".parse().unwrap();
    let base = with_faults(Faults::default());
    let options = EngineOptions {
        vram,
        n_ubatch: Some(2),
        test: TestHooks { cpu_share: Some(0.4), ..Default::default() },
        ..base
    };
    let engine = load(&turn.path, &options);
    let expected = answer(&engine);
    let all = tokens();
    let n_layers = engine.n_layers();
    for after in 1..=2 * n_layers {
        let mut session = engine.new_session().unwrap();
        let mut out = Vec::new();
        let mut press = Press { after };
        let hooks = EvalHooks { recorder: Some(&mut press), ..EvalHooks::default() };
        let result = session.eval_with(&all[..PROMPT], Want::None, hooks);
        interrupt::clear();
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
        // Those whose pass was over, and no part of one.
        let (past, passes) = (session.n_past(), after.div_ceil(n_layers));
        assert!(past == 2 * passes || past == 2 * (passes - 1), "{past} after {after}");
        at_rest(engine.model());
        eval(&mut session, &all[past..PROMPT], &mut out).unwrap();
        for token in &all[PROMPT..] {
            eval(&mut session, &[*token], &mut out).unwrap();
        }
        assert!(out == expected, "interrupted after {after} layers");
    }
}

/// A hand in the reads of experts. Both count down, and 0 is never.
#[derive(Debug, Default)]
struct Hand {
    /// Presses Ctrl-C at the so-manieth read from now.
    presses_at: AtomicUsize,
    /// Fails all from the so-manieth read on.
    fails_from: AtomicUsize,
}

impl DiskFaults for Hand {
    fn before(&self, _read: &Read) -> Duration {
        let count = |n: usize| n.checked_sub(1);
        if self.presses_at.fetch_update(SeqCst, SeqCst, count) != Ok(1) {
            return Duration::ZERO;
        }
        interrupt::set();
        // Whoever waits for it sees the one before the other.
        Duration::from_millis(20)
    }

    fn after(&self, _read: &Read, result: io::Result<usize>) -> io::Result<usize> {
        let count = |n: usize| (n > 1).then(|| n - 1);
        match self.fails_from.fetch_update(SeqCst, SeqCst, count) {
            Err(1) => Err(io::Error::from_raw_os_error(libc::EIO)),
            _ => result,
        }
    }
}

/// As much of the model in memory and in VRAM as it takes to read from the disk at every token.
fn three_tiers(turn: &Turn, (devices, cpu_share): (usize, f32), hand: &Arc<Hand>) -> EngineOptions {
    let base = options(Config { devices, seed: 1, ..Config::default() });
    let least = load(&turn.path, &base).plan().sizes.minimum_bytes;
    EngineOptions {
        vram: "50%".parse().unwrap(),
        ram: RamBudget::Bytes(least),
        test: TestHooks {
            cpu_share: Some(cpu_share),
            faults: Some(hand.clone()),
            ..Default::default()
        },
        ..base
    }
}

/// Tokens that are decoded while a layer waits for experts out of all three tiers; `start` makes
/// something go wrong, at each a little later, and `end` mends it.
fn decoded_in_spite_of(
    turn: &Turn,
    way: (usize, f32),
    hand: &Arc<Hand>,
    (start, end): (&dyn Fn(usize), &dyn Fn()),
    is_expected: &dyn Fn(&Error) -> bool,
) -> usize {
    let engine = load(&turn.path, &three_tiers(turn, way, hand));
    let expected = answer(&engine);
    let (mut n_failed, mut nth) = (0, 0);
    for _ in 0..3 {
        let mut session = engine.new_session().unwrap();
        let (all, mut out) = (tokens(), Vec::new());
        let (prompt, decoded) = all.split_at(PROMPT);
        eval(&mut session, prompt, &mut out).unwrap();
        for token in decoded {
            let (past, before) = (session.n_past(), out.len());
            nth += 1;
            start(nth);
            let result = eval(&mut session, &[*token], &mut out);
            end();
            let Err(why) = result else { continue };
            assert!(is_expected(&why), "{why:?}");
            assert_eq!((session.n_past(), out.len()), (past, before));
            n_failed += 1;
            at_rest(engine.model());
            eval(&mut session, &[*token], &mut out).unwrap();
        }
        assert!(out == expected, "{way:?}");
    }
    n_failed
}

#[test]
fn an_interrupted_token_can_be_decoded_again() {
    let turn = Turn::new("interrupted tokens");
    let mut n_failed = 0;
    for way in [(1, 0.0), (1, 0.4), (1, 1.0), (2, 0.0), (2, 0.4)] {
        let hand = Arc::new(Hand::default());
        let start = |nth: usize| hand.presses_at.store(nth, SeqCst);
        let end = || {
            hand.presses_at.store(0, SeqCst);
            interrupt::clear();
        };
        let is_expected = |why: &Error| matches!(why, Error::Interrupted);
        let n = decoded_in_spite_of(&turn, way, &hand, (&start, &end), &is_expected);
        n_failed += n;
    }
    assert!(n_failed > 0, "no token was interrupted");
}

/// Layers whose experts are brought (a share of 0), and layers whose experts the CPU computes (1)
/// while the device, which has the next layer in its queue, waits for the host's word.
#[test]
fn a_token_whose_experts_could_not_be_read_can_be_decoded_again() {
    let turn = Turn::new("failed reads");
    let (mut n_failed, layers) = (0, Mutex::new(BTreeSet::new()));
    for way in [(1, 0.0), (1, 0.4), (1, 1.0), (2, 0.0), (2, 0.4)] {
        let hand = Arc::new(Hand::default());
        let start = |nth: usize| hand.fails_from.store(1 + 2 * (nth % 3), SeqCst);
        let end = || hand.fails_from.store(0, SeqCst);
        let is_expected = |why: &Error| {
            // "expert 3 of layer 1: …"
            let text = why.to_string();
            let layer = text.split_once(" of layer ").and_then(|(_, rest)| rest.split_once(": "));
            let number = layer.and_then(|(number, _)| number.parse::<usize>().ok());
            layers.lock().unwrap().extend(number);
            matches!(why, Error::Load(_)) && number.is_some() && !text.contains('\n')
        };
        let n = decoded_in_spite_of(&turn, way, &hand, (&start, &end), &is_expected);
        eprintln!("{way:?}: {n} tokens failed");
        n_failed += n;
    }
    let layers = layers.into_inner().unwrap();
    assert!(n_failed > 0 && layers.last().is_some_and(|last| *last > 0), "{n_failed}, {layers:?}");
}

/// All of the prompt is one pass, which waits for experts out of all three tiers, so few of them in
/// memory that every pass reads. It may be over before so many reads have begun.
#[test]
fn an_interrupted_pass_of_a_prompt_leaves_nothing_of_it() {
    let turn = Turn::new("interrupted passes");
    let n_interrupted = [(1, 0.0), (1, 0.4), (1, 1.0), (2, 0.4)].map(|way| {
        let hand = Arc::new(Hand::default());
        let options =
            EngineOptions { vram: "25%".parse().unwrap(), ..three_tiers(&turn, way, &hand) };
        let engine = load(&turn.path, &options);
        let expected = answer(&engine);
        let is_interrupted = |nth: &usize| {
            let mut session = engine.new_session().unwrap();
            let (all, mut out) = (tokens(), Vec::new());
            hand.presses_at.store(*nth, SeqCst);
            let result = eval(&mut session, &all[..PROMPT], &mut out);
            hand.presses_at.store(0, SeqCst);
            at_rest(engine.model());
            interrupt::clear();
            if let Err(why) = &result {
                assert!(matches!(why, Error::Interrupted), "{why:?}");
                assert!(session.n_past() == 0 && out.is_empty(), "{nth}");
            }
            for part in parts(&all).skip(usize::from(result.is_ok())) {
                eval(&mut session, part, &mut out).unwrap();
            }
            assert!(out == expected, "interrupted at read {nth}");
            result.is_err()
        };
        (1..8).filter(is_interrupted).count()
    });
    assert!(n_interrupted.iter().all(|n| *n > 1), "{n_interrupted:?}");
}
